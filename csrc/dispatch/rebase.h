// Changes of a storage's physical form before a program reads or writes it.
#pragma once

#include "dispatch/call.h"

namespace torch_tpu {

// The form that a storage nobody has written gets: that of the tensor that asks first.
void set_unwritten_form(Slot& slot, const at::Tensor& tensor);

// A storage filled with raw bytes (a state dict read from a file) takes the dtype of the first tensor that
// covers it.
void adopt_dtype(Slot& slot, const at::Tensor& tensor);

// Reshapes the buffer to `dims`, in place where nobody else holds it, so that a write becomes a window of its
// dims: a program that reshaped the buffer and then wrote would lose the donation and copy all of it.
// `deferred`: only recorded.
void rebase(Slot& slot, DimsRef dims, bool deferred);

}  // namespace torch_tpu
