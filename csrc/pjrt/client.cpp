#include "pjrt/client.h"

namespace torch_tpu::pjrt {

namespace {

constexpr char kFormat[] = "mlir";

PJRT_Program program_of(const std::string& stablehlo) {
  return {.struct_size = PJRT_Program_STRUCT_SIZE,
          .code = const_cast<char*>(stablehlo.data()),
          .code_size = stablehlo.size(),
          .format = kFormat,
          .format_size = sizeof kFormat - 1};
}

std::vector<PJRT_NamedValue> named_values(const Options& options) {
  std::vector<PJRT_NamedValue> out;
  for (const auto& [name, value] : options) {
    PJRT_NamedValue v{.struct_size = PJRT_NamedValue_STRUCT_SIZE,
                      .name = name.data(),
                      .name_size = name.size(),
                      .type = PJRT_NamedValue_kBool,
                      .value_size = 1};
    if (const auto* s = std::get_if<std::string>(&value)) {
      v.type = PJRT_NamedValue_kString;
      v.string_value = s->data();
      v.value_size = s->size();
    } else if (const auto* i = std::get_if<int64_t>(&value)) {
      v.type = PJRT_NamedValue_kInt64;
      v.int64_value = *i;
    } else if (const auto* f = std::get_if<float>(&value)) {
      v.type = PJRT_NamedValue_kFloat;
      v.float_value = *f;
    } else {
      v.bool_value = std::get<bool>(value);
    }
    out.push_back(v);
  }
  return out;
}

// Protobuf wire format, as much of it as CompileOptionsProto needs.
void put_varint(std::string& out, uint64_t value) {
  for (; value >= 0x80; value >>= 7) out.push_back(static_cast<char>(value | 0x80));
  out.push_back(static_cast<char>(value));
}

void put_bytes(std::string& out, int field, const std::string& bytes) {
  put_varint(out, static_cast<uint64_t>(field) << 3 | 2);
  put_varint(out, bytes.size());
  out += bytes;
}

void put_int(std::string& out, int field, uint64_t value) {
  put_varint(out, static_cast<uint64_t>(field) << 3);
  put_varint(out, value);
}

// Fields of ExecutableBuildOptionsProto.
constexpr std::pair<const char*, int> kLevels[] = {{"xla_optimization_level", 24},
                                                   {"xla_memory_fitting_level", 25}};
// ExecutionOptions.EffortLevel of "O0" to "O3".
uint64_t effort(const std::string& level) { return 10 * static_cast<uint64_t>(level.back() - '0') + 9; }

template <class Args>
void require(const PJRT_Api* api, PJRT_Error* (*PJRT_Api::*member)(Args*), const char* function) {
  if (!has_function(api, member)) throw_too_old(api, function);
}

// What no program runs without: found missing at the start rather than in the middle of a model.
void require_functions(const PJRT_Api* api) {
  require(api, &PJRT_Api::PJRT_Event_IsReady, "PJRT_Event_IsReady");
  require(api, &PJRT_Api::PJRT_Event_Await, "PJRT_Event_Await");
  require(api, &PJRT_Api::PJRT_Event_OnReady, "PJRT_Event_OnReady");
  require(api, &PJRT_Api::PJRT_Client_Compile, "PJRT_Client_Compile");
  require(api, &PJRT_Api::PJRT_Client_BufferFromHostBuffer, "PJRT_Client_BufferFromHostBuffer");
  require(api, &PJRT_Api::PJRT_LoadedExecutable_Execute, "PJRT_LoadedExecutable_Execute");
  require(api, &PJRT_Api::PJRT_Buffer_ReadyEvent, "PJRT_Buffer_ReadyEvent");
  require(api, &PJRT_Api::PJRT_Buffer_ToHostBuffer, "PJRT_Buffer_ToHostBuffer");
}

}  // namespace

std::string compile_options(bool portable, const std::map<std::string, std::string>& flags) {
  std::string build;     // ExecutableBuildOptionsProto
  put_int(build, 4, 1);  // num_replicas
  put_int(build, 5, 1);  // num_partitions
  for (const auto& [name, field] : kLevels) {
    if (const auto level = flags.find(name); level != flags.end())
      put_int(build, field, effort(level->second));
  }
  std::string out;  // CompileOptionsProto
  put_bytes(out, 3, build);
  if (portable) put_int(out, 4, 1);
  for (const auto& [name, value] : flags) {  // env_option_overrides: map<string, OptionOverrideProto>
    if (name == kLevels[0].first || name == kLevels[1].first) continue;
    std::string option;
    if (value == "true" || value == "false") {
      put_int(option, 2, value == "true");  // bool_field
    } else {
      put_bytes(option, 1, value);  // string_field: parsed by the compiler according to the option's type
    }
    std::string entry;
    put_bytes(entry, 1, name);
    put_bytes(entry, 2, option);
    put_bytes(out, 7, entry);
  }
  return out;
}

Client::Client(const PJRT_Api* api, const Options& options) : api_(api) {
  require_functions(api);
  const auto values = named_values(options);
  client_ = PJRT_CALL(api, PJRT_Client_Create, .create_options = values.data(), .num_options = values.size())
                .client;
  const auto name = PJRT_CALL(api, PJRT_Client_PlatformName, .client = client_);
  platform_name_.assign(name.platform_name, name.platform_name_size);
  const auto version = PJRT_CALL(api, PJRT_Client_PlatformVersion, .client = client_);
  platform_version_.assign(version.platform_version, version.platform_version_size);
  const auto found = PJRT_CALL(api, PJRT_Client_AddressableDevices, .client = client_);
  for (size_t i = 0; i < found.num_addressable_devices; ++i) {
    PJRT_Device* device = found.addressable_devices[i];
    auto* description = PJRT_CALL(api, PJRT_Device_GetDescription, .device = device).device_description;
    const auto kind = PJRT_CALL(api, PJRT_DeviceDescription_Kind, .device_description = description);
    const auto text = PJRT_CALL(api, PJRT_DeviceDescription_DebugString, .device_description = description);
    devices_.push_back({device,
                        PJRT_CALL(api, PJRT_DeviceDescription_Id, .device_description = description).id,
                        std::string(kind.device_kind, kind.device_kind_size),
                        std::string(text.debug_string, text.debug_string_size)});
  }
  host_addressable_ =
      platform_name_ == "cpu" && has_function(api, &PJRT_Api::PJRT_Buffer_OpaqueDeviceMemoryDataPointer);
}

Executable Client::compile(const std::string& stablehlo, const std::string& options) const {
  const PJRT_Program program = program_of(stablehlo);
  auto r = PJRT_CALL(api_, PJRT_Client_Compile, .client = client_, .program = &program,
                     .compile_options = options.data(), .compile_options_size = options.size());
  return Executable(api_, r.executable);
}

Executable Client::deserialize(const std::string& bytes) const {
  auto r = PJRT_CALL(api_, PJRT_Executable_DeserializeAndLoad, .client = client_,
                     .serialized_executable = bytes.data(), .serialized_executable_size = bytes.size());
  return Executable(api_, r.loaded_executable);
}

Buffer Client::from_host(const void* data, PJRT_Buffer_Type type, const int64_t* dims, size_t rank,
                         PJRT_Device* device, bool during_call, Event* done) const {
  auto r = PJRT_CALL(api_, PJRT_Client_BufferFromHostBuffer, .client = client_, .data = data, .type = type,
                     .dims = dims, .num_dims = rank,
                     .host_buffer_semantics = during_call
                                                  ? PJRT_HostBufferSemantics_kImmutableOnlyDuringCall
                                                  : PJRT_HostBufferSemantics_kImmutableUntilTransferCompletes,
                     .device = device);
  Event event(api_, r.done_with_host_buffer);
  if (done != nullptr) *done = std::move(event);
  return Buffer(api_, r.buffer);
}

std::optional<MemoryStats> Client::memory_stats(PJRT_Device* device) const {
  if (!has_function(api_, &PJRT_Api::PJRT_Device_MemoryStats)) return std::nullopt;
  PJRT_Device_MemoryStats_Args args{.struct_size = PJRT_Device_MemoryStats_Args_STRUCT_SIZE,
                                    .device = device};
  if (PJRT_Error* e = api_->PJRT_Device_MemoryStats(&args)) {
    take_error(api_, e,
               "PJRT_Device_MemoryStats");  // "unimplemented" is how plugins without statistics answer
    return std::nullopt;
  }
  MemoryStats stats{.bytes_in_use = args.bytes_in_use};
  if (args.peak_bytes_in_use_is_set) stats.peak_bytes_in_use = args.peak_bytes_in_use;
  if (args.bytes_limit_is_set) stats.bytes_limit = args.bytes_limit;
  return stats;
}

ProgramStats compile_for_topology(const PJRT_Api* api, const std::string& topology,
                                  const std::string& stablehlo, const std::string& options,
                                  std::string* serialized) {
  auto* description = PJRT_CALL(api, PJRT_TopologyDescription_Create, .topology_name = topology.data(),
                                .topology_name_size = topology.size())
                          .topology;
  const std::shared_ptr<PJRT_TopologyDescription> owner(description, [api](PJRT_TopologyDescription* t) {
    PJRT_TopologyDescription_Destroy_Args d{.struct_size = PJRT_TopologyDescription_Destroy_Args_STRUCT_SIZE,
                                            .topology = t};
    if (PJRT_Error* e = api->PJRT_TopologyDescription_Destroy(&d)) take_error(api, e, "destroy topology");
  });
  const PJRT_Program program = program_of(stablehlo);
  auto* executable = PJRT_CALL(api, PJRT_Compile, .topology = description, .program = &program,
                               .compile_options = options.data(), .compile_options_size = options.size())
                         .executable;
  const std::shared_ptr<PJRT_Executable> owned(executable, [api](PJRT_Executable* x) {
    PJRT_Executable_Destroy_Args d{.struct_size = PJRT_Executable_Destroy_Args_STRUCT_SIZE, .executable = x};
    if (PJRT_Error* e = api->PJRT_Executable_Destroy(&d)) take_error(api, e, "destroy executable");
  });
  const auto m = PJRT_CALL(api, PJRT_Executable_GetCompiledMemoryStats, .executable = executable);
  if (serialized != nullptr) {
    auto r = PJRT_CALL(api, PJRT_Executable_Serialize, .executable = executable);
    serialized->assign(r.serialized_bytes, r.serialized_bytes_size);
    r.serialized_executable_deleter(r.serialized_executable);
  }
  return {.code_bytes = m.generated_code_size_in_bytes,
          .argument_bytes = m.argument_size_in_bytes,
          .output_bytes = m.output_size_in_bytes,
          .alias_bytes = m.alias_size_in_bytes,
          .temp_bytes = m.temp_size_in_bytes};
}

}  // namespace torch_tpu::pjrt
