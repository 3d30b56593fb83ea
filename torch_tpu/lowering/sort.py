"""Sorting and topk.

A sort of (value, index) pairs runs a compiled comparator on two arrays, which takes four times as long on the CPU
plugin as the sort of one integer array. So value and index are packed into one integer wherever they fit: the order
key of the value in the upper bits, the index below (which makes every element different, hence the sort stable), and
one bit that keeps the sign of -0.0, whose key is that of 0.0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from torch_tpu.ir.builder import Value
from torch_tpu.ir.types import NARROW, UNSIGNED, TensorType
from torch_tpu.lowering.promote import norm_dim
from torch_tpu.lowering.reduce import finish, reduce_max, reduce_min
from torch_tpu.lowering.registry import LowerContext, lowers

aten = torch.ops.aten

_BITS = {
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
    torch.float32: torch.int32,
    torch.float64: torch.int64,
}
# Dtypes that float32 holds exactly: the compiler has a fast topk for float32.
_FITS_FLOAT32 = frozenset({*NARROW, torch.float32, torch.bool, torch.int8, torch.uint8, torch.int16, torch.uint16})


# ---- order keys


def float_key(cx: LowerContext, x: Value) -> Value:
    """Signed integer, as wide as ``x``, in ATen's order: NaN is the largest, -0.0 and 0.0 are equal.

    Integer arithmetic only: comparisons of floats may flush denormals.
    """
    b, dtype = cx.b, _BITS[x.dtype]
    info = torch.iinfo(dtype)

    def at(value: int) -> Value:
        return b.constant(value, dtype, x.shape)

    bits = b.bitcast(x, dtype)
    size = b.and_(bits, at(info.max))
    infinity = int(torch.tensor(float("inf"), dtype=x.dtype).view(dtype))
    key = b.select(b.compare("LT", bits, at(0)), b.neg(size), size)
    return b.select(b.compare("GT", size, at(infinity)), at(info.max), key)


def float_of_key(cx: LowerContext, key: Value, dtype: torch.dtype) -> Value:
    """The inverse of `float_key`."""
    b = cx.b
    low = b.constant(torch.iinfo(key.dtype).min, key.dtype, key.shape)
    negative = b.compare("LT", key, b.constant(0, key.dtype, key.shape))
    return b.bitcast(b.select(negative, b.or_(b.neg(key), low), key), dtype)


# ---- sort


@dataclass(frozen=True, slots=True)
class _Key:
    """Order keys of at most ``bits`` bits as int64 or int32, and where the value is -0.0."""

    value: Value
    bits: int
    minus_zero: Value | None


def _key(cx: LowerContext, x: Value) -> _Key:
    b = cx.b
    if x.dtype.is_floating_point:
        bits = b.bitcast(x, _BITS[x.dtype])
        low = b.constant(torch.iinfo(bits.dtype).min, bits.dtype, bits.shape)
        return _Key(float_key(cx, x), x.dtype.itemsize * 8, b.compare("EQ", bits, low))
    if x.dtype == torch.bool:
        return _Key(x, 2, None)
    return _Key(x, torch.iinfo(x.dtype).bits + (x.dtype in UNSIGNED), None)


def _value_of(cx: LowerContext, key: Value, flag: Value | None, dtype: torch.dtype) -> Value:
    b = cx.b
    if not dtype.is_floating_point:
        return b.convert(key, dtype)
    x = float_of_key(cx, b.convert(key, _BITS[dtype]), dtype)
    if flag is None:
        return x
    return b.select(flag, b.constant(-0.0, dtype, x.shape), x)


def _packed_sort(cx: LowerContext, x: Value, dim: int, descending: bool) -> tuple[Value, Value]:
    """Sort through one integer array; the key of ``x`` has at most 33 bits and the index fits in the rest."""
    b, key = cx.b, _key(cx, x)
    spare = (x.shape[dim] - 1).bit_length() + 1
    dtype, width = (torch.int32, 32) if key.bits + spare <= 32 else (torch.int64, 64)
    shift = width - key.bits

    def at(value: int) -> Value:
        return b.constant(value, dtype, x.shape)

    k = b.convert(key.value, dtype)
    k = b.not_(k) if descending else k
    packed = b.or_(b.binary("shift_left", k, at(shift)), b.binary("shift_left", b.iota(x.shape, dim, dtype), at(1)))
    if key.minus_zero is not None:
        packed = b.or_(packed, b.convert(key.minus_zero, dtype))
    done = b.sort([packed], dim, lambda left, right: b.compare("LT", left[0], right[0]), stable=False)[0]
    k = b.binary("shift_right_arithmetic", done, at(shift))
    k = b.not_(k) if descending else k
    flag = None if key.minus_zero is None else b.convert(b.and_(done, at(1)), torch.bool)
    index = b.and_(b.binary("shift_right_logical", done, at(1)), at((1 << (shift - 1)) - 1))
    return _value_of(cx, k, flag, x.dtype), b.convert(index, torch.int64)


def _pair_sort(cx: LowerContext, x: Value, dim: int, descending: bool) -> tuple[Value, Value]:
    """Stable sort of (value, index) pairs, for values that fill 64 bits."""
    b = cx.b

    def less(left: Sequence[Value], right: Sequence[Value]) -> Value:
        lo, hi = (right[0], left[0]) if descending else (left[0], right[0])
        if x.dtype.is_floating_point:
            lo, hi = float_key(cx, lo), float_key(cx, hi)
        return b.compare("LT", lo, hi)

    dtype = torch.int32 if x.shape[dim] < 2**31 else torch.int64
    values, index = b.sort([x, b.iota(x.shape, dim, dtype)], dim, less, stable=True)
    return values, b.convert(index, torch.int64)


def _int64_sort(cx: LowerContext, x: Value, dim: int, descending: bool) -> tuple[Value, Value]:
    """Most 64-bit integers are small: if their range fits in 32 bits, sort the distances from the smallest."""
    b = cx.b
    every = range(x.rank)
    low, high = reduce_min(cx, x, every), reduce_max(cx, x, every)
    span = b.sub(high, low)  # negative if it overflows
    in_range = b.and_(
        b.compare("GE", span, b.constant(0, torch.int64)), b.compare("LT", span, b.constant(2**32, torch.int64))
    )

    def narrow() -> Sequence[Value]:
        base = b.broadcast_to(low, x.shape)
        near = b.convert(b.sub(x, base), torch.uint32)
        values, index = _packed_sort(cx, near, dim, descending)
        return b.add(b.convert(values, torch.int64), base), index

    types = [x.type, TensorType(x.shape, torch.int64)]
    values, index = b.if_(in_range, narrow, lambda: _pair_sort(cx, x, dim, descending), types)
    return values, index


def sorted_with_indices(cx: LowerContext, x: Value, dim: int, descending: bool) -> tuple[Value, Value]:
    """Stable sort in ATen's order, and the int64 positions the values come from."""
    b = cx.b
    if not x.rank or x.shape[dim] <= 1 or not x.type.numel:
        return x, b.constant(0, torch.int64, x.shape)
    wide = x.dtype in (torch.float64, torch.uint64)
    if x.dtype not in _BITS and x.dtype.is_floating_point:  # float8
        values, index = _packed_sort(cx, b.convert(x, torch.float32), dim, descending)
        return b.convert(values, x.dtype), index
    if wide or x.shape[dim] >= 2**30:
        return _pair_sort(cx, x, dim, descending)
    if x.dtype == torch.int64:
        return _int64_sort(cx, x, dim, descending)
    return _packed_sort(cx, x, dim, descending)


@lowers(aten.sort.default)
def sort(cx: LowerContext, self: Value, dim: int = -1, descending: bool = False) -> tuple[Value, Value]:
    return sorted_with_indices(cx, self, norm_dim(dim, self.rank), descending)


@lowers(aten.sort.stable)
def sort_stable(
    cx: LowerContext, self: Value, stable: bool | None, dim: int = -1, descending: bool = False
) -> tuple[Value, Value]:
    return sorted_with_indices(cx, self, norm_dim(dim, self.rank), descending)


# ---- topk


def _fast_topk(cx: LowerContext, x: Value, k: int, largest: bool) -> tuple[Value, Value]:
    """topk along the last dim of [rows, n], as the pattern that XLA turns into its own topk."""
    b = cx.b
    f = b.convert(x, torch.float32)
    f = b.select(b.is_nan(f), b.constant(float("nan"), f.dtype, f.shape), f)  # NaN of either sign is the largest
    f = f if largest else b.neg(f)
    values, index = b.sort(
        [f, b.iota(f.shape, 1, torch.int32)],
        1,
        lambda left, right: b.compare("GT", left[0], right[0], total_order=True),
        stable=True,
    )
    values, index = b.slice_dim(values, 1, 0, k), b.slice_dim(index, 1, 0, k)
    values = values if largest else b.neg(values)
    return b.convert(values, x.dtype), b.convert(index, torch.int64)


@lowers(aten.topk.default)
def topk(
    cx: LowerContext, self: Value, k: int, dim: int = -1, largest: bool = True, sorted: bool = True
) -> tuple[Value, Value]:
    b = cx.b
    if not cx.out.numel or not self.rank:
        return finish(cx, b.constant(0, self.dtype, cx.out.shape) if self.rank else self), b.constant(
            0, torch.int64, cx.outs[1].shape
        )
    dim = norm_dim(dim, self.rank)
    n = self.shape[dim]
    if self.dtype not in _FITS_FLOAT32 or k > n // 2 or n >= 2**31:
        values, index = sorted_with_indices(cx, self, dim, descending=largest)
        return b.slice_dim(values, dim, 0, k), b.slice_dim(index, dim, 0, k)
    # The pattern needs the dim to be the last of two.
    perm = [*(d for d in range(self.rank) if d != dim), dim]
    x = b.transpose(self, perm)
    rows = b.reshape(x, (x.type.numel // n, n))
    back = [perm.index(d) for d in range(self.rank)]
    values, index = (b.transpose(b.reshape(v, (*x.shape[:-1], k)), back) for v in _fast_topk(cx, rows, k, largest))
    return values, index
