#include "dispatch/operands.h"

#include <ATen/Context.h>
#include <ATen/core/Generator.h>

#include <bit>

#include "storage/transfer.h"
#include "util/check.h"

namespace torch_tpu {

namespace {

using Words = c10::SmallVector<uint32_t, 16>;

void put64(Words& words, uint64_t bits) {
  words.push_back(static_cast<uint32_t>(bits));
  words.push_back(static_cast<uint32_t>(bits >> 32));
}

bool is_float(const Operand& op) {
  return op.kind == Operand::kFloat || (op.kind == Operand::kTensor && c10::isFloatingType(op.dtype));
}

void put(Words& words, const Operand& op, Encoding encoding) {
  const double f = is_float(op) ? op.f : static_cast<double>(op.i);
  const int64_t i = is_float(op) ? static_cast<int64_t>(op.f) : op.i;
  switch (encoding) {
    case Encoding::kSkip:
      return;
    case Encoding::kF32:
      return words.push_back(std::bit_cast<uint32_t>(static_cast<float>(f)));
    case Encoding::kF64:
      return put64(words, std::bit_cast<uint64_t>(f));
    case Encoding::kI32:
      return words.push_back(static_cast<uint32_t>(i));
    case Encoding::kI64:
      return put64(words, static_cast<uint64_t>(i));
  }
}

at::Generator generator_of(const Call& call) {
  for (size_t i = 0; i < call.record.args.size(); ++i) {
    if (call.record.args[i].kind != ArgRecord::kGenerator || call.arg(i).isNone()) continue;
    at::Generator generator = call.arg(i).toGenerator();
    TORCH_TPU_CHECK(E206, generator.device().type() == c10::DeviceType::PrivateUse1, "[", call.record.name,
                    "] Expected a 'tpu' device type for generator but found '", generator.device(), "'.",
                    Fix("create it with torch.Generator(device=\"tpu\")."));
    return generator;
  }
  return at::globalContext().defaultGenerator(c10::Device(c10::DeviceType::PrivateUse1, call.device->index));
}

// Elements of the first result; of the view, not of the storage that it is written to.
int64_t drawn_elements(const Call& call, const ProgramSpec& spec) {
  const OutputSpec& out = spec.outputs.at(0);
  if (out.slot < 0) return numel_of(out.sizes);
  for (const TensorArg& t : call.tensors) {
    if (t.written && t.slot == out.slot) return t.tensor->numel();
  }
  return numel_of(out.dims);
}

// Counters for one launch: an element of the first result owns one, rounded up to 4.
std::pair<uint64_t, uint64_t> draw(const Call& call, const ProgramSpec& spec) {
  at::Generator generator = generator_of(call);
  const auto count = static_cast<uint64_t>(spec.counters >= 0 ? spec.counters : drawn_elements(call, spec));
  std::lock_guard lock(generator.mutex());
  const uint64_t offset = generator.get_offset();
  generator.set_offset(offset + (count + 3) / 4 * 4);
  return {generator.current_seed(), offset};
}

// Packs of this thread by value. Owner: the thread. Limit: its length. An entry is valid for ever: buffers do
// not change.
struct Recent {
  struct Entry {
    Words words;
    BufferRef buffer;
  };
  std::array<Entry, 64> entries;
};

}  // namespace

BufferRef packed_operands(const Call& call, const Program& program) {
  const ProgramSpec& spec = program.spec;
  Words words;
  for (size_t i = 0; i < call.operands.size(); ++i) put(words, call.operands[i], spec.operands[i]);
  if (call.record.rng) {
    const auto [seed, offset] = draw(call, spec);
    put64(words, seed);
    put64(words, offset);
  }
  uint32_t h = static_cast<uint32_t>(call.device->index) + static_cast<uint32_t>(words.size()) * 31;
  for (const uint32_t w : words) h = (h ^ w) * 0x9E3779B1 ^ h >> 15;
  static thread_local Recent recent;
  auto& entry = recent.entries[h >> 26];
  if (entry.buffer == nullptr || &entry.buffer->device != call.device || entry.words != words) {
    const auto n = static_cast<int64_t>(words.size());
    entry.buffer = buffer_from_host(*call.device, words.data(), c10::ScalarType::UInt32, n);
    entry.words = words;
  }
  return entry.buffer;
}

}  // namespace torch_tpu
