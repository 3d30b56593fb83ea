"""Memory of a device, by our own accounting: bytes of the buffers alive. Sizes are in bytes."""

from __future__ import annotations

from typing import Any

import torch

from torch_tpu import _C

Device = torch.device | str | int | None


def _device(device: Device) -> Any:
    return torch.device("tpu", device) if isinstance(device, int) else None if device is None else torch.device(device)


def index_of(device: Device) -> int:
    """Index of a device; the current one for None and for "tpu". Raises ValueError for another device type."""
    if device is None:
        return _current()
    if isinstance(device, int):
        return device
    d = torch.device(device)
    if d.type != "tpu":
        raise ValueError(f"Expected a tpu device, but got: {d}")
    index: int | None = d.index  # torch's stubs do not know that it may be None
    return _current() if index is None else index


def _current() -> int:
    return int(torch.accelerator.current_device_index())


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


def memory_snapshot(device: Device = None) -> list[dict[str, Any]]:
    """What each live storage holds, on one device or (None) on all.

    Returns:
        A dict for each storage of at least a byte: ``device`` (index), ``address`` (of the storage, synthetic),
        ``storage_bytes`` (its room), and ``state``: ``"allocated"``, ``"recorded"`` (fused mode: no memory yet),
        ``"failed"`` or ``"unwritten"``. Unless that is ``"unwritten"``, also what the device holds for it: ``array``
        (an identity: storages may share one), ``bytes``, ``dtype``, ``shape``, and ``op``, the name of the op that
        made it, or None for a transfer.
    """
    entries = _C.memory_snapshot()
    return entries if device is None else [e for e in entries if e["device"] == index_of(device)]


def memory_summary(device: Device = None) -> str:
    """Statistics of one device, and a table of the arrays that tensors of all devices hold, for people."""
    stats = memory_stats(device)
    mib = {
        name: stats[f"allocated_bytes.all.{key}"] / 2**20
        for name, key in (("now", "current"), ("peak", "peak"), ("made", "allocated"), ("freed", "freed"))
    }
    head = ", ".join(f"{name} {value:.1f} MiB" for name, value in mib.items())
    return f"tpu:{index_of(device)}: {head}; out of memory {stats['num_ooms']} times\n{_C.memory_table()}"


def empty_cache() -> None:
    """Nothing: PJRT owns the memory and no block is held back."""
