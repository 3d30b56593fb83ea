#include "dispatch/bounds.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros.h>

#include <atomic>

#include "dispatch/launch.h"
#include "storage/transfer.h"

namespace torch_tpu {

namespace {

std::atomic<int64_t> g_reused{0}, g_host_copies{0}, g_pad_programs{0};

at::Tensor view_of(const at::Tensor& t, DimsRef sizes, DimsRef strides, int64_t offset) {
  at::Tensor view = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(t.storage()), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), t.dtype());
  view.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides, offset);
  return view;
}

at::Tensor at_capacity(const at::Tensor& t, const SizedInput& input) {
  Dims sizes, strides;
  for (const int64_t d : input.order) {
    sizes.push_back(t.size(d));
    strides.push_back(t.stride(d));
  }
  const BufferRef buffer = Storage::of(t).buffer();
  const bool plain = buffer != nullptr && buffer->dtype == t.scalar_type() && !t.is_conj() && !t.is_neg();
  if (plain && t.storage_offset() == 0 && DimsRef(buffer->dims) == DimsRef(input.capacity) &&
      strides == c10::contiguous_strides(sizes)) {
    g_reused.fetch_add(1, std::memory_order_relaxed);
    return view_of(t, input.capacity, DimsRef{1}, 0);
  }
  if (const void* data = plain ? host_pointer(*buffer) : nullptr) {
    g_host_copies.fetch_add(1, std::memory_order_relaxed);
    const auto options = t.options().device(at::kCPU);
    const at::AutoDispatchBelowAutograd below;
    const char* start =
        static_cast<const char*>(data) + static_cast<size_t>(t.storage_offset()) * t.element_size();
    const at::Tensor source = at::from_blob(const_cast<char*>(start), sizes, strides, options);
    const at::Tensor padded = at::zeros({input.capacity}, options);
    padded.narrow(0, 0, t.numel()).view(sizes).copy_(source);
    return make_tensor(
        buffer_from_host(buffer->device, padded.const_data_ptr(), t.scalar_type(), input.capacity),
        t.scalar_type(), input.capacity, DimsRef{1});
  }
  g_pad_programs.fetch_add(1, std::memory_order_relaxed);
  const at::AutoDispatchBelowAutograd below;
  return at::constant_pad_nd(t.permute(input.order).reshape({-1}), {0, input.capacity - t.numel()});
}

}  // namespace

BoundsStats bounds_stats() { return {g_reused.load(), g_host_copies.load(), g_pad_programs.load()}; }

std::vector<c10::IValue> enter_bounds(const Form& form, torch::jit::Stack& stack) {
  std::vector<c10::IValue> originals(stack.size());
  for (const SizedResult& r : form.results) {
    if (r.kind != SizedResult::kArgument && r.kind != SizedResult::kView) continue;
    const auto i = static_cast<size_t>(r.number);
    originals.at(i) = stack.at(i);
  }
  for (const SizedInput& input : form.inputs) {
    stack.at(input.position) = at_capacity(stack.at(input.position).toTensor(), input);
  }
  for (const int64_t n : form.numbers) stack.emplace_back(n);
  return originals;
}

void leave_bounds(const Form& form, const std::vector<c10::IValue>& originals, torch::jit::Stack& stack) {
  TORCH_INTERNAL_ASSERT(stack.size() == form.results.size());
  for (size_t i = 0; i < stack.size(); ++i) {
    const SizedResult& r = form.results[i];
    switch (r.kind) {
      case SizedResult::kAsIs:
        break;
      case SizedResult::kInt:
        stack[i] = r.number;
        break;
      case SizedResult::kArgument:
        stack[i] = originals.at(static_cast<size_t>(r.number));
        break;
      case SizedResult::kView:
      case SizedResult::kSized: {
        const bool made = r.kind == SizedResult::kSized;
        const at::Tensor base = (made ? stack[i] : originals.at(static_cast<size_t>(r.number))).toTensor();
        stack[i] = view_of(base, r.sizes, r.strides, base.storage_offset() + r.offset);
        break;
      }
    }
  }
}

}  // namespace torch_tpu
