// Starts a program on the arguments of a call and puts the results where they belong.
#pragma once

#include "dispatch/call.h"

namespace torch_tpu {

// Starts the program, or records it if the call is deferred.
// Replaces the arguments on call.stack by the results. False if another thread changed a storage after the
// call was taken apart: nothing has happened, take it apart again. Errors of the launch end in the results
// and at synchronize; out of memory raises here.
bool launch(Call& call, const ProgramRef& program);

// `source` in other dims; donated if the caller holds the only reference.
BufferRef launch_reshape(const Program& program, BufferRef source, DimsRef dims, bool donate);

// A tensor over `buffer`.
at::Tensor make_tensor(BufferRef buffer, c10::ScalarType dtype, DimsRef sizes, DimsRef strides);

}  // namespace torch_tpu
