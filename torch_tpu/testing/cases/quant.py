"""Cases for products with quantized weights and for fake quantization."""

from __future__ import annotations

from typing import Any

import torch
from torch._ops import OpOverload

from torch_tpu.testing.cases import t

aten = torch.ops.aten

BF16, F8, INF = torch.bfloat16, torch.float8_e4m3fn, float("inf")
X = t(3, 5) * 10 - 10
STEP, ZERO = torch.tensor([0.1]), torch.tensor([3])
STEPS, ZEROS = t(5) * 0.1, torch.tensor([3, 0, -2, 1, 5], dtype=torch.int32)
RANGE = (torch.full((3,), INF), torch.full((3,), -INF), torch.ones(3), torch.zeros(3, dtype=torch.int32))
ON, OFF = torch.tensor([1]), torch.tensor([0])
NIBBLES = torch.arange(64 * 32).remainder(251).to(torch.uint8).view(64, 32)
PACKED = (torch.arange(64 * 8, dtype=torch.int32) * 4000037).view(8, 2, 32, 1)
# The packed form of int4 is private to a device, so there is nothing on a CPU to compare these with.
NO_CPU_KERNEL = {aten._convert_weight_to_int4pack.default, aten._weight_int4pack_mm.default}

CASES: list[tuple[OpOverload, tuple[Any, ...], dict[str, Any]]] = [
    # products
    (aten._weight_int8pack_mm.default, (t(3, 64), t(32, 64, dtype=torch.int8), t(32)), {}),
    (aten._weight_int8pack_mm.default, (t(3, 64, dtype=BF16), t(32, 64, dtype=torch.int8), t(32, dtype=BF16)), {}),
    (aten._scaled_mm.default, (t(16, 32).to(F8), t(48, 32).to(F8).t(), STEP, STEP), {"out_dtype": BF16}),
    (
        aten._scaled_mm.default,
        (t(16, 32).to(F8), t(48, 32).to(F8).t(), t(16, 1), t(1, 48), t(48, dtype=BF16)),
        {"out_dtype": torch.float32},
    ),
    (
        aten._scaled_mm_v2.default,
        (t(16, 32).to(F8), t(48, 32).to(F8).t(), [t(16, 1)], [1], [0], [t(1, 48)], [1], [0], None, BF16),
        {},
    ),
    (aten._convert_weight_to_int4pack.default, (NIBBLES, 2), {}),
    (aten._weight_int4pack_mm.default, (t(3, 64, dtype=BF16), PACKED, 32, t(2, 64, 2, dtype=BF16)), {}),
    (aten.dequantize.self, (t(4, dtype=torch.int8),), {}),
    # fake quantization
    (aten.fake_quantize_per_tensor_affine_cachemask.default, (X, 0.1, 3, 0, 255), {}),
    (aten.fake_quantize_per_tensor_affine_cachemask.default, (X.to(BF16), 0.1, 3, 0, 255), {}),
    (aten._fake_quantize_per_tensor_affine_cachemask_tensor_qparams.default, (X, STEP, ZERO, ON, 0, 255), {}),
    (aten._fake_quantize_per_tensor_affine_cachemask_tensor_qparams.default, (X, STEP, ZERO, OFF, 0, 255), {}),
    (aten.fake_quantize_per_channel_affine_cachemask.default, (X, STEPS, ZEROS, 1, -8, 7), {}),
    (aten.fake_quantize_per_channel_affine_cachemask.default, (X, STEPS, t(5), 1, -8, 7), {}),
    (aten._fake_quantize_learnable_per_tensor_affine.default, (X, STEP, t(1), 0, 255), {}),
    (aten._fake_quantize_learnable_per_channel_affine.default, (X, STEPS, t(5), 1, -8, 7), {}),
    (aten._fake_quantize_learnable_per_tensor_affine_backward.default, (t(3, 5), X, STEP, t(1), 0, 15, 0.5), {}),
    (aten._fake_quantize_learnable_per_channel_affine_backward.default, (t(3, 5), X, STEPS, t(5), 1, -8, 7, 0.5), {}),
    (
        aten._fused_moving_avg_obs_fq_helper_functional.default,
        (X, ON, ON, *(v[:1] for v in RANGE), 0.01, 0, 255, -1),
        {},
    ),
    (aten._fused_moving_avg_obs_fq_helper_functional.default, (X, ON, OFF, *RANGE, 0.01, -128, 127, 0, True, True), {}),
]
