#include "pjrt/buffer.h"

namespace torch_tpu::pjrt {

Buffer::~Buffer() {
  if (buffer_ == nullptr) return;
  PJRT_Buffer_Destroy_Args d{.struct_size = PJRT_Buffer_Destroy_Args_STRUCT_SIZE, .buffer = buffer_};
  if (PJRT_Error* e = api_->PJRT_Buffer_Destroy(&d)) take_error(api_, e, "PJRT_Buffer_Destroy");
}

Event Buffer::ready() const {
  return Event(api_, PJRT_CALL(api_, PJRT_Buffer_ReadyEvent, .buffer = buffer_).event);
}

Event Buffer::to_host(void* dst, size_t bytes) const {
  auto r = PJRT_CALL(api_, PJRT_Buffer_ToHostBuffer, .src = buffer_, .dst = dst, .dst_size = bytes);
  return Event(api_, r.event);
}

Buffer Buffer::copy_to(PJRT_Device* device) const {
  auto r = PJRT_CALL(api_, PJRT_Buffer_CopyToDevice, .buffer = buffer_, .dst_device = device);
  return Buffer(api_, r.dst_buffer);
}

const void* Buffer::device_pointer() const {
  return PJRT_CALL(api_, PJRT_Buffer_OpaqueDeviceMemoryDataPointer, .buffer = buffer_).device_memory_ptr;
}

size_t Buffer::on_device_bytes() const {
  return PJRT_CALL(api_, PJRT_Buffer_OnDeviceSizeInBytes, .buffer = buffer_).on_device_size_in_bytes;
}

}  // namespace torch_tpu::pjrt
