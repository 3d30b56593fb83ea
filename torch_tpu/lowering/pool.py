"""Max and average pooling over the last one to three dims, with their gradients.

A window is a product of intervals, so every pool runs one dim at a time, last dim first: k + k steps instead of k * k.
Short windows are sums or maxima of strided slices, which XLA turns into one vector loop; long ones are one-dimensional
reduce_windows. Gradients need no scatter: each input position looks at the few windows that cover it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from torch_tpu.ir.builder import Number, Value
from torch_tpu.ir.types import compute_dtype
from torch_tpu.lowering.registry import LowerContext, lowers

aten = torch.ops.aten

_SHORT = 8  # window length up to which slices beat reduce_window (measured on the CPU plugin)
_NO_STRIDE: list[int] = []  # the kernel size
_ZEROS_2, _ONES_2 = [0, 0], [1, 1]
_ZEROS_3, _ONES_3 = [0, 0, 0], [1, 1, 1]
_MAX_TERMS = 32  # windows over one position up to which comparing beats a scatter


@dataclass(frozen=True, slots=True)
class Axis:
    """The windows along one dim: window ``o`` covers ``o * stride - pad + t * dilation`` for t < kernel."""

    dim: int
    size: int
    out: int
    kernel: int
    stride: int
    pad: int
    dilation: int = 1

    @property
    def span(self) -> int:
        return (self.kernel - 1) * self.dilation + 1

    @property
    def high(self) -> int:
        """Padding after the last element, so that exactly ``out`` windows fit; negative if a rest is unused."""
        return (self.out - 1) * self.stride + self.span - self.size - self.pad

    @property
    def covering(self) -> int:
        """How many windows can cover one position."""
        return -(-self.span // self.stride)


def _full(values: Sequence[int] | int, n: int) -> list[int]:
    """A parameter list of ATen with one entry a dim; a single entry stands for all."""
    values = [values] if isinstance(values, int) else list(values)
    return values * n if len(values) == 1 else values


def axes(
    sizes: Sequence[int],
    outs: Sequence[int],
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int] = (1,),
    *,
    n: int,
) -> list[Axis]:
    """The last ``n`` dims of a value of shape ``sizes`` pooled to shape ``outs``."""
    kernel = _full(kernel, n)
    rows = zip(
        range(len(sizes) - n, len(sizes)),
        sizes[-n:],
        outs[-n:],
        kernel,
        _full(stride, n) if len(stride) else kernel,
        _full(padding, n),
        _full(dilation, n),
        strict=True,
    )
    return [Axis(*row) for row in rows]


def lowest(dtype: torch.dtype) -> Number:
    """The identity of ``maximum``."""
    return -math.inf if dtype.is_floating_point else torch.iinfo(dtype).min


def _pad_axes(cx: LowerContext, x: Value, pool: Sequence[Axis], fill: Number) -> Value:
    low, high = [0] * x.rank, [0] * x.rank
    for ax in pool:
        low[ax.dim], high[ax.dim] = ax.pad, ax.high
    return cx.b.pad(x, cx.b.constant(fill, x.dtype), low, high) if any(low) or any(high) else x


def _tap(cx: LowerContext, padded: Value, ax: Axis, t: int) -> Value:
    """Element ``t`` of every window, from a value that is padded along ``ax``."""
    start = t * ax.dilation
    return cx.b.slice_dim(padded, ax.dim, start, start + (ax.out - 1) * ax.stride + 1, ax.stride)


def _window(rank: int, dim: int, value: int) -> list[int]:
    sizes = [1] * rank
    sizes[dim] = value
    return sizes


def _pads(rank: int, dim: int, pad: tuple[int, int]) -> list[tuple[int, int]]:
    pads = [(0, 0)] * rank
    pads[dim] = pad
    return pads


# ---- max


def later_wins(cx: LowerContext, old: Sequence[Value], new: Sequence[Value]) -> list[Value]:
    """ATen's choice: a greater value, or any NaN; of equal values the first one stays."""
    b = cx.b
    take = b.compare("GT", new[0], old[0])
    if new[0].dtype.is_floating_point:
        take = b.or_(take, b.is_nan(new[0]))
    return [b.select(take, n, o) for n, o in zip(new, old, strict=True)]


def _positions(cx: LowerContext, ax: Axis, t: int, shape: Sequence[int], scale: int) -> Value:
    """``scale`` times the input position of element ``t`` of each window along ``ax``, as int32 of ``shape``."""
    b, n = cx.b, (ax.out,)
    pos = b.mul(b.iota(n, 0, torch.int32), b.constant(ax.stride, torch.int32, n))
    pos = b.add(pos, b.constant(t * ax.dilation - ax.pad, torch.int32, n))
    if t == 0 and ax.pad:
        # Only a window whose valid elements are all -inf (or the least integer) keeps its first element although that
        # is padding: ATen then names the first valid one.
        dilation = b.constant(ax.dilation, torch.int32, n)
        before = b.maximum(b.neg(pos), b.constant(0, torch.int32, n))
        steps = b.div(b.add(before, b.constant(ax.dilation - 1, torch.int32, n)), dilation)
        pos = b.add(pos, b.mul(steps, dilation))
    return b.broadcast_in_dim(b.mul(pos, b.constant(scale, torch.int32, n)), shape, [ax.dim])


def _max_axis(cx: LowerContext, x: Value, index: Value | None, ax: Axis, scale: int) -> tuple[Value, Value]:
    """One pass over padded values: maxima and flat positions; ``scale`` is the distance of neighbours along ``ax``."""
    best: list[Value] | None = None
    for t in range(ax.kernel):
        value = _tap(cx, x, ax, t)
        pos = _positions(cx, ax, t, value.shape, scale)
        if index is not None:
            pos = cx.b.add(pos, _tap(cx, index, ax, t))
        best = [value, pos] if best is None else later_wins(cx, best, [value, pos])
    assert best is not None
    return best[0], best[1]


def _max_axis_long(cx: LowerContext, x: Value, index: Value | None, ax: Axis, scale: int) -> tuple[Value, Value]:
    b, none = cx.b, torch.iinfo(torch.int32).max
    own = b.mul(b.iota(x.shape, ax.dim, torch.int32), b.constant(scale, torch.int32, x.shape))
    index = own if index is None else b.add(own, index)

    def first_max(left: Sequence[Value], right: Sequence[Value]) -> list[Value]:
        # Padding and the initial value lose against every element: their index is the largest.
        both = b.compare("EQ", left[0], right[0])
        keep = b.or_(b.compare("GT", left[0], right[0]), b.and_(both, b.compare("LT", left[1], right[1])))
        if x.dtype.is_floating_point:
            keep = b.and_(keep, b.not_(b.is_nan(right[0])))
            later = b.or_(b.not_(b.is_nan(right[0])), b.compare("GE", left[1], right[1]))
            keep = b.or_(keep, b.and_(b.is_nan(left[0]), later))
        return [b.select(keep, lo, hi) for lo, hi in zip(left, right, strict=True)]

    got = b.reduce_window(
        [x, index],
        [b.constant(lowest(x.dtype), x.dtype), b.constant(none, torch.int32)],
        first_max,
        window=_window(x.rank, ax.dim, ax.kernel),
        stride=_window(x.rank, ax.dim, ax.stride),
        padding=_pads(x.rank, ax.dim, (ax.pad, ax.high)),
        window_dilation=_window(x.rank, ax.dim, ax.dilation),
    )
    return got[0], got[1]


def max_pool(cx: LowerContext, x: Value, pool: Sequence[Axis]) -> tuple[Value, Value]:
    """Values and int64 positions in the flattened pooled dims."""
    index: Value | None = None
    scale = 1
    if 0 in cx.out.shape:
        return cx.b.constant(0, x.dtype, cx.out.shape), cx.b.constant(0, torch.int64, cx.out.shape)
    short = all(ax.kernel <= _SHORT for ax in pool)
    if short:
        x = _pad_axes(cx, x, pool, lowest(x.dtype))
    step = _max_axis if short else _max_axis_long
    for ax in reversed(pool):
        x, index = step(cx, x, index, ax, scale)
        scale *= ax.size
    assert index is not None
    return x, cx.b.convert(index, torch.int64)


def spread(cx: LowerContext, x: Value, pool: Sequence[Axis], shift: Sequence[int], fill: Number) -> Value:
    """For every input position, ``x`` at window ``position // stride - shift``; ``fill`` if there is none."""
    b = cx.b
    low, high = [0] * x.rank, [0] * x.rank
    blocks = {ax.dim: -(-(ax.size + ax.pad) // ax.stride) for ax in pool}
    for ax, j in zip(pool, shift, strict=True):
        low[ax.dim], high[ax.dim] = j, blocks[ax.dim] - j - ax.out
    if any(low) or any(high):
        x = b.pad(x, b.constant(fill, x.dtype), low, high)
    strides = {ax.dim: ax.stride for ax in pool}
    shape: list[int] = []
    kept: list[int] = []
    for d, size in enumerate(x.shape):
        kept.append(len(shape))
        shape += [size, strides[d]] if strides.get(d, 1) > 1 else [size]
    x = b.broadcast_in_dim(x, shape, kept)
    x = b.reshape(x, [strides.get(d, 1) * x.shape[k] for d, k in enumerate(kept)])
    start, limit = [0] * x.rank, list(x.shape)
    for ax in pool:
        start[ax.dim], limit[ax.dim] = ax.pad, ax.pad + ax.size
    return b.slice(x, start, limit)


def _flat_positions(cx: LowerContext, shape: Sequence[int], n: int) -> Value:
    """Each element's own position in its last ``n`` dims flattened, as int32."""
    b, plane = cx.b, tuple(shape[-n:])
    pos = b.reshape(b.iota((math.prod(plane),), 0, torch.int32), plane)
    return b.broadcast_in_dim(pos, shape, range(len(shape) - n, len(shape)))


def scatter_to_planes(
    cx: LowerContext, x: Value, indices: Value, shape: Sequence[int], n: int, *, add: bool = True
) -> Value:
    """Add (or put) ``x`` at its ``indices``, relative to a plane of the last ``n`` dims, into zeros of ``shape``."""
    b = cx.b
    planes, plane = math.prod(shape[:-n]), math.prod(shape[-n:])
    if add:
        x = b.convert(x, compute_dtype(x.dtype))
    if not x.type.numel:
        return b.constant(0, x.dtype, shape)
    each = x.type.numel // planes
    dtype = torch.int32 if planes * plane < 2**31 else torch.int64
    base = b.mul(b.iota((planes, each), 0, dtype), b.constant(plane, dtype, (planes, each)))
    flat = b.add(b.reshape(b.convert(indices, dtype), (planes, each)), base)
    out = b.scatter(
        [b.constant(0, x.dtype, (planes * plane,))],
        b.reshape(flat, (planes * each, 1)),
        [b.reshape(x, (planes * each,))],
        lambda old, new: [b.add(old[0], new[0]) if add else new[0]],
        update_window_dims=[],
        inserted=[0],
        scatter_dims=[0],
        index_vector_dim=1,
    )
    return b.reshape(out[0], shape)


def max_pool_gradient(cx: LowerContext, grad: Value, indices: Value, pool: Sequence[Axis]) -> Value:
    """Each input position sums the gradients of the windows over it that chose it."""
    b, shape, n = cx.b, cx.out.shape, len(pool)
    terms = math.prod(ax.covering for ax in pool)
    if not grad.type.numel or terms > _MAX_TERMS:
        return cx.result(scatter_to_planes(cx, grad, indices, shape, n))
    grad = b.convert(grad, compute_dtype(grad.dtype))
    indices = b.convert(indices, torch.int32)
    own = _flat_positions(cx, shape, n)
    zero = b.constant(0, grad.dtype, shape)
    total: Value | None = None
    shifts: list[tuple[int, ...]] = [()]
    for ax in pool:
        shifts = [(*s, j) for s in shifts for j in range(ax.covering)]
    for shift in shifts:
        mine = b.compare("EQ", spread(cx, indices, pool, shift, -1), own)
        term = b.select(mine, spread(cx, grad, pool, shift, 0), zero)
        total = term if total is None else b.add(total, term)
    assert total is not None
    return cx.result(total)


@lowers(aten.max_pool2d_with_indices.default)
def max_pool2d_with_indices(
    cx: LowerContext,
    self: Value,
    kernel_size: Sequence[int],
    stride: Sequence[int] = _NO_STRIDE,
    padding: Sequence[int] = _ZEROS_2,
    dilation: Sequence[int] = _ONES_2,
    ceil_mode: bool = False,
) -> tuple[Value, ...]:
    return max_pool(cx, self, axes(self.shape, cx.out.shape, kernel_size, stride, padding, dilation, n=2))


@lowers(aten.max_pool3d_with_indices.default)
def max_pool3d_with_indices(
    cx: LowerContext,
    self: Value,
    kernel_size: Sequence[int],
    stride: Sequence[int] = _NO_STRIDE,
    padding: Sequence[int] = _ZEROS_3,
    dilation: Sequence[int] = _ONES_3,
    ceil_mode: bool = False,
) -> tuple[Value, ...]:
    return max_pool(cx, self, axes(self.shape, cx.out.shape, kernel_size, stride, padding, dilation, n=3))


@lowers(aten.max_pool2d_with_indices_backward.default, aten.max_pool3d_with_indices_backward.default)
def max_pool_with_indices_backward(
    cx: LowerContext,
    grad_output: Value,
    self: Value,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil_mode: bool,
    indices: Value,
) -> Value:
    n = 2 if cx.op == aten.max_pool2d_with_indices_backward.default else 3
    pool = axes(self.shape, indices.shape, kernel_size, stride, padding, dilation, n=n)
    return max_pool_gradient(cx, grad_output, indices, pool)


# ---- average


def _sum_axis(cx: LowerContext, x: Value, ax: Axis) -> Value:
    b = cx.b
    if ax.stride < ax.kernel or ax.kernel > _SHORT:
        zero = b.constant(0, x.dtype)
        return b.reduce_window(
            [x],
            [zero],
            lambda left, right: [b.add(left[0], right[0])],
            window=_window(x.rank, ax.dim, ax.kernel),
            stride=_window(x.rank, ax.dim, ax.stride),
            padding=_pads(x.rank, ax.dim, (ax.pad, ax.high)),
        )[0]
    x = _pad_axes(cx, x, [ax], 0)
    total = _tap(cx, x, ax, 0)
    for t in range(1, ax.kernel):
        total = b.add(total, _tap(cx, x, ax, t))
    return total


def _sum_axis_gradient(cx: LowerContext, grad: Value, ax: Axis) -> Value:
    """Each input position sums the windows over it."""
    b = cx.b
    if ax.stride == ax.kernel:
        return spread(cx, grad, [ax], [0], 0)
    # A window of the kernel's length over gradients that are the stride apart.
    dilated = (ax.out - 1) * ax.stride + 1
    low = ax.kernel - 1 - ax.pad
    if ax.stride > 1:
        lows, highs, gaps = [0] * grad.rank, [0] * grad.rank, [0] * grad.rank
        lows[ax.dim], gaps[ax.dim] = low, ax.stride - 1
        highs[ax.dim] = ax.size + ax.kernel - 1 - low - dilated
        grad = b.pad(grad, b.constant(0, grad.dtype), lows, highs, gaps)
        plain = Axis(ax.dim, ax.size + ax.kernel - 1, ax.size, ax.kernel, 1, 0)
        if ax.kernel <= _SHORT:
            total = _tap(cx, grad, plain, 0)
            for t in range(1, ax.kernel):
                total = b.add(total, _tap(cx, grad, plain, t))
            return total
        return _sum_axis(cx, grad, plain)
    return _sum_axis(cx, grad, Axis(ax.dim, ax.out, ax.size, ax.kernel, 1, low))


def _interval(ax: Axis, include_pad: bool, o: int) -> int:
    start = o * ax.stride - ax.pad
    end = min(start + ax.kernel, ax.size + (ax.pad if include_pad else 0))
    return end - (start if include_pad else max(start, 0))


def _divisor(
    cx: LowerContext, pool: Sequence[Axis], shape: Sequence[int], dtype: torch.dtype, include_pad: bool
) -> Value:
    """How many elements each window counts, as ``dtype`` of ``shape``."""
    b = cx.b
    fixed, varying = 1, []
    for ax in pool:
        counts = [_interval(ax, include_pad, o) for o in range(ax.out)]
        if len(set(counts)) == 1:
            fixed *= counts[0]
        else:
            varying.append(ax)
    total = b.constant(fixed, dtype, shape)
    for ax in varying:
        n = (ax.out,)
        start = b.mul(b.iota(n, 0, torch.int32), b.constant(ax.stride, torch.int32, n))
        start = b.sub(start, b.constant(ax.pad, torch.int32, n))
        end = b.add(start, b.constant(ax.kernel, torch.int32, n))
        end = b.minimum(end, b.constant(ax.size + (ax.pad if include_pad else 0), torch.int32, n))
        if not include_pad:
            start = b.maximum(start, b.constant(0, torch.int32, n))
        count = b.convert(b.sub(end, start), dtype)
        total = b.mul(total, b.broadcast_in_dim(count, shape, [ax.dim]))
    return total


def _avg_pool(
    cx: LowerContext, x: Value, pool: Sequence[Axis], include_pad: bool, divisor_override: int | None
) -> Value:
    if 0 in cx.out.shape:
        return cx.b.constant(0, cx.out.dtype, cx.out.shape)
    x = cx.b.convert(x, compute_dtype(x.dtype))
    for ax in reversed(pool):
        x = _sum_axis(cx, x, ax)
    if divisor_override is not None:
        return cx.result(cx.b.div(x, cx.b.constant(divisor_override, x.dtype, x.shape)))
    return cx.result(cx.b.div(x, _divisor(cx, pool, x.shape, x.dtype, include_pad)))


@lowers(aten.avg_pool2d.default)
def avg_pool2d(
    cx: LowerContext,
    self: Value,
    kernel_size: Sequence[int],
    stride: Sequence[int] = _NO_STRIDE,
    padding: Sequence[int] = _ZEROS_2,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Value:
    pool = axes(self.shape, cx.out.shape, kernel_size, stride, padding, n=2)
    return _avg_pool(cx, self, pool, count_include_pad, divisor_override)


@lowers(aten.avg_pool3d.default)
def avg_pool3d(
    cx: LowerContext,
    self: Value,
    kernel_size: Sequence[int],
    stride: Sequence[int] = _NO_STRIDE,
    padding: Sequence[int] = _ZEROS_3,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Value:
    pool = axes(self.shape, cx.out.shape, kernel_size, stride, padding, n=3)
    return _avg_pool(cx, self, pool, count_include_pad, divisor_override)


@lowers(aten.avg_pool2d_backward.default, aten.avg_pool3d_backward.default)
def avg_pool_backward(
    cx: LowerContext,
    grad_output: Value,
    self: Value,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    ceil_mode: bool,
    count_include_pad: bool,
    divisor_override: int | None,
) -> Value:
    b = cx.b
    n = 2 if cx.op == aten.avg_pool2d_backward.default else 3
    if not self.type.numel or not grad_output.type.numel:
        return b.constant(0, cx.out.dtype, cx.out.shape)
    pool = axes(self.shape, grad_output.shape, kernel_size, stride, padding, n=n)
    grad = b.convert(grad_output, compute_dtype(grad_output.dtype))
    if divisor_override is not None:
        grad = b.div(grad, b.constant(divisor_override, grad.dtype, grad.shape))
    else:
        grad = b.div(grad, _divisor(cx, pool, grad.shape, grad.dtype, count_include_pad))
    for ax in reversed(pool):
        grad = _sum_axis_gradient(cx, grad, ax)
    return cx.result(grad)
