"""Sampling an image or volume at arbitrary points (grid_sampler_2d/3d), and the gradients.

Along one dim a point reads one, two or four neighbours, each with a position, a weight and the weight's slope. The
neighbours of all dims multiply to corners; a corner gathers one row of channels a point, its gradient scatters one.

Shapes: N batch, P points of one sample, C channels; coordinates and everything derived from them are (N, P).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from torch_tpu.ir.builder import Value
from torch_tpu.ir.types import compute_dtype
from torch_tpu.lowering.registry import LowerContext, lowers
from torch_tpu.lowering.resample import clamped, keys_cubic, polynomial, triangle

aten = torch.ops.aten

_BILINEAR, _NEAREST, _BICUBIC = 0, 1, 2
_ZEROS, _BORDER, _REFLECTION = 0, 1, 2
_CUBIC = -0.75


@dataclass(frozen=True, slots=True)
class Neighbour:
    """One input position along one dim."""

    position: Value  # int32, within the input
    inside: Value  # false: the padding is read, which is zero
    weight: Value | None  # None: one
    slope: Value | None  # derivative of the weight by the grid's coordinate; None: zero


@dataclass(frozen=True, slots=True)
class Point:
    """Coordinates along one dim in input positions, and what they were made from."""

    at: Value
    before: Value  # int32: the whole position before
    slope: Value  # derivative of `at` by the grid's coordinate


@dataclass(frozen=True, slots=True)
class Sampling:
    """The options of one call."""

    mode: int
    padding: int
    align_corners: bool


def _const(cx: LowerContext, value: float, like: Value) -> Value:
    return cx.b.constant(value, like.dtype, like.shape)


def _locate(cx: LowerContext, shifted: Value, slope: Value, half: float) -> Point:
    """The point ``shifted - half``.

    The position before it is found by comparing: see `resample._source` for why not by the floor of the difference.
    """
    b = cx.b
    whole = b.unary("floor", shifted)
    before = b.convert(whole, torch.int32)
    if not half:
        return Point(shifted, before, slope)
    below = b.compare("LT", shifted, b.add(whole, _const(cx, half, whole)))
    before = b.sub(before, b.convert(below, torch.int32))
    return Point(b.sub(shifted, _const(cx, half, shifted)), before, slope)


def _reflected(cx: LowerContext, shifted: Value, slope: Value, span: int) -> tuple[Value, Value]:
    """Fold coordinates (zero at the mirror) into [0, span]; the slope changes sign with the direction."""
    b = cx.b
    zero = _const(cx, 0, shifted)
    if span == 0:
        return zero, _const(cx, 0, slope)
    slope = b.select(b.compare("LT", shifted, zero), b.neg(slope), slope)
    length = _const(cx, span, shifted)
    distance = b.unary("abs", shifted)
    rest = b.binary("remainder", distance, length)
    flips = b.unary("floor", b.div(distance, length))
    even = b.compare("EQ", b.binary("remainder", flips, _const(cx, 2, flips)), zero)
    return b.select(even, rest, b.sub(length, rest)), b.select(even, slope, b.neg(slope))


def _point(cx: LowerContext, grid: Value, size: int, how: Sampling) -> Point:
    """Coordinates in [-1, 1] as input positions, moved inside if the padding asks for it."""
    b = cx.b
    half = 0.0 if how.align_corners else 0.5
    factor = (size - 1) / 2 if how.align_corners else size / 2
    shifted = b.mul(b.add(grid, _const(cx, 1, grid)), _const(cx, factor, grid))
    slope = _const(cx, factor, grid)
    bounded = how.padding != _ZEROS and how.mode != _BICUBIC  # cubic pads each neighbour on its own
    # A NaN reads outside, which is zero; padded otherwise it reads the first element.
    shifted = b.select(b.is_nan(shifted), _const(cx, half if bounded else -4.0, shifted), shifted)
    if bounded and how.padding == _REFLECTION:
        shifted, slope = _reflected(cx, shifted, slope, size - 1 if how.align_corners else size)
    if not bounded:
        far = size + 4.0 if how.mode != _BICUBIC or how.padding == _ZEROS else 2.0**30
        return _locate(cx, clamped(cx, shifted, -far, far), slope, half)
    low, high = _const(cx, half, shifted), _const(cx, size - 1 + half, shifted)
    moved = b.or_(b.compare("LE", shifted, low), b.compare("GE", shifted, high))
    slope = b.select(moved, _const(cx, 0, slope), slope)
    return _locate(cx, b.minimum(b.maximum(shifted, low), high), slope, half)


def _inside(cx: LowerContext, position: Value, size: int) -> Value:
    b = cx.b
    not_before = b.compare("GE", position, _const(cx, 0, position))
    return b.and_(not_before, b.compare("LT", position, _const(cx, size, position)))


def _whole_reflected(cx: LowerContext, position: Value, size: int, align_corners: bool) -> Value:
    """Reflect whole positions about the first and last element, or about the borders half a step outside."""
    b = cx.b
    period = 2 * (size - 1) if align_corners else 2 * size
    if period == 0:
        return _const(cx, 0, position)
    length = _const(cx, period, position)
    rest = b.binary("remainder", position, length)
    rest = b.select(b.compare("LT", rest, _const(cx, 0, rest)), b.add(rest, length), rest)
    mirrored = b.sub(_const(cx, period if align_corners else period - 1, rest), rest)
    return b.minimum(rest, mirrored)


def _neighbour(
    cx: LowerContext, position: Value, size: int, weight: Value | None = None, slope: Value | None = None
) -> Neighbour:
    return Neighbour(clamped(cx, position, 0, size - 1), _inside(cx, position, size), weight, slope)


def _cubic_neighbours(cx: LowerContext, point: Point, size: int, how: Sampling) -> list[Neighbour]:
    b, a = cx.b, _CUBIC
    found = []
    for offset in (-1, 0, 1, 2):
        position = b.add(point.before, _const(cx, offset, point.before))
        distance = b.sub(point.at, b.convert(position, point.at.dtype))
        weight = keys_cubic(a)(cx, distance)
        x = b.unary("abs", distance)
        near = polynomial(cx, x, (3 * (a + 2), -2 * (a + 3), 0))
        far = polynomial(cx, x, (3 * a, -10 * a, 8 * a))
        rise = near if offset in (0, 1) else far  # the derivative for a positive distance
        rise = rise if offset <= 0 else b.neg(rise)
        if how.padding == _REFLECTION:
            position = _whole_reflected(cx, position, size, how.align_corners)
        if how.padding != _ZEROS:
            position = clamped(cx, position, 0, size - 1)
        found.append(_neighbour(cx, position, size, weight, b.mul(rise, point.slope)))
    return found


def _neighbours(cx: LowerContext, grid: Value, size: int, how: Sampling) -> list[Neighbour]:
    b = cx.b
    point = _point(cx, grid, size, how)
    if how.mode == _NEAREST:
        nearest = b.convert(b.unary("round_nearest_even", point.at), torch.int32)
        return [_neighbour(cx, nearest, size)]
    if how.mode == _BICUBIC:
        return _cubic_neighbours(cx, point, size, how)
    after = b.add(point.before, _const(cx, 1, point.before))
    pair = []
    for position, slope in ((point.before, b.neg(point.slope)), (after, point.slope)):
        weight = triangle(cx, b.sub(point.at, b.convert(position, point.at.dtype)))
        pair.append(_neighbour(cx, position, size, weight, slope))
    return pair


@dataclass(frozen=True, slots=True)
class Corner:
    """One neighbour in every dim."""

    parts: Sequence[Neighbour]
    position: Value  # int32, in the flattened spatial dims
    inside: Value

    def weight(self, cx: LowerContext, instead: int | None = None) -> Value | None:
        """Product of the weights, None for one; for dim ``instead`` the slope is taken in place of the weight."""
        total: Value | None = None
        for i, part in enumerate(self.parts):
            factor = part.slope if i == instead else part.weight
            if factor is not None:
                total = factor if total is None else cx.b.mul(total, factor)
        return total


def _times(cx: LowerContext, x: Value, weight: Value | None) -> Value:
    """(N, P, C) times (N, P)."""
    return x if weight is None else cx.b.mul(x, cx.b.broadcast_in_dim(weight, x.shape, [0, 1]))


def _corners(cx: LowerContext, grid: Value, sizes: Sequence[int], how: Sampling) -> list[Corner]:
    """All corners of all points; ``grid`` is (N, P, n) with the last spatial dim first."""
    b, n = cx.b, len(sizes)
    lists = []
    for i, size in enumerate(sizes):
        coordinate = b.reshape(b.slice_dim(grid, 2, n - 1 - i, n - i), grid.shape[:2])
        lists.append(_neighbours(cx, coordinate, size, how))
    corners = []
    for parts in itertools.product(*lists):
        position, inside = parts[0].position, parts[0].inside
        for part, size in zip(parts[1:], sizes[1:], strict=True):
            position = b.add(b.mul(position, _const(cx, size, position)), part.position)
            inside = b.and_(inside, part.inside)
        corners.append(Corner(parts, position, inside))
    return corners


def _rows(cx: LowerContext, x: Value) -> Value:
    """(N, C, spatial…) as (N, spatial, C) in the compute type."""
    b = cx.b
    flat = b.reshape(x, (*x.shape[:2], math.prod(x.shape[2:])))
    return b.convert(b.transpose(flat, [0, 2, 1]), compute_dtype(x.dtype))


def _unrows(cx: LowerContext, rows: Value, shape: Sequence[int]) -> Value:
    return cx.b.reshape(cx.b.transpose(rows, [0, 2, 1]), shape)


def _read(cx: LowerContext, rows: Value, corner: Corner) -> Value:
    """(N, P, C): what the points read at this corner, zero outside."""
    b = cx.b
    got = b.gather(
        rows,
        b.reshape(corner.position, (*corner.position.shape, 1)),
        offset_dims=[2],
        collapsed=[1],
        start_index_map=[1],
        index_vector_dim=2,
        slice_sizes=(1, 1, rows.shape[2]),
        batch=([0], [0]),
    )
    return b.select(b.broadcast_in_dim(corner.inside, got.shape, [0, 1]), got, _const(cx, 0, got))


def _add_into(cx: LowerContext, rows: Value, corner: Corner, x: Value) -> Value:
    """Add (N, P, C) to the rows read at this corner."""
    b = cx.b
    x = b.select(b.broadcast_in_dim(corner.inside, x.shape, [0, 1]), x, _const(cx, 0, x))
    out = b.scatter(
        [rows],
        b.reshape(corner.position, (*corner.position.shape, 1)),
        [x],
        lambda old, new: [b.add(old[0], new[0])],
        update_window_dims=[2],
        inserted=[1],
        scatter_dims=[1],
        index_vector_dim=2,
        batch=([0], [0]),
    )
    return out[0]


def _points(cx: LowerContext, grid: Value) -> Value:
    """The grid as (N, P, n) in the compute type."""
    n, dims = grid.shape[0], grid.shape[-1]
    return cx.b.convert(cx.b.reshape(grid, (n, math.prod(grid.shape[1:-1]), dims)), compute_dtype(grid.dtype))


@lowers(aten.grid_sampler_2d.default, aten.grid_sampler_3d.default)
def grid_sampler(
    cx: LowerContext, input: Value, grid: Value, interpolation_mode: int, padding_mode: int, align_corners: bool
) -> Value:
    b = cx.b
    if 0 in cx.out.shape:
        return b.constant(0, cx.out.dtype, cx.out.shape)
    how = Sampling(interpolation_mode, padding_mode, align_corners)
    rows = _rows(cx, input)
    total: Value | None = None
    for corner in _corners(cx, _points(cx, grid), input.shape[2:], how):
        term = _times(cx, _read(cx, rows, corner), corner.weight(cx))
        total = term if total is None else b.add(total, term)
    assert total is not None
    return cx.result(_unrows(cx, total, cx.out.shape))


@lowers(aten.grid_sampler_2d_backward.default, aten.grid_sampler_3d_backward.default)
def grid_sampler_backward(
    cx: LowerContext,
    grad_output: Value,
    input: Value,
    grid: Value,
    interpolation_mode: int,
    padding_mode: int,
    align_corners: bool,
    output_mask: Sequence[bool],
) -> tuple[Value | None, ...]:
    b = cx.b
    how = Sampling(interpolation_mode, padding_mode, align_corners)
    rows, grad = _rows(cx, input), _rows(cx, grad_output)
    points = _points(cx, grid)
    corners = _corners(cx, points, input.shape[2:], how) if grad.type.numel else []
    n = grid.shape[-1]
    grad_rows = _const(cx, 0, rows)
    slopes: list[Value] = [b.constant(0, points.dtype, points.shape[:2])] * n
    for corner in corners:
        if output_mask[0]:
            grad_rows = _add_into(cx, grad_rows, corner, _times(cx, grad, corner.weight(cx)))
        if output_mask[1] and how.mode != _NEAREST:
            agreement = b.reduce_op("add", b.mul(grad, _read(cx, rows, corner)), 0, [2])
            for i in range(n):
                slope = corner.weight(cx, instead=i)
                assert slope is not None
                slopes[i] = b.add(slopes[i], b.mul(agreement, slope))
    grad_input = b.convert(_unrows(cx, grad_rows, input.shape), input.dtype) if output_mask[0] else None
    if not output_mask[1]:
        return grad_input, None
    columns = [b.reshape(s, (*s.shape, 1)) for s in reversed(slopes)]
    return grad_input, b.convert(b.reshape(b.concatenate(columns, 2), grid.shape), grid.dtype)
