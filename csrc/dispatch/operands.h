// The packed operands of a launch: one small uint32 buffer for all scalars, view starts, seeds and offsets.
#pragma once

#include "dispatch/call.h"

namespace torch_tpu {

// The buffer for the values of `call`, as `program` reads them. Takes (and advances) the seed and offset of
// the generator for ops that use random numbers. Recently used packs are reused.
BufferRef packed_operands(const Call& call, const Program& program);

}  // namespace torch_tpu
