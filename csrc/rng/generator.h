// The random state of a device: a seed and an offset, on the host. Kernels take both as operands
// (counter-based Philox), so there is no device state and one program an op.
#pragma once

#include <ATen/core/Generator.h>

namespace torch_tpu {

const at::Generator& default_generator(c10::DeviceIndex index);  // -1: the current device
at::Generator new_generator(c10::DeviceIndex index);
// Seeds the default generators, those included that are not made yet.
void seed_all(uint64_t seed);

}  // namespace torch_tpu
