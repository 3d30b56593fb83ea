"""Convolutions of one to three spatial dims and their gradients, each one StableHLO convolution.

Layouts: input and output are (batch, channel, spatial…); the weight is (out, in / groups, spatial…), for transposed
convolutions (in, out / groups, spatial…). A kernel is flipped by ``reverse`` and not by the window attribute: the CPU
plugin has no fast path for the latter and TPU's folds the op into the convolution.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from torch_tpu.ir.builder import Value
from torch_tpu.ir.types import compute_dtype
from torch_tpu.lowering.registry import LowerContext, lowers

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Window:
    """How the kernel moves, one entry a spatial dim."""

    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]
    groups: int

    @classmethod
    def of(
        cls, x: Value, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int], groups: int
    ) -> Window:
        """Short lists are repeated, as ATen allows."""
        n = x.rank - 2
        full = [list(p) * n if len(p) == 1 else list(p) for p in (stride, padding, dilation)]
        return cls(full[0], full[1], full[2], groups)


def _dims(lhs: str, rhs: str, out: str, n: int) -> str:
    """Dimension numbers: the two letters of each operand, then the spatial dims in order."""
    spatial = ", ".join(map(str, range(n)))
    return "x".join(f"[{k[0]}, {k[1]}, {spatial}]" for k in (lhs, rhs)) + f"->[{out[0]}, {out[1]}, {spatial}]"


def _convolution(
    cx: LowerContext,
    x: Value,
    w: Value,
    out_shape: Sequence[int],
    letters: tuple[str, str, str],
    *,
    stride: Sequence[int],
    low: Sequence[int],
    lhs_dilation: Sequence[int],
    rhs_dilation: Sequence[int],
    spatial: Sequence[int],
    feature_groups: int = 1,
    batch_groups: int = 1,
) -> Value:
    """A convolution in the accumulation type. The high padding is what makes the spatial sizes ``spatial``."""
    wide = compute_dtype(x.dtype)
    if not x.type.numel or not w.type.numel or 0 in out_shape:
        return cx.b.constant(0, wide, out_shape)
    n = x.rank - 2
    padding = []
    for i in range(n):
        extent = (x.shape[i + 2] - 1) * lhs_dilation[i] + 1
        need = (spatial[i] - 1) * stride[i] + (w.shape[i + 2] - 1) * rhs_dilation[i] + 1
        padding.append((low[i], need - extent - low[i]))
    return cx.b.convolution(
        x,
        w,
        out_shape,
        dims=_dims(*letters, n),
        stride=stride,
        padding=padding,
        lhs_dilation=lhs_dilation,
        rhs_dilation=rhs_dilation,
        feature_groups=feature_groups,
        batch_groups=batch_groups,
        precision=cx.precision_of(x.dtype),
        out_dtype=wide,
    )


def direct(cx: LowerContext, x: Value, w: Value, win: Window, spatial: Sequence[int]) -> Value:
    """Convolution of ``x`` (B, I, …) with ``w`` (O, I / groups, …) to (B, O, *spatial)."""
    return _convolution(
        cx,
        x,
        w,
        (x.shape[0], w.shape[0], *spatial),
        ("bf", "oi", "bf"),
        stride=win.stride,
        low=win.padding,
        lhs_dilation=[1] * len(spatial),
        rhs_dilation=win.dilation,
        spatial=spatial,
        feature_groups=win.groups,
    )


def adjoint(cx: LowerContext, y: Value, w: Value, win: Window, spatial: Sequence[int]) -> Value:
    """The transpose of :func:`direct` in ``x``: ``y`` (B, O, …) and ``w`` (O, I / groups, …) give (B, I, *spatial)."""
    b, n, groups = cx.b, len(spatial), win.groups
    kernel = w.shape[2:]
    w = b.reverse(w, [i + 2 for i in range(n) if kernel[i] > 1])
    per_group = w.shape[1]
    letters = ("bf", "io", "bf")
    if groups > 1:
        split = b.reshape(w, (groups, w.shape[0] // groups, per_group, *kernel))
        swapped = b.transpose(split, [0, 2, 1, *range(3, n + 3)])
        w = b.reshape(swapped, (groups * per_group, w.shape[0] // groups, *kernel))
        letters = ("bf", "oi", "bf")
    return _convolution(
        cx,
        y,
        w,
        (y.shape[0], groups * per_group, *spatial),
        letters,
        stride=[1] * n,
        low=[d * (k - 1) - p for d, k, p in zip(win.dilation, kernel, win.padding, strict=True)],
        lhs_dilation=win.stride,
        rhs_dilation=win.dilation,
        spatial=spatial,
        feature_groups=groups,
    )


def weight_gradient(cx: LowerContext, x: Value, y: Value, win: Window, shape: Sequence[int]) -> Value:
    """Gradient of the weight of :func:`direct`, of ``shape`` (O, I / groups, …): batch and channel swap roles.

    The kernel of this convolution is ``y``: it moves by the dilation and is dilated by the stride. A depthwise one
    groups the batch (here: the channels of ``x``); with several channels a group XLA is slow at that on the CPU, so the
    groups are moved from the channels of ``x`` to its batch, where they are feature groups.
    """
    b, groups, channels = cx.b, win.groups, x.shape[1]
    depthwise = groups == channels
    if groups > 1 and not depthwise and x.type.numel:
        batch, *sizes = x.shape[0], *x.shape[2:]
        split = b.reshape(x, (batch, groups, channels // groups, *sizes))
        moved = b.transpose(split, [1, 0, *range(2, split.rank)])
        x = b.reshape(moved, (groups * batch, channels // groups, *sizes))
    return _convolution(
        cx,
        x,
        y,
        shape,
        ("fb", "io", "fb"),
        stride=win.dilation,
        low=win.padding,
        lhs_dilation=[1] * (x.rank - 2),
        rhs_dilation=win.stride,
        spatial=shape[2:],
        feature_groups=1 if depthwise else groups,
        batch_groups=groups if depthwise else 1,
    )


@lowers(aten.convolution.default, aten.convolution_overrideable.default)
def convolution(
    cx: LowerContext,
    input: Value,
    weight: Value,
    bias: Value | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Value:
    win = Window.of(input, stride, padding, dilation, groups)
    spatial = cx.out.shape[2:]  # knows the output padding
    out = (adjoint if transposed else direct)(cx, input, weight, win, spatial)
    if bias is not None:
        wide_bias = cx.b.convert(bias, out.dtype)
        out = cx.b.add(out, cx.b.broadcast_in_dim(wide_bias, out.shape, [1]))
    return cx.result(out)


@lowers(aten.convolution_backward.default)
def convolution_backward(
    cx: LowerContext,
    grad_output: Value,
    input: Value,
    weight: Value,
    bias_sizes: Sequence[int] | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    output_mask: Sequence[bool],
) -> tuple[Value | None, ...]:
    b = cx.b
    win = Window.of(input, stride, padding, dilation, groups)
    grad_input = grad_weight = grad_bias = None
    if output_mask[0]:
        back = direct if transposed else adjoint
        grad_input = b.convert(back(cx, grad_output, weight, win, input.shape[2:]), input.dtype)
    if output_mask[1]:
        x, y = (grad_output, input) if transposed else (input, grad_output)
        grad_weight = b.convert(weight_gradient(cx, x, y, win, weight.shape), weight.dtype)
    if output_mask[2]:
        wide = b.convert(grad_output, compute_dtype(grad_output.dtype))
        dims = [i for i in range(grad_output.rank) if i != 1]
        grad_bias = b.convert(b.reduce_op("add", wide, 0, dims), grad_output.dtype)
    return grad_input, grad_weight, grad_bias


@lowers(aten.convolution_backward_overrideable.default)
def convolution_backward_overrideable(
    cx: LowerContext,
    grad_output: Value,
    input: Value,
    weight: Value,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    output_mask: Sequence[bool],
) -> tuple[Value | None, ...]:
    return convolution_backward(
        cx,
        grad_output,
        input,
        weight,
        None,
        stride,
        padding,
        dilation,
        transposed,
        output_padding,
        groups,
        output_mask,
    )
