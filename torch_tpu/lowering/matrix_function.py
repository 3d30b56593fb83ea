"""Functions of matrices and of 3-vectors that are plain products: the matrix exponential, the cross product."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from torch_tpu.ir.builder import Value
from torch_tpu.ir.types import compute_dtype
from torch_tpu.lowering.linalg import dot, eye, flat, magnitude, real_dtype, unflat
from torch_tpu.lowering.promote import operand
from torch_tpu.lowering.registry import LowerContext, lowers

aten = torch.ops.aten

_DEGREE = 18  # of the Taylor polynomial
# Norms up to which that polynomial is exact to the precision (Bader, Blanes and Casas 2019, table 3).
_THETA = {torch.float32: 3.0, torch.float64: 1.09}


def _halvings(cx: LowerContext, a: Value) -> Value:
    """(B,) int32: how often each matrix must be halved."""
    b = cx.b
    norm = b.reduce_op("maximum", b.reduce_op("add", magnitude(cx, a), 0, [1]), 0, [1])
    ratio = b.div(norm, b.constant(_THETA[norm.dtype], norm.dtype, norm.shape))
    steps = b.unary("ceil", b.div(b.unary("log", ratio), b.constant(math.log(2), norm.dtype, norm.shape)))
    # Ten bits more than any finite norm needs; an infinite or NaN one gives NaN anyway.
    steps = b.minimum(b.maximum(steps, b.constant(0, norm.dtype, norm.shape)), b.constant(1100, norm.dtype, norm.shape))
    steps = b.select(b.is_nan(steps), b.constant(0, norm.dtype, norm.shape), steps)
    return b.convert(steps, torch.int32)


def _taylor(cx: LowerContext, a: Value) -> Value:
    """Sum of a^k / k! to the chosen degree with five products: blocks of three powers, Horner in a^6."""
    b = cx.b
    one = eye(cx, a.shape, a.dtype)
    square = dot(cx, a, a)
    cube = dot(cx, square, a)
    powers = [one, a, square, cube, dot(cx, square, square), dot(cx, cube, square)]
    sixth = dot(cx, cube, cube)

    def block(first: int, count: int) -> Value:
        total: Value | None = None
        for k in range(count):
            factor = 1 / math.factorial(first + k)
            term = b.mul(powers[k], b.constant(factor, a.dtype, a.shape))
            total = term if total is None else b.add(total, term)
        assert total is not None
        return total

    top = _DEGREE // 6 * 6
    total = block(top, _DEGREE - top + 1)
    for first in range(top - 6, -1, -6):
        total = b.add(dot(cx, total, sixth), block(first, 6))
    return total


@lowers(aten.linalg_matrix_exp.default)
def linalg_matrix_exp(cx: LowerContext, self: Value) -> Value:
    """Scale by a power of two, Taylor polynomial, square back."""
    b = cx.b
    if not self.type.numel:
        return self
    dtype = compute_dtype(self.dtype)
    a = flat(cx, b.convert(self, dtype))
    steps = _halvings(cx, a)
    real = real_dtype(dtype)
    # Two factors: 2^-1100 itself would be zero in float32.
    half_steps = b.div(steps, b.constant(2, torch.int32, steps.shape))
    for part in (half_steps, b.sub(steps, half_steps)):
        two = b.constant(2, real, part.shape)
        factor = b.convert(b.binary("power", two, b.neg(b.convert(part, real))), dtype)
        a = b.mul(a, b.broadcast_in_dim(factor, a.shape, [0]))
    most = b.reduce_op("maximum", steps, 0, [0])

    def unfinished(state: Sequence[Value]) -> Value:
        return b.compare("LT", state[0], most)

    def step(state: Sequence[Value]) -> Sequence[Value]:
        k, x = state
        active = b.compare("LT", b.broadcast_in_dim(k, steps.shape, []), steps)
        squared = b.select(b.broadcast_in_dim(active, x.shape, [0]), dot(cx, x, x), x)
        return [b.add(k, b.constant(1, torch.int32)), squared]

    return unflat(cx, b.while_([b.constant(0, torch.int32), _taylor(cx, a)], unfinished, step)[1])


@lowers(aten.linalg_cross.default)
def linalg_cross(cx: LowerContext, self: Value, other: Value, dim: int = -1) -> Value:
    b = cx.b
    dim %= len(cx.out.shape)

    def turned(x: Value, first: int) -> Value:
        """Elements first, first + 1, first + 2 (mod 3) of each vector."""
        parts = [b.slice_dim(x, dim, first, 3), b.slice_dim(x, dim, 0, first)]
        return b.concatenate(parts, dim)

    x, y = operand(cx, self), operand(cx, other)
    return cx.result(b.sub(b.mul(turned(x, 1), turned(y, 2)), b.mul(turned(x, 2), turned(y, 1))))
