"""Nearest-neighbour resizing of the last one to three dims, and its gradient.

Which input position an output position reads is known when the rule runs. A whole factor is a broadcast (up) or a
strided slice (down), and their gradients a sum or interior padding; other factors gather and scatter whole slices.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch._ops import OpOverload

from torch_tpu.ir.builder import Value
from torch_tpu.ir.types import compute_dtype
from torch_tpu.lowering.registry import KEYED, LowerContext, lowers
from torch_tpu.lowering.resample import Scales, put_slices, take_slices

aten = torch.ops.aten

_SCALES_1D = {"scales": KEYED}
_SCALES_2D = {"scales_h": KEYED, "scales_w": KEYED}
_SCALES_3D = {"scales_d": KEYED, **_SCALES_2D}


def _scale(size: int, out: int, given: float | None) -> torch.Tensor:
    value = 1.0 / given if given is not None and given > 0 else size / out
    return torch.tensor(value, dtype=torch.float64).to(torch.float32)


def _sources(size: int, out: int, given: float | None, *, exact: bool, whole: bool) -> list[int]:
    """The input position of each output position, in ATen's float32 arithmetic.

    ``whole``: sizes that are equal or double are resized by just that, whatever scale was given. ATen does so in its
    2-d kernel and in all gradients.
    """
    if whole and not exact and out in (size, 2 * size):
        return [i * size // out for i in range(out)]
    at = torch.arange(out, dtype=torch.float32)
    if exact:
        at += 0.5
    positions = (at * _scale(size, out, given)).floor().to(torch.int64).clamp_(max=size - 1)
    return [int(p) for p in positions]


def _repeats(sources: Sequence[int], size: int) -> int:
    """How often each input position is read, if they are read in order and equally often; else 0."""
    times = len(sources) // size
    return times if times and list(sources) == [i // times for i in range(size * times)] else 0


def _step(sources: Sequence[int]) -> int:
    """The distance of the positions read, if it is constant and positive; else 0."""
    step = sources[1] - sources[0] if len(sources) > 1 else 1
    return step if step > 0 and list(sources) == [sources[0] + i * step for i in range(len(sources))] else 0


def _resize(cx: LowerContext, x: Value, dim: int, sources: Sequence[int]) -> Value:
    b = cx.b
    if times := _repeats(sources, x.shape[dim]):
        if times == 1:
            return x
        wide = [*x.shape[: dim + 1], times, *x.shape[dim + 1 :]]
        wide_x = b.broadcast_in_dim(x, wide, [d for d in range(len(wide)) if d != dim + 1])
        return b.reshape(wide_x, [*x.shape[:dim], len(sources), *x.shape[dim + 1 :]])
    if step := _step(sources):
        return b.slice_dim(x, dim, sources[0], sources[-1] + 1, step)
    return take_slices(cx, x, dim, b.constant_list(sources, torch.int32))


def _resize_gradient(cx: LowerContext, grad: Value, dim: int, sources: Sequence[int], size: int) -> Value:
    b = cx.b
    if times := _repeats(sources, size):
        if times == 1:
            return grad
        split = [*grad.shape[:dim], size, times, *grad.shape[dim + 1 :]]
        return b.reduce_op("add", b.reshape(grad, split), 0, [dim + 1])
    if step := _step(sources):
        low, high, gaps = [0] * grad.rank, [0] * grad.rank, [0] * grad.rank
        low[dim], high[dim], gaps[dim] = sources[0], size - 1 - sources[-1], step - 1
        return b.pad(grad, b.constant(0, grad.dtype), low, high, gaps)
    shape = [*grad.shape[:dim], size, *grad.shape[dim + 1 :]]
    return put_slices(cx, grad, dim, b.constant_list(sources, torch.int32), b.constant(0, grad.dtype, shape))


def _forward(cx: LowerContext, self: Value, scales: Scales) -> Value:
    exact = "nearest_exact" in str(cx.op)
    x = self
    if 0 in cx.out.shape:
        return cx.b.constant(0, cx.out.dtype, cx.out.shape)
    for dim, given in enumerate(scales, self.rank - len(scales)):
        x = _resize(
            cx, x, dim, _sources(self.shape[dim], cx.out.shape[dim], given, exact=exact, whole=len(scales) == 2)
        )
    return x


def _backward(cx: LowerContext, grad_output: Value, scales: Scales) -> Value:
    exact = "nearest_exact" in str(cx.op)
    if 0 in cx.out.shape or not grad_output.type.numel:
        return cx.b.constant(0, cx.out.dtype, cx.out.shape)
    dtype = grad_output.dtype
    grad = cx.b.convert(grad_output, compute_dtype(dtype) if dtype.is_floating_point else dtype)
    for dim, given in enumerate(scales, grad.rank - len(scales)):
        size = cx.out.shape[dim]
        sources = _sources(size, grad_output.shape[dim], given, exact=exact, whole=True)
        grad = _resize_gradient(cx, grad, dim, sources, size)
    return cx.result(grad)


def _upsample_1d(cx: LowerContext, self: Value, output_size: Sequence[int], scales: float | None = None) -> Value:
    return _forward(cx, self, [scales])


def _upsample_2d(
    cx: LowerContext,
    self: Value,
    output_size: Sequence[int],
    scales_h: float | None = None,
    scales_w: float | None = None,
) -> Value:
    return _forward(cx, self, [scales_h, scales_w])


def _upsample_3d(
    cx: LowerContext,
    self: Value,
    output_size: Sequence[int],
    scales_d: float | None = None,
    scales_h: float | None = None,
    scales_w: float | None = None,
) -> Value:
    return _forward(cx, self, [scales_d, scales_h, scales_w])


@lowers(aten.upsample_nearest1d_backward.default, aten._upsample_nearest_exact1d_backward.default, scalars=_SCALES_1D)
def upsample_nearest1d_backward(
    cx: LowerContext,
    grad_output: Value,
    output_size: Sequence[int],
    input_size: Sequence[int],
    scales: float | None = None,
) -> Value:
    return _backward(cx, grad_output, [scales])


@lowers(aten.upsample_nearest2d_backward.default, aten._upsample_nearest_exact2d_backward.default, scalars=_SCALES_2D)
def upsample_nearest2d_backward(
    cx: LowerContext,
    grad_output: Value,
    output_size: Sequence[int],
    input_size: Sequence[int],
    scales_h: float | None = None,
    scales_w: float | None = None,
) -> Value:
    return _backward(cx, grad_output, [scales_h, scales_w])


@lowers(aten.upsample_nearest3d_backward.default, aten._upsample_nearest_exact3d_backward.default, scalars=_SCALES_3D)
def upsample_nearest3d_backward(
    cx: LowerContext,
    grad_output: Value,
    output_size: Sequence[int],
    input_size: Sequence[int],
    scales_d: float | None = None,
    scales_h: float | None = None,
    scales_w: float | None = None,
) -> Value:
    return _backward(cx, grad_output, [scales_d, scales_h, scales_w])


def _is_splittable(op: OpOverload) -> bool:
    """Whether `register` would take ``op`` for composite.

    torch._decomp gives these six a Python kernel under CompositeImplicitAutograd although ATen has real kernels.
    """
    return op.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd)


for _ops, _rule, _scales in (
    ((aten.upsample_nearest1d, aten._upsample_nearest_exact1d), _upsample_1d, _SCALES_1D),
    ((aten.upsample_nearest2d, aten._upsample_nearest_exact2d), _upsample_2d, _SCALES_2D),
    ((aten.upsample_nearest3d, aten._upsample_nearest_exact3d), _upsample_3d, _SCALES_3D),
):
    for _packet in _ops:
        if not _is_splittable(_packet.default):
            lowers(_packet.default, scalars=_scales)(_rule)
