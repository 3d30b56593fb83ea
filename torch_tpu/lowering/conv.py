"""Convolutions of one to three spatial dims and their gradients, each one StableHLO convolution.

Layouts: input and output are (batch, channel, spatial…); the weight is (out, in / groups, spatial…), for transposed
convolutions (in, out / groups, spatial…). A kernel is flipped by ``reverse`` and not by the window attribute: the CPU
plugin has no fast path for the latter and TPU's folds the op into the convolution.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from torch_tpu.ir.builder import Value
from torch_tpu.ir.types import compute_dtype
from torch_tpu.lowering.reduce import reduce_sum
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
    if cx.state.host_kernels and _is_depthwise(x, w, letters, feature_groups) and set(lhs_dilation) == {1}:
        return _tap_by_tap(cx, x, w, out_shape, (stride, padding, rhs_dilation))
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


_MAX_TAPS = 49


def _is_depthwise(x: Value, w: Value, letters: tuple[str, str, str], groups: int) -> bool:
    """Whether each channel is convolved for itself, with a kernel of few elements."""
    plain = letters == ("bf", "oi", "bf")
    return plain and 1 < groups == x.shape[1] and math.prod(w.shape[2:]) <= _MAX_TAPS


def _parts(
    cx: LowerContext,
    x: Value,
    each: tuple[int, ...],
    kernel: Sequence[int],
    stride: Sequence[int],
    dilation: Sequence[int],
) -> Iterator[tuple[tuple[int, ...], Value]]:
    """Each element of the kernel, and what of the padded ``x`` it meets, broadcast to ``each``."""
    b, wide, spatial = cx.b, compute_dtype(x.dtype), each[3:]
    for tap in itertools.product(*(range(k) for k in kernel)):
        start = [t * d for t, d in zip(tap, dilation, strict=True)]
        limit = [lo + (size - 1) * st + 1 for lo, size, st in zip(start, spatial, stride, strict=True)]
        part = b.slice(x, [0, 0, *start], [*each[:2], *limit], [1, 1, *stride])
        yield tap, b.broadcast_in_dim(b.convert(part, wide), each, [0, 1, *range(3, len(each))])


def _tap_by_tap(
    cx: LowerContext,
    x: Value,
    w: Value,
    out_shape: Sequence[int],
    window: tuple[Sequence[int], list[tuple[int, int]], Sequence[int]],
) -> Value:
    """A depthwise convolution as a sum of products of slices: the CPU plugin's own takes 20 times as long."""
    b, (stride, padding, dilation) = cx.b, window
    batch, channels, *spatial = out_shape
    low, high = ([0, 0, *(p[i] for p in padding)] for i in (0, 1))
    x = b.pad(x, b.constant(0, x.dtype), low, high)
    each = (batch, x.shape[1], channels // x.shape[1], *spatial)  # one channel can have several kernels
    kernels = b.convert(b.reshape(w, (*each[1:3], *w.shape[2:])), compute_dtype(x.dtype))
    total = b.constant(0, kernels.dtype, each)
    for tap, part in _parts(cx, x, each, w.shape[2:], stride, dilation):
        factor = b.slice(kernels, [0, 0, *tap], [*each[1:3], *(t + 1 for t in tap)])
        factor = b.broadcast_in_dim(b.reshape(factor, each[1:3]), each, [1, 2])
        total = b.add(total, b.mul(part, factor))
    return b.reshape(total, tuple(out_shape))


def _tap_gradients(cx: LowerContext, x: Value, y: Value, win: Window, shape: Sequence[int]) -> Value:
    """The gradient of a depthwise weight, one sum for each element of the kernel."""
    b, wide = cx.b, compute_dtype(x.dtype)
    batch, channels, *spatial = y.shape
    each = (batch, x.shape[1], channels // x.shape[1], *spatial)
    windows = zip(x.shape[2:], spatial, shape[2:], win.padding, win.stride, win.dilation, strict=True)
    high = [max((out - 1) * st + (k - 1) * d + 1 - p - n, 0) for n, out, k, p, st, d in windows]
    x = b.pad(x, b.constant(0, x.dtype), [0, 0, *win.padding], [0, 0, *high])
    grads = b.reshape(b.convert(y, wide), each)
    dims = [0, *range(3, len(each))]
    sums = [
        b.reshape(reduce_sum(cx, b.mul(part, grads), dims), (channels, 1))
        for _, part in _parts(cx, x, each, shape[2:], win.stride, win.dilation)
    ]
    return b.reshape(b.concatenate(sums, 1), tuple(shape))


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
    few = depthwise and groups > 1 and math.prod(shape[2:]) <= _MAX_TAPS
    if cx.state.host_kernels and few and y.type.numel and max(win.stride) > 1:  # a kernel with holes: 80 times as long
        return _tap_gradients(cx, x, y, win, shape)
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
