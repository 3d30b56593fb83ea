"""The bounded forms of factories, views and of what moves elements; see bounded.py."""

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
    Factor,
    Lowering,
    bounded,
    dim_of,
    dims_of,
    is_whole,
    pointwise,
    size_of,
)
from torch_tpu.lowering.size_math import Unbounded, expression

aten = torch.ops.aten


# ---- elementwise without the tag

for _op in (
    aten._to_copy.default, aten.detach.default, aten.alias.default, aten.lift_fresh_copy.default, aten._conj.default,
    aten.softplus_backward.default, aten.hardtanh_backward.default, aten.leaky_relu_backward.default,
    aten.elu_backward.default, aten.hardsigmoid_backward.default, aten.hardswish_backward.default,
    aten.lift.default, aten.lift_fresh.default, aten.hardswish.default, aten.rsub.Tensor, aten.floor_divide.default,
    aten.floor_divide.Scalar, aten.complex.default, aten.polar.default, aten.masked_fill.Tensor, aten.zero.default,
    aten._prelu_kernel.default, aten.logit_backward.default, aten.log_sigmoid_backward.default, aten.fill.Scalar,
    aten.fill.Tensor,
):  # fmt: skip
    bounded(_op)(pointwise)


@bounded(
    aten.zeros_like.default, aten.ones_like.default, aten.full_like.default, aten.empty_like.default,
)  # fmt: skip
def _like(g: Lowering, node: Node, x: Bounded, *args: Any, **kwargs: Any) -> Any:
    return g.results(node, g.emit(node.target, node.meta["val"], (x, *args), kwargs), [x.dims])  # type: ignore[arg-type]


@bounded(
    aten.zeros.default, aten.ones.default, aten.full.default, aten.empty.memory_format, aten.new_zeros.default,
    aten.new_ones.default, aten.new_full.default, aten.new_empty.default, aten.empty_strided.default,
    aten.new_empty_strided.default, aten.scalar_tensor.default,
)  # fmt: skip
def _factory(g: Lowering, node: Node, *args: Any, **kwargs: Any) -> Any:
    """One value everywhere."""
    val = node.meta["val"]
    return g.results(node, g.emit(node.target, val, args, kwargs), [g.prefix_dims(val.shape)])  # type: ignore[arg-type]


@bounded(aten.arange.default, aten.arange.start, aten.arange.start_step)
def _arange(g: Lowering, node: Node, *args: Any, **_: Any) -> Bounded:
    b, val = g.b, node.meta["val"]
    start, step = (0, 1) if len(args) == 1 else (args[0], args[2] if len(args) > 2 else 1)
    shape = g.type_of(val).shape
    kind = torch.float32 if val.dtype.is_floating_point else torch.int64

    def number(n: Any) -> Value:
        return b.broadcast_to(b.convert(g.sizes.number(n), kind), shape)

    value = b.add(number(start), b.mul(b.iota(shape, 0, kind), number(step)))
    return Bounded(b.convert(value, val.dtype), g.prefix_dims(val.shape))


# ---- views


@bounded(
    aten.view.default, aten._unsafe_view.default, aten.unsqueeze.default, aten.squeeze.default, aten.squeeze.dim,
    aten.squeeze.dims, aten._reshape_alias.default, aten.reshape.default,
)  # fmt: skip
def _view(g: Lowering, node: Node, x: Bounded, *_: Any, **__: Any) -> Bounded:
    return g.reshape(x, g.prefix_dims(node.meta["val"].shape))


def _permuted(g: Lowering, x: Bounded, perm: Sequence[int]) -> Bounded:
    return Bounded(g.b.transpose(x.value, perm), tuple(x.dims[d] for d in perm))


@bounded(aten.permute.default)
def _permute(g: Lowering, node: Node, x: Bounded, perm: Sequence[int]) -> Bounded:
    return _permuted(g, x, [dim_of(d, x.rank) for d in perm])


@bounded(aten.transpose.int)
def _transpose(g: Lowering, node: Node, x: Bounded, d0: int, d1: int) -> Bounded:
    perm = list(range(x.rank))
    d0, d1 = dim_of(d0, x.rank), dim_of(d1, x.rank)
    perm[d0], perm[d1] = d1, d0
    return _permuted(g, x, perm)


@bounded(aten.t.default)
def _t(g: Lowering, node: Node, x: Bounded) -> Bounded:
    return _permuted(g, x, list(range(x.rank))[::-1])


@bounded(aten.expand.default)
def _expand(g: Lowering, node: Node, x: Bounded, size: Any, *, implicit: bool = False) -> Bounded:
    want = g.prefix_dims(node.meta["val"].shape)
    offset = len(want) - x.rank
    dims = [
        d if i < offset or x.value.shape[i - offset] != d[0].extent else x.dims[i - offset] for i, d in enumerate(want)
    ]
    return g.checked(g.b.broadcast_to(x.value, [d[0].extent for d in want]), tuple(dims))


def _start(g: Lowering, x: Bounded, dim: int, start: Any) -> int | Value:
    """Where a slice begins: a number if all programs agree on it. Negative ones count from the true end."""
    e = expression(0 if start is None else start)
    if not e.free_symbols:
        if e >= 0:
            return int(e)
        if is_whole(x.dims[dim]):
            return max(int(e) + x.value.shape[dim], 0)
        e = e + size_of(x, dim)
    return g.sizes.value(e)


def window(g: Lowering, x: Bounded, dim: int, start: int | Value, extent: int, step: int = 1) -> Value:
    """``extent`` elements of ``x`` along ``dim`` from ``start``; what lies outside of it is undefined."""
    b, n = g.b, x.value.shape[dim]
    span = (extent - 1) * step + 1 if extent else 0
    missing = extent if isinstance(start, Value) else max(start + span - n, 0)
    value = x.value
    if missing:
        high = [missing if d == dim else 0 for d in range(x.rank)]
        value = b.pad(value, b.constant(0, x.dtype), [0] * x.rank, high)
    if isinstance(start, int):
        return b.slice_dim(value, dim, start, start + span, step)
    if step != 1:
        raise Unbounded("a slice with a step that starts at a symbolic size")
    zero = b.constant(0, torch.int64)
    sizes = [extent if d == dim else m for d, m in enumerate(value.shape)]
    return b.dynamic_slice(value, [start if d == dim else zero for d in range(x.rank)], sizes)


@bounded(aten.slice.Tensor)
def _slice(
    g: Lowering, node: Node, x: Bounded, dim: int = 0, start: Any = None, end: Any = None, step: int = 1
) -> Bounded:
    dim = dim_of(dim, x.rank)
    out = g.prefix_dims(node.meta["val"].shape)[dim]
    if out[0].extent == x.value.shape[dim] and expression(node.meta["val"].shape[dim]) == size_of(x, dim) and step == 1:
        return x
    x = g.prefix(x, [dim])
    value = window(g, x, dim, _start(g, x, dim, start), out[0].extent, step)
    return g.checked(value, (*x.dims[:dim], out, *x.dims[dim + 1 :]))


@bounded(aten.select.int)
def _select(g: Lowering, node: Node, x: Bounded, dim: int, index: Any) -> Bounded:
    dim = dim_of(dim, x.rank)
    x = g.prefix(x, [dim])
    value = window(g, x, dim, _start(g, x, dim, index), 1)
    rest = [d for d in range(x.rank) if d != dim]
    return Bounded(g.b.reshape(value, [value.shape[d] for d in rest]), tuple(x.dims[d] for d in rest))


def _put(g: Lowering, x: Bounded, part: Bounded, dim: int, start: int | Value) -> Value:
    """``x`` with the true elements of ``part`` at ``start`` along ``dim``; those of ``x`` behind them stay."""
    b = g.b
    n, m = x.value.shape[dim], part.value.shape[dim]
    high = [m if d == dim else 0 for d in range(x.rank)]
    none = [0] * x.rank
    zero = b.constant(0, torch.int64)
    at = [(b.constant(start, torch.int64) if isinstance(start, int) else start) if d == dim else zero
          for d in range(x.rank)]  # fmt: skip
    wide = b.pad(x.value, b.constant(0, x.dtype), none, high)
    new = part.value
    mask = g.mask(part.dims, [dim])
    if mask is not None:
        new = b.select(mask, new, b.dynamic_slice(wide, at, part.value.shape))
    return b.slice_dim(b.dynamic_update_slice(wide, new, at), dim, 0, n)


@bounded(aten.slice_scatter.default)
def _slice_scatter(
    g: Lowering, node: Node, x: Bounded, src: Bounded, dim: int = 0, start: Any = None, end: Any = None, step: int = 1
) -> Bounded:
    if step != 1:
        raise Unbounded("a write to a slice with a step")
    dim = dim_of(dim, x.rank)
    x, src = g.prefix(x), g.prefix(src)
    return replace(x, value=_put(g, x, src, dim, _start(g, x, dim, start)))


@bounded(aten.select_scatter.default)
def _select_scatter(g: Lowering, node: Node, x: Bounded, src: Bounded, dim: int, index: Any) -> Bounded:
    dim = dim_of(dim, x.rank)
    x, src = g.prefix(x), g.prefix(src)
    shape = [*src.value.shape[:dim], 1, *src.value.shape[dim:]]
    part = Bounded(g.b.reshape(src.value, shape), (*src.dims[:dim], ONE, *src.dims[dim:]))
    return replace(x, value=_put(g, x, part, dim, _start(g, x, dim, index)))


@bounded(aten.slice_backward.default)
def _slice_backward(
    g: Lowering, node: Node, grad: Bounded, sizes: Any, dim: int, start: Any, end: Any, step: int
) -> Bounded:
    out: Bounded = _slice_scatter(g, node, _zeros(g, node), grad, dim, start, end, step)
    return out


@bounded(aten.select_backward.default)
def _select_backward(g: Lowering, node: Node, grad: Bounded, sizes: Any, dim: int, index: Any) -> Bounded:
    out: Bounded = _select_scatter(g, node, _zeros(g, node), grad, dim, index)
    return out


def _zeros(g: Lowering, node: Node) -> Bounded:
    val = node.meta["val"]
    return Bounded(g.b.constant(0, val.dtype, g.type_of(val).shape), g.prefix_dims(val.shape))


@bounded(aten.split_with_sizes.default)
def _split(g: Lowering, node: Node, x: Bounded, sizes: Sequence[Any], dim: int = 0) -> list[Bounded]:
    dim = dim_of(dim, x.rank)
    x = g.prefix(x, [dim])
    out: list[Bounded] = []
    at = sympy.Integer(0)
    for t, n in zip(node.meta["val"], sizes, strict=True):
        part = g.prefix_dims(t.shape)[dim]
        value = window(g, x, dim, _start(g, x, dim, at), part[0].extent)
        out.append(g.checked(value, (*x.dims[:dim], part, *x.dims[dim + 1 :])))
        at = at + expression(n)
    return out


@bounded(aten.unbind.int)
def _unbind(g: Lowering, node: Node, x: Bounded, dim: int = 0) -> list[Bounded]:
    return [_select(g, node, x, dim, i) for i in range(len(node.meta["val"]))]


@bounded(aten.cat.default)
def _cat(g: Lowering, node: Node, xs: Sequence[Bounded], dim: int = 0) -> Bounded:
    b, val = g.b, node.meta["val"]
    dim = dim_of(dim, val.dim())
    xs = [x for x in xs if x.value.shape != (0,) or val.dim() == 1]
    for d in range(val.dim()):
        if d == dim or len({x.dims[d] for x in xs}) > 1:
            xs = [g.prefix(x, [d]) for x in xs]
    want = g.prefix_dims(val.shape)[dim]
    values = [b.convert(x.value, val.dtype) for x in xs]
    dims = tuple(
        want if d == dim else max((x.dims[d] for x in xs), key=lambda n: not is_whole(n)) for d in range(val.dim())
    )
    out = values[0] if len(values) == 1 else b.concatenate(values, dim)
    if len(xs) > 1 and not all(is_whole(x.dims[dim]) for x in xs[:-1]):
        zero, at = b.constant(0, torch.int64), sympy.Integer(0)
        for x, v in zip(xs, values, strict=True):  # each over what lies behind the one before
            where = g.sizes.value(at)
            out = b.dynamic_update_slice(out, v, [where if d == dim else zero for d in range(val.dim())])
            at = at + size_of(x, dim)
    return g.checked(out, dims)


@bounded(aten.stack.default)
def _stack(g: Lowering, node: Node, xs: Sequence[Bounded], dim: int = 0) -> Bounded:
    dim = dim_of(dim, node.meta["val"].dim())
    aligned, dims = g.align(xs, xs[0].value.shape)
    (out,) = g.emit(aten.stack.default, node.meta["val"], (aligned, dim), {})
    return Bounded(out, (*dims[:dim], (Factor(len(xs)),), *dims[dim:]))


@bounded(aten.constant_pad_nd.default)
def _pad(g: Lowering, node: Node, x: Bounded, pad: Sequence[Any], value: Any = 0) -> Bounded:
    b, val = g.b, node.meta["val"]
    if not isinstance(value, (int, float)):
        raise Unbounded("a pad value that is not a number")
    want = g.prefix_dims(val.shape)
    for i in range(len(pad) // 2):
        dim = x.rank - 1 - i
        low, high = pad[2 * i], pad[2 * i + 1]
        if low == 0 and high == 0:
            continue
        if not isinstance(low, int) or not isinstance(high, int):
            raise Unbounded("padding of a symbolic amount")
        if low < 0:
            x = g.prefix(x, [dim])
            (end,) = x.dims[dim]
            end = Factor(end.extent + low, None if end.size is None else end.size + low)
            x = g.checked(window(g, x, dim, -low, end.extent), (*x.dims[:dim], (end,), *x.dims[dim + 1 :]))
            low = 0
        x = g.fill(g.prefix(x, [dim]), [dim], value)
        more = want[dim][0].extent - x.value.shape[dim] - low
        if more < 0:
            cut = g.b.slice_dim(x.value, dim, 0, x.value.shape[dim] + more)
            x, more = Bounded(cut, x.dims), 0
        lows, highs = ([n if d == dim else 0 for d in range(x.rank)] for n in (low, more))
        out = b.pad(x.value, b.constant(value, x.dtype), lows, highs)
        x = Bounded(out, (*x.dims[:dim], want[dim], *x.dims[dim + 1 :]))
    return x


@bounded(aten.tril.default, aten.triu.default)
def _triangle(g: Lowering, node: Node, x: Bounded, diagonal: int = 0) -> Bounded:
    x = g.prefix(x, [x.rank - 2, x.rank - 1])
    (out,) = g.emit(node.target, node.meta["val"], (x, diagonal), {})  # type: ignore[arg-type]
    return Bounded(out, x.dims)


@bounded(aten.flip.default)
def _flip(g: Lowering, node: Node, x: Bounded, dims: Sequence[int]) -> Bounded:
    for d in dims_of(dims, x.rank):
        x = g.prefix(x, [d])
        turned = Bounded(g.b.reverse(x.value, [d]), x.dims)
        n = x.value.shape[d]
        behind = g.b.sub(g.b.constant(n, torch.int64), g.sizes.value(size_of(x, d)))
        x = replace(x, value=window(g, turned, d, behind, n))
    return x
