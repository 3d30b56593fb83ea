"""Running what fused mode has recorded."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from torch_tpu.runtime import device, modes

__all__ = ["synchronize"]


def synchronize(tensors: torch.Tensor | Iterable[torch.Tensor] | None = None, wait: bool = False) -> None:
    """Run what is recorded (fused mode), and with ``wait`` wait until it has run. Autograd goes on through it.

    Args:
        tensors: whose values are wanted; all that is recorded runs, whatever is given.
        wait: also wait for all work of the devices of ``tensors``, or of all devices.

    Raises:
        RuntimeError: with ``wait``, the first error of that work since the last synchronization.
    """
    modes.flush()
    if not wait:
        return
    given = [] if tensors is None else [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    for index in {t.device.index for t in given if t.device.type == "tpu"} or range(device.device_count()):
        device.synchronize(index)
