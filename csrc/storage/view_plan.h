// How a tensor lies in the buffer of its storage.
//
//   whole    the buffer itself
//   box      reshape the buffer to `dims`, take a window (dynamic starts, static sizes and steps), then
//   reshape,
//            transpose and broadcast to the tensor's sizes
//   gather   anything else (overlapping windows, offsets that wrap a row): element indices are computed
//
// Computed on the host from sizes, strides and offset: the same sizes and strides can be a box at one offset
// and wrap a row at another. Everything but the starts and the offset is part of the program key; those two
// are operands, so a new row or column compiles nothing. torch_tpu/lowering/views.py emits it.
#pragma once

#include "storage/storage.h"

namespace torch_tpu {

struct ViewPlan {
  enum Kind : int8_t { kWhole, kBox, kGather };
  struct Window {
    int64_t start, size, step;
    bool sliced;  // less than the whole dim: `start` is an operand
  };

  Kind kind = kWhole;
  Dims dims;  // of the buffer, in elements of the tensor's dtype, reshaped as the box wants them
  c10::SmallVector<Window, 6> windows;  // one a dim; box only
  int64_t offset = 0;                   // gather only
  bool covers = false;                  // box: every element of the buffer is in it
};

// Dims of a buffer of `from` elements read as `to` elements: the last dim takes the change of width.
Dims dims_as(DimsRef dims, c10::ScalarType from, c10::ScalarType to);

// `base`: dims of the buffer in elements of the tensor's dtype (dims_as).
ViewPlan plan_view(DimsRef base, DimsRef sizes, DimsRef strides, int64_t offset);

}  // namespace torch_tpu
