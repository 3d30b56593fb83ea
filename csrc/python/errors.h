// Exceptions across the border: Python's keep their type on the way through C++, C++'s get theirs on the way
// to Python.
#pragma once

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

namespace torch_tpu {

// Runs `fn` with the GIL; a Python exception goes on as torch's python_error, which keeps its type in any
// thread.
template <class Fn>
void with_python(Fn&& fn) {
  const pybind11::gil_scoped_acquire gil;
  try {
    fn();
  } catch (pybind11::error_already_set& e) {
    e.restore();
    python_error error;
    error.persist();
    throw error;  // NOLINT(misc-throw-by-value-catch-by-reference)
  }
}

// Runs `fn` for a caller in Python: c10 errors become the Python exceptions that torch maps them to.
template <class Fn>
auto translated(Fn&& fn) -> decltype(fn()) {
  HANDLE_TH_ERRORS
  return fn();
  END_HANDLE_TH_ERRORS_PYBIND
}

}  // namespace torch_tpu
