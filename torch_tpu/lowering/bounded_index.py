"""The bounded forms of indexing, convolutions and pools; see bounded.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import sympy
import torch
from torch.fx import Node

from torch_tpu.ir.builder import Value
from torch_tpu.lowering.bounded import (
    ONE,
    Bounded,
    Dim,
    Factor,
    Lowering,
    bounded,
    dim_of,
    is_prefix,
    is_whole,
    lowest,
    need_whole,
    size_of,
    whole,
)
from torch_tpu.lowering.size_math import Unbounded, expression

aten = torch.ops.aten


# ---- indexing


def _from_the_end(g: Lowering, index: Bounded, size: sympy.Expr) -> Bounded:
    """Indices with negative ones counted from the true end."""
    if not size.free_symbols:
        return index
    b, v = g.b, index.value
    n = b.broadcast_to(b.convert(g.sizes.value(size), v.dtype), v.shape)
    negative = b.compare("LT", v, b.constant(0, v.dtype, v.shape))
    return replace(index, value=b.select(negative, b.add(v, n), v))


@bounded(aten.embedding.default)
def _embedding(g: Lowering, node: Node, weight: Bounded, indices: Bounded, *args: Any, **kwargs: Any) -> Bounded:
    (out,) = g.emit(aten.embedding.default, node.meta["val"], (g.prefix(weight, [0]), indices, *args), kwargs)
    return Bounded(out, (*indices.dims, *weight.dims[1:]))


@bounded(aten.embedding_dense_backward.default)
def _embedding_backward(g: Lowering, node: Node, grad: Bounded, indices: Bounded, *args: Any) -> Bounded:
    inner = grad.rank - indices.rank
    column = Bounded(_behind(g, indices.value, inner), (*indices.dims, *[ONE] * inner))
    (grad, spread), _ = g.align([grad, column], grad.value.shape)
    index = Bounded(g.b.reshape(spread.value, indices.value.shape), spread.dims[: indices.rank])
    filled = g.fill(grad, range(indices.rank), 0), g.fill(index, None, 0)
    return whole(g.emit(aten.embedding_dense_backward.default, node.meta["val"], (*filled, *args), {})[0])


def _behind(g: Lowering, x: Value, ones: int) -> Value:
    """``x`` with ``ones`` dims of size 1 behind its own."""
    return g.b.reshape(x, (*x.shape, *[1] * ones))


@bounded(aten.index_select.default)
def _index_select(g: Lowering, node: Node, x: Bounded, dim: int, index: Bounded) -> Bounded:
    dim = dim_of(dim, x.rank)
    x = g.prefix(x, [dim])
    (out,) = g.emit(aten.index_select.default, node.meta["val"], (x, dim, index), {})
    return Bounded(out, (*x.dims[:dim], index.dims[0] if index.rank else ONE, *x.dims[dim + 1 :]))


@bounded(aten.gather.default)
def _gather(g: Lowering, node: Node, x: Bounded, dim: int, index: Bounded, *, sparse_grad: bool = False) -> Bounded:
    dim = dim_of(dim, x.rank)
    x, index = g.prefix(x), g.prefix(index)
    (out,) = g.emit(aten.gather.default, node.meta["val"], (x, dim, index), {})
    return Bounded(out, index.dims)


@bounded(aten.index.Tensor)
def _index(g: Lowering, node: Node, x: Bounded, indices: Sequence[Bounded | None]) -> Bounded:
    named = [d for d, i in enumerate(indices) if i is not None]
    given = [i for i in indices if i is not None]
    if any(i.dtype == torch.bool for i in given):
        raise Unbounded("a mask as an index")
    x = g.prefix(x, named)
    shape = torch.broadcast_shapes(*(i.value.shape for i in given))
    aligned, dims = g.align(given, shape)
    wrapped = [_from_the_end(g, i, size_of(x, d)) for d, i in zip(named, aligned, strict=True)]
    full: list[Bounded | None] = [None] * len(indices)
    for d, i in zip(named, wrapped, strict=True):
        full[d] = i
    (out,) = g.emit(aten.index.Tensor, node.meta["val"], (x, full), {})
    rest = [d for d in range(x.rank) if d not in named]
    together = named == list(range(named[0], named[-1] + 1))
    front = [d for d in rest if together and d < named[0]]
    back = [d for d in rest if d not in front]
    return Bounded(out, (*(x.dims[d] for d in front), *dims, *(x.dims[d] for d in back)))


@bounded(
    aten.scatter.src, aten.scatter.value, aten.scatter_add.default, aten.scatter_reduce.two, aten.scatter.reduce,
)  # fmt: skip
def _scatter(
    g: Lowering, node: Node, x: Bounded, dim: int, index: Bounded, src: Any, *args: Any, **kwargs: Any
) -> Bounded:
    """What lies behind the indices goes to a row of its own."""
    b, dim = g.b, dim_of(dim, x.rank)
    x, index = g.prefix(x), g.prefix(index)
    if not all(n <= m or d == dim for d, (n, m) in enumerate(zip(index.value.shape, x.value.shape, strict=True))):
        raise Unbounded("indices beyond the bounds of what they write to")
    n = x.value.shape[dim]
    high = [int(d == dim) for d in range(x.rank)]
    wide = b.pad(x.value, b.constant(0, x.dtype), [0] * x.rank, high)
    src = g.prefix(src) if isinstance(src, Bounded) else src
    (out,) = g.emit_as(node.target, [wide.type], (wide, dim, g.fill(index, None, n), src, *args), kwargs)  # type: ignore[arg-type]
    return replace(x, value=b.slice_dim(out, dim, 0, n))


@bounded(aten.index_put.default, aten._unsafe_index_put.default)
def _index_put(
    g: Lowering, node: Node, x: Bounded, indices: Sequence[Bounded | None], values: Bounded, accumulate: bool = False
) -> Bounded:
    if not accumulate or any(i is None or i.dtype == torch.bool for i in indices):
        raise Unbounded("a write through indices")
    named = list(range(len(indices)))
    x = g.prefix(x)
    given = [i for i in indices if i is not None]
    shape = torch.broadcast_shapes(*(i.value.shape for i in given))
    aligned, dims = g.align(given, shape)
    full = [g.fill(_from_the_end(g, i, size_of(x, d)), None, 0) for d, i in zip(named, aligned, strict=True)]
    want = (*dims, *x.dims[len(indices) :])
    values = Bounded(g.b.broadcast_to(values.value, (*shape, *x.value.shape[len(indices) :])), want) \
        if all(is_whole(d) for d in values.dims) else g.prefix(values)  # fmt: skip
    if values.dims != want and not all(is_prefix(d) for d in want):
        raise Unbounded("a write through indices of another layout")
    filled = g.fill(values, range(len(dims)), 0)
    (out,) = g.emit(node.target, node.meta["val"], (x, full, filled, True), {})  # type: ignore[arg-type]
    return Bounded(out, x.dims)


# ---- convolution, pooling and the like: along the batch


@bounded(aten.convolution.default)
def _convolution(g: Lowering, node: Node, x: Bounded, weight: Bounded, *args: Any) -> Bounded:
    need_whole(x, [1], "convolution")
    x = g.prefix(g.fill(x, range(2, x.rank), 0))
    (out,) = g.emit(aten.convolution.default, node.meta["val"], (x, weight, *args), {})
    return Bounded(out, g.prefix_dims(node.meta["val"].shape))


@bounded(aten.convolution_backward.default)
def _convolution_backward(g: Lowering, node: Node, grad: Bounded, x: Bounded, weight: Bounded, *args: Any) -> Any:
    grad, x = (g.fill(g.prefix(t), None, 0) for t in (grad, x))
    values = g.emit(aten.convolution_backward.default, node.meta["val"], (grad, x, weight, *args), {})
    dims = [None if v is None else tuple((Factor(n),) for n in v.shape) for v in values]
    return g.results(node, values, [x.dims, *dims[1:]])  # type: ignore[list-item]


def _rows_of(g: Lowering, indices: Bounded, n: Any, to: Any) -> Value:
    """Flat positions in rows of ``n`` elements as flat positions in rows of ``to``."""
    b, v = g.b, indices.value
    width, other = (b.broadcast_to(b.convert(g.sizes.value(m), v.dtype), v.shape) for m in (n, to))
    row = b.div(v, width)
    return b.add(b.mul(row, other), b.sub(v, b.mul(row, width)))


@bounded(aten.max_pool2d_with_indices.default)
def _max_pool(
    g: Lowering, node: Node, x: Bounded, kernel: Any, stride: Any = (), padding: Any = 0, dilation: Any = 1,
    ceil_mode: bool = False,
) -> Any:  # fmt: skip
    spatial = [x.rank - 2, x.rank - 1]
    if ceil_mode:
        need_whole(x, spatial, "a pool that rounds up")
    x = g.fill(g.prefix(x), spatial, lowest(x.dtype))
    val = node.meta["val"]
    args = (x, kernel, stride, padding, dilation, ceil_mode)
    values, indices = g.emit(node.target, val, args, {})  # type: ignore[arg-type]
    dims = g.prefix_dims(val[0].shape)
    if not is_whole(x.dims[-1]):
        indices = _rows_of(g, Bounded(indices, dims), x.value.shape[-1], size_of(x, x.rank - 1))
    return g.results(node, [values, indices], [dims, dims])


@bounded(aten.max_pool2d_with_indices_backward.default)
def _max_pool_backward(g: Lowering, node: Node, grad: Bounded, x: Bounded, *args: Any) -> Bounded:
    *window, ceil_mode, indices = args
    if ceil_mode:
        need_whole(x, [x.rank - 2, x.rank - 1], "a pool that rounds up")
    grad, x, indices = g.fill(g.prefix(grad), None, 0), g.prefix(x), g.prefix(indices)
    if not is_whole(x.dims[-1]):
        at = _rows_of(g, indices, size_of(x, x.rank - 1), x.value.shape[-1])
        indices = replace(indices, value=at)
    args = (grad, x, *window, ceil_mode, g.fill(indices, None, 0))
    return Bounded(g.emit(node.target, node.meta["val"], args, {})[0], x.dims)  # type: ignore[arg-type]


@bounded(
    aten.avg_pool2d.default,
    aten.avg_pool2d_backward.default, aten._adaptive_avg_pool2d.default, aten._adaptive_avg_pool2d_backward.default,
    aten.upsample_nearest2d.default, aten.upsample_bilinear2d.default, aten.native_group_norm.default,
    aten.native_group_norm_backward.default, aten.pixel_shuffle.default, aten.pixel_unshuffle.default,
    aten.native_batch_norm.default, aten._native_batch_norm_legit_no_training.default,
)  # fmt: skip
def _per_sample(g: Lowering, node: Node, *args: Any, **kwargs: Any) -> Any:
    """Samples (dim 0) do not see each other, other than in sums over all of them, where 0 counts nothing."""
    tensors = [x for x in args if isinstance(x, Bounded)]
    for x in tensors:
        need_whole(x, range(1, x.rank), str(node.target))
    if node.target is aten.native_batch_norm.default and args[5]:
        raise Unbounded("batch_norm in training")  # decomposed
    args = tuple(g.fill(g.prefix(x), None, 0) if isinstance(x, Bounded) else x for x in args)
    val = node.meta["val"]
    values = g.emit(node.target, val, args, kwargs)  # type: ignore[arg-type]
    dims: list[tuple[Dim, ...]] = []
    for t in val if isinstance(val, (tuple, list)) else [val]:
        symbolic = t is not None and t.dim() and expression(t.shape[0]).free_symbols
        dims.append(
            () if t is None else g.prefix_dims(t.shape) if symbolic else tuple((Factor(int(m)),) for m in t.shape)
        )
    return g.results(node, values, dims)
