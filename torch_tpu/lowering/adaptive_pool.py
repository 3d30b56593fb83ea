"""Pools whose windows follow from the output size: adaptive average and max, fractional max, max unpooling.

Adaptive window ``o`` of a dim covers ``[o * size // out, ceil((o + 1) * size / out))``. Where ``out`` divides ``size``
that is an ordinary pool. Else averages are products with a 0/1 matrix (one a dim), and maxima read every window out
with one gather a dim, after which the windows no longer overlap.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from torch_tpu.ir.builder import Value
from torch_tpu.ir.types import compute_dtype
from torch_tpu.lowering.pool import Axis, later_wins, max_pool, max_pool_gradient, scatter_to_planes, spread
from torch_tpu.lowering.registry import LowerContext, lowers

aten = torch.ops.aten


def _even(sizes: Sequence[int], outs: Sequence[int], n: int) -> list[Axis] | None:
    """The windows as an ordinary pool over the last ``n`` dims, if they are one."""
    rank = len(sizes)
    pool = []
    for d in range(rank - n, rank):
        if not outs[d] or sizes[d] % outs[d]:
            return None
        k = sizes[d] // outs[d]
        pool.append(Axis(d, sizes[d], outs[d], k, k, 0))
    return pool


def _bounds(size: int, out: int) -> list[tuple[int, int]]:
    return [(o * size // out, -(-(o + 1) * size // out)) for o in range(out)]


def _membership(cx: LowerContext, size: int, out: int, dtype: torch.dtype) -> Value:
    """0/1 matrix (size, out): is the position in the window?"""
    b, shape = cx.b, (size, out)
    pos, o = b.iota(shape, 0, torch.int64), b.iota(shape, 1, torch.int64)
    one, sizes, outs = (b.constant(v, torch.int64, shape) for v in (1, size, out))
    start = b.div(b.mul(o, sizes), outs)
    end = b.div(b.add(b.mul(b.add(o, one), sizes), b.sub(outs, one)), outs)
    inside = b.and_(b.compare("GE", pos, start), b.compare("LT", pos, end))
    return b.convert(inside, dtype)


def _lengths(cx: LowerContext, sizes: Sequence[int], shape: Sequence[int], n: int, dtype: torch.dtype) -> Value:
    """Elements in each window, as ``dtype`` of the output ``shape``."""
    b = cx.b
    fixed, varying = 1, []
    for d in range(len(shape) - n, len(shape)):
        lengths = {hi - lo for lo, hi in _bounds(sizes[d], shape[d])}
        if len(lengths) == 1:
            fixed *= lengths.pop()
        else:
            varying.append(d)
    total = b.constant(fixed, dtype, shape)
    for d in varying:
        length = b.reduce_op("add", _membership(cx, sizes[d], shape[d], torch.int32), 0, [0])
        total = b.mul(total, b.broadcast_in_dim(b.convert(length, dtype), shape, [d]))
    return total


def _sum_by_matrices(cx: LowerContext, x: Value, matrices: Sequence[Value]) -> Value:
    """Contract the last dims with the first dims of ``matrices``, one each, in order."""
    first = x.rank - len(matrices)
    for m in matrices:
        x = cx.b.dot_general(x, m, contract=([first], [0]))
    return x


def _adaptive_avg_pool(cx: LowerContext, self: Value, n: int) -> Value:
    b, out = cx.b, cx.out.shape
    if 0 in out or not self.type.numel:
        return b.constant(0, cx.out.dtype, out)
    x = b.convert(self, compute_dtype(self.dtype))
    even = _even(self.shape, out, n)
    if even is None:
        x = _sum_by_matrices(
            cx, x, [_membership(cx, self.shape[d], out[d], x.dtype) for d in range(x.rank - n, x.rank)]
        )
    else:
        split = list(self.shape[:-n])
        for ax in even:
            split += [ax.out, ax.kernel]
        x = b.reduce_op("add", b.reshape(x, split), 0, [x.rank - n + 2 * i + 1 for i in range(n)])
    return cx.result(b.div(x, _lengths(cx, self.shape, out, n, x.dtype)))


@lowers(aten._adaptive_avg_pool2d.default)
def adaptive_avg_pool2d(cx: LowerContext, self: Value, output_size: Sequence[int]) -> Value:
    return _adaptive_avg_pool(cx, self, 2)


@lowers(aten._adaptive_avg_pool3d.default)
def adaptive_avg_pool3d(cx: LowerContext, self: Value, output_size: Sequence[int]) -> Value:
    return _adaptive_avg_pool(cx, self, 3)


@lowers(aten._adaptive_avg_pool2d_backward.default, aten._adaptive_avg_pool3d_backward.default)
def adaptive_avg_pool_backward(cx: LowerContext, grad_output: Value, self: Value) -> Value:
    b = cx.b
    n = 2 if cx.op == aten._adaptive_avg_pool2d_backward.default else 3
    if not grad_output.type.numel or not self.type.numel:
        return b.constant(0, cx.out.dtype, cx.out.shape)
    grad = b.convert(grad_output, compute_dtype(grad_output.dtype))
    grad = b.div(grad, _lengths(cx, self.shape, grad.shape, n, grad.dtype))
    even = _even(self.shape, grad.shape, n)
    if even is not None:
        return cx.result(spread(cx, grad, even, [0] * n, 0))
    matrices = [_membership(cx, self.shape[d], grad.shape[d], grad.dtype) for d in range(grad.rank - n, grad.rank)]
    return cx.result(_sum_by_matrices(cx, grad, [b.transpose(m, [1, 0]) for m in matrices]))


# ---- max


def _read_out(cx: LowerContext, x: Value, dim: int, positions: Sequence[int]) -> Value:
    """``x`` at static ``positions`` along ``dim``."""
    b, count = cx.b, len(positions)
    sizes = list(x.shape)
    sizes[dim] = 1
    return b.gather(
        x,
        b.reshape(b.constant_list(positions, torch.int32), (count, 1)),
        offset_dims=[d for d in range(x.rank) if d != dim],
        collapsed=[dim],
        start_index_map=[dim],
        index_vector_dim=1,
        slice_sizes=sizes,
    )


def _uneven_max(cx: LowerContext, x: Value, dim: int, out: int, scale: int, index: Value | None) -> list[Value]:
    """One pass along ``dim``: maxima and their flat positions."""
    b = cx.b
    bounds = _bounds(x.shape[dim], out)
    longest = max(hi - lo for lo, hi in bounds)
    best: list[Value] | None = None
    for t in range(longest):
        # A shorter window reads its last element again: it cannot displace itself.
        positions = [min(lo + t, hi - 1) for lo, hi in bounds]
        value = _read_out(cx, x, dim, positions)
        pos = b.constant_list([p * scale for p in positions], torch.int32)
        pos = b.broadcast_in_dim(pos, value.shape, [dim])
        if index is not None:
            pos = b.add(pos, _read_out(cx, index, dim, positions))
        best = [value, pos] if best is None else later_wins(cx, best, [value, pos])
    assert best is not None
    return best


@lowers(aten.adaptive_max_pool2d.default, aten.adaptive_max_pool3d.default)
def adaptive_max_pool(cx: LowerContext, self: Value, output_size: Sequence[int]) -> tuple[Value, ...]:
    b, out = cx.b, cx.out.shape
    n = len(output_size)
    if 0 in out:
        return b.constant(0, self.dtype, out), b.constant(0, torch.int64, out)
    even = _even(self.shape, out, n)
    if even is not None:
        return max_pool(cx, self, even)
    x, index, scale = self, None, 1
    for d in reversed(range(self.rank - n, self.rank)):
        x, index = _uneven_max(cx, x, d, out[d], scale, index)
        scale *= self.shape[d]
    assert index is not None
    return x, b.convert(index, torch.int64)


@lowers(aten.adaptive_max_pool2d_backward.default, aten.adaptive_max_pool3d_backward.default)
def adaptive_max_pool_backward(cx: LowerContext, grad_output: Value, self: Value, indices: Value) -> Value:
    n = 2 if cx.op == aten.adaptive_max_pool2d_backward.default else 3
    even = _even(self.shape, indices.shape, n)
    if even is not None:
        return max_pool_gradient(cx, grad_output, indices, even)
    return cx.result(scatter_to_planes(cx, grad_output, indices, self.shape, n))


def _random_starts(cx: LowerContext, samples: Value, size: int, out: int, kernel: int) -> Value:
    """First position of every fractional window: (planes, out) from one sample a plane, in the samples' arithmetic."""
    b = cx.b
    shape = (samples.shape[0], out)
    last = b.constant(size - kernel, torch.int32, shape)
    if out == 1:
        return last
    dtype = samples.dtype  # not wider: ATen truncates what it computes in the samples' own type
    alpha = b.div(b.constant(size - kernel, dtype, shape), b.constant(out - 1, dtype, shape))
    sample = b.broadcast_in_dim(samples, shape, [0])
    step = b.iota(shape, 1, dtype)
    start = b.convert(b.mul(b.add(step, sample), alpha), torch.int32)
    start = b.sub(start, b.convert(b.mul(sample, alpha), torch.int32))
    is_last = b.compare("EQ", b.iota(shape, 1, torch.int32), b.constant(out - 1, torch.int32, shape))
    return b.select(is_last, last, start)


def _read_out_planes(cx: LowerContext, x: Value, dim: int, positions: Value) -> Value:
    """``x`` (planes, …) at (planes, count) ``positions`` along ``dim``."""
    b = cx.b
    sizes = list(x.shape)
    sizes[0] = sizes[dim] = 1
    return b.gather(
        x,
        b.reshape(positions, (*positions.shape, 1)),
        offset_dims=[d for d in range(1, x.rank) if d != dim],
        collapsed=[dim],
        start_index_map=[dim],
        index_vector_dim=2,
        slice_sizes=sizes,
        batch=([0], [0]),
    )


@lowers(aten.fractional_max_pool2d.default, aten.fractional_max_pool3d.default)
def fractional_max_pool(
    cx: LowerContext, self: Value, kernel_size: Sequence[int], output_size: Sequence[int], random_samples: Value
) -> tuple[Value, ...]:
    b, out = cx.b, cx.out.shape
    n = 2 if cx.op == aten.fractional_max_pool2d.default else 3
    planes = math.prod(self.shape[:-n])
    if 0 in out:
        return b.constant(0, self.dtype, out), b.constant(0, torch.int64, out)
    samples = b.reshape(random_samples, (planes, n))
    # The 2-d kernel draws its samples as (width, height), the 3-d one as (depth, height, width).
    columns = [1, 0] if n == 2 else [0, 1, 2]
    x = b.reshape(self, (planes, *self.shape[-n:]))
    index: Value | None = None
    scale = 1
    for d in reversed(range(n)):
        size, count, kernel = self.shape[self.rank - n + d], out[len(out) - n + d], kernel_size[d % len(kernel_size)]
        sample = b.reshape(b.slice_dim(samples, 1, columns[d], columns[d] + 1), (planes,))
        starts = _random_starts(cx, sample, size, count, kernel)
        best: list[Value] | None = None
        for t in range(kernel):
            positions = b.add(starts, b.constant(t, torch.int32, starts.shape))
            value = _read_out_planes(cx, x, d + 1, positions)
            flat = b.mul(positions, b.constant(scale, torch.int32, starts.shape))
            flat = b.broadcast_in_dim(flat, value.shape, [0, d + 1])
            if index is not None:
                flat = b.add(flat, _read_out_planes(cx, index, d + 1, positions))
            best = [value, flat] if best is None else later_wins(cx, best, [value, flat])
        assert best is not None
        x, index = best
        scale *= size
    assert index is not None
    return b.reshape(x, out), b.convert(b.reshape(index, out), torch.int64)


@lowers(aten.fractional_max_pool2d_backward.default, aten.fractional_max_pool3d_backward.default)
def fractional_max_pool_backward(
    cx: LowerContext,
    grad_output: Value,
    self: Value,
    kernel_size: Sequence[int],
    output_size: Sequence[int],
    indices: Value,
) -> Value:
    n = 2 if cx.op == aten.fractional_max_pool2d_backward.default else 3
    return cx.result(scatter_to_planes(cx, grad_output, indices, self.shape, n))


@lowers(aten.max_unpool2d.default)
def max_unpool2d(cx: LowerContext, self: Value, indices: Value, output_size: Sequence[int]) -> Value:
    return scatter_to_planes(cx, self, indices, cx.out.shape, 2, add=False)


@lowers(aten.max_unpool3d.default)
def max_unpool3d(
    cx: LowerContext,
    self: Value,
    indices: Value,
    output_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
) -> Value:
    return scatter_to_planes(cx, self, indices, cx.out.shape, 3, add=False)
