// A future of the plugin: becomes ready once, with or without an error.
#pragma once

#include <functional>
#include <memory>
#include <optional>

#include "pjrt/api.h"

namespace torch_tpu::pjrt {

class Event {
 public:
  Event() = default;
  Event(const PJRT_Api* api, PJRT_Event* event) : api_(api), event_(event) {}
  Event(Event&& o) noexcept : api_(o.api_), event_(std::exchange(o.event_, nullptr)) {}
  Event& operator=(Event&& o) noexcept {
    std::swap(api_, o.api_);
    std::swap(event_, o.event_);
    return *this;
  }
  ~Event() {
    if (event_ == nullptr) return;
    PJRT_Event_Destroy_Args d{.struct_size = PJRT_Event_Destroy_Args_STRUCT_SIZE, .event = event_};
    if (PJRT_Error* e = api_->PJRT_Event_Destroy(&d)) take_error(api_, e, "PJRT_Event_Destroy");
  }

  explicit operator bool() const { return event_ != nullptr; }
  bool is_ready() const { return PJRT_CALL(api_, PJRT_Event_IsReady, .event = event_).is_ready; }
  // Blocks the caller until ready. Returns the error of the work, if it failed. Do not hold the GIL.
  std::optional<Error> await() const;
  // Runs `callback` once the event is ready, on a thread of the plugin or in the caller. It must not throw or
  // block.
  void on_ready(std::function<void()> callback) const;

 private:
  const PJRT_Api* api_ = nullptr;
  PJRT_Event* event_ = nullptr;
};

}  // namespace torch_tpu::pjrt
