// The bridge of a miss: a Call as Python sees it, and what Python says of it.
#pragma once

#include <pybind11/pybind11.h>

namespace torch_tpu {

// Adds MissCall and `install_lowering(describe, lower, reshape, store)` to the module.
void bind_lowering(pybind11::module_& m);

// Adds Form and `bounds_stats()`.
void bind_bounds(pybind11::module_& m);

// Runs `fn` with the GIL released if the caller holds it.
void without_gil(const std::function<void()>& fn);

}  // namespace torch_tpu
