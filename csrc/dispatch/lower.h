// The miss: one call to Python for the StableHLO of an op, then the plugin's compiler, without the GIL.
#pragma once

#include "dispatch/call.h"

namespace torch_tpu {

// Python's side, installed once at import (csrc/python/lowering.cpp).
struct Lowering {
  std::function<ProgramSpec(const Call&)> lower;  // throws what the op's meta kernel throws
  std::function<ProgramSpec(c10::ScalarType, DimsRef, DimsRef)> reshape;
  std::function<void(const std::string& key, const std::string& executable)> store;  // disk cache
};
void install_lowering(Lowering lowering);

ProgramSpec lower_call(const Call& call);
ProgramSpec lower_reshape(c10::ScalarType dtype, DimsRef from, DimsRef to);

// Compiles, or loads what the disk cache had. Blocks for milliseconds to minutes; releases the GIL.
ProgramRef compile_spec(ProgramSpec spec);

}  // namespace torch_tpu
