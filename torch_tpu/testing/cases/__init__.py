"""One small case or more for every lowering rule: ``(op, args, kwargs)``, one module a rule family.

The table is run on the CPU plugin against ATen, and compiled ahead of time for other devices.
"""

from __future__ import annotations

import torch


def t(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Deterministic data: floats in [0.5, 1.5), integers in [0, 10), bools mixed."""
    g = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=g).bool()
    if dtype.is_floating_point or dtype.is_complex:
        wide = torch.complex128 if dtype.is_complex else torch.float64
        return (torch.rand(shape, generator=g, dtype=wide) + 0.5).to(dtype)
    return torch.randint(0, 10, shape, generator=g).to(dtype)
