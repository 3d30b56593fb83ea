// The c10 allocator of "tpu": storages, and true statistics by our own accounting.

#include <c10/core/CachingDeviceAllocator.h>

#include "storage/storage.h"
#include "util/check.h"

namespace torch_tpu {

namespace {

using c10::CachingDeviceAllocator::DeviceStats;

class Allocator final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    const auto* guard = c10::impl::getDeviceGuardImpl(c10::DeviceType::PrivateUse1);
    return Storage::allocate(Runtime::get().device(guard->getDevice().index()), bytes);
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }  // context and address differ
  void copy_data(void*, const void*, size_t) const override {
    TORCH_TPU_CHECK(E204, false, "the memory of \"tpu\" tensors has no address the host could copy from.",
                    Fix("copy tensors with copy_() or clone()."));
  }

  bool initialized() override { return Runtime::initialized(); }
  void emptyCache(c10::MempoolId_t) override {}  // PJRT owns the memory: nothing is cached here
  void recordStream(const c10::DataPtr&, c10::Stream) override {
  }  // PJRT keeps buffers alive for their readers

  DeviceStats getDeviceStats(c10::DeviceIndex index) override {
    const MemoryCounters& m = Runtime::get().device(index).memory;
    DeviceStats stats;
    const auto fill = [](c10::CachingAllocator::StatArray& to, int64_t now, int64_t peak, int64_t made,
                         int64_t freed) {
      auto& stat = to[static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE)];
      stat.current = now;
      stat.peak = peak;
      stat.allocated = made;
      stat.freed = freed;
    };
    for (auto* bytes :
         {&stats.allocated_bytes, &stats.reserved_bytes, &stats.active_bytes, &stats.requested_bytes}) {
      fill(*bytes, m.bytes, m.peak_bytes, m.allocated_bytes, m.freed_bytes);
    }
    for (auto* count : {&stats.allocation, &stats.active})
      fill(*count, m.buffers, m.peak_buffers, m.allocations, m.frees);
    stats.num_ooms = m.ooms;
    stats.num_device_alloc = m.allocations;
    stats.num_device_free = m.frees;
    return stats;
  }

  void resetAccumulatedStats(c10::DeviceIndex index) override {
    MemoryCounters& m = Runtime::get().device(index).memory;
    for (auto* counter : {&m.allocated_bytes, &m.freed_bytes, &m.allocations, &m.frees, &m.ooms})
      counter->store(0);
  }
  void resetPeakStats(c10::DeviceIndex index) override {
    MemoryCounters& m = Runtime::get().device(index).memory;
    m.peak_bytes.store(m.bytes.load());
    m.peak_buffers.store(m.buffers.load());
  }
  // Free and total bytes, from the plugin where it can tell, else from the host's memory.
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex index) override {
    Runtime& runtime = Runtime::get();
    DeviceState& device = runtime.device(index);
    if (const auto stats = runtime.client().memory_stats(device.device.handle); stats && stats->bytes_limit) {
      return {static_cast<size_t>(*stats->bytes_limit - stats->bytes_in_use),
              static_cast<size_t>(*stats->bytes_limit)};
    }
    return host_memory_info();
  }
};

Allocator g_allocator;
REGISTER_ALLOCATOR(c10::DeviceType::PrivateUse1, &g_allocator);

}  // namespace

}  // namespace torch_tpu
