// What is behind a tensor on "tpu": a Storage owns one immutable device buffer and swaps it on a write.
//
//   c10::StorageImpl -> DataPtr{address, context} -> Storage -> DeviceBuffer -> pjrt::Buffer
//
// The address is synthetic: unique among live storages, consistent under offsets, never dereferenced. Views
// of a tensor share the Storage, so they see every write. A buffer has its own element type and dims
// ("physical"), adopted from the first write; the tensors of the storage are views of it (view_plan.h). It
// may be larger than its tensors.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>
#include <c10/util/SmallVector.h>
#include <c10/util/intrusive_ptr.h>

#include <vector>

#include "storage/runtime.h"
#include "util/spin_lock.h"

namespace torch_tpu {

using Dims = c10::SmallVector<int64_t, 6>;
using DimsRef = c10::ArrayRef<int64_t>;

int64_t numel_of(DimsRef dims);

// What will give pending buffers their contents.
class Pending {
 public:
  virtual ~Pending() = default;
  // Afterwards each of its buffers is fulfilled or failed. Throws nothing, may block: hold no lock.
  virtual void run() = 0;
};

// One immutable array on a device, or the failure that took its place. A pending one gets its contents at the
// first use of handle(), array() or failure().
class DeviceBuffer final : public c10::intrusive_ptr_target {
 public:
  // `op` made it, for messages; it must live as long as the process.
  DeviceBuffer(DeviceState& device, pjrt::Buffer buffer, c10::ScalarType dtype, DimsRef dims,
               const char* op = nullptr);
  DeviceBuffer(DeviceState& device, FailurePtr failure, c10::ScalarType dtype, DimsRef dims);
  DeviceBuffer(DeviceState& device, std::shared_ptr<Pending> pending, c10::ScalarType dtype, DimsRef dims,
               const char* op);
  ~DeviceBuffer() override;

  DeviceState& device;
  const c10::ScalarType dtype;
  const Dims dims;
  const int64_t bytes;
  const char* const op = nullptr;

  const pjrt::Buffer& array() {
    settle();
    return array_;
  }
  PJRT_Buffer* handle() { return array().get(); }
  const FailurePtr& failure() {
    settle();
    return failure_;
  }
  bool pending() const { return pending_.load(std::memory_order_acquire); }
  // Whether it is known to have failed; does not make a pending one run.
  bool failed() const { return !pending() && failure_ != nullptr; }
  // For the one that is to run it.
  void fulfil(pjrt::Buffer array);
  void fail(FailurePtr failure);

  // Blocks until the contents are there. Throws what failed, as E203 or OutOfMemoryError.
  void wait();

 private:
  void settle() {
    if (pending()) maker_->run();
  }
  pjrt::Buffer array_;
  FailurePtr failure_;
  const std::shared_ptr<Pending> maker_;
  std::atomic<bool> pending_{false}, ready_{false};
};
using BufferRef = c10::intrusive_ptr<DeviceBuffer>;

// The context of a DataPtr on "tpu".
class Storage {
 public:
  // Space for `bytes`; nothing is allocated on the device before the first write.
  static c10::DataPtr allocate(DeviceState& device, size_t bytes);
  static Storage& of(const c10::StorageImpl& impl);
  static Storage& of(const at::TensorBase& tensor) {
    return of(*tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl());
  }

  DeviceState& device;

  // The current buffer; null before the first write. Another thread may swap it at any time.
  BufferRef buffer();
  // The current buffer; an unwritten storage gets zeros of its hinted type first.
  BufferRef buffer_or_zeros(c10::ScalarType dtype, DimsRef dims);
  void set_buffer(BufferRef buffer);
  // Takes the buffer out for a launch that reads and writes it; others then wait in buffer() for the
  // set_buffer that must follow. It may be donated if `expected` is the only reference left. False, with
  // nothing taken: another thread has written since `expected` was read, or is about to.
  bool reserve(const BufferRef& expected);
  // A storage of `bytes` keeps its address as long as it once had room for them.
  void* resize(size_t bytes);
  void* address() const { return address_; }
  // The live storages of at least a byte, each with its current buffer (null: unwritten, or out for a
  // launch).
  struct Live {
    const void* address;
    DeviceState* device;
    size_t bytes;
    BufferRef buffer;
  };
  static std::vector<Live> snapshot();

 private:
  Storage(DeviceState& device, size_t bytes);
  ~Storage();
  static void destroy(void* context);
  SpinLock lock_;  // guards the two below
  BufferRef buffer_;
  bool taken_ = false;
  void* address_ = nullptr;
  size_t capacity_ = 0;
};

}  // namespace torch_tpu
