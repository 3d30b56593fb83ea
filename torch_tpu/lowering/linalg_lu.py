"""LU factors with partial pivoting, and what rests on them: solve, inverse, determinant.

XLA has no LU that every plugin expands, so it is a loop over columns, each step one rank-1 update; large matrices are
factored in blocks of columns, where the bulk is a triangular solve and a product.

Real determinants return the factors of the transposed matrix, as ATen does for contiguous arguments: the derivative
formula of PyTorch looks at the argument's strides to know which factors it gets.

Shapes: everything is flattened to one batch dim, (B, m, n). A permutation is (B, m): row i of the factored matrix is
row ``perm[i]`` of the argument. Pivots are LAPACK's: 1-based, to be applied one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from torch_tpu.ir.builder import Value
from torch_tpu.lowering.linalg import (
    broadcast_batch,
    diagonal,
    dot,
    eye,
    flat,
    keep,
    magnitude,
    nothing,
    real_dtype,
    solve_triangular,
    transposed,
    unflat,
)
from torch_tpu.lowering.registry import LowerContext, lowers

aten = torch.ops.aten

_BLOCK = 64


@dataclass(frozen=True, slots=True)
class Lu:
    """``packed`` (B, m, n): L below the diagonal, U on and above. ``pivots`` (B, min(m, n)) int32."""

    packed: Value
    pivots: Value
    perm: Value


def _pick_rows(cx: LowerContext, x: Value, index: Value) -> Value:
    """Rows ``index`` (B, k) of ``x`` (B, m, n)."""
    b = cx.b
    if not x.type.numel:
        return b.constant(0, x.dtype, (*index.shape, x.shape[2]))
    return b.gather(
        x,
        b.reshape(index, (*index.shape, 1)),
        offset_dims=[2],
        collapsed=[1],
        start_index_map=[1],
        index_vector_dim=2,
        slice_sizes=(1, 1, x.shape[2]),
        batch=([0], [0]),
    )


def _pivot_size(cx: LowerContext, x: Value) -> Value:
    """LAPACK's measure of a pivot: |re| + |im| for complex numbers."""
    if not x.dtype.is_complex:
        return magnitude(cx, x)
    return cx.b.add(magnitude(cx, cx.b.real(x)), magnitude(cx, cx.b.imag(x)))


def _first_largest(cx: LowerContext, size: Value) -> Value:
    """(B,) int32: where each row of ``size`` (B, m) is largest."""
    b = cx.b

    def larger(left: Sequence[Value], right: Sequence[Value]) -> list[Value]:
        tie = b.and_(b.compare("EQ", left[0], right[0]), b.compare("LT", left[1], right[1]))
        first = b.or_(b.compare("GT", left[0], right[0]), tie)
        return [b.select(first, lo, hi) for lo, hi in zip(left, right, strict=True)]

    inits = [b.constant(-2, size.dtype), b.constant(0, torch.int32)]
    return b.reduce([size, b.iota(size.shape, 1, torch.int32)], inits, [1], larger)[1]


def _exchange(cx: LowerContext, x: Value, at_k: Value, at_p: Value, row_k: Value, row_p: Value) -> Value:
    """``x`` with the rows marked by the two masks (B, m) exchanged; the rows are (B, …) like one row of ``x``."""
    b = cx.b
    dims = [0, *range(2, x.rank)]
    at_k, at_p = (b.broadcast_in_dim(mask, x.shape, [0, 1]) for mask in (at_k, at_p))
    row_k, row_p = (b.broadcast_in_dim(row, x.shape, dims) for row in (row_k, row_p))
    return b.select(at_k, row_p, b.select(at_p, row_k, x))


def _factor_panel(cx: LowerContext, a: Value, pivot: bool) -> Lu:
    """All columns in one loop."""
    b = cx.b
    batch, m, n = a.shape
    steps = min(m, n)
    rows = b.iota((batch, m), 1, torch.int32)
    zero, one = b.constant(0, torch.int32), b.constant(1, torch.int32)

    def step(state: Sequence[Value]) -> Sequence[Value]:
        k, x, pivots, perm = state
        k_all = b.broadcast_in_dim(k, rows.shape, [])
        column = b.reshape(b.dynamic_slice(x, [zero, zero, k], [batch, m, 1]), (batch, m))
        p = b.broadcast_in_dim(k, (batch,), [])
        if pivot:
            size = _pivot_size(cx, column)
            below = b.compare("GE", rows, k_all)
            p = _first_largest(cx, b.select(below, size, b.constant(-1, size.dtype, size.shape)))
        at_k = b.compare("EQ", rows, k_all)
        at_p = b.compare("EQ", rows, b.broadcast_in_dim(p, rows.shape, [0]))
        row_k = b.reshape(b.dynamic_slice(x, [zero, k, zero], [batch, 1, n]), (batch, n))
        row_p = b.reshape(_pick_rows(cx, x, b.reshape(p, (batch, 1))), (batch, n))
        x = _exchange(cx, x, at_k, at_p, row_k, row_p)
        top, other = (b.reshape(b.dynamic_slice(r, [zero, k], [batch, 1]), (batch,)) for r in (row_p, row_k))
        column = _exchange(cx, column, at_k, at_p, other, top)
        none = b.compare("EQ", top, b.constant(0, top.dtype, top.shape))
        safe = b.select(none, b.constant(1, top.dtype, top.shape), top)
        after = b.compare("GT", rows, k_all)
        factor = b.div(column, b.broadcast_in_dim(safe, column.shape, [0]))
        factor = b.select(after, factor, b.constant(0, factor.dtype, factor.shape))
        columns = b.iota((batch, n), 1, torch.int32)
        k_columns = b.broadcast_in_dim(k, columns.shape, [])
        rest = b.select(b.compare("GT", columns, k_columns), row_p, b.constant(0, row_p.dtype, row_p.shape))
        wide = b.broadcast_in_dim(factor, x.shape, [0, 1])
        x = b.sub(x, b.mul(wide, b.broadcast_in_dim(rest, x.shape, [0, 2])))
        here = b.broadcast_in_dim(b.compare("EQ", columns, k_columns), x.shape, [0, 2])
        x = b.select(b.and_(here, b.broadcast_in_dim(after, x.shape, [0, 1])), wide, x)
        pivots = b.dynamic_update_slice(pivots, b.reshape(b.add(p, _ones(cx, p)), (batch, 1)), [zero, k])
        perm_k = b.reshape(b.dynamic_slice(perm, [zero, k], [batch, 1]), (batch,))
        perm_p = b.reduce_op("add", b.select(at_p, perm, b.constant(0, torch.int32, perm.shape)), 0, [1])
        perm = _exchange(cx, perm, at_k, at_p, perm_k, perm_p)
        return [b.add(k, one), x, pivots, perm]

    def unfinished(state: Sequence[Value]) -> Value:
        return b.compare("LT", state[0], b.constant(steps, torch.int32))

    start = [zero, a, b.constant(0, torch.int32, (batch, steps)), rows]
    _, packed, pivots, perm = b.while_(start, unfinished, step)
    return Lu(packed, pivots, perm)


def _ones(cx: LowerContext, like: Value) -> Value:
    return cx.b.constant(1, like.dtype, like.shape)


def _put(cx: LowerContext, x: Value, part: Value, row: int, column: int) -> Value:
    starts = [cx.b.constant(i, torch.int32) for i in (0, row, column)]
    return cx.b.dynamic_update_slice(x, part, starts) if part.type.numel else x


def lu_factor(cx: LowerContext, a: Value, *, pivot: bool = True) -> Lu:
    """LU of (B, m, n)."""
    b = cx.b
    batch, m, n = a.shape
    steps = min(m, n)
    if not a.type.numel:
        return Lu(a, b.constant(0, torch.int32, (batch, steps)), b.iota((batch, m), 1, torch.int32))
    if steps <= 2 * _BLOCK:
        return _factor_panel(cx, a, pivot)
    perm = b.iota((batch, m), 1, torch.int32)
    pivots = []
    for start in range(0, steps, _BLOCK):
        width = min(_BLOCK, steps - start)
        end = start + width
        panel = _factor_panel(cx, b.slice(a, [0, start, start], [batch, m, end]), pivot)
        pivots.append(b.add(panel.pivots, b.constant(start, torch.int32, panel.pivots.shape)))
        below = _pick_rows(cx, b.slice_dim(a, 1, start, m), panel.perm)
        order = b.reshape(b.slice_dim(perm, 1, start, m), (batch, m - start, 1))
        moved = b.reshape(_pick_rows(cx, order, panel.perm), (batch, m - start))
        perm = b.concatenate([b.slice_dim(perm, 1, 0, start), moved], 1) if start else moved
        a = _put(cx, _put(cx, a, below, start, 0), panel.packed, start, start)
        if end == n:
            continue
        square = b.slice_dim(panel.packed, 1, 0, width)
        right = b.slice_dim(below, 2, end, n)
        upper = solve_triangular(cx, square, b.slice_dim(right, 1, 0, width), upper=False, unit=True)
        a = _put(cx, a, upper, start, end)
        if end < m:
            product = dot(cx, b.slice_dim(panel.packed, 1, width, m - start), upper)
            a = _put(cx, a, b.sub(b.slice_dim(right, 1, width, m - start), product), end, end)
    return Lu(a, b.concatenate(pivots, 1), perm)


def _permutation(cx: LowerContext, pivots: Value, m: int) -> Value:
    """The permutation (B, m) that the exchanges ``pivots`` (B, k) amount to."""
    b = cx.b
    batch, steps = pivots.shape
    rows = b.iota((batch, m), 1, torch.int32)
    if not pivots.type.numel:
        return rows
    zero, one = b.constant(0, torch.int32), b.constant(1, torch.int32)
    none = b.constant(0, torch.int32, rows.shape)

    def step(state: Sequence[Value]) -> Sequence[Value]:
        k, perm = state
        p = b.reshape(b.dynamic_slice(pivots, [zero, k], [batch, 1]), (batch,))
        at_k = b.compare("EQ", rows, b.broadcast_in_dim(k, rows.shape, []))
        at_p = b.compare("EQ", rows, b.broadcast_in_dim(b.sub(p, _ones(cx, p)), rows.shape, [0]))
        perm_k, perm_p = (b.reduce_op("add", b.select(mask, perm, none), 0, [1]) for mask in (at_k, at_p))
        return [b.add(k, one), _exchange(cx, perm, at_k, at_p, perm_k, perm_p)]

    def unfinished(state: Sequence[Value]) -> Value:
        return b.compare("LT", state[0], b.constant(steps, torch.int32))

    return b.while_([zero, rows], unfinished, step)[1]


def _inverted(cx: LowerContext, perm: Value) -> Value:
    b = cx.b
    rows = b.iota(perm.shape, 1, torch.int32)
    return b.sort([perm, rows], 1, lambda lo, hi: b.compare("LT", lo[0], hi[0]), stable=False)[1]


def lu_solve(
    cx: LowerContext, packed: Value, perm: Value, x: Value, *, left: bool = True, adjoint: bool = False
) -> Value:
    """Solve A X = B (or X A = B) with the factors of A, or with its conjugate transpose."""

    def half(v: Value, upper: bool) -> Value:
        return solve_triangular(cx, packed, v, upper=upper, left=left, unit=not upper, adjoint=adjoint)

    def reordered(v: Value, index: Value) -> Value:
        if left:
            return _pick_rows(cx, v, index)
        return transposed(cx, _pick_rows(cx, transposed(cx, v), index))

    if left != adjoint:
        # A = P' L U from the left, A^H = U^H L^H P from the right: the argument is permuted first.
        return half(half(reordered(x, perm), False), True)
    return reordered(half(half(x, True), False), _inverted(cx, perm))


def _info(cx: LowerContext, packed: Value) -> Value:
    """(B,) int32: the first zero on U's diagonal, 1-based; 0 if there is none."""
    b = cx.b
    diag = diagonal(cx, packed)
    n = diag.shape[1]
    if not n:
        return b.constant(0, torch.int32, diag.shape[:1])
    place = b.add(b.iota(diag.shape, 1, torch.int32), b.constant(1, torch.int32, diag.shape))
    is_zero = b.compare("EQ", diag, b.constant(0, diag.dtype, diag.shape))
    first = b.reduce_op("minimum", b.select(is_zero, place, b.constant(n + 1, torch.int32, diag.shape)), n + 1, [1])
    none = b.compare("GT", first, b.constant(n, torch.int32, first.shape))
    return b.select(none, b.constant(0, torch.int32, first.shape), first)


# ---- rules


@lowers(aten.linalg_lu_factor_ex.default)
def linalg_lu_factor_ex(
    cx: LowerContext, A: Value, pivot: bool = True, check_errors: bool = False
) -> tuple[Value, ...]:
    lu = lu_factor(cx, flat(cx, A), pivot=pivot)
    return unflat(cx, lu.packed), unflat(cx, lu.pivots, 1), unflat(cx, _info(cx, lu.packed), 2)


def _parts(cx: LowerContext, packed: Value) -> tuple[Value, Value]:
    b = cx.b
    _, m, n = packed.shape
    k = min(m, n)
    lower = keep(cx, b.slice_dim(packed, 2, 0, k), "GT")
    return b.add(lower, eye(cx, lower.shape, lower.dtype)), keep(cx, b.slice_dim(packed, 1, 0, k), "LE")


def _permutation_matrix(cx: LowerContext, perm: Value, dtype: torch.dtype) -> Value:
    """P with A = P L U: column i has its one in row ``perm[i]``."""
    b = cx.b
    shape = (*perm.shape, perm.shape[1])
    here = b.compare("EQ", b.iota(shape, 1, torch.int32), b.broadcast_in_dim(perm, shape, [0, 2]))
    return b.convert(here, dtype)


@lowers(aten.linalg_lu.default)
def linalg_lu(cx: LowerContext, A: Value, pivot: bool = True) -> tuple[Value, ...]:
    lu = lu_factor(cx, flat(cx, A), pivot=pivot)
    lower, upper = _parts(cx, lu.packed)
    p = unflat(cx, _permutation_matrix(cx, lu.perm, A.dtype)) if pivot else nothing(cx)
    return p, unflat(cx, lower, 1), unflat(cx, upper, 2)


@lowers(aten.lu_unpack.default)
def lu_unpack(
    cx: LowerContext, LU_data: Value, LU_pivots: Value, unpack_data: bool = True, unpack_pivots: bool = True
) -> tuple[Value, ...]:
    packed = flat(cx, LU_data)
    p, lower, upper = nothing(cx), nothing(cx, 1), nothing(cx, 2)
    if unpack_pivots:
        perm = _permutation(cx, flat(cx, LU_pivots, 1), packed.shape[1])
        p = unflat(cx, _permutation_matrix(cx, perm, LU_data.dtype))
    if unpack_data:
        lo, up = _parts(cx, packed)
        lower, upper = unflat(cx, lo, 1), unflat(cx, up, 2)
    return p, lower, upper


@lowers(aten.linalg_lu_solve.default)
def linalg_lu_solve(
    cx: LowerContext, LU: Value, pivots: Value, B: Value, left: bool = True, adjoint: bool = False
) -> Value:
    b = cx.b
    batch = cx.out.shape[:-2]
    if 0 in cx.out.shape:
        return nothing(cx)
    packed, x = broadcast_batch(cx, LU, batch), broadcast_batch(cx, B, batch)
    order = flat(cx, b.broadcast_to(pivots, (*batch, pivots.shape[-1])), 1)
    perm = _permutation(cx, order, packed.shape[1])
    return unflat(cx, lu_solve(cx, packed, perm, x, left=left, adjoint=adjoint))


@lowers(aten._linalg_solve_ex.default)
def linalg_solve_ex(
    cx: LowerContext, A: Value, B: Value, left: bool = True, check_errors: bool = False
) -> tuple[Value, ...]:
    b = cx.b
    is_vector = B.rank == 1 or (A.rank - 1 == B.rank and B.shape == A.shape[:-1])
    lu = lu_factor(cx, flat(cx, A))
    rest = (unflat(cx, lu.packed, 1), unflat(cx, lu.pivots, 2), unflat(cx, _info(cx, lu.packed), 3))
    if 0 in cx.out.shape:
        return nothing(cx), *rest
    batch = cx.out.shape[:-1] if is_vector else cx.out.shape[:-2]
    x = b.reshape(B, (*B.shape, 1)) if is_vector else B
    x = broadcast_batch(cx, x, batch)
    packed = broadcast_batch(cx, b.reshape(lu.packed, A.shape), batch)
    perm = flat(cx, b.broadcast_to(b.reshape(lu.perm, A.shape[:-1]), (*batch, A.shape[-1])), 1)
    return unflat(cx, lu_solve(cx, packed, perm, x, left=left)), *rest


@lowers(aten.linalg_inv_ex.default)
def linalg_inv_ex(cx: LowerContext, A: Value, check_errors: bool = False) -> tuple[Value, ...]:
    a = flat(cx, A)
    if not a.type.numel:
        return A, nothing(cx, 1)
    lu = lu_factor(cx, a)
    inverse = lu_solve(cx, lu.packed, lu.perm, eye(cx, a.shape, a.dtype))
    return unflat(cx, inverse), unflat(cx, _info(cx, lu.packed), 1)


def _swap_sign(cx: LowerContext, pivots: Value, dtype: torch.dtype) -> Value:
    """(B,): the sign of the permutation."""
    b = cx.b
    place = b.add(b.iota(pivots.shape, 1, torch.int32), b.constant(1, torch.int32, pivots.shape))
    swaps = b.convert(b.compare("NE", pivots, place), torch.int32)
    odd = b.reduce_op("xor", swaps, 0, [1])
    one = b.constant(1, dtype, odd.shape)
    return b.select(b.convert(odd, torch.bool), b.neg(one), one)


def _factors_for_determinant(cx: LowerContext, A: Value) -> Lu:
    a = flat(cx, A)
    return lu_factor(cx, a if A.dtype.is_complex else transposed(cx, a))


@lowers(aten._linalg_det.default)
def linalg_det(cx: LowerContext, A: Value) -> tuple[Value, ...]:
    b = cx.b
    lu = _factors_for_determinant(cx, A)
    product = b.reduce_op("multiply", diagonal(cx, lu.packed), 1, [1])
    det = b.mul(product, _swap_sign(cx, lu.pivots, A.dtype))
    return unflat(cx, det), unflat(cx, lu.packed, 1), unflat(cx, lu.pivots, 2)


@lowers(aten._linalg_slogdet.default)
def linalg_slogdet(cx: LowerContext, A: Value) -> tuple[Value, ...]:
    b = cx.b
    lu = _factors_for_determinant(cx, A)
    diag = diagonal(cx, lu.packed)
    size = magnitude(cx, diag)
    none = b.compare("EQ", size, b.constant(0, size.dtype, size.shape))
    if A.dtype.is_complex:
        unit = b.div(diag, b.convert(b.select(none, _ones(cx, size), size), diag.dtype))
        unit = b.select(none, b.constant(0, unit.dtype, unit.shape), unit)
    else:
        unit = b.unary("sign", diag)
    sign = b.mul(b.reduce_op("multiply", unit, 1, [1]), _swap_sign(cx, lu.pivots, A.dtype))
    log = b.reduce_op("add", b.unary("log", size), 0, [1])
    assert log.dtype == real_dtype(A.dtype)
    return unflat(cx, sign), unflat(cx, log, 1), unflat(cx, lu.packed, 2), unflat(cx, lu.pivots, 3)
