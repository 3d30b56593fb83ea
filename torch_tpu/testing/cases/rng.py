"""Cases for random numbers, dropout and derivatives of samples. Of random results only the types can be compared."""

from __future__ import annotations

from typing import Any

import torch
from torch._ops import OpOverload

from torch_tpu.testing.cases import t

aten = torch.ops.aten

I64, BF16, C64 = torch.int64, torch.bfloat16, torch.complex64
MASK = torch.tensor([[True, False, True], [False, False, True]])
RATE = torch.tensor([0.0, 0.5, 4.0, 12.0, 300.0])
COUNT, CHANCE = torch.tensor([0.0, 5.0, 40.0, 100.0]), torch.tensor([0.5, 0.9, 0.1, 0.4])
RANDOM_FROM = getattr(aten.random, "from")

CASES: list[tuple[OpOverload, tuple[Any, ...], dict[str, Any]]] = [
    # continuous
    (aten.uniform.default, (t(2, 3),), {}),
    (aten.uniform.default, (t(2, 3, dtype=BF16), -1.0, 2.5), {}),
    (aten.uniform.default, (t(5, dtype=torch.float64), 0.0, 3.0), {}),
    (aten.uniform.default, (t(3, dtype=C64),), {}),
    (aten.normal_functional.default, (t(2, 3),), {}),
    (aten.normal_functional.default, (t(2, 3, dtype=BF16), 1.0, 0.5), {}),
    (aten.normal_functional.default, (t(3, dtype=C64), 1.0, 0.5), {}),
    (aten.normal.Tensor_float, (t(2, 3), 2.0), {}),
    (aten.normal.float_Tensor, (1.5, t(2, 3)), {}),
    (aten.normal.Tensor_Tensor, (t(2, 3), t(3)), {}),
    (aten.log_normal.default, (t(2, 3), 0.5, 0.25), {}),
    (aten.cauchy.default, (t(2, 3), 1.0, 2.0), {}),
    (aten.exponential.default, (t(2, 3), 2.0), {}),
    (aten._standard_gamma.default, (t(2, 3),), {}),
    (aten._sample_dirichlet.default, (t(2, 3),), {}),
    # discrete
    (aten.geometric.default, (t(2, 3), 0.25), {}),
    (aten.geometric.default, (t(2, 3, dtype=I64), 0.25), {}),
    (aten.bernoulli.default, (t(2, 3) - 0.5,), {}),
    (aten.bernoulli.p, (t(2, 3), 0.25), {}),
    (aten.bernoulli.p, (t(2, 3, dtype=torch.bool), 0.25), {}),
    (aten.bernoulli.Tensor, (t(2, 3), t(3) - 0.5), {}),
    (aten.random.default, (t(2, 3),), {}),
    (aten.random.default, (t(2, 3, dtype=torch.uint8),), {}),
    (aten.random.to, (t(2, 3, dtype=I64), 100), {}),
    (RANDOM_FROM, (t(2, 3, dtype=torch.int32), -5, 100), {}),
    (RANDOM_FROM, (t(2, 3, dtype=BF16), 0, 1000), {}),
    (RANDOM_FROM, (t(2, 3, dtype=I64), -(2**62), 2**62), {}),
    (RANDOM_FROM, (t(2, 3, dtype=I64), -(2**63), None), {}),
    (aten.randperm.default, (7,), {}),
    (aten.randperm.generator, (7,), {"generator": None, "dtype": torch.int32}),
    (aten.multinomial.default, (t(2, 6), 1), {}),
    (aten.multinomial.default, (t(2, 6), 4), {}),
    (aten.multinomial.default, (t(6, dtype=BF16), 9, True), {}),
    (aten.multinomial.default, (t(20000), 300, True), {}),
    (aten.poisson.default, (RATE,), {}),
    (aten.binomial.default, (COUNT, CHANCE), {}),
    # dropout
    (aten.native_dropout.default, (t(2, 3), 0.25, True), {}),
    (aten.native_dropout.default, (t(2, 3, dtype=BF16), 0.25, False), {}),
    (aten.native_dropout_backward.default, (t(2, 3), MASK, 1.25), {}),
    (aten.rrelu_with_noise_functional.default, (t(2, 3) - 1, t(2, 3)), {"training": True}),
    (aten.rrelu_with_noise_functional.default, (t(2, 3) - 1, t(2, 3)), {}),
    # derivatives of samples; at these places ATen's approximations are good to 4 digits
    (aten._standard_gamma_grad.default, (torch.tensor([2.0, 20.0, 1e3]), torch.tensor([1.5, 21.0, 980.0])), {}),
    (aten._dirichlet_grad.default, (torch.tensor([0.25]), torch.tensor([3.0]), torch.tensor([9.0])), {}),
]
