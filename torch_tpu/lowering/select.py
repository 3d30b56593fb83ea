"""Order statistics (kthvalue, median), mode, binary search and histograms.

The k-th smallest element is found without sorting: its order key is built bit by bit from the top, each bit decided by
counting the smaller elements. That is one pass a bit, and each pass is a plain reduction.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from torch_tpu.ir.builder import Number, Value
from torch_tpu.ir.types import NARROW, UNSIGNED, compute_dtype
from torch_tpu.lowering.promote import Operand, common_dtype, norm_dim, scalar
from torch_tpu.lowering.reduce import finish, first_position, reduce_max, reduce_min, reduce_sum, spread
from torch_tpu.lowering.registry import LowerContext, Rule, lowers, register
from torch_tpu.lowering.scan import scan
from torch_tpu.lowering.sort import float_key, float_of_key, sorted_with_indices

aten = torch.ops.aten

# Up to this many boundaries, comparing with each of them beats a binary search; XLA's loop gets slow above.
_COMPARE_ALL = 32
_UNSIGNED_OF = {8: torch.uint8, 16: torch.uint16, 32: torch.uint32, 64: torch.uint64}


# ---- order statistics


def _unsigned_key(cx: LowerContext, x: Value) -> Value:
    """Order key of ``x`` as an unsigned integer of its width."""
    b = cx.b
    key = float_key(cx, x) if x.dtype.is_floating_point else x
    if key.dtype in UNSIGNED:
        return key
    info = torch.iinfo(key.dtype)
    top = b.constant(info.min, key.dtype, key.shape)
    return b.bitcast(b.binary("xor", key, top), _UNSIGNED_OF[info.bits])


def _value_of_key(cx: LowerContext, key: Value, dtype: torch.dtype) -> Value:
    """The inverse of `_unsigned_key`."""
    b = cx.b
    if dtype in UNSIGNED:
        return key
    signed = {8: torch.int8, 16: torch.int16, 32: torch.int32, 64: torch.int64}[torch.iinfo(key.dtype).bits]
    raw = b.bitcast(key, signed)
    raw = b.binary("xor", raw, b.constant(torch.iinfo(signed).min, signed, raw.shape))
    return float_of_key(cx, raw, dtype) if dtype.is_floating_point else raw


def _kth_smallest(cx: LowerContext, x: Value, k: Value, dim: int) -> tuple[Value, Value]:
    """k-th smallest along ``dim`` (k counts from 1, one k a line) and the first position that holds it."""
    b, dtype = cx.b, x.dtype
    if dtype.is_floating_point and dtype in NARROW and dtype not in (torch.float16, torch.bfloat16):
        x = b.convert(x, torch.bfloat16)  # float8
    key = _unsigned_key(cx, b.convert(x, torch.uint8) if dtype == torch.bool else x)
    lines = k.shape

    def step(state: Sequence[Value]) -> Sequence[Value]:
        found, bit = state
        tried = b.or_(found, b.broadcast_to(bit, lines))
        below = b.convert(b.compare("LT", key, spread(cx, tried, key, [dim])), k.dtype)
        reached = b.compare("GE", reduce_sum(cx, below, [dim]), k)
        return b.select(reached, found, tried), b.binary("shift_right_logical", bit, b.constant(1, bit.dtype))

    zero = b.constant(0, key.dtype, lines)
    top = b.constant(1 << (torch.iinfo(key.dtype).bits - 1), key.dtype)
    kth = b.while_([zero, top], lambda s: b.compare("NE", s[1], b.constant(0, key.dtype)), step)[0]
    index = first_position(cx, b.compare("EQ", key, spread(cx, kth, key, [dim])), dim)
    value = b.convert(_value_of_key(cx, kth, torch.uint8 if dtype == torch.bool else x.dtype), dtype)
    return value, index


def _count_dtype(n: int) -> torch.dtype:
    return torch.int32 if n < 2**31 else torch.int64


@lowers(aten.kthvalue.default)
def kthvalue(cx: LowerContext, self: Value, k: int, dim: int = -1, keepdim: bool = False) -> tuple[Value, Value]:
    b = cx.b
    if not self.rank or not self.type.numel:
        return (self if not self.rank else b.constant(0, self.dtype, cx.out.shape)), b.constant(
            0, torch.int64, cx.outs[1].shape
        )
    dim = norm_dim(dim, self.rank)
    lines = [n for d, n in enumerate(self.shape) if d != dim]
    value, index = _kth_smallest(cx, self, b.constant(k, _count_dtype(self.shape[dim]), lines), dim)
    return finish(cx, value), finish(cx, index, 1)


def _median(cx: LowerContext, x: Value, dim: int, ignore_nan: bool) -> tuple[Value, Value]:
    """The lower median along ``dim``: NaN if there is one, or of the others."""
    b, n = cx.b, x.shape[dim]
    dtype = _count_dtype(n)
    lines = [size for d, size in enumerate(x.shape) if d != dim]
    k = b.constant((n + 1) // 2, dtype, lines)
    if x.dtype.is_floating_point:
        nan = b.is_nan(x)
        if ignore_nan:
            counted = reduce_sum(cx, b.convert(b.not_(nan), dtype), [dim])
            one = b.constant(1, dtype, lines)
            k = b.maximum(b.binary("shift_right_logical", b.add(counted, one), one), one)
        else:
            k = b.select(reduce_sum(cx, nan, [dim]), b.constant(n, dtype, lines), k)
    return _kth_smallest(cx, x, k, dim)


def _nan_as(dtype: torch.dtype) -> Number:
    """What a C cast of NaN gives."""
    if dtype.is_floating_point:
        return math.nan
    return torch.iinfo(dtype).min if dtype in (torch.int32, torch.int64) else 0


def _median_rules(ignore_nan: bool) -> tuple[Rule, Rule]:
    def over_all(cx: LowerContext, self: Value) -> Value:
        if not self.type.numel:
            return cx.b.constant(_nan_as(self.dtype), self.dtype)
        flat = cx.b.reshape(self, (self.type.numel,))
        return finish(cx, _median(cx, flat, 0, ignore_nan)[0])

    def over_dim(cx: LowerContext, self: Value, dim: int, keepdim: bool = False) -> tuple[Value, Value]:
        b = cx.b
        if not self.rank or not self.type.numel:
            value = b.constant(float("nan") if self.dtype.is_floating_point else 0, self.dtype, cx.out.shape)
            return (value if self.rank else self), b.constant(0, torch.int64, cx.outs[1].shape)
        value, index = _median(cx, self, norm_dim(dim, self.rank), ignore_nan)
        return finish(cx, value), finish(cx, index, 1)

    return over_all, over_dim


for _packet, _skip in ((aten.median, False), (aten.nanmedian, True)):
    for _overload, _rule in zip((_packet.default, _packet.dim), _median_rules(_skip), strict=True):
        register(_overload, _rule)


@lowers(aten.mode.default)
def mode(cx: LowerContext, self: Value, dim: int = -1, keepdim: bool = False) -> tuple[Value, Value]:
    """The most frequent value, the smallest of several; the last index of it."""
    b = cx.b
    if not self.rank or not self.type.numel:
        return (self if not self.rank else b.constant(0, self.dtype, cx.out.shape)), b.constant(
            0, torch.int64, cx.outs[1].shape
        )
    dim = norm_dim(dim, self.rank)
    n = self.shape[dim]
    values, index = sorted_with_indices(cx, self, dim, descending=False)
    at = b.iota(values.shape, dim, torch.int32)
    key = _unsigned_key(cx, values)  # floats that compare equal may differ where denormals are flushed
    new = b.compare("NE", b.slice_dim(key, dim, 1, n), b.slice_dim(key, dim, 0, n - 1))
    if self.dtype.is_floating_point:
        new = b.or_(new, b.slice_dim(b.is_nan(values), dim, 1, n))
    first = b.constant(True, torch.bool, [1 if d == dim else s for d, s in enumerate(values.shape)])
    starts = b.select(b.concatenate([first, new], dim), at, b.constant(0, torch.int32, at.shape))
    run = b.sub(at, scan(cx, starts, dim, "maximum", 0))
    longest = reduce_max(cx, run, [dim])
    end = first_position(cx, b.compare("EQ", run, spread(cx, longest, run, [dim])), dim)
    here = b.compare("EQ", at, spread(cx, b.convert(end, torch.int32), at, [dim]))

    def chosen(x: Value) -> Value:
        wide = b.convert(x, torch.int32) if x.dtype == torch.bool else x
        return b.convert(reduce_sum(cx, b.select(here, wide, b.constant(0, wide.dtype, wide.shape)), [dim]), x.dtype)

    return finish(cx, chosen(values)), finish(cx, chosen(index), 1)


# ---- binary search


def _goes_right(cx: LowerContext, bound: Value, x: Value, right: bool) -> Value:
    """Whether the place of ``x`` is after ``bound``; written as ATen does, so that NaN is after all."""
    return cx.b.not_(cx.b.compare("GT" if right else "GE", bound, x))


def _search(cx: LowerContext, bounds: Value, x: Value, right: bool) -> Value:
    """Place of each element of ``x`` [..., m] in ``bounds`` [..., n] (or [n], for ``x`` of any shape)."""
    b, n = cx.b, bounds.shape[-1]
    if n == 0 or not x.type.numel:
        return b.constant(0, torch.int32, x.shape)
    lead = list(range(bounds.rank - 1))
    if n <= _COMPARE_ALL:
        wide = (*x.shape, n)
        pairs = b.broadcast_in_dim(bounds, wide, [*lead, x.rank])
        after = _goes_right(cx, pairs, b.broadcast_in_dim(x, wide, range(x.rank)), right)
        return reduce_sum(cx, b.convert(after, torch.int32), [x.rank])
    place = b.constant(0, torch.int32, x.shape)
    last = b.constant(n - 1, torch.int32, x.shape)
    for bit in reversed(range(n.bit_length())):
        tried = b.add(place, b.constant(1 << bit, torch.int32, x.shape))
        at = b.sub(tried, b.constant(1, torch.int32, x.shape))
        bound = _along_last(cx, bounds, b.minimum(at, last))
        ok = b.and_(b.compare("LE", at, last), _goes_right(cx, bound, x, right))
        place = b.select(ok, tried, place)
    return place


def _along_last(cx: LowerContext, x: Value, index: Value) -> Value:
    """``x[..., index]``: along the last dim where ``x`` and ``index`` share the others, or of a rank-1 ``x``."""
    b, lead = cx.b, list(range(x.rank - 1))
    return b.gather(
        x,
        b.reshape(index, (*index.shape, 1)),
        offset_dims=[],
        collapsed=[x.rank - 1],
        start_index_map=[x.rank - 1],
        index_vector_dim=index.rank,
        slice_sizes=[1] * x.rank,
        batch=(lead, lead),
    )


def _bounds_and_values(cx: LowerContext, bounds: Value, x: Operand) -> tuple[Value, Value]:
    dtype = compute_dtype(common_dtype(cx, bounds, x))
    return cx.b.convert(bounds, dtype), cx.b.convert(x, dtype) if isinstance(x, Value) else scalar(cx, x, dtype)


@lowers(aten.searchsorted.Tensor, aten.searchsorted.Scalar)
def searchsorted(
    cx: LowerContext,
    sorted_sequence: Value,
    self: Operand,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: Value | None = None,
) -> Value:
    bounds, x = _bounds_and_values(cx, sorted_sequence, self)
    if sorter is not None and sorter.type.numel:
        bounds = _along_last(cx, bounds, cx.b.convert(sorter, torch.int32))
    return finish(cx, _search(cx, bounds, x, right or side == "right"))


@lowers(aten.bucketize.Tensor, aten.bucketize.Scalar)
def bucketize(
    cx: LowerContext, self: Operand, boundaries: Value, out_int32: bool = False, right: bool = False
) -> Value:
    bounds, x = _bounds_and_values(cx, boundaries, self)
    return finish(cx, _search(cx, bounds, x, right))


# ---- histograms


@lowers(aten.histc.default)
def histc(cx: LowerContext, self: Value, bins: int = 100, min: Operand = 0, max: Operand = 0) -> Value:
    b, dtype = cx.b, cx.compute_dtype
    n = self.type.numel
    x = b.convert(b.reshape(self, (n,)), dtype)
    if not n:
        return b.constant(0, cx.out.dtype, cx.out.shape)
    low, high = scalar(cx, min, dtype), scalar(cx, max, dtype)
    auto = b.compare("EQ", low, high)  # ATen's "take the range of the data"
    low, high = b.select(auto, reduce_min(cx, x, [0]), low), b.select(auto, reduce_max(cx, x, [0]), high)
    flat = b.compare("EQ", low, high)
    one = b.constant(1, dtype)
    low, high = b.select(flat, b.sub(low, one), low), b.select(flat, b.add(high, one), high)
    wide_low, wide_high = b.broadcast_to(low, x.shape), b.broadcast_to(high, x.shape)
    inside = b.and_(b.compare("GE", x, wide_low), b.compare("LE", x, wide_high))
    scaled = b.mul(b.sub(x, wide_low), b.constant(bins, dtype, x.shape))
    place = b.convert(b.div(scaled, b.broadcast_to(b.sub(high, low), x.shape)), torch.int32)
    place = b.minimum(place, b.constant(bins - 1, torch.int32, x.shape))
    place = b.select(inside, place, b.constant(bins, torch.int32, x.shape))
    return finish(cx, _counted(cx, place, bins))


def _counted(cx: LowerContext, place: Value, bins: int) -> Value:
    """How often each of ``bins`` numbers occurs in ``place`` [n]; others are not counted."""
    b, n = cx.b, place.shape[0]
    return b.scatter(
        [b.constant(0, torch.int32, (bins,))],
        b.reshape(place, (n, 1)),
        [b.constant(1, torch.int32, (n,))],
        lambda old, new: [b.add(old[0], new[0])],
        update_window_dims=[],
        inserted=[0],
        scatter_dims=[0],
        index_vector_dim=1,
    )[0]
