"""Ops that make a tensor from numbers: arange, linspace, full, eye, index triangles.

A number that decides a size is KEYED; a number that only fills is an operand. ``options`` are dtype, layout, device and
the like: the result type has them already.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from torch_tpu.ir.builder import Number, Value
from torch_tpu.lowering.expr import Expr, where
from torch_tpu.lowering.indexing import expand_counts, gather_1d, prefix_sum
from torch_tpu.lowering.promote import Operand, operand, scalar
from torch_tpu.lowering.registry import KEYED, LowerContext, lowers
from torch_tpu.lowering.view_like import off_diagonal

aten = torch.ops.aten


# ---- ramps


def _ramp(cx: LowerContext, start: Number, step: Number) -> Value:
    """``start + i * step`` for each place i; floats in float64, rounded once."""
    dtype = cx.out.dtype
    exact = torch.float64 if dtype.is_floating_point else dtype
    start, step = (n if dtype.is_floating_point else int(n) for n in (start, step))  # type: ignore[arg-type]
    if start == 0 and step == 1 and cx.out.numel <= _counts_to(dtype):
        return cx.b.iota(cx.out.shape, 0, dtype)
    x = cx.b.iota(cx.out.shape, 0, exact)
    if step != 1:
        x = cx.b.mul(x, cx.b.constant(step, exact, x.shape))
    if start != 0:
        x = cx.b.add(x, cx.b.constant(start, exact, x.shape))
    return cx.result(x)


def _counts_to(dtype: torch.dtype) -> int:
    """How far ``dtype`` counts without rounding or wrapping."""
    return round(2 / torch.finfo(dtype).eps) if dtype.is_floating_point else torch.iinfo(dtype).max


@lowers(aten.arange.default, scalars={"end": KEYED})
def arange(cx: LowerContext, end: Number, **options: object) -> Value:
    return _ramp(cx, 0, 1)


@lowers(aten.arange.start, scalars={"start": KEYED, "end": KEYED})
@lowers(aten.range.default, scalars={"start": KEYED, "end": KEYED})
def arange_start(cx: LowerContext, start: Number, end: Number, **options: object) -> Value:
    return _ramp(cx, start, 1)


@lowers(aten.arange.start_step, scalars={"start": KEYED, "end": KEYED, "step": KEYED})
@lowers(aten.range.step, scalars={"start": KEYED, "end": KEYED, "step": KEYED})
def arange_start_step(cx: LowerContext, start: Number, end: Number, step: Number = 1, **options: object) -> Value:
    return _ramp(cx, start, step)


def _line(cx: LowerContext, first: Operand, last: Operand, steps: int) -> Value:
    """``steps`` points from ``first`` to ``last``, in float64 for integer results, both ends exact."""
    b, out = cx.b, cx.out.dtype
    whole = not (out.is_floating_point or out.is_complex)
    dtype = torch.float64 if whole else cx.compute_dtype
    start, end = (Expr(b, scalar(cx, scalar(cx, n, out) if whole else n, dtype)) for n in (first, last))
    if steps < 2:
        return b.broadcast_to(start.v, (steps,))
    place = Expr(b, b.iota((steps,), 0, torch.int32))
    i, step = place.to(dtype), (end - start) / (steps - 1)
    return where(place < steps // 2, i * step + start, end - (steps - 1 - i) * step).v


@lowers(
    aten.linspace.default,
    aten.linspace.Tensor_Tensor,
    aten.linspace.Tensor_Scalar,
    aten.linspace.Scalar_Tensor,
)
def linspace(cx: LowerContext, start: Operand, end: Operand, steps: int, **options: object) -> Value:
    return cx.result(_line(cx, start, end, steps))


@lowers(
    aten.logspace.default,
    aten.logspace.Tensor_Tensor,
    aten.logspace.Tensor_Scalar,
    aten.logspace.Scalar_Tensor,
)
def logspace(
    cx: LowerContext, start: Operand, end: Operand, steps: int, base: Operand = 10.0, **options: object
) -> Value:
    line = _line(cx, start, end, steps)
    power = cx.b.binary("power", operand(cx, base, line.dtype, line.shape), line)
    if cx.out.dtype.is_floating_point or cx.out.dtype.is_complex:
        return cx.result(power)
    # 10 ** 2 must not become 99: a power within rounding of an integer is that integer.
    got = Expr(cx.b, power)
    whole = got.round()
    return cx.result(where((got - whole).abs() < got.abs() * 1e-12, whole, got).v)


# ---- fills


def _filled(value: int) -> Callable[..., Value]:
    return lambda cx, *arguments, **options: cx.b.constant(value, cx.out.dtype, cx.out.shape)


# A zero tensor without storage is plain zeros: a program that reads them folds the constant.
lowers(
    aten.zeros.default,
    aten.zeros_like.default,
    aten.new_zeros.default,
    aten._efficientzerotensor.default,
    aten._new_zeros_with_same_feature_meta.default,
)(_filled(0))
lowers(aten.ones.default, aten.ones_like.default, aten.new_ones.default)(_filled(1))


@lowers(aten.full.default)
def full(cx: LowerContext, size: list[int], fill_value: Operand, **options: object) -> Value:
    return operand(cx, fill_value, cx.out.dtype)


@lowers(aten.full_like.default)
def full_like(cx: LowerContext, self: Value, fill_value: Operand, **options: object) -> Value:
    return operand(cx, fill_value, cx.out.dtype)


@lowers(aten.new_full.default)
def new_full(cx: LowerContext, self: Value, size: list[int], fill_value: Operand, **options: object) -> Value:
    return operand(cx, fill_value, cx.out.dtype)


@lowers(aten.scalar_tensor.default)
def scalar_tensor(cx: LowerContext, s: Operand, **options: object) -> Value:
    return operand(cx, s, cx.out.dtype)


# ---- diagonals and triangles


@lowers(aten.eye.default, aten.eye.m)
def eye(cx: LowerContext, *sizes: int, **options: object) -> Value:
    return cx.result(off_diagonal(cx, cx.out.shape, "EQ", 0))


def _triangle(cx: LowerContext, row: int, col: int, offset: int, lower: bool) -> Value:
    """Row and column of each element of a triangle, in row-major order."""
    b, total = cx.b, cx.out.shape[1]
    if total == 0:
        return b.constant(0, cx.out.dtype, cx.out.shape)
    diagonal = Expr(b, b.iota((row,), 0, torch.int32)) + offset
    begin = diagonal.const(0) if lower else diagonal.max(0).min(col)
    length = (diagonal + 1).max(0).min(col) if lower else col - begin
    start = Expr(b, prefix_sum(cx, length.v)) - length
    rows = expand_counts(cx, length.v, total)
    columns = Expr(b, b.iota((total,), 0, torch.int32)) + Expr(b, gather_1d(cx, (begin - start).v, rows))
    return cx.result(b.concatenate([b.reshape(v, (1, total)) for v in (rows, columns.v)], 0))


@lowers(aten.tril_indices.default)
def tril_indices(cx: LowerContext, row: int, col: int, offset: int = 0, **options: object) -> Value:
    return _triangle(cx, row, col, offset, lower=True)


@lowers(aten.triu_indices.default)
def triu_indices(cx: LowerContext, row: int, col: int, offset: int = 0, **options: object) -> Value:
    return _triangle(cx, row, col, offset, lower=False)
