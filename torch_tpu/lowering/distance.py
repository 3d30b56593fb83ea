"""Distances between the rows of two matrices, or of one, in any p-norm, with gradients.

Shapes: B batch, P and R rows, M elements of a row. The differences (B, P, R, M) exist only inside the fused reduction.
"""

from __future__ import annotations

import math

import torch

from torch_tpu.ir.builder import Value
from torch_tpu.lowering.linalg import flat, transposed, unflat
from torch_tpu.lowering.registry import KEYED, LowerContext, lowers

aten = torch.ops.aten

_MM_ROWS = 25  # above that many rows ATen takes the Euclidean distance by products
_USE_MM, _NEVER_MM = 1, 2  # compute_mode


def _like(cx: LowerContext, value: float, x: Value) -> Value:
    return cx.b.constant(value, x.dtype, x.shape)


def _power(cx: LowerContext, x: Value, p: float) -> Value:
    b = cx.b
    if p == 1:
        return x
    if p == 2:
        return b.mul(x, x)
    return b.binary("power", x, _like(cx, p, x))


def _norm(cx: LowerContext, size: Value, p: float) -> Value:
    """p-norm over the last dim of absolute values."""
    b, last = cx.b, [size.rank - 1]
    if p == 0:
        some = b.compare("NE", size, _like(cx, 0, size))
        return b.reduce_op("add", b.convert(some, size.dtype), 0, last)
    if math.isinf(p):
        return b.reduce_op("maximum", size, 0, last)
    total = b.reduce_op("add", _power(cx, size, p), 0, last)
    if p == 1:
        return total
    return b.unary("sqrt", total) if p == 2 else _power(cx, total, 1 / p)


def _differences(cx: LowerContext, x1: Value, x2: Value) -> Value:
    """(B, P, R, M)."""
    b = cx.b
    shape = (x1.shape[0], x1.shape[1], x2.shape[1], x1.shape[2])
    return b.sub(b.broadcast_in_dim(x1, shape, [0, 1, 3]), b.broadcast_in_dim(x2, shape, [0, 2, 3]))


def _by_product(cx: LowerContext, x1: Value, x2: Value) -> Value:
    """Euclidean distances from |x|² + |y|² - 2 x y."""
    b = cx.b
    product = b.dot_general(x1, x2, batch=([0], [0]), contract=([2], [2]))
    squares = [b.reduce_op("add", b.mul(x, x), 0, [2]) for x in (x1, x2)]
    total = b.add(
        b.broadcast_in_dim(squares[0], product.shape, [0, 1]), b.broadcast_in_dim(squares[1], product.shape, [0, 2])
    )
    total = b.sub(total, b.mul(product, _like(cx, 2, product)))
    return b.unary("sqrt", b.maximum(total, _like(cx, 0, total)))


def _distances(cx: LowerContext, x1: Value, x2: Value, p: float) -> Value:
    if not x1.shape[2]:
        return cx.b.constant(0, x1.dtype, (x1.shape[0], x1.shape[1], x2.shape[1]))
    return _norm(cx, cx.b.unary("abs", _differences(cx, x1, x2)), p)


def _batched(cx: LowerContext, x: Value, rank: int, like: tuple[int, ...]) -> Value:
    """``x`` with the batch dims of ``like``, whose last two dims are its own, as (B, rows, M)."""
    batch = like[: rank - 2]
    return flat(cx, cx.b.broadcast_to(x, (*batch, *x.shape[-2:])))


@lowers(aten._cdist_forward.default, scalars={"p": KEYED})
def cdist_forward(cx: LowerContext, x1: Value, x2: Value, p: float, compute_mode: int | None) -> Value:
    out = cx.out.shape
    if 0 in out:
        return cx.b.constant(0, cx.out.dtype, out)
    a, c = (_batched(cx, x, len(out), out) for x in (x1, x2))
    many = max(out[-1], out[-2]) > _MM_ROWS
    if p == 2 and a.shape[2] and (compute_mode == _USE_MM or (compute_mode != _NEVER_MM and many)):
        return unflat(cx, _by_product(cx, a, c))
    return unflat(cx, _distances(cx, a, c, p))


def _slopes(cx: LowerContext, diff: Value, dist: Value, p: float) -> Value:
    """Derivative of the distance by the difference; ``dist`` is broadcast to the shape of ``diff``."""
    b = cx.b
    zero, one = _like(cx, 0, diff), _like(cx, 1, diff)
    if p == 0:
        return zero
    sign, size = b.unary("sign", diff), b.unary("abs", diff)
    if p == 1:
        return sign
    none = b.compare("EQ", dist, zero)
    if math.isinf(p):
        return b.select(b.compare("EQ", size, dist), sign, zero)
    safe = b.select(none, one, dist)
    if p == 2:
        return b.select(none, zero, b.div(diff, safe))
    if p < 1:  # the power of a zero difference is infinite
        none = b.or_(none, b.compare("EQ", size, zero))
        size = b.select(none, one, size)
    slope = b.mul(sign, b.div(_power(cx, size, p - 1), _power(cx, safe, p - 1)))
    return b.select(none, zero, slope)


def _row_gradients(cx: LowerContext, grad: Value, x1: Value, x2: Value, p: float, dist: Value) -> Value:
    """(B, P, M): each row of ``x1`` sums over the rows of ``x2``; ``grad`` and ``dist`` are (B, P, R)."""
    b = cx.b
    diff = _differences(cx, x1, x2)
    wide_grad, wide_dist = (b.broadcast_in_dim(v, diff.shape, [0, 1, 2]) for v in (grad, dist))
    return b.reduce_op("add", b.mul(wide_grad, _slopes(cx, diff, wide_dist, p)), 0, [2])


@lowers(aten._cdist_backward.default, scalars={"p": KEYED})
def cdist_backward(cx: LowerContext, grad: Value, x1: Value, x2: Value, p: float, cdist: Value) -> Value:
    b, out = cx.b, cx.out.shape
    if 0 in out or not cdist.type.numel:
        return b.constant(0, cx.out.dtype, out)
    rank = len(out)
    a, c = _batched(cx, x1, rank, out), _batched(cx, x2, rank, out)
    plane = cdist.shape[-2:]
    g, d = (flat(cx, b.broadcast_to(v, (*out[:-2], *plane))) for v in (grad, cdist))
    return unflat(cx, _row_gradients(cx, g, a, c, p, d))


# ---- within one matrix: the pairs i < j, in row order


def _pair_number(cx: LowerContext, n: int) -> Value:
    """(n, n) int32: the place of pair (i, j) among all pairs; beyond the last for i >= j."""
    b, shape = cx.b, (n, n)
    i, j = b.iota(shape, 0, torch.int32), b.iota(shape, 1, torch.int32)
    one, two = (b.constant(v, torch.int32, shape) for v in (1, 2))
    # i n - i (i + 1) / 2 pairs come before row i's, which start at j = i + 1.
    before = b.sub(b.mul(i, b.constant(n, torch.int32, shape)), b.div(b.mul(i, b.add(i, one)), two))
    place = b.add(before, b.sub(b.sub(j, i), one))
    return b.select(b.compare("LT", i, j), place, b.constant(n * n, torch.int32, shape))


@lowers(aten._pdist_forward.default, scalars={"p": KEYED})
def pdist_forward(cx: LowerContext, self: Value, p: float = 2.0) -> Value:
    b = cx.b
    if 0 in cx.out.shape or not self.type.numel:
        return b.constant(0, cx.out.dtype, cx.out.shape)
    n = self.shape[0]
    x = b.reshape(self, (1, *self.shape))
    square = b.reshape(_distances(cx, x, x, p), (n * n,))
    # The numbers beyond the last pair are out of bounds, which scatter skips.
    return b.scatter(
        [b.constant(0, self.dtype, cx.out.shape)],
        b.reshape(_pair_number(cx, n), (n * n, 1)),
        [square],
        lambda old, new: [new[0]],
        update_window_dims=[],
        inserted=[0],
        scatter_dims=[0],
        index_vector_dim=1,
    )[0]


@lowers(aten._pdist_backward.default, scalars={"p": KEYED})
def pdist_backward(cx: LowerContext, grad: Value, self: Value, p: float, pdist: Value) -> Value:
    b = cx.b
    if not self.type.numel or not pdist.type.numel:
        return b.constant(0, cx.out.dtype, cx.out.shape)
    n = self.shape[0]
    number = b.reshape(_pair_number(cx, n), (n * n, 1))
    upper = b.compare("LT", b.iota((1, n, n), 1, torch.int32), b.iota((1, n, n), 2, torch.int32))

    def square(v: Value) -> Value:
        """(1, n, n), symmetric, from the pairs."""
        picked = b.gather(
            v,
            number,
            offset_dims=[],
            collapsed=[0],
            start_index_map=[0],
            index_vector_dim=1,
            slice_sizes=(1,),
        )
        half = b.reshape(picked, (1, n, n))
        half = b.select(upper, half, b.constant(0, half.dtype, half.shape))
        return b.add(half, transposed(cx, half))

    x = b.reshape(self, (1, *self.shape))
    return b.reshape(_row_gradients(cx, square(grad), x, x, p, square(pdist)), self.shape)
