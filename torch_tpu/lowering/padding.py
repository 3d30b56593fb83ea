"""Padding by reflection and replication, one dim at a time, and its gradient.

A negative pad crops after the positive ones have been added, so that both ends see the whole input, as in ATen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from torch_tpu.ir.builder import Value
from torch_tpu.lowering.registry import LowerContext, Rule, register
from torch_tpu.lowering.view_like import pad_dim

aten = torch.ops.aten

Edge = Callable[[LowerContext, Value, int, int, bool], Value]
"""``(cx, x, dim, n, front)``: forward: the ``n`` elements to put before or behind ``x``; backward: its adjoint, which
places the gradient of these elements in a dim of ``n``."""


def _reflect(cx: LowerContext, x: Value, dim: int, n: int, front: bool) -> Value:
    start = 1 if front else x.shape[dim] - 1 - n
    return cx.b.reverse(cx.b.slice_dim(x, dim, start, start + n), [dim])


def _reflect_adjoint(cx: LowerContext, grad: Value, dim: int, n: int, front: bool) -> Value:
    rest = n - 1 - grad.shape[dim]
    return pad_dim(cx, cx.b.reverse(grad, [dim]), dim, 1 if front else rest, rest if front else 1)


def _replicate(cx: LowerContext, x: Value, dim: int, n: int, front: bool) -> Value:
    start = 0 if front else x.shape[dim] - 1
    edge = cx.b.slice_dim(x, dim, start, start + 1)
    return cx.b.broadcast_to(edge, (*x.shape[:dim], n, *x.shape[dim + 1 :]))


def _replicate_adjoint(cx: LowerContext, grad: Value, dim: int, n: int, front: bool) -> Value:
    total = cx.b.reduce_op("add", grad, 0, [dim])
    total = cx.b.reshape(total, (*grad.shape[:dim], 1, *grad.shape[dim + 1 :]))
    return pad_dim(cx, total, dim, 0 if front else n - 1, n - 1 if front else 0)


def _pads(padding: Sequence[int], rank: int) -> list[tuple[int, int, int]]:
    """``(dim, low, high)``; ATen lists the last dim first."""
    return [(rank - 1 - i, padding[2 * i], padding[2 * i + 1]) for i in range(len(padding) // 2)]


def _forward(edge: Edge) -> Rule:
    def rule(cx: LowerContext, self: Value, padding: Sequence[int]) -> Value:
        x = self
        for dim, low, high in _pads(padding, x.rank) if cx.out.numel else ():
            front = [edge(cx, x, dim, low, True)] if low > 0 else []
            back = [edge(cx, x, dim, high, False)] if high > 0 else []
            x = cx.b.concatenate([*front, x, *back], dim)
            x = cx.b.slice_dim(x, dim, max(-low, 0), x.shape[dim] - max(-high, 0))
        return x if cx.out.numel else cx.b.constant(0, cx.out.dtype, cx.out.shape)

    return rule


def _backward(adjoint: Edge) -> Rule:
    def rule(cx: LowerContext, grad_output: Value, self: Value, padding: Sequence[int]) -> Value:
        if grad_output.type.numel == 0:
            return cx.b.constant(0, cx.out.dtype, cx.out.shape)
        grad = cx.b.convert(grad_output, cx.compute_dtype)
        for dim, low, high in _pads(padding, grad.rank):
            n = self.shape[dim]
            grad = pad_dim(cx, grad, dim, max(-low, 0), max(-high, 0))
            front, back = max(low, 0), max(low, 0) + n
            total = cx.b.slice_dim(grad, dim, front, back)
            if low > 0:
                total = cx.b.add(total, adjoint(cx, cx.b.slice_dim(grad, dim, 0, front), dim, n, True))
            if high > 0:
                end = cx.b.slice_dim(grad, dim, back, grad.shape[dim])
                total = cx.b.add(total, adjoint(cx, end, dim, n, False))
            grad = total
        return cx.result(grad)

    return rule


for _rank in (1, 2, 3):
    for _name, _edge, _adjoint in (
        ("reflection", _reflect, _reflect_adjoint),
        ("replication", _replicate, _replicate_adjoint),
    ):
        register(getattr(aten, f"{_name}_pad{_rank}d").default, _forward(_edge))
        register(getattr(aten, f"{_name}_pad{_rank}d_backward").default, _backward(_adjoint))
