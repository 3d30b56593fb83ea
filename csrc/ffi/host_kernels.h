// ATen's kernels inside XLA programs of the CPU plugin: FFI handlers that programs call by name.
//
// A product runs in the caller's thread on ATen's BLAS instead of XLA's own. torch_tpu/lowering/host.py
// decides where.
#pragma once

#include "pjrt/api.h"

namespace torch_tpu {

// Registers the handlers with a plugin. False if it has no FFI extension, or one that does not take handlers
// of our version: then no program may call them.
bool register_host_kernels(const PJRT_Api* api);

}  // namespace torch_tpu
