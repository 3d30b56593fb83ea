"""``torch.tpu``: the device module that PyTorch and its ecosystem look up by the device's name."""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from torch_tpu import _C
from torch_tpu.runtime import compiler, memory, random
from torch_tpu.runtime import modes as _modes
from torch_tpu.runtime.inspect import check_accuracy, detect_nonfinite
from torch_tpu.runtime.memory import (
    empty_cache,
    max_memory_allocated,
    max_memory_reserved,
    mem_get_info,
    memory_allocated,
    memory_reserved,
    memory_snapshot,
    memory_stats,
    memory_summary,
    reset_accumulated_memory_stats,
    reset_peak_memory_stats,
)
from torch_tpu.runtime.memory import index_of as _index
from torch_tpu.runtime.modes import EagerMode, deferred_stats, set_eager_mode
from torch_tpu.runtime.random import (
    default_generators,
    get_rng_state,
    get_rng_state_all,
    initial_seed,
    manual_seed,
    manual_seed_all,
    seed,
    seed_all,
    set_rng_state,
    set_rng_state_all,
)

Device = torch.device | str | int | None

__all__ = [
    "DeviceProperties",
    "EagerMode",
    "Event",
    "Stream",
    "check_accuracy",
    "compiler",
    "current_device",
    "current_stream",
    "default_generators",
    "default_stream",
    "deferred_stats",
    "detect_nonfinite",
    "device",
    "device_count",
    "device_of",
    "eager_mode",  # noqa: F822  (a property, see the end)
    "empty_cache",
    "get_amp_supported_dtype",
    "get_device_capability",
    "get_device_name",
    "get_device_properties",
    "get_rng_state",
    "get_rng_state_all",
    "init",
    "initial_seed",
    "is_available",
    "is_initialized",
    "manual_seed",
    "manual_seed_all",
    "max_memory_allocated",
    "max_memory_reserved",
    "mem_get_info",
    "memory",
    "memory_allocated",
    "memory_reserved",
    "memory_snapshot",
    "memory_stats",
    "memory_summary",
    "random",
    "reset_accumulated_memory_stats",
    "reset_peak_memory_stats",
    "seed",
    "seed_all",
    "set_device",
    "set_eager_mode",
    "set_rng_state",
    "set_rng_state_all",
    "set_stream",
    "stream",
    "synchronize",
]


# ---- presence


def is_available() -> bool:
    """Whether there is a device. Touches no hardware."""
    return device_count() > 0


def device_count() -> int:
    """Number of devices; before the first use, the number expected. Touches no hardware."""
    return int(_C.expected_device_count())


def is_initialized() -> bool:
    """Whether the plugin's client exists in this process."""
    return bool(_C.is_initialized()) and not _C.is_forked()


def __getattr__(name: str) -> Any:
    # torch.utils.checkpoint keeps the random state of a device only if its module says so by this name.
    if name == "_initialized":
        return is_initialized()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def init() -> None:
    """Create the client now rather than at first use. Raises what first use would raise."""
    _C.init()


def _lazy_init() -> None:
    _C.init()


def _is_in_bad_fork() -> bool:
    return bool(_C.is_forked())


# ---- current device and streams


def current_device() -> int:
    """Index of this thread's current device."""
    return int(torch.accelerator.current_device_index())


def set_device(device: Device) -> None:
    """Make ``device`` current in this thread."""
    index = _index(device)
    if index >= 0:
        torch.accelerator.set_device_index(index)


class device:  # noqa: N801  (the name every device module gives it)
    """Context manager: ``device`` is current in this thread within the block; a negative index changes nothing."""

    def __init__(self, device: Device) -> None:
        self.idx = _index(device)
        self.prev_idx = -1

    def __enter__(self) -> None:
        self.prev_idx = torch._C._accelerator_exchangeDevice(self.idx) if self.idx >= 0 else -1

    def __exit__(self, *_: object) -> None:
        if self.prev_idx >= 0:
            torch._C._accelerator_exchangeDevice(self.prev_idx)


class device_of(device):  # noqa: N801
    """Context manager: the device of a tensor or storage is current; other objects change nothing."""

    def __init__(self, obj: Any) -> None:
        super().__init__(obj.device.index if getattr(obj, "is_tpu", False) else -1)


class _OfOurDevice(type):
    # torch makes and takes plain torch.Stream and torch.Event (elapsed_time refuses subclasses): ours are such, too.
    def __instancecheck__(cls, obj: object) -> bool:
        return isinstance(obj, cls.__mro__[1]) and obj.device.type == "tpu"  # type: ignore[attr-defined]


class Stream(torch.Stream, metaclass=_OfOurDevice):
    """A stream of a device, a plain `torch.Stream`. Work runs in the order of the launches whatever the stream: streams
    are there for programs that use them, and cost nothing."""

    def __new__(cls, device: Device = None, priority: int = 0, **kwargs: Any) -> torch.Stream:  # type: ignore[misc]
        return torch.Stream(device=torch.device("tpu", _index(device)), priority=priority, **kwargs)


class Event(torch.Event, metaclass=_OfOurDevice):
    """A mark in the work of a device, a plain `torch.Event`. ``elapsed_time`` is host time between completions in
    milliseconds: PJRT has no device clock. Events are not shared between processes, whatever ``interprocess`` says."""

    def __new__(  # type: ignore[misc]
        cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False, device: Device = None
    ) -> torch.Event:
        return torch.Event(torch.device("tpu", _index(device)), enable_timing=enable_timing, blocking=blocking)


def current_stream(device: Device = None) -> torch.Stream:
    """This thread's current stream of ``device``."""
    return torch.accelerator.current_stream(torch.device("tpu", _index(device)))


def default_stream(device: Device = None) -> torch.Stream:
    """Stream 0 of ``device``."""
    return torch.Stream(stream_id=0, device_index=_index(device), device_type=int(_device_type()))


def _device_type() -> Any:
    return torch._C._autograd.DeviceType.PrivateUse1


def set_stream(stream: torch.Stream) -> None:
    """Make ``stream`` (and its device) current in this thread."""
    torch.accelerator.set_stream(stream)


@contextlib.contextmanager
def stream(stream: torch.Stream | None) -> Iterator[None]:
    """``stream`` is current in this thread within the block; None changes nothing."""
    if stream is None:
        yield
        return
    old = torch.accelerator.current_stream(stream.device)
    device_index = current_device()
    torch.accelerator.set_stream(stream)
    try:
        yield
    finally:
        torch.accelerator.set_stream(old)
        torch.accelerator.set_device_index(device_index)


def synchronize(device: Device = None) -> None:
    """Wait for all work of ``device``. Raises the first error of that work since the last call."""
    torch.accelerator.synchronize(torch.device("tpu", _index(device)))


# ---- facts


@dataclass(frozen=True, slots=True)
class DeviceProperties:
    """What a device is. ``total_memory`` is in bytes."""

    name: str
    total_memory: int
    platform: str
    platform_version: str
    multi_processor_count: int = 1


def get_device_name(device: Device = None) -> str:
    """The plugin's name of the device kind: ``"TPU v6e"``; on other plugins ``"cpu"``, ``"NVIDIA H100"``."""
    return str(_C.device_info(_index(device))["kind"])


def get_device_properties(device: Device = None) -> DeviceProperties:
    """Properties of ``device``. Creates the client."""
    index = _index(device)
    info = _C.device_info(index)
    return DeviceProperties(info["kind"], mem_get_info(index)[1], info["platform"], info["platform_version"])


def get_device_capability(device: Device = None) -> Any:
    """As ``torch.accelerator.get_device_capability``."""
    return torch.accelerator.get_device_capability(torch.device("tpu", _index(device)))


def get_amp_supported_dtype() -> list[torch.dtype]:
    """Dtypes that ``torch.autocast("tpu")`` accepts; bfloat16 is the default."""
    return [torch.bfloat16, torch.float16, torch.float32]


class _DeviceModule(types.ModuleType):
    """This module's class: a module-level property needs one."""

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), "eager_mode"]

    @property
    def eager_mode(self) -> EagerMode:
        """Mode of the calling thread; assign to it to change the process's. See :class:`EagerMode`."""
        return _modes.current()

    @eager_mode.setter
    def eager_mode(self, mode: EagerMode) -> None:
        _modes.set_process(mode)


sys.modules[__name__].__class__ = _DeviceModule
