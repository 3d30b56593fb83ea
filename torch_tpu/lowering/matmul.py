"""Products of vectors and matrices: mm, bmm, addmm and their kin.

Floats narrower than float32 stay narrow as operands and accumulate in float32; the result is rounded once. Integer
products are exact and wrap around. ``beta == 0`` drops ``self``, so that its NaN and inf do not reach the result.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torch_tpu.ir.builder import Value
from torch_tpu.ir.types import compute_dtype
from torch_tpu.lowering import host
from torch_tpu.lowering.promote import Operand, operand
from torch_tpu.lowering.registry import LowerContext, lowers

aten = torch.ops.aten

Dims = tuple[Sequence[int], Sequence[int]]
_BETA_ALPHA = {"beta": (0, 1), "alpha": (1,)}


def _product_as_one_loop(cx: LowerContext, x: Value, y: Value, contract: Dims, batch: Dims) -> Value:
    """``dot_general`` as one fused multiply and reduction."""
    b, shared = cx.b, len(batch[0])
    rest = [[d for d in range(v.rank) if d not in (*batch[i], *contract[i])] for i, v in enumerate((x, y))]
    # Dims of the terms: batch, rest of x, contracted, rest of y.
    inner, rank = shared + len(rest[0]), x.rank + len(rest[1])
    of_x = dict(zip([*batch[0], *rest[0], *contract[0]], range(x.rank), strict=True))
    of_y = dict(zip([*batch[1], *contract[1], *rest[1]], [*range(shared), *range(inner, rank)], strict=True))
    sizes = [1] * rank
    for v, place in ((x, of_x), (y, of_y)):
        for d, size in enumerate(v.shape):
            sizes[place[d]] = size
    wide = [b.broadcast_in_dim(v, sizes, [at[d] for d in range(v.rank)]) for v, at in ((x, of_x), (y, of_y))]
    return b.reduce_op("add", b.mul(*wide), 0, range(inner, x.rank))


def product(
    cx: LowerContext, x: Value, y: Value, *, contract: Dims, batch: Dims = ((), ()), rounded: bool = False
) -> Value:
    """``dot_general`` in the accumulation type of the operands' dtype: float32 for bfloat16 and float16.

    ``rounded``: the caller rounds to the operands' dtype at once, so that the result may come rounded.
    """
    b, dtype = cx.b, x.dtype
    # The meta kernels leave these to the kernels.
    if dtype != y.dtype:
        raise RuntimeError(f"expected m1 and m2 to have the same dtype, but got: {dtype} != {y.dtype}")
    if dtype == torch.bool:
        raise NotImplementedError(f"{cx.op} is not implemented for bool")
    wide = compute_dtype(dtype)
    if not x.type.numel or not y.type.numel:
        rest = [d for i, d in enumerate(x.shape) if i not in batch[0] and i not in contract[0]]
        rest += [d for i, d in enumerate(y.shape) if i not in batch[1] and i not in contract[1]]
        return b.constant(0, wide, [*(x.shape[i] for i in batch[0]), *rest])
    if dtype in (torch.int64, torch.uint64):  # TPU's compiler has no such dot
        return _product_as_one_loop(cx, x, y, contract, batch)
    if (rounded or wide == dtype) and host.takes_product(cx, x, y, contract=contract, batch=batch):
        return host.product(cx, x, y, contract=contract, batch=batch)
    return b.dot_general(x, y, batch=batch, contract=contract, precision=cx.precision_of(dtype), out_dtype=wide)


def _matmul_dims(x: Value) -> dict[str, Dims]:
    lead = list(range(x.rank - 2))
    return {"contract": ([x.rank - 1], [x.rank - 2]), "batch": (lead, lead)}


def matmul(cx: LowerContext, x: Value, y: Value, *, rounded: bool = False) -> Value:
    """Product of the last two dims of two values of one rank and equal leading dims, in the accumulation type."""
    return product(cx, x, y, **_matmul_dims(x), rounded=rounded)


def biased_matmul(cx: LowerContext, self: Value, x: Value, y: Value, beta: Operand, alpha: Operand) -> Value:
    """``beta * self + alpha * (x @ y)``, rounded once."""
    plain = _is_one(beta) and _is_one(alpha) and self.dtype == x.dtype == cx.out.dtype
    if plain and cx.out.numel and host.takes_product(cx, x, y, **_matmul_dims(x)):
        return host.product(cx, x, y, **_matmul_dims(x), bias=self)
    return scaled_sum(cx, self, matmul(cx, x, y), beta, alpha)


def _is_zero(x: Operand) -> bool:
    return not isinstance(x, Value) and x == 0


def _is_one(x: Operand) -> bool:
    return not isinstance(x, Value) and x == 1


def scaled_sum(cx: LowerContext, self: Value, out: Value, beta: Operand, alpha: Operand) -> Value:
    """``beta * self + alpha * out``, rounded once; ``out`` is in the accumulation type."""
    b = cx.b
    if not _is_one(alpha):
        out = b.mul(out, operand(cx, alpha, out.dtype, out.shape))
    if _is_zero(beta):
        return cx.result(out)
    bias = operand(cx, self, out.dtype)
    if not _is_one(beta):
        bias = b.mul(bias, operand(cx, beta, out.dtype))
    return cx.result(b.add(bias, b.broadcast_to(out, cx.out.shape)))


@lowers(aten.mm.default)
def mm(cx: LowerContext, self: Value, mat2: Value) -> Value:
    if self.dtype == mat2.dtype and host.takes_tiny_product(cx, self, mat2):
        return _product_as_one_loop(cx, self, mat2, **_matmul_dims(self))
    return cx.result(matmul(cx, self, mat2, rounded=True))


@lowers(aten.bmm.default)
def bmm(cx: LowerContext, self: Value, mat2: Value) -> Value:
    return cx.result(matmul(cx, self, mat2, rounded=True))


@lowers(aten.mm.dtype, aten.bmm.dtype)
def mm_dtype(cx: LowerContext, self: Value, mat2: Value, out_dtype: torch.dtype) -> Value:
    return cx.result(matmul(cx, self, mat2))


@lowers(aten.addmm.default, scalars=_BETA_ALPHA)
def addmm(cx: LowerContext, self: Value, mat1: Value, mat2: Value, beta: Operand = 1, alpha: Operand = 1) -> Value:
    return biased_matmul(cx, self, mat1, mat2, beta, alpha)


@lowers(aten.baddbmm.default, scalars=_BETA_ALPHA)
def baddbmm(
    cx: LowerContext, self: Value, batch1: Value, batch2: Value, beta: Operand = 1, alpha: Operand = 1
) -> Value:
    return biased_matmul(cx, self, batch1, batch2, beta, alpha)


@lowers(aten.addmm.dtype, scalars=_BETA_ALPHA)
def addmm_dtype(
    cx: LowerContext,
    self: Value,
    mat1: Value,
    mat2: Value,
    out_dtype: torch.dtype,
    beta: Operand = 1,
    alpha: Operand = 1,
) -> Value:
    return scaled_sum(cx, self, matmul(cx, mat1, mat2), beta, alpha)


@lowers(aten.baddbmm.dtype, scalars=_BETA_ALPHA)
def baddbmm_dtype(
    cx: LowerContext,
    self: Value,
    batch1: Value,
    batch2: Value,
    out_dtype: torch.dtype,
    beta: Operand = 1,
    alpha: Operand = 1,
) -> Value:
    return scaled_sum(cx, self, matmul(cx, batch1, batch2), beta, alpha)


@lowers(aten.addbmm.default, scalars=_BETA_ALPHA)
def addbmm(cx: LowerContext, self: Value, batch1: Value, batch2: Value, beta: Operand = 1, alpha: Operand = 1) -> Value:
    total = product(cx, batch1, batch2, contract=([0, 2], [0, 1]))
    return scaled_sum(cx, self, total, beta, alpha)


@lowers(aten.mv.default)
def mv(cx: LowerContext, self: Value, vec: Value) -> Value:
    return cx.result(product(cx, self, vec, contract=([1], [0]), rounded=True))


@lowers(aten.addmv.default, scalars=_BETA_ALPHA)
def addmv(cx: LowerContext, self: Value, mat: Value, vec: Value, beta: Operand = 1, alpha: Operand = 1) -> Value:
    return scaled_sum(cx, self, product(cx, mat, vec, contract=([1], [0])), beta, alpha)


@lowers(aten.addr.default, scalars=_BETA_ALPHA)
def addr(cx: LowerContext, self: Value, vec1: Value, vec2: Value, beta: Operand = 1, alpha: Operand = 1) -> Value:
    b, dtype = cx.b, cx.compute_dtype
    shape = (vec1.shape[0], vec2.shape[0])
    rows = b.broadcast_in_dim(b.convert(vec1, dtype), shape, [0])
    cols = b.broadcast_in_dim(b.convert(vec2, dtype), shape, [1])
    if dtype != torch.bool:
        return scaled_sum(cx, self, b.mul(rows, cols), beta, alpha)
    outer = b.and_(rows, cols)
    if not _is_one(alpha):
        outer = b.and_(outer, operand(cx, alpha, dtype, outer.shape))
    if _is_zero(beta):
        return cx.result(outer)
    bias = operand(cx, self, dtype)
    if not _is_one(beta):
        bias = b.and_(bias, operand(cx, beta, dtype))
    return b.or_(bias, b.broadcast_to(outer, cx.out.shape))


@lowers(aten.dot.default)
def dot(cx: LowerContext, self: Value, tensor: Value) -> Value:
    return cx.result(product(cx, self, tensor, contract=([0], [0])))


def conjugate(cx: LowerContext, x: Value) -> Value:
    """The complex conjugate; ``x`` itself if it is real."""
    if not x.dtype.is_complex:
        return x
    return cx.b.complex(cx.b.real(x), cx.b.neg(cx.b.imag(x)))


@lowers(aten.vdot.default)
def vdot(cx: LowerContext, self: Value, other: Value) -> Value:
    return cx.result(product(cx, conjugate(cx, self), other, contract=([0], [0])))


@lowers(aten._int_mm.default)
def int_mm(cx: LowerContext, self: Value, mat2: Value) -> Value:
    if not self.type.numel or not mat2.type.numel:
        return cx.b.constant(0, cx.out.dtype, cx.out.shape)
    return cx.b.dot_general(self, mat2, contract=([1], [0]), out_dtype=cx.out.dtype)
