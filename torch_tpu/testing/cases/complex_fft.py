"""Cases for the Fourier transforms."""

from __future__ import annotations

from typing import Any

import torch
from torch._ops import OpOverload

from torch_tpu.testing.cases import t

aten = torch.ops.aten

C64 = torch.complex64

CASES: list[tuple[OpOverload, tuple[Any, ...], dict[str, Any]]] = [
    (aten._fft_c2c.default, (t(3, 8, dtype=C64), [1], 0, True), {}),
    (aten._fft_c2c.default, (t(5, 2, 4, dtype=C64), [0, 2], 1, False), {}),
    (aten._fft_c2c.default, (t(2, 3, 4, 5, dtype=C64), [0, 1, 2, 3], 2, False), {}),
    (aten._fft_r2c.default, (t(3, 8), [1], 0, True), {}),
    (aten._fft_r2c.default, (t(5, 7), [1, 0], 2, True), {}),
    (aten._fft_r2c.default, (t(3, 8), [1], 1, False), {}),
    (aten._fft_c2r.default, (t(3, 5, dtype=C64), [1], 2, 8), {}),
    (aten._fft_c2r.default, (t(5, 4, dtype=C64), [1, 0], 1, 9), {}),
]
