// The programs of this process, by key. One for all devices.
//
// Key: ProgramKey. Owner: the process. Limit: `max_programs`, the least recently used tenth goes when it is
// reached (a program costs three memory maps on the CPU plugin, and a process has 65,530). Nothing
// invalidates an entry: all that it depends on is in the key. Lock: `mutex_` guards the map and the list of
// compiles under way; no other lock is taken under it, and nothing compiles under it.
#pragma once

#include <functional>
#include <future>
#include <shared_mutex>
#include <unordered_map>

#include "cache/program.h"
#include "cache/program_key.h"

namespace torch_tpu {

struct CacheStats {
  int64_t programs, code_bytes, hits, misses, evictions;
};

class ExecutableCache {
 public:
  static ExecutableCache& get();

  ProgramRef find(const ProgramKey& key, size_t hash);
  // The program of `key`, made by `make` in the first thread that asks; others wait for it (without the GIL).
  // If `make` throws, its caller gets the exception and a waiter tries itself.
  ProgramRef find_or_make(const ProgramKey& key, size_t hash, const std::function<ProgramRef()>& make);
  void set_max_programs(size_t n);
  void clear();
  CacheStats stats();

 private:
  struct Hashed {
    size_t hash;
    const ProgramKey* key;  // points into the map's node, or at the key looked up
  };
  struct Hash {
    using is_transparent = void;
    size_t operator()(const Hashed& h) const { return h.hash; }
    size_t operator()(const std::pair<size_t, ProgramKey>& k) const { return k.first; }
  };
  struct Equal {
    using is_transparent = void;
    using Stored = std::pair<size_t, ProgramKey>;
    bool operator()(const Stored& a, const Stored& b) const { return a.second == b.second; }
    bool operator()(const Hashed& a, const Stored& b) const { return *a.key == b.second; }
    bool operator()(const Stored& a, const Hashed& b) const { return a.second == *b.key; }
  };
  using Stored = std::pair<size_t, ProgramKey>;

  void evict_locked();
  std::shared_mutex mutex_;
  std::unordered_map<Stored, ProgramRef, Hash, Equal> programs_;
  std::unordered_map<Stored, std::shared_future<ProgramRef>, Hash, Equal> under_way_;
  size_t max_programs_ = 4000;
  std::atomic<uint64_t> clock_{0}, misses_{0}, evictions_{0};
};

}  // namespace torch_tpu
