#include "pjrt/api.h"

#include <dlfcn.h>

#include <map>
#include <mutex>

namespace torch_tpu::pjrt {

namespace {

std::string version(int major, int minor) { return std::to_string(major) + "." + std::to_string(minor); }

const PJRT_Api* open_plugin(const std::string& path) {
  void* lib = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (lib == nullptr) throw Error(PJRT_Error_Code_NOT_FOUND, dlerror());
  auto get = reinterpret_cast<const PJRT_Api* (*)()>(dlsym(lib, "GetPjrtApi"));
  if (get == nullptr) throw Error(PJRT_Error_Code_NOT_FOUND, path + " has no GetPjrtApi: not a PJRT plugin");
  const PJRT_Api* api = get();
  if (api == nullptr) throw Error(PJRT_Error_Code_NOT_FOUND, path + ": GetPjrtApi returned nothing");
  const auto& v = api->pjrt_api_version;
  if (v.major_version != PJRT_API_MAJOR) {
    throw Error(PJRT_Error_Code_UNIMPLEMENTED, "it speaks PJRT " + version(v.major_version, v.minor_version) +
                                                   ", built for " + version(PJRT_API_MAJOR, PJRT_API_MINOR));
  }
  PJRT_CALL(api, PJRT_Plugin_Initialize);
  return api;
}

}  // namespace

const PJRT_Api* load_plugin(const std::string& path) {
  static std::mutex mutex;  // guards `loaded`; dlopen and plugin initialisation run under it
  static std::map<std::string, const PJRT_Api*> loaded;
  std::lock_guard lock(mutex);
  auto [it, fresh] = loaded.try_emplace(path, nullptr);
  if (it->second == nullptr) it->second = open_plugin(path);
  return it->second;
}

Error take_error(const PJRT_Api* api, PJRT_Error* error, const char* function) {
  PJRT_Error_Message_Args m{.struct_size = PJRT_Error_Message_Args_STRUCT_SIZE, .error = error};
  api->PJRT_Error_Message(&m);
  PJRT_Error_GetCode_Args c{.struct_size = PJRT_Error_GetCode_Args_STRUCT_SIZE, .error = error};
  if (PJRT_Error* inner = api->PJRT_Error_GetCode(&c)) {
    c.code = PJRT_Error_Code_UNKNOWN;
    PJRT_Error_Destroy_Args d{.struct_size = PJRT_Error_Destroy_Args_STRUCT_SIZE, .error = inner};
    api->PJRT_Error_Destroy(&d);
  }
  Error result(c.code, std::string(function) + ": " + std::string(m.message, m.message_size));
  PJRT_Error_Destroy_Args d{.struct_size = PJRT_Error_Destroy_Args_STRUCT_SIZE, .error = error};
  api->PJRT_Error_Destroy(&d);
  return result;
}

void throw_too_old(const PJRT_Api* api, const char* function) {
  const auto& v = api->pjrt_api_version;
  throw Error(PJRT_Error_Code_UNIMPLEMENTED, std::string(function) + " is not in this plugin (PJRT " +
                                                 version(v.major_version, v.minor_version) + ", built for " +
                                                 version(PJRT_API_MAJOR, PJRT_API_MINOR) + ")");
}

const PJRT_Extension_Base* find_extension(const PJRT_Api* api, PJRT_Extension_Type type) {
  for (const PJRT_Extension_Base* e = api->extension_start; e != nullptr; e = e->next) {
    if (e->type == type) return e;
  }
  return nullptr;
}

}  // namespace torch_tpu::pjrt
