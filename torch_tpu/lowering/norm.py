"""Softmax and the normalisations (layer, group, batch), forward and backward.

All of it is computed in the compute type of the input (float32 for bfloat16 and float16); variances by two passes.
Backward rules return None where ``output_mask`` asks for nothing, in schema order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torch_tpu.ir.builder import Value
from torch_tpu.ir.types import compute_dtype
from torch_tpu.lowering.promote import Operand, norm_dims, scalar
from torch_tpu.lowering.reduce import count, divided, finish, moments, reduce_max, reduce_sum, reduce_sums, spread
from torch_tpu.lowering.registry import RULES, LowerContext, RuleEntry, lowers

aten = torch.ops.aten


def _wide(cx: LowerContext, x: Value) -> Value:
    return cx.b.convert(x, compute_dtype(x.dtype))


# ---- softmax


def _shifted(cx: LowerContext, self: Value, dims: Sequence[int]) -> Value:
    """``self - max``, in the compute type."""
    x = _wide(cx, self)
    return cx.b.sub(x, spread(cx, reduce_max(cx, x, dims), x, dims))


def _softmax_of(cx: LowerContext, self: Value, dims: Sequence[int]) -> Value:
    e = cx.b.unary("exponential", _shifted(cx, self, dims))
    return cx.b.div(e, spread(cx, reduce_sum(cx, e, dims), e, dims))


@lowers(aten._softmax.default)
def softmax(cx: LowerContext, self: Value, dim: int, half_to_float: bool) -> Value:
    return finish(cx, _softmax_of(cx, self, norm_dims(dim, self.rank)))


@lowers(aten._safe_softmax.default)
def safe_softmax(cx: LowerContext, self: Value, dim: int, dtype: torch.dtype | None = None) -> Value:
    """Softmax that is 0, not NaN, along a line of -inf."""
    b, dims = cx.b, norm_dims(dim, self.rank)
    x = b.convert(self, cx.compute_dtype)
    top = reduce_max(cx, x, dims)
    masked = b.compare("EQ", top, b.constant(-math.inf, top.dtype, top.shape))
    zero = b.constant(0, x.dtype, x.shape)
    return finish(cx, b.select(spread(cx, masked, x, dims), zero, _softmax_of(cx, x, dims)))


@lowers(aten._log_softmax.default)
def log_softmax(cx: LowerContext, self: Value, dim: int, half_to_float: bool) -> Value:
    b, dims = cx.b, norm_dims(dim, self.rank)
    x = _shifted(cx, self, dims)
    total = b.unary("log", reduce_sum(cx, b.unary("exponential", x), dims))
    return finish(cx, b.sub(x, spread(cx, total, x, dims)))


@lowers(aten._softmax_backward_data.default)
def softmax_backward(cx: LowerContext, grad_output: Value, output: Value, dim: int, input_dtype: torch.dtype) -> Value:
    b, dims = cx.b, norm_dims(dim, output.rank)
    g, y = _wide(cx, grad_output), _wide(cx, output)
    total = reduce_sum(cx, b.mul(g, y), dims)
    return finish(cx, b.mul(b.sub(g, spread(cx, total, g, dims)), y))


@lowers(aten._log_softmax_backward_data.default)
def log_softmax_backward(
    cx: LowerContext, grad_output: Value, output: Value, dim: int, input_dtype: torch.dtype
) -> Value:
    b, dims = cx.b, norm_dims(dim, output.rank)
    g, y = _wide(cx, grad_output), _wide(cx, output)
    total = spread(cx, reduce_sum(cx, g, dims), g, dims)
    return finish(cx, b.sub(g, b.mul(b.unary("exponential", y), total)))


# ---- what the normalisations share


def rstd_of(cx: LowerContext, variance: Value, eps: Operand) -> Value:
    b = cx.b
    return b.unary("rsqrt", b.add(variance, b.broadcast_to(scalar(cx, eps, variance.dtype), variance.shape)))


def stats(cx: LowerContext, x: Value, dims: Sequence[int], eps: Operand) -> tuple[Value, Value]:
    """Mean and 1/sqrt(variance + eps) over ``dims``."""
    mean, m2 = moments(cx, x, dims)
    return mean, rstd_of(cx, divided(cx, m2, count(x.shape, dims)), eps)


def normalized(cx: LowerContext, x: Value, mean: Value, rstd: Value, dims: Sequence[int]) -> Value:
    b = cx.b
    return b.mul(b.sub(x, spread(cx, mean, x, dims)), spread(cx, rstd, x, dims))


def param(cx: LowerContext, p: Value | None, like: Value, at: Sequence[int]) -> Value | None:
    """A weight or bias in the dtype and shape of ``like``; its dims are dims ``at`` of it."""
    return None if p is None else cx.b.broadcast_in_dim(cx.b.convert(p, like.dtype), like.shape, at)


def affine(cx: LowerContext, x: Value, weight: Value | None, bias: Value | None) -> Value:
    """``x * weight + bias`` with what there is of them, all of one shape."""
    x = x if weight is None else cx.b.mul(x, weight)
    return x if bias is None else cx.b.add(x, bias)


def _centered(cx: LowerContext, x: Value, mean: Value, dims: Sequence[int]) -> Value:
    return cx.b.sub(x, spread(cx, mean, x, dims))


@dataclass(frozen=True, slots=True)
class _Sums:
    """Over the normalised dims: of the gradient ``g`` that reaches the normalised value, and of ``g * (x - mean)``."""

    g: Value
    gd: Value


def _input_grad(cx: LowerContext, g: Value, d: Value, sums: _Sums, rstd: Value, dims: Sequence[int]) -> Value:
    """Gradient to x through ``d * rstd``, where ``d = x - mean`` and both statistics are of x over ``dims``."""
    b, n = cx.b, count(g.shape, dims)
    slope = b.mul(b.mul(rstd, rstd), divided(cx, sums.gd, n))
    inner = b.sub(g, spread(cx, divided(cx, sums.g, n), g, dims))
    inner = b.sub(inner, b.mul(d, spread(cx, slope, g, dims)))
    return b.mul(inner, spread(cx, rstd, g, dims))


# ---- layer norm


@lowers(aten.native_layer_norm.default)
def layer_norm(
    cx: LowerContext,
    input: Value,
    normalized_shape: Sequence[int],
    weight: Value | None,
    bias: Value | None,
    eps: Operand,
) -> tuple[Value, Value, Value]:
    dims = list(range(input.rank - len(normalized_shape), input.rank))
    x = _wide(cx, input)
    mean, rstd = stats(cx, x, dims, eps)
    y = affine(cx, normalized(cx, x, mean, rstd, dims), param(cx, weight, x, dims), param(cx, bias, x, dims))
    return finish(cx, y), finish(cx, mean, 1), finish(cx, rstd, 2)


@lowers(aten.native_layer_norm_backward.default)
def layer_norm_backward(
    cx: LowerContext,
    grad_out: Value,
    input: Value,
    normalized_shape: Sequence[int],
    mean: Value,
    rstd: Value,
    weight: Value | None,
    bias: Value | None,
    output_mask: Sequence[bool],
) -> tuple[Value | None, Value | None, Value | None]:
    b, lead = cx.b, input.rank - len(normalized_shape)
    outer, inner = list(range(lead)), list(range(lead, input.rank))
    x = _wide(cx, input)
    g = b.convert(grad_out, x.dtype)
    mean, rstd = (b.convert(b.reshape(s, input.shape[:lead]), x.dtype) for s in (mean, rstd))
    d = _centered(cx, x, mean, inner)
    dx = dw = db = None
    if output_mask[0]:
        scaled = affine(cx, g, param(cx, weight, x, inner), None)
        sums = _Sums(*reduce_sums(cx, [scaled, b.mul(scaled, d)], inner))
        dx = b.convert(_input_grad(cx, scaled, d, sums, rstd, inner), input.dtype)
    if output_mask[1] and weight is not None:
        xhat = b.mul(d, spread(cx, rstd, x, inner))
        dw = b.convert(reduce_sum(cx, b.mul(g, xhat), outer), weight.dtype)
    if output_mask[2] and bias is not None:
        db = b.convert(reduce_sum(cx, g, outer), bias.dtype)
    return dx, dw, db


# ---- group norm; input [N, C, ...] is seen as [N, group, C / group, ...]


def _grouped(cx: LowerContext, x: Value, sizes: tuple[int, int, int], group: int) -> Value:
    n, c, hxw = sizes
    rest = x.shape[2:] if x.shape[:2] == (n, c) else (hxw,)
    return cx.b.reshape(x, (n, group, c // group, *rest))


@lowers(aten.native_group_norm.default)
def group_norm(
    cx: LowerContext,
    input: Value,
    weight: Value | None,
    bias: Value | None,
    N: int,
    C: int,
    HxW: int,
    group: int,
    eps: Operand,
) -> tuple[Value, Value, Value]:
    x = _grouped(cx, _wide(cx, input), (N, C, HxW), group)
    dims = list(range(2, x.rank))
    mean, rstd = stats(cx, x, dims, eps)
    weight, bias = (p if p is None else cx.b.reshape(p, x.shape[1:3]) for p in (weight, bias))
    y = affine(cx, normalized(cx, x, mean, rstd, dims), param(cx, weight, x, [1, 2]), param(cx, bias, x, [1, 2]))
    return finish(cx, y), finish(cx, mean, 1), finish(cx, rstd, 2)


@lowers(aten.native_group_norm_backward.default)
def group_norm_backward(
    cx: LowerContext,
    grad_out: Value,
    input: Value,
    mean: Value,
    rstd: Value,
    weight: Value | None,
    N: int,
    C: int,
    HxW: int,
    group: int,
    output_mask: Sequence[bool],
) -> tuple[Value | None, Value | None, Value | None]:
    b = cx.b
    x = _grouped(cx, _wide(cx, input), (N, C, HxW), group)
    g = b.reshape(b.convert(grad_out, x.dtype), x.shape)
    dims, space = list(range(2, x.rank)), list(range(3, x.rank))
    mean, rstd = (b.convert(b.reshape(s, (N, group)), x.dtype) for s in (mean, rstd))
    d = _centered(cx, x, mean, dims)
    of_channel = _Sums(*reduce_sums(cx, [g, b.mul(g, d)], space))  # [N, group, C / group]
    param_dtype = input.dtype if weight is None else weight.dtype
    dx = dw = db = None
    if output_mask[0]:
        w = None if weight is None else b.reshape(weight, x.shape[1:3])
        scaled = [affine(cx, v, param(cx, w, v, [1, 2]), None) for v in (g, of_channel.g, of_channel.gd)]
        sums = _Sums(*(reduce_sum(cx, v, [2]) for v in scaled[1:]))
        dx = b.reshape(b.convert(_input_grad(cx, scaled[0], d, sums, rstd, dims), input.dtype), input.shape)
    if output_mask[1]:
        by_sample = b.mul(of_channel.gd, spread(cx, rstd, of_channel.gd, [2]))
        dw = b.convert(b.reshape(reduce_sum(cx, by_sample, [0]), (C,)), param_dtype)
    if output_mask[2]:
        db = b.convert(b.reshape(reduce_sum(cx, of_channel.g, [0]), (C,)), param_dtype)
    return dx, dw, db


# ---- batch norm; statistics are over all dims but dim 1


@dataclass(frozen=True, slots=True)
class _BatchNorm:
    """Results of a forward batch norm; ``running`` is None where nothing is updated."""

    y: Value
    mean: Value
    rstd: Value
    running: tuple[Value | None, Value | None]


@dataclass(frozen=True, slots=True)
class _Affine:
    weight: Value | None
    bias: Value | None


@dataclass(frozen=True, slots=True)
class _Running:
    mean: Value | None
    var: Value | None


def blend(cx: LowerContext, old: Value | None, new: Value, momentum: Operand) -> Value | None:
    """``(1 - momentum) * old + momentum * new`` in the dtype of ``old``."""
    if old is None:
        return None
    b = cx.b
    was = b.convert(old, new.dtype)
    step = b.mul(b.broadcast_to(scalar(cx, momentum, new.dtype), new.shape), b.sub(new, was))
    return b.convert(b.add(was, step), old.dtype)


def _batch_norm(
    cx: LowerContext,
    input: Value,
    params: _Affine,
    running: _Running,
    *,
    training: bool,
    momentum: Operand,
    eps: Operand,
) -> _BatchNorm:
    b, x = cx.b, _wide(cx, input)
    dims = [d for d in range(x.rank) if d != 1]
    updated: tuple[Value | None, Value | None] = (None, None)
    if training:
        n = count(x.shape, dims)
        mean, m2 = moments(cx, x, dims)
        rstd = rstd_of(cx, divided(cx, m2, n), eps)
        updated = (
            blend(cx, running.mean, mean, momentum),
            blend(cx, running.var, divided(cx, m2, n - 1), momentum),
        )
    else:
        assert running.mean is not None and running.var is not None
        mean = b.convert(running.mean, x.dtype)
        rstd = rstd_of(cx, b.convert(running.var, x.dtype), eps)
    y = affine(
        cx,
        normalized(cx, x, mean, rstd, dims),
        param(cx, params.weight, x, [1]),
        param(cx, params.bias, x, [1]),
    )
    return _BatchNorm(y, mean, rstd, updated)


def _saved(cx: LowerContext, x: Value, index: int) -> Value:
    """A saved statistic as result ``index``; the meta kernel promises an empty one where none is kept."""
    out = cx.outs[index]
    return finish(cx, x, index) if out.numel == x.type.numel else cx.b.constant(0, out.dtype, out.shape)


def _eval_keeps_nothing(args: Mapping[str, Any], meta: Callable[[], list[Any]]) -> list[Any]:
    """The CPU kernel saves no statistics in eval mode."""
    outs = meta()
    if args["training"]:
        return outs
    return [outs[0], outs[1].new_empty(0), outs[2].new_empty(0), *outs[3:]]


def _three(cx: LowerContext, r: _BatchNorm) -> tuple[Value, Value, Value]:
    return finish(cx, r.y), _saved(cx, r.mean, 1), _saved(cx, r.rstd, 2)


def _promised(cx: LowerContext, running: Sequence[Value]) -> list[Value]:
    """New running statistics as the last results, which the meta kernels promise in the dtype of the computation."""
    return [cx.b.convert(v, out.dtype) for v, out in zip(running, cx.outs[-len(running) :], strict=True)]


def native_batch_norm(
    cx: LowerContext,
    input: Value,
    weight: Value | None,
    bias: Value | None,
    running_mean: Value | None,
    running_var: Value | None,
    training: bool,
    momentum: Operand,
    eps: Operand,
) -> tuple[Value | None, ...]:
    r = _batch_norm(
        cx,
        input,
        _Affine(weight, bias),
        _Running(running_mean, running_var),
        training=training,
        momentum=momentum,
        eps=eps,
    )
    return *_three(cx, r), *r.running


# Not through `register`: torch._decomp gives this op a Python kernel under the key that `register` takes for "splits
# above us". In C++ it is an op with backend kernels and a derivative of its own.
RULES[aten.native_batch_norm.default] = RuleEntry(
    native_batch_norm,
    {},
    False,
    ("running_mean", "running_var"),
    False,
    f"{__file__}:native_batch_norm",
    _eval_keeps_nothing,
)


@lowers(aten._native_batch_norm_legit.no_stats)
def batch_norm_no_stats(
    cx: LowerContext,
    input: Value,
    weight: Value | None,
    bias: Value | None,
    training: bool,
    momentum: Operand,
    eps: Operand,
) -> tuple[Value, Value, Value]:
    return _three(
        cx,
        _batch_norm(cx, input, _Affine(weight, bias), _Running(None, None), training=True, momentum=momentum, eps=eps),
    )


@lowers(aten._native_batch_norm_legit_functional.default, promise=_eval_keeps_nothing)
def batch_norm_functional(
    cx: LowerContext,
    input: Value,
    weight: Value | None,
    bias: Value | None,
    running_mean: Value,
    running_var: Value,
    training: bool,
    momentum: Operand,
    eps: Operand,
) -> tuple[Value, ...]:
    r = _batch_norm(
        cx,
        input,
        _Affine(weight, bias),
        _Running(running_mean, running_var),
        training=training,
        momentum=momentum,
        eps=eps,
    )
    return *_three(cx, r), *_promised(cx, [r.running[0] or running_mean, r.running[1] or running_var])


@lowers(aten._native_batch_norm_legit_no_training.default)
def batch_norm_no_training(
    cx: LowerContext,
    input: Value,
    weight: Value | None,
    bias: Value | None,
    running_mean: Value,
    running_var: Value,
    momentum: Operand,
    eps: Operand,
) -> tuple[Value, Value, Value]:
    running = _Running(running_mean, running_var)
    return _three(
        cx, _batch_norm(cx, input, _Affine(weight, bias), running, training=False, momentum=momentum, eps=eps)
    )


@lowers(aten._batch_norm_with_update_functional.default)
def batch_norm_with_update(
    cx: LowerContext,
    input: Value,
    weight: Value | None,
    bias: Value | None,
    running_mean: Value,
    running_var: Value,
    momentum: Operand,
    eps: Operand,
) -> tuple[Value | None, ...]:
    running = _Running(running_mean, running_var)
    r = _batch_norm(cx, input, _Affine(weight, bias), running, training=True, momentum=momentum, eps=eps)
    reserve = cx.b.constant(0, cx.outs[3].dtype, cx.outs[3].shape)
    return *_three(cx, r), reserve, *_promised(cx, [r.running[0] or running_mean, r.running[1] or running_var])


@lowers(aten._batch_norm_no_update.default)
def batch_norm_no_update(
    cx: LowerContext,
    input: Value,
    weight: Value | None,
    bias: Value | None,
    running_mean: Value | None,
    running_var: Value | None,
    momentum: Operand,
    eps: Operand,
) -> tuple[Value, ...]:
    running = _Running(running_mean, running_var)
    training = running_mean is None
    r = _batch_norm(cx, input, _Affine(weight, bias), running, training=training, momentum=momentum, eps=eps)
    return *_three(cx, r), cx.b.constant(0, cx.outs[3].dtype, cx.outs[3].shape)


def _batch_norm_grads(
    cx: LowerContext,
    grad_out: Value,
    input: Value,
    weight: Value | None,
    stats: tuple[Value, Value],
    *,
    train: bool,
    output_mask: Sequence[bool],
) -> tuple[Value | None, Value | None, Value | None]:
    """``stats`` is the mean and 1/std the forward used."""
    b, x = cx.b, _wide(cx, input)
    dims = [d for d in range(x.rank) if d != 1]
    g = b.convert(grad_out, x.dtype)
    mean, rstd = (b.convert(s, x.dtype) for s in stats)
    d = _centered(cx, x, mean, dims)
    sums = _Sums(*reduce_sums(cx, [g, b.mul(g, d)], dims))
    param_dtype = input.dtype if weight is None else weight.dtype
    dx = dw = db = None
    if output_mask[0]:
        # The weight is one factor a channel, so that the sums serve all three gradients.
        grad = _input_grad(cx, g, d, sums, rstd, dims) if train else b.mul(g, spread(cx, rstd, x, dims))
        dx = b.convert(affine(cx, grad, param(cx, weight, x, [1]), None), input.dtype)
    if output_mask[1]:
        dw = b.convert(b.mul(sums.gd, rstd), param_dtype)
    if output_mask[2]:
        db = b.convert(sums.g, param_dtype)
    return dx, dw, db


@lowers(aten.native_batch_norm_backward.default)
def native_batch_norm_backward(
    cx: LowerContext,
    grad_out: Value,
    input: Value,
    weight: Value | None,
    running_mean: Value | None,
    running_var: Value | None,
    save_mean: Value | None,
    save_invstd: Value | None,
    train: bool,
    eps: Operand,
    output_mask: Sequence[bool],
) -> tuple[Value | None, Value | None, Value | None]:
    if train:
        assert save_mean is not None and save_invstd is not None
        stats = save_mean, save_invstd
    else:
        assert running_mean is not None and running_var is not None
        stats = running_mean, rstd_of(cx, cx.b.convert(running_var, compute_dtype(input.dtype)), eps)
    return _batch_norm_grads(cx, grad_out, input, weight, stats, train=train, output_mask=output_mask)


@lowers(aten.batch_norm_backward.default)
def batch_norm_backward(
    cx: LowerContext,
    grad_out: Value,
    input: Value,
    weight: Value,
    running_mean: Value | None,
    running_var: Value | None,
    save_mean: Value | None,
    save_var: Value | None,
    update: bool,
    eps: Operand,
    output_mask: Sequence[bool],
    reserve: Value,
) -> tuple[Value | None, Value | None, Value | None]:
    """``save_var`` is 1/std, as _batch_norm_with_update saves it."""
    return native_batch_norm_backward(
        cx, grad_out, input, weight, running_mean, running_var, save_mean, save_var, update, eps, output_mask
    )


# ---- weight norm


@lowers(aten._weight_norm_interface.default)
def weight_norm(cx: LowerContext, v: Value, g: Value, dim: int = 0) -> tuple[Value, Value]:
    b, x = cx.b, _wide(cx, v)
    dims = [d for d in range(x.rank) if d != dim % x.rank]
    norm = b.unary("sqrt", reduce_sum(cx, b.mul(x, x), dims))
    scale = b.div(b.reshape(b.convert(g, x.dtype), norm.shape), norm)
    return finish(cx, b.mul(x, spread(cx, scale, x, dims))), finish(cx, norm, 1)


@lowers(aten._weight_norm_interface_backward.default)
def weight_norm_backward(
    cx: LowerContext, grad_w: Value, saved_v: Value, saved_g: Value, saved_norms: Value, dim: int
) -> tuple[Value, Value]:
    b, x = cx.b, _wide(cx, saved_v)
    dims = [d for d in range(x.rank) if d != dim % x.rank]
    grad = b.convert(grad_w, x.dtype)
    along = reduce_sum(cx, b.mul(grad, x), dims)
    g, norm = (b.reshape(b.convert(t, x.dtype), along.shape) for t in (saved_g, saved_norms))
    radial = b.div(along, b.mul(norm, norm))
    inner = b.sub(grad, b.mul(x, spread(cx, radial, x, dims)))
    return finish(cx, b.mul(inner, spread(cx, b.div(g, norm), x, dims))), finish(cx, b.div(along, norm), 1)
