"""View ops inside graphs (decompositions, whole compiled graphs), where they are values like any other.

Eagerly they never get here: a view of a device tensor is metadata (csrc/dispatch/views.cpp).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torch_tpu.ir.builder import Value
from torch_tpu.lowering import views
from torch_tpu.lowering.promote import norm_dim
from torch_tpu.lowering.registry import LowerContext, lowers, register

aten = torch.ops.aten


def _reshape(cx: LowerContext, self: Value, *_: Any, **__: Any) -> Value:
    return cx.b.reshape(self, cx.out.shape)


def _identity(cx: LowerContext, self: Value, *_: Any, **__: Any) -> Value:
    return self


for _op in (
    aten.view.default,
    aten._reshape_alias.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.unsqueeze.default,
):
    register(_op, _reshape)
for _op in (aten.alias.default, aten.detach.default, aten.lift_fresh.default):
    register(_op, _identity)


@lowers(aten.permute.default)
def permute(cx: LowerContext, self: Value, dims: Sequence[int]) -> Value:
    return cx.b.transpose(self, [norm_dim(d, self.rank) for d in dims])


@lowers(aten.transpose.int)
def transpose(cx: LowerContext, self: Value, dim0: int, dim1: int) -> Value:
    perm = list(range(self.rank))
    if perm:
        a, z = norm_dim(dim0, self.rank), norm_dim(dim1, self.rank)
        perm[a], perm[z] = perm[z], perm[a]
    return cx.b.transpose(self, perm)


@lowers(aten.t.default)
def t(cx: LowerContext, self: Value) -> Value:
    return cx.b.transpose(self, list(reversed(range(self.rank))))


@lowers(aten.expand.default)
def expand(cx: LowerContext, self: Value, size: Sequence[int], *, implicit: bool = False) -> Value:
    return cx.b.broadcast_to(self, cx.out.shape)


def _clamped(index: int, size: int) -> int:
    return min(max(index + size if index < 0 else index, 0), size)


@lowers(aten.slice.Tensor)
def slice_tensor(
    cx: LowerContext, self: Value, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Value:
    dim = norm_dim(dim, self.rank)
    size = self.shape[dim]
    lo = _clamped(0 if start is None else start, size)
    hi = max(lo, _clamped(size if end is None else end, size))
    return cx.b.slice_dim(self, dim, lo, hi, step)


@lowers(aten.select.int)
def select(cx: LowerContext, self: Value, dim: int, index: int) -> Value:
    dim = norm_dim(dim, self.rank)
    index = index % self.shape[dim]
    return cx.b.reshape(cx.b.slice_dim(self, dim, index, index + 1), cx.out.shape)


def _pieces(cx: LowerContext, self: Value, dim: int, sizes: Sequence[int]) -> list[Value]:
    dim = norm_dim(dim, self.rank)
    at, out = 0, []
    for n in sizes:
        out.append(cx.b.slice_dim(self, dim, at, at + n))
        at += n
    return out


@lowers(aten.split.Tensor)
def split(cx: LowerContext, self: Value, split_size: int, dim: int = 0) -> list[Value]:
    return _pieces(cx, self, dim, [o.shape[norm_dim(dim, self.rank)] for o in cx.outs])


@lowers(aten.split_with_sizes.default)
def split_with_sizes(cx: LowerContext, self: Value, split_sizes: Sequence[int], dim: int = 0) -> list[Value]:
    return _pieces(cx, self, dim, split_sizes)


@lowers(aten.unbind.int)
def unbind(cx: LowerContext, self: Value, dim: int = 0) -> list[Value]:
    parts = _pieces(cx, self, dim, [1] * self.shape[norm_dim(dim, self.rank)])
    return [cx.b.reshape(p, o.shape) for p, o in zip(parts, cx.outs, strict=True)]


@lowers(aten.as_strided.default)
def as_strided(
    cx: LowerContext, self: Value, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
) -> Value:
    view = views.View(self.dtype, tuple(size), tuple(stride), 0, kind="gather", dims=(self.type.numel,), covers=False)
    return views.read(cx.b, self, view, [cx.b.constant(storage_offset or 0, torch.int64)])


@lowers(aten.as_strided_scatter.default)
def as_strided_scatter(
    cx: LowerContext,
    self: Value,
    src: Value,
    size: Sequence[int],
    stride: Sequence[int],
    storage_offset: int | None = None,
) -> Value:
    base = cx.b.reshape(self, (self.type.numel,))
    view = views.View(self.dtype, tuple(size), tuple(stride), 0, kind="gather", dims=base.shape, covers=False)
    written = views.write(cx.b, base, view, src, [cx.b.constant(storage_offset or 0, torch.int64)])
    return cx.b.reshape(written, self.shape)


@lowers(aten.diagonal.default)
def diagonal(cx: LowerContext, self: Value, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Value:
    a, z = norm_dim(dim1, self.rank), norm_dim(dim2, self.rank)
    strides = list(views.contiguous_strides(self.shape))
    start = offset * strides[z] if offset >= 0 else -offset * strides[a]
    rest = [d for d in range(self.rank) if d not in (a, z)]
    stride = [*(strides[d] for d in rest), strides[a] + strides[z]]
    view = views.View(self.dtype, cx.out.shape, tuple(stride), 0, kind="gather", dims=(self.type.numel,), covers=False)
    return views.read(cx.b, self, view, [cx.b.constant(start, torch.int64)])


@lowers(aten.unfold.default)
def unfold(cx: LowerContext, self: Value, dimension: int, size: int, step: int) -> Value:
    strides = list(views.contiguous_strides(self.shape))
    dim = norm_dim(dimension, self.rank)
    stride = [*strides, strides[dim]] if self.rank else [1]
    if self.rank:
        stride[dim] *= step
    view = views.View(self.dtype, cx.out.shape, tuple(stride), 0, kind="gather", dims=(self.type.numel,), covers=False)
    return views.read(cx.b, self, view, [cx.b.constant(0, torch.int64)])


@lowers(aten.view_as_real.default)
def view_as_real(cx: LowerContext, self: Value) -> Value:
    return cx.b.reshape(views.retype(cx.b, self, cx.out.dtype), cx.out.shape)


@lowers(aten.view_as_complex.default)
def view_as_complex(cx: LowerContext, self: Value) -> Value:
    return cx.b.reshape(views.retype(cx.b, self, cx.out.dtype), cx.out.shape)


@lowers(aten.view.dtype)
def view_dtype(cx: LowerContext, self: Value, dtype: torch.dtype) -> Value:
    return cx.b.reshape(views.retype(cx.b, self, dtype), cx.out.shape)


@lowers(aten._conj.default)
def conj(cx: LowerContext, self: Value) -> Value:
    return cx.b.complex(cx.b.real(self), cx.b.neg(cx.b.imag(self))) if self.dtype.is_complex else self


@lowers(aten._neg_view.default)
def neg_view(cx: LowerContext, self: Value) -> Value:
    return cx.b.neg(self)
