"""Resizing of the last one to three dims: nearest, linear, cubic, and the antialiased filters; with gradients.

Resizing is linear and separable: along one dim it is a matrix of shape (input size, output size) with few entries a
column. The entries come from iotas, in the arithmetic of ATen. Small inputs are products with that matrix, which a
matrix unit does best; above `_MATRIX` positions the forward gathers its few entries and the gradient scatters them.
Nearest by a whole factor is a broadcast or a strided slice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from torch_tpu.ir.builder import Value
from torch_tpu.ir.types import compute_dtype
from torch_tpu.lowering.registry import KEYED, LowerContext, lowers

aten = torch.ops.aten

_MATRIX = 128  # largest input size that is resized by a matrix product
_SCALES = ({"scales": KEYED}, {"scales_h": KEYED, "scales_w": KEYED})
_SCALES_3D = {"scales_d": KEYED, **_SCALES[1]}

Scales = Sequence[float | None]
Tap = tuple[Value, Value]  # int32 positions and weights, one each an output position
Weigh = Callable[[LowerContext, Value], Value]  # weights of distances


@dataclass(frozen=True, slots=True)
class Axis:
    """How one dim is resized; ``dtype`` is the arithmetic of positions and weights."""

    size: int
    out: int
    align_corners: bool
    given: float | None
    dtype: torch.dtype

    @property
    def scale(self) -> float:
        """Input positions an output step, rounded as ATen rounds it."""
        if self.align_corners:
            return self._round((self.size - 1) / (self.out - 1)) if self.out > 1 else 0.0
        if self.given is not None and self.given > 0:
            return self._round(1.0 / self.given)
        return self._round(self.size / self.out)

    def _round(self, value: float) -> float:
        return float(torch.tensor(value, dtype=torch.float64).to(self.dtype))


def _axes(
    sizes: Sequence[int], outs: Sequence[int], scales: Scales, align_corners: bool, dtype: torch.dtype
) -> list[Axis]:
    n = len(scales)
    return [Axis(i, o, align_corners, s, dtype) for i, o, s in zip(sizes[-n:], outs[-n:], scales, strict=True)]


# ---- entries of the matrix


def _source(cx: LowerContext, ax: Axis) -> tuple[Value, Value]:
    """Where each output position lies in the input, and the int32 position before it.

    XLA may compute a value anew in every kernel that reads it, with or without fused multiply-add. The floor of a
    product minus one half could then differ between positions and weights; this form cannot, for it only compares.
    """
    b, n = cx.b, (ax.out,)
    at = b.iota(n, 0, ax.dtype)
    scale = b.constant(ax.scale, ax.dtype, n)
    if ax.align_corners:
        source = b.mul(scale, at)
        return source, b.convert(b.unary("floor", source), torch.int32)
    half = b.constant(0.5, ax.dtype, n)
    shifted = b.mul(scale, b.add(at, half))
    whole = b.unary("floor", shifted)
    before = b.compare("LT", shifted, b.add(whole, half))
    return b.sub(shifted, half), b.sub(b.convert(whole, torch.int32), b.convert(before, torch.int32))


def clamped(cx: LowerContext, x: Value, low: float, high: float) -> Value:
    """``x`` limited to [low, high]; NaN stays."""
    b = cx.b
    return b.minimum(b.maximum(x, b.constant(low, x.dtype, x.shape)), b.constant(high, x.dtype, x.shape))


def _neighbours(cx: LowerContext, ax: Axis, low: float, high: float, offsets: Sequence[int], weigh: Weigh) -> list[Tap]:
    """Positions at ``offsets`` from the one before the source, and the weights of their distances.

    The source is limited to [low, high], the positions to the input.
    """
    b, n = cx.b, (ax.out,)
    source, base = _source(cx, ax)
    source = clamped(cx, source, low, high)
    base = b.minimum(base, b.constant(ax.size - 1, torch.int32, n))
    if low == 0:
        base = b.maximum(base, b.constant(0, torch.int32, n))
    taps = []
    for offset in offsets:
        at = b.add(base, b.constant(offset, torch.int32, n))
        distance = b.sub(source, b.convert(at, ax.dtype))
        taps.append((clamped(cx, at, 0, ax.size - 1), weigh(cx, distance)))
    return taps


def triangle(cx: LowerContext, distance: Value) -> Value:
    """Weight of a neighbour in linear interpolation."""
    b = cx.b
    one, zero = (b.constant(v, distance.dtype, distance.shape) for v in (1, 0))
    return b.maximum(b.sub(one, b.unary("abs", distance)), zero)


def _linear_taps(cx: LowerContext, ax: Axis) -> list[Tap]:
    b, n = cx.b, (ax.out,)
    if ax.size == ax.out:  # ATen copies, whatever scale was given
        return [(b.iota(n, 0, torch.int32), b.constant(1, ax.dtype, n))]
    return _neighbours(cx, ax, 0, ax.size - 1, (0, 1), triangle)


def polynomial(cx: LowerContext, x: Value, coefficients: Sequence[float]) -> Value:
    """Horner's scheme, highest coefficient first."""
    b = cx.b
    total = b.constant(coefficients[0], x.dtype, x.shape)
    for c in coefficients[1:]:
        total = b.mul(total, x)
        if c:
            total = b.add(total, b.constant(c, x.dtype, x.shape))
    return total


def keys_cubic(a: float) -> Weigh:
    """Keys' cubic convolution kernel as a function of the distance; zero from distance 2 on."""

    def weigh(cx: LowerContext, distance: Value) -> Value:
        b = cx.b
        x = b.unary("abs", distance)
        near = polynomial(cx, x, (a + 2, -(a + 3), 0, 1))
        far = polynomial(cx, x, (a, -5 * a, 8 * a, -4 * a))
        far = b.select(b.compare("LT", x, b.constant(2, x.dtype, x.shape)), far, b.constant(0, x.dtype, x.shape))
        return b.select(b.compare("LT", x, b.constant(1, x.dtype, x.shape)), near, far)

    return weigh


def _cubic_taps(cx: LowerContext, ax: Axis) -> list[Tap]:
    return _neighbours(cx, ax, -1, ax.size, (-1, 0, 1, 2), keys_cubic(-0.75))


def _matrix(cx: LowerContext, ax: Axis, taps: Sequence[Tap]) -> Value:
    """(size, out); taps that were clamped to one position add up."""
    b, shape = cx.b, (ax.size, ax.out)
    row = b.iota(shape, 0, torch.int32)
    zero = b.constant(0, ax.dtype, shape)
    total: Value | None = None
    for position, weight in taps:
        here = b.compare("EQ", row, b.broadcast_in_dim(position, shape, [1]))
        term = b.select(here, b.broadcast_in_dim(weight, shape, [1]), zero)
        total = term if total is None else b.add(total, term)
    assert total is not None
    return total


# ---- application


def _contract(cx: LowerContext, x: Value, matrices: Sequence[Value], dim: int) -> Value:
    """Contract the last dims of ``x`` in order with dim ``dim`` of one matrix each."""
    first = x.rank - len(matrices)
    for m in matrices:
        x = cx.b.dot_general(x, m, contract=([first], [dim]))
    return x


def take_slices(cx: LowerContext, x: Value, dim: int, positions: Value) -> Value:
    b = cx.b
    sizes = list(x.shape)
    sizes[dim] = 1
    return b.gather(
        x,
        b.reshape(positions, (*positions.shape, 1)),
        offset_dims=[d for d in range(x.rank) if d != dim],
        collapsed=[dim],
        start_index_map=[dim],
        index_vector_dim=1,
        slice_sizes=sizes,
    )


def put_slices(cx: LowerContext, x: Value, dim: int, positions: Value, into: Value) -> Value:
    """Add the slices of ``x`` along ``dim`` at ``positions`` of ``into``."""
    b = cx.b
    out = b.scatter(
        [into],
        b.reshape(positions, (*positions.shape, 1)),
        [x],
        lambda old, new: [b.add(old[0], new[0])],
        update_window_dims=[d for d in range(x.rank) if d != dim],
        inserted=[dim],
        scatter_dims=[dim],
        index_vector_dim=1,
    )
    return out[0]


Taps = Callable[[LowerContext, Axis], "list[Tap]"]


def _weighted(cx: LowerContext, x: Value, dim: int, weight: Value) -> Value:
    return cx.b.mul(x, cx.b.broadcast_in_dim(weight, x.shape, [dim]))


def _interpolate(cx: LowerContext, x: Value, resized: Sequence[Axis], taps: Taps) -> Value:
    b = cx.b
    if max(ax.size for ax in resized) <= _MATRIX:
        return _contract(cx, x, [_matrix(cx, ax, taps(cx, ax)) for ax in resized], 0)
    for dim, ax in enumerate(resized, x.rank - len(resized)):
        if ax.size == ax.out and taps is _linear_taps:
            continue
        terms = [_weighted(cx, take_slices(cx, x, dim, at), dim, weight) for at, weight in taps(cx, ax)]
        x = terms[0]
        for term in terms[1:]:
            x = b.add(x, term)
    return x


def _interpolate_gradient(cx: LowerContext, grad: Value, resized: Sequence[Axis], taps: Taps) -> Value:
    b = cx.b
    if max(ax.size for ax in resized) <= _MATRIX:
        return _contract(cx, grad, [_matrix(cx, ax, taps(cx, ax)) for ax in resized], 1)
    for dim, ax in enumerate(resized, grad.rank - len(resized)):
        if ax.size == ax.out and taps is _linear_taps:
            continue
        shape = [ax.size if d == dim else s for d, s in enumerate(grad.shape)]
        total = b.constant(0, grad.dtype, shape)
        for at, weight in taps(cx, ax):
            total = put_slices(cx, _weighted(cx, grad, dim, weight), dim, at, total)
        grad = total
    return grad


def _arithmetic(dtype: torch.dtype) -> torch.dtype:
    return compute_dtype(dtype) if dtype.is_floating_point else torch.float64


def _saturated(cx: LowerContext, x: Value, dtype: torch.dtype) -> Value:
    """``x`` rounded to the nearest value of an integer dtype, still as a float."""
    info = torch.iinfo(dtype)
    return clamped(cx, cx.b.unary("round_nearest_afz", x), info.min, info.max)


_STEPS = 22  # most fraction bits of a weight


def _fixed_point(cx: LowerContext, m: Value) -> Value:
    """Weights rounded to as many fraction bits as let the largest fit in 16 bits, as float32."""
    b, rank = cx.b, (_STEPS,)
    units = b.constant_list([2.0 ** (k + 1) for k in range(_STEPS)], m.dtype)
    top = b.reduce_op("maximum", m, 0, [0, 1])
    scaled = b.add(b.mul(b.broadcast_to(top, rank), units), b.constant(0.5, m.dtype, rank))
    fits = b.compare("LT", scaled, b.constant(2.0**15, m.dtype, rank))
    unit = b.reduce_op("maximum", b.select(fits, units, b.constant(1, m.dtype, rank)), 1, [0])
    unit = b.broadcast_to(unit, m.shape)
    return b.convert(b.div(b.unary("round_nearest_afz", b.mul(m, unit)), unit), torch.float32)


def _resize_image(cx: LowerContext, x: Value, matrices: Sequence[Value]) -> Value:
    """Resize integers as ATen does: weights of 16 bits, the last dim first, rounding after every pass."""
    b, dtype, n = cx.b, x.dtype, len(matrices)
    x = b.convert(x, torch.float32)
    for dim, m in zip(range(x.rank - 1, x.rank - n - 1, -1), reversed(matrices), strict=True):
        resized = b.dot_general(x, _fixed_point(cx, m), contract=([dim], [0]))
        perm = [d if d < dim else x.rank - 1 if d == dim else d - 1 for d in range(x.rank)]
        x = _saturated(cx, b.transpose(resized, perm), dtype)
    return cx.result(x)


def _forward(cx: LowerContext, self: Value, align_corners: bool, scales: Scales, taps: Taps) -> Value:
    if 0 in cx.out.shape:
        return cx.b.constant(0, cx.out.dtype, cx.out.shape)
    dtype = _arithmetic(self.dtype)
    resized = _axes(self.shape, cx.out.shape, scales, align_corners, dtype)
    if not self.dtype.is_floating_point:
        return _resize_image(cx, self, [_matrix(cx, ax, taps(cx, ax)) for ax in resized])
    return cx.result(_interpolate(cx, cx.b.convert(self, dtype), resized, taps))


def _backward(cx: LowerContext, grad: Value, align_corners: bool, scales: Scales, taps: Taps) -> Value:
    if 0 in cx.out.shape or not grad.type.numel:
        return cx.b.constant(0, cx.out.dtype, cx.out.shape)
    dtype = _arithmetic(grad.dtype)
    resized = _axes(cx.out.shape, grad.shape, scales, align_corners, dtype)
    return cx.result(_interpolate_gradient(cx, cx.b.convert(grad, dtype), resized, taps))


@lowers(aten.upsample_linear1d.default, scalars=_SCALES[0])
def upsample_linear1d(
    cx: LowerContext, self: Value, output_size: Sequence[int], align_corners: bool, scales: float | None = None
) -> Value:
    return _forward(cx, self, align_corners, [scales], _linear_taps)


@lowers(aten.upsample_linear1d_backward.default, scalars=_SCALES[0])
def upsample_linear1d_backward(
    cx: LowerContext,
    grad_output: Value,
    output_size: Sequence[int],
    input_size: Sequence[int],
    align_corners: bool,
    scales: float | None = None,
) -> Value:
    return _backward(cx, grad_output, align_corners, [scales], _linear_taps)


_TAPS_2D = {"bilinear2d": _linear_taps, "bicubic2d": _cubic_taps}


def _taps_of(cx: LowerContext) -> Taps:
    return next(taps for name, taps in _TAPS_2D.items() if name in str(cx.op))


@lowers(aten.upsample_bilinear2d.default, aten.upsample_bicubic2d.default, scalars=_SCALES[1])
def upsample_2d(
    cx: LowerContext,
    self: Value,
    output_size: Sequence[int],
    align_corners: bool,
    scales_h: float | None = None,
    scales_w: float | None = None,
) -> Value:
    return _forward(cx, self, align_corners, [scales_h, scales_w], _taps_of(cx))


@lowers(aten.upsample_bilinear2d_backward.default, aten.upsample_bicubic2d_backward.default, scalars=_SCALES[1])
def upsample_2d_backward(
    cx: LowerContext,
    grad_output: Value,
    output_size: Sequence[int],
    input_size: Sequence[int],
    align_corners: bool,
    scales_h: float | None = None,
    scales_w: float | None = None,
) -> Value:
    return _backward(cx, grad_output, align_corners, [scales_h, scales_w], _taps_of(cx))


@lowers(aten.upsample_trilinear3d.default, scalars=_SCALES_3D)
def upsample_trilinear3d(
    cx: LowerContext,
    self: Value,
    output_size: Sequence[int],
    align_corners: bool,
    scales_d: float | None = None,
    scales_h: float | None = None,
    scales_w: float | None = None,
) -> Value:
    return _forward(cx, self, align_corners, [scales_d, scales_h, scales_w], _linear_taps)


@lowers(aten.upsample_trilinear3d_backward.default, scalars=_SCALES_3D)
def upsample_trilinear3d_backward(
    cx: LowerContext,
    grad_output: Value,
    output_size: Sequence[int],
    input_size: Sequence[int],
    align_corners: bool,
    scales_d: float | None = None,
    scales_h: float | None = None,
    scales_w: float | None = None,
) -> Value:
    return _backward(cx, grad_output, align_corners, [scales_d, scales_h, scales_w], _linear_taps)


# ---- antialiased


def _lanczos_filter(cx: LowerContext, x: Value) -> Value:
    b = cx.b
    zero, one = b.constant(0, x.dtype, x.shape), b.constant(1, x.dtype, x.shape)

    def sinc(v: Value) -> Value:
        angle = b.mul(v, b.constant(math.pi, v.dtype, v.shape))
        at_zero = b.compare("EQ", v, zero)
        return b.select(at_zero, one, b.div(b.unary("sine", angle), b.select(at_zero, one, angle)))

    inside = b.compare("LT", b.unary("abs", x), b.constant(3, x.dtype, x.shape))
    return b.select(inside, b.mul(sinc(x), sinc(b.div(x, b.constant(3, x.dtype, x.shape)))), zero)


_FILTERS = {"bilinear2d": (1.0, triangle), "bicubic2d": (2.0, keys_cubic(-0.5)), "lanczos2d": (3.0, _lanczos_filter)}


def _antialias_matrix(cx: LowerContext, ax: Axis) -> Value:
    """(size, out): the filter, stretched when shrinking, over the window ATen reads; columns sum to one."""
    b, dtype, shape = cx.b, ax.dtype, (ax.size, ax.out)
    radius, weigh = next(f for name, f in _FILTERS.items() if name in str(cx.op))
    stretch = max(ax.scale, 1.0)
    support = radius * stretch
    shift = 0.5  # with aligned corners too: only the scale differs
    center = b.add(b.iota(shape, 1, dtype), b.constant(shift, dtype, shape))
    center = b.mul(b.constant(ax.scale, dtype, shape), center)

    def edge(offset: float) -> Value:
        return b.convert(b.add(center, b.constant(offset, dtype, shape)), torch.int32)

    low = b.maximum(edge(shift - support), b.constant(0, torch.int32, shape))
    row = b.iota(shape, 0, torch.int32)
    inside = b.and_(b.compare("GE", row, low), b.compare("LT", row, edge(shift + support)))
    distance = b.sub(b.add(b.iota(shape, 0, dtype), b.constant(shift, dtype, shape)), center)
    weight = weigh(cx, b.mul(distance, b.constant(1.0 / stretch, dtype, shape)))
    weight = b.select(inside, weight, b.constant(0, dtype, shape))
    total = b.broadcast_in_dim(b.reduce_op("add", weight, 0, [0]), shape, [1])
    nothing = b.compare("EQ", total, b.constant(0, dtype, shape))
    return b.div(weight, b.select(nothing, b.constant(1, dtype, shape), total))


@lowers(
    aten._upsample_bilinear2d_aa.default,
    aten._upsample_bicubic2d_aa.default,
    aten._upsample_lanczos2d_aa.default,
    scalars=_SCALES[1],
)
def upsample_2d_aa(
    cx: LowerContext,
    self: Value,
    output_size: Sequence[int],
    align_corners: bool,
    scales_h: float | None = None,
    scales_w: float | None = None,
) -> Value:
    if 0 in cx.out.shape:
        return cx.b.constant(0, cx.out.dtype, cx.out.shape)
    dtype = _arithmetic(self.dtype)
    # ATen passes over a dim whose size stays (its gradient does not).
    sizes = zip(self.shape[-2:], cx.out.shape[-2:], [scales_h, scales_w], strict=True)
    scales = [None if size == out else given for size, out, given in sizes]
    resized = _axes(self.shape, cx.out.shape, scales, align_corners, dtype)
    matrices = [_antialias_matrix(cx, ax) for ax in resized]
    if not self.dtype.is_floating_point:
        return _resize_image(cx, self, matrices)
    return cx.result(_contract(cx, cx.b.convert(self, dtype), matrices, 0))


@lowers(
    aten._upsample_bilinear2d_aa_backward.default,
    aten._upsample_bicubic2d_aa_backward.default,
    aten._upsample_lanczos2d_aa_backward.default,
    scalars=_SCALES[1],
)
def upsample_2d_aa_backward(
    cx: LowerContext,
    grad_output: Value,
    output_size: Sequence[int],
    input_size: Sequence[int],
    align_corners: bool,
    scales_h: float | None = None,
    scales_w: float | None = None,
) -> Value:
    if 0 in cx.out.shape or not grad_output.type.numel:
        return cx.b.constant(0, cx.out.dtype, cx.out.shape)
    dtype = _arithmetic(grad_output.dtype)
    resized = _axes(cx.out.shape, grad_output.shape, [scales_h, scales_w], align_corners, dtype)
    matrices = [_antialias_matrix(cx, ax) for ax in resized]
    return cx.result(_contract(cx, cx.b.convert(grad_output, dtype), matrices, 1))
