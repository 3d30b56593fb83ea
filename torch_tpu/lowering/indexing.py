"""Reads and writes at index tensors: index, gather, scatter, index_*, take, put.

Two shapes of access, each with one gather and one scatter:

    windows   some dims of x are indexed by arrays of one shape B, the rest is taken whole (index, index_add, embedding)
    points    each element has its own index along one dim, all other dims run along (gather, scatter)

Out-of-range indices are an error in ATen; here XLA clamps reads and drops writes (the debug mode checks bounds).
Negative indices wrap where ATen wraps them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from torch_tpu.errors import LoweringMissing
from torch_tpu.ir.builder import Number, Value
from torch_tpu.ir.types import compute_dtype
from torch_tpu.lowering.promote import Operand, norm_dim, scalar
from torch_tpu.lowering.reduce import highest, lowest
from torch_tpu.lowering.registry import LowerContext, lowers
from torch_tpu.lowering.scan import scan

aten = torch.ops.aten

_INT32_MAX = 2**31 - 1
Scatter = Callable[[Value, Value, "str | None"], Value]
"""``(operand, updates, StableHLO op or None to overwrite) -> result``: a scatter with fixed indices."""


# ---- shared with other families


def broadcast_shapes(*shapes: tuple[int, ...]) -> tuple[int, ...]:
    """The shape that ATen broadcasts ``shapes`` to."""
    return tuple(torch.broadcast_shapes(*shapes))


def empty(cx: LowerContext, index: int = 0) -> Value:
    """Zeros: the result where there is nothing to read or write."""
    out = cx.outs[index]
    return cx.b.constant(0, out.dtype, out.shape)


def index_dtype(size: int) -> torch.dtype:
    """The dtype to count up to ``2 * size`` in (rules use size, size + 1, … for "nowhere")."""
    return torch.int32 if size <= _INT32_MAX // 2 else torch.int64


def as_index(cx: LowerContext, index: Value, size: int, *, wrap: bool = False) -> Value:
    """``index`` into a dim of ``size``: int32 where that holds the dim, because 64-bit indices are slow on TPU."""
    dtype = index_dtype(size)
    index = cx.b.convert(index, dtype)
    if not wrap:
        return index
    negative = cx.b.compare("LT", index, cx.b.constant(0, dtype, index.shape))
    return cx.b.select(negative, cx.b.add(index, cx.b.constant(size, dtype, index.shape)), index)


def prefix_sum(cx: LowerContext, x: Value) -> Value:
    """Inclusive sums of a rank-1 value."""
    return scan(cx, x, 0, "add", 0)


def _index_vectors(cx: LowerContext, indices: Sequence[Value]) -> Value:
    """Indices of one shape as vectors along a new last dim; a single index keeps that dim implicit."""
    if len(indices) == 1:
        return indices[0]
    wide = torch.int64 if any(i.dtype == torch.int64 for i in indices) else torch.int32
    parts = [cx.b.reshape(cx.b.convert(i, wide), (*i.shape, 1)) for i in indices]
    return cx.b.concatenate(parts, indices[0].rank)


def _window_dims(rank: int, num_indexed: int, lead: int, batch_rank: int) -> list[int]:
    """Dims of the accessed array that are not index dims, which are ``lead … lead + batch_rank - 1``."""
    total = rank - num_indexed + batch_rank
    return [i for i in range(total) if not lead <= i < lead + batch_rank]


def gather_windows(cx: LowerContext, x: Value, dims: Sequence[int], indices: Sequence[Value], lead: int) -> Value:
    """``x`` at ``indices`` (one array of shape B a dim of ``dims``); B starts at dim ``lead`` of the result."""
    batch_rank = indices[0].rank
    return cx.b.gather(
        x,
        _index_vectors(cx, indices),
        offset_dims=_window_dims(x.rank, len(dims), lead, batch_rank),
        collapsed=dims,
        start_index_map=dims,
        index_vector_dim=batch_rank,
        slice_sizes=[1 if d in dims else s for d, s in enumerate(x.shape)],
    )


def scatter_windows(
    cx: LowerContext,
    x: Value,
    dims: Sequence[int],
    indices: Sequence[Value],
    lead: int,
    *,
    updates: Value,
    op: str | None = None,
    unique: bool = False,
) -> Value:
    """Write ``updates`` (shaped as `gather_windows` would return) into ``x``, combined by ``op`` or overwriting."""
    batch_rank = indices[0].rank
    return cx.b.scatter(
        [x],
        _index_vectors(cx, indices),
        [updates],
        lambda old, new: [new[0] if op is None else cx.b.binary(op, old[0], new[0])],
        update_window_dims=_window_dims(x.rank, len(dims), lead, batch_rank),
        inserted=dims,
        scatter_dims=dims,
        index_vector_dim=batch_rank,
        unique=unique,
    )[0]


def scatter_1d(
    cx: LowerContext, x: Value, index: Value, updates: Value, op: str | None = None, *, unique: bool = False
) -> Value:
    """Rank-1 scatter; indices beyond the end drop out."""
    return scatter_windows(cx, x, [0], [index], 0, updates=updates, op=op, unique=unique)


def gather_1d(cx: LowerContext, x: Value, index: Value) -> Value:
    """Elements of a rank-1 value, in the shape of ``index``."""
    return gather_windows(cx, x, [0], [index], 0)


def expand_counts(cx: LowerContext, counts: Value, total: int) -> Value:
    """Number ``i`` repeated ``counts[i]`` times, for all i; ``total`` is the sum of ``counts``.

    Each number marks where it starts (several at one place if some occur zero times); a prefix sum fills in the rest.
    """
    b, dtype = cx.b, counts.dtype
    start = b.sub(prefix_sum(cx, counts), counts)
    one = b.constant(1, dtype, counts.shape)
    marks = scatter_1d(cx, b.constant(0, dtype, (total,)), start, one, "add")
    return b.sub(prefix_sum(cx, marks), b.constant(1, dtype, (total,)))


def gather_points(cx: LowerContext, x: Value, dim: int, index: Value) -> Value:
    """``torch.gather`` for an index array whose other dims are at most those of ``x``."""
    sizes = [s if d == dim else index.shape[d] for d, s in enumerate(x.shape)]
    x = cx.b.slice(x, [0] * x.rank, sizes)
    others = [d for d in range(x.rank) if d != dim]
    return cx.b.gather(
        x,
        index,
        offset_dims=[],
        collapsed=[dim],
        start_index_map=[dim],
        index_vector_dim=index.rank,
        slice_sizes=[1] * x.rank,
        batch=(others, others),
    )


def scatter_points(
    cx: LowerContext, x: Value, dim: int, index: Value, updates: Value, *, op: str | None = None
) -> Value:
    """``torch.scatter``: ``updates`` has the shape of ``index``, whose other dims are at most those of ``x``."""
    sizes = [s if d == dim else index.shape[d] for d, s in enumerate(x.shape)]
    part = cx.b.slice(x, [0] * x.rank, sizes)
    others = [d for d in range(x.rank) if d != dim]
    part = cx.b.scatter(
        [part],
        index,
        [updates],
        lambda old, new: [new[0] if op is None else cx.b.binary(op, old[0], new[0])],
        update_window_dims=[],
        inserted=[dim],
        scatter_dims=[dim],
        index_vector_dim=index.rank,
        batch=(others, others),
    )[0]
    if part.shape == x.shape:
        return part
    zero = cx.b.constant(0, torch.int32)
    return cx.b.dynamic_update_slice(x, part, [zero] * x.rank)


# ---- index and index_put


@dataclass(frozen=True, slots=True)
class _Advanced:
    """An index list as ATen reads it."""

    dims: list[int]  # indexed dims of self
    indices: list[Value]  # their indices, broadcast to one shape
    lead: int  # where the index dims start in the result: in place if the indices are adjacent, else in front

    @property
    def batch(self) -> tuple[int, ...]:
        return self.indices[0].shape


def _advanced(cx: LowerContext, self: Value, indices: Sequence[Value | None]) -> _Advanced:
    dims = [d for d, i in enumerate(indices) if i is not None]
    given = [i for i in indices if i is not None]
    if any(i.dtype in (torch.bool, torch.uint8) for i in given):
        raise LoweringMissing(
            "a mask among other indices has no static shape.", op=str(cx.op), hint="index with mask.nonzero()."
        )
    shape = broadcast_shapes(*(i.shape for i in given))
    arrays = [
        cx.b.broadcast_to(as_index(cx, i, self.shape[d], wrap=True), shape) for d, i in zip(dims, given, strict=True)
    ]
    adjacent = dims == list(range(dims[0], dims[-1] + 1))
    return _Advanced(dims, arrays, dims[0] if adjacent else 0)


@lowers(aten.index.Tensor, aten._unsafe_index.Tensor)
def index(cx: LowerContext, self: Value, indices: Sequence[Value | None]) -> Value:
    if all(i is None for i in indices):
        return self
    if cx.out.numel == 0:
        return empty(cx)
    adv = _advanced(cx, self, indices)
    return gather_windows(cx, self, adv.dims, adv.indices, adv.lead)


def _masked_put(cx: LowerContext, self: Value, dim: int, mask: Value, values: Value, accumulate: bool) -> Value:
    """``self[:, …, mask] = values``: no nonzero, so no size that depends on data."""
    rows, after = mask.type.numel, self.rank - dim - mask.rank
    rank = dim + 1 + after
    values = cx.b.reshape(values, (*[1] * (rank - values.rank), *values.shape))
    mask = cx.b.convert(mask, torch.bool)
    if values.shape[dim] != 1:  # one value a true element, in order
        flat = cx.b.convert(cx.b.reshape(mask, (rows,)), torch.int32)
        place = cx.b.sub(prefix_sum(cx, flat), cx.b.constant(1, torch.int32, (rows,)))
        values = gather_windows(cx, values, [dim], [place], dim)
        shape = (*values.shape[:dim], *mask.shape, *values.shape[dim + 1 :])
    else:
        shape = (*values.shape[:dim], *[1] * mask.rank, *values.shape[dim + 1 :])
    values = cx.b.broadcast_to(cx.b.reshape(values, shape), self.shape)
    where = cx.b.broadcast_in_dim(mask, self.shape, range(dim, dim + mask.rank))
    if accumulate:
        acc = compute_dtype(self.dtype)
        values = cx.b.convert(cx.b.add(cx.b.convert(self, acc), cx.b.convert(values, acc)), self.dtype)
    return cx.b.select(where, values, self)


def _index_put(
    cx: LowerContext, self: Value, indices: Sequence[Value | None], values: Value, accumulate: bool
) -> Value:
    values = cx.b.convert(values, self.dtype)
    if self.type.numel == 0 or values.type.numel == 0:
        return self
    given = [(d, i) for d, i in enumerate(indices) if i is not None]
    if not given:
        values = cx.b.broadcast_to(values, self.shape)
        return cx.result(cx.b.add(self, values)) if accumulate else values
    if len(given) == 1 and given[0][1].dtype in (torch.bool, torch.uint8):
        return _masked_put(cx, self, given[0][0], given[0][1], values, accumulate)
    adv = _advanced(cx, self, indices)
    rest = [s for d, s in enumerate(self.shape) if d not in adv.dims]
    shape = (*rest[: adv.lead], *adv.batch, *rest[adv.lead :])
    if 0 in shape:
        return self
    # ATen drops leading ones of values
    while values.rank > len(shape) and values.shape[0] == 1:
        values = cx.b.reshape(values, values.shape[1:])
    updates = cx.b.broadcast_to(values, shape)
    if not accumulate:
        return scatter_windows(cx, self, adv.dims, adv.indices, adv.lead, updates=updates)
    acc = compute_dtype(self.dtype)
    self, updates = cx.b.convert(self, acc), cx.b.convert(updates, acc)
    op = "or" if acc == torch.bool else "add"
    return cx.result(scatter_windows(cx, self, adv.dims, adv.indices, adv.lead, updates=updates, op=op))


@lowers(aten.index_put.default, aten._unsafe_index_put.default)
def index_put(
    cx: LowerContext, self: Value, indices: Sequence[Value | None], values: Value, accumulate: bool = False
) -> Value:
    return _index_put(cx, self, indices, values, accumulate)


@lowers(aten._index_put_impl.default)
def index_put_impl(
    cx: LowerContext,
    self: Value,
    indices: Sequence[Value | None],
    values: Value,
    accumulate: bool = False,
    unsafe: bool = False,
) -> Value:
    return _index_put(cx, self, indices, values, accumulate)


# ---- gather and scatter along one dim


def _at_least_1d(cx: LowerContext, x: Value) -> Value:
    return x if x.rank else cx.b.reshape(x, (1,))


@lowers(aten.gather.default)
def gather(cx: LowerContext, self: Value, dim: int, index: Value, *, sparse_grad: bool = False) -> Value:
    if cx.out.numel == 0:
        return empty(cx)
    dim = norm_dim(dim, self.rank)
    self, index = _at_least_1d(cx, self), _at_least_1d(cx, index)
    index = as_index(cx, index, self.shape[dim])
    return cx.b.reshape(gather_points(cx, self, dim, index), cx.out.shape)


def _point_scatter(cx: LowerContext, dim: int, index: Value, size: int) -> Scatter:
    index = as_index(cx, _at_least_1d(cx, index), size)
    return lambda x, updates, op: scatter_points(cx, x, dim, index, updates, op=op)


def _scatter(cx: LowerContext, self: Value, dim: int, index: Value, src: Value, reduce: str, include: bool) -> Value:
    """All forms of torch.scatter; ``reduce`` is empty to overwrite."""
    if index.type.numel == 0:
        return self
    dim = norm_dim(dim, self.rank)
    x, src = _at_least_1d(cx, self), _at_least_1d(cx, src)
    put = _point_scatter(cx, dim, index, x.shape[dim])
    src = cx.b.slice(src, [0] * src.rank, index.shape or (1,))
    if not reduce:
        return cx.b.reshape(put(x, src, None), self.shape)
    return cx.b.reshape(reduce_into(cx, x, put, src, reduce, include_self=include), self.shape)


@lowers(aten.scatter.src)
def scatter_src(cx: LowerContext, self: Value, dim: int, index: Value, src: Value) -> Value:
    return _scatter(cx, self, dim, index, src, "", True)


@lowers(aten.scatter.value)
def scatter_value(cx: LowerContext, self: Value, dim: int, index: Value, value: Operand) -> Value:
    src = cx.b.broadcast_to(scalar(cx, value, self.dtype), index.shape)
    return _scatter(cx, self, dim, index, src, "", True)


@lowers(aten.scatter.reduce)
def scatter_reduce_src(cx: LowerContext, self: Value, dim: int, index: Value, src: Value, *, reduce: str) -> Value:
    return _scatter(cx, self, dim, index, src, reduce, True)


@lowers(aten.scatter.value_reduce)
def scatter_value_reduce(
    cx: LowerContext, self: Value, dim: int, index: Value, value: Operand, *, reduce: str
) -> Value:
    src = cx.b.broadcast_to(scalar(cx, value, self.dtype), index.shape)
    return _scatter(cx, self, dim, index, src, reduce, True)


@lowers(aten.scatter_add.default)
def scatter_add(cx: LowerContext, self: Value, dim: int, index: Value, src: Value) -> Value:
    return _scatter(cx, self, dim, index, src, "sum", True)


@lowers(aten.scatter_reduce.two)
def scatter_reduce(
    cx: LowerContext, self: Value, dim: int, index: Value, src: Value, reduce: str, *, include_self: bool = True
) -> Value:
    return _scatter(cx, self, dim, index, src, reduce, include_self)


def _combine(reduce: str, dtype: torch.dtype) -> tuple[str, Number]:
    """StableHLO op of an ATen reduction name, and its identity."""
    if reduce in ("sum", "add", "mean"):
        return ("or" if dtype == torch.bool else "add"), 0
    if reduce in ("prod", "multiply"):
        return ("and" if dtype == torch.bool else "multiply"), 1
    return ("maximum", lowest(dtype)) if reduce == "amax" else ("minimum", highest(dtype))


def reduce_into(
    cx: LowerContext, x: Value, put: Scatter, src: Value, reduce: str, *, include_self: bool = True
) -> Value:
    """Reduce ``src`` into ``x`` with ``put``; elements that get no update keep their value."""
    b, out, dtype = cx.b, x.dtype, compute_dtype(x.dtype)
    x, src = b.convert(x, dtype), b.convert(src, dtype)
    op, identity = _combine(reduce, dtype)
    if not include_self:
        touched = put(b.constant(False, torch.bool, x.shape), b.constant(True, torch.bool, src.shape), None)
        x = b.select(touched, b.constant(identity, dtype, x.shape), x)
    total = put(x, src, op)
    if reduce != "mean":
        return b.convert(total, out)
    one, many = b.constant(1, dtype, x.shape), b.constant(1, dtype, src.shape)
    count = put(one if include_self else b.constant(0, dtype, x.shape), many, "add")
    count = count if include_self else b.maximum(count, one)
    return b.convert(_mean(cx, total, count), out)


def _mean(cx: LowerContext, total: Value, count: Value) -> Value:
    quotient = cx.b.div(total, count)
    if total.dtype.is_floating_point:
        return quotient
    zero, one = (cx.b.constant(n, total.dtype, total.shape) for n in (0, 1))  # integers round down
    inexact = cx.b.compare("NE", cx.b.mul(quotient, count), total)
    down = cx.b.and_(inexact, cx.b.compare("LT", total, zero))
    return cx.b.select(down, cx.b.sub(quotient, one), quotient)


# ---- whole slices along one dim


@lowers(aten.index_select.default)
def index_select(cx: LowerContext, self: Value, dim: int, index: Value) -> Value:
    if cx.out.numel == 0:
        return empty(cx)
    dim = norm_dim(dim, self.rank)
    x, index = _at_least_1d(cx, self), _at_least_1d(cx, index)
    got = gather_windows(cx, x, [dim], [as_index(cx, index, x.shape[dim])], dim)
    return cx.b.reshape(got, cx.out.shape)


def _slice_scatter(
    cx: LowerContext, self: Value, dim: int, index: Value, *, wrap: bool = False
) -> tuple[Value, Scatter, tuple[int, ...]]:
    """``self`` with at least one dim, the scatter of whole slices along ``dim``, and the shape of its updates."""
    dim = norm_dim(dim, self.rank)
    x = _at_least_1d(cx, self)
    at = as_index(cx, _at_least_1d(cx, index), x.shape[dim], wrap=wrap)
    shape = (*x.shape[:dim], at.shape[0], *x.shape[dim + 1 :])
    return x, lambda x, updates, op: scatter_windows(cx, x, [dim], [at], dim, updates=updates, op=op), shape


@lowers(aten.index_add.default, scalars={"alpha": (1,)})
def index_add(cx: LowerContext, self: Value, dim: int, index: Value, source: Value, *, alpha: Operand = 1) -> Value:
    if source.type.numel == 0:
        return self
    x, put, shape = _slice_scatter(cx, self, dim, index)
    source = cx.b.reshape(cx.b.convert(source, cx.compute_dtype), shape)
    if isinstance(alpha, Value) or alpha != 1:
        source = cx.b.mul(source, cx.b.broadcast_to(scalar(cx, alpha), shape))
    return cx.b.reshape(reduce_into(cx, x, put, source, "sum"), self.shape)


@lowers(aten.index_copy.default)
def index_copy(cx: LowerContext, self: Value, dim: int, index: Value, source: Value) -> Value:
    if source.type.numel == 0:
        return self
    x, put, shape = _slice_scatter(cx, self, dim, index)
    return cx.b.reshape(put(x, cx.b.reshape(source, shape), None), self.shape)


@lowers(aten.index_fill.int_Scalar, aten.index_fill.int_Tensor)
def index_fill(cx: LowerContext, self: Value, dim: int, index: Value, value: Operand) -> Value:
    if self.type.numel == 0 or index.type.numel == 0:
        return self
    fill = scalar(cx, value, self.dtype)
    if self.rank == 0:
        return fill
    # A mask of one dim is cheaper to scatter than whole slices, and the select fuses.
    dim = norm_dim(dim, self.rank)
    size = self.shape[dim]
    at = as_index(cx, _at_least_1d(cx, index), size, wrap=True)
    false, true = cx.b.constant(False, torch.bool, (size,)), cx.b.constant(True, torch.bool, at.shape)
    hit = cx.b.broadcast_in_dim(scatter_1d(cx, false, at, true), self.shape, [dim])
    return cx.b.select(hit, cx.b.broadcast_to(fill, self.shape), self)


@lowers(aten.index_reduce.default)
def index_reduce(
    cx: LowerContext,
    self: Value,
    dim: int,
    index: Value,
    source: Value,
    reduce: str,
    *,
    include_self: bool = True,
) -> Value:
    if source.type.numel == 0:
        return self
    x, put, shape = _slice_scatter(cx, self, dim, index)
    source = cx.b.reshape(source, shape)
    return cx.b.reshape(reduce_into(cx, x, put, source, reduce, include_self=include_self), self.shape)


@lowers(aten.take.default)
def take(cx: LowerContext, self: Value, index: Value) -> Value:
    if cx.out.numel == 0:
        return empty(cx)
    size = self.type.numel
    return gather_1d(cx, cx.b.reshape(self, (size,)), as_index(cx, index, size, wrap=True))


@lowers(aten.put.default)
def put(cx: LowerContext, self: Value, index: Value, source: Value, accumulate: bool = False) -> Value:
    if index.type.numel == 0:
        return self
    size, count = self.type.numel, index.type.numel
    x, source = cx.b.reshape(self, (size,)), cx.b.reshape(source, (count,))
    at = as_index(cx, cx.b.reshape(index, (count,)), size, wrap=True)
    if not accumulate:
        return cx.b.reshape(scatter_1d(cx, x, at, source), self.shape)
    total = reduce_into(cx, x, lambda x, updates, op: scatter_1d(cx, x, at, updates, op), source, "sum")
    return cx.b.reshape(total, self.shape)
