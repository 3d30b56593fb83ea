"""How the device handles each ATen overload: what `docs/ops.md` is printed from. Asks what the dispatcher asks."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch._ops import OpOverload

from torch_tpu.lowering.registry import RULES
from torch_tpu.lowering.siblings import form_of, overload
from torch_tpu.modes.describe import describe
from torch_tpu.modes.host_ops import HOST


def _on_device() -> list[OpOverload]:
    """Overloads with a kernel of ours, sorted by name."""
    names = [n for n in torch._C._dispatch_get_registrations_for_dispatch_key("PrivateUse1") if n.startswith("aten::")]
    found = []
    for name in sorted(names):
        base, _, last = name.removeprefix("aten::").partition(".")
        found.append(overload(f"aten.{base}.{last or 'default'}"))
    return found


def _rung(op: OpOverload) -> str:
    described = describe(str(op)).rung
    if described not in ("program", "functional"):
        return described
    form = form_of(op)
    return "rule" if form is not None and form.functional in RULES else "decomposition"


def _moves_data(op: OpOverload) -> bool:
    """Whether C++ has a kernel of its own for ``op``: views and copies are not described."""
    schema = op._schema
    is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
    return is_view or op._schema.name.split("::")[1] in _MOVES


_MOVES = {
    "empty", "empty_strided", "resize_", "set_", "_copy_from", "_copy_from_and_resize", "_local_scalar_dense", "equal",
    "record_stream", "_pin_memory", "is_pinned", "is_set_to", "_assert_async",
}  # fmt: skip


def table() -> dict[str, list[OpOverload]]:
    """Rung to its overloads: rule, decomposition, composite, kernel, host, cpu."""
    found: dict[str, list[OpOverload]] = {}
    for op in _on_device():
        found.setdefault("kernel" if _moves_data(op) else _rung(op), []).append(op)
    return found


def host_reasons() -> dict[str, str]:
    """Name of each op that the host computes by design to the reason."""
    return {str(op): HOST[op] for op in sorted(HOST, key=str)}


def grouped(ops: Iterable[OpOverload]) -> dict[str, list[str]]:
    """Overload names by the op's name."""
    found: dict[str, list[str]] = {}
    for op in ops:
        _, base, last = str(op).split(".")
        found.setdefault(base, []).append(last)
    return found
