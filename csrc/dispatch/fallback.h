// The lower rungs of a miss: PyTorch's composite kernel on device tensors, then the CPU.
#pragma once

#include <ATen/core/stack.h>

#include "dispatch/op_record.h"

namespace torch_tpu {

void run_composite(OpRecord& record, torch::jit::Stack& stack);
// out= forms of ops with data-dependent sizes: the functional overload, then resize and copy.
void run_functional(OpRecord& record, torch::jit::Stack& stack);
// An op that the host computes by design (torch_tpu/modes/host_ops.py): no fallback, so no policy and no
// warning.
void run_on_host(OpRecord& record, torch::jit::Stack& stack);
// Obeys the policy of set_cpu_fallback.
void run_on_cpu(OpRecord& record, torch::jit::Stack& stack);

}  // namespace torch_tpu
