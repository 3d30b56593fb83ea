"""Tensors as views of the buffers behind them: reads, and writes that give the buffer's next contents.

The plan (csrc/storage/view_plan.h) says how a tensor lies in its buffer; this module emits it. The update of a write is
shaped to the buffer's dims, never the buffer: a reshape of the buffer would cost its donation.

    buffer --retype--> elements of the tensor --reshape to dims--> window --> reshape, transpose, broadcast --> tensor
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from torch_tpu.ir.builder import Builder, Value


@dataclass(frozen=True, slots=True)
class Window:
    """``size`` elements of a dim, ``step`` apart; ``sliced``: not the whole dim, it starts at an operand."""

    size: int
    step: int
    sliced: bool


@dataclass(frozen=True, slots=True)
class View:
    """One tensor argument. ``kind`` is whole, box or gather; ``dims`` and ``windows`` are the plan's."""

    dtype: torch.dtype
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    slot: int
    conj: bool = False
    neg: bool = False
    wrapped: bool = False
    written: bool = False
    kind: str = "whole"
    dims: tuple[int, ...] = ()
    windows: tuple[Window, ...] = ()
    covers: bool = True

    @property
    def order(self) -> list[int]:
        """Dims with elements apart in memory, outermost first."""
        real = [d for d, (n, s) in enumerate(zip(self.sizes, self.strides, strict=True)) if n > 1 and s]
        return sorted(real, key=lambda d: -self.strides[d])

    @property
    def num_starts(self) -> int:
        """How many start operands the plan reads."""
        return 1 if self.kind == "gather" else sum(w.sliced for w in self.windows)


def contiguous_strides(sizes: Sequence[int]) -> tuple[int, ...]:
    """Row-major strides as ATen gives them (a dim of size 0 counts as 1)."""
    strides, step = [], 1
    for n in reversed(sizes):
        strides.append(step)
        step *= max(n, 1)
    return tuple(reversed(strides))


def retype(b: Builder, x: Value, dtype: torch.dtype) -> Value:
    """The elements of a buffer read as ``dtype``. Only bits that mean something else change: bool and complex do not
    bitcast in StableHLO, so they go through uint8 and through real and imaginary parts."""
    if x.dtype == dtype:
        return x
    if x.dtype.is_complex:
        parts = [b.reshape(p, (*x.shape, 1)) for p in (b.real(x), b.imag(x))]
        return retype(b, b.concatenate(parts, x.rank), dtype)
    if dtype.is_complex:
        x = retype(b, x, torch.float64 if dtype == torch.complex128 else torch.float32)
        whole = x.type.numel // 2  # an odd last element belongs to no complex number
        x = b.reshape(b.slice_dim(b.reshape(x, (x.type.numel,)), 0, 0, 2 * whole), (whole, 2))
        parts = [b.reshape(b.slice_dim(x, 1, i, i + 1), (x.shape[0],)) for i in range(2)]
        return b.complex(parts[0], parts[1])
    if x.dtype == torch.bool:
        return retype(b, b.convert(x, torch.uint8), dtype)
    if dtype == torch.bool:
        return b.convert(retype(b, x, torch.uint8), torch.bool)
    ratio = dtype.itemsize // x.dtype.itemsize
    if ratio > 1:
        whole = x.type.numel // ratio
        x = b.slice_dim(b.reshape(x, (x.type.numel,)), 0, 0, whole * ratio)
        x = b.reshape(x, (whole, ratio))
    return b.bitcast(x, dtype)


def _indices(b: Builder, view: View, start: Value) -> Value:
    """Flat element index of every element of the view, as a column."""
    index = b.broadcast_to(start, view.sizes)
    for d, (n, s) in enumerate(zip(view.sizes, view.strides, strict=True)):
        if n > 1 and s:
            step = b.constant(s, index.dtype, view.sizes)
            index = b.add(index, b.mul(b.iota(view.sizes, d, index.dtype), step))
    return b.reshape(index, (index.type.numel, 1))


def _starts(b: Builder, view: View, starts: Sequence[Value]) -> list[Value]:
    given = iter(starts)
    zero = b.constant(0, starts[0].dtype if starts else torch.int32)
    return [next(given) if w.sliced else zero for w in view.windows]


def _window_sizes(view: View) -> list[int]:
    return [(w.size - 1) * w.step + 1 for w in view.windows]


def read(b: Builder, base: Value, view: View, starts: Sequence[Value]) -> Value:
    """The tensor's value, from the buffer's."""
    if view.kind == "whole":
        x = b.reshape(retype(b, base, view.dtype), view.sizes)
    elif 0 in view.sizes:
        x = b.constant(0, view.dtype, view.sizes)
    elif view.kind == "gather":
        flat = b.reshape(retype(b, base, view.dtype), view.dims)
        column = _indices(b, view, starts[0])
        x = b.gather(
            flat, column, offset_dims=[], collapsed=[0], start_index_map=[0], index_vector_dim=1, slice_sizes=[1]
        )
        x = b.reshape(x, view.sizes)
    else:
        x = _read_box(b, base, view, starts)
    if view.conj and x.dtype.is_complex:
        x = b.complex(b.real(x), b.neg(b.imag(x)))
    return b.neg(x) if view.neg else x


def _read_box(b: Builder, base: Value, view: View, starts: Sequence[Value]) -> Value:
    x = b.reshape(retype(b, base, view.dtype), view.dims)
    if any(w.sliced for w in view.windows):
        x = b.dynamic_slice(x, _starts(b, view, starts), _window_sizes(view))
    x = b.slice(x, [0] * x.rank, x.shape, [w.step for w in view.windows])
    order = view.order
    x = b.reshape(x, [view.sizes[d] for d in order])
    ascending = sorted(order)
    x = b.transpose(x, [order.index(d) for d in ascending])
    return b.broadcast_in_dim(x, view.sizes, ascending)


def write(b: Builder, base: Value, view: View, update: Value, starts: Sequence[Value]) -> Value:
    """The buffer's next contents after ``update`` (of the view's sizes and dtype) is written to the view."""
    if view.conj and update.dtype.is_complex:
        update = b.complex(b.real(update), b.neg(b.imag(update)))
    if view.neg:
        update = b.neg(update)
    if 0 in view.sizes:
        return base
    after = _write(b, base, view, update, starts)
    rest = base.type.numel * base.dtype.itemsize % view.dtype.itemsize if view.dims else 0
    if rest == 0:
        return after
    tail = _flat_bytes(b, base)  # bytes behind the last whole element
    tail = b.slice_dim(tail, 0, tail.type.numel - rest, tail.type.numel)
    return b.concatenate([_flat_bytes(b, after), tail], 0)


def _flat_bytes(b: Builder, x: Value) -> Value:
    x = retype(b, x, torch.uint8)
    return b.reshape(x, (x.type.numel,))


def _write(b: Builder, base: Value, view: View, update: Value, starts: Sequence[Value]) -> Value:
    if view.kind == "whole":
        return update
    for d, (n, s) in enumerate(zip(view.sizes, view.strides, strict=True)):
        if n > 1 and s == 0:  # only for fill_: the same value again and again
            update = b.slice_dim(update, d, 0, 1)
    view = replace(view, sizes=update.shape)
    if view.covers and view.kind == "box":
        return _physical(b, update, view.sizes, view.strides)
    if base.dtype == torch.uint8 and update.dtype == torch.bool:  # the rest of the buffer may hold more than 0 and 1
        update = b.convert(update, torch.uint8)
    base = b.reshape(retype(b, base, update.dtype), view.dims)
    if view.kind == "gather":
        flat = b.reshape(update, (update.type.numel,))
        return b.scatter(
            [base],
            _indices(b, view, starts[0]),
            [flat],
            lambda _, new: new,
            update_window_dims=[],
            inserted=[0],
            scatter_dims=[0],
            index_vector_dim=1,
            unique=not _may_overlap(view),
        )[0]
    return _write_box(b, base, view, update, starts)


def _may_overlap(view: View) -> bool:
    extent = 0
    for d in reversed(view.order):
        if view.strides[d] <= extent:
            return True
        extent += view.strides[d] * (view.sizes[d] - 1)
    return False


def _write_box(b: Builder, base: Value, view: View, update: Value, starts: Sequence[Value]) -> Value:
    order = view.order
    ascending = sorted(order)
    x = b.reshape(update, [view.sizes[d] for d in ascending])
    x = b.reshape(b.transpose(x, [ascending.index(d) for d in order]), [w.size for w in view.windows])
    at = _starts(b, view, starts)
    if any(w.step > 1 for w in view.windows):
        interior = [w.step - 1 for w in view.windows]
        none = [0] * x.rank
        mask = b.pad(b.constant(1, torch.bool, x.shape), b.constant(0, torch.bool), none, none, interior)
        x = b.pad(x, b.constant(0, x.dtype), none, none, interior)
        x = b.select(mask, x, b.dynamic_slice(base, at, _window_sizes(view)))
    return b.dynamic_update_slice(base, x, at)


def physical_order(sizes: Sequence[int], strides: Sequence[int]) -> list[int] | None:
    """Dims from outermost to innermost in memory, or None if the strides leave gaps or overlap."""
    order = sorted(range(len(sizes)), key=lambda d: (-strides[d], d))
    step = 1
    for d in reversed(order):
        if sizes[d] != 1 and strides[d] != step:
            return None
        step *= sizes[d]
    return order


def _physical(b: Builder, x: Value, sizes: Sequence[int], strides: Sequence[int]) -> Value:
    """``x`` laid out as memory has it: dims from outermost to innermost, or as they are if that is row-major."""
    real = [d for d in range(len(sizes)) if sizes[d] != 1]
    order = sorted(real, key=lambda d: -strides[d])
    if order == real:
        return x
    x = b.reshape(x, [sizes[d] for d in real])
    return b.transpose(x, [real.index(d) for d in order])


def store_new(b: Builder, x: Value, strides: Sequence[int]) -> tuple[Value, tuple[int, ...]]:
    """A new tensor's buffer and strides: those wanted if they are dense, else row-major."""
    if 0 in x.shape or physical_order(x.shape, strides) is None:
        return x, tuple(strides) if 0 in x.shape else contiguous_strides(x.shape)
    return _physical(b, x, x.shape, strides), tuple(strides)
