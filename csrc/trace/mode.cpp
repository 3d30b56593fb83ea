#include "trace/mode.h"

#include <ATen/ThreadLocalPythonObjects.h>

#include <array>
#include <atomic>

namespace torch_tpu {

namespace {

using Objects = at::impl::ThreadLocalPythonObjects;

std::atomic<EagerMode> g_process{EagerMode::kStrict};
std::atomic<bool> g_any_thread{
    false};  // some thread had a mode of its own: only then is the look-up worth its time

// Part of PyTorch's thread-local state, which autograd hands to its threads. The objects are empty; which one
// it is says the mode.
const std::string& name() {
  static const std::string name = "torch_tpu.eager_mode";
  return name;
}

const std::shared_ptr<c10::SafePyObject>& token(EagerMode mode) {
  static const auto* const tokens = [] {
    auto* t = new std::array<std::shared_ptr<c10::SafePyObject>, 3>;
    for (auto& object : *t) object = std::make_shared<c10::SafePyObject>(nullptr, nullptr);
    return t;
  }();
  return (*tokens)[static_cast<size_t>(mode)];
}

// The number of a set of compiler options, as an object of the thread-local state.
struct OptionsToken final : c10::SafePyObject {
  explicit OptionsToken(int64_t number) : SafePyObject(nullptr, nullptr), number(number) {}
  const int64_t number;
};
std::atomic<bool> g_any_options{false};
const std::string& options_name() {
  static const std::string name = "torch_tpu.compiler_options";
  return name;
}

}  // namespace

int64_t compiler_options() {
  if (!g_any_options.load(std::memory_order_relaxed) || !Objects::contains(options_name())) return 0;
  return static_cast<const OptionsToken&>(*Objects::get(options_name())).number;
}

void set_compiler_options(int64_t number) {
  if (number != 0) {
    g_any_options = true;
    Objects::set(options_name(), std::make_shared<OptionsToken>(number));
  } else if (Objects::contains(options_name())) {
    Objects::erase(options_name());
  }
}

std::optional<EagerMode> thread_mode() {
  if (!g_any_thread.load(std::memory_order_relaxed) || !Objects::contains(name())) return std::nullopt;
  const auto& found = Objects::get(name());
  for (const EagerMode mode : {EagerMode::kStrict, EagerMode::kDebug, EagerMode::kFused}) {
    if (found == token(mode)) return mode;
  }
  return std::nullopt;
}

EagerMode eager_mode() {
  const std::optional<EagerMode> own = thread_mode();
  return own ? *own : g_process.load(std::memory_order_relaxed);
}

void set_process_mode(EagerMode mode) { g_process = mode; }

void set_thread_mode(std::optional<EagerMode> mode) {
  if (mode) {
    g_any_thread = true;
    Objects::set(name(), token(*mode));
  } else if (Objects::contains(name())) {
    Objects::erase(name());
  }
}

}  // namespace torch_tpu
