"""Narrow, integer and complex dtypes where the op, not one rule, decides the result."""

from __future__ import annotations

import pytest
import torch

NARROW = [torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("op", ["_native_batch_norm_legit", "_batch_norm_with_update"])
def test_running_statistics_of_a_narrow_batch_norm_keep_their_dtype(op: str, dtype: torch.dtype) -> None:
    x = (torch.arange(24.0).reshape(4, 3, 2) / 8).to(dtype)
    found = {}
    for device in ("cpu", "tpu"):
        mean, var = torch.zeros(3, dtype=dtype, device=device), torch.ones(3, dtype=dtype, device=device)
        flags = (True,) if op == "_native_batch_norm_legit" else ()
        weight, bias = torch.ones_like(mean), torch.zeros_like(mean)
        out = getattr(torch.ops.aten, op)(x.to(device), weight, bias, mean, var, *flags, 0.25, 1e-5)
        found[device] = [out[0], mean, var]
    for got, want in zip(found["tpu"], found["cpu"], strict=True):
        assert got.dtype == dtype
        # One rounding of the result, and that of the CPU's own intermediate values.
        torch.testing.assert_close(got.cpu(), want, rtol=2 * torch.finfo(dtype).eps, atol=torch.finfo(dtype).eps)


def test_the_gradient_of_sgn_is_zero() -> None:
    x = torch.tensor([-2.0, 0.0, 3.0], device="tpu", requires_grad=True)
    torch.sgn(x).sum().backward()
    assert x.grad.tolist() == [0, 0, 0]
