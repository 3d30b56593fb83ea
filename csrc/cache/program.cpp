#include "cache/program.h"

namespace torch_tpu {

namespace {

std::atomic<int64_t> g_next_id{1};

size_t words_of(const std::vector<Encoding>& operands) {
  size_t words = 0;
  for (const Encoding e : operands) {
    words += e == Encoding::kSkip ? 0 : e == Encoding::kF64 || e == Encoding::kI64 ? 2 : 1;
  }
  return words;
}

// The text is needed no more once there is an executable.
ProgramSpec without_text(ProgramSpec spec, bool compiled) {
  if (compiled) spec.stablehlo = {};
  spec.serialized = {};
  spec.compile_options = {};
  spec.store_key = {};
  return spec;
}

}  // namespace

Program::Program(ProgramSpec from, std::optional<pjrt::Executable> exe)
    : spec(without_text(std::move(from), exe.has_value())),
      executable(std::move(exe)),
      id(g_next_id.fetch_add(1, std::memory_order_relaxed)),
      code_bytes(executable ? executable->code_bytes() : 0),
      operand_words(words_of(spec.operands)) {}

}  // namespace torch_tpu
