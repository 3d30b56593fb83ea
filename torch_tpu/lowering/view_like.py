"""Ops that move elements without computing: cat, flip, roll, repeat, windows, diagonals, shuffles, ``*_copy`` views.

Everything is slice, pad, concatenate, reverse, reshape, transpose and broadcast; no gather.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torch_tpu.ir.builder import Value
from torch_tpu.lowering.expr import Expr
from torch_tpu.lowering.promote import Operand, norm_dim, norm_dims, scalar
from torch_tpu.lowering.registry import LowerContext, Rule, lowers, register

aten = torch.ops.aten


# ---- shared with other families


def rotate_dims(rank: int, source: int, target: int) -> list[int]:
    """Permutation that moves dim ``source`` to ``target`` and keeps the order of the others."""
    perm = [d for d in range(rank) if d != source]
    perm.insert(target, source)
    return perm


def windows(cx: LowerContext, x: Value, dim: int, size: int, step: int, dilation: int = 1) -> Value:
    """Sliding windows over ``dim``: it becomes two dims, window number and place in the window."""
    b, n = cx.b, (x.shape[dim] - (size - 1) * dilation - 1) // step + 1

    def split(v: Value, parts: tuple[int, int]) -> Value:
        return b.reshape(v, (*v.shape[:dim], *parts, *v.shape[dim + 1 :]))

    if step == size and dilation == 1:
        return split(b.slice_dim(x, dim, 0, n * size), (n, size))
    if size <= n:
        last = (n - 1) * step + 1
        parts = [split(b.slice_dim(x, dim, k * dilation, k * dilation + last, step), (n, 1)) for k in range(size)]
        return b.concatenate(parts, dim + 1)
    span = (size - 1) * dilation + 1
    parts = [split(b.slice_dim(x, dim, k * step, k * step + span, dilation), (1, size)) for k in range(n)]
    return b.concatenate(parts, dim)


def add_windows(cx: LowerContext, x: Value, dim: int, length: int, step: int, dilation: int = 1) -> Value:
    """Adjoint of `windows`: sums dims ``dim`` (window) and ``dim + 1`` (place) into one dim of ``length``."""
    b, size = cx.b, x.shape[dim + 1]

    def merge(v: Value) -> Value:
        return b.reshape(v, (*v.shape[:dim], v.shape[dim] * v.shape[dim + 1], *v.shape[dim + 2 :]))

    if dilation == 1:
        # Columns k*step … k*step+step-1 of all windows tile the dim without overlap, shifted by k*step.
        pieces = [(b.slice_dim(x, dim + 1, k, min(k + step, size)), k) for k in range(0, size, step)]
        tiles = [(merge(pad_dim(cx, p, dim + 1, 0, step - p.shape[dim + 1])), k) for p, k in pieces]
    else:
        columns = [(merge(b.slice_dim(x, dim + 1, k, k + 1)), k * dilation) for k in range(size)]
        tiles = [(pad_dim(cx, c, dim, 0, step - 1, step - 1), k) for c, k in columns]
    total: Value | None = None
    for tile, start in tiles:
        placed = pad_dim(cx, tile, dim, start, length - start - tile.shape[dim])
        total = placed if total is None else b.add(total, placed)
    assert total is not None
    return total


def pad_dim(cx: LowerContext, x: Value, dim: int, low: int, high: int, interior: int = 0) -> Value:
    """Zeros around (and between) the elements of one dim; negative ``low`` and ``high`` crop."""
    if not (low or high or interior):
        return x
    low_, high_, interior_ = ([v if d == dim else 0 for d in range(x.rank)] for v in (low, high, interior))
    return cx.b.pad(x, cx.b.constant(0, x.dtype), low_, high_, interior_)


# ---- joining and splitting


@lowers(aten.cat.default)
def cat(cx: LowerContext, tensors: Sequence[Value], dim: int = 0) -> Value:
    parts = [x for x in tensors if x.shape != (0,)]  # ATen skips legacy empty tensors of any place and dtype
    if not parts:
        return cx.b.convert(tensors[0], cx.out.dtype)
    return cx.b.concatenate([cx.b.convert(x, cx.out.dtype) for x in parts], norm_dim(dim, parts[0].rank))


@lowers(aten.stack.default, aten._stack.default)
def stack(cx: LowerContext, tensors: Sequence[Value], dim: int = 0) -> Value:
    dim = norm_dim(dim, len(cx.out.shape))
    shape = (*cx.out.shape[:dim], 1, *cx.out.shape[dim + 1 :])
    return cx.b.concatenate([cx.b.reshape(cx.b.convert(x, cx.out.dtype), shape) for x in tensors], dim)


def _pieces(cx: LowerContext, x: Value, sizes: Sequence[int], dim: int) -> list[Value]:
    start, parts = 0, []
    for size in sizes:
        parts.append(cx.b.slice_dim(x, dim, start, start + size))
        start += size
    return parts


@lowers(
    aten.split_copy.Tensor,
    aten.unsafe_split.Tensor,
)
def split_copy(cx: LowerContext, self: Value, split_size: int, dim: int = 0) -> list[Value]:
    dim = norm_dim(dim, self.rank)
    return _pieces(cx, self, [out.shape[dim] for out in cx.outs], dim)


@lowers(aten.split_with_sizes_copy.default, aten.unsafe_split_with_sizes.default)
def split_with_sizes_copy(cx: LowerContext, self: Value, split_sizes: Sequence[int], dim: int = 0) -> list[Value]:
    return _pieces(cx, self, split_sizes, norm_dim(dim, self.rank))


@lowers(aten.unbind_copy.int)
def unbind_copy(cx: LowerContext, self: Value, dim: int = 0) -> list[Value]:
    dim = norm_dim(dim, self.rank)
    parts = _pieces(cx, self, [1] * self.shape[dim], dim)
    return [cx.b.reshape(p, out.shape) for p, out in zip(parts, cx.outs, strict=True)]


@lowers(aten.block_diag.default)
def block_diag(cx: LowerContext, tensors: Sequence[Value]) -> Value:
    left, bands = 0, []
    for tensor in tensors:
        x = cx.b.reshape(cx.b.convert(tensor, cx.out.dtype), (*[1] * (2 - tensor.rank), *tensor.shape))
        bands.append(pad_dim(cx, x, 1, left, cx.out.shape[1] - left - x.shape[1]))
        left += x.shape[1]
    return cx.b.concatenate(bands, 0) if bands else cx.b.constant(0, cx.out.dtype, cx.out.shape)


# ---- padding with a constant


@lowers(aten.constant_pad_nd.default)
def constant_pad_nd(cx: LowerContext, self: Value, pad: Sequence[int], value: Operand = 0) -> Value:
    low, high = [0] * self.rank, [0] * self.rank
    for i in range(len(pad) // 2):
        low[self.rank - 1 - i], high[self.rank - 1 - i] = pad[2 * i], pad[2 * i + 1]
    return cx.b.pad(self, scalar(cx, value, self.dtype), low, high)


# ---- reordering


@lowers(aten.flip.default)
def flip(cx: LowerContext, self: Value, dims: Sequence[int]) -> Value:
    # The empty list flips nothing, unlike in reductions.
    return cx.b.reverse(self, norm_dims(dims, self.rank)) if len(dims) else self


@lowers(aten.roll.default)
def roll(cx: LowerContext, self: Value, shifts: Sequence[int], dims: Sequence[int] = []) -> Value:
    if self.type.numel == 0:
        return self
    if not len(dims):
        return cx.b.reshape(_roll(cx, cx.b.reshape(self, (self.type.numel,)), shifts[0], 0), self.shape)
    x = self
    for shift, dim in zip(shifts, dims, strict=True):
        x = _roll(cx, x, shift, norm_dim(dim, x.rank)) if x.rank else x
    return x


def _roll(cx: LowerContext, x: Value, shift: int, dim: int) -> Value:
    size = x.shape[dim]
    cut = -shift % size
    if cut == 0:
        return x
    return cx.b.concatenate([cx.b.slice_dim(x, dim, cut, size), cx.b.slice_dim(x, dim, 0, cut)], dim)


@lowers(aten.rot90.default)
def rot90(cx: LowerContext, self: Value, k: int = 1, dims: Sequence[int] = [0, 1]) -> Value:
    first, second = (norm_dim(d, self.rank) for d in dims)
    if k % 4 == 2:
        return cx.b.reverse(self, sorted((first, second)))
    if k % 4 == 0:
        return self
    perm = list(range(self.rank))
    perm[first], perm[second] = second, first
    return cx.b.transpose(cx.b.reverse(self, [second if k % 4 == 1 else first]), perm)


@lowers(aten.repeat.default)
def repeat(cx: LowerContext, self: Value, repeats: Sequence[int]) -> Value:
    lead = len(repeats) - self.rank
    sizes = [1] * lead + list(self.shape)
    shape = [n for pair in zip(repeats, sizes, strict=True) for n in pair]
    wide = cx.b.broadcast_in_dim(self, shape, [2 * (lead + d) + 1 for d in range(self.rank)])
    return cx.b.reshape(wide, cx.out.shape)


# ---- windows


@lowers(aten.unfold_copy.default)
def unfold_copy(cx: LowerContext, self: Value, dimension: int, size: int, step: int) -> Value:
    if cx.out.numel == 0:
        return cx.b.constant(0, cx.out.dtype, cx.out.shape)
    if self.rank == 0:
        return cx.b.reshape(self, cx.out.shape)
    dim = norm_dim(dimension, self.rank)
    x = windows(cx, self, dim, size, step)
    return cx.b.transpose(x, rotate_dims(x.rank, dim + 1, x.rank - 1))


@lowers(aten.unfold_backward.default)
def unfold_backward(
    cx: LowerContext, grad_in: Value, input_sizes: Sequence[int], dim: int, size: int, step: int
) -> Value:
    if grad_in.type.numel == 0:
        return cx.b.constant(0, cx.out.dtype, cx.out.shape)
    if not cx.out.shape:
        return cx.b.reshape(grad_in, ())
    dim = norm_dim(dim, len(cx.out.shape))
    grad = cx.b.convert(grad_in, cx.compute_dtype)
    grad = cx.b.transpose(grad, rotate_dims(grad.rank, grad.rank - 1, dim + 1))
    return cx.result(add_windows(cx, grad, dim, cx.out.shape[dim], step))


@lowers(aten.im2col.default)
def im2col(
    cx: LowerContext,
    self: Value,
    kernel_size: Sequence[int],
    dilation: Sequence[int],
    padding: Sequence[int],
    stride: Sequence[int],
) -> Value:
    if cx.out.numel == 0:
        return cx.b.constant(0, cx.out.dtype, cx.out.shape)
    h, w = self.rank - 2, self.rank - 1
    x = self
    for dim, p in ((h, padding[0]), (w, padding[1])):
        x = pad_dim(cx, x, dim, p, p)
    x = windows(cx, x, w, kernel_size[1], stride[1], dilation[1])  # … H W' kw
    x = windows(cx, x, h, kernel_size[0], stride[0], dilation[0])  # … H' kh W' kw
    lead = list(range(h))
    return cx.b.reshape(cx.b.transpose(x, [*lead, h + 1, h + 3, h, h + 2]), cx.out.shape)


@lowers(aten.col2im.default)
def col2im(
    cx: LowerContext,
    self: Value,
    output_size: Sequence[int],
    kernel_size: Sequence[int],
    dilation: Sequence[int],
    padding: Sequence[int],
    stride: Sequence[int],
) -> Value:
    if cx.out.numel == 0:
        return cx.b.constant(0, cx.out.dtype, cx.out.shape)
    lead = cx.out.shape[:-2]
    padded = [output_size[i] + 2 * padding[i] for i in (0, 1)]
    blocks = [(padded[i] - dilation[i] * (kernel_size[i] - 1) - 1) // stride[i] + 1 for i in (0, 1)]
    h = len(lead)
    x = cx.b.convert(self, cx.compute_dtype)
    x = cx.b.reshape(x, (*lead, *kernel_size, *blocks))
    x = cx.b.transpose(x, [*range(h), h + 2, h, h + 3, h + 1])  # … H' kh W' kw
    x = add_windows(cx, x, h + 2, padded[1], stride[1], dilation[1])
    x = add_windows(cx, x, h, padded[0], stride[0], dilation[0])
    for i, p in enumerate(padding):
        x = pad_dim(cx, x, h + i, -p, -p)
    return cx.result(x)


# ---- shuffles


def _shuffle(cx: LowerContext, x: Value, split: Sequence[int], perm: Sequence[int]) -> Value:
    """Reshape to ``split``, transpose, reshape to the result; dims before the last three stay."""
    lead = x.shape[:-3]
    n = len(lead)
    x = cx.b.reshape(x, (*lead, *split))
    return cx.b.reshape(cx.b.transpose(x, [*range(n), *(n + p for p in perm)]), cx.out.shape)


@lowers(aten.pixel_shuffle.default)
def pixel_shuffle(cx: LowerContext, self: Value, upscale_factor: int) -> Value:
    (c, h, w), r = self.shape[-3:], upscale_factor
    return _shuffle(cx, self, (c // (r * r), r, r, h, w), (0, 3, 1, 4, 2))


@lowers(aten.pixel_unshuffle.default)
def pixel_unshuffle(cx: LowerContext, self: Value, downscale_factor: int) -> Value:
    (c, h, w), r = self.shape[-3:], downscale_factor
    return _shuffle(cx, self, (c, h // r, r, w // r, r), (0, 2, 4, 1, 3))


@lowers(aten.channel_shuffle.default)
def channel_shuffle(cx: LowerContext, self: Value, groups: int) -> Value:
    n, c, *rest = self.shape
    x = cx.b.reshape(self, (n, groups, c // groups, *rest))
    return cx.b.reshape(cx.b.transpose(x, [0, 2, 1, *range(3, x.rank)]), cx.out.shape)


# ---- copies of views


@lowers(
    aten.alias_copy.default,
    aten.detach_copy.default,
    aten.lift.default,
    aten.lift_fresh_copy.default,
)
def same(cx: LowerContext, self: Value) -> Value:
    return self


@lowers(aten.clone.default)
def clone(cx: LowerContext, self: Value, *, memory_format: torch.memory_format | None = None) -> Value:
    return self  # strides are the runtime's business


@lowers(aten.view_copy.default, aten._reshape_copy.default, aten._unsafe_view.default)
def view_copy(cx: LowerContext, self: Value, size: Sequence[int]) -> Value:
    return cx.b.reshape(self, cx.out.shape)


def _reshaped(*names: str) -> Rule:
    """A rule that only reshapes to the result, for views whose arguments do not matter once its shape is known."""
    if names == ("dim",):
        return lambda cx, self, dim: cx.b.reshape(self, cx.out.shape)
    return lambda cx, self: cx.b.reshape(self, cx.out.shape)


register(aten.squeeze_copy.default, _reshaped())
for _op in (aten.squeeze_copy.dim, aten.squeeze_copy.dims, aten.unsqueeze_copy.default):
    register(_op, _reshaped("dim"))


@lowers(aten.expand_copy.default)
def expand_copy(cx: LowerContext, self: Value, size: Sequence[int], *, implicit: bool = False) -> Value:
    return cx.result(self)


@lowers(aten.permute_copy.default)
def permute_copy(cx: LowerContext, self: Value, dims: Sequence[int]) -> Value:
    return cx.b.transpose(self, [norm_dim(d, self.rank) for d in dims])


@lowers(aten.transpose_copy.int)
def transpose_copy(cx: LowerContext, self: Value, dim0: int, dim1: int) -> Value:
    if self.rank < 2:
        return self
    perm = list(range(self.rank))
    perm[dim0], perm[dim1] = perm[dim1], perm[dim0]
    return cx.b.transpose(self, perm)


@lowers(aten.t_copy.default)
def t_copy(cx: LowerContext, self: Value) -> Value:
    return cx.b.transpose(self, list(range(self.rank))[::-1])


@lowers(aten.slice_copy.Tensor)
def slice_copy(
    cx: LowerContext, self: Value, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Value:
    dim = norm_dim(dim, self.rank)
    lo, hi = slice_bounds(self.shape[dim], start, end)
    return cx.b.slice_dim(self, dim, lo, hi, step)


@lowers(aten.narrow_copy.default)
def narrow_copy(cx: LowerContext, self: Value, dim: int, start: int, length: int) -> Value:
    dim = norm_dim(dim, self.rank)
    start += self.shape[dim] if start < 0 else 0
    return cx.b.slice_dim(self, dim, start, start + length)


@lowers(aten.select_copy.int)
def select_copy(cx: LowerContext, self: Value, dim: int, index: int) -> Value:
    dim = norm_dim(dim, self.rank)
    index %= self.shape[dim]
    return cx.b.reshape(cx.b.slice_dim(self, dim, index, index + 1), cx.out.shape)


@lowers(aten.view_as_real_copy.default)
def view_as_real_copy(cx: LowerContext, self: Value) -> Value:
    parts = [cx.b.reshape(p, (*self.shape, 1)) for p in (cx.b.real(self), cx.b.imag(self))]
    return cx.b.concatenate(parts, self.rank)


@lowers(aten.view_as_complex_copy.default)
def view_as_complex_copy(cx: LowerContext, self: Value) -> Value:
    last = self.rank - 1
    re, im = (cx.b.reshape(cx.b.slice_dim(self, last, i, i + 1), cx.out.shape) for i in (0, 1))
    return cx.b.complex(re, im)


# ---- parts of a tensor: gradients of views, and their scatters


def slice_bounds(size: int, start: int | None, end: int | None) -> tuple[int, int]:
    """Python slice bounds as ATen clamps them; ``start <= end``."""
    lo, hi, _ = slice(start, end).indices(size)
    return lo, max(lo, hi)


@lowers(aten.slice_backward.default)
def slice_backward(
    cx: LowerContext, grad_output: Value, input_sizes: Sequence[int], dim: int, start: int, end: int, step: int
) -> Value:
    dim = norm_dim(dim, len(input_sizes))
    lo, _ = slice_bounds(input_sizes[dim], start, end)
    return _place(cx, grad_output, dim, lo, step, input_sizes[dim])


def _place(cx: LowerContext, x: Value, dim: int, start: int, step: int, size: int) -> Value:
    """``x`` at ``start, start + step, …`` of a zero dim of ``size``."""
    n = x.shape[dim]
    if n == 0:
        return cx.b.constant(0, x.dtype, (*x.shape[:dim], size, *x.shape[dim + 1 :]))
    return pad_dim(cx, x, dim, start, size - start - (n - 1) * step - 1, step - 1)


@lowers(aten.select_backward.default)
def select_backward(cx: LowerContext, grad_output: Value, input_sizes: Sequence[int], dim: int, index: int) -> Value:
    dim = norm_dim(dim, len(input_sizes))
    shape = (*input_sizes[:dim], 1, *input_sizes[dim + 1 :])
    return _place(cx, cx.b.reshape(grad_output, shape), dim, index % input_sizes[dim], 1, input_sizes[dim])


@lowers(aten.slice_scatter.default)
def slice_scatter(
    cx: LowerContext,
    self: Value,
    src: Value,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> Value:
    dim = norm_dim(dim, self.rank)
    size = self.shape[dim]
    lo, hi = slice_bounds(size, start, end)
    shape = (*self.shape[:dim], -(-(hi - lo) // step), *self.shape[dim + 1 :])
    src = cx.b.broadcast_to(cx.b.convert(src, self.dtype), shape)
    if src.type.numel == 0:
        return self
    if step == 1 or shape[dim] == 1:
        return _update(cx, self, src, dim, lo)
    place = Expr(cx.b, cx.b.iota(self.shape, dim, torch.int32))
    hit = (place >= lo) & (place < hi) & ((place - lo) % step).eq(0)
    return cx.b.select(hit.v, _place(cx, src, dim, lo, step, size), self)


def _update(cx: LowerContext, x: Value, part: Value, dim: int, start: int) -> Value:
    if part.shape == x.shape:
        return part
    zero, at = cx.b.constant(0, torch.int32), cx.b.constant(start, torch.int32)
    return cx.b.dynamic_update_slice(x, part, [at if d == dim else zero for d in range(x.rank)])


@lowers(aten.select_scatter.default)
def select_scatter(cx: LowerContext, self: Value, src: Value, dim: int, index: int) -> Value:
    dim = norm_dim(dim, self.rank)
    shape = (*self.shape[:dim], 1, *self.shape[dim + 1 :])
    src = cx.b.reshape(cx.b.convert(src, self.dtype), shape)
    return _update(cx, self, src, dim, index % self.shape[dim]) if self.type.numel else self


# ---- diagonals


def _to_last(rank: int, dim1: int, dim2: int) -> tuple[list[int], list[int]]:
    """Permutation that puts ``dim1``, ``dim2`` last, and its inverse."""
    dim1, dim2 = dim1 % rank, dim2 % rank
    perm = [*(d for d in range(rank) if d not in (dim1, dim2)), dim1, dim2]
    return perm, [perm.index(d) for d in range(rank)]


def _first_of_diagonal(columns: int, offset: int) -> int:
    """Place of the first element of a diagonal in a row-major matrix."""
    return offset if offset >= 0 else -offset * columns


def take_diagonal(cx: LowerContext, x: Value, offset: int, dim1: int, dim2: int) -> Value:
    """``torch.diagonal``: in row-major order its elements are ``columns + 1`` apart, so a strided slice."""
    perm, _ = _to_last(x.rank, dim1, dim2)
    x = cx.b.transpose(x, perm)
    *lead, rows, columns = x.shape
    n = max(0, min(rows, columns - offset) if offset >= 0 else min(rows + offset, columns))
    if n == 0:
        return cx.b.constant(0, x.dtype, (*lead, 0))
    first = _first_of_diagonal(columns, offset)
    flat = cx.b.reshape(x, (*lead, rows * columns))
    return cx.b.slice_dim(flat, len(lead), first, first + (n - 1) * (columns + 1) + 1, columns + 1)


def put_diagonal(cx: LowerContext, x: Value, shape: Sequence[int], offset: int, dim1: int, dim2: int) -> Value:
    """Zeros of ``shape`` with ``x`` on a diagonal: one pad with gaps of ``columns``."""
    perm, back = _to_last(len(shape), dim1, dim2)
    *lead, rows, columns = (shape[p] for p in perm)
    if x.type.numel == 0:
        return cx.b.constant(0, x.dtype, shape)
    flat = _place(cx, x, len(lead), _first_of_diagonal(columns, offset), columns + 1, rows * columns)
    return cx.b.transpose(cx.b.reshape(flat, (*lead, rows, columns)), back)


@lowers(aten.diagonal_copy.default)
def diagonal_copy(cx: LowerContext, self: Value, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Value:
    return take_diagonal(cx, self, offset, dim1, dim2)


@lowers(aten.diagonal_backward.default)
def diagonal_backward(
    cx: LowerContext, grad_output: Value, input_sizes: Sequence[int], offset: int, dim1: int, dim2: int
) -> Value:
    return put_diagonal(cx, grad_output, input_sizes, offset, dim1, dim2)


@lowers(aten.diag_embed.default)
def diag_embed(cx: LowerContext, self: Value, offset: int = 0, dim1: int = -2, dim2: int = -1) -> Value:
    return put_diagonal(cx, self, cx.out.shape, offset, dim1, dim2)


@lowers(aten.diagonal_scatter.default)
def diagonal_scatter(cx: LowerContext, self: Value, src: Value, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Value:
    placed = put_diagonal(cx, cx.b.convert(src, self.dtype), self.shape, offset, dim1, dim2)
    return cx.b.select(off_diagonal(cx, self.shape, "EQ", offset, dim1, dim2), placed, self)


def off_diagonal(
    cx: LowerContext, shape: Sequence[int], direction: str, offset: int, dim1: int = -2, dim2: int = -1
) -> Value:
    """Bools of ``shape``: where ``column - row`` compares so to ``offset``."""
    row, column = (cx.b.iota(shape, d % len(shape), torch.int32) for d in (dim1, dim2))
    return cx.b.compare(direction, column, cx.b.add(row, cx.b.constant(offset, torch.int32, shape)))


@lowers(aten.tril.default)
def tril(cx: LowerContext, self: Value, diagonal: int = 0) -> Value:
    keep = off_diagonal(cx, self.shape, "LE", diagonal)
    return cx.b.select(keep, self, cx.b.constant(0, self.dtype, self.shape))


@lowers(aten.triu.default)
def triu(cx: LowerContext, self: Value, diagonal: int = 0) -> Value:
    keep = off_diagonal(cx, self.shape, "GE", diagonal)
    return cx.b.select(keep, self, cx.b.constant(0, self.dtype, self.shape))
