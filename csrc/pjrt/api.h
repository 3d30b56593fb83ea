// The PJRT C API of one plugin, and the only function that calls into it.
//
//   auto r = PJRT_CALL(api, PJRT_Client_PlatformName, .client = client);
//   std::string_view name(r.platform_name, r.platform_name_size);
//
// PJRT_CALL fills struct_size, refuses a function that this plugin is too old to have, and turns a PJRT_Error
// into pjrt::Error with the function's name. Handles (client.h, buffer.h, ...) own what they are given by
// RAII. This folder knows nothing of torch: it builds and tests without it.
#pragma once

#include <pjrt_c_api.h>

#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>

namespace torch_tpu::pjrt {

struct Error : std::runtime_error {
  Error(PJRT_Error_Code code, const std::string& text) : std::runtime_error(text), code(code) {}
  PJRT_Error_Code code;
};

// Loads `path` and initialises the plugin, once per path; the result lives as long as the process.
// Throws Error(NOT_FOUND) if the file cannot be loaded and Error(UNIMPLEMENTED) on another major version.
const PJRT_Api* load_plugin(const std::string& path);

// Code and message of `error`, which is destroyed.
Error take_error(const PJRT_Api* api, PJRT_Error* error, const char* function);
[[noreturn]] void throw_too_old(const PJRT_Api* api, const char* function);

// The extension of `type`, or nullptr: every extension is optional.
const PJRT_Extension_Base* find_extension(const PJRT_Api* api, PJRT_Extension_Type type);

template <class Args>
bool has_function(const PJRT_Api* api, PJRT_Error* (*PJRT_Api::*member)(Args*)) {
  const auto offset = reinterpret_cast<const char*>(&(api->*member)) - reinterpret_cast<const char*>(api);
  return static_cast<size_t>(offset) + sizeof(void*) <= api->struct_size && api->*member != nullptr;
}

template <class Args>
Args call(const PJRT_Api* api, PJRT_Error* (*PJRT_Api::*member)(Args*), const char* function, Args args) {
  if (!has_function(api, member)) throw_too_old(api, function);
  if (PJRT_Error* error = (api->*member)(&args)) throw take_error(api, error, function);
  return args;
}

#define PJRT_CALL(api, Fn, ...)       \
  ::torch_tpu::pjrt::call<Fn##_Args>( \
      api, &PJRT_Api::Fn, #Fn, Fn##_Args{.struct_size = Fn##_Args_STRUCT_SIZE __VA_OPT__(, ) __VA_ARGS__})

}  // namespace torch_tpu::pjrt
