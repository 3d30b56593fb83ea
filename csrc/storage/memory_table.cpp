#include "storage/memory_table.h"

#include <algorithm>
#include <iomanip>
#include <map>
#include <sstream>
#include <tuple>
#include <unordered_set>

#include "storage/storage.h"

namespace torch_tpu {

namespace {

constexpr size_t kMaxLines = 10;

struct Line {
  std::string what;
  int64_t arrays = 0, bytes = 0;
};

std::string in_mib(int64_t bytes) {
  std::ostringstream out;
  out << std::fixed << std::setprecision(1) << static_cast<double>(bytes) / (1 << 20) << " MiB";
  return out.str();
}

std::string describe(const DeviceBuffer& buffer) {
  std::ostringstream out;
  out << "tpu:" << static_cast<int>(buffer.device.index) << " " << c10::getDtypeNames(buffer.dtype).first
      << "[";
  for (size_t i = 0; i < buffer.dims.size(); ++i) out << (i == 0 ? "" : ", ") << buffer.dims[i];
  out << "]" << (buffer.op == nullptr ? "" : " of ") << (buffer.op == nullptr ? "" : buffer.op);
  return out.str();
}

}  // namespace

std::string memory_table() {
  std::map<std::string, Line> by_kind;
  std::unordered_set<const DeviceBuffer*> seen;  // storages may share a buffer
  Line all;
  for (const Storage::Live& live : Storage::snapshot()) {
    if (live.buffer == nullptr || live.buffer->pending() || live.buffer->bytes == 0) continue;
    if (!seen.insert(live.buffer.get()).second) continue;
    Line& line = by_kind[describe(*live.buffer)];
    for (Line* l : {&line, &all}) {
      ++l->arrays;
      l->bytes += live.buffer->bytes;
    }
  }
  std::vector<Line> lines;
  for (auto& [what, line] : by_kind) lines.push_back({what, line.arrays, line.bytes});
  std::stable_sort(lines.begin(), lines.end(),
                   [](const Line& a, const Line& b) { return a.bytes > b.bytes; });
  std::ostringstream out;
  out << "Tensors hold " << in_mib(all.bytes) << " in " << all.arrays << " arrays:";
  for (size_t i = 0; i < std::min(lines.size(), kMaxLines); ++i)
    out << "\n  " << std::setw(12) << in_mib(lines[i].bytes) << "  " << lines[i].arrays << " x "
        << lines[i].what;
  if (lines.size() > kMaxLines) out << "\n  and " << lines.size() - kMaxLines << " other kinds";
  return out.str();
}

}  // namespace torch_tpu
