"""Fourier transforms: the three ATen primitives that all of ``torch.fft``, ``stft`` and ``istft`` are made of.

StableHLO transforms the last one to three dims. Other dims are moved there and back; more than three take several
passes. Its inverse kinds divide by the number of points, ATen's primitives do not: `_scale` settles both.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from torch_tpu.ir.builder import Value
from torch_tpu.ir.types import TensorType
from torch_tpu.lowering.indexing import empty
from torch_tpu.lowering.promote import norm_dim
from torch_tpu.lowering.registry import LowerContext, lowers

aten = torch.ops.aten

MAX_DIMS = 3  # of one fft op


def _scale(cx: LowerContext, x: Value, points: int, normalization: int, *, divided: bool) -> Value:
    """Apply ATen's fft_norm_mode: 0 none, 1 by the root of the points, 2 by the points.

    ``divided`` says that the op has divided by ``points`` already.
    """
    factor = (1.0, points**-0.5, 1.0 / points)[normalization]
    if divided:
        factor = (float(points), points**0.5, 1.0)[normalization]
    return x if factor == 1.0 else cx.b.mul(x, cx.b.constant(factor, x.dtype, x.shape))


def _dims_last(x: Value, dims: Sequence[int]) -> list[int]:
    """The permutation that moves ``dims`` to the end, in their order."""
    return [d for d in range(x.rank) if d not in dims] + list(dims)


def _inverse(perm: Sequence[int]) -> list[int]:
    return sorted(range(len(perm)), key=lambda i: perm[i])


def _transform(cx: LowerContext, x: Value, dims: Sequence[int], kind: str, lengths: Sequence[int]) -> Value:
    """One fft op over at most three ``dims``; ``lengths`` are the sizes in the time domain."""
    b, perm = cx.b, _dims_last(x, dims)
    y = b.transpose(x, perm)
    shape, dtype = list(y.shape), y.dtype
    if kind == "RFFT":
        shape[-1] = lengths[-1] // 2 + 1
        dtype = torch.complex128 if dtype == torch.float64 else torch.complex64
    elif kind == "IRFFT":
        shape[-1] = lengths[-1]
        dtype = torch.float64 if dtype == torch.complex128 else torch.float32
    return b.transpose(b.fft(y, kind, lengths, TensorType(tuple(shape), dtype)), _inverse(perm))


def _complex_transform(cx: LowerContext, x: Value, dims: Sequence[int], kind: str) -> Value:
    for i in range(0, len(dims), MAX_DIMS):
        part = dims[i : i + MAX_DIMS]
        x = _transform(cx, x, part, kind, [x.shape[d] for d in part])
    return x


def _points(shape: Sequence[int], dims: Sequence[int]) -> int:
    return math.prod(shape[d] for d in dims)


@lowers(aten._fft_c2c.default)
def fft_c2c(cx: LowerContext, self: Value, dim: Sequence[int], normalization: int, forward: bool) -> Value:
    if not cx.out.numel:
        return empty(cx)
    dims = [norm_dim(d, self.rank) for d in dim]
    y = _complex_transform(cx, self, dims, "FFT" if forward else "IFFT")
    return _scale(cx, y, _points(self.shape, dims), normalization, divided=not forward)


@lowers(aten._fft_r2c.default)
def fft_r2c(cx: LowerContext, self: Value, dim: Sequence[int], normalization: int, onesided: bool) -> Value:
    if not cx.out.numel:
        return empty(cx)
    dims = [norm_dim(d, self.rank) for d in dim]
    points = _points(self.shape, dims)
    x = cx.b.convert(self, torch.float64 if cx.out.dtype == torch.complex128 else torch.float32)
    if not onesided:
        y = _complex_transform(cx, cx.b.convert(x, cx.out.dtype), dims, "FFT")
        return _scale(cx, y, points, normalization, divided=False)
    real_dims = dims[-MAX_DIMS:]
    y = _transform(cx, x, real_dims, "RFFT", [self.shape[d] for d in real_dims])
    y = _complex_transform(cx, y, dims[:-MAX_DIMS], "FFT")
    return _scale(cx, y, points, normalization, divided=False)


@lowers(aten._fft_c2r.default)
def fft_c2r(cx: LowerContext, self: Value, dim: Sequence[int], normalization: int, last_dim_size: int) -> Value:
    if not cx.out.numel:
        return empty(cx)
    dims = [norm_dim(d, self.rank) for d in dim]
    x = cx.b.slice_dim(self, dims[-1], 0, last_dim_size // 2 + 1)
    y = _complex_transform(cx, x, dims[:-MAX_DIMS], "IFFT")
    real_dims = dims[-MAX_DIMS:]
    y = _transform(cx, y, real_dims, "IRFFT", [cx.out.shape[d] for d in real_dims])
    return cx.result(_scale(cx, y, _points(cx.out.shape, dims), normalization, divided=True))
