"""Higher-order ops that are control flow, as regions of a program: ``cond``, ``while_loop``, ``scan``, ``map``.

A rule gets its op's arguments with each tensor as a Value and each graph as a GraphModule, which ``cx.emit`` lowers
where it is called. Regions read values of the program around them, so what a graph captures is no operand of the op.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch._higher_order_ops.map import map_impl
from torch._ops import HigherOrderOperator
from torch.fx import GraphModule

from torch_tpu.errors import LoweringMismatch
from torch_tpu.ir.builder import Builder, Value
from torch_tpu.ir.types import TensorType

Emit: TypeAlias = Callable[[GraphModule, Sequence[Any]], Sequence[Any]]
"""Lowers a graph for the Values of its placeholders, and returns the leaves of its output."""


@dataclass(frozen=True, slots=True)
class RegionContext:
    """What a rule may read besides its arguments."""

    b: Builder
    op: HigherOrderOperator
    outs: Sequence[TensorType | None]  # results that the trace promised; None where there is none
    emit: Emit

    def checked(self, results: Sequence[Any], wanted: Sequence[TensorType | None]) -> list[Value]:
        """The tensors of ``results``.

        Raises:
            LoweringMismatch: a graph of the op gives others than ``wanted``.
        """
        found = [r.type if isinstance(r, Value) else r for r in results]
        if found != list(wanted):
            raise LoweringMismatch(
                f"a graph inside gave {', '.join(map(str, found))}; the trace promised {', '.join(map(str, wanted))}.",
                op=str(self.op),
            )
        return [r for r in results if r is not None]


_ARITHMETIC = {operator.add: "add", operator.sub: "subtract", operator.mul: "multiply"}
_COMPARISONS = {
    operator.lt: "LT",
    operator.le: "LE",
    operator.gt: "GT",
    operator.ge: "GE",
    operator.eq: "EQ",
    operator.ne: "NE",
}
NUMBER_OPS = frozenset({*_ARITHMETIC, *_COMPARISONS})
"""What a graph may do with a number that a loop carries."""


def _number(b: Builder, x: Value | int) -> Value:
    return x if isinstance(x, Value) else b.constant(x, torch.int64)


def _wrapped(x: Value) -> Value:
    return Value(x.name, x.type, wrapped=True)


def compute_number(b: Builder, op: Any, x: Value | int, y: Value | int) -> Value:
    """``op``, of `NUMBER_OPS`, of two numbers, at least one of them known only when the program runs."""
    x, y = _number(b, x), _number(b, y)
    if op in _ARITHMETIC:
        return _wrapped(b.binary(_ARITHMETIC[op], x, y))
    return b.compare(_COMPARISONS[op], x, y)


Rule: TypeAlias = Callable[..., Sequence[Value | None]]


def cond(
    cx: RegionContext, pred: Value | bool, true_graph: GraphModule, false_graph: GraphModule, operands: Sequence[Any]
) -> Sequence[Value | None]:
    """Only the branch that ``pred`` (one element) names runs."""
    if isinstance(pred, bool):
        return cx.emit(true_graph if pred else false_graph, operands)

    def branch(gm: GraphModule) -> Callable[[], Sequence[Value]]:
        return lambda: cx.checked(cx.emit(gm, operands), cx.outs)

    types = [t for t in cx.outs if t is not None]
    flag = cx.b.reshape(cx.b.convert(pred, torch.bool), ())
    got = iter(cx.b.if_(flag, branch(true_graph), branch(false_graph), types))
    return [None if t is None else next(got) for t in cx.outs]


def while_loop(
    cx: RegionContext,
    cond_graph: GraphModule,
    body_graph: GraphModule,
    carried: Sequence[Value | int],
    additional: Sequence[Any],
) -> Sequence[Value]:
    """``carried`` goes through ``body_graph`` while ``cond_graph`` of it holds. A number is carried as an int64."""
    init = [_number(cx.b, v) for v in carried]
    types = [v.type for v in init]

    def given(state: Sequence[Value]) -> list[Any]:
        numbers = zip(state, carried, strict=True)
        return [*(v if isinstance(start, Value) else _wrapped(v) for v, start in numbers), *additional]

    def holds(state: Sequence[Value]) -> Value:
        (flag,) = cx.emit(cond_graph, given(state))
        return flag if isinstance(flag, Value) else cx.b.constant(flag, torch.bool)

    def body(state: Sequence[Value]) -> Sequence[Value]:
        got = cx.emit(body_graph, given(state))
        return cx.checked([_number(cx.b, v) for v in got], types)

    return cx.b.while_(init, holds, body)


def scan(
    cx: RegionContext, graph: GraphModule, init: Sequence[Value], xs: Sequence[Value], additional: Sequence[Any]
) -> Sequence[Value | None]:
    """``graph`` maps carry and one row of each of ``xs`` to the next carry and one row of each result."""
    b, n = cx.b, len(init)
    steps = b.constant(xs[0].shape[0], torch.int32)
    rows = [t for t in cx.outs[n:] if t is not None]
    wanted = [*cx.outs[:n], *(t and TensorType(t.shape[1:], t.dtype) for t in cx.outs[n:])]

    def body(state: Sequence[Value]) -> Sequence[Value]:
        i, carry, stacked = state[0], state[1 : n + 1], state[n + 1 :]
        zero, one = b.constant(0, i.dtype), b.constant(1, i.dtype)

        def start(x: Value) -> list[Value]:
            return [i, *[zero] * (x.rank - 1)]

        row = [b.reshape(b.dynamic_slice(x, start(x), (1, *x.shape[1:])), x.shape[1:]) for x in xs]
        got = cx.checked(cx.emit(graph, [*carry, *row, *additional]), wanted)
        new = [
            b.dynamic_update_slice(y, b.reshape(v, (1, *v.shape)), start(y))
            for y, v in zip(stacked, got[n:], strict=True)
        ]
        return [b.add(i, one), *got[:n], *new]

    state = [b.constant(0, torch.int32), *init, *(b.constant(0, t.dtype, t.shape) for t in rows)]
    results = iter(b.while_(state, lambda s: b.compare("LT", s[0], steps), body)[1:])
    return [None if t is None else next(results) for t in cx.outs]


def map_(
    cx: RegionContext, graph: GraphModule, xs: Sequence[Value], additional: Sequence[Any]
) -> Sequence[Value | None]:
    """``graph`` of one row of each of ``xs`` after the other."""
    return scan(cx, graph, (), xs, additional)


RULES: Mapping[HigherOrderOperator, Rule] = {
    torch.ops.higher_order.cond: cond,
    torch.ops.higher_order.while_loop: while_loop,
    torch.ops.higher_order.scan: scan,
    map_impl: map_,
}
"""Ops whose graphs a program can contain."""
