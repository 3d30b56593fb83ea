// Sparse COO tensors: indices and values are dense tensors of the device, and each op below is a few dense
// ones. What only moves indices and values about is PyTorch's own code for every device.

#include <ATen/TensorOperators.h>
#include <ATen/ops/_coalesced_native.h>
#include <ATen/ops/_indices_native.h>
#include <ATen/ops/_nnz_native.h>
#include <ATen/ops/_sparse_coo_tensor_unsafe.h>
#include <ATen/ops/_sparse_coo_tensor_with_dims_and_tensors_native.h>
#include <ATen/ops/_sparse_coo_tensor_with_dims_native.h>
#include <ATen/ops/_to_sparse_native.h>
#include <ATen/ops/_unique2.h>
#include <ATen/ops/_values_native.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/clone_native.h>
#include <ATen/ops/copy_native.h>
#include <ATen/ops/copy_sparse_to_sparse_native.h>
#include <ATen/ops/dense_dim_native.h>
#include <ATen/ops/empty_native.h>
#include <ATen/ops/indices_native.h>
#include <ATen/ops/is_coalesced_native.h>
#include <ATen/ops/resize_as_sparse_native.h>
#include <ATen/ops/sparse_dim_native.h>
#include <ATen/ops/sparse_resize_and_clear_native.h>
#include <ATen/ops/sparse_resize_native.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/sum_native.h>
#include <ATen/ops/values_native.h>
#include <ATen/ops/zero_native.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

namespace torch_tpu {

namespace {

using at::Tensor;

// One index tensor a sparse dim, as index and index_put take them.
c10::List<std::optional<Tensor>> rows(const Tensor& sparse) {
  c10::List<std::optional<Tensor>> list;
  for (const Tensor& row : sparse._indices().unbind(0)) list.push_back(row);
  return list;
}

Tensor with_values(const Tensor& pattern, const Tensor& values) {
  return at::_sparse_coo_tensor_unsafe(pattern._indices(), values, pattern.sizes(),
                                       values.options().layout(c10::kSparse), pattern.is_coalesced());
}

// `target` with the elements of `sparse` added, times alpha; new.
Tensor added_to(const Tensor& target, const Tensor& sparse, const at::Scalar& alpha) {
  Tensor values = sparse._values().to(target.scalar_type());
  if (!alpha.equal(1)) values = values * alpha;
  if (sparse.sparse_dim() == 0) return target + values.sum(0);
  return target.index_put(rows(sparse), values, /*accumulate=*/true);
}

Tensor to_dense(const Tensor& self, std::optional<c10::ScalarType> dtype, std::optional<bool>) {
  const auto type = dtype.value_or(self.scalar_type());
  const Tensor zeros = at::zeros(self.sizes(), self.options().layout(c10::kStrided).dtype(type));
  if (type != c10::kBool) return added_to(zeros, self, 1);
  return added_to(zeros.to(c10::kLong), self, 1).ne(0);
}

Tensor coalesce(const Tensor& self) {
  if (self.is_coalesced()) return self;
  if (self._nnz() < 2) return self.clone()._coalesced_(true);
  const auto sizes = self.sizes().slice(0, static_cast<size_t>(self.sparse_dim()));
  const Tensor indices = self._indices();
  Tensor place = at::zeros({self._nnz()}, indices.options());
  for (size_t i = 0; i < sizes.size(); ++i) place = place * sizes[i] + indices[static_cast<int64_t>(i)];
  auto [unique, number, counts] = at::_unique2(place, /*sorted=*/true, /*return_inverse=*/true);
  const Tensor values = self._values();
  const bool is_bool = values.scalar_type() == c10::kBool;
  auto shape = values.sizes().vec();
  shape[0] = unique.numel();
  Tensor sums = at::zeros(shape, values.options().dtype(is_bool ? c10::kLong : values.scalar_type()));
  sums.index_add_(0, number, is_bool ? values.to(c10::kLong) : values);
  std::vector<Tensor> parts(sizes.size());
  for (size_t i = sizes.size(); i-- > 0;) {
    parts[i] = unique.remainder(sizes[i]);
    unique = unique.div(sizes[i], "floor");
  }
  const Tensor found = parts.empty() ? at::zeros({0, shape[0]}, indices.options()) : at::stack(parts);
  return at::_sparse_coo_tensor_unsafe(found, is_bool ? sums.ne(0) : sums, self.sizes(), self.options(),
                                       /*is_coalesced=*/true);
}

Tensor add_coo(const Tensor& self, const Tensor& other, const at::Scalar& alpha) {
  TORCH_CHECK(other.is_sparse(), "add: a dense tensor cannot be added to a sparse one; use dense + sparse.");
  TORCH_CHECK(self.sizes() == other.sizes(), "add: expected sizes of self and other to be equal, but ",
              self.sizes(), " is not ", other.sizes());
  const auto type = at::result_type(self, other);
  if (!self.is_sparse()) return added_to(self.to(type), other, alpha);
  TORCH_CHECK(self.sparse_dim() == other.sparse_dim() && self.dense_dim() == other.dense_dim(),
              "add: expected both tensors to have as many sparse and dense dims, but self has ",
              self.sparse_dim(), " and ", self.dense_dim(), ", other ", other.sparse_dim(), " and ",
              other.dense_dim());
  Tensor theirs = other._values().to(type);
  if (!alpha.equal(1)) theirs = theirs * alpha;
  return at::_sparse_coo_tensor_unsafe(at::cat({self._indices(), other._indices()}, 1),
                                       at::cat({self._values().to(type), theirs}), self.sizes(),
                                       self.options().dtype(type));
}

Tensor& assign(Tensor& self, const Tensor& value) {
  TORCH_CHECK(c10::canCast(value.scalar_type(), self.scalar_type()), "result type ", value.scalar_type(),
              " can't be cast to the desired output type ", self.scalar_type());
  return self.copy_(value);
}

Tensor& add_coo_(Tensor& self, const Tensor& other, const at::Scalar& alpha) {
  return assign(self, add_coo(self, other, alpha));
}

// Keeps the pattern of the sparse factor, or of the first one: what is not in it is zero.
Tensor mul_coo(const Tensor& self, const Tensor& other) {
  if (!self.is_sparse()) return mul_coo(other, self);
  if (other.dim() == 0)
    return with_values(self, self._values() * (other.is_sparse() ? other.to_dense() : other));
  TORCH_CHECK(self.sizes() == other.sizes(), "mul: expected sizes of self and other to be equal, but ",
              self.sizes(), " is not ", other.sizes());
  const Tensor first = other.is_sparse() ? self.coalesce() : self;  // a sum times a sum is no sum of products
  return with_values(first,
                     first._values() * (other.is_sparse() ? other.to_dense() : other).index(rows(first)));
}

Tensor& mul_coo_(Tensor& self, const Tensor& other) { return assign(self, mul_coo(self, other)); }

Tensor div_coo(const Tensor& self, const Tensor& other) {
  TORCH_CHECK(self.is_sparse() && other.dim() == 0 && !other.is_sparse(),
              "div: a sparse tensor can only be divided by a number or a zero-dim dense tensor.");
  return with_values(self, self._values() / other);
}

Tensor& div_coo_(Tensor& self, const Tensor& other) { return assign(self, div_coo(self, other)); }

Tensor addmm_coo(const Tensor& self, const Tensor& sparse, const Tensor& dense, const at::Scalar& beta,
                 const at::Scalar& alpha) {
  TORCH_CHECK(sparse.is_sparse() && !dense.is_sparse() && !self.is_sparse(),
              "addmm: only the first factor may be sparse.");
  TORCH_CHECK(sparse.sparse_dim() == 2 && sparse.dense_dim() == 0 && dense.dim() == 2,
              "addmm: expected matrices, but got a sparse tensor of ", sparse.sparse_dim(), " sparse and ",
              sparse.dense_dim(), " dense dims and a tensor of ", dense.dim(), " dims");
  TORCH_CHECK(sparse.size(1) == dense.size(0), "mat1 and mat2 shapes cannot be multiplied (", sparse.size(0),
              "x", sparse.size(1), " and ", dense.size(0), "x", dense.size(1), ")");
  const Tensor indices = sparse._indices();
  const Tensor terms = sparse._values().unsqueeze(1) * dense.index_select(0, indices[1]);
  const Tensor sums =
      at::zeros({sparse.size(0), dense.size(1)}, terms.options()).index_add(0, indices[0], terms);
  const Tensor product = alpha.equal(1) ? sums : sums * alpha;
  if (beta.equal(0)) return product.expand({sparse.size(0), dense.size(1)});
  return (beta.equal(1) ? self : self * beta) + product;
}

Tensor mm_coo(const Tensor& self, const Tensor& other) {
  TORCH_CHECK(self.is_sparse() && !other.is_sparse(), "mm: only the first factor may be sparse.");
  return addmm_coo(at::zeros({}, other.options()), self, other, 0, 1);
}

Tensor masked(const Tensor& self, const Tensor& mask) {
  TORCH_CHECK(self.sizes() == mask.sizes(),
              "sparse_mask: expected self and mask to have the same shape, but ", self.sizes(), " is not ",
              mask.sizes());
  return with_values(mask, (self.is_sparse() ? self.to_dense() : self).index(rows(mask)));
}

Tensor neg_coo(const Tensor& self) { return with_values(self, -self._values()); }

TORCH_LIBRARY_IMPL(aten, SparsePrivateUse1, m) {
  m.impl("empty.memory_format", at::native::empty_sparse_symint);
  m.impl("_sparse_coo_tensor_with_dims", at::native::new_with_dims_sparse);
  m.impl("_sparse_coo_tensor_with_dims_and_tensors", at::native::new_with_dims_and_tensor_sparse_symint);
  m.impl("sparse_dim", at::native::sparse_dim_sparse);
  m.impl("dense_dim", at::native::dense_dim_sparse);
  m.impl("_nnz", at::native::_nnz_sparse);
  m.impl("is_coalesced", at::native::is_coalesced_sparse);
  m.impl("_coalesced_", at::native::_coalesced_sparse_);
  m.impl("_indices", at::native::_indices_sparse);
  m.impl("_values", at::native::_values_sparse);
  m.impl("indices", at::native::indices_sparse);
  m.impl("values", at::native::values_sparse);
  m.impl("sparse_resize_", at::native::sparse_resize_);
  m.impl("sparse_resize_and_clear_", at::native::sparse_resize_and_clear_);
  m.impl("resize_as_sparse_", at::native::resize_as_sparse_);
  m.impl("copy_sparse_to_sparse_", at::native::copy_sparse_);
  m.impl("copy_", at::native::copy_sparse_wrapper_);
  m.impl("clone", at::native::clone_sparse);
  m.impl("zero_", at::native::zero_sparse_);
  m.impl("sum", at::native::sum_coo);
  m.impl("sum.dim_IntList", at::native::sum_sparse_coo);
  m.impl("_coalesce", coalesce);
  m.impl("_to_dense", to_dense);
  m.impl("add.Tensor", add_coo);
  m.impl("add_.Tensor", add_coo_);
  m.impl("mul.Tensor", mul_coo);
  m.impl("mul_.Tensor", mul_coo_);
  m.impl("div.Tensor", div_coo);
  m.impl("div_.Tensor", div_coo_);
  m.impl("addmm", addmm_coo);
  m.impl("mm", mm_coo);
  m.impl("sparse_mask", masked);
  m.impl("neg", neg_coo);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_to_sparse",
         static_cast<Tensor (*)(const Tensor&, std::optional<c10::Layout>, at::OptionalIntArrayRef,
                                std::optional<int64_t>)>(at::native::dense_to_sparse));
  m.impl("_to_sparse.sparse_dim",
         static_cast<Tensor (*)(const Tensor&, int64_t)>(at::native::dense_to_sparse));
  m.impl("sparse_mask", masked);
}

}  // namespace

}  // namespace torch_tpu
