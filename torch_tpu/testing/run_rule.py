"""Run one lowering rule on its own, without the dispatcher: lower a call, compile it, give it CPU tensors.

check(aten.add.Tensor, t(4, 3), t(3), alpha=2)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves, tree_map_only

import torch_tpu.lowering.rules  # noqa: F401  (fills the rule table)
from torch_tpu.ir.builder import Builder, Value
from torch_tpu.ir.types import TensorType
from torch_tpu.lowering.driver import lower_node
from torch_tpu.lowering.registry import KEYED, RULES, Dynamic, GlobalState, RngOperands
from torch_tpu.runtime import extension

TOLERANCES: dict[torch.dtype, tuple[float, float]] = {
    torch.float32: (1e-4, 1e-5),
    torch.float64: (1e-7, 1e-7),
    torch.bfloat16: (2e-2, 2e-2),
    torch.float16: (5e-3, 5e-3),
    torch.complex64: (1e-4, 1e-5),
    torch.complex128: (1e-7, 1e-7),
}
"""Relative and absolute, by dtype of the result; what is not here must be equal."""

_WIDE = (torch.float64, torch.complex128)
_NUMBERS = ("number", "float", "Optional[number]", "Optional[float]")
_NUMBER_LISTS = ("List[number]", "List[float]")


class _Operands:
    """Arguments of a call as a rule gets them; collects the inputs of the program."""

    def __init__(self, b: Builder, op: OpOverload, *, wide: bool) -> None:
        self.b = b
        self.policies = RULES[op].scalars
        self.number = torch.float64 if wide else torch.float32
        self.inputs: list[torch.Tensor] = []

    def tensor(self, t: torch.Tensor) -> Value:
        self.inputs.append(t.detach().resolve_conj().resolve_neg().contiguous())
        return self.b.arg(TensorType.of(t))

    def scalar(self, x: Any, policy: Any) -> Any:
        if isinstance(x, (bool, complex)) or policy == KEYED or x in policy:
            return x
        dtype = torch.int64 if isinstance(x, int) else self.number
        self.inputs.append(torch.tensor(x, dtype=dtype))
        return self.b.arg(TensorType((), dtype), wrapped=True)

    def value(self, argument: Any, x: Any) -> Any:
        kind, policy = str(argument.type), self.policies.get(argument.name, ())
        if isinstance(x, torch.Tensor):
            return self.tensor(x)
        if isinstance(x, (list, tuple)) and any(isinstance(item, torch.Tensor) for item in x):
            return [self.tensor(item) if isinstance(item, torch.Tensor) else item for item in x]
        if kind in _NUMBERS and isinstance(x, (int, float, complex)):
            return self.scalar(x, policy)
        if kind in _NUMBER_LISTS and x is not None:
            return [self.scalar(item, policy) for item in x]
        return None if "Generator" in kind else x

    def rng(self, seed: int, offset: int) -> RngOperands:
        word = TensorType((), torch.uint64)
        self.inputs += [torch.tensor(seed, dtype=torch.uint64), torch.tensor(offset, dtype=torch.uint64)]
        return RngOperands(self.b.arg(word), self.b.arg(word))


def lower_call(
    op: OpOverload,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    outs: Sequence[torch.Tensor],
    *,
    seed: int = 0,
    offset: int = 0,
) -> tuple[str, list[torch.Tensor], list[Value], Dynamic | None]:
    """Lower one call of an overload that has a rule.

    Args:
        args, kwargs: CPU tensors and values.
        outs: tensors of the result types; none for a dynamic rule.

    Returns:
        The module's text, its inputs, its results, and what a dynamic rule returned.
    """
    b = Builder()
    wide = any(isinstance(x, torch.Tensor) and x.dtype in _WIDE for x in tree_leaves((args, kwargs, outs)))
    operands = _Operands(b, op, wide=wide)
    schema = {a.name: a for a in op._schema.arguments}
    values = [operands.value(a, x) for a, x in zip(schema.values(), args, strict=False)]
    named = {name: operands.value(schema[name], x) for name, x in kwargs.items()}
    rng = operands.rng(seed, offset) if RULES[op].rng else None
    state = GlobalState(default_dtype=torch.get_default_dtype())
    got = lower_node(b, op, [TensorType.of(t) for t in outs], values, named, state=state, rng=rng)
    dynamic = got if isinstance(got, Dynamic) else None
    results = [*got.values, got.count] if isinstance(got, Dynamic) else [v for v in got if v is not None]
    return b.module("rule", results), operands.inputs, results, dynamic


def run_rule(
    op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], outs: Sequence[torch.Tensor], **rng: int
) -> list[torch.Tensor]:
    """Results of the rule on the first device, as CPU tensors; then those of its hidden writes.

    Arguments as for `lower_call`. Blocks. Thread-safe.
    """
    text, inputs, results, dynamic = lower_call(op, args, kwargs, outs, **rng)
    found = extension.run_stablehlo(text, inputs, [torch.empty(v.shape, dtype=v.dtype) for v in results])
    if dynamic is None:
        return found
    count = int(found.pop())
    return [t if d is None else t.narrow(d, 0, count) for t, d in zip(found, dynamic.dims, strict=True)]


def check(op: OpOverload, *args: Any, **kwargs: Any) -> list[torch.Tensor]:
    """Compare one call with ATen's CPU kernel; of a random op only shapes and dtypes. Returns what the rule gave.

    Raises:
        AssertionError: they differ by more than `TOLERANCES`.
    """
    call = tree_map_only(torch.Tensor, torch.Tensor.clone, (args, kwargs))
    want = [t for t in tree_leaves(op(*call[0], **call[1])) if isinstance(t, torch.Tensor)]
    entry = RULES[op]
    got = run_rule(op, args, kwargs, [] if entry.dynamic else want)
    assert len(got) >= len(want), f"{op}: {len(got)} results for {len(want)}"
    for g, w in zip(got, want, strict=False):
        assert (g.dtype, g.shape) == (w.dtype, w.shape), f"{op}: {g.dtype}{list(g.shape)} for {w.dtype}{list(w.shape)}"
        if not entry.rng:
            rtol, atol = TOLERANCES.get(w.dtype, (0.0, 0.0))
            torch.testing.assert_close(g, w.resolve_conj().contiguous(), rtol=rtol, atol=atol, equal_nan=True)
    return got
