// Runs any ATen op on device "tpu": replaces the arguments on the stack by the results.
//
//   stack -> Call (views, key) -> ExecutableCache --hit-----------------------------------> launch
//                                        |                                                    ^
//                                        +--miss--> lower (Python) -> compile (plugin) -------+
//
// Out= and in-place overloads run the functional program and write its result through, as their schema says.
// A hit takes no lock that a compile holds and calls no Python. Thread-safe; blocks on a miss only. Why one
// boxed kernel and not one an op: docs/adr/0001.
#pragma once

#include <ATen/core/stack.h>

#include "dispatch/op_record.h"

namespace torch_tpu {

void run_op(OpRecord& record, torch::jit::Stack& stack);

// Makes run_op the PrivateUse1 kernel of every aten overload that computes. Called once, at import. A backend
// fallback would not do: structured functional overloads have a default kernel that comes before it. Returns
// how many there are.
int register_kernels();

// How an op without rule, decomposition or composite kernel runs.
enum class CpuFallback : int8_t { kWarn, kError, kSilent };
void set_cpu_fallback(CpuFallback policy);
std::vector<std::pair<std::string, int64_t>> cpu_fallback_counts();

class Call;

// The same for a compiled graph; `lower` makes the program of a key that is not in the cache.
void run_graph(OpRecord& record, torch::jit::Stack& stack,
               const std::function<ProgramSpec(const Call&)>& lower);

}  // namespace torch_tpu
