"""Products on the CPU plugin: large ones on PyTorch's own kernels (csrc/ffi/host_kernels.cpp), tiny ones as a loop.

Only where ``GlobalState.host_kernels`` says so: the plain lowering is the reference, and what every other plugin,
portable artifacts and ahead-of-time compilation get.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch

from torch_tpu.ir.builder import Value
from torch_tpu.ir.types import TensorType
from torch_tpu.lowering.registry import LowerContext

Dims = tuple[Sequence[int], Sequence[int]]

# Below, the other thread that XLA takes overlaps with the caller's next ops, which is worth more than a better kernel.
_MIN_FLOPS = 8 << 20
# For bfloat16 on AVX-512 without AMX, where XLA is as fast up to here (512x512x512: 2.0 against 2.3 ms; 1024: 15 and 8).
_MIN_FLOPS_AVX512_BF16 = 1 << 29
# XLA runs programs of fewer flops in the caller's thread, but not its own dot.
_INLINE_FLOPS = 1000


def _free(x: Value, *used: Sequence[int]) -> list[int]:
    taken = {d for dims in used for d in dims}
    return [d for d in range(x.rank) if d not in taken]


@functools.cache
def _least_flops() -> dict[torch.dtype, int]:
    """From where on PyTorch's kernels are faster than XLA's (benchmarks/products.py); without an entry they are not."""
    least = {torch.float32: _MIN_FLOPS, torch.float64: _MIN_FLOPS}
    if torch.cpu._is_amx_tile_supported():
        least[torch.bfloat16] = _MIN_FLOPS
    elif torch.cpu._is_avx512_bf16_supported():  # on less they are five times slower
        least[torch.bfloat16] = _MIN_FLOPS_AVX512_BF16
    return least


def takes_product(cx: LowerContext, x: Value, y: Value, *, contract: Dims, batch: Dims = ((), ())) -> bool:
    """Whether :func:`product` is to be used for these operands."""
    least = _least_flops().get(x.dtype)
    if not cx.state.host_kernels or least is None or x.dtype != y.dtype:
        return False
    columns = math.prod(y.shape[d] for d in _free(y, contract[1], batch[1]))
    return 2 * x.type.numel * columns >= least


def takes_tiny_product(cx: LowerContext, x: Value, y: Value) -> bool:
    """Whether the product of these matrices is to be one fused loop of multiply and add instead of a dot.

    The CPU plugin runs that in the caller's thread. Handing an 8x8 product to another thread takes longer than all else
    that its launch costs.
    """
    rows, inner, columns = *x.shape, y.shape[1]
    flops = rows * columns * (2 * inner - 1)
    return cx.state.host_kernels and x.dtype in (torch.float32, torch.float64) and 0 < flops < _INLINE_FLOPS


def _source(cx: LowerContext, x: Value) -> tuple[Value, Sequence[int]]:
    """What ``x`` is a transpose of, and the permutation: the kernel reads strides, so the copy is not needed."""
    found = cx.b.transposes.get(x.name)
    return (x, range(x.rank)) if found is None else found


def product(
    cx: LowerContext, x: Value, y: Value, *, contract: Dims, batch: Dims = ((), ()), bias: Value | None = None
) -> Value:
    """``dot_general`` of ``x`` and ``y``, plus ``bias``, in the operands' dtype, rounded once.

    ``bias`` broadcasts to the result: (rows, columns), or (batch, rows, columns) for products with batch dims.
    """
    rows, columns = _free(x, contract[0], batch[0]), _free(y, contract[1], batch[1])
    shape = [x.shape[d] for d in (*batch[0], *rows)] + [y.shape[d] for d in columns]
    (left, left_dims), (right, right_dims) = _source(cx, x), _source(cx, y)
    dims = [len(batch[0]), len(rows), len(contract[0]), len(columns)]
    dims += [left_dims[d] for d in (*batch[0], *rows, *contract[0])]
    dims += [right_dims[d] for d in (*batch[1], *contract[1], *columns)]
    operands = [left, right] if bias is None else [left, right, bias]
    return cx.b.host_call("torch_tpu_product", operands, TensorType(tuple(shape), x.dtype), dims)
