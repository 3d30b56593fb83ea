"""Registers the device ``"tpu"`` with PyTorch. Runs at the end of ``import torch`` (entry point ``torch.backends``).

Quick, and touches no hardware: the plugin is loaded at first use of the device. Neither sympy nor dynamo is imported.
Never raises: what is wrong becomes one warning, and torch stays usable. A device that was asked for and cannot be had is
registered all the same, so that its first use says why; one that was turned off, or that nobody asked for, is not.
"""

from __future__ import annotations

import functools
import types
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch._C._dynamo import eval_frame  # no import of torch._dynamo
from torch.utils import backend_registration

F = TypeVar("F", bound=Callable[..., Any])
_SKIP = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.SKIP)

_loaded = False


def load() -> None:
    """Register the device, once; later calls do nothing. Raises nothing."""
    global _loaded
    if _loaded:
        return
    _loaded = True
    torch.backends.tpu = types.SimpleNamespace(is_available=_is_available)  # type: ignore[attr-defined]
    try:
        _register()
    except (ImportError, OSError, RuntimeError, ValueError) as e:
        warnings.warn(f'torch_tpu: there is no device "tpu": {e}', RuntimeWarning, stacklevel=2)


def _is_available() -> bool:
    return hasattr(torch, "tpu") and bool(torch.tpu.is_available())


@functools.cache
def _plugin() -> Any:
    from torch_tpu.runtime import plugins

    return plugins.choose()


def _expected_devices() -> int:
    try:
        return int(_plugin().devices)
    except (RuntimeError, ValueError):
        return 0  # the first use of the device says why


def _first_use() -> Any:
    """The plugin to load. Settings are read here and not at import, see config.py; a wrong one raises here."""
    from torch_tpu import config
    from torch_tpu.runtime import extension

    extension.set_max_programs(config.MAX_PROGRAMS.value)
    extension.keep_optimized(config.DUMP_DIR.value is not None or config.TRACE.value is not None)
    extension.set_cpu_fallback(("warn", "error", "silent").index(config.CPU_FALLBACK.value))
    if (mode := config.EAGER_MODE.value) != "strict":
        from torch_tpu.runtime import modes

        modes.set_process(modes.EagerMode[mode.upper()])
    return _plugin()


def _register() -> None:
    from torch_tpu import config, patches
    from torch_tpu.runtime import extension

    config.unknown()
    try:
        if _plugin().kind == "none":
            return
    except (RuntimeError, ValueError) as e:
        warnings.warn(f'torch_tpu: the device "tpu" cannot be used: {e}', RuntimeWarning, stacklevel=3)
    backend_registration.rename_privateuse1_backend("tpu")
    extension.install_runtime(_first_use, _expected_devices)
    extension.install_lowering(_describe, _lower, _lower_reshape, _compiled, _fuse, _check_bounds)
    extension.register_kernels()
    from torch_tpu.runtime import device

    torch._register_device_module("tpu", device)
    backend_registration.generate_methods_for_privateuse1_backend(for_tensor=True, for_module=True, for_storage=True)
    torch.set_autocast_dtype("tpu", torch.bfloat16)
    for patch in patches.PATCHES:
        if patch.applies():
            patch.apply()


# The lowering library is imported at the first miss: `import torch` does not pay for it.


def _hidden(fn: F) -> F:
    """``fn``, which the extension calls wherever dynamo runs the user's code: dynamo traces nothing below it."""
    eval_frame.set_code_exec_strategy(fn.__code__, _SKIP)
    return fn


@_hidden
def _describe(name: str) -> Any:
    from torch_tpu.modes import describe

    return describe.describe(name)


@_hidden
def _lower(call: Any) -> Any:
    from torch_tpu.modes import eager

    return eager.lower(call)


@_hidden
def _lower_reshape(dtype: torch.dtype, dims: list[int], to: list[int]) -> Any:
    from torch_tpu.modes import eager

    return eager.lower_reshape(dtype, dims, to)


@_hidden
def _check_bounds(name: str, values: list[Any]) -> None:
    from torch_tpu.modes import describe

    describe.check_bounds(name, values)


@_hidden
def _fuse(*request: Any) -> Any:
    from torch_tpu.modes import fused

    return fused.fuse(*request)


@_hidden
def _compiled(op: str, stablehlo: str, store_key: str, executable: bytes, optimized: bytes, duration_ms: float) -> None:
    from torch_tpu.modes import stored

    stored.compiled(op, stablehlo, store_key, executable, optimized, duration_ms)
