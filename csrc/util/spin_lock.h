// A lock for a few instructions. Never held across a call that can block.
#pragma once

#include <atomic>
#include <thread>

namespace torch_tpu {

class SpinLock {
 public:
  void lock() {
    while (flag_.test_and_set(std::memory_order_acquire)) {
      while (flag_.test(std::memory_order_relaxed)) std::this_thread::yield();
    }
  }
  void unlock() { flag_.clear(std::memory_order_release); }

 private:
  std::atomic_flag flag_;
};

}  // namespace torch_tpu
