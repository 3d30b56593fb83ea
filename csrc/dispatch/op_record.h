// What the dispatcher knows of one ATen overload: from its schema at registration, from Python at its first
// call.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "cache/program.h"

namespace torch_tpu {

struct ArgRecord {
  enum Kind : int8_t { kTensor, kTensorList, kScalar, kScalarList, kGenerator, kStatic };
  Kind kind;
  bool written = false;        // by the schema, or by the rule's `writes`
  bool keyed = false;          // scalars: the value is part of the key
  std::vector<double> tested;  // scalars: these values are part of the key, others are operands
  bool is_dtype = false;       // an int that stands for a ScalarType
  bool accepts_cpu = false;  // tensors: may be on the CPU, as PyTorch allows for this op; moved to the device
};

// Checks of argument values that no meta kernel can make, evaluated at every call.
enum class ValueCheck : int8_t {
  kNone,
  kProbability,
  kUniformRange,
  kStdNonNegative,
  kPositive,
  kIntegerPower,
  kFill
};

struct OpRecord {
  enum State : int8_t { kUnknown, kProgram, kComposite, kCpu, kFunctional };

  explicit OpRecord(c10::OperatorHandle handle);
  OpRecord(std::string name, std::vector<ArgRecord> args, bool rng);
  std::optional<c10::OperatorHandle> op;  // none: a compiled graph
  std::string name;                       // "aten.add.Tensor"
  std::vector<ArgRecord> args;
  std::atomic<State> state{kUnknown};
  bool rng = false;                // consumes random numbers
  bool expands_masks = false;      // index ops: bool masks become index tensors before the op is lowered
  bool writes = false;             // any argument is written
  bool fills = false;              // writes one value everywhere: elements may share memory
  bool fills_output_size = false;  // an output_size that was not given is the sum of `repeats`
  bool is_foreach =
      false;  // lists may span devices, as PyTorch allows: then the composite kernel takes them one by one
  ValueCheck check = ValueCheck::kNone;
  // kFunctional: an out= form whose result sizes depend on data runs this overload and copies its results.
  std::string functional, functional_overload;
};

// Asked once an op, before its first call: fills in what only Python knows (scalar policies, hidden writes,
// rung).
using DescribeFn = std::function<void(OpRecord&)>;
void set_describe(DescribeFn describe);
void describe_once(OpRecord& record);

// The record of an overload; one address for the life of the process.
OpRecord& record_of(const c10::OperatorHandle& op);

// The record of a compiled graph, as if it were one op. Lives as long as the process too: keys of programs
// that are still in the cache name it.
OpRecord& new_graph_record(std::string name, std::vector<ArgRecord> args, bool rng);

}  // namespace torch_tpu
