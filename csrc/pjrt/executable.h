// A compiled program, loaded on the devices of a client.
#pragma once

#include <string>

#include "pjrt/buffer.h"

namespace torch_tpu::pjrt {

class Executable {
 public:
  Executable(const PJRT_Api* api, PJRT_LoadedExecutable* loaded) : api_(api), loaded_(loaded) {}
  Executable(Executable&& o) noexcept : api_(o.api_), loaded_(std::exchange(o.loaded_, nullptr)) {}
  Executable& operator=(Executable&&) = delete;
  ~Executable();

  struct Launch {
    PJRT_Device* device;
    PJRT_Buffer* const* args;
    size_t num_args;
    PJRT_Buffer** outs;   // filled; as many as the program has results
    const int64_t* keep;  // indices of arguments that must not be donated although the program may alias them
    size_t num_keep;
  };
  // Starts the program; small ones may run in the caller. Returns the completion event. Throws Error if it
  // could not be started: then `outs` is untouched, but donated arguments may be consumed.
  Event launch(const Launch& launch) const;

  std::string serialize() const;
  std::string optimized_program() const;  // in the plugin's format; empty where it has none
  int64_t code_bytes() const;             // 0 where the plugin cannot tell

 private:
  const PJRT_Api* api_;
  PJRT_LoadedExecutable* loaded_;
};

}  // namespace torch_tpu::pjrt
