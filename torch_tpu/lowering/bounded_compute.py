"""The bounded forms of reductions, of ops along one dim, of normalizations and products; see bounded.py."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import sympy
import torch
from torch.fx import Node

from torch_tpu.ir.builder import Number, Value
from torch_tpu.ir.types import TensorType
from torch_tpu.lowering.bounded import (
    ONE,
    Bounded,
    Dim,
    Factor,
    Lowering,
    bounded,
    dim_of,
    dims_of,
    highest,
    is_prefix,
    is_whole,
    lowest,
    need_whole,
    size_of,
    whole,
)
from torch_tpu.lowering.size_math import Unbounded

aten = torch.ops.aten


# ---- reductions


def _reduced(x: Bounded, dims: Sequence[int], keepdim: bool) -> tuple[Dim, ...]:
    return tuple(ONE if d in dims else dim for d, dim in enumerate(x.dims) if keepdim or d not in dims)


def _reduction(fill: Callable[[torch.dtype], Number]) -> Callable[..., Any]:
    def rule(g: Lowering, node: Node, x: Bounded, dim: Any = None, keepdim: bool = False, **kwargs: Any) -> Any:
        dims = dims_of(dim, x.rank)
        filled = g.fill(x, dims, fill(x.dtype))
        named = [a.name for a in node.target._schema.arguments]  # type: ignore[union-attr]
        if "dim" in named:
            kwargs["dim"] = dim if isinstance(dim, int) else dims
        if "keepdim" in named:
            kwargs["keepdim"] = keepdim
        values = g.emit(node.target, node.meta["val"], (filled,), kwargs)  # type: ignore[arg-type]
        return g.results(node, values, [_reduced(x, dims, keepdim)] * len(values))

    return rule


for _ops, _fill in (
    ((aten.sum.default, aten.sum.dim_IntList, aten.nansum.default), lambda t: 0),
    ((aten.any.default, aten.any.dim, aten.any.dims), lambda t: 0),
    ((aten.all.default, aten.all.dim, aten.all.dims), lambda t: 1),
    ((aten.prod.default, aten.prod.dim_int), lambda t: 1),
    ((aten.amax.default, aten.max.default), lowest),
    ((aten.amin.default, aten.min.default), highest),
    ((aten.logsumexp.default,), lowest),
):  # fmt: skip
    bounded(*_ops)(_reduction(_fill))


@bounded(aten.argmax.default, aten.argmin.default)
def _arg(g: Lowering, node: Node, x: Bounded, dim: int | None = None, keepdim: bool = False) -> Bounded:
    fill = (lowest if node.target is aten.argmax.default else highest)(x.dtype)
    if dim is None and x.rank > 1:
        n = x.value.type.numel
        size = math.prod((size_of(x, d) for d in range(x.rank)), start=sympy.Integer(1))
        x = Bounded(g.flat(x, range(x.rank), n), ((Factor(n, size),),))
        if keepdim:
            raise Unbounded("argmax over all dims with keepdim")
    dims = dims_of(dim, x.rank)
    x = g.fill(g.prefix(x, dims), dims, fill)
    (out,) = g.emit(node.target, node.meta["val"], (x, dim, keepdim), {})  # type: ignore[arg-type]
    return Bounded(out, _reduced(x, dims, keepdim))


@bounded(aten.max.dim, aten.min.dim)
def _extreme(g: Lowering, node: Node, x: Bounded, dim: int, keepdim: bool = False) -> Any:
    fill = (lowest if node.target is aten.max.dim else highest)(x.dtype)
    dims = dims_of(dim, x.rank)
    x = g.fill(g.prefix(x, dims), dims, fill)
    values = g.emit(node.target, node.meta["val"], (x, dim, keepdim), {})  # type: ignore[arg-type]
    return g.results(node, values, [_reduced(x, dims, keepdim)] * 2)


@bounded(aten.linalg_vector_norm.default)
def _norm(
    g: Lowering, node: Node, x: Bounded, ord: Any = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> Bounded:
    dims = dims_of(dim, x.rank)
    if not isinstance(ord, (int, float)) or ord <= 0:
        need_whole(x, dims, "a norm of order 0 or less")
    filled = g.fill(x, dims, 0)
    (out,) = g.emit(aten.linalg_vector_norm.default, node.meta["val"], (filled, ord, dims, keepdim), {"dtype": dtype})
    return Bounded(out, _reduced(x, dims, keepdim))


def _count(g: Lowering, x: Bounded, dims: Sequence[int], dtype: torch.dtype) -> Value:
    """How many true elements a reduction over ``dims`` takes, rank 0."""
    n = math.prod((size_of(x, d) for d in dims), start=sympy.Integer(1))
    return g.b.convert(g.sizes.value(n), dtype)


def _compute(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def _mean_of(g: Lowering, x: Bounded, dims: Sequence[int]) -> Bounded:
    """Mean over ``dims``, which stay with one element, in the dtype of computation."""
    b, kind = g.b, _compute(x.dtype)
    filled = g.fill(x, dims, 0)
    shape = tuple(1 if d in dims else n for d, n in enumerate(x.value.shape))
    out = [TensorType(shape, kind)]
    (total,) = g.emit_as(aten.sum.dim_IntList, out, (replace(filled, value=b.convert(filled.value, kind)), dims, True))
    mean = b.div(total, b.broadcast_to(_count(g, x, dims, kind), shape))
    return Bounded(mean, _reduced(x, dims, True))


def _finish(g: Lowering, x: Bounded, dims: Sequence[int], keepdim: bool, dtype: torch.dtype) -> Bounded:
    """A reduction that kept ``dims`` as its op promises it."""
    kept = [d for d in range(x.rank) if keepdim or d not in dims]
    value = g.b.reshape(g.b.convert(x.value, dtype), [x.value.shape[d] for d in kept])
    return Bounded(value, tuple(x.dims[d] for d in kept))


@bounded(aten.mean.default, aten.mean.dim)
def _mean(g: Lowering, node: Node, x: Bounded, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Bounded:
    dims, out = dims_of(dim, x.rank), node.meta["val"].dtype
    x = replace(x, value=g.b.convert(x.value, out))
    return _finish(g, _mean_of(g, x, dims), dims, keepdim, out)


@bounded(aten.var.correction, aten.std.correction, aten.var_mean.correction, aten.std_mean.correction)
def _var(g: Lowering, node: Node, x: Bounded, dim: Any = None, *, correction: Any = None, keepdim: bool = False) -> Any:
    b, dims, val = g.b, dims_of(dim, x.rank), node.meta["val"]
    kind = _compute(x.dtype)
    mean = _mean_of(g, x, dims)
    centered = b.sub(b.convert(x.value, kind), b.broadcast_to(mean.value, x.value.shape))
    squares = g.fill(Bounded(b.mul(centered, centered), x.dims), dims, 0)
    (total,) = g.emit_as(aten.sum.dim_IntList, [mean.value.type], (squares, dims, True))
    taken = b.constant(1 if correction is None else correction, kind)
    count = b.maximum(b.sub(_count(g, x, dims, kind), taken), b.constant(0, kind))
    result = b.div(total, b.broadcast_to(count, total.shape))
    if node.target in (aten.std.correction, aten.std_mean.correction):
        result = b.unary("sqrt", result)
    dtype = (val[0] if isinstance(val, (tuple, list)) else val).dtype
    spread = _finish(g, replace(mean, value=result), dims, keepdim, dtype)
    return [spread, _finish(g, mean, dims, keepdim, dtype)] if isinstance(val, (tuple, list)) else spread


# ---- along one dim


def _along(fill: Callable[[torch.dtype], Number] | None, *names: str) -> Callable[..., Any]:
    """An op along ``dim`` that keeps the sizes: ``fill`` behind the true elements first, in all of its tensors.

    None: an element depends on those before it only, so what is behind does not matter if it is behind.
    """

    def rule(g: Lowering, node: Node, *args: Any, **kwargs: Any) -> Any:
        schema = [a.name for a in node.target._schema.arguments]  # type: ignore[union-attr]
        given = dict(zip(schema, args, strict=False)) | kwargs
        tensors = [k for k, v in given.items() if isinstance(v, Bounded)]
        xs, dims = g.align([given[k] for k in tensors], given[tensors[0]].value.shape)
        dim = dim_of(given.get("dim", -1), xs[0].rank)
        for k, x in zip(tensors, xs, strict=True):
            given[k] = g.prefix(x, [dim]) if fill is None else g.fill(x, [dim], fill(x.dtype))
        if fill is None:
            dims = given[tensors[0]].dims
        values = g.emit(node.target, node.meta["val"], (), given)  # type: ignore[arg-type]
        return g.results(node, values, [dims] * len(values))

    return rule


bounded(aten._softmax.default, aten._safe_softmax.default, aten._log_softmax.default)(_along(lowest))
bounded(aten._softmax_backward_data.default, aten._log_softmax_backward_data.default)(_along(lambda t: 0))
bounded(aten.cumsum.default, aten.cumprod.default, aten.cummax.default, aten.cummin.default, aten.logcumsumexp.default)(
    _along(None)
)


@bounded(aten.sort.default, aten.sort.stable)
def _sort(g: Lowering, node: Node, x: Bounded, dim: int = -1, descending: bool = False, *, stable: Any = None) -> Any:
    dim = dim_of(dim, x.rank)
    last = lowest(x.dtype) if descending else (math.nan if x.dtype.is_floating_point else highest(x.dtype))
    x = g.fill(g.prefix(x, [dim]), [dim], last)
    given = {"stable": True, "dim": dim, "descending": descending}  # stable: true elements stay before equal ones
    values = g.emit_as(aten.sort.stable, [x.value.type, TensorType(x.value.shape, torch.int64)], (x,), given)
    return g.results(node, values, [x.dims] * 2)


@bounded(aten.topk.default)
def _topk(g: Lowering, node: Node, x: Bounded, k: Any, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
    dim = dim_of(dim, x.rank)
    if not isinstance(k, int):
        raise Unbounded("topk of a symbolic number of elements")
    values, indices = _sort(g, node, x, dim, largest)
    out = []
    for part in (values, indices):
        cut = g.b.slice_dim(part.value, dim, 0, k)
        out.append(Bounded(cut, (*part.dims[:dim], (Factor(k),), *part.dims[dim + 1 :])))
    return out


# ---- normalization


@bounded(aten.native_layer_norm.default, aten._fused_rms_norm.default)
def _layer_norm(g: Lowering, node: Node, x: Bounded, shape: Sequence[Any], *args: Any) -> Any:
    inner = range(x.rank - len(shape), x.rank)
    need_whole(x, inner, "layer_norm")
    values = g.emit(node.target, node.meta["val"], (x, shape, *args), {})  # type: ignore[arg-type]
    return g.results(node, values, [x.dims, *[_reduced(x, inner, True)] * (len(values) - 1)])


@bounded(aten.native_layer_norm_backward.default, aten._fused_rms_norm_backward.default)
def _layer_norm_backward(g: Lowering, node: Node, grad: Bounded, x: Bounded, shape: Sequence[Any], *rest: Any) -> Any:
    inner = range(x.rank - len(shape), x.rank)
    need_whole(x, inner, "layer_norm")
    (grad, x), dims = g.align([grad, x], x.value.shape)
    stats = [t for t in rest if isinstance(t, Bounded) and t.rank == x.rank]
    row = tuple(ONE if d in inner else dim for d, dim in enumerate(dims))
    known = {id(t): g.fill(_placed(g, t, row), None, 0) for t in stats}
    rest = tuple(known.get(id(t), t) for t in rest)
    args = (g.fill(grad, None, 0), g.fill(x, None, 0), shape, *rest)
    values = g.emit(node.target, node.meta["val"], args, {})  # type: ignore[arg-type]
    whole_rows = [tuple((Factor(n),) for n in v.shape) if v is not None else () for v in values]
    return g.results(node, values, [dims, *whole_rows[1:]])


def _placed(g: Lowering, x: Bounded, dims: tuple[Dim, ...]) -> Bounded:
    """``x`` with its true elements where ``dims`` has them."""
    (x, _), found = g.align([x, Bounded(g.b.constant(0, x.dtype, x.value.shape), dims)], x.value.shape)
    if found != dims and not all(is_prefix(d) for d in dims):
        raise Unbounded("two layouts of one size")
    return x


# ---- products


def _contracted(g: Lowering, x: Bounded, dx: int, y: Bounded, dy: int) -> tuple[Bounded, Bounded]:
    x, y = g.agree(x, dx, y, dy)
    return g.fill(x, [dx], 0), g.fill(y, [dy], 0)


@bounded(aten.mm.default)
def _mm(g: Lowering, node: Node, x: Bounded, y: Bounded) -> Bounded:
    x, y = _contracted(g, x, 1, y, 0)
    (out,) = g.emit(aten.mm.default, node.meta["val"], (x, y), {})
    return Bounded(out, (x.dims[0], y.dims[1]))


@bounded(aten.bmm.default)
def _bmm(g: Lowering, node: Node, x: Bounded, y: Bounded) -> Bounded:
    x, y = g.agree(x, 0, y, 0)
    x, y = _contracted(g, x, 2, y, 1)
    (out,) = g.emit(aten.bmm.default, node.meta["val"], (x, y), {})
    batch = y.dims[0] if is_whole(x.dims[0]) else x.dims[0]
    return Bounded(out, (batch, x.dims[1], y.dims[2]))


def _biased(op: Any, batched: bool) -> Callable[..., Any]:
    def rule(g: Lowering, node: Node, bias: Bounded, x: Bounded, y: Bounded, **kwargs: Any) -> Bounded:
        if batched:
            x, y = g.agree(x, 0, y, 0)
        x, y = _contracted(g, x, x.rank - 1, y, y.rank - 2)
        dims = (*x.dims[:-1], y.dims[-1])
        shape = g.type_of(node.meta["val"]).shape
        out = Bounded(g.b.constant(0, bias.dtype, shape), dims)
        (bias, out), places = g.align([bias, out], shape)
        if out.dims != dims:
            raise Unbounded("a bias of another layout than the product")
        return Bounded(g.emit(op, node.meta["val"], (bias, x, y), kwargs)[0], places)

    return rule


bounded(aten.addmm.default)(_biased(aten.addmm.default, batched=False))
bounded(aten.baddbmm.default)(_biased(aten.baddbmm.default, batched=True))


@bounded(aten.mv.default)
def _mv(g: Lowering, node: Node, x: Bounded, y: Bounded) -> Bounded:
    x, y = _contracted(g, x, 1, y, 0)
    return Bounded(g.emit(aten.mv.default, node.meta["val"], (x, y), {})[0], (x.dims[0],))


@bounded(aten.dot.default)
def _dot(g: Lowering, node: Node, x: Bounded, y: Bounded) -> Bounded:
    x, y = _contracted(g, x, 0, y, 0)
    return whole(g.emit(aten.dot.default, node.meta["val"], (x, y), {})[0])
