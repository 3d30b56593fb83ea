#include "pjrt/executable.h"

namespace torch_tpu::pjrt {

namespace {

// The unloaded half of a loaded executable; serialisation and statistics hang on it.
struct Unloaded {
  Unloaded(const PJRT_Api* api, PJRT_LoadedExecutable* loaded)
      : api(api),
        get(PJRT_CALL(api, PJRT_LoadedExecutable_GetExecutable, .loaded_executable = loaded).executable) {}
  Unloaded(const Unloaded&) = delete;
  ~Unloaded() {
    PJRT_Executable_Destroy_Args d{.struct_size = PJRT_Executable_Destroy_Args_STRUCT_SIZE,
                                   .executable = get};
    if (PJRT_Error* e = api->PJRT_Executable_Destroy(&d)) take_error(api, e, "PJRT_Executable_Destroy");
  }
  const PJRT_Api* api;
  PJRT_Executable* get;
};

}  // namespace

Executable::~Executable() {
  if (loaded_ == nullptr) return;
  PJRT_LoadedExecutable_Destroy_Args d{.struct_size = PJRT_LoadedExecutable_Destroy_Args_STRUCT_SIZE,
                                       .executable = loaded_};
  if (PJRT_Error* e = api_->PJRT_LoadedExecutable_Destroy(&d)) {
    take_error(api_, e, "PJRT_LoadedExecutable_Destroy");
  }
}

Event Executable::launch(const Launch& launch) const {
  PJRT_ExecuteOptions options{.struct_size = PJRT_ExecuteOptions_STRUCT_SIZE,
                              .non_donatable_input_indices = launch.keep,
                              .num_non_donatable_input_indices = launch.num_keep};
  PJRT_Buffer* const* arg_lists[1] = {launch.args};
  PJRT_Buffer** out_lists[1] = {launch.outs};
  PJRT_Event* done[1] = {nullptr};
  PJRT_CALL(api_, PJRT_LoadedExecutable_Execute, .executable = loaded_, .options = &options,
            .argument_lists = arg_lists, .num_devices = 1, .num_args = launch.num_args,
            .output_lists = out_lists, .device_complete_events = done, .execute_device = launch.device);
  return Event(api_, done[0]);
}

std::string Executable::serialize() const {
  const Unloaded unloaded(api_, loaded_);
  auto r = PJRT_CALL(api_, PJRT_Executable_Serialize, .executable = unloaded.get);
  std::string bytes(r.serialized_bytes, r.serialized_bytes_size);
  r.serialized_executable_deleter(r.serialized_executable);
  return bytes;
}

std::string Executable::optimized_program() const {
  if (!has_function(api_, &PJRT_Api::PJRT_Executable_OptimizedProgram)) return {};
  const Unloaded unloaded(api_, loaded_);
  PJRT_Program program{.struct_size = PJRT_Program_STRUCT_SIZE};
  PJRT_Executable_OptimizedProgram_Args args{.struct_size = PJRT_Executable_OptimizedProgram_Args_STRUCT_SIZE,
                                             .executable = unloaded.get,
                                             .program = &program};
  std::string text;
  for (int pass = 0; pass < 2; ++pass) {  // the size, then the program
    if (PJRT_Error* e = api_->PJRT_Executable_OptimizedProgram(&args)) {
      take_error(api_, e, "PJRT_Executable_OptimizedProgram");  // optional in practice
      return {};
    }
    if (pass == 0) text.resize(program.code_size);
    program.code = text.data();
  }
  return text;
}

int64_t Executable::code_bytes() const {
  if (!has_function(api_, &PJRT_Api::PJRT_Executable_SizeOfGeneratedCodeInBytes)) return 0;
  const Unloaded unloaded(api_, loaded_);
  PJRT_Executable_SizeOfGeneratedCodeInBytes_Args args{
      .struct_size = PJRT_Executable_SizeOfGeneratedCodeInBytes_Args_STRUCT_SIZE, .executable = unloaded.get};
  if (PJRT_Error* e = api_->PJRT_Executable_SizeOfGeneratedCodeInBytes(&args)) {
    take_error(api_, e, "PJRT_Executable_SizeOfGeneratedCodeInBytes");  // optional in practice
    return 0;
  }
  return args.size_in_bytes;
}

}  // namespace torch_tpu::pjrt
