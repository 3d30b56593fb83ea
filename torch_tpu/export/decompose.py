"""Decompositions for export: those of torch.compile, and what only a cut graph could leave to an eager kernel."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch._ops import OpOverload

from torch_tpu.compile.backend import decompositions
from torch_tpu.lowering.registry import RULES

aten = torch.ops.aten


def _attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
) -> torch.Tensor:  # fmt: skip
    """As on device "tpu". The CPU takes a kernel whose decomposition has other strides than what was traced."""
    if attn_mask is not None and attn_mask.dtype is torch.bool:  # true: takes part
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill(attn_mask.logical_not(), -math.inf)
    return aten._scaled_dot_product_attention_math.default(  # type: ignore[no-any-return]
        query, key, value, attn_mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
    )[0]


def _empty(size: Sequence[int], *, memory_format: torch.memory_format | None = None, **options: Any) -> torch.Tensor:
    made = aten.zeros.default(size, **options)
    return made if memory_format is None else made.contiguous(memory_format=memory_format)  # type: ignore[no-any-return]


def _empty_permuted(size: Sequence[int], physical_layout: Sequence[int], **options: Any) -> torch.Tensor:
    made = aten.zeros.default([size[dim] for dim in physical_layout], **options)
    return made.permute([physical_layout.index(dim) for dim in range(len(size))])  # type: ignore[no-any-return]


_OWN = {
    aten.scaled_dot_product_attention.default: _attention,
    aten.empty.memory_format: _empty,
    aten.empty_permuted.default: _empty_permuted,
}


def _is_composite(op: Any) -> bool:
    return isinstance(op, OpOverload) and op.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd)


def table() -> dict[Any, Any]:
    """For `ExportedProgram.run_decompositions`. Composite ops, which it would keep, are taken apart by their kernels."""
    found = dict(decompositions())
    for op, fn in torch.export.default_decompositions().items():
        if _is_composite(op):
            found[op] = fn
        elif op not in RULES:
            found.setdefault(op, fn)
    return found | _OWN
