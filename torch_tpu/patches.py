"""Every change to an object that is not ours: what, why, and for which versions of torch.

The loader applies the list once. tests/test_patches.py calls each original and fails when it does what the patch does, so
that a patch goes when its reason goes. A patch passes everything that is not about "tpu" on to the original.

DLPack: a tensor leaves the device as a copy in the memory of the CPU (kDLCPU, a snapshot: later writes to either side are
not seen by the other), because the addresses of device tensors are names that no other library could read. It comes in by
`torch.from_dlpack(x, device="tpu")`, also a copy.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Patch:
    """One attribute of somebody else's class or module; applied when ``since <= torch.__version__ < before``."""

    target: str  # "module:Class.attribute"
    make: Callable[[Any], Any]  # from the original to what replaces it
    since: str
    before: str
    reason: str

    def owner(self) -> tuple[Any, str]:
        """The object that has the attribute, and the name of that. Raises AttributeError if torch moved it."""
        module, _, path = self.target.partition(":")
        *parents, name = path.split(".")
        return functools.reduce(getattr, parents, importlib.import_module(module)), name

    def applies(self) -> bool:
        """Whether this version of torch needs it."""
        return bool(self.since <= torch.__version__ < self.before)

    def apply(self) -> None:
        """Replace the attribute; the original stays reachable as ``__wrapped__``."""
        owner, name = self.owner()
        original = getattr(owner, name)
        setattr(owner, name, functools.wraps(original)(self.make(original)))


def _is_ours(t: torch.Tensor) -> bool:
    # A subclass that overrides torch functions goes to the original, which comes back here with its plain tensor.
    return t.device.type == "tpu" and not torch.overrides.has_torch_function_unary(t)


def _dlpack_device(original: Callable[..., Any]) -> Callable[..., Any]:
    def dlpack_device(self: torch.Tensor) -> tuple[int, int]:
        if not _is_ours(self):
            return original(self)  # type: ignore[no-any-return]
        return torch.utils.dlpack.DLDeviceType.kDLCPU, 0

    return dlpack_device


def _dlpack(original: Callable[..., Any]) -> Callable[..., Any]:
    def dlpack(
        self: torch.Tensor,
        *,
        stream: int | None = -1,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        if not _is_ours(self):
            return original(self, stream=stream, max_version=max_version, dl_device=dl_device, copy=copy)
        if copy is False:
            raise BufferError('a "tpu" tensor cannot be exported without a copy: it has no address outside of torch')
        if dl_device is not None and tuple(dl_device) != (torch.utils.dlpack.DLDeviceType.kDLCPU, 0):
            raise BufferError(
                f'a "tpu" tensor can be exported to the CPU only, not to DLPack device {tuple(dl_device)}'
            )
        return original(self.cpu(), stream=stream, max_version=max_version)

    return dlpack


def _byteswap(original: Callable[..., None]) -> Callable[..., None]:
    def byteswap(self: torch.UntypedStorage, element_size: int) -> None:
        if self.device.type != "tpu":
            return original(self, element_size)
        host = self.cpu()
        original(host, element_size)
        self.copy_(host)
        return None

    return byteswap


def _validate_device(original: Callable[..., None]) -> Callable[..., None]:
    def validate_device(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        if query.device.type != "tpu":
            original(query, key, value)

    return validate_device


def _associative_scan(original: Callable[..., Any]) -> Callable[..., Any]:
    def associative_scan(
        combine_fn: Callable[..., Any], xs: Any, dim: int, reverse: bool = False, combine_mode: str = "pointwise"
    ) -> Any:
        leaves = torch.utils._pytree.tree_leaves(xs)
        if combine_mode == "pointwise" and any(isinstance(t, torch.Tensor) and t.device.type == "tpu" for t in leaves):
            combine_mode = "generic"  # the same results, for any function
        return original(combine_fn, xs, dim, reverse, combine_mode)

    return associative_scan


def _higher_order_init(original: Callable[..., None]) -> Callable[..., None]:
    key = torch._C.DispatchKey.AutocastPrivateUse1  # type: ignore[attr-defined]

    def init(self: torch._ops.HigherOrderOperator, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self.fallthrough(key)

    for op in torch._ops._higher_order_ops.values():  # made before the patch
        op.fallthrough(key)
    flex = torch._ops._higher_order_ops["flex_attention"]  # casts its operands, as its kernel for CUDA does
    cast = flex.py_kernels[torch._C.DispatchKey.AutocastCUDA]

    def flex_attention(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(key)):
            return cast(*args, **kwargs)

    flex.py_impl(key)(flex_attention)
    return init


PATCHES = [
    Patch(
        "torch:Tensor.__dlpack_device__",
        _dlpack_device,
        since="2.13",
        before="2.14",
        reason='compares the device with the literal "privateuse1", which is not its name after a rename: ValueError',
    ),
    Patch(
        "torch:Tensor.__dlpack__",
        _dlpack,
        since="2.13",
        before="2.14",
        reason="exports the address of a renamed backend's tensor as kDLExtDev, which no consumer takes",
    ),
    Patch(
        "torch:UntypedStorage._byteswap",
        _byteswap,
        since="2.13",
        before="2.14",
        reason="reads and writes the address of any storage as host memory: the process ends in a segmentation fault",
    ),
    Patch(
        "torch.nn.attention.flex_attention:_validate_device",
        _validate_device,
        since="2.13",
        before="2.14",
        reason="refuses flex attention on devices outside of a fixed list: ValueError, before any dispatch",
    ),
    *(
        Patch(
            target,
            _associative_scan,
            since="2.13",
            before="2.14",
            reason="refuses its default mode on devices other than CUDA and XPU: ValueError",
        )
        for target in (
            "torch._higher_order_ops.associative_scan:associative_scan",
            "torch._higher_order_ops:associative_scan",
        )
    ),
    Patch(
        "torch._ops:HigherOrderOperator.__init__",
        _higher_order_init,
        since="2.13",
        before="2.14",
        reason="lets the autocast keys of CPU, CUDA and XPU through only: torch.cond in an autocast region has no kernel",
    ),
]
