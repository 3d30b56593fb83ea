"""Singular values and Hermitian eigenvectors by one-sided Jacobi rotations.

Columns of a matrix are rotated pairwise until all are orthogonal: their lengths are the singular values. A round
rotates n / 2 disjoint pairs at once, so it is vector code; a sweep of n - 1 rounds meets every pair once. All values
come out accurate to the precision times the largest. XLA's own Eigh call stops near 1e-6 and takes seconds to compile.

Layout: the columns are the rows of two stacks (B, n / 2, width), which rotate against each other like the players of a
round-robin tournament. A row holds the column, then the column of the accumulated rotations.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from torch_tpu.ir.builder import Value
from torch_tpu.lowering.linalg import (
    adjoint,
    conjugate,
    diagonal,
    dot,
    eye,
    flat,
    householder_product,
    householder_qr,
    keep,
    magnitude,
    nothing,
    real_dtype,
    scale_columns,
    transposed,
    unflat,
)
from torch_tpu.lowering.registry import LowerContext, lowers

aten = torch.ops.aten

_MAX_SWEEPS = 30


@dataclass(frozen=True, slots=True)
class _Rotation:
    """Of every pair: sine, tangent of half the angle, phase of the pair's product; (B, n / 2)."""

    sine: Value
    half_tangent: Value
    phase: Value


def _pair_product(cx: LowerContext, x: Value, y: Value) -> Value:
    return cx.b.reduce_op("add", cx.b.mul(conjugate(cx, x), y), 0, [2])


def _square(cx: LowerContext, x: Value) -> Value:
    """Squared length of every row, real."""
    size = magnitude(cx, x)
    return cx.b.reduce_op("add", cx.b.mul(size, size), 0, [2])


def _rotation(cx: LowerContext, x: Value, y: Value) -> tuple[_Rotation, Value]:
    """What makes the rows of ``x`` and ``y`` orthogonal, and the largest cosine between them before."""
    b = cx.b
    alpha, beta, gamma = _square(cx, x), _square(cx, y), _pair_product(cx, x, y)
    size = magnitude(cx, gamma)
    zero, one, two = (b.constant(v, size.dtype, size.shape) for v in (0, 1, 2))
    flat_pair = b.compare("EQ", size, zero)
    safe = b.select(flat_pair, one, size)
    zeta = b.div(b.sub(beta, alpha), b.mul(two, safe))
    tangent = b.div(one, b.add(magnitude(cx, zeta), b.unary("sqrt", b.add(one, b.mul(zeta, zeta)))))
    tangent = b.select(b.compare("LT", zeta, zero), b.neg(tangent), tangent)
    tangent = b.select(flat_pair, zero, tangent)
    cosine = b.div(one, b.unary("sqrt", b.add(one, b.mul(tangent, tangent))))
    sine = b.mul(cosine, tangent)
    lengths = b.mul(b.unary("sqrt", alpha), b.unary("sqrt", beta))
    none = b.compare("EQ", lengths, zero)
    angle = b.select(none, zero, b.div(size, b.select(none, one, lengths)))
    if gamma.dtype.is_complex:
        unit = b.div(gamma, b.convert(safe, gamma.dtype))
        phase = b.select(flat_pair, b.constant(1, gamma.dtype, gamma.shape), unit)
    else:
        phase = b.select(b.compare("LT", gamma, zero), b.neg(one), one)
    worst = b.reduce_op("maximum", angle, 0, [0, 1])
    half_tangent = b.div(sine, b.add(one, cosine))
    return _Rotation(b.convert(sine, gamma.dtype), b.convert(half_tangent, gamma.dtype), phase), worst


def _round(cx: LowerContext, top: Value, bottom: Value, dots: int) -> tuple[Value, Value, Value]:
    """Rotate all pairs, then move every row but the first one seat on."""
    b, half = cx.b, top.shape[1]
    turn, worst = _rotation(cx, b.slice_dim(top, 2, 0, dots), b.slice_dim(bottom, 2, 0, dots))

    def wide(v: Value) -> Value:
        return b.broadcast_in_dim(v, top.shape, [0, 1])

    bottom = b.mul(bottom, wide(conjugate(cx, turn.phase)))
    # As increments, so that the rounding of a small rotation is small and lengths do not drift.
    sine, half_tangent = wide(turn.sine), wide(turn.half_tangent)
    new_top = b.sub(top, b.mul(sine, b.add(bottom, b.mul(half_tangent, top))))
    new_bottom = b.add(bottom, b.mul(sine, b.sub(top, b.mul(half_tangent, bottom))))
    if half == 1:
        return new_top, new_bottom, worst
    seats = [b.slice_dim(new_top, 1, 0, 1), b.slice_dim(new_bottom, 1, 0, 1)]
    if half > 2:
        seats.append(b.slice_dim(new_top, 1, 1, half - 1))
    moved_bottom = [b.slice_dim(new_bottom, 1, 1, half), b.slice_dim(new_top, 1, half - 1, half)]
    return b.concatenate(seats, 1), b.concatenate(moved_bottom, 1), worst


def jacobi(cx: LowerContext, rows: Value, dots: int) -> Value:
    """Rotate ``rows`` (B, n, width) against each other until their first ``dots`` elements are orthogonal."""
    b = cx.b
    n = rows.shape[1]
    even = n + n % 2
    if even != n:
        rows = b.pad(rows, b.constant(0, rows.dtype), [0, 0, 0], [0, 1, 0])
    real = real_dtype(rows.dtype)
    half, rounds = even // 2, max(even - 1, 1)
    tolerance = torch.finfo(real).eps * max(8.0, 2 * math.sqrt(dots))

    def sweep(state: Sequence[Value]) -> Sequence[Value]:
        def unfinished(inner: Sequence[Value]) -> Value:
            return b.compare("LT", inner[2], b.constant(rounds, torch.int32))

        def step(inner: Sequence[Value]) -> Sequence[Value]:
            top, bottom, worst = _round(cx, inner[0], inner[1], dots)
            count = b.add(inner[2], b.constant(1, torch.int32))
            return [top, bottom, count, b.maximum(inner[3], worst)]

        start = [state[0], state[1], b.constant(0, torch.int32), b.constant(0, real)]
        top, bottom, _, worst = b.while_(start, unfinished, step)
        return [top, bottom, b.add(state[2], b.constant(1, torch.int32)), worst]

    def rough(state: Sequence[Value]) -> Value:
        few = b.compare("LT", state[2], b.constant(_MAX_SWEEPS, torch.int32))
        return b.and_(few, b.compare("GT", state[3], b.constant(tolerance, real)))

    stacks = [b.slice_dim(rows, 1, 0, half), b.slice_dim(rows, 1, half, even)]
    done = b.while_([*stacks, b.constant(0, torch.int32), b.constant(1, real)], rough, sweep)
    return b.slice_dim(b.concatenate(done[:2], 1), 1, 0, n)


def _by_key(cx: LowerContext, key: Value, rows: Value, *, descending: bool) -> tuple[Value, Value]:
    """``key`` (B, n) sorted, and ``rows`` (B, n, width) in that order."""
    b = cx.b
    index = b.iota(key.shape, 1, torch.int32)
    direction = "GT" if descending else "LT"
    key, index = b.sort([key, index], 1, lambda lo, hi: b.compare(direction, lo[0], hi[0]), stable=True)
    picked = b.gather(
        rows,
        b.reshape(index, (*index.shape, 1)),
        offset_dims=[2],
        collapsed=[1],
        start_index_map=[1],
        index_vector_dim=2,
        slice_sizes=(1, 1, rows.shape[2]),
        batch=([0], [0]),
    )
    return key, picked


def _normalized(cx: LowerContext, x: Value) -> tuple[Value, Value]:
    """``x`` (B, m, n) divided by its largest magnitude, so that squares do not overflow; and that magnitude (B,)."""
    b = cx.b
    largest = b.reduce_op("maximum", magnitude(cx, x), 0, [1, 2])
    largest = b.select(
        b.compare("GT", largest, b.constant(0, largest.dtype, largest.shape)),
        largest,
        b.constant(1, largest.dtype, largest.shape),
    )
    return b.div(x, b.broadcast_in_dim(b.convert(largest, x.dtype), x.shape, [0])), largest


def hermitian_eigenvectors(cx: LowerContext, a: Value) -> tuple[Value, Value]:
    """Ascending eigenvalues (B, n), real, and eigenvectors (B, n, n) of a Hermitian ``a``.

    Shifted by its Frobenius norm ``a`` is positive definite; then its columns are orthogonal in its eigenbasis only.
    """
    b = cx.b
    n = a.shape[1]
    a, scale = _normalized(cx, a)
    one = eye(cx, a.shape, a.dtype)
    square = b.reduce_op("add", _square(cx, a), 0, [1])
    norm = b.unary("sqrt", square)
    shift = b.mul(one, b.broadcast_in_dim(b.convert(norm, a.dtype), one.shape, [0]))
    rows = b.concatenate([b.add(transposed(cx, a), shift), one], 2)
    rows = b.slice_dim(jacobi(cx, rows, n), 2, n, 2 * n)  # row j is eigenvector j
    image = dot(cx, rows, transposed(cx, a))
    value = b.reduce_op("add", b.mul(conjugate(cx, rows), image), 0, [2])
    value = b.real(value) if value.dtype.is_complex else value
    value, rows = _by_key(cx, value, rows, descending=False)
    return b.mul(value, b.broadcast_in_dim(scale, value.shape, [0])), transposed(cx, rows)


@lowers(aten._linalg_eigh.default)
def linalg_eigh(cx: LowerContext, A: Value, UPLO: str = "L", compute_v: bool = True) -> tuple[Value, ...]:
    b = cx.b
    a = flat(cx, A)
    if not a.type.numel:
        return nothing(cx), nothing(cx, 1)
    if UPLO.upper() == "U":
        a = adjoint(cx, a)
    # From the lower triangle alone, with a real diagonal.
    strict, diag = keep(cx, a, "GT"), keep(cx, a, "EQ")
    if a.dtype.is_complex:
        diag = b.convert(b.real(diag), a.dtype)
    w, v = hermitian_eigenvectors(cx, b.add(b.add(strict, diag), adjoint(cx, strict)))
    return unflat(cx, w), unflat(cx, v, 1) if compute_v else nothing(cx, 1)


# ---- singular values


def _unit_columns(cx: LowerContext, x: Value) -> Value:
    """Orthonormal columns along the orthogonal, descending columns of ``x`` (B, n, n); any where a column is zero."""
    b = cx.b
    packed, tau = householder_qr(cx, x)
    diag = diagonal(cx, packed)
    size = magnitude(cx, diag)
    zero, one = (b.constant(v, size.dtype, size.shape) for v in (0, 1))
    none = b.compare("EQ", size, zero)
    unit = b.div(diag, b.convert(b.select(none, one, size), diag.dtype))
    unit = b.select(none, b.constant(1, diag.dtype, diag.shape), unit)
    return scale_columns(cx, householder_product(cx, packed, tau), unit)


@dataclass(frozen=True, slots=True)
class Svd:
    """``u @ diag(s) @ vh`` of a tall matrix; vectors are None unless asked for."""

    u: Value | None
    s: Value
    vh: Value | None


def tall_svd(cx: LowerContext, a: Value, columns: int, *, vectors: bool) -> Svd:
    """Decompose (B, m, n) with m >= n; ``u`` gets ``columns`` columns, n or m."""
    b = cx.b
    _, m, n = a.shape
    a, scale = _normalized(cx, a)
    packed = tau = None
    if m > n:
        packed, tau = householder_qr(cx, a)
        a = keep(cx, b.slice_dim(packed, 1, 0, n), "LE")
    rows = transposed(cx, a)
    if vectors:
        rows = b.concatenate([rows, eye(cx, rows.shape, rows.dtype)], 2)
    rows = jacobi(cx, rows, n)
    length = b.unary("sqrt", _square(cx, b.slice_dim(rows, 2, 0, n)))
    s, rows = _by_key(cx, length, rows, descending=True)
    s = b.mul(s, b.broadcast_in_dim(scale, s.shape, [0]))
    if not vectors:
        return Svd(None, s, None)
    u = _unit_columns(cx, transposed(cx, b.slice_dim(rows, 2, 0, n)))
    vh = conjugate(cx, b.slice_dim(rows, 2, n, 2 * n))
    if packed is not None and tau is not None:
        q = householder_product(cx, packed, tau, columns)
        parts = [dot(cx, b.slice_dim(q, 2, 0, n), u)]
        u = b.concatenate([*parts, b.slice_dim(q, 2, n, columns)] if columns > n else parts, 2)
    return Svd(u, s, vh)


@lowers(aten._linalg_svd.default)
def linalg_svd(
    cx: LowerContext, A: Value, full_matrices: bool = False, compute_uv: bool = True, driver: str | None = None
) -> tuple[Value, ...]:
    b = cx.b
    a = flat(cx, A)
    _, m, n = a.shape
    if not a.type.numel:
        if not compute_uv:
            return nothing(cx), nothing(cx, 1), nothing(cx, 2)
        return eye(cx, cx.out.shape, A.dtype), nothing(cx, 1), eye(cx, cx.outs[2].shape, A.dtype)
    wide = m < n
    got = tall_svd(cx, adjoint(cx, a) if wide else a, max(m, n) if full_matrices else min(m, n), vectors=compute_uv)
    s = unflat(cx, b.convert(got.s, cx.outs[1].dtype), 1)
    if got.u is None or got.vh is None:
        return nothing(cx), s, nothing(cx, 2)
    u, vh = (adjoint(cx, got.vh), adjoint(cx, got.u)) if wide else (got.u, got.vh)
    return unflat(cx, u), s, unflat(cx, vh, 2)
