"""Vector norms of every order and what is made of them, and logsumexp."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from torch_tpu.ir.builder import Value
from torch_tpu.ir.types import TensorType, compute_dtype
from torch_tpu.lowering.promote import Operand, norm_dim, norm_dims, real_number, scalar
from torch_tpu.lowering.reduce import count, finish, reduce_max, reduce_min, reduce_sum, spread, squared_abs
from torch_tpu.lowering.registry import LowerContext, lowers

aten = torch.ops.aten

Dims = Sequence[int] | int | None

_ORDERS = (0, 1, 2, math.inf, -math.inf)  # the orders with code of their own; any other is an operand


def _abs(cx: LowerContext, x: Value) -> Value:
    if not x.dtype.is_complex:
        return cx.b.unary("abs", x)
    part = torch.float64 if x.dtype == torch.complex128 else torch.float32
    return cx.b.op("stablehlo.abs", [x], [TensorType(x.shape, part)])[0]


def vector_norm(cx: LowerContext, x: Value, ord: Operand, dims: Sequence[int]) -> Value:
    """Norm of order ``ord`` over ``dims``, a real value. ``x`` is in its compute type."""
    b = cx.b
    if isinstance(ord, Value):
        p = scalar(cx, ord, b.real(x).dtype if x.dtype.is_complex else x.dtype)
        size = _abs(cx, x)
        total = reduce_sum(cx, b.binary("power", size, b.broadcast_to(p, size.shape)), dims)
        return b.binary("power", total, b.broadcast_to(b.div(b.constant(1, p.dtype), p), total.shape))
    if ord == 0:
        size = b.convert(b.convert(x, torch.bool), x.dtype)
        return reduce_sum(cx, b.real(size) if x.dtype.is_complex else size, dims)
    if count(x.shape, dims) == 1 or ord == 1:  # of one element: the square of a large one would overflow
        return reduce_sum(cx, _abs(cx, x), dims)
    if ord == 2:
        return b.unary("sqrt", reduce_sum(cx, squared_abs(cx, x), dims))
    return (reduce_max if real_number(ord) > 0 else reduce_min)(cx, _abs(cx, x), dims)


def _norm(cx: LowerContext, self: Value, ord: Operand | None, dim: Dims, dtype: torch.dtype | None) -> Value:
    x = self if dtype is None else cx.b.convert(self, dtype)
    x = cx.b.convert(x, compute_dtype(x.dtype))
    return finish(cx, vector_norm(cx, x, 2 if ord is None else ord, norm_dims(dim, x.rank)))


@lowers(aten.linalg_vector_norm.default, scalars={"ord": _ORDERS})
def linalg_vector_norm(
    cx: LowerContext,
    self: Value,
    ord: Operand = 2,
    dim: Dims = None,
    keepdim: bool = False,
    dtype: torch.dtype | None = None,
) -> Value:
    return _norm(cx, self, ord, dim, dtype)


@lowers(aten.norm.Scalar, scalars={"p": _ORDERS})
def norm(cx: LowerContext, self: Value, p: Operand = 2) -> Value:
    return _norm(cx, self, p, None, None)


@lowers(aten.norm.ScalarOpt_dtype, scalars={"p": _ORDERS})
def norm_dtype(cx: LowerContext, self: Value, p: Operand | None, dtype: torch.dtype) -> Value:
    return _norm(cx, self, p, None, dtype)


@lowers(aten.norm.ScalarOpt_dim, scalars={"p": _ORDERS})
def norm_over(cx: LowerContext, self: Value, p: Operand | None, dim: Dims, keepdim: bool = False) -> Value:
    return _norm(cx, self, p, dim, None)


@lowers(aten.norm.ScalarOpt_dim_dtype, scalars={"p": _ORDERS})
def norm_over_dtype(
    cx: LowerContext, self: Value, p: Operand | None, dim: Dims, keepdim: bool, dtype: torch.dtype
) -> Value:
    return _norm(cx, self, p, dim, dtype)


@lowers(aten.renorm.default, scalars={"p": _ORDERS})
def renorm(cx: LowerContext, self: Value, p: Operand, dim: int, maxnorm: Operand) -> Value:
    b = cx.b
    x = b.convert(self, cx.compute_dtype)
    dim = norm_dim(dim, x.rank)
    others = [d for d in range(x.rank) if d != dim]
    size = vector_norm(cx, x, p, others)
    limit = b.broadcast_to(scalar(cx, maxnorm, size.dtype), size.shape)
    shrunk = b.div(limit, b.add(size, b.constant(1e-7, size.dtype, size.shape)))
    factor = b.select(b.compare("GT", size, limit), shrunk, b.constant(1, size.dtype, size.shape))
    return finish(cx, b.mul(x, spread(cx, b.convert(factor, x.dtype), x, others)))


@lowers(aten.logsumexp.default)
def logsumexp(cx: LowerContext, self: Value, dim: Sequence[int], keepdim: bool = False) -> Value:
    b, dims = cx.b, norm_dims(dim, self.rank)
    x = b.convert(self, cx.compute_dtype)
    top = reduce_max(cx, b.real(x) if x.dtype.is_complex else x, dims)
    top = b.select(b.is_finite(top), top, b.constant(0, top.dtype, top.shape))
    top = b.convert(top, x.dtype)
    total = reduce_sum(cx, b.unary("exponential", b.sub(x, spread(cx, top, x, dims))), dims)
    return finish(cx, b.add(b.unary("log", total), top))
