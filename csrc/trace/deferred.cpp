#include "trace/deferred.h"

#include <c10/util/flat_hash_map.h>

#include "cache/executable_cache.h"
#include "storage/transfer.h"
#include "util/check.h"

namespace torch_tpu {

namespace {

constexpr int64_t kFusedTag = -2;  // first word of a key; no OpRecord has this address
constexpr size_t kMaxNodes = 1024;
constexpr size_t kMinRepeat = 200;  // nodes; below, a stretch that repeats itself may go on
constexpr int64_t kMaxBytes = int64_t{1} << 30;
constexpr size_t kMaxDevices = 64;

Fuse g_fuse;

struct Counters {
  std::array<std::atomic<int64_t>, static_cast<size_t>(FlushReason::kCount)> flushes{};
  std::atomic<int64_t> recorded{0}, launched{0}, dead{0};
} g_counters;

using Outputs = c10::SmallVector<BufferRef, 4>;

// Which values of a stretch were ever needed, by the key of its wiring. Who is alive depends on Python's
// garbage collector: a program has the results of all times, so that it need not be compiled for each
// combination. Limit: forgotten when it is full; then the next program has the results of the next time.
class EverLive {
 public:
  std::vector<int64_t> join(const ProgramKey& wiring, std::vector<int64_t> mask) {
    std::lock_guard lock(mutex_);
    if (known_.size() >= kLimit) known_.clear();
    std::vector<int64_t>& all = known_[wiring];
    all.resize(mask.size());
    for (size_t i = 0; i < mask.size(); ++i) all[i] |= mask[i];
    return all;
  }

 private:
  static constexpr size_t kLimit = 4096;
  struct Hash {
    size_t operator()(const ProgramKey& k) const { return k.hash(); }
  };
  std::mutex mutex_;  // guards the map
  std::unordered_map<ProgramKey, std::vector<int64_t>, Hash> known_;
};

class Stretch;

// Of one device. Lock: guards `current` and the stretch in it while that is recorded.
struct Graph {
  SpinLock lock;
  std::shared_ptr<Stretch> current;
};

Graph& graph_of(const DeviceState& device) {
  static auto* graphs = new std::array<Graph, kMaxDevices>;
  return graphs->at(static_cast<size_t>(device.index));
}

class Stretch final : public Pending, public std::enable_shared_from_this<Stretch> {
 public:
  explicit Stretch(DeviceState& device) : device_(device) { key_.words.push_back(kFusedTag); }

  // Under the lock of the graph.
  Outputs append(const ProgramRef& program, c10::ArrayRef<DeviceBuffer*> args, c10::ArrayRef<uint32_t> words,
                 const char* op) {
    add_node(program, args, words);
    Outputs outs;
    for (const OutputSpec& o : program->spec.outputs) {
      outs.push_back(c10::make_intrusive<DeviceBuffer>(device_, shared_from_this(), o.dtype, o.dims, op));
      bytes_ += outs.back()->bytes;
      add_value(outs.back());
    }
    return outs;
  }

  // Under the lock of the graph: why it should be run now.
  std::optional<FlushReason> full() const {
    const size_t n = nodes_.size();
    if (n >= kMaxNodes) return FlushReason::kNodes;
    if (bytes_ >= kMaxBytes) return FlushReason::kBytes;
    const size_t length = border_.size(), period = length - border_.back();
    if (length >= kMinRepeat && length % (2 * period) == 0) return FlushReason::kRepeat;
    return std::nullopt;
  }

  void run() override { run_for(FlushReason::kRead); }

  void run_for(FlushReason reason) {
    const std::shared_ptr<Stretch> self = shared_from_this();
    {
      Graph& graph = graph_of(device_);
      std::lock_guard lock(graph.lock);
      if (graph.current == self) graph.current.reset();
    }
    Runtime::without_gil([this] { mutex_.lock(); });
    const std::lock_guard lock(mutex_, std::adopt_lock);
    if (nodes_.empty()) return;
    g_counters.flushes[static_cast<size_t>(reason)].fetch_add(1, std::memory_order_relaxed);
    execute();
    externals_.clear();
    values_.clear();
    nodes_.clear();
  }

 private:
  struct Node {
    ProgramRef program;
    size_t first_wire, first_word, first_value;
  };

  void add_node(const ProgramRef& program, c10::ArrayRef<DeviceBuffer*> args, c10::ArrayRef<uint32_t> words) {
    nodes_.push_back({program, wires_.size(), words_.size(), values_.size()});
    key_.words.push_back(program->id);
    for (DeviceBuffer* arg : args) {
      const auto [at, fresh] = wire_of_.emplace(arg, static_cast<int>(externals_.size()));
      if (fresh) externals_.push_back(BufferRef::reclaim_copy(arg));
      wires_.push_back(at->second);
      key_.words.push_back(at->second);
    }
    words_.insert(words_.end(), words.begin(), words.end());
    extend_border();
  }

  // The longest proper border of the sequence of programs (Knuth, Morris and Pratt): what it repeats itself
  // by. What does not repeat itself may be a prologue: then the search starts again behind it.
  void extend_border() {
    if (border_.size() >= kMinRepeat && 2 * border_.back() < border_.size()) {
      searched_from_ = nodes_.size() - 1;
      border_.clear();
    }
    const auto id = [this](size_t i) { return nodes_[searched_from_ + i].program->id; };
    const size_t last = border_.size();
    size_t k = last == 0 ? 0 : border_.back();
    while (k > 0 && id(k) != id(last)) k = border_[k - 1];
    border_.push_back(last > 0 && id(k) == id(last) ? k + 1 : 0);
  }

  void add_value(BufferRef value) {
    wire_of_.emplace(value.get(), ~static_cast<int>(values_.size()));
    values_.push_back(std::move(value));
  }

  size_t wires_end(size_t node) const {
    return node + 1 < nodes_.size() ? nodes_[node + 1].first_wire : wires_.size();
  }
  size_t words_end(size_t node) const {
    return node + 1 < nodes_.size() ? nodes_[node + 1].first_word : words_.size();
  }
  size_t values_end(size_t node) const {
    return node + 1 < nodes_.size() ? nodes_[node + 1].first_value : values_.size();
  }

  void fail_all(const FailurePtr& failure) {
    for (const BufferRef& value : values_) {
      if (value->pending()) value->fail(failure);
    }
  }

  // All values that somebody holds are fulfilled or failed afterwards.
  void execute() {
    try {
      if (!run_around_failures()) launch();
    } catch (const pjrt::Error& e) {
      fail_all(std::make_shared<Failure>(Failure{e.code, c10::str("[", title(), "] ", e.what())}));
    } catch (const c10::Error& e) {
      const bool memory = dynamic_cast<const c10::OutOfMemoryError*>(&e) != nullptr;
      fail_all(std::make_shared<Failure>(
          Failure{memory ? PJRT_Error_Code_RESOURCE_EXHAUSTED : PJRT_Error_Code_INTERNAL,
                  e.what_without_backtrace()}));
    }
  }

  // Values that depend on a failed external fail; the rest of the stretch runs. False: nothing has failed.
  bool run_around_failures() {
    std::vector<FailurePtr> of_external, of_value(values_.size());
    bool any = false;
    for (const BufferRef& e : externals_) {
      of_external.push_back(e->failure());
      any |= of_external.back() != nullptr;
    }
    if (!any) return false;
    const auto rest = std::make_shared<Stretch>(device_);
    for (size_t n = 0; n < nodes_.size(); ++n) {
      FailurePtr failure;
      c10::SmallVector<DeviceBuffer*, 8> args;
      for (size_t i = nodes_[n].first_wire; i < wires_end(n); ++i) {
        const int wire = wires_[i];
        const auto at = static_cast<size_t>(wire < 0 ? ~wire : wire);
        if (failure == nullptr) failure = wire < 0 ? of_value[at] : of_external[at];
        args.push_back(wire < 0 ? values_[at].get() : externals_[at].get());
      }
      if (failure == nullptr) {
        rest->add_node(
            nodes_[n].program, args,
            c10::ArrayRef<uint32_t>(words_).slice(nodes_[n].first_word, words_end(n) - nodes_[n].first_word));
      }
      for (size_t v = nodes_[n].first_value; v < values_end(n); ++v) {
        of_value[v] = failure;
        if (failure != nullptr) {
          values_[v]->fail(failure);
        } else {
          rest->add_value(values_[v]);
        }
      }
    }
    values_.clear();
    rest->execute();
    return true;
  }

  std::vector<int64_t> live_mask() const {
    std::vector<int64_t> mask((values_.size() + 63) / 64);
    for (size_t v = 0; v < values_.size(); ++v) {
      if (values_[v].use_count() > 1) mask[v / 64] |= int64_t{1} << v % 64;
    }
    return mask;
  }

  void launch() {
    const std::vector<int64_t> needed = live_mask();
    if (std::all_of(needed.begin(), needed.end(), [](int64_t word) { return word == 0; })) return;
    static auto* ever_live = new EverLive;
    const std::vector<int64_t> live = ever_live->join(key_, needed);
    ProgramKey key = key_;
    key.words.append(live.begin(), live.end());
    const ProgramRef program =
        ExecutableCache::get().find_or_make(key, key.hash(), [&] { return g_fuse(request(live)); });
    const ProgramSpec& spec = program->spec;
    std::vector<PJRT_Buffer*> args, raw(spec.outputs.size());
    for (const BufferRef& e : externals_) args.push_back(e->handle());
    BufferRef pack;
    if (!words_.empty()) {
      pack = buffer_from_host(device_, words_.data(), c10::ScalarType::UInt32,
                              static_cast<int64_t>(words_.size()));
      args.push_back(pack->handle());
    }
    std::vector<int64_t> keep;
    for (const int d : spec.donated) {
      if (externals_[static_cast<size_t>(d)].use_count() != 1) keep.push_back(d);
    }
    try {
      device_.launch(*program->executable,
                     {.device = device_.device.handle,
                      .args = args.data(),
                      .num_args = args.size(),
                      .outs = raw.data(),
                      .keep = keep.data(),
                      .num_keep = keep.size()},
                     spec.donated.size(), "fused ops");
    } catch (const pjrt::Error& e) {
      device_.work.fail(std::make_shared<Failure>(Failure{e.code, c10::str("[", title(), "] ", e.what())}));
      throw;
    }
    g_counters.launched.fetch_add(1, std::memory_order_relaxed);
    g_counters.dead.fetch_add(static_cast<int64_t>(values_.size() - raw.size()), std::memory_order_relaxed);
    externals_.clear();  // what was donated is memory of the results now and must not be counted twice
    const PJRT_Api* api = Runtime::get().client().api();
    for (size_t i = 0; i < raw.size(); ++i) {
      pjrt::Buffer array(api, raw[i]);
      const BufferRef& value = values_[static_cast<size_t>(spec.outputs[i].slot)];
      if (value.use_count() > 1) value->fulfil(std::move(array));
    }
  }

  FuseRequest request(const std::vector<int64_t>& live) const {
    FuseRequest r;
    std::unordered_map<const Program*, int> texts;
    for (size_t n = 0; n < nodes_.size(); ++n) {
      const Program* program = nodes_[n].program.get();
      const auto [at, fresh] = texts.emplace(program, static_cast<int>(r.texts.size()));
      if (fresh) r.texts.push_back(&program->spec.stablehlo);
      r.nodes.push_back({at->second,
                         {wires_.begin() + static_cast<int64_t>(nodes_[n].first_wire),
                          wires_.begin() + static_cast<int64_t>(wires_end(n))},
                         words_end(n) - nodes_[n].first_word});
    }
    for (const BufferRef& e : externals_) {
      if (e.use_count() == 1) r.dying.push_back(static_cast<int>(r.externals.size()));
      r.externals.push_back({e->dtype, e->dims});
    }
    for (size_t v = 0; v < values_.size(); ++v) {
      if (live[v / 64] >> v % 64 & 1) r.live.push_back(static_cast<int>(v));
      r.values.push_back({values_[v]->dtype, values_[v]->dims});
    }
    return r;
  }

  std::string title() const {
    return c10::str("fused program of ", nodes_.size(), " ops, from ", nodes_.front().program->spec.name,
                    " to ", nodes_.back().program->spec.name);
  }

  DeviceState& device_;
  std::vector<Node> nodes_;
  std::vector<int> wires_;  // of all nodes, see FuseRequest
  std::vector<BufferRef> externals_, values_;
  std::vector<uint32_t> words_;
  ska::flat_hash_map<const DeviceBuffer*, int> wire_of_;
  std::vector<size_t> border_;  // of the nodes from this one on:
  size_t searched_from_ = 0;
  ProgramKey key_;
  int64_t bytes_ = 0;
  std::mutex mutex_;  // held while it runs
};

}  // namespace

void install_fuse(Fuse fuse) { g_fuse = std::move(fuse); }

Outputs record_launch(DeviceState& device, const ProgramRef& program, c10::ArrayRef<DeviceBuffer*> args,
                      c10::ArrayRef<uint32_t> words, const char* op) {
  Graph& graph = graph_of(device);
  g_counters.recorded.fetch_add(1, std::memory_order_relaxed);
  std::lock_guard lock(graph.lock);
  if (graph.current == nullptr) graph.current = std::make_shared<Stretch>(device);
  return graph.current->append(program, args, words, op);
}

void flush(DeviceState& device, FlushReason reason) {
  std::shared_ptr<Stretch> stretch;
  {
    Graph& graph = graph_of(device);
    std::lock_guard lock(graph.lock);
    stretch = graph.current;
  }
  if (stretch != nullptr) stretch->run_for(reason);
}

void flush_if_full(DeviceState& device) {
  std::optional<FlushReason> reason;
  {
    Graph& graph = graph_of(device);
    std::lock_guard lock(graph.lock);
    if (graph.current != nullptr) reason = graph.current->full();
  }
  if (reason) flush(device, *reason);
}

DeferredStats deferred_stats() {
  DeferredStats s;
  for (size_t i = 0; i < s.flushes.size(); ++i) s.flushes[i] = g_counters.flushes[i].load();
  s.recorded = g_counters.recorded.load();
  s.launched = g_counters.launched.load();
  s.dead = g_counters.dead.load();
  return s;
}

}  // namespace torch_tpu
