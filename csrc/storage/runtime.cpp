#include "storage/runtime.h"

#include <pthread.h>

#include <algorithm>
#include <cstdlib>

#include "ffi/host_kernels.h"
#include "storage/memory_table.h"
#include "util/check.h"

namespace torch_tpu {

void throw_failure(const Failure& failure) {
  TORCH_TPU_CHECK_WITH(OutOfMemoryError, E304, failure.code != PJRT_Error_Code_RESOURCE_EXHAUSTED,
                       failure.text, '\n', memory_table(),
                       Fix("free tensors you no longer need, or use smaller batches."));
  TORCH_TPU_CHECK(E203, false, failure.text);
}

// ---- Mark

void Mark::count_down() {
  {
    std::lock_guard lock(mutex_);
    const int left = remaining_.load(std::memory_order_relaxed) - 1;
    if (left == 0) done_at_ = std::chrono::steady_clock::now();
    remaining_.store(left, std::memory_order_release);
    if (left != 0) return;
  }
  cv_.notify_all();
}

void Mark::wait() {
  std::unique_lock lock(mutex_);
  cv_.wait(lock, [this] { return counted(); });
}

bool Mark::done() const {
  return counted() || std::all_of(events_.begin(), events_.end(), [](const std::weak_ptr<pjrt::Event>& weak) {
           const std::shared_ptr<pjrt::Event> event = weak.lock();
           return event == nullptr || event->is_ready();
         });
}

std::chrono::steady_clock::time_point Mark::done_at() {
  wait();
  return done_at_;
}

// ---- WorkQueue

void WorkQueue::finish(const Pending& pending) {
  if (auto error = pending.event->await()) {
    fail(std::make_shared<Failure>(
        Failure{error->code, std::string("[") + pending.op + "] " + error->what()}));
  }
}

void WorkQueue::push(pjrt::Event event, const char* op) {
  if (event.is_ready()) {  // ran in the caller
    if (auto error = event.await()) {
      fail(std::make_shared<Failure>(Failure{error->code, std::string("[") + op + "] " + error->what()}));
    }
    return;
  }
  std::vector<Pending> done;
  std::optional<Pending> oldest;
  {
    std::lock_guard lock(mutex_);
    pending_.push_back({std::make_shared<pjrt::Event>(std::move(event)), op, next_number_++});
    while (pending_.size() > 1 && pending_.front().event->is_ready()) {
      done.push_back(std::move(pending_.front()));
      pending_.pop_front();
    }
    if (pending_.size() > kMaxPending) {
      oldest = std::move(pending_.front());
      pending_.pop_front();
    }
  }
  for (const Pending& p : done) finish(p);
  if (oldest) finish(*oldest);
}

void WorkQueue::fail(FailurePtr failure) {
  std::lock_guard lock(mutex_);
  if (failure_ == nullptr) failure_ = std::move(failure);
}

std::shared_ptr<Mark> WorkQueue::mark() {
  auto mark = std::make_shared<Mark>();
  std::vector<std::shared_ptr<pjrt::Event>> events;
  {
    std::lock_guard lock(mutex_);
    for (const Pending& p : pending_) events.push_back(p.event);
  }
  mark->events_.assign(events.begin(), events.end());  // not shared yet
  mark->remaining_.store(static_cast<int>(events.size()) + 1, std::memory_order_relaxed);
  for (const auto& event : events) {
    event->on_ready([mark] { mark->count_down(); });
  }
  mark->count_down();
  return mark;
}

bool WorkQueue::idle() {
  std::lock_guard lock(mutex_);
  for (const Pending& p : pending_) {
    if (!p.event->is_ready()) return false;
  }
  return true;
}

void WorkQueue::drain() {
  for (std::optional<uint64_t> end;;) {
    Pending oldest;
    {
      std::lock_guard lock(mutex_);
      if (!end) end = next_number_;
      if (pending_.empty() || pending_.front().number >= *end) return;
      oldest = pending_.front();  // stays until it is done: marks of other threads must see it
    }
    const std::optional<pjrt::Error> error = oldest.event->await();
    {
      std::lock_guard lock(mutex_);
      if (pending_.empty() || pending_.front().number != oldest.number)
        continue;  // whoever removed it reports it
      pending_.pop_front();
    }
    if (error)
      fail(std::make_shared<Failure>(
          Failure{error->code, std::string("[") + oldest.op + "] " + error->what()}));
  }
}

void WorkQueue::synchronize() {
  drain();
  FailurePtr failure;
  {
    std::lock_guard lock(mutex_);
    failure.swap(failure_);
  }
  if (failure != nullptr) throw_failure(*failure);
}

// ---- DeviceState

void DeviceState::launch(const pjrt::Executable& program, const pjrt::Executable::Launch& launch,
                         size_t num_donatable, const char* op) {
  const bool nothing_donated = launch.num_keep == num_donatable;  // else a failed try may have consumed it
  work.push(with_memory(nothing_donated, [&] { return program.launch(launch); }), op);
}

// ---- MemoryCounters

namespace {

void raise_to(std::atomic<int64_t>& peak, int64_t value) {
  int64_t old = peak.load(std::memory_order_relaxed);
  while (old < value && !peak.compare_exchange_weak(old, value, std::memory_order_relaxed)) {
  }
}

}  // namespace

void MemoryCounters::add(int64_t n) {
  raise_to(peak_bytes, bytes.fetch_add(n, std::memory_order_relaxed) + n);
  raise_to(peak_buffers, buffers.fetch_add(1, std::memory_order_relaxed) + 1);
  allocated_bytes.fetch_add(n, std::memory_order_relaxed);
  allocations.fetch_add(1, std::memory_order_relaxed);
}

void MemoryCounters::remove(int64_t n) {
  bytes.fetch_sub(n, std::memory_order_relaxed);
  buffers.fetch_sub(1, std::memory_order_relaxed);
  freed_bytes.fetch_add(n, std::memory_order_relaxed);
  frees.fetch_add(1, std::memory_order_relaxed);
}

// ---- Runtime

namespace {

std::atomic<Runtime*> g_runtime{nullptr};
std::atomic<bool> g_forked{false};
std::mutex g_mutex;  // guards creation; taken without the GIL, which the spec function takes under it
Runtime::SpecFn g_spec;
Runtime::WithoutGilFn g_without_gil;

[[noreturn]] void throw_plugin_error(const PluginSpec& spec, const pjrt::Error& e) {
  TORCH_TPU_CHECK_WITH(NotImplementedError, E302, e.code != PJRT_Error_Code_UNIMPLEMENTED, "PJRT plugin ",
                       spec.path, " lacks what is needed: ", e.what(),
                       Fix("install another version of the plugin, in general a newer one."));
  TORCH_TPU_CHECK(E301, false, "PJRT plugin ", spec.path, " cannot be used: ", e.what(),
                  Fix("check TORCH_TPU_PLUGIN and the installation of the plugin (xla-cpu-pjrt, libtpu)."));
}

}  // namespace

void Runtime::install(SpecFn spec, WithoutGilFn without_gil) {
  g_spec = std::move(spec);
  g_without_gil = std::move(without_gil);
  pthread_atfork(nullptr, nullptr, [] {
    if (g_runtime.load() != nullptr) g_forked.store(true);
  });
}

void Runtime::without_gil(const std::function<void()>& fn) { g_without_gil(fn); }

bool Runtime::initialized() { return g_runtime.load(std::memory_order_acquire) != nullptr; }
bool Runtime::forked() { return g_forked.load(std::memory_order_relaxed); }

Runtime& Runtime::get() {
  TORCH_TPU_CHECK(
      E303, !forked(),
      "the device \"tpu\" was used before this process was forked, and PJRT clients do not survive a fork.",
      Fix("use the spawn start method: torch.multiprocessing.set_start_method('spawn')."));
  if (Runtime* runtime = g_runtime.load(std::memory_order_acquire)) return *runtime;
  without_gil([] {
    std::lock_guard lock(g_mutex);
    if (g_runtime.load() == nullptr) g_runtime.store(new Runtime(g_spec()), std::memory_order_release);
  });
  return *g_runtime.load(std::memory_order_acquire);
}

Runtime::Runtime(PluginSpec spec) : spec_(std::move(spec)) {
  TORCH_TPU_CHECK(E301, !spec_.path.empty(),
                  "there is no device \"tpu\": TORCH_TPU_PLUGIN=none, or no plugin is installed.",
                  Fix("pip install xla-cpu-pjrt, or set TORCH_TPU_PLUGIN."));
  // XLA greets on stderr at INFO; warnings and errors stay. A level that the user chose stays too.
  setenv("TF_CPP_MIN_LOG_LEVEL", "1", /*overwrite=*/0);
  try {
    client_ = std::make_unique<pjrt::Client>(pjrt::load_plugin(spec_.path), spec_.options);
  } catch (const pjrt::Error& e) {
    throw_plugin_error(spec_, e);
  }
  for (const pjrt::Device& d : client_->devices()) {
    devices_.push_back(std::make_unique<DeviceState>());
    devices_.back()->index = static_cast<c10::DeviceIndex>(devices_.size() - 1);
    devices_.back()->device = d;
  }
  TORCH_TPU_CHECK(E301, !devices_.empty(), "PJRT plugin ", spec_.path, " has no addressable device.");
  if (client_->platform_name() == "cpu") {
    flags_["xla_cpu_enable_fast_min_max"] = "false";  // fast ones drop NaN
    host_kernels_ =
        spec_.host_kernels && client_->host_addressable() && register_host_kernels(client_->api());
  }
  compile_options_ = compile_options({});
}

std::string Runtime::compile_options(std::map<std::string, std::string> flags) const {
  flags.insert(flags_.begin(), flags_.end());
  return pjrt::compile_options(/*portable=*/true, flags);
}

DeviceState& Runtime::device(int index) {
  TORCH_TPU_CHECK(
      E202, index >= 0 && index < device_count(), "tpu:", index, " does not exist: there ",
      device_count() == 1 ? "is 1 device" : "are " + std::to_string(device_count()) + " devices",
      Fix("use an index below torch.tpu.device_count(); TORCH_TPU_CPU_DEVICES sets how many the CPU "
          "plugin has."));
  return *devices_[static_cast<size_t>(index)];
}

void Runtime::synchronize_all() {
  for (const auto& device : devices_) device->work.synchronize();
}

}  // namespace torch_tpu
