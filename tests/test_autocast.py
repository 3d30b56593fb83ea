"""Autocast: bfloat16 unless told otherwise, PyTorch's lists of ops, nesting, and gradients in the parameters' dtype."""

from __future__ import annotations

import pytest
import torch

F = torch.nn.functional


@pytest.fixture
def x() -> torch.Tensor:
    return torch.rand(4, 3).tpu()


@pytest.fixture
def linear() -> torch.nn.Linear:
    return torch.nn.Linear(3, 2).tpu()


def test_default_dtype(x, linear):
    assert torch.get_autocast_dtype("tpu") == torch.bfloat16
    assert torch.tpu.get_amp_supported_dtype() == [torch.bfloat16, torch.float16, torch.float32]
    assert torch.amp.is_autocast_available("tpu")
    with torch.autocast("tpu"):
        assert torch.is_autocast_enabled("tpu")
        assert linear(x).dtype == torch.bfloat16
    assert not torch.is_autocast_enabled("tpu")
    assert linear(x).dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_values_are_those_of_the_cpu(dtype):
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 4), torch.nn.Softmax(-1))
    x = torch.rand(8, 16)
    with torch.autocast("cpu", dtype=dtype):
        want = module(x)
    with torch.autocast("tpu", dtype=dtype):
        got = module.tpu()(x.tpu())
    assert got.dtype == torch.float32  # softmax
    torch.testing.assert_close(got.cpu(), want.float(), atol=2e-2, rtol=2e-2)


def test_lists(x):
    low, square = x.bfloat16(), torch.rand(1, 3, 3).tpu()
    with torch.autocast("tpu"):
        lower = [
            x @ x.t(),
            torch.bmm(square, square),
            F.conv1d(square, square),
            F.scaled_dot_product_attention(*[square] * 3),
        ]
        single = [low.softmax(-1), low.log(), low.sum(), F.layer_norm(low, (3,)), F.mse_loss(low, low), low.pow(2.0)]
        assert {t.dtype for t in lower} == {torch.bfloat16}
        assert {t.dtype for t in single} == {torch.float32}
        assert torch.cat([low, x]).dtype == torch.float32  # the widest
        assert (low + low).dtype == torch.bfloat16  # neither
        assert (x.double() @ x.double().t()).dtype == torch.float64


def test_nesting(x, linear):
    with torch.autocast("tpu"):
        assert linear(x).dtype == torch.bfloat16
        with torch.autocast("tpu", enabled=False):
            assert linear(x).dtype == torch.float32
            with torch.autocast("tpu", dtype=torch.float16, cache_enabled=False):
                assert (x @ x.t()).dtype == torch.float16
            assert linear(x).dtype == torch.float32
        assert linear(x).dtype == torch.bfloat16
        with torch.autocast("cpu"):
            assert torch.get_autocast_dtype("tpu") == torch.bfloat16
            assert (torch.rand(2, 2) @ torch.rand(2, 2)).dtype == torch.bfloat16


def test_decorator(x, linear):
    @torch.autocast("tpu", dtype=torch.float16)
    def run() -> torch.dtype:
        return linear(x).dtype

    assert run() == torch.float16


def test_an_exception_ends_it(x, linear):
    with pytest.raises(KeyError), torch.autocast("tpu"):
        raise KeyError
    assert linear(x).dtype == torch.float32


def test_other_dtypes_turn_it_off_with_a_warning(x, linear):
    with pytest.warns(UserWarning, match="not supported"), torch.autocast("tpu", dtype=torch.float64):
        assert linear(x).dtype == torch.float32


def test_gradients_have_the_dtype_of_the_parameters(x, linear):
    with torch.autocast("tpu"):
        loss = linear(x).float().square().mean()
    loss.backward()
    assert linear.weight.grad.dtype == torch.float32
    host = torch.nn.Linear(3, 2)
    host.load_state_dict(linear.state_dict())
    with torch.autocast("cpu"):
        host_loss = host(x.cpu()).float().square().mean()
    host_loss.backward()
    torch.testing.assert_close(linear.weight.grad.cpu(), host.weight.grad, atol=1e-2, rtol=2e-2)


def test_custom_functions(x):
    class Double(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="tpu", cast_inputs=torch.float32)
        def forward(ctx, t):
            seen.append((t.dtype, torch.is_autocast_enabled("tpu")))
            return t * 2

        @staticmethod
        @torch.amp.custom_bwd(device_type="tpu")
        def backward(ctx, grad):
            seen.append((grad.dtype, torch.is_autocast_enabled("tpu")))
            return grad * 2

    seen: list[tuple[torch.dtype, bool]] = []
    t = x.bfloat16().requires_grad_()
    with torch.autocast("tpu"):
        out = Double.apply(t)
    out.sum().backward()
    assert seen == [(torch.float32, False), (torch.float32, False)]
    assert t.grad.dtype == torch.bfloat16


def test_grad_scaler_skips_a_step_with_inf():
    p = torch.nn.Parameter(torch.ones(2, device="tpu"))
    optimizer = torch.optim.SGD([p], lr=0.5)
    scaler = torch.amp.GradScaler("tpu", init_scale=4.0, growth_interval=1)
    for factor, want, scale in ((1.0, 0.5, 8.0), (float("inf"), 0.5, 4.0), (1.0, 0.0, 8.0)):
        optimizer.zero_grad()
        scaler.scale((p * factor).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        assert p.tolist() == [want, want]
        assert scaler.get_scale() == scale
