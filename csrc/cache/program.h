// A compiled program and how to call it: what a hit needs, made once by a miss.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "storage/storage.h"

namespace torch_tpu {

// How an operand (a scalar, a view start, a seed) is written into the packed operand buffer: uint32 words.
enum class Encoding : int8_t { kSkip, kF32, kF64, kI32, kI64 };

// One result of the program.
struct OutputSpec {
  c10::ScalarType dtype;
  Dims dims;            // of the buffer
  int slot = -1;        // the storage that adopts it; -1: a new tensor
  Dims sizes, strides;  // of the new tensor
  int count = -1;       // data-dependent: the output that holds the true size of dim `count_dim`
  int count_dim = 0;
};

// One value the op returns: an output, an argument (in-place and out= forms), undefined, or a list of these.
struct ReturnSpec {
  enum Kind : int8_t { kOutput, kArgument, kUndefined, kList, kInt, kView } kind;
  int64_t index = 0;              // of the output or of the argument; kInt: the value; kView: the offset
  std::vector<ReturnSpec> items;  // of a list; kView: what it is a view of
  Dims sizes, strides;            // kView
};

// An out= tensor takes the sizes of the result first.
struct ResizeSpec {
  int tensor;  // index among the tensor arguments
  Dims sizes, strides;
};

// What the lowering says of one call; the only thing that comes back from Python.
struct ProgramSpec {
  enum Rung : int8_t { kProgram, kComposite, kCpu };
  Rung rung = kProgram;
  std::string stablehlo;        // or
  std::string serialized;       // an executable from the disk cache
  std::string compile_options;  // empty: the runtime's
  std::vector<int> arg_slots;   // storages that are parameters, in order; the packed operands follow
  std::vector<int> donated;     // parameters (indices into arg_slots) that an output aliases
  std::vector<int>
      consumed;  // of these, parameters whose storage nobody reads again: it is left without contents
  std::vector<Encoding> operands;
  std::vector<OutputSpec> outputs;
  std::vector<ReturnSpec> returns;
  std::vector<ResizeSpec> resizes;
  int64_t counters =
      -1;  // how far the generator advances; -1: by the elements of the first output, rounded up to 4
  std::string name;       // for messages: "aten.add.Tensor"
  std::string store_key;  // name of the entry in the disk cache; empty: do not store
};

class Program final : public c10::intrusive_ptr_target {
 public:
  Program(ProgramSpec spec, std::optional<pjrt::Executable> executable);
  const ProgramSpec spec;
  const std::optional<pjrt::Executable> executable;  // none: nothing to compute, or to be recorded only
  const int64_t id;                                  // never used again in this process
  const int64_t code_bytes;
  const size_t operand_words;
  std::atomic<uint64_t> last_used{0};
};
using ProgramRef = c10::intrusive_ptr<Program>;

}  // namespace torch_tpu
