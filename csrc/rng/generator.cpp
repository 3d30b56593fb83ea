#include "rng/generator.h"

#include <ATen/Utils.h>
#include <ATen/ops/empty.h>

#include <cstring>
#include <deque>
#include <mutex>
#include <optional>

#include "storage/runtime.h"
#include "util/check.h"

namespace torch_tpu {

namespace {

// State: 16 bytes, seed then offset, little-endian: what DTensor and torch.utils.checkpoint expect of a
// Philox state.
constexpr int64_t kStateBytes = 16;

class Generator final : public c10::GeneratorImpl {
 public:
  explicit Generator(c10::DeviceIndex index)
      : GeneratorImpl(c10::Device(c10::DeviceType::PrivateUse1, index),
                      c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}

  void set_current_seed(uint64_t seed) override {
    seed_ = seed;
    offset_ = 0;
  }
  void set_offset(uint64_t offset) override { offset_ = offset; }
  uint64_t get_offset() const override { return offset_; }
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom());
    return seed_;
  }
  void set_state(const c10::TensorImpl& state) override {
    at::detail::check_rng_state(state);
    TORCH_CHECK(state.numel() == kStateBytes, "RNG state must have ", kStateBytes, " bytes, but got ",
                state.numel());
    const auto* bytes = static_cast<const char*>(state.data());
    std::memcpy(&seed_, bytes, sizeof seed_);
    std::memcpy(&offset_, bytes + sizeof seed_, sizeof offset_);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    at::Tensor state = at::empty({kStateBytes}, at::TensorOptions(at::kByte).device(at::kCPU));
    auto* bytes = static_cast<char*>(state.mutable_data_ptr());
    std::memcpy(bytes, &seed_, sizeof seed_);
    std::memcpy(bytes + sizeof seed_, &offset_, sizeof offset_);
    return state.getIntrusivePtr();
  }

 private:
  Generator* clone_impl() const override {
    auto* copy = new Generator(device().index());
    copy->seed_ = seed_;
    copy->offset_ = offset_;
    return copy;
  }
  uint64_t seed_ = c10::default_rng_seed_val, offset_ = 0;
};

// Creates no client for a device that is expected: `torch.manual_seed` is called by programs that use none.
c10::DeviceIndex checked(c10::DeviceIndex index) {
  const auto* guard = c10::impl::getDeviceGuardImpl(c10::DeviceType::PrivateUse1);
  if (index == -1) index = guard->getDevice().index();
  return index >= 0 && index < guard->deviceCount() ? index : Runtime::get().device(index).index;
}

struct Defaults {
  std::mutex mutex;                      // guards the two below
  std::deque<at::Generator> generators;  // only grows, and never moves its elements
  std::optional<uint64_t> seed;          // of the ones to come
};

Defaults& defaults() {
  static auto* defaults = new Defaults;  // its generators may be in use during static destruction
  return *defaults;
}

}  // namespace

const at::Generator& default_generator(c10::DeviceIndex index) {
  index = checked(index);
  Defaults& d = defaults();
  std::lock_guard lock(d.mutex);
  while (d.generators.size() <= static_cast<size_t>(index)) {
    at::Generator made = at::make_generator<Generator>(static_cast<c10::DeviceIndex>(d.generators.size()));
    if (d.seed) {
      made.set_current_seed(*d.seed);
    } else {
      made.seed();
    }
    d.generators.push_back(std::move(made));
  }
  return d.generators[static_cast<size_t>(index)];
}

void seed_all(uint64_t seed) {
  Defaults& d = defaults();
  std::lock_guard lock(d.mutex);
  d.seed = seed;
  for (at::Generator& generator : d.generators) {
    std::lock_guard generator_lock(generator.mutex());
    generator.set_current_seed(seed);
  }
}

at::Generator new_generator(c10::DeviceIndex index) { return at::make_generator<Generator>(checked(index)); }

}  // namespace torch_tpu
