// The miss: one call to Python for the StableHLO of an op, then the plugin's compiler, without the GIL.
#pragma once

#include "dispatch/call.h"

namespace torch_tpu {

// Python's side, installed once at import (csrc/python/lowering.cpp).
struct Lowering {
  std::function<ProgramSpec(const Call&)> lower;  // throws what the op's meta kernel throws
  std::function<ProgramSpec(c10::ScalarType, DimsRef, DimsRef)> reshape;
  // After a compile: for the log, and for the disk cache if `store_key` is not empty.
  std::function<void(const std::string& op, const std::string& stablehlo, const std::string& store_key,
                     const std::string& executable, const std::string& optimized, double duration_ms)>
      compiled;
};
void install_lowering(Lowering lowering);

ProgramSpec lower_call(const Call& call);
ProgramSpec lower_reshape(c10::ScalarType dtype, DimsRef from, DimsRef to);

// Whether `compiled` is told the optimised program too.
void keep_optimized(bool wanted);

// Loads what the disk cache had, or compiles. Blocks for milliseconds to minutes; releases the GIL. Throws
// E104, or E304 if the device has no room for the program.
ProgramRef compile_spec(ProgramSpec spec);

// The program of a call that will be recorded: its text is lowered again into a fused program.
ProgramRef keep_spec(ProgramSpec spec);

// Programs that this process compiled, and that it loaded from the disk cache.
struct CompileCounts {
  int64_t compiled, loaded;
};
CompileCounts compile_counts();

}  // namespace torch_tpu
