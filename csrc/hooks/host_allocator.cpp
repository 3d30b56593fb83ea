#include "hooks/host_allocator.h"

#include <ATen/core/CachingHostAllocator.h>

#include <cstdlib>
#include <map>
#include <mutex>

#include "util/check.h"

namespace torch_tpu {

namespace {

constexpr size_t kPage = 4096;

struct Blocks {
  std::mutex mutex;  // guards both
  std::map<const char*, size_t> sizes;
  at::HostStats stats;
};

Blocks& blocks() {
  static auto* blocks = new Blocks;  // tensors may be freed during static destruction
  return *blocks;
}

void release(void* data) {
  if (data == nullptr) return;
  {
    Blocks& b = blocks();
    std::lock_guard lock(b.mutex);
    const auto it = b.sizes.find(static_cast<const char*>(data));
    b.stats.allocated_bytes.decrease(it->second);
    b.stats.allocations.decrease(1);
    b.sizes.erase(it);
  }
  std::free(data);
}

class HostAllocator final : public at::HostAllocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    void* data = nullptr;
    if (bytes != 0) {
      const size_t size = (bytes + kPage - 1) / kPage * kPage;
      data = std::aligned_alloc(kPage, size);
      TORCH_TPU_CHECK_WITH(OutOfMemoryError, E304, data != nullptr, "there are no ", bytes,
                           " bytes of pinned host memory.",
                           Fix("free pinned tensors, or use fewer or smaller batches with pin_memory."));
      Blocks& b = blocks();
      std::lock_guard lock(b.mutex);
      b.sizes.emplace(static_cast<const char*>(data), size);
      b.stats.allocated_bytes.increase(size);
      b.stats.allocations.increase(1);
    }
    return {data, data, &release, at::kCPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t n) const override { default_copy_data(to, from, n); }
  bool record_event(void*, void*, c10::Stream) override { return true; }  // transfers end before they return
  void empty_cache() override {}
  at::HostStats get_stats() override {
    Blocks& b = blocks();
    std::lock_guard lock(b.mutex);
    return b.stats;
  }
  void reset_accumulated_stats() override {
    Blocks& b = blocks();
    std::lock_guard lock(b.mutex);
    b.stats.allocated_bytes.reset_accumulated();
    b.stats.allocations.reset_accumulated();
  }
  void reset_peak_stats() override {
    Blocks& b = blocks();
    std::lock_guard lock(b.mutex);
    b.stats.allocated_bytes.reset_peak();
    b.stats.allocations.reset_peak();
  }
};

HostAllocator g_host_allocator;
REGISTER_HOST_ALLOCATOR(at::kPrivateUse1, &g_host_allocator);

}  // namespace

c10::Allocator* host_allocator() { return &g_host_allocator; }

bool is_pinned(const void* data) {
  Blocks& b = blocks();
  std::lock_guard lock(b.mutex);
  const auto* p = static_cast<const char*>(data);
  auto it = b.sizes.upper_bound(p);
  return it != b.sizes.begin() && p < (--it)->first + it->second;
}

}  // namespace torch_tpu
