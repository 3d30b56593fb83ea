"""Memory of a device, by our own accounting: bytes of the buffers alive. Sizes are in bytes."""

from __future__ import annotations

from typing import Any

import torch

Device = torch.device | str | int | None


def _device(device: Device) -> Any:
    return torch.device("tpu", device) if isinstance(device, int) else None if device is None else torch.device(device)


def memory_stats(device: Device = None) -> dict[str, int]:
    """All statistics, with PyTorch's names (``allocated_bytes.all.current``, ``num_ooms``, ...)."""
    return dict(torch.accelerator.memory_stats(_device(device)))


def memory_allocated(device: Device = None) -> int:
    """Bytes of live buffers."""
    return int(torch.accelerator.memory_allocated(_device(device)))


def max_memory_allocated(device: Device = None) -> int:
    """Most bytes alive at once since the last reset."""
    return int(torch.accelerator.max_memory_allocated(_device(device)))


def memory_reserved(device: Device = None) -> int:
    """As `memory_allocated`: nothing is cached here."""
    return int(torch.accelerator.memory_reserved(_device(device)))


def max_memory_reserved(device: Device = None) -> int:
    """As `max_memory_allocated`."""
    return int(torch.accelerator.max_memory_reserved(_device(device)))


def reset_peak_memory_stats(device: Device = None) -> None:
    """The peak is what is alive now."""
    torch.accelerator.reset_peak_memory_stats(_device(device))


def reset_accumulated_memory_stats(device: Device = None) -> None:
    """Totals of allocated and freed bytes start at zero."""
    torch.accelerator.reset_accumulated_memory_stats(_device(device))


def mem_get_info(device: Device = None) -> tuple[int, int]:
    """Free and total bytes; of the host where the plugin cannot tell."""
    free, total = torch.accelerator.get_memory_info(_device(device))
    return int(free), int(total)


def empty_cache() -> None:
    """Nothing: PJRT owns the memory and no block is held back."""
