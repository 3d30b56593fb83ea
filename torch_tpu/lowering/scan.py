"""Cumulative ops along one dim.

A scan of n elements is cut into blocks of 16: a sliding window inside the blocks, a scan of the block totals, and one
combination of both. That is linear work in log16(n) levels, measured 2 to 8 times faster on the CPU plugin than one
window over the whole dim or than log2(n) shifted combinations (XLA fuses and recomputes these).
"""

from __future__ import annotations

import math

import torch

from torch_tpu.ir.builder import Number, Value
from torch_tpu.lowering.promote import norm_dim
from torch_tpu.lowering.reduce import combine, finish, highest, lowest, reduce_max, reduce_sum, spread
from torch_tpu.lowering.registry import LowerContext, Rule, lowers, register

aten = torch.ops.aten

_BLOCK = 16
_EXP_BLOCK = 8  # for logcumsumexp, whose blocks cost _EXP_BLOCK exponentials an element


def _blocks(cx: LowerContext, x: Value, dim: int, block: int, fill: Number) -> Value:
    """``x`` with ``dim`` split into (blocks, ``block``); the last block is filled up."""
    b, n = cx.b, x.shape[dim]
    rows = -(-n // block)
    if rows * block != n:
        high = [0] * x.rank
        high[dim] = rows * block - n
        x = b.pad(x, b.constant(fill, x.dtype), [0] * x.rank, high)
    return b.reshape(x, (*x.shape[:dim], rows, block, *x.shape[dim + 1 :]))


def _carries(cx: LowerContext, totals: Value, dim: int, fill: Number) -> Value:
    """Scanned block totals moved on by one block."""
    b = cx.b
    low, high = [0] * totals.rank, [0] * totals.rank
    low[dim], high[dim] = 1, -1
    return b.pad(totals, b.constant(fill, totals.dtype), low, high)


def _joined(cx: LowerContext, x: Value, dim: int, n: int) -> Value:
    """The inverse of `_blocks`."""
    rows = x.shape[dim] * x.shape[dim + 1]
    x = cx.b.reshape(x, (*x.shape[:dim], rows, *x.shape[dim + 2 :]))
    return cx.b.slice_dim(x, dim, 0, n)


def scan(cx: LowerContext, x: Value, dim: int, op: str, init: Number) -> Value:
    """Inclusive scan with ``op``, which is associative and commutative and has the identity ``init``."""
    b, n = cx.b, x.shape[dim]
    if n <= 1 or not x.type.numel:
        return x
    if n <= _BLOCK:
        window, padding = [1] * x.rank, [(0, 0)] * x.rank
        window[dim], padding[dim] = n, (n - 1, 0)
        one = b.constant(init, x.dtype)
        return b.reduce_window(
            [x], [one], lambda left, right: [combine(cx, op, left[0], right[0])], window=window, padding=padding
        )[0]
    rows = _blocks(cx, x, dim, _BLOCK, init)
    local = scan(cx, rows, dim + 1, op, init)
    last = b.slice_dim(local, dim + 1, _BLOCK - 1, _BLOCK)
    totals = scan(cx, b.reshape(last, (*rows.shape[: dim + 1], *rows.shape[dim + 2 :])), dim, op, init)
    carry = spread(cx, _carries(cx, totals, dim, init), local, [dim + 1])
    return _joined(cx, combine(cx, op, carry, local), dim, n)


@lowers(aten.cumsum.default)
def cumsum(cx: LowerContext, self: Value, dim: int, dtype: torch.dtype | None = None) -> Value:
    x = cx.b.convert(self, cx.compute_dtype)
    op = "or" if x.dtype == torch.bool else "add"
    return finish(cx, scan(cx, x, norm_dim(dim, x.rank), op, 0) if x.rank else x)


@lowers(aten.cumprod.default)
def cumprod(cx: LowerContext, self: Value, dim: int, dtype: torch.dtype | None = None) -> Value:
    x = cx.b.convert(self, cx.compute_dtype)
    op = "and" if x.dtype == torch.bool else "multiply"
    return finish(cx, scan(cx, x, norm_dim(dim, x.rank), op, 1) if x.rank else x)


def _cumulative_extreme(op: str) -> Rule:
    """Running extreme value, and where it was last met: ATen moves the index on for an equal value and for each NaN."""

    def rule(cx: LowerContext, self: Value, dim: int) -> tuple[Value, Value]:
        b = cx.b
        if not self.rank:
            return self, b.constant(0, torch.int64)
        dim = norm_dim(dim, self.rank)
        values = scan(cx, self, dim, op, (lowest if op == "maximum" else highest)(self.dtype))
        met = b.compare("EQ", self, values)
        if self.dtype.is_floating_point:
            met = b.or_(met, b.is_nan(self))
        dtype = torch.int32 if self.shape[dim] < 2**31 else torch.int64
        at = b.select(met, b.iota(self.shape, dim, dtype), b.constant(0, dtype, self.shape))
        return values, finish(cx, scan(cx, at, dim, "maximum", 0), 1)

    return rule


register(aten.cummax.default, _cumulative_extreme("maximum"))
register(aten.cummin.default, _cumulative_extreme("minimum"))


def _real(cx: LowerContext, x: Value) -> Value:
    return cx.b.real(x) if x.dtype.is_complex else x


def _log_add_exp(cx: LowerContext, x: Value, y: Value) -> Value:
    """``log(exp(x) + exp(y))``, shifted by the larger real part."""
    b = cx.b
    left = b.or_(b.compare("GT", _real(cx, x), _real(cx, y)), b.is_nan(_real(cx, x)))
    top, low = b.select(left, x, y), b.select(left, y, x)
    size = _real(cx, top)
    infinite = b.compare("EQ", b.unary("abs", size), b.constant(math.inf, size.dtype, size.shape))
    rest = b.unary("log_plus_one", b.unary("exponential", b.sub(low, top)))
    return b.select(infinite, top, b.add(top, rest))


def _log_cum_sum_exp(cx: LowerContext, x: Value, dim: int) -> Value:
    """In blocks, element i is ``m + log(sum over j <= i of exp(x[j] - m))`` with ``m`` the largest of these x."""
    b, n = cx.b, x.shape[dim]
    if n <= 1:
        return x
    rows = _blocks(cx, x, dim, _EXP_BLOCK, -math.inf)
    here, before = dim + 1, dim + 2
    pairs = (*rows.shape[:before], _EXP_BLOCK, *rows.shape[before:])
    past = b.broadcast_in_dim(rows, pairs, [d for d in range(len(pairs)) if d != here])
    counts = b.compare("LE", b.iota(pairs, before, torch.int32), b.iota(pairs, here, torch.int32))
    past = b.select(counts, past, b.constant(-math.inf, x.dtype, pairs))
    top = reduce_max(cx, _real(cx, past), [before])
    finite = b.convert(b.select(b.is_finite(top), top, b.constant(0, top.dtype, top.shape)), x.dtype)
    terms = b.unary("exponential", b.sub(past, spread(cx, finite, past, [before])))
    local = b.add(b.unary("log", reduce_sum(cx, terms, [before])), finite)
    last = b.slice_dim(local, here, _EXP_BLOCK - 1, _EXP_BLOCK)
    totals = b.reshape(last, (*rows.shape[:here], *rows.shape[before:]))
    if totals.shape[dim] > 1:
        carry = _carries(cx, _log_cum_sum_exp(cx, totals, dim), dim, -math.inf)
        local = _log_add_exp(cx, spread(cx, carry, local, [here]), local)
    return _joined(cx, local, dim, n)


@lowers(aten.logcumsumexp.default, aten._logcumsumexp.default)
def logcumsumexp(cx: LowerContext, self: Value, dim: int) -> Value:
    x = cx.b.convert(self, cx.compute_dtype)
    if not x.rank or not x.type.numel:
        return finish(cx, x)
    return finish(cx, _log_cum_sum_exp(cx, x, norm_dim(dim, x.rank)))
