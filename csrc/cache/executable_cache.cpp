#include "cache/executable_cache.h"

#include <algorithm>
#include <vector>

namespace torch_tpu {

ExecutableCache& ExecutableCache::get() {
  static auto* cache = new ExecutableCache;  // programs may be needed by buffers freed after main()
  return *cache;
}

ProgramRef ExecutableCache::find(const ProgramKey& key, size_t hash) {
  std::shared_lock lock(mutex_);
  const auto it = programs_.find(Hashed{hash, &key});
  if (it == programs_.end()) return {};
  it->second->last_used.store(clock_.fetch_add(1, std::memory_order_relaxed), std::memory_order_relaxed);
  return it->second;
}

ProgramRef ExecutableCache::find_or_make(const ProgramKey& key, size_t hash,
                                         const std::function<ProgramRef()>& make) {
  if (ProgramRef found = find(key, hash)) return found;
  std::promise<ProgramRef> promise;
  std::shared_future<ProgramRef> wait;
  {
    std::unique_lock lock(mutex_);
    if (const auto it = programs_.find(Hashed{hash, &key}); it != programs_.end()) return it->second;
    const auto [it, first] = under_way_.try_emplace(Stored{hash, key}, promise.get_future().share());
    if (!first) wait = it->second;
  }
  if (wait.valid()) {
    Runtime::without_gil([&] { wait.wait(); });
    if (ProgramRef made = wait.get()) return made;
    return find_or_make(key, hash, make);  // the other thread failed: this one gets an error of its own
  }
  misses_.fetch_add(1, std::memory_order_relaxed);
  const auto finish = [&] { under_way_.erase(under_way_.find(Hashed{hash, &key})); };
  try {
    ProgramRef program = make();
    program->last_used.store(clock_.fetch_add(1), std::memory_order_relaxed);
    std::unique_lock lock(mutex_);
    if (programs_.size() >= max_programs_) evict_locked();
    programs_.emplace(Stored{hash, key}, program);
    finish();
    promise.set_value(program);
    return program;
  } catch (...) {  // not swallowed: only the waiters are told before it goes on
    std::unique_lock lock(mutex_);
    finish();
    promise.set_value({});
    throw;
  }
}

void ExecutableCache::evict_locked() {
  std::vector<uint64_t> ages;
  ages.reserve(programs_.size());
  for (const auto& [key, program] : programs_)
    ages.push_back(program->last_used.load(std::memory_order_relaxed));
  const auto nth = ages.begin() + static_cast<std::ptrdiff_t>(ages.size() / 10);
  std::nth_element(ages.begin(), nth, ages.end());
  const uint64_t oldest_kept = *nth;
  evictions_ += std::erase_if(programs_, [&](const auto& entry) {
    return entry.second->last_used.load(std::memory_order_relaxed) < oldest_kept;
  });
}

void ExecutableCache::set_max_programs(size_t n) {
  std::unique_lock lock(mutex_);
  max_programs_ = std::max<size_t>(n, 16);
}

void ExecutableCache::clear() {
  std::unique_lock lock(mutex_);
  programs_.clear();
}

CacheStats ExecutableCache::stats() {
  std::shared_lock lock(mutex_);
  int64_t bytes = 0;
  for (const auto& [key, program] : programs_) bytes += program->code_bytes;
  return {static_cast<int64_t>(programs_.size()), bytes, static_cast<int64_t>(clock_.load() - misses_.load()),
          static_cast<int64_t>(misses_.load()), static_cast<int64_t>(evictions_.load())};
}

}  // namespace torch_tpu
