"""A whole training step as one program: against the same loop on the CPU."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from torch_tpu.compile.train_step import train_step
from torch_tpu.runtime import extension

# Six steps of float32 programs that are fused differently from single ops.
TOLERANCE = {"rtol": 1e-3, "atol": 1e-4}

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()


def _pair():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    return module, copy.deepcopy(module).to("tpu")


def _eager(module, optimizer, x, y, clip=None):
    loss = F.mse_loss(module(x), y)
    loss.backward()
    if clip:
        nn.utils.clip_grad_norm_(module.parameters(), clip)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


OPTIMIZERS = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=1e-2),
    "momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-2),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=1e-2),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer(name) -> None:
    cpu, dev = _pair()
    optimizers = [OPTIMIZERS[name](m.parameters()) for m in (cpu, dev)]
    schedulers = [torch.optim.lr_scheduler.StepLR(o, 2, 0.5) for o in optimizers]
    step = train_step(
        lambda x, y: F.mse_loss(dev(x), y),
        optimizers[1],
        before_update=lambda: nn.utils.clip_grad_norm_(dev.parameters(), 0.5),
    )
    x, y = torch.randn(5, 8), torch.randn(5, 4)
    for _ in range(6):
        want = _eager(cpu, optimizers[0], x, y, clip=0.5)
        got = step(x.to("tpu"), y.to("tpu"))
        assert not got.requires_grad
        torch.testing.assert_close(got.item(), want, **TOLERANCE)
        for s in schedulers:
            s.step()
    for a, b in zip(dev.parameters(), cpu.parameters(), strict=True):
        torch.testing.assert_close(a.detach().cpu(), b.detach(), **TOLERANCE)
        assert a.grad is None


def test_one_program_and_no_recompile_for_a_new_rate() -> None:
    _, dev = _pair()
    optimizer = torch.optim.AdamW(dev.parameters(), lr=1e-2)
    step = train_step(lambda x, y: F.mse_loss(dev(x), y), optimizer)
    x, y = torch.randn(5, 8).to("tpu"), torch.randn(5, 4).to("tpu")
    step(x, y)  # eager
    before = extension.cache_stats()
    step(x, y)
    assert extension.cache_stats()["misses"] == before["misses"] + 1
    optimizer.param_groups[0]["lr"].fill_(0.5)
    hits = extension.cache_stats()["hits"]
    step(x, y)
    after = extension.cache_stats()
    assert after["misses"] == before["misses"] + 1
    assert after["hits"] == hits + 1


def test_parameters_and_state_stay_where_they_are() -> None:
    _, dev = _pair()
    optimizer = torch.optim.AdamW(dev.parameters(), lr=1e-2)
    step = train_step(lambda x, y: F.mse_loss(dev(x), y), optimizer)
    x, y = torch.randn(5, 8).to("tpu"), torch.randn(5, 4).to("tpu")
    for _ in range(2):
        step(x, y)
    torch.tpu.synchronize()
    held = torch.tpu.memory_allocated()
    torch.tpu.reset_peak_memory_stats()
    addresses = [p.data_ptr() for p in dev.parameters()]
    for _ in range(3):
        step(x, y)
    torch.tpu.synchronize()
    assert [p.data_ptr() for p in dev.parameters()] == addresses
    assert torch.tpu.max_memory_allocated() <= held + 4096  # the loss, and operands


def test_state_dict_and_other_results() -> None:
    cpu, dev = _pair()
    optimizer = torch.optim.AdamW(dev.parameters(), lr=1e-2)

    def loss_fn(x, y):
        out = dev(x)
        return F.mse_loss(out, y), out.argmax(1)

    step = train_step(loss_fn, optimizer)
    x, y = torch.randn(5, 8).to("tpu"), torch.randn(5, 4).to("tpu")
    for _ in range(3):
        _, best = step(x, y)
    assert best.shape == (5,)
    assert optimizer.state_dict()["state"][0]["step"].item() == 3
    again = torch.optim.AdamW(cpu.parameters(), lr=1e-2)
    again.load_state_dict(optimizer.state_dict())
    torch.testing.assert_close(
        again.state[next(cpu.parameters())]["exp_avg"], optimizer.state[next(dev.parameters())]["exp_avg"].cpu()
    )


def test_what_breaks_a_graph_is_named() -> None:
    _, dev = _pair()
    optimizer = torch.optim.SGD(dev.parameters(), lr=1e-2)

    def loss_fn(x):
        loss = dev(x).sum()
        torch._dynamo.graph_break()
        return loss

    step = train_step(loss_fn, optimizer)
    x = torch.randn(5, 8).to("tpu")
    step(x)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="graph_break"):
        step(x)
