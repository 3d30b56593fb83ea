// What holds device memory, for people.
#pragma once

#include <string>

namespace torch_tpu {

// The arrays that live tensors hold, alike ones on one line, the largest lines first; no newline at the end.
std::string memory_table();

}  // namespace torch_tpu
