#include <sys/sysinfo.h>

#include "storage/runtime.h"

namespace torch_tpu {

std::pair<size_t, size_t> host_memory_info() {
  struct sysinfo info{};
  if (sysinfo(&info) != 0) return {0, 0};
  return {(info.freeram + info.bufferram) * info.mem_unit, info.totalram * info.mem_unit};
}

}  // namespace torch_tpu
