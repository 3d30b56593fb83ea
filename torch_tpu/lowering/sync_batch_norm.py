"""The pieces of torch.nn.SyncBatchNorm: statistics here, their exchange in Python, then the rest here.

Statistics are in the compute type. Only devices have these ops: ATen has neither CPU nor meta kernels for them
(lowering/meta_kernels.py has ours).
"""

from __future__ import annotations

import torch

from torch_tpu.ir.builder import Value
from torch_tpu.ir.types import compute_dtype
from torch_tpu.lowering.norm import affine, blend, normalized, param, rstd_of, stats
from torch_tpu.lowering.promote import Operand, scalar
from torch_tpu.lowering.reduce import count, divided, finish, moments, reduce_sum, reduce_sums, spread
from torch_tpu.lowering.registry import LowerContext, lowers

aten = torch.ops.aten


def _not_channel(x: Value) -> list[int]:
    return [d for d in range(x.rank) if d != 1]


def _wide(cx: LowerContext, x: Value) -> Value:
    return cx.b.convert(x, compute_dtype(x.dtype))


@lowers(aten.batch_norm_stats.default)
def batch_norm_stats(cx: LowerContext, input: Value, eps: Operand) -> tuple[Value, Value]:
    x = _wide(cx, input)
    mean, rstd = stats(cx, x, _not_channel(x), eps)
    return finish(cx, mean), finish(cx, rstd, 1)


@lowers(aten.batch_norm_update_stats.default, writes=("running_mean", "running_var"))
def batch_norm_update_stats(
    cx: LowerContext, input: Value, running_mean: Value | None, running_var: Value | None, momentum: Operand
) -> tuple[Value | None, ...]:
    x = _wide(cx, input)
    dims = _not_channel(x)
    mean, m2 = moments(cx, x, dims)
    n = count(x.shape, dims)
    return (
        finish(cx, mean),
        finish(cx, divided(cx, m2, n), 1),
        blend(cx, running_mean, mean, momentum),
        blend(cx, running_var, divided(cx, m2, n - 1), momentum),
    )


@lowers(aten.batch_norm_elemt.default)
def batch_norm_elemt(
    cx: LowerContext,
    input: Value,
    weight: Value | None,
    bias: Value | None,
    mean: Value,
    invstd: Value,
    eps: Operand,
) -> Value:
    x = _wide(cx, input)
    mean, invstd = (cx.b.convert(v, x.dtype) for v in (mean, invstd))
    y = normalized(cx, x, mean, invstd, _not_channel(x))
    return finish(cx, affine(cx, y, param(cx, weight, x, [1]), param(cx, bias, x, [1])))


@lowers(aten.batch_norm_gather_stats_with_counts.default, writes=("running_mean", "running_var"))
def batch_norm_gather_stats_with_counts(
    cx: LowerContext,
    input: Value,
    mean: Value,
    invstd: Value,
    running_mean: Value | None,
    running_var: Value | None,
    momentum: Operand,
    eps: Operand,
    counts: Value,
) -> tuple[Value | None, ...]:
    """Row i of ``mean`` and ``invstd`` [ranks, C] is over ``counts[i]`` elements."""
    b = cx.b
    mean, invstd = _wide(cx, mean), _wide(cx, invstd)
    n = b.convert(counts, mean.dtype)
    weight = b.broadcast_in_dim(n, mean.shape, [0])
    total = b.broadcast_to(reduce_sum(cx, n, [0]), mean.shape[1:])
    center = b.div(reduce_sum(cx, b.mul(weight, mean), [0]), total)
    away = b.sub(mean, spread(cx, center, mean, [0]))
    one, small = b.constant(1, mean.dtype, mean.shape), scalar(cx, eps, mean.dtype)
    variance = b.sub(b.div(one, b.mul(invstd, invstd)), b.broadcast_to(small, mean.shape))
    m2 = reduce_sum(cx, b.mul(weight, b.add(variance, b.mul(away, away))), [0])
    free = b.sub(total, b.constant(1, total.dtype, total.shape))
    return (
        finish(cx, center),
        finish(cx, rstd_of(cx, b.div(m2, total), eps), 1),
        blend(cx, running_mean, center, momentum),
        blend(cx, running_var, b.div(m2, free), momentum),
    )


@lowers(aten.batch_norm_gather_stats.default, writes=("running_mean", "running_var"))
def batch_norm_gather_stats(
    cx: LowerContext,
    input: Value,
    mean: Value,
    invstd: Value,
    running_mean: Value | None,
    running_var: Value | None,
    momentum: Operand,
    eps: Operand,
    count: int,
) -> tuple[Value | None, ...]:
    counts = cx.b.constant(count, torch.float32, mean.shape[:1])
    return batch_norm_gather_stats_with_counts(
        cx, input, mean, invstd, running_mean, running_var, momentum, eps, counts
    )


@lowers(aten.batch_norm_backward_reduce.default)
def batch_norm_backward_reduce(
    cx: LowerContext,
    grad_out: Value,
    input: Value,
    mean: Value,
    invstd: Value,
    weight: Value | None,
    input_g: bool,
    weight_g: bool,
    bias_g: bool,
) -> tuple[Value | None, Value | None, Value | None, Value | None]:
    b, x = cx.b, _wide(cx, input)
    dims = _not_channel(x)
    g = b.convert(grad_out, x.dtype)
    d = b.sub(x, spread(cx, b.convert(mean, x.dtype), x, dims))
    sum_g, sum_gd = reduce_sums(cx, [g, b.mul(g, d)], dims)
    dtype = input.dtype if weight is None else weight.dtype
    return (
        b.convert(sum_g, mean.dtype) if input_g else None,
        b.convert(sum_gd, mean.dtype) if input_g else None,
        b.convert(b.mul(sum_gd, b.convert(invstd, x.dtype)), dtype) if weight_g else None,
        b.convert(sum_g, dtype) if bias_g else None,
    )


@lowers(aten.batch_norm_backward_elemt.default)
def batch_norm_backward_elemt(
    cx: LowerContext,
    grad_out: Value,
    input: Value,
    mean: Value,
    invstd: Value,
    weight: Value | None,
    sum_dy: Value,
    sum_dy_xmu: Value,
    count: Value,
) -> Value:
    """``count`` holds the elements of each rank, the sums are over all ranks."""
    b, x = cx.b, _wide(cx, input)
    dims = _not_channel(x)
    g = b.convert(grad_out, x.dtype)
    mean, invstd, sum_dy, sum_dy_xmu = (b.convert(v, x.dtype) for v in (mean, invstd, sum_dy, sum_dy_xmu))
    total = reduce_sum(cx, b.convert(count, x.dtype), range(count.rank))
    total = b.broadcast_to(total, mean.shape)
    slope = b.mul(b.div(sum_dy_xmu, total), b.mul(invstd, invstd))
    d = b.sub(x, spread(cx, mean, x, dims))
    inner = b.sub(g, spread(cx, b.div(sum_dy, total), x, dims))
    inner = b.sub(inner, b.mul(d, spread(cx, slope, x, dims)))
    scale = invstd if weight is None else b.mul(invstd, b.convert(weight, x.dtype))
    return finish(cx, b.mul(inner, spread(cx, scale, x, dims)))
