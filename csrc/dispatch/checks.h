// What ATen checks by value at every call, and what it rewrites by value: no meta kernel can.
#pragma once

#include <ATen/core/stack.h>

#include "dispatch/op_record.h"

namespace torch_tpu {

// Throws what the CPU kernel throws for an argument value out of range.
void check_values(const OpRecord& record, const torch::jit::Stack& stack);

// repeat_interleave without output_size: the size is read from the device, so that the program has static
// sizes.
void fill_output_size(OpRecord& record, torch::jit::Stack& stack);

// Debug mode: throws IndexError if an index tensor of the call holds one that is out of range. Installed
// once.
using BoundsFn = std::function<void(const OpRecord&, const torch::jit::Stack&)>;
void install_bounds_check(BoundsFn check);
void check_bounds(const OpRecord& record, const torch::jit::Stack& stack);

// bincount: its number of bins is read from the device and passed as minlength. Throws what ATen throws for
// negative numbers.
void fill_minlength(OpRecord& record, torch::jit::Stack& stack);

// Whether the lists of a foreach op are on several devices, or partly on the CPU.
bool spans_devices(const OpRecord& record, const torch::jit::Stack& stack);

// Index ops: a mask becomes the columns of its nonzero(), as in ATen. A mask that is the only index of an
// index_put with a value of one element stays: it lowers to a select.
void expand_masks(OpRecord& record, torch::jit::Stack& stack);

}  // namespace torch_tpu
