"""What C++ must know of an op before its first call: its rung, its scalars, what it writes beyond its schema."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._ops import OpOverload

import torch_tpu.lowering.rules  # noqa: F401  (fills the rule table)
from torch_tpu.lowering import decompose
from torch_tpu.lowering.registry import KEYED, RULES
from torch_tpu.lowering.siblings import Form, form_of, overload
from torch_tpu.modes import bounds
from torch_tpu.modes.bounds import BOUNDS
from torch_tpu.modes.host_ops import HOST

aten = torch.ops.aten

# csrc/dispatch/op_record.h, ValueCheck.
_NONE, _PROBABILITY, _UNIFORM_RANGE, _STD, _POSITIVE, _INTEGER_POWER, _FILL = range(7)
_CHECKS = {
    aten.bernoulli.p: _PROBABILITY,
    aten.native_dropout.default: _NONE,
    aten.uniform.default: _UNIFORM_RANGE,
    aten.normal_functional.default: _STD,
    aten.normal.Tensor_float: _STD,
    aten.exponential.default: _POSITIVE,
    aten.cauchy.default: _POSITIVE,
    aten.log_normal.default: _POSITIVE,
    aten.pow.Tensor_Scalar: _INTEGER_POWER,
    aten.fill.Scalar: _FILL,
}
_MASKED = {aten.index.Tensor, aten.index_put.default, aten._index_put_impl.default, aten._unsafe_index_put.default}
_MASKED |= {aten._unsafe_index.Tensor}

# Tensor arguments that may be on the CPU although the rest is on the device; they are moved at each call.
_ACCEPTS_CPU: dict[OpOverload, tuple[str, ...]] = {
    aten.index.Tensor: ("indices",),
    aten._unsafe_index.Tensor: ("indices",),
    aten._embedding_bag.default: ("offsets",),
}

# Composite kernels that PyTorch hides from backends which trace mutations, as ours does not. The rule of
# as_strided_scatter is for compiled graphs, which know that its argument is all of its storage.
_NON_FUNCTIONAL = {aten.as_strided_scatter.default, aten.linalg_pinv.atol_rtol_tensor, aten._trilinear.default}

# Composite kernels that beat a decomposition: they allocate and fill, or call one op that has a rule.
_COMPOSITE_FIRST = ("new_", "rand", "empty", "full", "zeros", "ones", "normal", "_foreach_")


@dataclass(slots=True)
class Description:
    """``args``: (index, written, keyed, tested values, accepts_cpu) of the arguments that are out of the ordinary."""

    rung: str
    functional: tuple[str, str] = ("", "")  # schema name and overload to run instead, for rung "functional"
    rng: bool = False
    expands_masks: bool = False
    check: int = _NONE
    checks_bounds: bool = False  # in debug mode, see bounds.py
    args: list[tuple[int, bool, bool, list[float], bool]] = field(default_factory=list)


def _is_composite(op: OpOverload) -> bool:
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "CompositeExplicitAutograd"))


def _prefers_composite(op: OpOverload) -> bool:
    base = op._schema.name.split("::")[1]
    tensors = any("Tensor" in str(a.type) for a in op._schema.arguments)
    return not tensors or base.startswith(_COMPOSITE_FIRST) or base.endswith("_like")


def _rung(op: OpOverload, form: Form | None) -> str:
    if op in HOST:
        return "host"
    if op in _NON_FUNCTIONAL or (form is not None and form.functional in _NON_FUNCTIONAL):
        return "composite"
    if form is not None and form.functional in RULES:
        return "program"
    composite = _is_composite(op)
    if composite and (form is None or _prefers_composite(op)):
        return "composite"
    if form is not None and decompose.has_decomposition(form.functional):
        return "program"
    return "composite" if composite else "cpu"


def describe(name: str) -> Description:
    """The description of ``aten.x.overload``. Called once an op."""
    op = overload(name)
    form = form_of(op)
    rung = _rung(op, form)
    d = Description(rung)
    if rung != "program" or form is None:
        return d
    functional = form.functional
    entry = RULES.get(functional)
    if form.out and entry is not None and entry.dynamic:
        d.rung, d.functional = "functional", (functional._schema.name, functional._schema.overload_name)
    d.check = _CHECKS.get(functional, _NONE)
    d.expands_masks = functional in _MASKED
    d.checks_bounds = functional in BOUNDS
    d.rng = entry is not None and entry.rng
    scalars = {} if entry is None else entry.scalars
    hidden = () if entry is None else entry.writes
    cpu = _ACCEPTS_CPU.get(functional, ())
    for i, a in enumerate(op._schema.arguments):
        policy = scalars.get(a.name, ()) if entry is not None else KEYED
        keyed = policy == KEYED
        tested = [] if keyed else [float(v) for v in _values(policy)]
        if keyed or tested or a.name in hidden or a.name in cpu:
            d.args.append((i, a.name in hidden, keyed, tested, a.name in cpu))
    return d


def check_bounds(name: str, values: list[Any]) -> None:
    """Debug mode: raise IndexOutOfRange if ``values``, the arguments of op ``name``, hold an index that is."""
    op = overload(name)
    form = form_of(op)
    assert form is not None
    args = dict(zip((a.name for a in op._schema.arguments), values, strict=True))
    bounds.check(name, form.functional, args)


def _values(policy: object) -> Iterable[float]:
    return policy if isinstance(policy, tuple) else ()
