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


def test_angles_of_special_values():
    inf, nan = float("inf"), float("nan")
    values = torch.tensor([0.0, -0.0, 1, -1, inf, -inf, nan, 1e30, -1e30, 3e38, 0.3, -0.7, 2.5])
    y, x = torch.meshgrid(values, values, indexing="ij")
    y, x = y[:, :9], x[:, :9]  # quotients that are no normal float32 become zero, as in all arithmetic of XLA
    want = torch.atan2(y.double(), x.double()).float()
    got = torch.atan2(y.to("tpu"), x.to("tpu")).cpu()
    torch.testing.assert_close(got, want, rtol=2 * torch.finfo(torch.float32).eps, atol=0, equal_nan=True)
    assert torch.equal(got.signbit()[~want.isnan()], want.signbit()[~want.isnan()])


@pytest.mark.parametrize("name", ["atan", "asin", "acos"])
def test_inverse_trigonometric_functions_are_as_near_as_float32_can_be(name):
    x = torch.cat([torch.linspace(-1, 1, 4001), torch.tensor([1e-20, -1e-20, 0.0, -0.0])])
    if name == "atan":
        x = torch.cat([x, x * 1e3, x * 1e30])
    want = getattr(torch, name)(x.double())
    got = getattr(torch, name)(x.to("tpu")).cpu().double()
    torch.testing.assert_close(got, want, rtol=3 * torch.finfo(torch.float32).eps, atol=0)  # 3 units in the last place
