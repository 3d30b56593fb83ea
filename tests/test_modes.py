"""Eager modes: switching, and what fused mode records, runs and never makes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from torch_tpu.runtime import extension

FUSED, STRICT, DEBUG = torch.tpu.EagerMode.FUSED, torch.tpu.EagerMode.STRICT, torch.tpu.EagerMode.DEBUG


@pytest.fixture
def fused():
    with torch.tpu.set_eager_mode(FUSED):
        yield


def spent(run: Callable[[], object]) -> dict[str, Any]:
    """What ``run`` added to the statistics of fused mode, and to the number of compiled programs."""

    def read() -> dict[str, Any]:
        stats = torch.tpu.deferred_stats()
        cache = extension.cache_stats()
        return stats | stats.pop("flushes") | {"compiled": cache["compiled"] + cache["loaded"]}

    torch.tpu.synchronize()
    before = read()
    run()
    return {name: value - before[name] for name, value in read().items()}


# ---- switching


def test_names_of_the_modes():
    assert torch.tpu.EagerMode.DEFER_NEVER is STRICT
    assert torch.tpu.EagerMode.DEFER_NEVER_AND_LAUNCH_BLOCKING is DEBUG
    assert torch.tpu.EagerMode.DEFER_AND_FUSE is FUSED


def test_blocks_nest_and_end():
    assert torch.tpu.eager_mode is STRICT
    with torch.tpu.set_eager_mode(FUSED):
        with torch.tpu.set_eager_mode(DEBUG):
            assert torch.tpu.eager_mode is DEBUG
        assert torch.tpu.eager_mode is FUSED
    assert torch.tpu.eager_mode is STRICT


def test_a_block_ends_with_an_exception():
    with pytest.raises(KeyError), torch.tpu.set_eager_mode(FUSED):
        raise KeyError
    assert torch.tpu.eager_mode is STRICT


def test_a_block_is_one_thread():
    seen = []
    with torch.tpu.set_eager_mode(FUSED):
        thread = threading.Thread(target=lambda: seen.append(torch.tpu.eager_mode))
        thread.start()
        thread.join()
    assert seen == [STRICT]


def test_the_process_has_a_mode():
    seen = []
    torch.tpu.eager_mode = FUSED
    try:
        thread = threading.Thread(target=lambda: seen.append(torch.tpu.eager_mode))
        thread.start()
        thread.join()
    finally:
        torch.tpu.eager_mode = STRICT
    assert seen == [FUSED]


def test_a_mode_that_is_none():
    with pytest.raises(ValueError, match="7"), torch.tpu.set_eager_mode(7):
        pass


def test_the_environment_chooses(run_program):
    program = "import torch; x = torch.ones(2, device='tpu') + 1; print(torch.tpu.eager_mode.name, x.tolist())"
    assert run_program(program, TORCH_TPU_EAGER_MODE="fused").split(maxsplit=1) == ["FUSED", "[2.0, 2.0]\n"]


# ---- when it runs


def test_nothing_runs_before_it_is_needed(fused):
    a, b = torch.ones(4, device="tpu"), torch.arange(4.0, device="tpu")

    def record() -> None:
        c = a
        for _ in range(10):
            c = c * 2 + b
        record.result = c

    stats = spent(record)
    assert (stats["recorded"], stats["launched"]) == (20, 0)
    stats = spent(lambda: record.result.cpu())
    assert (stats["read"], stats["launched"], stats["dead_values"]) == (0, 0, 0)  # synchronize() ran it
    assert record.result.tolist() == [1024, 1024 + 1023, 1024 + 2046, 1024 + 3069]


@pytest.mark.parametrize(
    ("reason", "cause"),
    [
        ("read", lambda x: x.cpu()),
        ("read", lambda x: x.sum().item()),
        ("read", lambda x: bool((x > 0).all())),
        ("read", lambda x: x.nonzero()),
        ("read", lambda x: x.to("tpu:1")),
        ("synchronize", lambda x: torch.tpu.synchronize()),
        ("synchronize", lambda x: torch.accelerator.current_stream().synchronize()),
        ("event", lambda x: torch.Event("tpu").record()),
    ],
)
def test_reasons(fused, reason, cause):
    def run() -> None:
        x = torch.ones(3, device="tpu") + 1
        cause(x)

    assert spent(run)[reason] == 1


def test_an_optimizer_step_ends_a_stretch(fused):
    p = nn.Parameter(torch.ones(3, device="tpu"))
    optimizer = torch.optim.SGD([p], lr=0.5)
    p.square().sum().backward()
    stats = spent(optimizer.step)
    assert stats["step"] == 1
    assert p.tolist() == [0, 0, 0]


def test_the_end_of_a_block_runs_it():
    with torch.tpu.set_eager_mode(FUSED):
        x = torch.ones(3, device="tpu") + 1
        before = torch.tpu.deferred_stats()["flushes"]["mode"]
    assert torch.tpu.deferred_stats()["flushes"]["mode"] == before + 1
    assert x.tolist() == [2, 2, 2]


def test_a_loop_without_reads_is_bounded(fused):
    x = torch.zeros(1000, device="tpu")
    torch.tpu.synchronize()
    base = torch.tpu.memory_allocated()

    def loop() -> None:
        nonlocal x
        for _ in range(3000):
            x = x + 1

    stats = spent(loop)
    assert stats["repeat"] >= 10
    assert torch.tpu.memory_allocated() - base < 100_000
    assert x[0].item() == 3000


def test_steps_without_reads_run_one_program(fused):
    a = torch.ones(8, device="tpu")

    def steps(count: int) -> None:
        nonlocal a
        for _ in range(count):
            a = (a * 1.5 - 0.5).clamp(max=2).add(0.25).sub(0.25)

    for _ in range(2):  # the first one begins with making `a`
        steps(200)
        torch.tpu.synchronize()
    stats = spent(lambda: steps(200))
    assert stats["launched"] >= 4
    assert stats["compiled"] == 0


# ---- what it computes


def test_dead_values_are_never_made(fused):
    x = torch.rand(256, 1024, device="tpu")
    torch.tpu.synchronize()
    torch.tpu.reset_peak_memory_stats()
    base = torch.tpu.memory_allocated()
    y = x
    for _ in range(20):
        y = (y + 1) * 0.5
    del x
    torch.tpu.synchronize()
    assert torch.tpu.max_memory_allocated() - base < 2 * 256 * 1024 * 4  # the result, and not 40 of its size
    assert y.shape == (256, 1024)


def test_dying_inputs_are_donated(fused):
    x = torch.rand(256, 1024, device="tpu")
    for _ in range(2):  # the second time all is compiled
        torch.tpu.synchronize()
        torch.tpu.reset_peak_memory_stats()
        base = torch.tpu.memory_allocated()
        x.add_(1)
        x.mul_(2)
        torch.tpu.synchronize()
    assert torch.tpu.max_memory_allocated() - base < 1000


def test_inputs_that_live_are_not_donated(fused):
    x = torch.ones(1000, device="tpu")
    y = x.add(1)
    x.mul_(3)
    torch.tpu.synchronize()
    assert (x.sum().item(), y.sum().item()) == (3000, 2000)
    z = x.clone()  # shares until one of them is written
    x.mul_(3)
    assert (x.sum().item(), z.sum().item()) == (9000, 3000)


def test_results_that_are_needed_another_time(fused):
    for keep in (False, True, False, True):
        a = torch.full((4,), 3.0, device="tpu")
        b = a * 2
        c = b + 1
        if not keep:
            del b
        assert c.tolist() == [7] * 4
        if keep:
            assert b.tolist() == [6] * 4


PROGRAMS: dict[str, Callable[[str], list[torch.Tensor]]] = {}


def program(fn: Callable[[str], list[torch.Tensor]]) -> Callable[[str], list[torch.Tensor]]:
    PROGRAMS[fn.__name__] = fn
    return fn


@program
def views_and_writes(device: str) -> list[torch.Tensor]:
    x = torch.arange(24.0).to(device).view(4, 6)
    x[1] += 10
    x[:, 2].mul_(-1)
    t = x.t()
    t[0, 0] = 99
    x[x > 20] = 0
    y = x.clone()
    y.view(-1)[3:9].copy_(torch.ones(6).to(device))
    return [x, t, y, x[::2, 1:4].sum(0)]


@program
def out_forms(device: str) -> list[torch.Tensor]:
    out = torch.empty(0).to(device)
    a = torch.arange(6.0).to(device)
    torch.add(a, 1, out=out)
    torch.mul(out, out, out=out)
    return [out]


@program
def sizes_that_depend_on_data(device: str) -> list[torch.Tensor]:
    x = torch.tensor([3, 0, 2, 0, 3, 1]).to(device)
    return [x.nonzero(), x.unique(), x[x > 0], x.repeat_interleave(x)]


@program
def training(device: str) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.GELU(), nn.Linear(8, 2)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    x, y = torch.randn(10, 6).to(device), torch.randint(0, 2, (10,)).to(device)
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [*losses, *(p.detach() for p in model.parameters()), *model.buffers()]


@program
def checkpointed(device: str) -> list[torch.Tensor]:
    from torch.utils.checkpoint import checkpoint

    x = torch.linspace(0, 1, 8).to(device).requires_grad_()
    checkpoint(lambda v: v.sin().exp(), x, use_reentrant=False).sum().backward()
    return [x.grad]


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs(name):
    expected = PROGRAMS[name]("cpu")
    with torch.tpu.set_eager_mode(FUSED):
        actual = [t.cpu() for t in PROGRAMS[name]("tpu")]
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-4, atol=1e-5)  # five steps of training add rounding up


def test_random_numbers_are_those_of_strict_mode():
    def draw() -> list[torch.Tensor]:
        torch.manual_seed(3)
        x = torch.rand(10, device="tpu")
        return [x, torch.randn(7, device="tpu"), nn.functional.dropout(x, 0.5), torch.randperm(9, device="tpu")]

    strict = draw()
    with torch.tpu.set_eager_mode(FUSED):
        fused = draw()
    assert all(torch.equal(a, b) for a, b in zip(strict, fused, strict=True))


def test_backward_is_recorded_too(fused):
    w = torch.ones(8, device="tpu", requires_grad=True)
    w.sin().exp().sum().backward()
    w.grad = None
    stats = spent(lambda: w.sin().exp().sum().backward())
    assert stats["launched"] == 0
    assert stats["recorded"] >= 6
    torch.testing.assert_close(w.grad.cpu(), torch.full((8,), 1.0).cos() * torch.full((8,), 1.0).sin().exp())


def test_threads_share_a_device(fused):
    results: list[float] = []

    def work(n: int) -> None:
        with torch.tpu.set_eager_mode(FUSED):
            x = torch.zeros(16, device="tpu")
            for i in range(300):
                x = x + n
                if i % 50 == 49:
                    x[0].item()
            results.append(x.sum().item())

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert sorted(results) == [0, 300 * 16, 600 * 16, 900 * 16]


def test_errors_of_the_arguments_are_raised_by_the_call(fused):
    with pytest.raises(RuntimeError, match="must match|broadcast"):
        torch.ones(3, device="tpu") + torch.ones(4, device="tpu")


# ---- debug


def test_debug_waits_for_each_op():
    x = torch.ones(500, 500, device="tpu")
    torch.tpu.synchronize()
    with torch.tpu.set_eager_mode(DEBUG):
        for _ in range(5):
            x = x @ x * 1e-3
            assert torch.accelerator.current_stream().query()


def far(*shape: int) -> torch.Tensor:
    return torch.full(shape, 9, device="tpu")


def table(*shape: int) -> torch.Tensor:
    return torch.rand(shape, device="tpu")


def write(x: torch.Tensor, index: Any) -> None:
    x[index] = 0.0


OUT_OF_RANGE: dict[str, Callable[[], object]] = {
    "index": lambda: table(4, 3)[far(2)],
    "index of two dims": lambda: table(4, 3)[far(2) * 0, far(2)],
    "index after a slice": lambda: table(4, 3)[:, far(2)],
    "negative index": lambda: table(4, 3)[-far(2)],
    "index of a write": lambda: write(table(4, 3), far(2)),
    "index_put": lambda: table(4).index_put((far(1),), table(1)),
    "index_put that accumulates": lambda: table(4).index_put_((far(1),), table(1), accumulate=True),
    "gather": lambda: table(4, 3).gather(1, far(4, 2)),
    "scatter": lambda: table(4, 3).scatter(0, far(2, 3), table(2, 3)),
    "scatter of a value": lambda: table(4, 3).scatter_(0, far(2, 3), 1.0),
    "scatter with add": lambda: table(4, 3).scatter_(0, far(2, 3), table(2, 3), reduce="add"),
    "scatter of a value with multiply": lambda: table(4, 3).scatter_(0, far(2, 3), 2.0, reduce="multiply"),
    "scatter_add": lambda: table(4, 3).scatter_add(0, far(2, 3), table(2, 3)),
    "scatter_reduce": lambda: table(4, 3).scatter_reduce(0, far(2, 3), table(2, 3), "amax"),
    "index_select": lambda: table(4, 3).index_select(0, far(2)),
    "negative index_select": lambda: table(4, 3).index_select(0, -far(2)),
    "index_add": lambda: table(4, 3).index_add(0, far(2), table(2, 3)),
    "index_copy": lambda: table(4, 3).index_copy(0, far(2), table(2, 3)),
    "index_reduce": lambda: table(4, 3).index_reduce(0, far(2), table(2, 3), "prod"),
    "index_fill": lambda: table(4, 3).index_fill(0, far(2), 1.0),
    "index_fill of a tensor": lambda: table(4, 3).index_fill(0, far(2), torch.tensor(1.0, device="tpu")),
    "take": lambda: table(2, 3).take(far(2)),
    "put": lambda: table(2, 3).put(far(2), table(2)),
    "embedding": lambda: nn.functional.embedding(far(2), table(4, 3)),
    "negative embedding": lambda: nn.functional.embedding(-far(2), table(4, 3)),
    "embedding with a norm": lambda: nn.functional.embedding(far(2), table(4, 3), max_norm=1.0),
    "embedding_bag": lambda: nn.functional.embedding_bag(far(2, 2), table(4, 3)),
    "nll_loss": lambda: nn.functional.nll_loss(table(2, 3), far(2)),
    "cross_entropy": lambda: nn.functional.cross_entropy(table(2, 3), far(2)),
    "nll_loss of an image": lambda: nn.functional.nll_loss(table(2, 3, 2, 2), far(2, 2, 2)),
    "max_unpool2d": lambda: nn.functional.max_unpool2d(table(1, 1, 1, 2), far(1, 1, 1, 2), 2),
}


@pytest.mark.parametrize("name", OUT_OF_RANGE)
def test_debug_finds_indices_out_of_range(name):
    with torch.tpu.set_eager_mode(DEBUG), pytest.raises(IndexError, match=r"index -?9 is out of range for dim") as e:
        OUT_OF_RANGE[name]()
    assert "TPU-E106" in str(e.value)


def test_debug_takes_indices_in_range():
    x = torch.arange(12.0).view(4, 3)
    labels = torch.tensor([2, -100])  # the second is ignored
    with torch.tpu.set_eager_mode(DEBUG):
        t = x.to("tpu")
        assert t[torch.tensor([-1, 0], device="tpu")].tolist() == x[[-1, 0]].tolist()
        assert t[t > 5].tolist() == x[x > 5].tolist()
        loss = nn.functional.nll_loss(t[:2], labels.to("tpu"))
    assert loss.item() == nn.functional.nll_loss(x[:2], labels).item()


# ---- looking at every op


def test_the_first_op_that_is_not_finite_is_named():
    x = torch.zeros(3, device="tpu")
    with torch.tpu.detect_nonfinite():
        y = (x + 1).exp()
        with pytest.raises(FloatingPointError, match=r"aten\.log\.default"):
            (x.log() + y).sum()
        with pytest.raises(FloatingPointError, match=r"aten\.div_\.Tensor"):
            y.div_(x)


def test_values_that_come_in_not_finite_are_no_error():
    x = torch.tensor([1.0, torch.inf], device="tpu")
    with torch.tpu.detect_nonfinite():
        assert (x * 2).tolist() == [2, torch.inf]
        torch.empty(100, device="tpu")


def test_ops_that_agree_with_the_cpu():
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2)).to("tpu")
    x = torch.linspace(-1, 1, 12, device="tpu").view(3, 4)
    with torch.tpu.check_accuracy():
        model(x).square().mean().backward()
        x.clone().mul_(2)
        torch.rand(3, device="tpu")
    assert all(p.grad is not None for p in model.parameters())


def test_the_first_op_that_differs_from_the_cpu_is_named():
    x = torch.linspace(0, 1, 1000, device="tpu")
    # No tolerance: of 1000 values, some have another last bit.
    with torch.tpu.check_accuracy(rtol=0.0, atol=0.0), pytest.raises(AssertionError, match=r"\[aten\.exp\.default\]"):
        x.exp()


# ---- names that published libraries use


def test_names_of_the_execution_mode_module():
    from torch_tpu._internal import execution_mode

    with execution_mode.set_eager_mode(execution_mode.EagerMode.INTERNAL_DEFER_ALL):
        assert torch.tpu.eager_mode is torch.tpu.EagerMode.FUSED
    assert execution_mode.EagerMode is torch.tpu.EagerMode


def test_synchronize_runs_what_is_recorded_and_keeps_autograd(fused):
    from torch_tpu._internal.sync import synchronize

    x = torch.arange(4.0).to("tpu").requires_grad_()
    loss = (x * x).sum()
    launched = torch.tpu.deferred_stats()["launched"]
    synchronize(loss, wait=False)
    assert torch.tpu.deferred_stats()["launched"] == launched + 1
    loss.backward()
    synchronize([x.grad], wait=True)
    synchronize(wait=True)
    assert x.grad.tolist() == [0, 2, 4, 6]


def test_hardware_names():
    from torch_tpu._internal.utils import hardware

    assert hardware.get_tpu_device_name() == torch.tpu.get_device_name()
    assert hardware.get_tpu_device_count() == torch.tpu.device_count()
