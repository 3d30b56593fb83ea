"""Quantization on plain tensors: products with packed weights or scaled float8, and fake quantization for training.

ATen's quantized dtypes do not exist on the device. A quantized number q stands for (q - zero_point) * scale.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from torch_tpu.ir.builder import Value
from torch_tpu.ir.types import compute_dtype
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
def convert_weight_to_int4pack(cx: LowerContext, self: Value, innerKTiles: int) -> Value:  # noqa: N803
    # The order inside is private to the two ops; ours is row-major, in the shape and size of CUDA's.
    rows, num_bytes = self.shape
    words = cx.b.bitcast(cx.b.reshape(self, (rows, num_bytes // 4, 4)), torch.int32)
    return cx.b.reshape(words, cx.out.shape)


@lowers(aten._weight_int4pack_mm.default)
def weight_int4pack_mm(
    cx: LowerContext,
    self: Value,
    mat2: Value,
    qGroupSize: int,  # noqa: N803
    qScaleAndZeros: Value,  # noqa: N803
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
    b = cx.b
    a, w = (b.convert(x, torch.bfloat16) for x in (self, mat2))  # exact for every float8
    x, y = _scaled(cx, a, scale_a, 0), _scaled(cx, w, scale_b, 1)
    x_rows, y_columns = x[1], y[1]
    out = Expr(b, product(cx, x[0], y[0], contract=([1], [0])))
    for scale in (x_rows, y_columns):
        if scale is not None:
            out = out * Expr(b, b.broadcast_to(scale, out.v.shape))
    if bias is not None:
        out = out + Expr(b, b.broadcast_to(b.convert(bias, torch.float32), out.v.shape))
    if scale_result is not None:
        out = out * Expr(b, b.reshape(scale_result, ()))
    return cx.result(out.v)


# ---- fake quantization


def _along(cx: LowerContext, x: Value, axis: int, dtype: torch.dtype) -> Expr:
    """One number a channel, along ``axis`` of the result."""
    return Expr(cx.b, cx.b.broadcast_in_dim(cx.b.convert(x, dtype), cx.out.shape, [axis]))


def _single(cx: LowerContext, x: Value, dtype: torch.dtype) -> Expr:
    """The one element of ``x``, everywhere in the result."""
    return Expr(cx.b, cx.b.broadcast_to(cx.b.convert(cx.b.reshape(x, ()), dtype), cx.out.shape))
