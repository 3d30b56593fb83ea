// The packed operands of a launch: one small uint32 buffer for all scalars, view starts, seeds and offsets.
#pragma once

#include "dispatch/call.h"

namespace torch_tpu {

using OperandWords = c10::SmallVector<uint32_t, 16>;

// The values of `call`, as a program of `spec` reads them. Takes (and advances) the seed and offset of the
// generator for ops that use random numbers.
OperandWords operand_words(const Call& call, const ProgramSpec& spec);

// The buffer for the values of `call`, as `program` reads them. Recently used packs are reused.
BufferRef packed_operands(const Call& call, const Program& program);

}  // namespace torch_tpu
