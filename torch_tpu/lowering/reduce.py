"""Reductions over dims: sums, products, extrema with and without indices, moments and vector norms.

Values are accumulated in the compute type of the result (float32 for bfloat16 and float16) and rounded once. An index
is found by two plain reductions (extreme value, then smallest position that holds it): both vectorise, where a
reduction of (value, index) pairs does not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from torch_tpu.ir.builder import Number, Value
from torch_tpu.ir.types import compute_dtype
from torch_tpu.lowering.promote import Operand, norm_dim, norm_dims, real_number, scalar
from torch_tpu.lowering.registry import LowerContext, Rule, lowers, register

aten = torch.ops.aten

Dims = Sequence[int] | int | None


# ---- helpers, also for the norms and losses


def count(shape: Sequence[int], dims: Sequence[int]) -> int:
    """Number of elements that a reduction over ``dims`` combines."""
    return math.prod(shape[d] for d in dims)


def reduce_sum(cx: LowerContext, x: Value, dims: Sequence[int]) -> Value:
    """Sum over ``dims`` in the dtype of ``x``."""
    return cx.b.reduce_op("or" if x.dtype == torch.bool else "add", x, 0, dims) if dims else x


# A longer line is summed by plain reductions, which XLA splits into a tree; a joint one adds one after the other.
_JOINT_SUM = 8192


def reduce_sums(cx: LowerContext, xs: Sequence[Value], dims: Sequence[int]) -> list[Value]:
    """Sums of several values of one shape over the same dims.

    Together over the last dim: the CPU plugin then computes the terms inside the loop (3 to 5 times faster) where a
    plain sum reads them from memory. Not over other dims, where a joint sum would walk columns.
    """
    b, last = cx.b, xs[0].rank - 1
    if len(xs) > 1 and last in dims and 1 < xs[0].shape[last] <= _JOINT_SUM:
        zeros = [b.constant(0, x.dtype) for x in xs]
        xs = b.reduce(xs, zeros, [last], lambda ls, rs: [b.add(x, y) for x, y in zip(ls, rs, strict=True)])
        dims = [d for d in dims if d != last]
    return [reduce_sum(cx, x, dims) for x in xs]


def lowest(dtype: torch.dtype) -> Number:
    """The identity of maximum."""
    if dtype.is_floating_point:
        return -math.inf
    return False if dtype == torch.bool else torch.iinfo(dtype).min


def highest(dtype: torch.dtype) -> Number:
    """The identity of minimum."""
    if dtype.is_floating_point:
        return math.inf
    return True if dtype == torch.bool else torch.iinfo(dtype).max


def combine(cx: LowerContext, op: str, left: Value, right: Value) -> Value:
    """``op`` of two values; a NaN wins in ``maximum`` and ``minimum``.

    StableHLO says so of these two, the CPU plugin's default (xla_cpu_enable_fast_min_max) does otherwise, and without
    it a maximum over the minor dim takes ten times as long as this form.
    """
    b = cx.b
    if op not in ("maximum", "minimum") or not left.dtype.is_floating_point:
        return b.binary(op, left, right)
    ahead = b.compare("GT" if op == "maximum" else "LT", left, right)
    return b.select(b.or_(ahead, b.is_nan(left)), left, right)


def _reduce_extreme(cx: LowerContext, op: str, x: Value, dims: Sequence[int]) -> Value:
    if not dims:
        return x
    init = cx.b.constant((lowest if op == "maximum" else highest)(x.dtype), x.dtype)
    return cx.b.reduce([x], [init], dims, lambda left, right: [combine(cx, op, left[0], right[0])])[0]


def reduce_max(cx: LowerContext, x: Value, dims: Sequence[int]) -> Value:
    """Maximum over ``dims``; NaN wins."""
    return _reduce_extreme(cx, "maximum", x, dims)


def reduce_min(cx: LowerContext, x: Value, dims: Sequence[int]) -> Value:
    """Minimum over ``dims``; NaN wins."""
    return _reduce_extreme(cx, "minimum", x, dims)


def kept(x: Value, dims: Sequence[int]) -> list[int]:
    """The dims of ``x`` that a reduction over ``dims`` keeps: where its result goes in a broadcast back."""
    return [d for d in range(x.rank) if d not in dims]


def spread(cx: LowerContext, reduced: Value, like: Value, dims: Sequence[int]) -> Value:
    """``reduced`` (a reduction of ``like`` over ``dims``) broadcast back to the shape of ``like``."""
    return cx.b.broadcast_in_dim(reduced, like.shape, kept(like, dims))


def finish(cx: LowerContext, x: Value, index: int = 0) -> Value:
    """``x`` in the dtype of result ``index`` and, for keepdim, in its shape."""
    return cx.b.reshape(cx.b.convert(x, cx.outs[index].dtype), cx.outs[index].shape)


def divided(cx: LowerContext, x: Value, n: int) -> Value:
    """``x / n``."""
    return cx.b.div(x, cx.b.constant(n, x.dtype, x.shape))


def _to_accumulate(cx: LowerContext, x: Value, terms: int) -> Value:
    """``x`` in the narrowest dtype in which a sum of ``terms`` elements is exact (integers) or wanted (floats)."""
    dtype = compute_dtype(cx.out.dtype)
    if dtype == torch.int64 and not x.dtype.is_floating_point and not x.dtype.is_complex:
        bits = 1 if x.dtype == torch.bool else torch.iinfo(x.dtype).bits
        if terms << bits < 2**31:
            dtype = torch.int32
    return cx.b.convert(x, dtype)


# ---- sums and products


@lowers(aten.sum.dim_IntList)
def sum_dims(
    cx: LowerContext, self: Value, dim: Dims, keepdim: bool = False, dtype: torch.dtype | None = None
) -> Value:
    dims = norm_dims(dim, self.rank)
    return finish(cx, reduce_sum(cx, _to_accumulate(cx, self, count(self.shape, dims)), dims))


@lowers(aten.sum.default)
def sum_all(cx: LowerContext, self: Value, dtype: torch.dtype | None = None) -> Value:
    return sum_dims(cx, self, None)


@lowers(aten.nansum.default)
def nansum(
    cx: LowerContext, self: Value, dim: Dims = None, keepdim: bool = False, dtype: torch.dtype | None = None
) -> Value:
    if self.dtype.is_floating_point:
        self = cx.b.select(cx.b.is_nan(self), cx.b.constant(0, self.dtype, self.shape), self)
    return sum_dims(cx, self, dim)


@lowers(aten.mean.dim)
def mean_dims(
    cx: LowerContext, self: Value, dim: Dims, keepdim: bool = False, dtype: torch.dtype | None = None
) -> Value:
    dims = norm_dims(dim, self.rank)
    x = cx.b.convert(self, cx.compute_dtype)
    return finish(cx, divided(cx, reduce_sum(cx, x, dims), count(self.shape, dims)))


@lowers(aten.mean.default)
def mean_all(cx: LowerContext, self: Value, dtype: torch.dtype | None = None) -> Value:
    return mean_dims(cx, self, None)


@lowers(aten.prod.dim_int)
def prod_dim(cx: LowerContext, self: Value, dim: int, keepdim: bool = False, dtype: torch.dtype | None = None) -> Value:
    return _prod(cx, self, norm_dims(dim, self.rank))


@lowers(aten.prod.default)
def prod_all(cx: LowerContext, self: Value, dtype: torch.dtype | None = None) -> Value:
    return _prod(cx, self, norm_dims(None, self.rank))


def _prod(cx: LowerContext, x: Value, dims: Sequence[int]) -> Value:
    x = cx.b.convert(x, cx.compute_dtype)
    op = "and" if x.dtype == torch.bool else "multiply"
    return finish(cx, cx.b.reduce_op(op, x, 1, dims) if dims else x)


@lowers(aten.count_nonzero.default)
def count_nonzero(cx: LowerContext, self: Value, dim: int | None = None) -> Value:
    return sum_dims(cx, cx.b.convert(self, torch.bool), dim)


@lowers(aten.count_nonzero.dim_IntList)
def count_nonzero_dims(cx: LowerContext, self: Value, dim: Sequence[int]) -> Value:
    return sum_dims(cx, cx.b.convert(self, torch.bool), dim)


@lowers(aten.trace.default)
def trace(cx: LowerContext, self: Value) -> Value:
    b, n = cx.b, min(self.shape)
    x = b.convert(b.slice(self, [0, 0], [n, n]), compute_dtype(cx.out.dtype))
    on = b.compare("EQ", b.iota(x.shape, 0, torch.int32), b.iota(x.shape, 1, torch.int32))
    return finish(cx, reduce_sum(cx, b.select(on, x, b.constant(0, x.dtype, x.shape)), [0, 1]))


# ---- any and all


def _logical(op: str, init: bool) -> tuple[Rule, Rule, Rule]:
    def dims_rule(cx: LowerContext, self: Value, dim: Sequence[int] | None = None, keepdim: bool = False) -> Value:
        dims = norm_dims(dim, self.rank) if dim is None or len(dim) else []
        x = cx.b.convert(self, torch.bool)
        return finish(cx, cx.b.reduce_op(op, x, init, dims) if dims else x)

    def dim_rule(cx: LowerContext, self: Value, dim: int, keepdim: bool = False) -> Value:
        return dims_rule(cx, self, [dim], keepdim)

    def all_rule(cx: LowerContext, self: Value) -> Value:
        return dims_rule(cx, self)

    return all_rule, dim_rule, dims_rule


for _packet, _op, _init in ((aten.any, "or", False), (aten.all, "and", True)):
    for _overload, _rule in zip((_packet.default, _packet.dim, _packet.dims), _logical(_op, _init), strict=True):
        register(_overload, _rule)


# ---- extrema


@lowers(aten.amax.default)
def amax(cx: LowerContext, self: Value, dim: Sequence[int] = [], keepdim: bool = False) -> Value:
    return finish(cx, reduce_max(cx, self, norm_dims(dim, self.rank)))


@lowers(aten.hash_tensor.default)
def hash_tensor(
    cx: LowerContext, self: Value, dim: Sequence[int] = [], *, keepdim: bool = False, mode: int = 0
) -> Value:
    """Exclusive or of the elements' bits, as float64 or int64."""
    wide = torch.float64 if self.dtype.is_floating_point else torch.int64
    bits = cx.b.bitcast(cx.b.convert(self, wide), torch.uint64)
    return finish(cx, cx.b.reduce_op("xor", bits, 0, norm_dims(dim, self.rank)))


@lowers(aten.amin.default)
def amin(cx: LowerContext, self: Value, dim: Sequence[int] = [], keepdim: bool = False) -> Value:
    return finish(cx, reduce_min(cx, self, norm_dims(dim, self.rank)))


@lowers(aten.aminmax.default)
def aminmax(cx: LowerContext, self: Value, dim: int | None = None, keepdim: bool = False) -> tuple[Value, Value]:
    dims = norm_dims(dim, self.rank)
    return finish(cx, reduce_min(cx, self, dims)), finish(cx, reduce_max(cx, self, dims), 1)


@lowers(aten.max.default)
def max_all(cx: LowerContext, self: Value) -> Value:
    return finish(cx, reduce_max(cx, self, norm_dims(None, self.rank)))


@lowers(aten.min.default)
def min_all(cx: LowerContext, self: Value) -> Value:
    return finish(cx, reduce_min(cx, self, norm_dims(None, self.rank)))


def first_position(cx: LowerContext, hit: Value, dim: int) -> Value:
    """Index along ``dim`` of the first true element; the index dtype is int32 unless the dim is longer."""
    b, n = cx.b, hit.shape[dim]
    dtype = torch.int32 if n < 2**31 else torch.int64
    at = b.select(hit, b.iota(hit.shape, dim, dtype), b.constant(n, dtype, hit.shape))
    return b.reduce_op("minimum", at, n, [dim])


def extreme(cx: LowerContext, x: Value, dim: int, largest: bool) -> tuple[Value, Value]:
    """Extreme value along ``dim`` and the position of its first occurrence; the first NaN, if there is one."""
    b = cx.b
    best = (reduce_max if largest else reduce_min)(cx, x, [dim])
    wide = spread(cx, best, x, [dim])
    hit = b.compare("EQ", x, wide)
    if x.dtype.is_floating_point:
        hit = b.or_(hit, b.is_nan(x))  # where there is a NaN, best is NaN and equals nothing
    return best, first_position(cx, hit, dim)


def _extreme_dim(largest: bool) -> Rule:
    def rule(cx: LowerContext, self: Value, dim: int, keepdim: bool = False) -> tuple[Value, Value]:
        if not self.rank:
            return self, cx.b.constant(0, torch.int64)
        values, indices = extreme(cx, self, norm_dim(dim, self.rank), largest)
        return finish(cx, values), finish(cx, indices, 1)

    return rule


def _arg_extreme(largest: bool) -> Rule:
    def rule(cx: LowerContext, self: Value, dim: int | None = None, keepdim: bool = False) -> Value:
        if dim is None or not self.rank:
            self, dim = cx.b.reshape(self, [self.type.numel]), 0
        return finish(cx, extreme(cx, self, norm_dim(dim, self.rank), largest)[1])

    return rule


register(aten.max.dim, _extreme_dim(largest=True))
register(aten.min.dim, _extreme_dim(largest=False))
register(aten.argmax.default, _arg_extreme(largest=True))
register(aten.argmin.default, _arg_extreme(largest=False))


# ---- moments

_EXACT_LINE = 1024  # longest line whose variance is summed one after the other: error about sqrt(1024) roundings


def moments(cx: LowerContext, x: Value, dims: Sequence[int]) -> tuple[Value, Value]:
    """Mean, and sum of squared distances from it, over ``dims``.

    Two passes: the one-pass form E[x*x] - E[x]**2 cancels when the mean is large. Where it costs nothing, the second
    pass also sums the distances and so corrects the rounding of the mean.
    """
    b, n = cx.b, count(x.shape, dims)
    mean = divided(cx, reduce_sum(cx, x, dims), n)
    d = b.sub(x, spread(cx, mean, x, dims))
    if x.rank - 1 not in dims or not 0 < x.shape[-1] <= _EXACT_LINE:
        return mean, reduce_sum(cx, squared_abs(cx, d), dims)
    total, squares = reduce_sums(cx, [d, squared_abs(cx, d)], dims)
    # total / sqrt(n): its square is at most `squares`, so it cannot overflow where that does not.
    excess = squared_abs(cx, b.div(total, b.constant(math.sqrt(n), total.dtype, total.shape)))
    zero = b.constant(0, squares.dtype, squares.shape)
    corrected = combine(cx, "maximum", b.sub(squares, excess), zero)
    mean = b.add(mean, divided(cx, total, n))
    return mean, b.select(b.is_finite(squares), corrected, squares)


def squared_abs(cx: LowerContext, x: Value) -> Value:
    """``abs(x) ** 2``: a real value also for complex ``x``."""
    b = cx.b
    if not x.dtype.is_complex:
        return b.mul(x, x)
    re, im = b.real(x), b.imag(x)
    return b.add(b.mul(re, re), b.mul(im, im))


def _var_mean(cx: LowerContext, x: Value, dim: Dims, correction: Operand | None) -> tuple[Value, Value]:
    """Variance and mean, in the compute dtype of ``x``."""
    b, dims = cx.b, norm_dims(dim, x.rank)
    mean, m2 = moments(cx, b.convert(x, compute_dtype(x.dtype)), dims)
    n = count(x.shape, dims)
    if isinstance(correction, Value):
        free = b.sub(b.constant(n, m2.dtype), scalar(cx, correction, m2.dtype))
        freedom = b.maximum(free, b.constant(0, m2.dtype))
    else:
        freedom = b.constant(max(n - (1 if correction is None else real_number(correction)), 0), m2.dtype)
    return b.div(m2, b.broadcast_to(freedom, m2.shape)), mean


@lowers(aten.var.correction, scalars={"correction": (0, 1)})
def var(
    cx: LowerContext, self: Value, dim: Dims = None, correction: Operand | None = None, keepdim: bool = False
) -> Value:
    return finish(cx, _var_mean(cx, self, dim, correction)[0])


@lowers(aten.std.correction, scalars={"correction": (0, 1)})
def std(
    cx: LowerContext, self: Value, dim: Dims = None, correction: Operand | None = None, keepdim: bool = False
) -> Value:
    return finish(cx, cx.b.unary("sqrt", _var_mean(cx, self, dim, correction)[0]))


@lowers(aten.var_mean.correction, scalars={"correction": (0, 1)})
def var_mean(
    cx: LowerContext, self: Value, dim: Dims = None, correction: Operand | None = None, keepdim: bool = False
) -> tuple[Value, Value]:
    variance, mean = _var_mean(cx, self, dim, correction)
    return finish(cx, variance), finish(cx, mean, 1)


@lowers(aten.std_mean.correction, scalars={"correction": (0, 1)})
def std_mean(
    cx: LowerContext, self: Value, dim: Dims = None, correction: Operand | None = None, keepdim: bool = False
) -> tuple[Value, Value]:
    variance, mean = _var_mean(cx, self, dim, correction)
    return finish(cx, cx.b.unary("sqrt", variance)), finish(cx, mean, 1)
