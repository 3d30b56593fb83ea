// Synthetic addresses for storages: ranges of a reservation that is never mapped, unique while in use.
#pragma once

#include <cstddef>

namespace torch_tpu {

// Room for `bytes`, rounded up to a power of two of at least 64; nullptr for 0 bytes. Thread-safe.
void* take_address(size_t bytes);
void return_address(void* address, size_t bytes);

}  // namespace torch_tpu
