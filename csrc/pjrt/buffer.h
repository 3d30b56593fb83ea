// Device memory of the plugin: one immutable array.
#pragma once

#include "pjrt/event.h"

namespace torch_tpu::pjrt {

// Owns a PJRT_Buffer. Thread-safe as far as PJRT is: reads from many threads, destruction by one.
class Buffer {
 public:
  Buffer() = default;
  Buffer(const PJRT_Api* api, PJRT_Buffer* buffer) : api_(api), buffer_(buffer) {}
  Buffer(Buffer&& o) noexcept : api_(o.api_), buffer_(std::exchange(o.buffer_, nullptr)) {}
  Buffer& operator=(Buffer&& o) noexcept {
    std::swap(api_, o.api_);
    std::swap(buffer_, o.buffer_);
    return *this;
  }
  ~Buffer();

  PJRT_Buffer* get() const { return buffer_; }
  explicit operator bool() const { return buffer_ != nullptr; }

  // Ready when the program or transfer that defines the buffer has run; carries its error.
  Event ready() const;
  // Starts a copy to `dst` in dense row-major order; `dst` must live until the event is ready.
  Event to_host(void* dst, size_t bytes) const;
  // A copy on another device of the same client.
  Buffer copy_to(PJRT_Device* device) const;
  // Address in the memory of the device. Only where that memory is the host's may it be read, after ready().
  const void* device_pointer() const;
  size_t on_device_bytes() const;

 private:
  const PJRT_Api* api_ = nullptr;
  PJRT_Buffer* buffer_ = nullptr;
};

}  // namespace torch_tpu::pjrt
