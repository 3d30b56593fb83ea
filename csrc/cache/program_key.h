// ProgramKey: everything that can change the compiled program, and nothing else.
//
// Two calls share a program exactly when their keys are equal. The map compares whole keys; the hash only
// picks the bucket. A field that a lowering rule can read (LowerContext in lowering/registry.py) must be
// here: tests/test_key.py changes each such field and expects a new program. Not in it: the device (programs
// are portable), donation, and the values of operands.
#pragma once

#include <c10/util/SmallVector.h>

#include <cstdint>

namespace torch_tpu {

struct ProgramKey {
  // The op's record, the global state, then per argument: tag, dtypes, dims, view plan or scalar bits.
  c10::SmallVector<int64_t, 64> words;

  bool operator==(const ProgramKey& other) const { return words == other.words; }

  size_t hash() const {
    uint64_t h = 0x9E3779B97F4A7C15;
    for (const int64_t w : words) {
      h = (h ^ static_cast<uint64_t>(w)) * 0xFF51AFD7ED558CCD;
      h ^= h >> 32;
    }
    return h;
  }
};

}  // namespace torch_tpu
