// What moves data: host <-> device, device <-> device, scalars to the host, comparison to a bool.

#include <ATen/EmptyTensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/eq.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/is_nonzero.h>
#include <torch/library.h>

#include "dispatch/launch.h"
#include "dispatch/rebase.h"
#include "dispatch/run_op.h"
#include "storage/transfer.h"
#include "util/check.h"

namespace torch_tpu {

namespace {

bool on_device(const at::Tensor& t) { return t.device().type() == c10::DeviceType::PrivateUse1; }

void run_copy(const at::Tensor& dst, const at::Tensor& src) {
  static OpRecord& record = record_of(c10::Dispatcher::singleton().findSchemaOrThrow("aten::copy_", ""));
  torch::jit::Stack stack{dst, src, false};
  run_op(record, stack);
}

bool covers_storage(const at::Tensor& t) {
  return t.storage_offset() == 0 && t.nbytes() == t.storage().nbytes() && t.is_contiguous() && !t.is_conj() &&
         !t.is_neg();
}

void host_to_device(const at::Tensor& src, const at::Tensor& dst) {
  at::Tensor host = src.expand(dst.sizes()).to(dst.scalar_type()).contiguous().resolve_conj().resolve_neg();
  Storage& storage = Storage::of(dst);
  if (!covers_storage(dst)) {
    const at::Tensor staged =
        make_tensor(buffer_from_host(storage.device, host.const_data_ptr(), host.scalar_type(), host.sizes()),
                    host.scalar_type(), host.sizes(), host.strides());
    return run_copy(dst, staged);
  }
  storage.set_buffer(
      buffer_from_host(storage.device, host.const_data_ptr(), host.scalar_type(), host.sizes()));
}

at::Tensor zeros_of_unwritten(const at::Tensor& t) {
  const size_t needed = at::detail::computeStorageNbytes(t.sizes(), t.strides(), t.itemsize(),
                                                         static_cast<size_t>(t.storage_offset()));
  TORCH_TPU_CHECK(E204, t.numel() == 0 || needed <= t.storage().nbytes(), "a tensor of sizes ", t.sizes(),
                  " needs ", needed, " bytes, but its storage was resized to ", t.storage().nbytes(), ".",
                  Fix("resize the storage and write to it first."));
  return at::zeros(t.sizes(), t.options().device(at::kCPU).requires_grad(false));
}

// The tensor's elements as a CPU tensor over the device's own memory; undefined where the host cannot read
// it.
at::Tensor host_view(const at::Tensor& t, BufferRef& hold) {
  hold = Storage::of(t).buffer();
  if (hold == nullptr) return zeros_of_unwritten(t);
  const void* data = host_pointer(*hold);
  if (data == nullptr) return {};
  const at::Tensor flat =
      at::from_blob(const_cast<void*>(data), {hold->bytes / static_cast<int64_t>(t.itemsize())},
                    t.options().device(at::kCPU).requires_grad(false));
  at::Tensor view = flat.as_strided(t.sizes(), t.strides(), t.storage_offset());
  if (t.is_conj()) view = view.conj();
  if (t.is_neg()) view = view._neg_view();
  return view;
}

at::Tensor read(const at::Tensor& t) {
  BufferRef hold;
  at::Tensor view = host_view(t, hold);
  if (view.defined()) return view.clone();
  at::Tensor dense = t.resolve_conj().resolve_neg();
  if (!covers_storage(dense) || hold->dtype != dense.scalar_type())
    dense = dense.clone(at::MemoryFormat::Contiguous);
  at::Tensor host = at::empty(t.sizes(), t.options().device(at::kCPU));
  buffer_to_host(*Storage::of(dense).buffer(), host.mutable_data_ptr());
  return host;
}

void device_to_host(const at::Tensor& src, const at::Tensor& dst) {
  BufferRef hold;
  const at::Tensor view = host_view(src, hold);
  dst.copy_(view.defined() ? view : read(src));
}

// Whole storages of one form share the buffer: it is immutable, and the next write makes a new one.
bool share_buffer(const at::Tensor& src, const at::Tensor& dst) {
  if (src.scalar_type() != dst.scalar_type() || src.sizes() != dst.sizes() || src.strides() != dst.strides())
    return false;
  if (src.is_conj() || src.is_neg() || dst.is_conj() || dst.is_neg()) return false;
  Storage &from = Storage::of(src), &to = Storage::of(dst);
  if (&from == &to || src.storage_offset() != 0 || dst.storage_offset() != 0) return false;
  const BufferRef buffer = from.buffer();
  if (buffer == nullptr || buffer->bytes != static_cast<int64_t>(src.nbytes()) ||
      dst.storage().nbytes() != src.nbytes() || !src.is_non_overlapping_and_dense()) {
    return false;
  }
  to.set_buffer(buffer_on(buffer, to.device));
  return true;
}

void device_to_device(const at::Tensor& src, const at::Tensor& dst) {
  if (share_buffer(src, dst)) return;
  if (src.device() == dst.device()) return run_copy(dst, src);
  const at::Tensor dense = src.resolve_conj().resolve_neg().contiguous();
  const at::Tensor packed = covers_storage(dense) ? dense : dense.clone();
  const BufferRef moved = buffer_on(Storage::of(packed).buffer_or_zeros(packed.scalar_type(), packed.sizes()),
                                    Storage::of(dst).device);
  run_copy(dst, make_tensor(moved, packed.scalar_type(), packed.sizes(), packed.strides()));
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& dst, bool /*non_blocking*/) {
  if (self.numel() == 0 && dst.numel() == 0) return dst;
  const at::Tensor src = self.sizes() == dst.sizes() ? self : self.expand(dst.sizes());
  if (!on_device(self)) {
    host_to_device(self.device().is_cpu() ? src : src.cpu(), dst);
  } else if (on_device(dst)) {
    device_to_device(src, dst);
  } else {
    device_to_host(src, dst);
  }
  return dst;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& dst) {
  if (self.sizes() != dst.sizes()) dst.resize_(self.sizes());
  return copy_from(self, dst, false);
}

at::Scalar local_scalar_dense(const at::Tensor& self) {
  BufferRef hold;
  const at::Tensor view = host_view(self, hold);
  return (view.defined() ? view : read(self)).item();
}

bool equal(const at::Tensor& self, const at::Tensor& other) {
  TORCH_CHECK(self.device() == other.device(),
              "Cannot compare two tensors on different devices. Got: ", self.device(), " and ",
              other.device());
  TORCH_CHECK(self.scalar_type() == other.scalar_type(), "Expected object of data type ", self.scalar_type(),
              " but got data type ", other.scalar_type(), " for argument 'other' in call to equal");
  if (self.sizes() != other.sizes()) return false;
  return self.numel() == 0 || self.eq(other).all().item<bool>();
}

// Not asynchronous: a program cannot raise, so the host reads the element.
void assert_async(const at::Tensor& self) {
  TORCH_CHECK(at::is_nonzero(self), "Expected Tensor with single nonzero value, but got zero");
}

void assert_async_msg(const at::Tensor& self, c10::string_view message) {
  TORCH_CHECK(at::is_nonzero(self), message.empty() ? c10::string_view("Assertion is failed") : message);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_assert_async", assert_async);
  m.impl("_assert_async.msg", assert_async_msg);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar_dense);
  m.impl("equal", equal);
}

// The fallbacks of these keys would clone the source, which copies it, which clones it: copy_from reads the
// bits itself.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, Negative, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }

}  // namespace

}  // namespace torch_tpu
