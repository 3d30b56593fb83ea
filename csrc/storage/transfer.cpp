#include "storage/transfer.h"

#include <ATen/Context.h>

#include "storage/dtype.h"
#include "util/check.h"

namespace torch_tpu {

namespace {

[[noreturn]] void throw_transfer(const pjrt::Error& e, DeviceState& device, int64_t bytes, const char* what) {
  throw_failure({e.code, c10::str(what, " of ", bytes, " bytes on tpu:", static_cast<int>(device.index), ": ",
                                  e.what())});
}

PJRT_Buffer_Type checked_type(c10::ScalarType dtype) {
  const PJRT_Buffer_Type type = pjrt_type(dtype);
  TORCH_TPU_CHECK_WITH(TypeError, E205, type != PJRT_Buffer_Type_INVALID, dtype,
                       " has no StableHLO element type, so \"tpu\" cannot hold it.",
                       Fix("convert on the CPU first, for example x.to(torch.float32).to('tpu')."));
  return type;
}

}  // namespace

BufferRef buffer_from_host(DeviceState& device, const void* data, c10::ScalarType dtype, DimsRef dims) {
  const PJRT_Buffer_Type type = checked_type(dtype);
  const int64_t bytes = numel_of(dims) * static_cast<int64_t>(c10::elementSize(dtype));
  try {
    pjrt::Event done;
    pjrt::Buffer buffer = device.with_memory(true, [&] {
      return Runtime::get().client().from_host(data, type, dims.data(), dims.size(), device.device.handle,
                                               /*during_call=*/true, &done);
    });
    return c10::make_intrusive<DeviceBuffer>(device, std::move(buffer), dtype, dims);
  } catch (const pjrt::Error& e) {
    throw_transfer(e, device, bytes, "transfer from the host");
  }
}

BufferRef zeros_buffer(DeviceState& device, c10::ScalarType dtype, DimsRef dims) {
  const std::vector<char> zeros(static_cast<size_t>(numel_of(dims)) * c10::elementSize(dtype));
  return buffer_from_host(device, zeros.data(), dtype, dims);
}

void buffer_to_host(DeviceBuffer& buffer, void* dst) {
  if (buffer.bytes == 0) return buffer.wait();
  if (buffer.failure() != nullptr) throw_failure(*buffer.failure());
  std::optional<pjrt::Error> error;
  try {
    error = buffer.array().to_host(dst, static_cast<size_t>(buffer.bytes)).await();
  } catch (const pjrt::Error& e) {
    error = e;
  }
  if (!error) return;
  buffer.wait();  // what made the contents failed: says so
  throw_transfer(*error, buffer.device, buffer.bytes, "transfer to the host");
}

const void* host_pointer(DeviceBuffer& buffer) {
  if (!Runtime::get().client().host_addressable()) return nullptr;
  buffer.wait();
  try {
    return buffer.array().device_pointer();
  } catch (const pjrt::Error& e) {
    throw_transfer(e, buffer.device, buffer.bytes, "host read");
  }
}

BufferRef retyped(const BufferRef& buffer, c10::ScalarType dtype, DimsRef dims) {
  if (const void* data = host_pointer(*buffer)) return buffer_from_host(buffer->device, data, dtype, dims);
  std::vector<char> bytes(static_cast<size_t>(buffer->bytes));
  buffer_to_host(*buffer, bytes.data());
  return buffer_from_host(buffer->device, bytes.data(), dtype, dims);
}

BufferRef buffer_on(const BufferRef& buffer, DeviceState& device) {
  if (&buffer->device == &device) return buffer;
  if (buffer->failure() != nullptr) {
    return c10::make_intrusive<DeviceBuffer>(device, buffer->failure(), buffer->dtype, buffer->dims);
  }
  try {
    pjrt::Buffer copy =
        device.with_memory(true, [&] { return buffer->array().copy_to(device.device.handle); });
    return c10::make_intrusive<DeviceBuffer>(device, std::move(copy), buffer->dtype, buffer->dims);
  } catch (const pjrt::Error& e) {
    throw_transfer(e, device, buffer->bytes, "transfer between devices");
  }
}

}  // namespace torch_tpu
