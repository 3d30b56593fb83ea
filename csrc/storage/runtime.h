// The process-wide runtime: the plugin's client, its devices, and the work each device has pending.
#pragma once

#include <c10/core/Device.h>

#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "pjrt/client.h"

namespace torch_tpu {

// Why a launch failed; shared by every buffer that depends on it.
struct Failure {
  PJRT_Error_Code code;
  std::string text;  // names the op
};
using FailurePtr = std::shared_ptr<const Failure>;
[[noreturn]] void throw_failure(const Failure& failure);

// A point in the work of a device: done when all work pending at its creation is done.
class Mark {
 public:
  bool done() const;
  void wait();
  // Host time at which the work was done. Only after done().
  std::chrono::steady_clock::time_point done_at();

 private:
  friend class WorkQueue;
  void count_down();
  bool counted() const { return remaining_.load(std::memory_order_acquire) == 0; }
  // Plugins call back some time after an event is ready, so done() asks the events. Expired: off the queue,
  // hence ready.
  std::vector<std::weak_ptr<pjrt::Event>> events_;
  std::atomic<int> remaining_{1};
  std::mutex mutex_;  // guards the wait
  std::condition_variable cv_;
  std::chrono::steady_clock::time_point done_at_;
};

// Completion events of the launches of one device, oldest first, bounded. Thread-safe.
class WorkQueue {
 public:
  void push(pjrt::Event event, const char* op);
  void fail(FailurePtr failure);  // a launch that could not even start
  std::shared_ptr<Mark> mark();
  bool idle();
  // Waits for everything pushed so far.
  void drain();
  // The same; throws the first failure since the last call.
  void synchronize();

 private:
  struct Pending {
    std::shared_ptr<pjrt::Event> event;
    const char* op;
    uint64_t number;  // rising
  };
  static constexpr size_t kMaxPending = 64;
  void finish(const Pending& pending);
  std::mutex mutex_;  // guards all below; no call under it blocks
  uint64_t next_number_ = 0;
  std::deque<Pending> pending_;
  FailurePtr failure_;
};

// Bytes of live buffers, by our own accounting: plugins need not have statistics.
struct MemoryCounters {
  std::atomic<int64_t> bytes{0}, peak_bytes{0}, buffers{0}, peak_buffers{0};
  std::atomic<int64_t> allocated_bytes{0}, freed_bytes{0}, allocations{0}, frees{0}, ooms{0};
  void add(int64_t n);
  void remove(int64_t n);
};

struct DeviceState {
  c10::DeviceIndex index;
  pjrt::Device device;
  WorkQueue work;
  MemoryCounters memory;

  // Calls `attempt`. If the device has no memory left, waits for the work that still holds some, and calls it
  // once more where it `may_retry`. Counts what then still fails. Throws pjrt::Error.
  template <class Attempt>
  auto with_memory(bool may_retry, Attempt attempt);
  // Starts a program and queues its completion as `op`. Throws pjrt::Error.
  void launch(const pjrt::Executable& program, const pjrt::Executable::Launch& launch, size_t num_donatable,
              const char* op);
};

// What Python tells of the plugin, asked for at first use: launchers set the environment between import and
// that.
struct PluginSpec {
  std::string path, kind;  // kind: cpu, tpu, cuda or path
  pjrt::Options options;
  bool host_kernels = false;  // asked for
};

class Runtime {
 public:
  // Creates the client on first use. Throws E301, E302 (plugin) or E303 (forked). Thread-safe.
  static Runtime& get();
  static bool initialized();
  static bool forked();
  // `without_gil` runs a function with the GIL released if the caller holds it.
  using SpecFn = std::function<PluginSpec()>;
  using WithoutGilFn = std::function<void(const std::function<void()>&)>;
  static void install(SpecFn spec, WithoutGilFn without_gil);
  static void without_gil(const std::function<void()>& fn);

  const pjrt::Client& client() const { return *client_; }
  const PluginSpec& spec() const { return spec_; }
  int device_count() const { return static_cast<int>(devices_.size()); }
  DeviceState& device(int index);  // throws E202
  const std::string& compile_options() const { return compile_options_; }
  // The same with other flags, which win over ours.
  std::string compile_options(std::map<std::string, std::string> flags) const;
  // Whether programs may call the handlers of ffi/host_kernels.h.
  bool host_kernels() const { return host_kernels_; }
  void synchronize_all();

 private:
  explicit Runtime(PluginSpec spec);
  PluginSpec spec_;
  std::unique_ptr<pjrt::Client> client_;
  std::vector<std::unique_ptr<DeviceState>> devices_;
  std::map<std::string, std::string> flags_ = {{"xla_allow_excess_precision", "false"}};
  std::string compile_options_;
  bool host_kernels_ = false;
};

template <class Attempt>
auto DeviceState::with_memory(bool may_retry, Attempt attempt) {
  for (;; may_retry = false) {
    try {
      return attempt();
    } catch (const pjrt::Error& e) {
      if (e.code != PJRT_Error_Code_RESOURCE_EXHAUSTED) throw;
      if (!may_retry) {
        memory.ooms.fetch_add(1);
        throw;
      }
    }
    Runtime::without_gil([this] { work.drain(); });
  }
}

// Free and total bytes of the host: what a plugin without statistics has to share.
std::pair<size_t, size_t> host_memory_info();

}  // namespace torch_tpu
