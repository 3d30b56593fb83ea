// One call of an op, taken apart: the tensors and where they lie, the storages behind them, the operands, the
// key.
#pragma once

#include <ATen/core/stack.h>

#include "cache/program_key.h"
#include "dispatch/op_record.h"
#include "storage/view_plan.h"
#include "trace/mode.h"

namespace torch_tpu {

struct TensorArg {
  const at::Tensor* tensor;
  int arg;   // position in the schema
  int slot;  // which storage
  int plan;  // index into Call::plans, or -1: the tensor is the buffer
  bool written;
};

struct Slot {
  Storage* storage;
  BufferRef buffer;       // snapshot; null: never written
  c10::ScalarType dtype;  // of the buffer, or the form it will have
  Dims dims;
};

// A value that goes into the packed operand buffer.
struct Operand {
  enum Kind : int8_t { kFloat, kInt, kTensor, kStart, kSeed, kOffset };
  Kind kind;
  int source;             // kFloat, kInt, kTensor: position in the schema; kStart: index of the tensor
  c10::ScalarType dtype;  // of a rank-0 CPU tensor
  bool wrapped;           // a Python number
  union {
    double f;
    int64_t i;
  };
};

// Refers to the stack: valid until that changes.
class Call {
 public:
  // Takes snapshots, plans the views, prepares written storages. Throws E201 when tensors are on several
  // devices.
  Call(OpRecord& record, torch::jit::Stack& stack);

  OpRecord& record;
  torch::jit::Stack& stack;
  DeviceState* device = nullptr;
  c10::SmallVector<TensorArg, 4> tensors;  // in schema order, lists flattened
  c10::SmallVector<Slot, 4> slots;
  c10::SmallVector<ViewPlan, 2> plans;
  c10::SmallVector<Operand, 8> operands;
  ProgramKey key;
  const EagerMode mode;
  const bool deferred;  // to be recorded, not launched
  bool in_turn =
      false;  // foreach: a tensor is written that another step reads or writes, so they run one by one

  const c10::IValue& arg(size_t i) const {
    return (stack.end() - static_cast<std::ptrdiff_t>(record.args.size()))[static_cast<std::ptrdiff_t>(i)];
  }
  c10::IValue& arg(size_t i) {
    return (stack.end() - static_cast<std::ptrdiff_t>(record.args.size()))[static_cast<std::ptrdiff_t>(i)];
  }

 private:
  void find_device();
  void add_value(size_t i);
  void add_tensor(const at::Tensor& tensor, size_t i);
  void add_scalar_tensor(const at::Tensor& tensor, size_t i);
  void add_scalar(const c10::IValue& value, size_t i);
  void add_static(const c10::IValue& value);
  int slot_of(const at::Tensor& tensor);
  void add_plan(const at::Tensor& tensor, TensorArg& arg, Slot& slot, uint64_t head, bool fresh);
  void check_overlaps() const;
  bool steps_overlap() const;
};

// A word with everything global that a lowering rule may read; decoded by torch_tpu/modes/parameters.py.
int64_t global_state_word(bool deferred);

}  // namespace torch_tpu
