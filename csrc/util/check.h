// Error checks that name the op, what was wanted and what came. See docs/errors.md for the codes.
//
//   TORCH_TPU_CHECK(E201, devices == 1, "[", op, "] tensors are on ", devices, " devices",
//                   Fix("move them to one device with .to()"));
//
// A failed check throws c10::Error (a RuntimeError in Python) whose text ends in the code.
#pragma once

#include <c10/util/Exception.h>

#include <ostream>
#include <string>
#include <string_view>

namespace torch_tpu {

// Rows of docs/errors.md; tests/architecture/test_docs.py checks both lists.
enum class ErrorCode {
  E104,  // the compiler refused a program
  E201,  // tensors on several devices
  E202,  // no such device
  E203,  // execution failed
  E204,  // storage holds no usable data
  E205,  // dtype not supported
  E206,  // generator of another device
  E207,  // argument value out of range
  E301,  // plugin missing or broken
  E302,  // plugin too old
  E303,  // used after fork
  E304,  // out of memory
};

struct Fix {
  explicit Fix(std::string_view text) : text(text) {}
  std::string_view text;
};

inline std::ostream& operator<<(std::ostream& os, const Fix& fix) { return os << "\n  Fix: " << fix.text; }

}  // namespace torch_tpu

// An unknown code does not compile: the condition names its enumerator.
#define TORCH_TPU_CHECK_WITH(type, code, cond, ...)                                                  \
  TORCH_CHECK_WITH(type, (static_cast<void>(::torch_tpu::ErrorCode::code), static_cast<bool>(cond)), \
                   __VA_ARGS__, "\n  (TPU-" #code ", see docs/errors.md)")
#define TORCH_TPU_CHECK(code, ...) TORCH_TPU_CHECK_WITH(Error, code, __VA_ARGS__)
