// A client of a plugin: its devices, compilation, host transfers. Also compilation for a topology without
// devices.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "pjrt/executable.h"

namespace torch_tpu::pjrt {

using Options = std::map<std::string, std::variant<std::string, int64_t, bool, float>>;

struct Device {
  PJRT_Device* handle;
  int id;
  std::string kind;        // for example "TPU v6e"
  std::string debug_text;  // the plugin's own description
};

struct MemoryStats {
  int64_t bytes_in_use;
  std::optional<int64_t> peak_bytes_in_use, bytes_limit;
};

// What a compiled program costs, as the compiler reports it.
struct ProgramStats {
  int64_t code_bytes = 0, argument_bytes = 0, output_bytes = 0, alias_bytes = 0, temp_bytes = 0;
};

// Serialised CompileOptionsProto for one replica and one partition; `portable` programs run on any device of
// the client. `flags` are XLA debug options by name ("xla_allow_excess_precision": "false"), and two levels,
// O0 to O3: xla_optimization_level, xla_memory_fitting_level.
std::string compile_options(bool portable, const std::map<std::string, std::string>& flags);

class Client {
 public:
  // Throws Error. The client is never destroyed: buffers of static lifetime may outlive main().
  Client(const PJRT_Api* api, const Options& options);
  Client(const Client&) = delete;

  const PJRT_Api* api() const { return api_; }
  const std::string& platform_name() const { return platform_name_; }
  const std::string& platform_version() const { return platform_version_; }
  const std::vector<Device>& devices() const { return devices_; }
  // True where device memory can be read through Buffer::device_pointer (the CPU plugin).
  bool host_addressable() const { return host_addressable_; }

  // StableHLO text to a loaded program. Blocks for milliseconds to minutes: hold neither a lock nor the GIL.
  Executable compile(const std::string& stablehlo, const std::string& options) const;
  Executable deserialize(const std::string& bytes) const;
  // Copies dense row-major host data. With `during_call` the data may change once this returns; else it must
  // live until `*done` is ready.
  Buffer from_host(const void* data, PJRT_Buffer_Type type, const int64_t* dims, size_t rank,
                   PJRT_Device* device, bool during_call, Event* done) const;
  std::optional<MemoryStats> memory_stats(PJRT_Device* device) const;

 private:
  const PJRT_Api* api_;
  PJRT_Client* client_;
  std::string platform_name_, platform_version_;
  std::vector<Device> devices_;
  bool host_addressable_ = false;
};

// Compiles for a slice that is not attached ("v5e:2x2"); returns the compiler's figures and, on request, the
// serialised executable. Throws Error.
ProgramStats compile_for_topology(const PJRT_Api* api, const std::string& topology,
                                  const std::string& stablehlo, const std::string& options,
                                  std::string* serialized);

}  // namespace torch_tpu::pjrt
