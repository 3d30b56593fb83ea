// Pinned host memory: page-aligned plain memory that we remember, since PJRT plugins need not have a host
// allocator.
#pragma once

#include <c10/core/Allocator.h>

namespace torch_tpu {

c10::Allocator* host_allocator();
bool is_pinned(const void* data);  // anywhere inside an allocation

}  // namespace torch_tpu
