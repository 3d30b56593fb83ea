// Launches that are recorded instead of made, and then run as one program (fused mode).
//
// A stretch is what was recorded on one device since the last flush: programs of single ops, each with the
// buffers it reads, the words of its operands, and the buffers it will make. Those are pending: they have
// dtype and dims, but no contents. Whoever needs the contents of one runs its stretch. Values that nobody
// holds any more by then are never computed into a buffer, and inputs that only the stretch holds are
// donated.
//
// A stretch belongs to a device, not to a thread: backward runs on a thread of its own. Lock of a device's
// current stretch: a few hundred nanoseconds for each op. Lock of a stretch: from its flush to the launch;
// taken without the GIL, and under it those of earlier stretches whose values it reads.
#pragma once

#include <array>
#include <functional>

#include "cache/program.h"

namespace torch_tpu {

// Why a stretch was flushed.
enum class FlushReason : int8_t {
  kRead,
  kSynchronize,
  kEvent,
  kStep,
  kRepeat,
  kNodes,
  kBytes,
  kMode,
  kCount
};

// A stretch, as the lowering sees it: node i calls texts[node.text] on its wires.
struct FuseRequest {
  struct Node {
    int text;
    std::vector<int> wires;  // >= 0: external; < 0: value ~wire
    size_t words;            // of operands
  };
  struct Array {
    c10::ScalarType dtype;
    Dims dims;
  };
  std::vector<const std::string*> texts;
  std::vector<Node> nodes;
  std::vector<Array> externals, values;
  std::vector<int> live;   // values that are results
  std::vector<int> dying;  // externals that may be donated
};
// Lowers and compiles; outputs[i].slot is the number of the value, `donated` are numbers of externals.
// Installed once.
using Fuse = std::function<ProgramRef(const FuseRequest&)>;
void install_fuse(Fuse fuse);

// Records a launch of `program` on `args`; the buffers are its results. `op` is for messages and lives for
// ever.
c10::SmallVector<BufferRef, 4> record_launch(DeviceState& device, const ProgramRef& program,
                                             c10::ArrayRef<DeviceBuffer*> args, c10::ArrayRef<uint32_t> words,
                                             const char* op);

// Runs what is recorded on the device, if anything.
void flush(DeviceState& device, FlushReason reason);
// Runs it if it is long enough, or repeats itself. After the call is complete: then more is dead.
void flush_if_full(DeviceState& device);

struct DeferredStats {
  std::array<int64_t, static_cast<size_t>(FlushReason::kCount)> flushes{};  // by reason
  int64_t recorded = 0, launched = 0, dead = 0;  // ops recorded, programs run, values that never existed
};
DeferredStats deferred_stats();

}  // namespace torch_tpu
