"""Triangular solves, Cholesky and QR, on what XLA itself expands: cholesky, triangular_solve, and the custom calls Qr
and ProductOfElementaryHouseholderReflectors.

Shapes: every rule flattens its batch dims to one (B, m, n) and restores them at the end. Products here are always of
the highest precision.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from torch_tpu.ir.builder import Value
from torch_tpu.ir.types import TensorType
from torch_tpu.lowering.registry import LowerContext, lowers

aten = torch.ops.aten

_REAL = {torch.complex64: torch.float32, torch.complex128: torch.float64}


# ---- matrices


def real_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the parts of a complex dtype; a real dtype itself."""
    return _REAL.get(dtype, dtype)


def flat(cx: LowerContext, x: Value, core: int = 2) -> Value:
    """One batch dim before the last ``core`` dims."""
    return cx.b.reshape(x, (math.prod(x.shape[: x.rank - core]), *x.shape[x.rank - core :]))


def unflat(cx: LowerContext, x: Value, index: int = 0) -> Value:
    """The batch dims and dtype of result ``index``."""
    return cx.b.reshape(cx.b.convert(x, cx.outs[index].dtype), cx.outs[index].shape)


def nothing(cx: LowerContext, index: int = 0) -> Value:
    """Zeros for result ``index``: what a call without elements, or without this result, returns."""
    return cx.b.constant(0, cx.outs[index].dtype, cx.outs[index].shape)


def dot(cx: LowerContext, x: Value, y: Value) -> Value:
    """Batched matrix product (B, m, k) with (B, k, n)."""
    return cx.b.dot_general(x, y, batch=([0], [0]), contract=([2], [1]))


def conjugate(cx: LowerContext, x: Value) -> Value:
    """The complex conjugate; ``x`` itself if it is real."""
    return cx.b.complex(cx.b.real(x), cx.b.neg(cx.b.imag(x))) if x.dtype.is_complex else x


def transposed(cx: LowerContext, x: Value) -> Value:
    """(B, n, m)."""
    return cx.b.transpose(x, [*range(x.rank - 2), x.rank - 1, x.rank - 2])


def adjoint(cx: LowerContext, x: Value) -> Value:
    """The conjugate transpose."""
    return conjugate(cx, transposed(cx, x))


def magnitude(cx: LowerContext, x: Value) -> Value:
    """Absolute value, real."""
    return cx.b.op("stablehlo.abs", [x], [TensorType(x.shape, real_dtype(x.dtype))])[0]


def _order(cx: LowerContext, shape: Sequence[int], direction: str, offset: int = 0) -> Value:
    """Bool (m, n): is row + offset in ``direction`` (GE, EQ, LE, …) of column?"""
    b, plane = cx.b, tuple(shape[-2:])
    rows = b.add(b.iota(plane, 0, torch.int32), b.constant(offset, torch.int32, plane))
    return b.compare(direction, rows, b.iota(plane, 1, torch.int32))


def keep(cx: LowerContext, x: Value, direction: str, offset: int = 0) -> Value:
    """``x`` where the row + offset is in ``direction`` of the column (GE: lower triangle), else zero."""
    b = cx.b
    mask = b.broadcast_in_dim(_order(cx, x.shape, direction, offset), x.shape, [x.rank - 2, x.rank - 1])
    return b.select(mask, x, b.constant(0, x.dtype, x.shape))


def eye(cx: LowerContext, shape: Sequence[int], dtype: torch.dtype) -> Value:
    """Ones on the diagonal of the last two dims of ``shape``."""
    b = cx.b
    one = b.convert(_order(cx, shape, "EQ"), dtype)
    return b.broadcast_in_dim(one, shape, [len(shape) - 2, len(shape) - 1])


def diagonal(cx: LowerContext, x: Value) -> Value:
    """(B, min(m, n)) of (B, m, n)."""
    k = min(x.shape[1:])
    square = cx.b.slice(x, [0, 0, 0], [x.shape[0], k, k])
    return cx.b.reduce_op("add", keep(cx, square, "EQ"), 0, [2])


def scale_columns(cx: LowerContext, x: Value, factors: Value) -> Value:
    """(B, m, n) times (B, n)."""
    return cx.b.mul(x, cx.b.broadcast_in_dim(factors, x.shape, [0, 2]))


def broadcast_batch(cx: LowerContext, x: Value, batch: Sequence[int]) -> Value:
    """``x`` with its batch dims broadcast to ``batch`` and flattened."""
    return flat(cx, cx.b.broadcast_to(x, (*batch, *x.shape[-2:])))


# ---- triangular


def solve_triangular(
    cx: LowerContext, a: Value, x: Value, *, upper: bool, left: bool = True, unit: bool = False, adjoint: bool = False
) -> Value:
    """Solve with one triangle of ``a`` (B, n, n); its conjugate transpose if ``adjoint``."""
    if not x.type.numel:
        return x
    kind = "ADJOINT" if adjoint else "NO_TRANSPOSE"
    return cx.b.triangular_solve(a, x, left=left, lower=not upper, unit=unit, transpose=kind)


@lowers(aten.linalg_solve_triangular.default)
def linalg_solve_triangular(
    cx: LowerContext, self: Value, B: Value, upper: bool, left: bool = True, unitriangular: bool = False
) -> Value:
    batch = cx.out.shape[:-2]
    a, x = broadcast_batch(cx, self, batch), broadcast_batch(cx, B, batch)
    return unflat(cx, solve_triangular(cx, a, x, upper=upper, left=left, unit=unitriangular))


@lowers(aten.triangular_solve.default)
def triangular_solve(
    cx: LowerContext, self: Value, A: Value, upper: bool = True, transpose: bool = False, unitriangular: bool = False
) -> tuple[Value, ...]:
    batch = cx.out.shape[:-2]
    a, x = broadcast_batch(cx, A, batch), broadcast_batch(cx, self, batch)
    if transpose:
        a = transposed(cx, a)
    solution = solve_triangular(cx, a, x, upper=upper != transpose, unit=unitriangular)
    return unflat(cx, solution), cx.b.broadcast_to(A, cx.outs[1].shape)


# ---- Cholesky


def _cholesky(cx: LowerContext, x: Value, upper: bool) -> Value:
    """Factor of (B, n, n), zero outside its triangle, NaN where ``x`` is not positive definite."""
    if not x.type.numel:
        return x
    return keep(cx, cx.b.cholesky(x, lower=not upper), "LE" if upper else "GE")


@lowers(aten.linalg_cholesky_ex.default)
def linalg_cholesky_ex(
    cx: LowerContext, self: Value, upper: bool = False, check_errors: bool = False
) -> tuple[Value, ...]:
    b = cx.b
    factor = _cholesky(cx, flat(cx, self), upper)
    # XLA does not say which minor failed: 1 for "not positive definite".
    diag = diagonal(cx, factor)
    failed = b.is_nan(b.real(diag) if diag.dtype.is_complex else diag)
    info = b.convert(b.reduce_op("or", failed, False, [1]), torch.int32)
    return unflat(cx, factor), unflat(cx, info, 1)


@lowers(aten.cholesky.default)
def cholesky(cx: LowerContext, self: Value, upper: bool = False) -> Value:
    return unflat(cx, _cholesky(cx, flat(cx, self), upper))


def _cholesky_solve(cx: LowerContext, factor: Value, x: Value, upper: bool) -> Value:
    x = solve_triangular(cx, factor, x, upper=upper, adjoint=upper)
    return solve_triangular(cx, factor, x, upper=upper, adjoint=not upper)


@lowers(aten.cholesky_inverse.default)
def cholesky_inverse(cx: LowerContext, self: Value, upper: bool = False) -> Value:
    factor = flat(cx, self)
    return unflat(cx, _cholesky_solve(cx, factor, eye(cx, factor.shape, factor.dtype), upper))


@lowers(aten._cholesky_solve_helper.default)
def cholesky_solve_helper(cx: LowerContext, self: Value, A: Value, upper: bool) -> Value:
    return unflat(cx, _cholesky_solve(cx, flat(cx, A), flat(cx, self), upper))


# ---- QR


def householder_qr(cx: LowerContext, x: Value) -> tuple[Value, Value]:
    """LAPACK's geqrf: R over the reflectors (B, m, n), and their factors (B, min(m, n))."""
    batch, m, n = x.shape
    taus = TensorType((batch, min(m, n)), x.dtype)
    packed, tau = cx.b.custom_call("Qr", [x], [x.type, taus])
    return packed, tau


def householder_product(cx: LowerContext, reflectors: Value, tau: Value, columns: int | None = None) -> Value:
    """The first ``columns`` columns (default: as many as ``reflectors`` has) of the product of the reflectors."""
    b = cx.b
    batch, m, n = reflectors.shape
    columns = n if columns is None else columns
    if not batch * m * columns:
        return b.constant(0, reflectors.dtype, (batch, m, columns))
    zero = b.constant(0, reflectors.dtype)
    if columns < n:
        reflectors = b.slice_dim(reflectors, 2, 0, columns)
    if columns > n:
        reflectors = b.pad(reflectors, zero, [0, 0, 0], [0, 0, columns - n])
    if tau.shape[1] != columns:
        tau = b.pad(tau, zero, [0, 0], [0, columns - tau.shape[1]])
    return b.custom_call("ProductOfElementaryHouseholderReflectors", [reflectors, tau], [reflectors.type])[0]


def orthonormal(cx: LowerContext, x: Value) -> tuple[Value, Value]:
    """(Q, R) of (B, m, n) with m >= n: Q (B, m, n) with orthonormal columns, R upper triangular."""
    packed, tau = householder_qr(cx, x)
    r = keep(cx, cx.b.slice_dim(packed, 1, 0, x.shape[2]), "LE")
    return householder_product(cx, packed, tau), r


@lowers(aten.linalg_qr.default)
def linalg_qr(cx: LowerContext, A: Value, mode: str = "reduced") -> tuple[Value, ...]:
    b = cx.b
    a = flat(cx, A)
    rows = cx.outs[1].shape[-2]
    if not a.type.numel:
        q = b.broadcast_to(eye(cx, cx.out.shape, A.dtype), cx.out.shape) if len(cx.out.shape) >= 2 else nothing(cx)
        return q, nothing(cx, 1)
    packed, tau = householder_qr(cx, a)
    r = unflat(cx, keep(cx, b.slice_dim(packed, 1, 0, rows), "LE"), 1)
    if mode == "r":
        return nothing(cx), r
    return unflat(cx, householder_product(cx, packed, tau, cx.out.shape[-1])), r


@lowers(aten.geqrf.default)
def geqrf(cx: LowerContext, self: Value) -> tuple[Value, ...]:
    if not self.type.numel:
        return self, nothing(cx, 1)
    packed, tau = householder_qr(cx, flat(cx, self))
    return unflat(cx, packed), unflat(cx, tau, 1)


@lowers(aten.linalg_householder_product.default)
def linalg_householder_product(cx: LowerContext, input: Value, tau: Value) -> Value:
    return unflat(cx, householder_product(cx, flat(cx, input), flat(cx, tau, 1)))


@lowers(aten.ormqr.default)
def ormqr(
    cx: LowerContext, self: Value, input2: Value, input3: Value, left: bool = True, transpose: bool = False
) -> Value:
    if not self.type.numel or not input3.type.numel:
        return input3
    q = householder_product(cx, flat(cx, self), flat(cx, input2, 1), self.shape[-2])
    q = adjoint(cx, q) if transpose else q
    other = flat(cx, input3)
    return unflat(cx, dot(cx, q, other) if left else dot(cx, other, q))
