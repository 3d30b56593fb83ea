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

// Number of the set of compiler options in force in this thread, part of every program key; 0: the defaults.
// What the numbers mean is Python's (runtime/compiler.py). Handed on to the engine's threads like the mode.
int64_t compiler_options();
void set_compiler_options(int64_t number);

}  // namespace torch_tpu
