#include "storage/storage.h"

#include <array>
#include <unordered_map>
#include <vector>

#include "storage/address_space.h"
#include "storage/dtype.h"
#include "storage/transfer.h"
#include "util/check.h"

namespace torch_tpu {

namespace {

// Live storages by address: PyTorch pickles a storage through a tensor made of its bare address. Lock: of the
// shard, for a look-up, and above those of its storages for a snapshot.
struct Shard {
  SpinLock lock;
  std::unordered_map<const void*, Storage*> storages;
};

using Shards = std::array<Shard, 61>;  // a prime: addresses are aligned

Shards& shards() {
  static auto* shards = new Shards;
  return *shards;
}

Shard& shard_of(const void* address) {
  return shards()[reinterpret_cast<uintptr_t>(address) % std::tuple_size_v<Shards>];
}

void remember(const void* address, Storage* storage) {
  if (address == nullptr) return;
  Shard& shard = shard_of(address);
  std::lock_guard lock(shard.lock);
  shard.storages[address] = storage;
}

void forget(const void* address) {
  if (address == nullptr) return;
  Shard& shard = shard_of(address);
  std::lock_guard lock(shard.lock);
  shard.storages.erase(address);
}

Storage* find(const void* address) {
  Shard& shard = shard_of(address);
  std::lock_guard lock(shard.lock);
  const auto it = shard.storages.find(address);
  return it == shard.storages.end() ? nullptr : it->second;
}

}  // namespace

int64_t numel_of(DimsRef dims) {
  int64_t n = 1;
  for (const int64_t d : dims) n *= d;
  return n;
}

DeviceBuffer::DeviceBuffer(DeviceState& device, pjrt::Buffer buffer, c10::ScalarType dtype, DimsRef dims,
                           const char* op)
    : device(device),
      dtype(dtype),
      dims(dims.begin(), dims.end()),
      bytes(numel_of(dims) * static_cast<int64_t>(c10::elementSize(dtype))),
      op(op),
      array_(std::move(buffer)) {
  device.memory.add(bytes);
}

DeviceBuffer::DeviceBuffer(DeviceState& device, FailurePtr failure, c10::ScalarType dtype, DimsRef dims)
    : device(device), dtype(dtype), dims(dims.begin(), dims.end()), bytes(0), failure_(std::move(failure)) {}

DeviceBuffer::DeviceBuffer(DeviceState& device, std::shared_ptr<Pending> pending, c10::ScalarType dtype,
                           DimsRef dims, const char* op)
    : device(device),
      dtype(dtype),
      dims(dims.begin(), dims.end()),
      bytes(numel_of(dims) * static_cast<int64_t>(c10::elementSize(dtype))),
      op(op),
      maker_(std::move(pending)),
      pending_(true) {}

DeviceBuffer::~DeviceBuffer() {
  if (array_) device.memory.remove(bytes);
}

void DeviceBuffer::fulfil(pjrt::Buffer array) {
  array_ = std::move(array);
  device.memory.add(bytes);
  pending_.store(false, std::memory_order_release);
}

void DeviceBuffer::fail(FailurePtr failure) {
  failure_ = std::move(failure);
  pending_.store(false, std::memory_order_release);
}

void DeviceBuffer::wait() {
  if (ready_.load(std::memory_order_acquire)) return;
  if (failure() != nullptr) throw_failure(*failure_);
  std::optional<pjrt::Error> error;
  try {
    error = array_.ready().await();
  } catch (const pjrt::Error& e) {
    error = e;
  }
  if (error)
    throw_failure({error->code, op == nullptr ? error->what() : c10::str("[", op, "] ", error->what())});
  ready_.store(true, std::memory_order_release);
}

c10::DataPtr Storage::allocate(DeviceState& device, size_t bytes) {
  auto* storage = new Storage(device, bytes);
  return {storage->address_, storage, &Storage::destroy,
          c10::Device(c10::DeviceType::PrivateUse1, device.index)};
}

Storage& Storage::of(const c10::StorageImpl& impl) {
  const c10::DataPtr& ptr = impl.data_ptr();
  if (ptr.get_deleter() == &Storage::destroy) return *static_cast<Storage*>(ptr.get_context());
  Storage* const found = find(ptr.get());
  TORCH_TPU_CHECK(E204, found != nullptr, "this storage was not made by the device \"tpu\", or has no data.",
                  Fix("create tensors with device=\"tpu\" or .to(\"tpu\")."));
  return *found;
}

Storage::Storage(DeviceState& device, size_t bytes)
    : device(device), address_(take_address(bytes)), capacity_(bytes) {
  remember(address_, this);
}

Storage::~Storage() {
  forget(address_);
  return_address(address_, capacity_);
}

void Storage::destroy(void* context) { delete static_cast<Storage*>(context); }

BufferRef Storage::buffer() {
  for (;;) {
    {
      std::lock_guard lock(lock_);
      if (!taken_) return buffer_;
    }
    std::this_thread::yield();  // another thread writes in place: its launch ends with set_buffer
  }
}

BufferRef Storage::buffer_or_zeros(c10::ScalarType dtype, DimsRef dims) {
  if (BufferRef found = buffer()) return found;
  BufferRef zeros = zeros_buffer(device, dtype, dims);
  std::lock_guard lock(lock_);
  if (buffer_ == nullptr && !taken_) buffer_ = zeros;
  return buffer_ != nullptr ? buffer_ : zeros;
}

void Storage::set_buffer(BufferRef buffer) {
  BufferRef old;  // freed outside of the lock
  std::lock_guard lock(lock_);
  old = std::exchange(buffer_, std::move(buffer));
  taken_ = false;
}

bool Storage::reserve(const BufferRef& expected) {
  std::lock_guard lock(lock_);
  if (taken_ || buffer_ != expected) return false;
  taken_ = true;
  buffer_.reset();  // frees nothing under the lock: the caller holds `expected`
  return true;
}

void* Storage::resize(size_t bytes) {
  if (bytes > capacity_) {
    void* fresh = take_address(bytes);
    forget(address_);
    return_address(address_, capacity_);
    address_ = fresh;
    capacity_ = bytes;
    remember(address_, this);
  }
  return bytes == 0 ? nullptr : address_;
}

std::vector<Storage::Live> Storage::snapshot() {
  std::vector<Live> result;
  for (Shard& shard : shards()) {
    std::lock_guard shard_lock(shard.lock);  // its storages live on meanwhile
    for (const auto& [address, storage] : shard.storages) {
      std::lock_guard lock(storage->lock_);
      result.push_back({address, &storage->device, storage->capacity_, storage->buffer_});
    }
  }
  return result;
}

}  // namespace torch_tpu
