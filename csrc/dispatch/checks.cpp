#include "dispatch/checks.h"

#include <ATen/ops/nonzero.h>

#include "util/check.h"

namespace torch_tpu {

namespace {

const c10::IValue* find_arg(const OpRecord& record, const torch::jit::Stack& stack, const char* name) {
  const auto index = record.op->schema().argumentIndexWithName(name);
  if (!index) return nullptr;
  return &stack[stack.size() - record.args.size() + static_cast<size_t>(*index)];
}

std::optional<double> number(const OpRecord& record, const torch::jit::Stack& stack, const char* name) {
  const c10::IValue* v = find_arg(record, stack, name);
  if (v == nullptr || !(v->isDouble() || v->isInt())) return std::nullopt;
  return v->isInt() ? static_cast<double>(v->toInt()) : v->toDouble();
}

void check_probability(const OpRecord& record, const torch::jit::Stack& stack) {
  if (const auto p = number(record, stack, "p")) {
    TORCH_CHECK(*p >= 0 && *p <= 1, record.op->schema().name().substr(6),
                " expects p to be in [0, 1], but got p=", *p);
  }
}

void check_uniform(const OpRecord& record, const torch::jit::Stack& stack) {
  const auto from = number(record, stack, "from"), to = number(record, stack, "to");
  if (from && to) {
    TORCH_CHECK(*from <= *to, "uniform_ expects to return a [from, to) range, but found from=", *from,
                " > to=", *to);
  }
}

void check_positive(const OpRecord& record, const torch::jit::Stack& stack) {
  if (const auto lambd = number(record, stack, "lambd")) {
    TORCH_CHECK(*lambd > 0, "exponential_ expects lambda > 0.0, but found lambda=", *lambd);
  }
  if (const auto sigma = number(record, stack, "sigma")) {
    TORCH_CHECK(*sigma > 0, record.op->schema().name().substr(6),
                " expects sigma > 0.0, but found sigma=", *sigma);
  }
}

void check_std(const OpRecord& record, const torch::jit::Stack& stack) {
  if (const auto std = number(record, stack, "std")) {
    TORCH_CHECK(*std >= 0, "normal expects std >= 0.0, but found std ", *std);
  }
}

void check_integer_power(const OpRecord& record, const torch::jit::Stack& stack) {
  const c10::IValue* self = find_arg(record, stack, "self");
  const c10::IValue* exponent = find_arg(record, stack, "exponent");
  if (self == nullptr || !self->isTensor() || exponent == nullptr || !exponent->isInt()) return;
  TORCH_CHECK(
      !c10::isIntegralType(self->toTensor().scalar_type(), /*includeBool=*/true) || exponent->toInt() >= 0,
      "Integers to negative integer powers are not allowed.");
}

void check_fill(const OpRecord& record, const torch::jit::Stack& stack) {
  const c10::IValue* self = find_arg(record, stack, "self");
  const c10::IValue* value = find_arg(record, stack, "value");
  if (self == nullptr || !self->isTensor() || value == nullptr || !value->isScalar()) return;
  const auto dtype = self->toTensor().scalar_type();
  if (!c10::isIntegralType(dtype, /*includeBool=*/false) || c10::elementSize(dtype) == 8) return;
  const double v = value->toScalar().isComplex() ? 0 : value->toScalar().toDouble();
  const int bits = static_cast<int>(8 * c10::elementSize(dtype));
  const bool is_signed = c10::isSignedType(dtype);
  const double high = std::ldexp(1.0, is_signed ? bits - 1 : bits),
               low = std::ldexp(-1.0, is_signed ? bits - 1 : bits);
  TORCH_CHECK(v >= low && v < high, "value cannot be converted to type ", c10::toString(dtype),
              " without overflow");
}

bool is_mask(const at::Tensor& t) {
  return t.defined() &&
         (t.scalar_type() == c10::ScalarType::Bool || t.scalar_type() == c10::ScalarType::Byte);
}

bool lowers_to_select(const OpRecord& record, const torch::jit::Stack& stack,
                      c10::ArrayRef<c10::IValue> indices) {
  const c10::IValue* values = find_arg(record, stack, "values");
  const c10::IValue* accumulate = find_arg(record, stack, "accumulate");
  return values != nullptr && values->toTensor().numel() == 1 && indices.size() == 1 &&
         accumulate != nullptr && !accumulate->toBool() &&
         indices[0].toTensor().scalar_type() == c10::ScalarType::Bool;
}

BoundsFn& bounds_check() {
  static auto* fn = new BoundsFn;
  return *fn;
}

}  // namespace

void check_values(const OpRecord& record, const torch::jit::Stack& stack) {
  switch (record.check) {
    case ValueCheck::kNone:
      return;
    case ValueCheck::kProbability:
      return check_probability(record, stack);
    case ValueCheck::kUniformRange:
      return check_uniform(record, stack);
    case ValueCheck::kStdNonNegative:
      return check_std(record, stack);
    case ValueCheck::kPositive:
      return check_positive(record, stack);
    case ValueCheck::kIntegerPower:
      return check_integer_power(record, stack);
    case ValueCheck::kFill:
      return check_fill(record, stack);
  }
}

void install_bounds_check(BoundsFn check) { bounds_check() = std::move(check); }

void check_bounds(const OpRecord& record, const torch::jit::Stack& stack) { bounds_check()(record, stack); }

void fill_output_size(OpRecord& record, torch::jit::Stack& stack) {
  const auto& schema = record.op->schema();
  const size_t first = stack.size() - record.args.size();
  c10::IValue& size = stack[first + static_cast<size_t>(*schema.argumentIndexWithName("output_size"))];
  if (!size.isNone()) return;
  const auto repeats =
      stack[first + static_cast<size_t>(*schema.argumentIndexWithName("repeats"))].toTensor();
  size = repeats.sum().item<int64_t>();
}

void fill_minlength(OpRecord& record, torch::jit::Stack& stack) {
  const auto& schema = record.op->schema();
  const size_t first = stack.size() - record.args.size();
  const auto self = stack[first + static_cast<size_t>(*schema.argumentIndexWithName("self"))].toTensor();
  c10::IValue& bins = stack[first + static_cast<size_t>(*schema.argumentIndexWithName("minlength"))];
  TORCH_CHECK(bins.toInt() >= 0, "minlength should be >= 0");
  if (self.dim() == 1 && self.numel() == 0) return;
  TORCH_CHECK(self.dim() == 1, "bincount only supports 1-d non-negative integral inputs.");
  const at::Tensor ends = at::stack({self.amin(), self.amax()}).to(at::kLong).cpu();
  TORCH_CHECK(ends[0].item<int64_t>() >= 0, "bincount only supports 1-d non-negative integral inputs.");
  bins = std::max(bins.toInt(), ends[1].item<int64_t>() + 1);
}

bool spans_devices(const OpRecord& record, const torch::jit::Stack& stack) {
  std::optional<c10::Device> first;
  for (size_t i = stack.size() - record.args.size(); i < stack.size(); ++i) {
    if (!stack[i].isTensorList()) continue;
    for (const c10::IValue& item : stack[i].toListRef()) {
      const at::Tensor& t = item.toTensor();
      if (!first) first = t.device();
      if (t.device() != *first) return true;
    }
  }
  return false;
}

void expand_masks(OpRecord& record, torch::jit::Stack& stack) {
  const auto position = static_cast<size_t>(*record.op->schema().argumentIndexWithName("indices"));
  c10::IValue& arg = stack[stack.size() - record.args.size() + position];
  const c10::IValue held = arg;  // the list below belongs to it
  const auto indices = held.toListRef();
  const bool any = std::any_of(indices.begin(), indices.end(),
                               [](const c10::IValue& v) { return v.isTensor() && is_mask(v.toTensor()); });
  bool any_cpu = false;
  c10::Device device(c10::DeviceType::CPU);
  for (const c10::IValue& v : c10::ArrayRef<c10::IValue>(stack).slice(stack.size() - record.args.size())) {
    if (v.isTensor() && v.toTensor().defined() && !v.toTensor().is_cpu()) device = v.toTensor().device();
  }
  for (const c10::IValue& v : indices)
    any_cpu |= v.isTensor() && v.toTensor().defined() && v.toTensor().is_cpu();
  if ((!any && !any_cpu) || (any && !any_cpu && lowers_to_select(record, stack, indices))) return;
  c10::List<std::optional<at::Tensor>> expanded;
  for (const c10::IValue& v : indices) {
    at::Tensor index = v.isTensor() ? v.toTensor() : at::Tensor();
    if (index.defined() && index.is_cpu()) index = index.to(device);
    if (!is_mask(index)) {
      expanded.push_back(index.defined() ? std::optional<at::Tensor>(index) : std::nullopt);
      continue;
    }
    const at::Tensor rows = at::nonzero(index);
    for (int64_t d = 0; d < index.dim(); ++d) expanded.push_back(rows.select(1, d));
  }
  arg = std::move(expanded);
}

}  // namespace torch_tpu
