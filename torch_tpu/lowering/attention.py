"""Scaled dot-product attention as one program, and its gradients.

Shapes: N batch, H query heads, G key heads (H is a multiple of G), L queries, S keys, E elements of a head. Heads are
grouped as (N, G, H / G, …), so that a key head serves its group without being copied. Scores are float32 whatever
the inputs are; probabilities are rounded to the inputs' dtype for the second product.

Long sequences are taken in blocks of queries, one after the other: the scores of one block is all that is ever stored.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from torch_tpu.errors import LoweringMissing
from torch_tpu.ir.builder import Value
from torch_tpu.ir.types import compute_dtype
from torch_tpu.lowering.matmul import product
from torch_tpu.lowering.promote import Operand, scalar
from torch_tpu.lowering.registry import KEYED, LowerContext, lowers

aten = torch.ops.aten

_BLOCK = 512  # queries
_MAX_SCORES = 1 << 26  # scores up to which all queries are taken at once


@dataclass(frozen=True, slots=True)
class Heads:
    """One call: keys and values (N, G, S, E), bias broadcast to (N, G, H / G, L, S) dims of size 1 or full."""

    key: Value
    value: Value
    bias: Value | None
    scale: Value  # rank 0, accumulation type
    is_causal: bool


def _no_dropout(cx: LowerContext, dropout_p: float) -> None:
    if dropout_p:
        raise LoweringMissing("fused attention has no dropout.", op=str(cx.op), hint="use the math kernel.")


def _grouped(cx: LowerContext, x: Value, groups: int) -> Value:
    """(N, H, …) as (N, G, H / G, …); a missing batch dim is added."""
    b = cx.b
    if x.rank == 3:
        x = b.reshape(x, (1, *x.shape))
    n, h, *rest = x.shape
    return b.reshape(x, (n, groups, h // groups, *rest))


def _heads(
    cx: LowerContext, query: Value, key: Value, value: Value, bias: Value | None, is_causal: bool, scale: Operand | None
) -> tuple[Value, Heads]:
    """The query as (N, G, H / G, L, E), and the rest."""
    b = cx.b
    if key.rank == 3:
        key, value = (b.reshape(v, (1, *v.shape)) for v in (key, value))
    groups = key.shape[1]
    q = _grouped(cx, query, groups)
    wide = compute_dtype(query.dtype)
    if bias is not None:
        bias = b.reshape(bias, (1,) * (4 - bias.rank) + bias.shape)
        bias = _grouped(cx, bias, groups) if bias.shape[1] > 1 else b.reshape(bias, (bias.shape[0], 1, *bias.shape[1:]))
        bias = b.convert(bias, wide)
    factor = b.constant(1 / math.sqrt(query.shape[-1]), wide) if scale is None else scalar(cx, scale, wide)
    return q, Heads(key, value, bias, factor, is_causal)


def _product(cx: LowerContext, x: Value, y: Value, contract: tuple[int, int]) -> Value:
    """Of (N, G, H / G, L, a) and (N, G, S, b), contracted as told: (N, G, H / G, L, …)."""
    return product(cx, x, y, contract=([contract[0]], [contract[1]]), batch=([0, 1], [0, 1]))


def _visible(cx: LowerContext, shape: Sequence[int], first: Value) -> Value:
    """Bool (L, S): may query ``first + row`` see the key?"""
    b, plane = cx.b, tuple(shape[-2:])
    row = b.add(b.iota(plane, 0, torch.int32), b.broadcast_in_dim(first, plane, []))
    return b.compare("GE", row, b.iota(plane, 1, torch.int32))


def _scores(cx: LowerContext, q: Value, heads: Heads, bias: Value | None, first: Value) -> Value:
    """(N, G, H / G, L, S); -inf where a key is hidden. ``first`` is the number of the first query."""
    b = cx.b
    scores = _product(cx, q, heads.key, (4, 3))
    scores = b.mul(scores, b.broadcast_in_dim(heads.scale, scores.shape, []))
    if bias is not None:
        scores = b.add(scores, b.broadcast_to(bias, scores.shape))
    if heads.is_causal:
        seen = b.broadcast_in_dim(_visible(cx, scores.shape, first), scores.shape, [3, 4])
        scores = b.select(seen, scores, b.constant(-math.inf, scores.dtype, scores.shape))
    return scores


def _rows(cx: LowerContext, x: Value, shape: Sequence[int]) -> Value:
    """(N, G, H / G, L) along the keys of ``shape``."""
    return cx.b.broadcast_in_dim(x, shape, [0, 1, 2, 3])


def _attend(cx: LowerContext, q: Value, heads: Heads, bias: Value | None, first: Value) -> tuple[Value, Value]:
    """Output (N, G, H / G, L, E) and logarithm of the softmax's sum; a query that sees no key gets zeros."""
    b = cx.b
    scores = _scores(cx, q, heads, bias, first)
    top = b.reduce_op("maximum", scores, -math.inf, [4])
    blind = b.compare("EQ", top, b.constant(-math.inf, top.dtype, top.shape))
    top = b.select(blind, b.constant(0, top.dtype, top.shape), top)
    weight = b.unary("exponential", b.sub(scores, _rows(cx, top, scores.shape)))
    total = b.reduce_op("add", weight, 0, [4])
    safe = b.select(blind, b.constant(1, total.dtype, total.shape), total)
    probability = b.convert(b.div(weight, _rows(cx, safe, weight.shape)), q.dtype)
    return _product(cx, probability, heads.value, (4, 2)), b.add(top, b.unary("log", total))


def _blocks(q: Value, heads: Heads) -> int:
    """Queries a block: all of them if their scores are few, or if no block size divides them."""
    length, keys = q.shape[3], heads.key.shape[2]
    if q.type.numel // max(q.shape[4], 1) * keys <= _MAX_SCORES or length % _BLOCK:
        return length
    return _BLOCK


def _block(cx: LowerContext, x: Value, dim: int, start: Value, size: int) -> Value:
    """``size`` elements of ``dim`` from ``start``; a dim of one element stays."""
    if x.shape[dim] == 1:
        return x
    starts = [start if d == dim else cx.b.constant(0, torch.int32) for d in range(x.rank)]
    return cx.b.dynamic_slice(x, starts, [size if d == dim else s for d, s in enumerate(x.shape)])


def _put_block(cx: LowerContext, x: Value, part: Value, dim: int, start: Value) -> Value:
    starts = [start if d == dim else cx.b.constant(0, torch.int32) for d in range(x.rank)]
    return cx.b.dynamic_update_slice(x, part, starts)


@lowers(aten._scaled_dot_product_fused_attention_overrideable.default, scalars={"dropout_p": KEYED})
def fused_attention(
    cx: LowerContext,
    query: Value,
    key: Value,
    value: Value,
    attn_bias: Value | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    scale: Operand | None = None,
) -> tuple[Value | None, ...]:
    b = cx.b
    _no_dropout(cx, dropout_p)
    q, heads = _heads(cx, query, key, value, attn_bias, is_causal, scale)
    n, groups, per_group, length, _ = q.shape
    size = _blocks(q, heads)
    zero = b.constant(0, torch.int32)
    if size == length:
        out, lse = _attend(cx, q, heads, heads.bias, zero)
    else:
        wide = compute_dtype(query.dtype)

        def unfinished(state: Sequence[Value]) -> Value:
            return b.compare("LT", state[0], b.constant(length, torch.int32))

        def step(state: Sequence[Value]) -> Sequence[Value]:
            start, out, lse = state
            bias = None if heads.bias is None else _block(cx, heads.bias, 3, start, size)
            part, part_lse = _attend(cx, _block(cx, q, 3, start, size), heads, bias, start)
            out, lse = _put_block(cx, out, part, 3, start), _put_block(cx, lse, part_lse, 3, start)
            return [b.add(start, b.constant(size, torch.int32)), out, lse]

        rows = (n, groups, per_group, length)
        empty = [b.constant(0, wide, (*rows, value.shape[-1])), b.constant(0, wide, rows)]
        _, out, lse = b.while_([zero, *empty], unfinished, step)
    out = b.convert(b.reshape(out, (*query.shape[:-1], value.shape[-1])), query.dtype)
    lse = b.convert(b.reshape(lse, (n, groups * per_group, length)), torch.float32)
    unused = b.constant(0, torch.int64)  # dropout's seed and offset
    return out, lse, None, None, None, None, unused, unused, None


@dataclass(frozen=True, slots=True)
class _Saved:
    """What the backward gets for every query: (N, G, H / G, L, …)."""

    q: Value
    grad: Value
    lse: Value
    delta: Value  # sum of grad * out over the elements

    def block(self, cx: LowerContext, start: Value, size: int) -> _Saved:
        return _Saved(*(_block(cx, v, 3, start, size) for v in (self.q, self.grad, self.lse, self.delta)))


@dataclass(frozen=True, slots=True)
class _Gradients:
    """Of a block of queries; those of key and value are its share."""

    query: Value
    key: Value
    value: Value
    scores: Value


def _attend_gradient(cx: LowerContext, s: _Saved, heads: Heads, bias: Value | None, first: Value) -> _Gradients:
    b, dtype = cx.b, s.q.dtype
    scores = _scores(cx, s.q, heads, bias, first)
    hidden = b.compare("EQ", scores, b.constant(-math.inf, scores.dtype, scores.shape))
    weight = b.unary("exponential", b.sub(scores, _rows(cx, s.lse, scores.shape)))
    weight = b.select(hidden, b.constant(0, weight.dtype, weight.shape), weight)
    grad_weight = _product(cx, s.grad, heads.value, (4, 3))
    grad_scores = b.mul(weight, b.sub(grad_weight, _rows(cx, s.delta, weight.shape)))
    narrow = b.convert(grad_scores, dtype)
    both = ([0, 1], [0, 1])
    grad_value = product(cx, b.convert(weight, dtype), s.grad, contract=([2, 3], [2, 3]), batch=both)
    grad_key = product(cx, narrow, s.q, contract=([2, 3], [2, 3]), batch=both)
    return _Gradients(_product(cx, narrow, heads.key, (4, 2)), grad_key, grad_value, grad_scores)


def _all_gradients(cx: LowerContext, saved: _Saved, heads: Heads, size: int) -> _Gradients:
    """Block after block; the gradient of the scores is not kept then."""
    b = cx.b
    zero = b.constant(0, torch.int32)
    length = saved.q.shape[3]
    if size == length:
        return _attend_gradient(cx, saved, heads, heads.bias, zero)
    wide = compute_dtype(saved.q.dtype)

    def unfinished(state: Sequence[Value]) -> Value:
        return b.compare("LT", state[0], b.constant(length, torch.int32))

    def step(state: Sequence[Value]) -> Sequence[Value]:
        start, query, key, value = state
        bias = None if heads.bias is None else _block(cx, heads.bias, 3, start, size)
        part = _attend_gradient(cx, saved.block(cx, start, size), heads, bias, start)
        query = _put_block(cx, query, part.query, 3, start)
        return [b.add(start, b.constant(size, torch.int32)), query, b.add(key, part.key), b.add(value, part.value)]

    empty = [b.constant(0, wide, v.shape) for v in (saved.q, heads.key, heads.value)]
    _, query, key, value = b.while_([zero, *empty], unfinished, step)
    return _Gradients(query, key, value, zero)


def _bias_gradient(cx: LowerContext, grad: Value, bias: Value, groups: int) -> Value:
    """Sum over the dims along which the bias was broadcast."""
    b = cx.b
    n, _, per_group, length, keys = grad.shape
    grad = b.reshape(grad, (n, groups * per_group, length, keys))
    full = (1,) * (4 - bias.rank) + bias.shape
    dims = [d for d in range(4) if full[d] == 1 and grad.shape[d] > 1]
    summed = b.reduce_op("add", grad, 0, dims) if dims else grad
    return b.convert(b.reshape(summed, bias.shape), bias.dtype)


@lowers(
    aten._scaled_dot_product_fused_attention_overrideable_backward.default,
    scalars={"dropout_p": KEYED},
)
def fused_attention_backward(
    cx: LowerContext,
    grad_out: Value,
    query: Value,
    key: Value,
    value: Value,
    attn_bias: Value | None,
    grad_input_mask: Sequence[bool],
    out: Value,
    logsumexp: Value,
    cum_seq_q: Value | None,
    cum_seq_k: Value | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: Value,
    philox_offset: Value,
    scale: Operand | None = None,
) -> tuple[Value | None, ...]:
    b = cx.b
    _no_dropout(cx, dropout_p)
    q, heads = _heads(cx, query, key, value, attn_bias, is_causal, scale)
    groups, wide = q.shape[1], compute_dtype(query.dtype)
    grad, output = _grouped(cx, grad_out, groups), _grouped(cx, out, groups)
    delta = b.reduce_op("add", b.mul(b.convert(grad, wide), b.convert(output, wide)), 0, [4])
    lse = b.convert(b.reshape(logsumexp, q.shape[:4]), wide)
    # A query that sees no key has -inf here, which would make NaN of its scores; all its weights are zero.
    lse = b.select(b.is_finite(lse), lse, b.constant(0, wide, lse.shape))
    wants_bias = attn_bias is not None and grad_input_mask[3]
    size = q.shape[3] if wants_bias else _blocks(q, heads)
    got = _all_gradients(cx, _Saved(q, grad, lse, delta), heads, size)

    def scaled(x: Value, like: Value) -> Value:
        x = b.mul(x, b.broadcast_in_dim(heads.scale, x.shape, []))
        return b.convert(b.reshape(x, like.shape), like.dtype)

    grad_bias = _bias_gradient(cx, got.scores, attn_bias, groups) if wants_bias and attn_bias is not None else None
    grad_value = b.convert(b.reshape(got.value, value.shape), value.dtype)
    return scaled(got.query, query), scaled(got.key, key), grad_value, grad_bias
