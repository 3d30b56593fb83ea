// How eager ops run: launched one by one (strict), one by one and to the end (debug), or recorded and fused.
#pragma once

#include <cstdint>
#include <optional>

namespace torch_tpu {

enum class EagerMode : int8_t { kStrict, kDebug, kFused };

// Of the calling thread: its own, else that of the process.
EagerMode eager_mode();
void set_process_mode(EagerMode mode);
// None: that of the process. The engine's threads take over the mode of the thread that started the backward.
void set_thread_mode(std::optional<EagerMode> mode);
std::optional<EagerMode> thread_mode();

}  // namespace torch_tpu
