#include "storage/address_space.h"

#include <sys/mman.h>

#include <array>
#include <bit>
#include <cstdint>
#include <vector>

#include "util/check.h"
#include "util/spin_lock.h"

namespace torch_tpu {

namespace {

constexpr size_t kMinBits = 6;
constexpr size_t kReservedBits = 45;  // 32 TiB of the 128 TiB a process can name

struct SizeClass {
  SpinLock lock;  // guards `free`
  std::vector<char*> free;
};

struct Space {
  char* base = nullptr;
  std::atomic<size_t> used{0};
  std::array<SizeClass, kReservedBits + 1> classes;

  Space() {
    void* p = mmap(nullptr, size_t{1} << kReservedBits, PROT_NONE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    // Without a reservation (ulimit -v) addresses come from the non-canonical middle of the address space,
    // where no mapping can be: still unique, and a stray dereference still faults.
    base = p == MAP_FAILED ? reinterpret_cast<char*>(uintptr_t{1} << 60) : static_cast<char*>(p);
  }
};

Space& space() {
  static auto* space = new Space;  // storages may be freed during static destruction
  return *space;
}

size_t class_of(size_t bytes) { return std::max<size_t>(kMinBits, std::bit_width(bytes - 1)); }

}  // namespace

void* take_address(size_t bytes) {
  if (bytes == 0) return nullptr;
  const size_t bits = class_of(bytes);
  TORCH_TPU_CHECK_WITH(OutOfMemoryError, E304, bits < kReservedBits, "a storage of ", bytes,
                       " bytes is too large.");
  Space& s = space();
  SizeClass& c = s.classes[bits];
  {
    std::lock_guard lock(c.lock);
    if (!c.free.empty()) {
      char* address = c.free.back();
      c.free.pop_back();
      return address;
    }
  }
  const size_t offset = s.used.fetch_add(size_t{1} << bits);
  TORCH_TPU_CHECK_WITH(OutOfMemoryError, E304, offset + (size_t{1} << bits) <= size_t{1} << kReservedBits,
                       "the address space for storages is used up.");
  return s.base + offset;
}

void return_address(void* address, size_t bytes) {
  if (bytes == 0) return;
  SizeClass& c = space().classes[class_of(bytes)];
  std::lock_guard lock(c.lock);
  c.free.push_back(static_cast<char*>(address));
}

}  // namespace torch_tpu
