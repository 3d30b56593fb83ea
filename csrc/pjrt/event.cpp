#include "pjrt/event.h"

namespace torch_tpu::pjrt {

std::optional<Error> Event::await() const {
  PJRT_Event_Await_Args args{.struct_size = PJRT_Event_Await_Args_STRUCT_SIZE, .event = event_};
  if (PJRT_Error* error = api_->PJRT_Event_Await(&args)) return take_error(api_, error, "PJRT_Event_Await");
  return std::nullopt;
}

void Event::on_ready(std::function<void()> callback) const {
  struct Call {
    const PJRT_Api* api;
    std::function<void()> callback;
  };
  auto owned = std::make_unique<Call>(Call{api_, std::move(callback)});
  const auto run = [](PJRT_Error* error, void* arg) {
    const std::unique_ptr<Call> call(static_cast<Call*>(arg));
    if (error != nullptr) take_error(call->api, error, "PJRT_Event_OnReady");  // await() reports it
    call->callback();
  };
  PJRT_CALL(api_, PJRT_Event_OnReady, .event = event_, .callback = run, .user_arg = owned.get());
  owned.release();  // the plugin calls back exactly once
}

}  // namespace torch_tpu::pjrt
