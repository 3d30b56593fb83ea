// A PJRT plugin that goes wrong on demand: the real plugin of $STUB_PLUGIN_REAL, between it and the caller
// this file.
//
// Tests steer it through the C functions at the end, by ctypes:
//
//   stub_fail_*(n, code)   the n-th call from now fails with `code`; 0 turns it off
//   stub_hold()            launches from now on do not complete, although they run, until stub_release()
//
// $STUB_PLUGIN_API makes it a plugin that does not fit: old (ends before PJRT_LoadedExecutable_Execute),
// major (another major version), garbage, or null (no API at all). $STUB_PLUGIN_PLATFORM is the platform's
// name: any but "cpu" is one whose memory the host cannot read.
#include <dlfcn.h>
#include <pjrt_c_api.h>

#include <algorithm>
#include <condition_variable>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

namespace {

const PJRT_Api* g_real = nullptr;
PJRT_Api g_api;

std::mutex g_mutex;  // guards all below; no call into the real plugin is made under it
std::condition_variable g_released;

// ---- errors: ours beside the real plugin's

struct StubError {
  PJRT_Error_Code code;
  std::string text;
};
std::set<const void*> g_errors;

PJRT_Error* make_error(int code, const char* what) {
  auto* error = new StubError{static_cast<PJRT_Error_Code>(code), std::string("stub: ") + what};
  const std::lock_guard lock(g_mutex);
  g_errors.insert(error);
  return reinterpret_cast<PJRT_Error*>(error);
}

const StubError* ours(const PJRT_Error* error) {
  const std::lock_guard lock(g_mutex);
  return g_errors.count(error) != 0 ? reinterpret_cast<const StubError*>(error) : nullptr;
}

void error_destroy(PJRT_Error_Destroy_Args* args) {
  const StubError* error = ours(args->error);
  if (error == nullptr) return g_real->PJRT_Error_Destroy(args);
  {
    const std::lock_guard lock(g_mutex);
    g_errors.erase(error);
  }
  delete error;
}

void error_message(PJRT_Error_Message_Args* args) {
  const StubError* error = ours(args->error);
  if (error == nullptr) return g_real->PJRT_Error_Message(args);
  args->message = error->text.data();
  args->message_size = error->text.size();
}

PJRT_Error* error_code(PJRT_Error_GetCode_Args* args) {
  const StubError* error = ours(args->error);
  if (error == nullptr) return g_real->PJRT_Error_GetCode(args);
  args->code = error->code;
  return nullptr;
}

// ---- what is to go wrong

struct Countdown {
  int left = 0, times = 0, code = 0;

  // The code of the failure if this is a call that fails, else 0.
  int hit() {
    const std::lock_guard lock(g_mutex);
    if (left > 0) --left;
    return left == 0 && times > 0 ? (--times, code) : 0;
  }
  // The n-th call from now and those behind it, `t` in all, are to fail.
  void set(int n, int c, int t = 1) {
    const std::lock_guard lock(g_mutex);
    left = n;
    code = c;
    times = t;
  }
};
Countdown g_fail_compile, g_fail_execute, g_fail_event, g_fail_host_buffer, g_fail_deserialize;

// What becomes of one launch; its results share it.
struct Fate {
  bool held = false;
  int code = 0;
};
using FatePtr = std::shared_ptr<Fate>;

bool g_hold = false;
std::vector<FatePtr> g_held;
std::vector<std::function<void()>> g_callbacks;   // of held events
std::map<const PJRT_Buffer*, FatePtr> g_buffers;  // those with a fate

FatePtr fate_of(const PJRT_Buffer* buffer) {
  const std::lock_guard lock(g_mutex);
  const auto it = g_buffers.find(buffer);
  return it == g_buffers.end() ? nullptr : it->second;
}

// ---- events: every one the caller sees is ours

struct StubEvent {
  PJRT_Event* real;
  FatePtr fate;  // null: as the real one
};

PJRT_Event* wrap(PJRT_Event* real, FatePtr fate) {
  return real == nullptr ? nullptr : reinterpret_cast<PJRT_Event*>(new StubEvent{real, std::move(fate)});
}
StubEvent* stub_event(PJRT_Event* event) { return reinterpret_cast<StubEvent*>(event); }

bool is_held(const StubEvent& event) {
  const std::lock_guard lock(g_mutex);
  return event.fate != nullptr && event.fate->held;
}

PJRT_Error* await_real(PJRT_Event* real) {
  PJRT_Event_Await_Args args{.struct_size = PJRT_Event_Await_Args_STRUCT_SIZE, .event = real};
  return g_real->PJRT_Event_Await(&args);
}

PJRT_Error* event_destroy(PJRT_Event_Destroy_Args* args) {
  const std::unique_ptr<StubEvent> event(stub_event(args->event));
  PJRT_Event_Destroy_Args real{.struct_size = PJRT_Event_Destroy_Args_STRUCT_SIZE, .event = event->real};
  return g_real->PJRT_Event_Destroy(&real);
}

PJRT_Error* event_is_ready(PJRT_Event_IsReady_Args* args) {
  const StubEvent& event = *stub_event(args->event);
  PJRT_Event_IsReady_Args real{.struct_size = PJRT_Event_IsReady_Args_STRUCT_SIZE, .event = event.real};
  PJRT_Error* error = g_real->PJRT_Event_IsReady(&real);
  args->is_ready = real.is_ready && !is_held(event);
  return error;
}

PJRT_Error* event_await(PJRT_Event_Await_Args* args) {
  const StubEvent& event = *stub_event(args->event);
  if (event.fate != nullptr) {
    std::unique_lock lock(g_mutex);
    g_released.wait(lock, [&] { return !event.fate->held; });
  }
  if (PJRT_Error* error = await_real(event.real)) return error;
  const int code = event.fate == nullptr ? 0 : event.fate->code;
  return code == 0 ? nullptr : make_error(code, "the program failed while it ran");
}

PJRT_Error* event_error(PJRT_Event_Error_Args* args) {
  PJRT_Event_Await_Args await{.struct_size = PJRT_Event_Await_Args_STRUCT_SIZE, .event = args->event};
  return event_await(&await);
}

PJRT_Error* event_on_ready(PJRT_Event_OnReady_Args* args) {
  const StubEvent& event = *stub_event(args->event);
  if (event.fate == nullptr) {
    PJRT_Event_OnReady_Args real = *args;
    real.event = event.real;
    return g_real->PJRT_Event_OnReady(&real);
  }
  if (PJRT_Error* error = await_real(event.real)) return error;
  const auto call = [fate = event.fate, callback = args->callback, arg = args->user_arg] {
    callback(fate->code == 0 ? nullptr : make_error(fate->code, "the program failed while it ran"), arg);
  };
  {
    const std::lock_guard lock(g_mutex);
    if (event.fate->held) {
      g_callbacks.emplace_back(call);
      return nullptr;
    }
  }
  call();
  return nullptr;
}

// ---- programs and buffers

PJRT_Error* compile(PJRT_Client_Compile_Args* args) {
  if (const int code = g_fail_compile.hit()) return make_error(code, "the program was refused");
  return g_real->PJRT_Client_Compile(args);
}

PJRT_Error* deserialize(PJRT_Executable_DeserializeAndLoad_Args* args) {
  if (const int code = g_fail_deserialize.hit()) return make_error(code, "the executable was refused");
  return g_real->PJRT_Executable_DeserializeAndLoad(args);
}

size_t num_outputs(PJRT_LoadedExecutable* loaded) {
  PJRT_LoadedExecutable_GetExecutable_Args get{
      .struct_size = PJRT_LoadedExecutable_GetExecutable_Args_STRUCT_SIZE, .loaded_executable = loaded};
  if (g_real->PJRT_LoadedExecutable_GetExecutable(&get) != nullptr) std::abort();
  PJRT_Executable_NumOutputs_Args num{.struct_size = PJRT_Executable_NumOutputs_Args_STRUCT_SIZE,
                                      .executable = get.executable};
  if (g_real->PJRT_Executable_NumOutputs(&num) != nullptr) std::abort();
  PJRT_Executable_Destroy_Args destroy{.struct_size = PJRT_Executable_Destroy_Args_STRUCT_SIZE,
                                       .executable = get.executable};
  if (g_real->PJRT_Executable_Destroy(&destroy) != nullptr) std::abort();
  return num.num_outputs;
}

PJRT_Error* execute(PJRT_LoadedExecutable_Execute_Args* args) {
  if (const int code = g_fail_execute.hit()) return make_error(code, "the program did not start");
  FatePtr fate = std::make_shared<Fate>(Fate{.code = g_fail_event.hit()});
  for (size_t i = 0; i < args->num_args; ++i) {  // what reads a failed result fails
    const FatePtr input = fate_of(args->argument_lists[0][i]);
    if (input != nullptr && input->code != 0) fate->code = input->code;
  }
  if (PJRT_Error* error = g_real->PJRT_LoadedExecutable_Execute(args)) return error;
  const size_t n = num_outputs(args->executable);
  {
    const std::lock_guard lock(g_mutex);
    fate->held = g_hold;
    if (fate->held) g_held.push_back(fate);
    if (!fate->held && fate->code == 0) fate = nullptr;
    for (size_t i = 0; fate != nullptr && i < n; ++i) g_buffers[args->output_lists[0][i]] = fate;
  }
  if (args->device_complete_events != nullptr) {
    args->device_complete_events[0] = wrap(args->device_complete_events[0], fate);
  }
  return nullptr;
}

PJRT_Error* from_host(PJRT_Client_BufferFromHostBuffer_Args* args) {
  if (const int code = g_fail_host_buffer.hit()) return make_error(code, "no room for the buffer");
  PJRT_Error* error = g_real->PJRT_Client_BufferFromHostBuffer(args);
  if (error == nullptr) args->done_with_host_buffer = wrap(args->done_with_host_buffer, nullptr);
  return error;
}

PJRT_Error* buffer_destroy(PJRT_Buffer_Destroy_Args* args) {
  {
    const std::lock_guard lock(g_mutex);
    g_buffers.erase(args->buffer);
  }
  return g_real->PJRT_Buffer_Destroy(args);
}

PJRT_Error* ready_event(PJRT_Buffer_ReadyEvent_Args* args) {
  PJRT_Error* error = g_real->PJRT_Buffer_ReadyEvent(args);
  if (error == nullptr) args->event = wrap(args->event, fate_of(args->buffer));
  return error;
}

PJRT_Error* to_host(PJRT_Buffer_ToHostBuffer_Args* args) {
  PJRT_Error* error = g_real->PJRT_Buffer_ToHostBuffer(args);
  if (error == nullptr) args->event = wrap(args->event, fate_of(args->src));
  return error;
}

PJRT_Error* platform_name(PJRT_Client_PlatformName_Args* args) {
  const char* name = std::getenv("STUB_PLUGIN_PLATFORM");
  if (name == nullptr || *name == '\0') return g_real->PJRT_Client_PlatformName(args);
  args->platform_name = name;
  args->platform_name_size = std::strlen(name);
  return nullptr;
}

bool make_api() {
  void* lib = dlopen(std::getenv("STUB_PLUGIN_REAL"), RTLD_NOW | RTLD_LOCAL);
  if (lib == nullptr) return false;
  g_real = reinterpret_cast<const PJRT_Api* (*)()>(dlsym(lib, "GetPjrtApi"))();
  std::memcpy(&g_api, g_real, std::min(g_real->struct_size, sizeof g_api));
  g_api.PJRT_Error_Destroy = error_destroy;
  g_api.PJRT_Error_Message = error_message;
  g_api.PJRT_Error_GetCode = error_code;
  g_api.PJRT_Event_Destroy = event_destroy;
  g_api.PJRT_Event_IsReady = event_is_ready;
  g_api.PJRT_Event_Error = event_error;
  g_api.PJRT_Event_Await = event_await;
  g_api.PJRT_Event_OnReady = event_on_ready;
  g_api.PJRT_Client_PlatformName = platform_name;
  g_api.PJRT_Client_Compile = compile;
  g_api.PJRT_Client_BufferFromHostBuffer = from_host;
  g_api.PJRT_Executable_DeserializeAndLoad = deserialize;
  g_api.PJRT_LoadedExecutable_Execute = execute;
  g_api.PJRT_Buffer_Destroy = buffer_destroy;
  g_api.PJRT_Buffer_ReadyEvent = ready_event;
  g_api.PJRT_Buffer_ToHostBuffer = to_host;
  const char* fit = std::getenv("STUB_PLUGIN_API");
  const std::string api = fit == nullptr ? "" : fit;
  if (api == "old") {
    g_api.struct_size = offsetof(PJRT_Api, PJRT_LoadedExecutable_Execute);
    g_api.pjrt_api_version.minor_version = 7;
  }
  if (api == "major") g_api.pjrt_api_version.major_version = PJRT_API_MAJOR + 1;
  if (api == "garbage") std::memset(&g_api, 0xA5, sizeof g_api);
  return api != "null";
}

}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT const PJRT_Api* GetPjrtApi() {
  static const bool made = make_api();
  return made ? &g_api : nullptr;
}

EXPORT void stub_fail_compile(int n, int code) { g_fail_compile.set(n, code); }
EXPORT void stub_fail_deserialize(int n, int code) { g_fail_deserialize.set(n, code); }
// The launch itself fails; nothing runs.
EXPORT void stub_fail_execute(int n, int code) { g_fail_execute.set(n, code); }
EXPORT void stub_fail_executes(int n, int code, int times) { g_fail_execute.set(n, code, times); }
// The program runs, then its completion event and its results carry the error.
EXPORT void stub_fail_event(int n, int code) { g_fail_event.set(n, code); }
EXPORT void stub_fail_host_buffer(int n, int code) { g_fail_host_buffer.set(n, code); }
EXPORT void stub_fail_host_buffers(int n, int code, int times) { g_fail_host_buffer.set(n, code, times); }

EXPORT void stub_hold() {
  const std::lock_guard lock(g_mutex);
  g_hold = true;
}

EXPORT void stub_release() {
  std::vector<std::function<void()>> callbacks;
  {
    const std::lock_guard lock(g_mutex);
    g_hold = false;
    for (const FatePtr& fate : g_held) fate->held = false;
    g_held.clear();
    callbacks.swap(g_callbacks);
  }
  g_released.notify_all();
  for (const auto& call : callbacks) call();
}
