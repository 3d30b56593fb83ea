#include "dispatch/call.h"

#include <ATen/Context.h>
#include <ATen/MemoryOverlap.h>
#include <c10/core/DefaultDtype.h>

#include <algorithm>
#include <bit>

#include "dispatch/rebase.h"
#include "storage/transfer.h"
#include "util/check.h"

namespace torch_tpu {

namespace {

// Tags of key words; the upper bits hold what belongs to the tag.
enum Tag : int64_t {
  kNone = 1,
  kTensorTag,
  kScalarTensorTag,
  kOperandTag,
  kKeyedTag,
  kListTag,
  kStringTag,
  kSkipTag
};

bool on_device(const at::Tensor& t) { return t.device().type() == c10::DeviceType::PrivateUse1; }

// A rank-0 tensor on the CPU is a scalar, as everywhere in PyTorch.
bool is_scalar_tensor(const at::Tensor& t) { return t.dim() == 0 && t.device().is_cpu(); }

}  // namespace

int64_t global_state_word(bool deferred) {
  const at::Context& cx = at::globalContext();
  return static_cast<int64_t>(c10::typeMetaToScalarType(c10::get_default_dtype())) |
         static_cast<int64_t>(cx.deterministicAlgorithms()) << 8 |
         static_cast<int64_t>(cx.deterministicFillUninitializedMemory()) << 9 |
         static_cast<int64_t>(cx.float32MatmulPrecision()) << 10 |
         static_cast<int64_t>(Runtime::get().host_kernels()) << 12 | static_cast<int64_t>(deferred) << 13 |
         compiler_options() << 16;
}

Call::Call(OpRecord& record, torch::jit::Stack& stack)
    : record(record), stack(stack), mode(eager_mode()), deferred(mode == EagerMode::kFused) {
  find_device();
  key.words.push_back(reinterpret_cast<int64_t>(&record));
  key.words.push_back(global_state_word(deferred));
  for (size_t i = 0; i < record.args.size(); ++i) add_value(i);
  if (record.writes) check_overlaps();
  in_turn = record.is_foreach && record.writes && steps_overlap();
}

void Call::find_device() {
  c10::DeviceIndex index = -1;
  const auto see = [&](const at::Tensor& t) {
    if (!t.defined() || !on_device(t)) return;
    TORCH_TPU_CHECK(E201, index == -1 || index == t.device().index(),
                    "Expected all tensors to be on the same device, but [", record.name,
                    "] got tensors on tpu:", static_cast<int>(index), " and ", t.device(),
                    Fix("move them to one device with .to()."));
    index = t.device().index();
  };
  std::optional<c10::Device> asked;
  for (size_t i = 0; i < record.args.size(); ++i) {
    const c10::IValue& v = arg(i);
    if (v.isTensor()) {
      see(v.toTensor());
    } else if (record.args[i].kind == ArgRecord::kTensorList && v.isList()) {
      for (const c10::IValue& item : v.toListRef()) {
        if (item.isTensor()) see(item.toTensor());
      }
    } else if (v.isDevice()) {
      asked = v.toDevice();
    }
  }
  if (index == -1 && asked && asked->has_index()) index = asked->index();
  if (index == -1) index = c10::impl::getDeviceGuardImpl(c10::DeviceType::PrivateUse1)->getDevice().index();
  device = &Runtime::get().device(index);
}

void Call::add_value(size_t i) {
  const ArgRecord& rec = record.args[i];
  const c10::IValue& v = arg(i);
  if (v.isNone()) {
    key.words.push_back(kNone);
  } else if (v.isTensor()) {
    add_tensor(v.toTensor(), i);
  } else if (v.isList() && rec.kind == ArgRecord::kTensorList) {
    const auto list = v.toListRef();
    key.words.push_back(kListTag | static_cast<int64_t>(list.size()) << 8);
    for (const c10::IValue& item : list) {
      if (item.isNone()) {
        key.words.push_back(kNone);
      } else {
        add_tensor(item.toTensor(), i);
      }
    }
  } else if (rec.kind == ArgRecord::kScalar) {
    add_scalar(v, i);
  } else if (v.isList() && rec.kind == ArgRecord::kScalarList) {
    const auto list = v.toList();
    key.words.push_back(kListTag | static_cast<int64_t>(list.size()) << 8);
    for (const c10::IValue& item : list) add_scalar(item, i);
  } else {
    add_static(v);
  }
}

void Call::add_scalar(const c10::IValue& v, size_t i) {
  const ArgRecord& rec = record.args[i];
  const bool is_int = v.isInt();
  if (!is_int && !v.isDouble()) return add_static(v);  // bool, complex, symbolic
  const double value = is_int ? static_cast<double>(v.toInt()) : v.toDouble();
  if (rec.keyed || std::find(rec.tested.begin(), rec.tested.end(), value) != rec.tested.end())
    return add_static(v);
  Operand op{
      .kind = is_int ? Operand::kInt : Operand::kFloat, .source = static_cast<int>(i), .wrapped = true};
  if (is_int) {
    op.i = v.toInt();
  } else {
    op.f = value;
  }
  operands.push_back(op);
  key.words.push_back(kOperandTag | static_cast<int64_t>(is_int) << 8);
}

void Call::add_static(const c10::IValue& v) {
  auto& w = key.words;
  if (v.isInt()) {
    w.append({kKeyedTag, v.toInt()});
  } else if (v.isBool()) {
    w.append({kKeyedTag | 1 << 8, v.toBool()});
  } else if (v.isDouble()) {
    w.append({kKeyedTag | 2 << 8, std::bit_cast<int64_t>(v.toDouble())});
  } else if (v.isComplexDouble()) {
    const auto z = v.toComplexDouble();
    w.append({kKeyedTag | 3 << 8, std::bit_cast<int64_t>(z.real()), std::bit_cast<int64_t>(z.imag())});
  } else if (v.isIntList()) {
    const auto list = v.toIntList();
    w.push_back(kListTag | static_cast<int64_t>(list.size()) << 8);
    for (const int64_t n : list) w.push_back(n);
  } else if (v.isList()) {
    const auto list = v.toListRef();
    w.push_back(kListTag | static_cast<int64_t>(list.size()) << 8);
    for (const c10::IValue& item : list) add_static(item);
  } else if (v.isString()) {
    const std::string& s = v.toStringRef();
    w.push_back(kStringTag | static_cast<int64_t>(s.size()) << 8);
    for (const char c : s) w.push_back(c);
  } else if (v.isDevice() || v.isGenerator()) {
    w.push_back(kSkipTag);  // programs are portable; seed and offset are operands
  } else {
    TORCH_CHECK_NOT_IMPLEMENTED(v.isNone(), "[", record.name, "] an argument of type ", v.tagKind(),
                                " cannot be part of a program.");
    w.push_back(kNone);
  }
}

void Call::add_scalar_tensor(const at::Tensor& t, size_t i) {
  const bool wrapped = t.unsafeGetTensorImpl()->is_wrapped_number();
  Operand op{
      .kind = Operand::kTensor, .source = static_cast<int>(i), .dtype = t.scalar_type(), .wrapped = wrapped};
  const c10::Scalar value = t.item();
  if (value.isFloatingPoint()) {
    op.f = value.toDouble();
  } else if (value.isComplex()) {
    // StableHLO has no complex operands of ours: such a scalar goes to the device as a tensor and stays a
    // number.
    at::Tensor moved = t.to(c10::Device(c10::DeviceType::PrivateUse1, device->index));
    moved.unsafeGetTensorImpl()->set_wrapped_number(wrapped);
    arg(i) = std::move(moved);
    return add_tensor(arg(i).toTensor(), i);
  } else if (t.scalar_type() == c10::ScalarType::UInt64) {
    op.i = static_cast<int64_t>(value.toUInt64());
  } else {
    op.i = value.toLong();
  }
  operands.push_back(op);
  key.words.push_back(kScalarTensorTag | static_cast<int64_t>(t.scalar_type()) << 8 |
                      static_cast<int64_t>(wrapped) << 16);
}

int Call::slot_of(const at::Tensor& t) {
  Storage& storage = Storage::of(t);
  for (size_t i = 0; i < slots.size(); ++i) {
    if (slots[i].storage == &storage) return static_cast<int>(i);
  }
  Slot& slot = slots.emplace_back();
  slot.storage = &storage;
  slot.buffer = storage.buffer();
  if (slot.buffer != nullptr) {
    slot.dtype = slot.buffer->dtype;
    slot.dims = slot.buffer->dims;
  } else {
    set_unwritten_form(slot, t);
  }
  return static_cast<int>(slots.size() - 1);
}

void Call::add_tensor(const at::Tensor& t, size_t i) {
  if (!t.defined()) {
    key.words.push_back(kNone);
    return;
  }
  if (!on_device(t)) {
    if (is_scalar_tensor(t)) return add_scalar_tensor(t, i);
    TORCH_TPU_CHECK(E201, record.args[i].accepts_cpu && t.device().is_cpu(),
                    "Expected all tensors to be on the same device, but [", record.name,
                    "] got tensors on tpu:", static_cast<int>(device->index), " and ", t.device(),
                    Fix("move them to one device with .to()."));
    // The stack keeps the moved tensor alive; the caller's argument stays where it is.
    TORCH_CHECK(arg(i).isTensor(), "a list of CPU tensors is moved by the caller");
    arg(i) = t.to(c10::Device(c10::DeviceType::PrivateUse1, device->index));
    return add_tensor(arg(i).toTensor(), i);
  }
  const size_t known = slots.size();
  TensorArg ta{&t, static_cast<int>(i), slot_of(t), -1, record.args[i].written};
  Slot& slot = slots[static_cast<size_t>(ta.slot)];
  const c10::ScalarType dtype = t.scalar_type();
  const uint64_t head = kTensorTag | static_cast<uint64_t>(dtype) << 8 |
                        static_cast<uint64_t>(ta.slot) << 16 | static_cast<uint64_t>(t.is_conj()) << 32 |
                        static_cast<uint64_t>(t.is_neg()) << 33 |
                        static_cast<uint64_t>(t.unsafeGetTensorImpl()->is_wrapped_number()) << 35 |
                        static_cast<uint64_t>(t.dim()) << 40;
  if (slot.dtype == dtype && t.storage_offset() == 0 && t.sizes() == slot.dims && t.is_contiguous()) {
    key.words.push_back(static_cast<int64_t>(head));
    for (const int64_t s : slot.dims) key.words.push_back(s);
  } else {
    add_plan(t, ta, slot, head, /*fresh=*/slots.size() > known);
  }
  tensors.push_back(ta);
}

void Call::add_plan(const at::Tensor& t, TensorArg& ta, Slot& slot, uint64_t head, bool fresh) {
  if (fresh) adopt_dtype(slot, t);
  ViewPlan plan =
      plan_view(dims_as(slot.dims, slot.dtype, t.scalar_type()), t.sizes(), t.strides(), t.storage_offset());
  if (fresh && ta.written && !plan.covers && slot.dtype == t.scalar_type() && plan.dims != slot.dims) {
    rebase(slot, plan.dims, deferred);
  }
  key.words.append(
      {static_cast<int64_t>(head | uint64_t{1} << 34), static_cast<int64_t>(slot.dtype) | plan.kind << 8 |
                                                           static_cast<int64_t>(slot.dims.size()) << 16 |
                                                           static_cast<int64_t>(plan.dims.size()) << 32});
  const auto index = static_cast<int>(tensors.size());
  const auto start = [&](int64_t value) {
    operands.push_back({.kind = Operand::kStart, .source = index, .wrapped = false, .i = value});
  };
  for (const int64_t d : slot.dims) key.words.push_back(d);
  for (const int64_t d : plan.dims) key.words.push_back(d);
  for (const auto& w : plan.windows) {
    key.words.push_back(w.size << 1 | w.sliced);
    if (w.sliced) start(w.start);
  }
  if (plan.kind == ViewPlan::kGather) start(plan.offset);
  for (const int64_t s : t.sizes()) key.words.push_back(s);
  for (const int64_t s : t.strides()) key.words.push_back(s);
  ta.plan = static_cast<int>(plans.size());
  plans.push_back(std::move(plan));
}

void Call::check_overlaps() const {
  for (const TensorArg& w : tensors) {
    if (!w.written) continue;
    if (!record.fills) at::assert_no_internal_overlap(*w.tensor);
    if (record.is_foreach || slots.size() == tensors.size()) continue;
    for (const TensorArg& r : tensors) {
      if (r.slot == w.slot && r.tensor != w.tensor && !r.written)
        at::assert_no_partial_overlap(*w.tensor, *r.tensor);
    }
  }
}

bool Call::steps_overlap() const {
  if (slots.size() == tensors.size()) return false;
  c10::SmallVector<int, 16> steps;  // position in its list of each tensor
  for (size_t i = 0; i < tensors.size(); ++i) {
    steps.push_back(i > 0 && tensors[i].arg == tensors[i - 1].arg ? steps.back() + 1 : 0);
  }
  for (size_t i = 0; i < tensors.size(); ++i) {
    const TensorArg& w = tensors[i];
    for (size_t j = 0; w.written && j < tensors.size(); ++j) {
      const TensorArg& other = tensors[j];
      if (i == j || other.slot != w.slot) continue;
      const auto status = at::get_overlap_status(*w.tensor, *other.tensor);
      const bool same = steps[i] == steps[j] && status == at::MemOverlapStatus::Full;
      if (status != at::MemOverlapStatus::No && !same) return true;
    }
  }
  return false;
}

}  // namespace torch_tpu
