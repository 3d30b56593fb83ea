// Views: metadata only. PyTorch's own composite kernels (select, slice, transpose, expand, ...) end here.

#include <ATen/native/TensorShape.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

namespace torch_tpu {

namespace {

// Module.to() keeps the Parameter objects (ties, optimizers) only if a CPU tensor may take our data and the
// reverse.
bool compatible_shallow_copy(const at::Tensor& self, const at::Tensor& from) {
  const auto dense = [](const at::Tensor& t) {
    return t.layout() == c10::kStrided && (t.device().type() == c10::DeviceType::PrivateUse1 || t.is_cpu());
  };
  return dense(self) && dense(from);
}

// PJRT keeps a buffer alive for whoever reads it.
void record_stream(at::Tensor&, at::Stream) {}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", at::native::view);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("unfold", at::native::unfold);
  m.impl("alias", at::native::alias);
  m.impl("_has_compatible_shallow_copy_type", compatible_shallow_copy);
  m.impl("record_stream", record_stream);
  m.impl("view_as_complex", at::native::view_as_complex);
  m.impl("view_as_real", at::native::view_as_real);
}

}  // namespace

}  // namespace torch_tpu
