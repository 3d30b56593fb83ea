"""Embedding tables: rows by index, their gradients, and bags of rows (sum, mean or max).

Shapes: N indices, B bags, W rows of the table, D columns. Rows are never read or written one by one: a read is one
gather of rows, a gradient one scatter of rows; entries that must not count are sent out of range, where XLA skips them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from torch_tpu.errors import LoweringMissing
from torch_tpu.ir.builder import Value
from torch_tpu.lowering.indexing import (
    as_index,
    empty,
    gather_1d,
    gather_windows,
    index_dtype,
    prefix_sum,
    scatter_1d,
    scatter_points,
    scatter_windows,
)
from torch_tpu.lowering.promote import Operand, scalar
from torch_tpu.lowering.registry import LowerContext, lowers

aten = torch.ops.aten

_SUM, _MEAN, _MAX = 0, 1, 2  # ATen's numbers of the modes


@lowers(aten.embedding.default)
def embedding(
    cx: LowerContext,
    weight: Value,
    indices: Value,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Value:
    if cx.out.numel == 0:
        return empty(cx)
    return gather_windows(cx, weight, [0], [as_index(cx, indices, weight.shape[0])], 0)


def drop_index(cx: LowerContext, index: Value, which: int, size: int) -> Value:
    """``index`` with the entries equal to ``which`` moved out of range, where a scatter skips them."""
    if not 0 <= which < size:
        return index
    skip = cx.b.compare("EQ", index, cx.b.constant(which, index.dtype, index.shape))
    return cx.b.select(skip, cx.b.constant(size, index.dtype, index.shape), index)


def frequencies(cx: LowerContext, index: Value, size: int, dtype: torch.dtype) -> Value:
    """For each entry of a rank-1 ``index``, how often its value occurs."""
    ones, zeros = cx.b.constant(1, dtype, index.shape), cx.b.constant(0, dtype, (size,))
    return gather_1d(cx, scatter_1d(cx, zeros, index, ones, "add"), index)


@lowers(aten.embedding_dense_backward.default)
def embedding_dense_backward(
    cx: LowerContext,
    grad_output: Value,
    indices: Value,
    num_weights: int,
    padding_idx: int,
    scale_grad_by_freq: bool,
) -> Value:
    if cx.out.numel == 0 or indices.type.numel == 0:
        return empty(cx)
    count, acc = indices.type.numel, cx.compute_dtype
    at = as_index(cx, cx.b.reshape(indices, (count,)), num_weights)
    grad = cx.b.convert(cx.b.reshape(grad_output, (count, cx.out.shape[1])), acc)
    if scale_grad_by_freq:
        often = frequencies(cx, at, num_weights, acc)
        grad = cx.b.div(grad, cx.b.broadcast_in_dim(often, grad.shape, [0]))
    at = drop_index(cx, at, padding_idx, num_weights)
    zeros = cx.b.constant(0, acc, cx.out.shape)
    return cx.result(scatter_windows(cx, zeros, [0], [at], 0, updates=grad, op="add"))


@lowers(aten.embedding_renorm.default, scalars={"norm_type": (1, 2)})
def embedding_renorm(cx: LowerContext, self: Value, indices: Value, max_norm: Operand, norm_type: Operand) -> Value:
    n = indices.type.numel
    if n == 0 or self.type.numel == 0:
        return self
    b, dtype = cx.b, cx.compute_dtype
    at = as_index(cx, b.reshape(indices, (n,)), self.shape[0])
    rows_ND = b.convert(gather_windows(cx, self, [0], [at], 0), dtype)
    norm = _row_norms(cx, rows_ND, norm_type)
    limit = b.broadcast_to(scalar(cx, max_norm, dtype), (n,))
    scale = b.div(limit, b.add(norm, b.constant(1e-7, dtype, (n,))))
    scale = b.select(b.compare("GT", norm, limit), scale, b.constant(1, dtype, (n,)))
    rows_ND = b.convert(b.mul(rows_ND, b.broadcast_in_dim(scale, rows_ND.shape, [0])), self.dtype)
    return scatter_windows(cx, self, [0], [at], 0, updates=rows_ND)  # equal indices write equal rows


def _row_norms(cx: LowerContext, x: Value, p: Operand) -> Value:
    b = cx.b
    size = b.unary("abs", x)
    if not isinstance(p, Value) and p == 1:
        return b.reduce_op("add", size, 0, [1])
    if not isinstance(p, Value) and p == 2:
        return b.unary("sqrt", b.reduce_op("add", b.mul(x, x), 0, [1]))
    power = scalar(cx, p, x.dtype)
    total = b.reduce_op("add", b.binary("power", size, b.broadcast_to(power, x.shape)), 0, [1])
    inverse = b.div(b.constant(1, x.dtype), power)
    return b.binary("power", total, b.broadcast_to(inverse, total.shape))


# ---- bags


@dataclass(frozen=True, slots=True)
class _Bags:
    """Which bag each index belongs to; ``live`` is out of range for padding entries."""

    count: int
    at: Value  # [N]
    bag: Value  # [N]
    live: Value  # [N]


def _bag_of(cx: LowerContext, offsets: Value, count: int, n: int) -> Value:
    """``offset2bag``: how many of the first ``count`` offsets are not behind each place, less one."""
    b, dtype = cx.b, index_dtype(n)
    starts = b.convert(b.slice_dim(offsets, 0, 0, count), dtype)
    zeros, ones = b.constant(0, dtype, (n,)), b.constant(1, dtype, (count,))
    marks = scatter_1d(cx, zeros, starts, ones, "add") if count else zeros
    return b.sub(prefix_sum(cx, marks), b.constant(1, dtype, (n,)))


def _bags(cx: LowerContext, weights: int, indices: Value, bag: Value, count: int, padding_idx: int) -> _Bags:
    b, n = cx.b, indices.shape[0]
    at = as_index(cx, indices, weights)
    bag = as_index(cx, bag, count)
    live = bag
    if 0 <= padding_idx < weights:
        skip = b.compare("EQ", at, b.constant(padding_idx, at.dtype, (n,)))
        live = b.select(skip, b.constant(count, bag.dtype, (n,)), bag)
    return _Bags(count, at, bag, live)


def _sizes(cx: LowerContext, bags: _Bags) -> Value:
    """Entries of each bag without padding."""
    dtype = bags.at.dtype
    ones, zeros = cx.b.constant(1, dtype, bags.live.shape), cx.b.constant(0, dtype, (bags.count,))
    return scatter_1d(cx, zeros, bags.live, ones, "add")


def _sum_rows(cx: LowerContext, rows: Value, bags: _Bags) -> Value:
    zeros = cx.b.constant(0, rows.dtype, (bags.count, rows.shape[1]))
    return scatter_windows(cx, zeros, [0], [bags.live], 0, updates=rows, op="add")


def _max_rows(cx: LowerContext, rows: Value, bags: _Bags, size: Value) -> tuple[Value, Value]:
    """Maximum of each bag and column, and the table row it comes from (the first of equals; 0 for empty bags)."""
    b, (n, columns) = cx.b, rows.shape
    shape = (bags.count, columns)

    def put(x: Value, updates: Value, op: str) -> Value:
        return scatter_windows(cx, x, [0], [bags.live], 0, updates=updates, op=op)

    most = put(b.constant(float("-inf"), rows.dtype, shape), rows, "maximum")
    hit = b.compare("EQ", rows, gather_windows(cx, most, [0], [bags.bag], 0))
    dtype = index_dtype(n)
    nowhere = b.constant(n - 1, dtype, rows.shape)
    place = b.select(hit, b.iota(rows.shape, 0, dtype), nowhere)
    first = put(b.constant(n - 1, dtype, shape), place, "minimum")
    row = gather_1d(cx, bags.at, first)
    full = b.compare("GT", b.broadcast_in_dim(size, shape, [0]), b.constant(0, size.dtype, shape))
    most = b.select(full, most, b.constant(0, most.dtype, shape))
    return most, b.select(full, row, b.constant(0, row.dtype, shape))


def _fit(cx: LowerContext, x: Value | None, index: int) -> Value:
    """Bookkeeping result ``index``: padded with zeros to what was promised, or zeros if this mode has none."""
    out = cx.outs[index]
    if x is None or x.rank != len(out.shape) or out.numel < x.type.numel:
        return cx.b.constant(0, out.dtype, out.shape)
    x = cx.b.convert(x, out.dtype)
    high = [want - have for want, have in zip(out.shape, x.shape, strict=True)]
    return cx.b.pad(x, cx.b.constant(0, out.dtype), [0] * x.rank, high) if any(high) else x


@lowers(aten._embedding_bag.default, aten._embedding_bag_forward_only.default)
def embedding_bag(
    cx: LowerContext,
    weight: Value,
    indices: Value,
    offsets: Value,
    scale_grad_by_freq: bool = False,
    mode: int = 0,
    sparse: bool = False,
    per_sample_weights: Value | None = None,
    include_last_offset: bool = False,
    padding_idx: int = -1,
) -> tuple[Value, Value, Value, Value]:
    b, n, count = cx.b, indices.shape[0], cx.out.shape[0]
    if n == 0 or cx.out.numel == 0:
        return tuple(b.constant(0, o.dtype, o.shape) for o in cx.outs)  # type: ignore[return-value]
    bags = _bags(cx, weight.shape[0], indices, _bag_of(cx, offsets, count, n), count, padding_idx)
    rows_ND = b.convert(gather_windows(cx, weight, [0], [bags.at], 0), cx.compute_dtype)
    if per_sample_weights is not None:
        factor = b.convert(per_sample_weights, rows_ND.dtype)
        rows_ND = b.mul(rows_ND, b.broadcast_in_dim(factor, rows_ND.shape, [0]))
    size = most = None
    if mode != _SUM:
        size = _sizes(cx, bags)
    if mode == _MAX:
        assert size is not None
        total, most = _max_rows(cx, rows_ND, bags, size)
    else:
        total = _sum_rows(cx, rows_ND, bags)
    if mode == _MEAN:
        assert size is not None
        total = b.div(total, _at_least_one(cx, size, total.dtype, total.shape))
        most = size  # ATen CPU repeats the sizes here
    return cx.result(total), _fit(cx, bags.bag, 1), _fit(cx, size, 2), _fit(cx, most, 3)


def _at_least_one(cx: LowerContext, size: Value, dtype: torch.dtype, shape: tuple[int, ...]) -> Value:
    size = cx.b.maximum(size, cx.b.constant(1, size.dtype, size.shape))
    return cx.b.broadcast_in_dim(cx.b.convert(size, dtype), shape, [0])


def _bag_backward(
    cx: LowerContext,
    grad: Value,
    indices: Value,
    offset2bag: Value,
    bag_size: Value,
    maximum_indices: Value,
    num_weights: int,
    scale_grad_by_freq: bool,
    mode: int,
    per_sample_weights: Value | None,
    padding_idx: int,
) -> Value:
    b, n, (count, _) = cx.b, indices.shape[0], grad.shape
    if n == 0 or cx.out.numel == 0 or count == 0:
        return empty(cx)
    zeros = b.constant(0, cx.compute_dtype, cx.out.shape)
    grad_BD = b.convert(grad, zeros.dtype)
    size = b.slice_dim(bag_size, 0, 0, count)
    if mode == _MAX:
        at_BD = as_index(cx, maximum_indices, num_weights)
        vacant = b.compare("EQ", size, b.constant(0, size.dtype, size.shape))
        nowhere = b.constant(num_weights, at_BD.dtype, at_BD.shape)
        at_BD = b.select(b.broadcast_in_dim(vacant, at_BD.shape, [0]), nowhere, at_BD)
        return cx.result(scatter_points(cx, zeros, 0, at_BD, grad_BD, op="add"))
    if mode == _MEAN:
        grad_BD = b.div(grad_BD, _at_least_one(cx, size, grad_BD.dtype, grad_BD.shape))
    bags = _bags(cx, num_weights, indices, offset2bag, count, -1)
    rows_ND = gather_windows(cx, grad_BD, [0], [bags.bag], 0)
    if per_sample_weights is not None:
        factor = b.convert(per_sample_weights, rows_ND.dtype)
        rows_ND = b.mul(rows_ND, b.broadcast_in_dim(factor, rows_ND.shape, [0]))
    if scale_grad_by_freq:
        often = frequencies(cx, bags.at, num_weights, rows_ND.dtype)
        rows_ND = b.div(rows_ND, b.broadcast_in_dim(often, rows_ND.shape, [0]))
    at = drop_index(cx, bags.at, padding_idx, num_weights)
    return cx.result(scatter_windows(cx, zeros, [0], [at], 0, updates=rows_ND, op="add"))


@lowers(aten._embedding_bag_dense_backward.default)
def embedding_bag_dense_backward(
    cx: LowerContext,
    grad: Value,
    indices: Value,
    offset2bag: Value,
    bag_size: Value,
    maximum_indices: Value,
    num_weights: int,
    scale_grad_by_freq: bool,
    mode: int,
    per_sample_weights: Value | None,
    padding_idx: int = -1,
) -> Value:
    return _bag_backward(
        cx,
        grad,
        indices,
        offset2bag,
        bag_size,
        maximum_indices,
        num_weights,
        scale_grad_by_freq,
        mode,
        per_sample_weights,
        padding_idx,
    )


@lowers(aten._embedding_bag_backward.default)
def embedding_bag_backward(
    cx: LowerContext,
    grad: Value,
    indices: Value,
    offsets: Value,
    offset2bag: Value,
    bag_size: Value,
    maximum_indices: Value,
    num_weights: int,
    scale_grad_by_freq: bool,
    mode: int,
    sparse: bool,
    per_sample_weights: Value | None,
    padding_idx: int = -1,
) -> Value:
    if sparse:
        raise LoweringMissing("no sparse gradients.", op=str(cx.op), hint="use sparse=False.")
    n = indices.shape[0]
    if n and offset2bag.type.numel == 0:  # the forward left it out
        offset2bag = _bag_of(cx, offsets, min(offsets.shape[0], grad.shape[0]), n)
    return _bag_backward(
        cx,
        grad,
        indices,
        offset2bag,
        bag_size,
        maximum_indices,
        num_weights,
        scale_grad_by_freq,
        mode,
        per_sample_weights,
        padding_idx,
    )


@lowers(aten._embedding_bag_per_sample_weights_backward.default)
def embedding_bag_per_sample_weights_backward(
    cx: LowerContext,
    grad: Value,
    weight: Value,
    indices: Value,
    offsets: Value,
    offset2bag: Value,
    mode: int,
    padding_idx: int = -1,
) -> Value:
    b, n = cx.b, indices.shape[0]
    if n == 0 or grad.type.numel == 0:
        return b.constant(0, cx.out.dtype, cx.out.shape)
    if offset2bag.type.numel == 0:
        offset2bag = _bag_of(cx, offsets, grad.shape[0], n)
    bags = _bags(cx, weight.shape[0], indices, offset2bag, grad.shape[0], padding_idx)
    rows, grads = (
        b.convert(gather_windows(cx, x, [0], [at], 0), cx.compute_dtype)
        for x, at in ((weight, bags.at), (grad, bags.bag))
    )
    dots = b.reduce_op("add", b.mul(rows, grads), 0, [1])
    if 0 <= padding_idx < weight.shape[0]:
        live = b.compare("LT", bags.live, b.constant(bags.count, bags.live.dtype, (n,)))
        dots = b.select(live, dots, b.constant(0, dots.dtype, dots.shape))
    return cx.result(dots)
