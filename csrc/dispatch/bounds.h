// The way into and out of a program whose sizes are bounds: its dynamic inputs and results are flat buffers
// of fixed capacity with the true elements first, dense, in memory order. torch_tpu/compile/bounds.py makes
// the forms.
#pragma once

#include <ATen/core/stack.h>

#include <vector>

#include "storage/storage.h"

namespace torch_tpu {

struct SizedInput {
  size_t position;
  Dims order;  // dims from outermost to innermost in memory
  int64_t capacity;
};

struct SizedResult {
  enum Kind : int8_t { kAsIs, kInt, kArgument, kView, kSized } kind = kAsIs;
  int64_t number = 0;   // kInt: the value; kArgument and kView: which input
  Dims sizes, strides;  // kView: over that input; kSized: over what the program returned
  int64_t offset = 0;
};

// What depends on the true sizes of one call: made once for each set of them.
struct Form {
  std::vector<int64_t> numbers;  // of the symbols: operands behind the inputs
  std::vector<SizedInput> inputs;
  std::vector<SizedResult> results;
};

// How dynamic inputs got their capacity: they had it, through the host, by a program of their own.
struct BoundsStats {
  int64_t reused, host_copies, pad_programs;
};
BoundsStats bounds_stats();

// Replaces the dynamic inputs on the stack by flat ones and adds the numbers. The inputs that results name,
// by position.
std::vector<c10::IValue> enter_bounds(const Form& form, torch::jit::Stack& stack);
// Gives the results on the stack their true sizes.
void leave_bounds(const Form& form, const std::vector<c10::IValue>& originals, torch::jit::Stack& stack);

}  // namespace torch_tpu
