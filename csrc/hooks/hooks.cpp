#include "hooks/hooks.h"

#include <ATen/detail/PrivateUse1HooksInterface.h>

#include "hooks/host_allocator.h"
#include "rng/generator.h"
#include "storage/storage.h"
#include "storage/transfer.h"
#include "util/check.h"

namespace torch_tpu {

namespace {

// Keeps what fits; a storage that grows is read back and written again, which nothing hot does.
void resize_storage(c10::StorageImpl& impl, size_t bytes) {
  Storage& storage = Storage::of(impl);
  const BufferRef old = storage.buffer();
  if (old != nullptr && bytes == 0) {
    storage.set_buffer({});
  } else if (old != nullptr && bytes > static_cast<size_t>(old->bytes)) {
    std::vector<char> data(bytes);
    buffer_to_host(*old, data.data());
    const auto n = static_cast<int64_t>(bytes / c10::elementSize(old->dtype));
    storage.set_buffer(buffer_from_host(storage.device, data.data(), old->dtype, n));
  }
  void* address = storage.resize(bytes);
  c10::DataPtr& ptr = impl.mutable_data_ptr();
  const auto deleter = ptr.get_deleter();
  const c10::Device device = ptr.device();
  void* context = ptr.release_context();
  impl.set_data_ptr_noswap({address, context, deleter, device});
  impl.set_nbytes(bytes);
}

class Hooks final : public at::PrivateUse1HooksInterface {
 public:
  explicit Hooks(std::function<int()> expected) : expected_(std::move(expected)) {}

  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return expected_() > 0; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return Runtime::initialized(); }
  void init() const override { Runtime::get(); }
  c10::DeviceIndex deviceCount() const override { return static_cast<c10::DeviceIndex>(expected_()); }
  c10::DeviceIndex getCurrentDevice() const override { return guard().getDevice().index(); }
  void setCurrentDevice(c10::DeviceIndex index) const override { guard().setDevice(device(index)); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    return guard().exchangeDevice(device(index)).index();
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override {
    return index < 0 ? c10::DeviceIndex{-1} : exchangeDevice(index);
  }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  at::Allocator* getPinnedMemoryAllocator() const override { return host_allocator(); }
  at::Device getDeviceFromPtr(void*) const override { return guard().getDevice(); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override {
    return default_generator(index);
  }
  at::Generator getNewGenerator(c10::DeviceIndex index) const override { return new_generator(index); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    resize_storage(*storage.unsafeGetStorageImpl(), bytes);
  }

 private:
  static const c10::impl::DeviceGuardImplInterface& guard() {
    return *c10::impl::getDeviceGuardImpl(c10::DeviceType::PrivateUse1);
  }
  static c10::Device device(c10::DeviceIndex index) { return {c10::DeviceType::PrivateUse1, index}; }
  std::function<int()> expected_;
};

}  // namespace

void register_hooks(std::function<int()> expected_devices) {
  at::RegisterPrivateUse1HooksInterface(
      new Hooks(std::move(expected_devices)));  // lives as long as the process
}

}  // namespace torch_tpu
