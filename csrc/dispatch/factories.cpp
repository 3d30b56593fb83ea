// New tensors without contents, and tensors that take another storage or size.

#include <ATen/EmptyTensor.h>
#include <ATen/InferSize.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/new_empty_strided_native.h>
#include <torch/library.h>

#include "storage/dtype.h"
#include "storage/storage.h"
#include "util/check.h"

namespace torch_tpu {

namespace {

c10::Device device_of(std::optional<c10::Device> device) {
  if (device && device->has_index()) return *device;
  return c10::impl::getDeviceGuardImpl(c10::DeviceType::PrivateUse1)->getDevice();
}

c10::ScalarType checked_dtype(std::optional<c10::ScalarType> dtype) {
  const c10::ScalarType t = dtype.value_or(c10::get_default_dtype_as_scalartype());
  TORCH_TPU_CHECK_WITH(TypeError, E205, pjrt_type(t) != PJRT_Buffer_Type_INVALID, t,
                       " has no StableHLO element type, so \"tpu\" cannot hold it.",
                       Fix("convert on the CPU first, for example x.to(torch.float32).to('tpu')."));
  return t;
}

at::Tensor filled_if_asked(at::Tensor t) {
  const at::Context& cx = at::globalContext();
  if (t.numel() == 0 || !cx.deterministicAlgorithms() || !cx.deterministicFillUninitializedMemory()) return t;
  if (t.is_floating_point() || t.is_complex()) return t.fill_(std::numeric_limits<double>::quiet_NaN());
  if (t.scalar_type() == c10::ScalarType::Bool) return t.fill_(true);
  const int bits = static_cast<int>(8 * t.itemsize()) - (c10::isSignedType(t.scalar_type()) ? 1 : 0);
  return t.fill_(
      static_cast<int64_t>(bits == 63 ? std::numeric_limits<int64_t>::max() : (int64_t{1} << bits) - 1));
}

at::Tensor new_tensor(at::IntArrayRef size, at::OptionalIntArrayRef stride,
                      std::optional<c10::ScalarType> dtype, std::optional<c10::Layout> layout,
                      std::optional<c10::Device> device, std::optional<bool> pin_memory,
                      std::optional<c10::MemoryFormat> format) {
  TORCH_CHECK_NOT_IMPLEMENTED(layout.value_or(c10::kStrided) == c10::kStrided,
                              "\"tpu\" tensors are strided, not ", layout.value_or(c10::kStrided));
  TORCH_CHECK(!pin_memory.value_or(false), "Only dense CPU tensors can be pinned");
  at::detail::check_size_nonnegative(size);
  const c10::ScalarType type = checked_dtype(dtype);
  const c10::Device where = device_of(device);
  const c10::DeviceGuard guard(where);
  auto* allocator = c10::GetAllocator(c10::DeviceType::PrivateUse1);
  const c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  at::Tensor t = stride ? at::Tensor(at::detail::empty_strided_generic(size, *stride, allocator, keys, type))
                        : at::Tensor(at::detail::empty_generic(size, allocator, keys, type, format));
  return filled_if_asked(std::move(t));
}

at::Tensor empty(at::IntArrayRef size, std::optional<c10::ScalarType> dtype,
                 std::optional<c10::Layout> layout, std::optional<c10::Device> device,
                 std::optional<bool> pin_memory, std::optional<c10::MemoryFormat> format) {
  return new_tensor(size, std::nullopt, dtype, layout, device, pin_memory, format);
}

at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<c10::ScalarType> dtype,
                         std::optional<c10::Layout> layout, std::optional<c10::Device> device,
                         std::optional<bool> pin_memory) {
  return new_tensor(size, stride, dtype, layout, device, pin_memory, std::nullopt);
}

// Room for the sizes; contents that fit are kept.
void reserve(c10::StorageImpl& storage, int64_t bytes) {
  if (static_cast<int64_t>(storage.nbytes()) >= bytes) return;
  at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(
      c10::Storage(c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(&storage)), static_cast<size_t>(bytes));
}

const at::Tensor& resize(const at::Tensor& self, at::IntArrayRef size,
                         std::optional<c10::MemoryFormat> format) {
  auto* impl = self.unsafeGetTensorImpl();
  if (self.sizes() != size) {
    const auto bytes = static_cast<int64_t>(at::detail::computeStorageNbytesContiguous(
        size, self.itemsize(), static_cast<size_t>(self.storage_offset())));
    impl->set_sizes_contiguous(size);
    if (self.numel() != 0) reserve(*impl->unsafe_storage().unsafeGetStorageImpl(), bytes);
  }
  if (format) {
    TORCH_CHECK(*format != c10::MemoryFormat::Preserve, "Unsupported memory format", *format);
    impl->empty_tensor_restride(*format);
  }
  return self;
}

at::Tensor& set_storage_sizes(at::Tensor& self, at::Storage storage, int64_t offset, at::IntArrayRef size,
                              at::IntArrayRef stride) {
  at::native::checkSetStorage(self, storage, offset, size, stride);
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_offset(offset);
  const at::OptionalIntArrayRef strides =
      stride.data() != nullptr ? at::OptionalIntArrayRef(stride) : std::nullopt;
  if (strides) {
    impl->set_sizes_and_strides(size, *strides);
  } else {
    impl->set_sizes_contiguous(size);
  }
  if (self.numel() != 0) {
    const size_t bytes = at::detail::computeStorageNbytes(self.sizes(), self.strides(), self.itemsize(),
                                                          static_cast<size_t>(offset));
    reserve(*impl->unsafe_storage().unsafeGetStorageImpl(), static_cast<int64_t>(bytes));
  }
  return self;
}

at::Tensor& set_storage(at::Tensor& self, at::Storage source) {
  const int64_t n = static_cast<int64_t>(source.nbytes() / self.itemsize());
  return set_storage_sizes(self, std::move(source), 0, n, {});
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  if (self.is_same(source)) return self;
  return set_storage_sizes(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

at::Tensor& set_nothing(at::Tensor& self) {
  c10::Storage storage(c10::Storage::use_byte_size_t(), 0, c10::GetAllocator(c10::DeviceType::PrivateUse1),
                       true);
  const c10::DeviceGuard guard(self.device());
  return set_storage_sizes(self, std::move(storage), 0, {0}, {});
}

void refuse_quantized(const c10::OperatorHandle& op, torch::jit::Stack*) {
  std::string name = op.schema().name();
  name.replace(name.find("::"), 2, ".");
  const std::string& overload = op.schema().overload_name();
  TORCH_TPU_CHECK_WITH(TypeError, E205, false, "[", name, ".", overload.empty() ? "default" : overload,
                       "] quantized dtypes have no StableHLO element type, so \"tpu\" cannot hold them.",
                       Fix("dequantize on the CPU first: x.dequantize().to('tpu')."));
}

TORCH_LIBRARY_IMPL(_, QuantizedPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&refuse_quantized>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  for (const char* op :
       {"quantize_per_tensor", "quantize_per_tensor_dynamic", "quantize_per_tensor.tensor_qparams",
        "quantize_per_tensor.tensors", "quantize_per_channel"}) {
    m.impl(op, torch::CppFunction::makeFromBoxedFunction<&refuse_quantized>());
  }
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("new_empty_strided", at::native::new_empty_strided_symint);
  m.impl("resize_", resize);
  m.impl("set_.source_Storage_storage_offset", set_storage_sizes);
  m.impl("set_.source_Storage", set_storage);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("set_", set_nothing);
}

}  // namespace

}  // namespace torch_tpu
