"""Connectionist temporal classification (Graves et al. 2006): the forward and the backward recursion, one loop each.

Shapes: T steps, B sequences, C classes, S the longest target; a target is seen as L = 2 S + 1 labels with blanks
between. Everything is in logarithms.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from torch_tpu.ir.builder import Value
from torch_tpu.ir.types import compute_dtype
from torch_tpu.lowering.expr import Expr, where
from torch_tpu.lowering.indexing import gather_points, scatter_points
from torch_tpu.lowering.registry import LowerContext, lowers

aten = torch.ops.aten


def _ints(cx: LowerContext, values: Sequence[int]) -> Expr:
    return Expr(cx.b, cx.b.constant_list(list(values), torch.int32))


def _padded_targets(cx: LowerContext, targets: Value, lengths: Sequence[int], longest: int) -> Value:
    """(B, S) int32; what is beyond a target's length is never read."""
    b = cx.b
    targets = b.convert(targets, torch.int32)
    zero = b.constant(0, torch.int32)
    if targets.rank == 2:
        return b.pad(targets, zero, [0, 0], [0, longest - targets.shape[1]])
    rows, start = [], 0
    for n in lengths:
        row = b.pad(b.slice_dim(targets, 0, start, start + n), zero, [0], [longest - n])
        rows.append(b.reshape(row, (1, longest)))
        start += n
    return b.concatenate(rows, 0)


class _Lattice:
    """The labels of each target with blanks between, and what the two recursions read."""

    def __init__(
        self, cx: LowerContext, log_probs: Value, targets: Value, target_lengths: Sequence[int], blank: int
    ) -> None:
        b = self.b = cx.b
        self.cx = cx
        self.steps, self.batch, _ = log_probs.shape
        longest = max(target_lengths, default=0)
        self.labels = 2 * longest + 1
        shape = (self.batch, self.labels)
        words = _padded_targets(cx, targets, target_lengths, longest)
        blanks = b.constant(blank, torch.int32, (self.batch, longest, 1))
        pairs = b.concatenate([blanks, b.reshape(words, (self.batch, longest, 1))], 2)
        pairs = b.reshape(pairs, (self.batch, 2 * longest))
        self.label = b.pad(pairs, b.constant(blank, torch.int32), [0, 0], [0, 1])
        self.place = Expr(b, b.iota(shape, 1, torch.int32))
        x = self.log_probs = b.convert(log_probs, compute_dtype(log_probs.dtype))
        index = b.broadcast_in_dim(self.label, (self.steps, *shape), [1, 2])
        self.index = index
        self.emitted = gather_points(cx, x, 2, index)  # (T, B, L)
        # From a label to the one after the next: only if no blank has to be between.
        before = b.pad(self.label, b.constant(-1, torch.int32), [0, 2], [0, -2]) if longest else self.label
        same = Expr(b, b.compare("EQ", self.label, before))
        self.jumps = ~same & (self.place > 1)
        last = _ints(cx, [2 * n for n in target_lengths])
        self.last = Expr(b, b.broadcast_in_dim(last.v, shape, [0]))

    def shifted(self, x: Expr, by: int) -> Expr:
        """``x`` (B, L) moved to higher labels (lower ones if negative); -inf comes in."""
        low, high = (by, -by) if abs(by) <= self.labels else (0, 0)
        return Expr(self.b, self.b.pad(x.v, self.b.constant(-math.inf, x.dtype), [0, low], [0, high]))

    def emitted_at(self, t: Value) -> Expr:
        zero = self.b.constant(0, torch.int32)
        row = self.b.dynamic_slice(self.emitted, [t, zero, zero], (1, self.batch, self.labels))
        return Expr(self.b, self.b.reshape(row, (self.batch, self.labels)))

    def table(self, row_of: Callable[[Value, Expr], Expr], *, backward: bool) -> Value:
        """(T, B, L): row t is ``row_of(t, the row before)``, where the row before the first is -inf."""
        b = self.b
        zero, one, end = (b.constant(n, torch.int32) for n in (0, 1, self.steps))
        dtype = self.emitted.dtype
        start = b.constant(-math.inf, dtype, (self.batch, self.labels))
        full = b.constant(-math.inf, dtype, self.emitted.shape)

        def step(state: Sequence[Value]) -> Sequence[Value]:
            i, row, table = state
            t = b.sub(b.sub(end, one), i) if backward else i
            new = row_of(t, Expr(b, row)).v
            table = b.dynamic_update_slice(table, b.reshape(new, (1, *new.shape)), [t, zero, zero])
            return [b.add(i, one), new, table]

        return b.while_([zero, start, full], lambda s: b.compare("LT", s[0], end), step)[2]


def _log_sum(parts: Sequence[Expr]) -> Expr:
    """log of the sum of exp; -inf where all are."""
    top = parts[0]
    for p in parts[1:]:
        top = top.max(p)
    base = where(top.eq(-math.inf), 0.0, top)
    total = (parts[0] - base).exp()
    for p in parts[1:]:
        total = total + (p - base).exp()
    return total.log() + base


def _is_step(lattice: _Lattice, t: Value, number: Expr) -> Expr:
    """(B, L) bool: is ``t`` the step ``number`` (B,)?"""
    b, shape = lattice.b, lattice.place.v.shape
    return Expr(b, b.broadcast_in_dim(b.compare("EQ", number.v, b.broadcast_to(t, number.v.shape)), shape, [0]))


@lowers(aten._ctc_loss.default)
def ctc_loss(
    cx: LowerContext,
    log_probs: Value,
    targets: Value,
    input_lengths: Sequence[int],
    target_lengths: Sequence[int],
    blank: int = 0,
    zero_infinity: bool = False,
) -> tuple[Value, Value]:
    b, net = cx.b, _Lattice(cx, log_probs, targets, target_lengths, blank)
    starts = (net.place <= 1) & (net.place <= net.last)

    def row(t: Value, before: Expr) -> Expr:
        jump = where(net.jumps, net.shifted(before, 2), -math.inf)
        came = _log_sum([before, net.shifted(before, 1), jump])
        first = _is_step(net, t, _ints(cx, [0] * net.batch))
        return where(first, where(starts, came.const(0), -math.inf), came) + net.emitted_at(t)

    alpha = net.table(row, backward=False)
    ends = (net.place.eq(net.last) | net.place.eq(net.last - 1)) & (net.place >= 0)
    at = [max(n - 1, 0) for n in input_lengths]
    index = b.broadcast_in_dim(_ints(cx, at).v, (1, net.batch, net.labels), [1])
    final = Expr(b, b.reshape(gather_points(cx, alpha, 0, index), (net.batch, net.labels)))
    # No step at all: an empty target is certain, any other impossible.
    none = Expr(b, b.broadcast_in_dim(_ints(cx, input_lengths).eq(0).v, final.v.shape, [0]))
    final = where(none, where(net.place.eq(0), final.const(0), -math.inf), final)
    final = where(ends, final, -math.inf)
    top = Expr(b, b.reduce_op("maximum", final.v, -math.inf, [1]))
    base = where(top.eq(-math.inf), 0.0, top)
    wide = Expr(b, b.broadcast_in_dim(base.v, final.v.shape, [0]))
    total = Expr(b, b.reduce_op("add", (final - wide).exp().v, 0, [1])).log() + base
    return b.convert((-total).v, cx.outs[0].dtype), b.convert(b.transpose(alpha, [1, 0, 2]), cx.outs[1].dtype)


@lowers(aten._ctc_loss_backward.default)
def ctc_loss_backward(
    cx: LowerContext,
    grad: Value,
    log_probs: Value,
    targets: Value,
    input_lengths: Sequence[int],
    target_lengths: Sequence[int],
    neg_log_likelihood: Value,
    log_alpha: Value,
    blank: int,
    zero_infinity: bool = False,
) -> Value:
    b, net = cx.b, _Lattice(cx, log_probs, targets, target_lengths, blank)
    ends = net.place.eq(net.last) | net.place.eq(net.last - 1)
    last_step = _ints(cx, [n - 1 for n in input_lengths])
    jumps = Expr(b, b.pad(net.jumps.v, b.constant(False, torch.bool), [0, -2], [0, 2])) if net.labels > 2 else None

    def row(t: Value, after: Expr) -> Expr:
        parts = [after, net.shifted(after, -1)]
        if jumps is not None:
            parts.append(where(jumps, net.shifted(after, -2), -math.inf))
        came = where(_is_step(net, t, last_step), where(ends, after.const(0), -math.inf), _log_sum(parts))
        return came + net.emitted_at(t)

    beta = Expr(b, net.table(row, backward=True))
    dtype = beta.dtype
    alpha = Expr(b, b.transpose(b.convert(log_alpha, dtype), [1, 0, 2]))
    nll = Expr(b, b.convert(neg_log_likelihood, dtype))

    def over(x: Expr, shape: Sequence[int]) -> Expr:
        return Expr(b, b.broadcast_in_dim(x.v, shape, [1]))

    # The share of the paths that are at a label, added up for each class.
    shape = net.emitted.shape
    share = alpha + beta - Expr(b, net.emitted)
    share = where(beta.eq(-math.inf), 0.0, (share + over(nll, shape)).exp())
    x = Expr(b, net.log_probs)
    taken = Expr(b, scatter_points(cx, x.const(0).v, 2, net.index, share.v, op="add"))
    out = where(over(nll.eq(math.inf), x.v.shape), math.nan, x.exp() - taken)
    out = out * over(Expr(b, b.convert(grad, dtype)), x.v.shape)
    if zero_infinity:
        out = where(over(nll.eq(math.inf), x.v.shape), 0.0, out)
    step = Expr(b, b.iota(x.v.shape, 0, torch.int32))
    out = where(step < over(_ints(cx, input_lengths), x.v.shape), out, 0.0)
    return b.convert(out.v, cx.out.dtype)
