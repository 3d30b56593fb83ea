"""The functional form of an in-place or out= overload, from the ATen schemas: there is no second list of ops."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch._ops import OpOverload


@dataclass(frozen=True, slots=True)
class Form:
    """``functional`` computes what ``op`` computes; its results go to the arguments named ``writes``, in order."""

    op: OpOverload
    functional: OpOverload
    writes: tuple[str, ...]
    out: bool  # the written arguments are out= tensors, which are no inputs
    factory: bool = False  # ``functional`` also takes a dtype and a device: those of the out= tensor


# Functional forms that have another name than their out= or in-place form.
_RENAMED = {
    "__ilshift__": "__lshift__",
    "__irshift__": "__rshift__",
    "conj_physical": "_conj_physical",
    "adaptive_avg_pool2d": "_adaptive_avg_pool2d",
    "adaptive_avg_pool3d": "_adaptive_avg_pool3d",
}
_OPTIONS = {"dtype", "layout", "device", "pin_memory"}


def overload(name: str) -> OpOverload:
    """``aten.add.Tensor`` as an object."""
    namespace, packet, last = name.split(".")
    found = getattr(getattr(getattr(torch.ops, namespace), packet), last)
    assert isinstance(found, OpOverload)
    return found


def _writes(op: OpOverload) -> list[str]:
    return [a.name for a in op._schema.arguments if a.alias_info is not None and a.alias_info.is_write]


def _signature(op: OpOverload, without: set[str]) -> list[tuple[str, str]]:
    return [(a.name, str(a.type)) for a in op._schema.arguments if a.name not in without]


@cache
def form_of(op: OpOverload) -> Form | None:
    """The form of ``op``; a functional overload is its own. None if ATen has no functional sibling."""
    writes = _writes(op)
    if not writes:
        return Form(op, op, (), False)
    out = any(a.is_out for a in op._schema.arguments)
    wanted = _signature(op, set(writes) if out else set())
    base = op._schema.name.split("::")[1]
    names = [base] if out else [base.removesuffix("_"), base]
    names = [_RENAMED[base]] if base in _RENAMED else names
    for name in names + ([base + "_functional"] if not out else []):
        packet = getattr(torch.ops.aten, name.replace("__functional", "_functional"), None)
        if packet is None:
            continue
        for other in packet.overloads():
            candidate = getattr(packet, other)
            if _writes(candidate):
                continue
            if _signature(candidate, set()) == wanted:
                return Form(op, candidate, tuple(writes), out)
            if (
                out
                and candidate._schema.arguments[-1].name == "pin_memory"
                and _signature(candidate, _OPTIONS) == wanted
            ):
                return Form(op, candidate, tuple(writes), out, factory=True)
    return None
