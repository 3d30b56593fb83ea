"""Quantization on plain tensors: products with packed weights or scaled float8, and fake quantization for training.

ATen's quantized dtypes do not exist on the device. A quantized number q stands for (q - zero_point) * scale.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torch_tpu.errors import LoweringMissing
from torch_tpu.ir.builder import Value
from torch_tpu.lowering.expr import Expr, expr, where
from torch_tpu.lowering.matmul import product
from torch_tpu.lowering.promote import Operand, norm_dim
from torch_tpu.lowering.reduce import reduce_max, reduce_min, reduce_sum
from torch_tpu.lowering.registry import LowerContext, lowers

aten = torch.ops.aten


# ---- products


def _columns(cx: LowerContext, x: Value) -> Expr:
    """Rank-1 ``x`` along the columns of the result, in its compute type."""
    return Expr(cx.b, cx.b.broadcast_to(cx.b.convert(x, cx.compute_dtype), cx.out.shape))


@lowers(aten._weight_int8pack_mm.default)
def weight_int8pack_mm(cx: LowerContext, self: Value, mat2: Value, scales: Value) -> Value:
    weight = cx.b.convert(mat2, self.dtype)  # exact: bfloat16 and float16 hold all of int8
    out = Expr(cx.b, product(cx, self, weight, contract=([1], [1])))
    return cx.result((out.to(cx.compute_dtype) * _columns(cx, scales)).v)


@lowers(aten._convert_weight_to_int4pack.default)
def convert_weight_to_int4pack(cx: LowerContext, self: Value, innerKTiles: int) -> Value:
    # The order inside is private to the two ops; ours is row-major, in the shape and size of CUDA's.
    rows, num_bytes = self.shape
    words = cx.b.bitcast(cx.b.reshape(self, (rows, num_bytes // 4, 4)), torch.int32)
    return cx.b.reshape(words, cx.out.shape)


@lowers(aten._weight_int4pack_mm.default)
def weight_int4pack_mm(
    cx: LowerContext,
    self: Value,
    mat2: Value,
    qGroupSize: int,
    qScaleAndZeros: Value,
) -> Value:
    b, (n, k) = cx.b, (cx.out.shape[1], self.shape[1])
    packed = Expr(b, b.bitcast(b.reshape(mat2, (n, k // 8)), torch.uint8))  # (n, k / 8, 4)
    # The even column is the upper half of a byte.
    halves = [b.binary("shift_right_logical", packed.v, packed.const(4).v), (packed & 15).v]
    pairs = b.concatenate([b.reshape(h, (n, k // 2, 1)) for h in halves], 2)
    groups = k // qGroupSize
    q = Expr(b, b.reshape(pairs, (n, groups, qGroupSize))).to(torch.float32)

    def parameter(which: int) -> Expr:  # (groups, n, 2) -> (n, groups, group size)
        part = b.reshape(b.slice_dim(qScaleAndZeros, 2, which, which + 1), (groups, n))
        return Expr(b, b.broadcast_in_dim(b.convert(part, torch.float32), q.v.shape, [1, 0]))

    weight = (q - 8.0) * parameter(0) + parameter(1)
    weight_nk = b.convert(b.reshape(weight.v, (n, k)), self.dtype)
    return cx.result(product(cx, self, weight_nk, contract=([1], [1])))


@lowers(aten._scaled_mm.default)
def scaled_mm(
    cx: LowerContext,
    self: Value,
    mat2: Value,
    scale_a: Value,
    scale_b: Value,
    bias: Value | None = None,
    scale_result: Value | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
) -> Value:
    out = _scaled_product(cx, self, mat2, scale_a, scale_b, bias)
    if scale_result is not None and cx.out.dtype.itemsize == 1:  # of a float8 result only
        out = out / _scale(cx, scale_result)
    return cx.result(out.v)


@lowers(aten._scaled_mm_v2.default)
def scaled_mm_v2(
    cx: LowerContext,
    self: Value,
    mat2: Value,
    scale_a: Sequence[Value],
    recipe_a: Sequence[int],
    swizzle_a: Sequence[int],
    scale_b: Sequence[Value],
    recipe_b: Sequence[int],
    swizzle_b: Sequence[int],
    bias: Value | None,
    out_dtype: torch.dtype | None,
    contraction_dim: Sequence[int] = [],
    use_fast_accum: bool = False,
) -> Value:
    if any(list(recipe) not in ([0], [1]) for recipe in (recipe_a, recipe_b)):  # of the tensor, of rows
        raise LoweringMissing("scales of blocks are not supported.", op=str(cx.op))
    return cx.result(_scaled_product(cx, self, mat2, scale_a[0], scale_b[0], bias).v)


def _scaled_product(
    cx: LowerContext, left: Value, right: Value, scale_left: Value, scale_right: Value, bias: Value | None
) -> Expr:
    b = cx.b
    x, y = (b.convert(v, torch.bfloat16) for v in (left, right))  # exact for every float8
    out = Expr(b, product(cx, x, y, contract=([1], [0])))
    for scale in (scale_left, scale_right):
        out = out * _scale(cx, scale)
    return out if bias is None else out + _columns(cx, bias)


def _scale(cx: LowerContext, scale: Value) -> Expr:
    """One scale for all, or one a row (M, 1) or a column (1, N)."""
    if scale.type.numel == 1:
        scale = cx.b.reshape(scale, ())
    elif scale.rank != 2 or any(have not in (1, want) for have, want in zip(scale.shape, cx.out.shape, strict=True)):
        raise LoweringMissing(f"scales of blocks ({scale.type}) are not supported.", op=str(cx.op))
    return Expr(cx.b, cx.b.broadcast_to(cx.b.convert(scale, torch.float32), cx.out.shape))


@lowers(aten.dequantize.self)
def dequantize(cx: LowerContext, self: Value) -> Value:
    return cx.result(self)  # of a plain tensor


# ---- fake quantization: the rounding of a quantized forward pass, in floats


def _channels(cx: LowerContext, x: Value, like: Value, axis: int | None, dtype: torch.dtype) -> Expr:
    """``x`` as ``dtype`` in the shape of ``like``: one number a channel along ``axis``, or (None) one for all."""
    b = cx.b
    x = b.convert(x, dtype)
    if axis is None:
        return Expr(b, b.broadcast_to(b.reshape(x, ()), like.shape))
    return Expr(b, b.broadcast_in_dim(x, like.shape, [axis]))


def _affine(
    x: Expr, scale: Expr, zero_point: Expr, low: int, high: int, *, shift_first: bool = False
) -> tuple[Expr, Expr]:
    """``x`` rounded to the grid, and where it was inside. ``scale`` is a float32, as in ATen.

    ATen adds an integer zero point after rounding, a float one before (``shift_first``): ties go different ways.
    """
    ratio = x * (1.0 / scale).to(x.dtype)
    q = (ratio + zero_point).round() if shift_first else ratio.round() + zero_point
    above = q >= float(low)
    clamped = where(above, q, float(low)).min(float(high))  # NaN is the lowest number
    return (clamped - zero_point) * scale.to(x.dtype), above & (q <= float(high))


@lowers(aten.fake_quantize_per_tensor_affine_cachemask.default)
def fake_quantize_per_tensor(
    cx: LowerContext, self: Value, scale: Operand, zero_point: int, quant_min: int, quant_max: int
) -> tuple[Value, Value]:
    x = expr(cx, self)
    step = expr(cx, scale, torch.float32)
    out, mask = _affine(x, step, x.const(float(zero_point)), quant_min, quant_max)
    return cx.result(out.v), mask.v


@lowers(aten._fake_quantize_per_tensor_affine_cachemask_tensor_qparams.default)
def fake_quantize_tensor_qparams(
    cx: LowerContext,
    self: Value,
    scale: Value,
    zero_point: Value,
    fake_quant_enabled: Value,
    quant_min: int,
    quant_max: int,
) -> tuple[Value, Value]:
    x = expr(cx, self)
    step = _channels(cx, scale, self, None, torch.float32)
    zero = _channels(cx, cx.b.convert(zero_point, torch.int64), self, None, x.dtype)
    out, mask = _affine(x, step, zero, quant_min, quant_max)
    enabled = _channels(cx, fake_quant_enabled, self, None, torch.bool)
    return cx.result(where(enabled, out, x).v), (mask | ~enabled).v


@lowers(aten.fake_quantize_per_channel_affine_cachemask.default)
def fake_quantize_per_channel(
    cx: LowerContext, self: Value, scale: Value, zero_point: Value, axis: int, quant_min: int, quant_max: int
) -> tuple[Value, Value]:
    x, axis = expr(cx, self), norm_dim(axis, self.rank)
    step = _channels(cx, scale, self, axis, torch.float32)
    zero = _channels(cx, zero_point, self, axis, x.dtype)
    shift_first = zero_point.dtype.is_floating_point
    out, mask = _affine(x, step, zero, quant_min, quant_max, shift_first=shift_first)
    return cx.result(out.v), mask.v


# ---- fake quantization whose scale and zero point learn (S. Esser et al., "Learned step size quantization", 2019)


def _rounded_zero_point(cx: LowerContext, zero_point: Value, low: int, high: int) -> Value:
    z = Expr(cx.b, cx.b.convert(zero_point, torch.float32)).round()
    return z.max(float(low)).min(float(high)).v


def _truncated_zero_point(cx: LowerContext, zero_point: Value, low: int, high: int) -> Value:
    """What ATen's backward pass of one zero point has: -1 becomes 0."""
    z = Expr(cx.b, cx.b.convert(zero_point, torch.float32)) + 0.5
    return z.max(float(low)).min(float(high)).to(torch.int64).v


@lowers(aten._fake_quantize_learnable_per_tensor_affine.default)
def fake_quantize_learnable_per_tensor(
    cx: LowerContext,
    self: Value,
    scale: Value,
    zero_point: Value,
    quant_min: int,
    quant_max: int,
    grad_factor: Operand = 1.0,
) -> Value:
    x = expr(cx, self)
    step = _channels(cx, scale, self, None, torch.float32)
    zero = _channels(cx, _rounded_zero_point(cx, zero_point, quant_min, quant_max), self, None, x.dtype)
    return cx.result(_affine(x, step, zero, quant_min, quant_max)[0].v)


@lowers(aten._fake_quantize_learnable_per_channel_affine.default)
def fake_quantize_learnable_per_channel(
    cx: LowerContext,
    self: Value,
    scale: Value,
    zero_point: Value,
    axis: int,
    quant_min: int,
    quant_max: int,
    grad_factor: Operand = 1.0,
) -> Value:
    x, axis = expr(cx, self), norm_dim(axis, self.rank)
    step = _channels(cx, scale, self, axis, torch.float32)
    zero = _channels(cx, _rounded_zero_point(cx, zero_point, quant_min, quant_max), self, axis, x.dtype)
    return cx.result(_affine(x, step, zero, quant_min, quant_max)[0].v)


def _learnable_backward(
    cx: LowerContext,
    grad: Value,
    self: Value,
    scale: Value,
    zero_point: Value,
    axis: int | None,
    limits: tuple[int, int],
    grad_factor: Operand,
) -> tuple[Value, Value, Value]:
    low, high = limits
    x, g = expr(cx, self), expr(cx, grad)
    step = _channels(cx, scale, self, axis, x.dtype)
    rounded = (_truncated_zero_point if axis is None else _rounded_zero_point)(cx, zero_point, low, high)
    zero = _channels(cx, rounded, self, axis, x.dtype)
    inverse = 1.0 / step
    q = (x * inverse + zero).round()
    above, below = q >= float(low), q <= float(high)
    inside = above & below
    factor = expr(cx, grad_factor, x.dtype)
    at_edge = where(above, float(high) - zero, float(low) - zero)
    of_scale = g * factor * where(inside, ((q - zero) * step - x) * inverse, at_edge)
    of_zero = where(inside, 0.0, -g * step * factor)
    dims = [d for d in range(self.rank) if d != axis]

    def total(value: Expr, index: int) -> Value:
        reduced = cx.b.convert(reduce_sum(cx, value.v, dims), cx.outs[index].dtype)
        return cx.b.reshape(reduced, cx.outs[index].shape)

    return cx.result(where(inside, g, 0.0).v), total(of_scale, 1), total(of_zero, 2)


@lowers(aten._fake_quantize_learnable_per_tensor_affine_backward.default)
def fake_quantize_learnable_per_tensor_backward(
    cx: LowerContext,
    grad: Value,
    self: Value,
    scale: Value,
    zero_point: Value,
    quant_min: int,
    quant_max: int,
    grad_factor: Operand = 1.0,
) -> tuple[Value, Value, Value]:
    return _learnable_backward(cx, grad, self, scale, zero_point, None, (quant_min, quant_max), grad_factor)


@lowers(aten._fake_quantize_learnable_per_channel_affine_backward.default)
def fake_quantize_learnable_per_channel_backward(
    cx: LowerContext,
    grad: Value,
    self: Value,
    scale: Value,
    zero_point: Value,
    axis: int,
    quant_min: int,
    quant_max: int,
    grad_factor: Operand = 1.0,
) -> tuple[Value, Value, Value]:
    axis = norm_dim(axis, self.rank)
    return _learnable_backward(cx, grad, self, scale, zero_point, axis, (quant_min, quant_max), grad_factor)


# ---- observed ranges

SMALLEST_SCALE = 6.1e-5  # ATen's cut-off: about the smallest normal float16


def _choose_parameters(low: Expr, high: Expr, qmin: int, qmax: int, *, symmetric: bool) -> tuple[Expr, Expr]:
    """Scale (float32) and zero point (int32) for numbers from ``low`` to ``high`` (float32), as ATen chooses them."""
    f32, f64 = torch.float32, torch.float64
    if symmetric:
        both_signs = (low < 0.0) & (high > 0.0)
        least, most = -((qmax - qmin) // 2 + 1), (qmax - qmin) // 2
        widest = (low / float(least)).abs().max((high / float(most)).abs())
        low, high = where(both_signs, widest * float(least), low), where(both_signs, widest * float(most), high)
    low, high = low.min(0.0), high.max(0.0)  # zero must be a number of the grid
    scale = (high.to(f64) - low.to(f64)) / float(qmax - qmin)
    as_float = scale.to(f32)
    scale = where(as_float.eq(0.0) | ~(1.0 / as_float).is_finite(), 0.1, scale)
    tiny = scale < SMALLEST_SCALE
    amplify = (SMALLEST_SCALE / scale.to(f32)) * low.const(1.0)
    span = low.const(SMALLEST_SCALE * (qmax - qmin))
    wide_low = where(low.eq(0.0), low, where(high.eq(0.0), -span, low * amplify))
    wide_high = where(low.eq(0.0), span, where(high.eq(0.0), high, high * amplify))
    low, high = where(tiny, wide_low, low).to(f64), where(tiny, wide_high, high).to(f64)
    scale = where(tiny, float(torch.tensor(SMALLEST_SCALE, dtype=f32)), scale)
    from_low, from_high = float(qmin) - low / scale, float(qmax) - high / scale
    error_low, error_high = abs(qmin) - (low / scale).abs(), abs(qmax) - (high / scale).abs()
    zero = where(error_low < error_high, from_low, from_high)
    if symmetric:
        zero = where((low < 0.0) & (high > 0.0), (qmin + qmax) / 2, zero)
    return scale.to(f32), zero.round().max(float(qmin)).min(float(qmax)).to(torch.int32)


@lowers(aten._fused_moving_avg_obs_fq_helper_functional.default)
def fused_moving_avg_obs_fq(
    cx: LowerContext,
    self: Value,
    observer_on: Value,
    fake_quant_on: Value,
    running_min: Value,
    running_max: Value,
    scale: Value,
    zero_point: Value,
    averaging_const: Operand,
    quant_min: int,
    quant_max: int,
    ch_axis: int,
    per_row_fake_quant: bool = False,
    symmetric_quant: bool = False,
) -> tuple[Value, ...]:
    b, x = cx.b, expr(cx, self)
    axis = norm_dim(ch_axis, self.rank) if per_row_fake_quant else None
    dims = [d for d in range(self.rank) if d != axis]
    observe, quantize = (Expr(b, b.reshape(b.convert(v, torch.bool), ())) for v in (observer_on, fake_quant_on))

    def updated(running: Value, now: Value) -> Expr:
        old, new = Expr(b, running), Expr(b, b.reshape(b.convert(now, running.dtype), running.shape))
        rate = expr(cx, averaging_const, old.dtype, running.shape)
        moved = where(old.is_finite(), old + rate * (new - old), new)  # infinite before the first update
        return where(observe, moved, old)

    low = updated(running_min, reduce_min(cx, self, dims))
    high = updated(running_max, reduce_max(cx, self, dims))
    f32 = torch.float32
    step, zero = _choose_parameters(low.to(f32), high.to(f32), quant_min, quant_max, symmetric=symmetric_quant)
    new_scale = where(quantize, Expr(b, b.convert(b.reshape(step.v, scale.shape), scale.dtype)), Expr(b, scale))
    new_zero = Expr(b, b.convert(b.reshape(zero.v, zero_point.shape), zero_point.dtype))
    new_zero = where(quantize, new_zero, Expr(b, zero_point))
    out, mask = _affine(
        x,
        _channels(cx, new_scale.v, self, axis, f32),
        _channels(cx, new_zero.v, self, axis, x.dtype),
        quant_min,
        quant_max,
    )
    off = Expr(b, b.broadcast_to((~quantize).v, self.shape))
    return cx.result(where(off, x, out).v), (mask | off).v, low.v, high.v, new_scale.v, new_zero.v
