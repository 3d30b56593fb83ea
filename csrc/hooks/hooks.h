// What PyTorch asks of an accelerator (at::PrivateUse1HooksInterface).
#pragma once

#include <functional>

namespace torch_tpu {

// Installs the hooks, once. `expected_devices` answers how many devices there will be without touching
// hardware.
void register_hooks(std::function<int()> expected_devices);

}  // namespace torch_tpu
