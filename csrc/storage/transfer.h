// Host <-> device transfers of whole buffers.
#pragma once

#include "storage/storage.h"

namespace torch_tpu {

// A new buffer with a copy of dense row-major host data. The data may be reused on return. Blocks for the
// copy.
BufferRef buffer_from_host(DeviceState& device, const void* data, c10::ScalarType dtype, DimsRef dims);
BufferRef zeros_buffer(DeviceState& device, c10::ScalarType dtype, DimsRef dims);
// The contents in dense row-major order. Blocks.
void buffer_to_host(DeviceBuffer& buffer, void* dst);
// Address of the contents where the host can read it, else nullptr. Waits for the contents. Valid while
// `buffer` is.
const void* host_pointer(DeviceBuffer& buffer);
// The same bytes as another element type; dims must name as many bytes. Goes through the host: for data that
// just came from there (a state dict read as bytes), where compiling a program for each shape would cost
// more.
BufferRef retyped(const BufferRef& buffer, c10::ScalarType dtype, DimsRef dims);
// A copy on another device.
BufferRef buffer_on(const BufferRef& buffer, DeviceState& device);

}  // namespace torch_tpu
