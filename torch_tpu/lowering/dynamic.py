"""Ops whose result sizes depend on data: nonzero, masked_select, unique; and what is made with the same means.

The one tool is compaction: a prefix sum gives each kept element its place, a scatter puts it there. Results are padded
to the size of the input; `Dynamic` carries the true size. Two ops have no such bound, `bincount` and
`repeat_interleave`: their rules take the size from ``cx.out``, and `SIZES` has the rules that compute it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch._ops import OpOverload

from torch_tpu.ir.builder import Number, Value
from torch_tpu.lowering.expr import Expr
from torch_tpu.lowering.indexing import (
    as_index,
    broadcast_shapes,
    empty,
    expand_counts,
    gather_1d,
    gather_windows,
    index_dtype,
    prefix_sum,
    scatter_1d,
)
from torch_tpu.lowering.promote import norm_dim
from torch_tpu.lowering.reduce import reduce_max, reduce_sum
from torch_tpu.lowering.registry import Dynamic, LowerContext, lowers
from torch_tpu.lowering.sort import float_key, float_of_key, sorted_with_indices
from torch_tpu.lowering.view_like import rotate_dims

aten = torch.ops.aten

_MAX_SORT_KEYS = 8  # columns that one lexicographic sort compares; more are sorted one after the other


# ---- compaction


def _flat(cx: LowerContext, x: Value) -> Value:
    return cx.b.reshape(x, (x.type.numel,))


def _count_true(cx: LowerContext, mask: Value) -> tuple[Value, Value]:
    """Number of true elements up to and including each place of a rank-1 mask, and of all (rank-0 int64)."""
    n = mask.shape[0]
    counts = prefix_sum(cx, cx.b.convert(mask, index_dtype(n)))
    if n == 0:
        return counts, cx.b.constant(0, torch.int64)
    return counts, cx.b.convert(cx.b.reshape(cx.b.slice_dim(counts, 0, n - 1, n), ()), torch.int64)


def _places(cx: LowerContext, mask: Value, counts: Value, nowhere: int) -> Value:
    """Where each true element goes; the others get places of their own from ``nowhere`` on, so all are different."""
    one = cx.b.constant(1, counts.dtype, counts.shape)
    beyond = cx.b.iota(counts.shape, 0, counts.dtype)
    beyond = cx.b.add(beyond, cx.b.constant(nowhere, counts.dtype, counts.shape))
    return cx.b.select(mask, cx.b.sub(counts, one), beyond)


def _compact(cx: LowerContext, mask: Value, x: Value, fill: Number = 0, size: int | None = None) -> tuple[Value, Value]:
    """Elements of rank-1 ``x`` where ``mask``, in front of ``fill`` up to ``size`` (default: all), and their count."""
    n = x.shape[0]
    size = n if size is None else size
    counts, count = _count_true(cx, mask)
    target = cx.b.constant(fill, x.dtype, (size,))
    if n == 0 or size == 0:
        return target, count
    return scatter_1d(cx, target, _places(cx, mask, counts, max(n, size)), x, unique=True), count


def _coordinates(cx: LowerContext, place: Value, shape: Sequence[int]) -> Value:
    """Row-major places as int64 coordinates ``[len(place), rank]``."""
    n = place.shape[0]
    if not shape or n == 0 or 0 in shape:
        return cx.b.constant(0, torch.int64, (n, len(shape)))
    columns, stride = [], 1
    for d in reversed(range(len(shape))):
        x = Expr(cx.b, place)
        x = x / stride if stride > 1 else x
        x = x % shape[d] if d else x
        columns.append(cx.b.reshape(x.to(torch.int64).v, (n, 1)))
        stride *= shape[d]
    return cx.b.concatenate(columns[::-1], 1)


def _true_places(cx: LowerContext, x: Value, size: int | None = None) -> tuple[Value, Value]:
    mask = cx.b.convert(_flat(cx, x), torch.bool)
    n = mask.shape[0]
    return _compact(cx, mask, cx.b.iota((n,), 0, index_dtype(n)), size=size)


@lowers(aten.nonzero.default, dynamic=True)
def nonzero(cx: LowerContext, self: Value) -> Dynamic:
    place, count = _true_places(cx, self)
    return Dynamic((_coordinates(cx, place, self.shape),), count, (0,))


@lowers(aten.nonzero_static.default)
def nonzero_static(cx: LowerContext, self: Value, *, size: int, fill_value: int = -1) -> Value:
    if cx.out.numel == 0:
        return empty(cx)
    place, count = _true_places(cx, self, size)
    row = cx.b.iota(cx.out.shape, 0, torch.int64)
    found = cx.b.compare("LT", row, cx.b.broadcast_to(count, row.shape))
    fill = cx.b.constant(fill_value, torch.int64, row.shape)
    return cx.b.select(found, _coordinates(cx, place, self.shape), fill)


@lowers(aten.masked_select.default, dynamic=True)
def masked_select(cx: LowerContext, self: Value, mask: Value) -> Dynamic:
    shape = broadcast_shapes(self.shape, mask.shape)
    x, mask = (_flat(cx, cx.b.broadcast_to(v, shape)) for v in (self, cx.b.convert(mask, torch.bool)))
    values, count = _compact(cx, mask, x)
    return Dynamic((values,), count, (0,))


@lowers(aten.masked_scatter.default)
def masked_scatter(cx: LowerContext, self: Value, mask: Value, source: Value) -> Value:
    x, mask = cx.result(self), cx.b.broadcast_to(cx.b.convert(mask, torch.bool), cx.out.shape)
    if source.type.numel == 0 or cx.out.numel == 0:
        return x
    counts, _ = _count_true(cx, _flat(cx, mask))
    place = cx.b.sub(counts, cx.b.constant(1, counts.dtype, counts.shape))
    values = cx.b.reshape(gather_1d(cx, _flat(cx, source), place), cx.out.shape)
    return cx.b.select(mask, values, x)


@lowers(aten.masked_scatter_backward.default)
def masked_scatter_backward(cx: LowerContext, grad_output: Value, mask: Value, sizes: Sequence[int]) -> Value:
    mask = cx.b.broadcast_to(cx.b.convert(mask, torch.bool), grad_output.shape)
    values, _ = _compact(cx, _flat(cx, mask), _flat(cx, grad_output), size=cx.out.numel)
    return cx.b.reshape(values, cx.out.shape)


# ---- unique


@dataclass(frozen=True, slots=True)
class _Runs:
    """Runs of equal elements of an array of length n, from a mask of their first elements."""

    group: Value  # [n]: number of the run that an element is in
    first: Value  # [n]: place of the first element of each run, then n
    count: Value  # rank-0 int64: runs

    @classmethod
    def of(cls, cx: LowerContext, starts: Value) -> _Runs:
        n = starts.shape[0]
        counts, count = _count_true(cx, starts)
        group = cx.b.sub(counts, cx.b.constant(1, counts.dtype, counts.shape))
        first, _ = _compact(cx, starts, cx.b.iota((n,), 0, index_dtype(n)), fill=n)
        return cls(group, first, count)

    def lengths(self, cx: LowerContext) -> Value:
        """Elements of each run, int64."""
        n = self.first.shape[0]
        end = cx.b.pad(self.first, cx.b.constant(n, self.first.dtype), [-1], [1]) if n else self.first
        return cx.b.convert(cx.b.sub(end, self.first), torch.int64)


def _starts(cx: LowerContext, x: Value) -> Value:
    """Where a row of ``x`` (dims after the first) differs from the row before."""
    n = x.shape[0]
    if n == 0:
        return cx.b.constant(True, torch.bool, (0,))
    key = float_key(cx, x) if x.dtype.is_floating_point else x
    differs = cx.b.compare("NE", cx.b.slice_dim(key, 0, 1, n), cx.b.slice_dim(key, 0, 0, n - 1))
    if x.dtype.is_floating_point:  # no NaN equals another
        differs = cx.b.or_(differs, cx.b.is_nan(cx.b.slice_dim(x, 0, 1, n)))
    if x.rank > 1:
        differs = cx.b.reduce_op("or", differs, False, list(range(1, x.rank)))
    return cx.b.concatenate([cx.b.constant(True, torch.bool, (1,)), differs], 0)


def _no_result(cx: LowerContext) -> Value:
    """What ATen returns for an inverse or counts nobody asked for."""
    return cx.b.constant(0, torch.int64, (0,))


def _unique_flat(
    cx: LowerContext, x: Value, perm: Value | None, shape: Sequence[int], flags: tuple[bool, bool]
) -> Dynamic:
    """Unique neighbours of rank-1 ``x``, which is the input in the order ``perm`` (None: as it is)."""
    inverse, counts = flags
    n = x.shape[0]
    if not (inverse or counts):
        values, count = _compact(cx, _starts(cx, x), x)
        return Dynamic((values, _no_result(cx), _no_result(cx)), count, (0, None, None))
    runs = _Runs.of(cx, _starts(cx, x))
    values = gather_1d(cx, x, runs.first) if n else x
    results = [values, _no_result(cx), _no_result(cx)]
    if inverse:
        results[1] = cx.b.reshape(_inverse(cx, runs.group, perm), shape)
    if counts:
        results[2] = runs.lengths(cx)
    return Dynamic(tuple(results), runs.count, (0, None, 0 if counts else None))


def _inverse(cx: LowerContext, group: Value, perm: Value | None) -> Value:
    """Groups of sorted elements in the order before the sort, int64."""
    if perm is not None and group.shape[0]:
        group = scatter_1d(cx, cx.b.constant(0, group.dtype, group.shape), perm, group, unique=True)
    return cx.b.convert(group, torch.int64)


def _unique(cx: LowerContext, self: Value, inverse: bool, counts: bool) -> Dynamic:
    x, perm = _flat(cx, self), None
    if inverse:
        x, perm = sorted_with_indices(cx, x, 0, descending=False)
        perm = cx.b.convert(perm, index_dtype(x.shape[0]))
    else:
        key = float_key(cx, x) if x.dtype.is_floating_point else x
        (key,) = cx.b.sort([key], 0, lambda left, right: cx.b.compare("LT", left[0], right[0]), stable=False)
        x = float_of_key(cx, key, x.dtype) if x.dtype.is_floating_point else key
    return _unique_flat(cx, x, perm, self.shape, (inverse, counts))


@lowers(aten._unique2.default, dynamic=True)
def unique2(
    cx: LowerContext, self: Value, sorted: bool = True, return_inverse: bool = False, return_counts: bool = False
) -> Dynamic:
    return _unique(cx, self, return_inverse, return_counts)


@lowers(aten._unique.default, dynamic=True)
def unique(cx: LowerContext, self: Value, sorted: bool = True, return_inverse: bool = False) -> Dynamic:
    got = _unique(cx, self, return_inverse, False)
    return Dynamic(got.values[:2], got.count, got.dims[:2])


def _lexicographic(cx: LowerContext, rows: Value) -> Value:
    """Permutation that sorts the rows of ``[n, m]``, stable."""
    n, m = rows.shape
    rows = float_key(cx, rows) if rows.dtype.is_floating_point else rows
    place = cx.b.iota((n,), 0, index_dtype(n))
    if m > _MAX_SORT_KEYS:
        return _sort_by_columns(cx, rows, place)

    columns = [cx.b.reshape(cx.b.slice_dim(rows, 1, j, j + 1), (n,)) for j in range(m)]

    def less(left: Sequence[Value], right: Sequence[Value]) -> Value:
        result = cx.b.compare("LT", left[m - 1], right[m - 1])
        for x, y in zip(left[m - 2 :: -1], right[m - 2 :: -1], strict=True) if m > 1 else ():
            tie = cx.b.and_(cx.b.compare("EQ", x, y), result)
            result = cx.b.or_(cx.b.compare("LT", x, y), tie)
        return result

    return cx.b.sort([*columns, place], 0, less, stable=True)[m]


def _sort_by_columns(cx: LowerContext, rows: Value, place: Value) -> Value:
    """Stable sorts from the last column to the first."""
    n, m = rows.shape
    columns = cx.b.transpose(rows, [1, 0])
    one, zero = cx.b.constant(1, torch.int32), cx.b.constant(0, torch.int32)

    def step(state: Sequence[Value]) -> list[Value]:
        j = cx.b.sub(state[0], one)
        key = cx.b.reshape(cx.b.dynamic_slice(columns, [j, zero], (1, n)), (n,))
        key = gather_1d(cx, key, state[1])
        order = cx.b.sort([key, state[1]], 0, lambda left, right: cx.b.compare("LT", left[0], right[0]), stable=True)
        return [j, order[1]]

    return cx.b.while_([cx.b.constant(m, torch.int32), place], lambda s: cx.b.compare("GT", s[0], zero), step)[1]


def _unique_rows(cx: LowerContext, self: Value, dim: int, *, sort: bool) -> Dynamic:
    dim = norm_dim(dim, self.rank)
    x = cx.b.transpose(self, rotate_dims(self.rank, dim, 0))
    n = x.shape[0]
    if self.type.numel == 0:
        none = _no_result(cx)
        return Dynamic((self, none, none), cx.b.constant(0, torch.int64), (dim, None, 0))
    rows = cx.b.reshape(x, (n, x.type.numel // n))
    perm = None
    if sort:
        perm = _lexicographic(cx, rows)
        rows = gather_windows(cx, rows, [0], [perm], 0)
    runs = _Runs.of(cx, _starts(cx, rows))
    values = cx.b.reshape(gather_windows(cx, rows, [0], [runs.first], 0), x.shape)
    values = cx.b.transpose(values, rotate_dims(self.rank, 0, dim))
    inverse = _inverse(cx, runs.group, perm)
    return Dynamic((values, inverse, runs.lengths(cx)), runs.count, (dim, None, 0))


@lowers(aten.unique_dim.default, dynamic=True)
def unique_dim(
    cx: LowerContext,
    self: Value,
    dim: int,
    sorted: bool = True,
    return_inverse: bool = False,
    return_counts: bool = False,
) -> Dynamic:
    return _unique_rows(cx, self, dim, sort=True)


@lowers(aten.unique_dim_consecutive.default, dynamic=True)
def unique_dim_consecutive(
    cx: LowerContext, self: Value, dim: int, return_inverse: bool = False, return_counts: bool = False
) -> Dynamic:
    return _unique_rows(cx, self, dim, sort=False)


@lowers(aten.unique_consecutive.default, dynamic=True)
def unique_consecutive(
    cx: LowerContext,
    self: Value,
    return_inverse: bool = False,
    return_counts: bool = False,
    dim: int | None = None,
) -> Dynamic:
    if dim is not None and self.rank and not (dim == 0 and self.rank == 1):
        return _unique_rows(cx, self, dim, sort=False)
    return _unique_flat(cx, _flat(cx, self), None, self.shape, (return_inverse, return_counts))


# ---- sizes without a bound


@lowers(aten.repeat_interleave.Tensor)
def repeat_interleave(cx: LowerContext, repeats: Value, *, output_size: int | None = None) -> Value:
    if cx.out.numel == 0:
        return empty(cx)
    total = cx.out.shape[0]
    return cx.result(expand_counts(cx, cx.b.convert(repeats, index_dtype(total)), total))


@lowers(aten.bincount.default)
def bincount(cx: LowerContext, self: Value, weights: Value | None = None, minlength: int = 0) -> Value:
    size, n = cx.out.shape[0], self.type.numel
    if n == 0 or size == 0:
        return empty(cx)
    dtype = index_dtype(n) if weights is None else cx.out.dtype
    amount = cx.b.constant(1, dtype, (n,)) if weights is None else cx.b.convert(weights, dtype)
    zeros = cx.b.constant(0, dtype, (size,))
    return cx.result(scatter_1d(cx, zeros, as_index(cx, self, size), amount, "add"))


def _size_of_repeat_interleave(cx: LowerContext, repeats: Value, *, output_size: int | None = None) -> Value:
    return reduce_sum(cx, cx.b.convert(repeats, torch.int64), [0])


def _size_of_bincount(cx: LowerContext, self: Value, weights: Value | None = None, minlength: int = 0) -> Value:
    least = cx.b.constant(minlength, torch.int64)
    if self.type.numel == 0:
        return least
    largest = cx.b.convert(reduce_max(cx, self, [0]), torch.int64)
    return cx.b.maximum(cx.b.add(largest, cx.b.constant(1, torch.int64)), least)


SIZES: dict[OpOverload, Callable[..., Value]] = {
    aten.repeat_interleave.Tensor: _size_of_repeat_interleave,
    aten.bincount.default: _size_of_bincount,
}
"""Op -> rule with the parameters of the op that returns the size of its rank-1 result as a rank-0 int64 value.

The caller runs it first, reads the number, and lowers the op with that size in ``outs``.
"""
