"""Operand helpers that every family of rules shares: type promotion, compute types, broadcasting."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torch_tpu.ir.builder import Number, Value
from torch_tpu.ir.types import compute_dtype
from torch_tpu.lowering.registry import LowerContext

Operand = Value | Number


def operand(
    cx: LowerContext, x: Operand, dtype: torch.dtype | None = None, shape: Sequence[int] | None = None
) -> Value:
    """``x`` in the op's compute type and the shape of its first result; ``x`` is a Value or a Python number.

    Rounding happens once, in ``cx.result``: a scalar first rounded to bf16 changes a quarter of ``x * 1.1``.
    """
    dtype = cx.compute_dtype if dtype is None else dtype
    shape = cx.out.shape if shape is None else shape
    if not isinstance(x, Value):
        return cx.b.constant(x, dtype, shape)
    return cx.b.broadcast_to(cx.b.convert(x, dtype), shape)


def scalar(cx: LowerContext, x: Operand, dtype: torch.dtype | None = None) -> Value:
    """``x`` as a rank-0 value of ``dtype`` (default: the compute type)."""
    return operand(cx, x, dtype, ())


def _number_dtype(cx: LowerContext, x: Operand) -> torch.dtype:
    """Dtype category of a Python number, as a dtype that ``torch.promote_types`` understands."""
    if isinstance(x, Value):
        if x.dtype.is_complex:
            return torch.complex128 if cx.state.default_dtype == torch.float64 else torch.complex64
        if x.dtype.is_floating_point:
            return cx.state.default_dtype
        return x.dtype
    if isinstance(x, bool):
        return torch.bool
    if isinstance(x, int):
        return torch.int64
    if isinstance(x, complex):
        return torch.complex128 if cx.state.default_dtype == torch.float64 else torch.complex64
    return cx.state.default_dtype


def _category(dtype: torch.dtype) -> int:
    return 3 if dtype.is_complex else 2 if dtype.is_floating_point else 0 if dtype == torch.bool else 1


def common_dtype(cx: LowerContext, *xs: Operand) -> torch.dtype:
    """The dtype ATen promotes ``xs`` to: tensors with dims first, then rank-0 tensors, then numbers.

    A later group counts only where its category (bool < int < float < complex) is higher: ``torch.result_type``.
    """
    groups: list[torch.dtype | None] = [None, None, None]
    for x in xs:
        number = not isinstance(x, Value) or x.wrapped
        level = 2 if number else 0 if x.rank else 1  # type: ignore[union-attr]
        dtype = _number_dtype(cx, x) if number else x.dtype  # type: ignore[union-attr]
        old = groups[level]
        groups[level] = dtype if old is None else torch.promote_types(old, dtype)
    result: torch.dtype | None = None
    for dtype in groups:
        if dtype is None:
            continue
        if result is None:
            result = dtype
        elif _category(dtype) > _category(result):
            result = torch.promote_types(result, dtype) if _category(dtype) == 3 else dtype
    assert result is not None
    return result


def promoted(cx: LowerContext, *xs: Operand) -> list[Value]:
    """``xs`` in the compute type of their common dtype and in the shape of the first result (comparisons need this)."""
    dtype = compute_dtype(common_dtype(cx, *xs))
    return [operand(cx, x, dtype) for x in xs]


def norm_dim(dim: int, rank: int) -> int:
    """``dim`` counted from the front; rank 0 counts as rank 1, as in ATen."""
    return dim % max(rank, 1)


def norm_dims(dims: Sequence[int] | int | None, rank: int) -> list[int]:
    """Sorted dims counted from the front; None and the empty list mean all of them."""
    if dims is None or (not isinstance(dims, int) and not len(dims)):
        return list(range(rank))
    if isinstance(dims, int):
        dims = [dims]
    return sorted({norm_dim(d, rank) for d in dims if rank})


def real_number(x: Number) -> float:
    """``x`` as a float, where the schema says Scalar and only real numbers make sense."""
    assert not isinstance(x, complex), x
    return x
