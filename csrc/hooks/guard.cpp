// Devices, streams and events as c10 wants them.
//
// A device runs its work in the order of the launches, so streams need no queue of their own: they are names,
// and an event is a mark in the work of its device. Current device and streams are per thread.

#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <array>

#include "storage/dtype.h"
#include "storage/runtime.h"
#include "trace/deferred.h"
#include "util/check.h"

namespace torch_tpu {

namespace {

constexpr int kMaxDevices = 64;

thread_local c10::DeviceIndex current_device = 0;
thread_local std::array<c10::StreamId, kMaxDevices> current_streams{};
std::atomic<c10::StreamId> next_stream{1};

c10::Stream stream_of(c10::StreamId id, c10::DeviceIndex index) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(c10::DeviceType::PrivateUse1, index), id);
}

struct Event {
  std::shared_ptr<Mark> mark;
};

class Guard final : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override { return c10::DeviceType::PrivateUse1; }
  c10::Device exchangeDevice(c10::Device d) const override {
    const c10::Device old = getDevice();
    if (d.index() != old.index()) setDevice(d);
    return old;
  }
  c10::Device getDevice() const override { return {c10::DeviceType::PrivateUse1, current_device}; }
  void setDevice(c10::Device d) const override {
    TORCH_INTERNAL_ASSERT(d.type() == c10::DeviceType::PrivateUse1);
    TORCH_TPU_CHECK(E202, d.index() >= 0, "a device index cannot be negative, but got ",
                    static_cast<int>(d.index()));
    if (d.index() != 0 && d.index() >= deviceCount()) Runtime::get().device(d.index());  // throws
    current_device = d.index();
  }
  void uncheckedSetDevice(c10::Device d) const noexcept override { current_device = d.index(); }
  // Before the first use, the number expected: autograd asks once in a process, at its first backward pass of
  // any device, and has no thread for a device that it was not told of then.
  c10::DeviceIndex deviceCount() const noexcept override {
    try {
      return Runtime::forked() ? c10::DeviceIndex{0} : at::detail::getPrivateUse1Hooks().deviceCount();
    } catch (const std::exception&) {
      return 0;  // no usable plugin: whoever uses the device is told
    }
  }

  c10::Stream getStream(c10::Device d) const override {
    return stream_of(current_streams[slot(d)], index_of(d));
  }
  c10::Stream getDefaultStream(c10::Device d) const override { return stream_of(0, index_of(d)); }
  c10::Stream getStreamFromGlobalPool(c10::Device d, bool) const override { return getNewStream(d, 0); }
  c10::Stream getNewStream(c10::Device d, int) const override {
    return stream_of(next_stream.fetch_add(1), index_of(d));
  }
  c10::Stream exchangeStream(c10::Stream s) const override {
    auto& current = current_streams[slot(s.device())];
    const c10::Stream old = stream_of(current, s.device_index());
    current = s.id();
    return old;
  }
  void* getStreamNativeHandle(const c10::Stream s) const override { return reinterpret_cast<void*>(s.id()); }
  bool queryStream(const c10::Stream& s) const override {
    flush(device(s.device_index()), FlushReason::kSynchronize);
    return device(s.device_index()).work.idle();
  }
  void synchronizeStream(const c10::Stream& s) const override { synchronizeDevice(s.device_index()); }
  void synchronizeDevice(const c10::DeviceIndex index) const override {
    if (!Runtime::initialized()) return;
    flush(device(index), FlushReason::kSynchronize);
    Runtime::without_gil([&] { device(index).work.synchronize(); });
  }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex index,
              const c10::EventFlag) const override {
    TORCH_CHECK(index == -1 || index == stream.device_index(), "Event device index ", static_cast<int>(index),
                " does not match recording stream's device index ", static_cast<int>(stream.device_index()),
                ".");
    flush(device(stream.device_index()), FlushReason::kEvent);
    std::shared_ptr<Mark> mark = device(stream.device_index()).work.mark();  // first: it may throw
    if (*event == nullptr) *event = new Event;
    static_cast<Event*>(*event)->mark = std::move(mark);
  }
  void block(void*, const c10::Stream&) const override {}  // later launches run after the earlier ones anyway
  bool queryEvent(void* event) const override { return event == nullptr || mark_of(event).done(); }
  void synchronizeEvent(void* event) const override {
    if (event == nullptr) return;
    Runtime::without_gil([&] { mark_of(event).wait(); });
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }
  double elapsedTime(void* first, void* second, const c10::DeviceIndex) const override {
    TORCH_CHECK(first != nullptr && second != nullptr,
                "Both events must be recorded before calculating elapsed time.");
    TORCH_CHECK(mark_of(first).done() && mark_of(second).done(),
                "Both events must be completed before calculating elapsed time.");
    return std::chrono::duration<double, std::milli>(mark_of(second).done_at() - mark_of(first).done_at())
        .count();
  }
  c10::DeviceCapability getDeviceCapability(c10::Device) const override {
    c10::DeviceCapability can;
#define HOLDS(_, name)                                    \
  can.capability_data.supported_scalar_types.has_##name = \
      pjrt_type(c10::ScalarType::name) != PJRT_Buffer_Type_INVALID;
    AT_FORALL_SCALAR_TYPES_WITH_COMPLEX_AND_QINTS(HOLDS)
#undef HOLDS
    return can;
  }

 private:
  static Mark& mark_of(void* event) { return *static_cast<Event*>(event)->mark; }
  static c10::DeviceIndex index_of(c10::Device d) { return d.index() == -1 ? current_device : d.index(); }
  static size_t slot(c10::Device d) {
    const c10::DeviceIndex index = index_of(d);
    TORCH_TPU_CHECK(E202, index >= 0 && index < kMaxDevices, "tpu:", static_cast<int>(index),
                    " does not exist.");
    return static_cast<size_t>(index);
  }
  static DeviceState& device(c10::DeviceIndex index) {
    return Runtime::get().device(index == -1 ? current_device : index);
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

}  // namespace

}  // namespace torch_tpu
