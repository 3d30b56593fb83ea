"""What is in a program's key: everything a rule may read, and nothing that is an operand."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from torch_tpu.runtime import extension


def compiles(run: Callable[[], object]) -> int:
    """How many programs ``run`` made that were not there before."""
    before = extension.cache_stats()["misses"]
    run()
    return extension.cache_stats()["misses"] - before


@pytest.fixture(autouse=True)
def empty_cache() -> Iterator[None]:
    """Each test starts without programs, so that none of another test counts as known."""
    extension.clear_cache()
    yield
    torch.set_default_dtype(torch.float32)
    torch.use_deterministic_algorithms(False)
    torch.set_float32_matmul_precision("highest")


def ones(*shape: int, **options: object) -> torch.Tensor:
    return torch.ones(shape, **options).to("tpu")


# ---- operands: new values compile nothing

REPEATED: dict[str, Callable[[torch.Tensor, int], object]] = {
    "row": lambda x, i: x[i] + 1,
    "rows": lambda x, i: x[i : i + 1] * 2,
    "element": lambda x, i: x[i, i % 6].neg(),
    "flat window": lambda x, i: x.view(-1)[i : i + 50].exp(),
    "strided window": lambda x, i: x.view(-1)[i : i + 50 : 3].exp(),
    "gather": lambda x, i: x.as_strided((2, 3), (7, 2), i).sum(),
    "write a row": lambda x, i: x[i].add_(1),
    "write an element": lambda x, i: x[i, 2].fill_(i),
    "float": lambda x, i: x * (2.5 + i),
    "int": lambda x, i: x + (i + 2),
    "alpha": lambda x, i: x.add(x, alpha=i + 2),
    "clamp": lambda x, i: x.clamp(0.25 + i, 2.5 + i),
    "fill": lambda x, i: torch.full((3, 4), 0.5 + i, device="tpu"),
    "0-dim CPU tensor": lambda x, i: x * torch.tensor(0.5 + i),
    "dropout": lambda x, i: torch.nn.functional.dropout(x, 0.1 + i / 1000),
    "seed": lambda x, i: (torch.tpu.manual_seed(i), torch.rand(4, 3, device="tpu")),
    "offset": lambda x, i: torch.randn(4, 3, device="tpu"),
    "uniform": lambda x, i: x.uniform_(-i - 1.5, i + 1.5),
    "foreach": lambda x, i: torch._foreach_mul_([x, x[0]], [2.5 + i, 3.5 + i]),
}


@pytest.mark.parametrize("name", REPEATED)
def test_new_values_compile_nothing(name):
    x = ones(101, 6)
    REPEATED[name](x, 1)

    def run() -> None:
        for i in range(100):
            REPEATED[name](x, i)

    # the edges of what a rule tests for, and of the box that a view lies in, may be programs of their own
    assert compiles(run) <= 3
    assert compiles(run) == 0


@pytest.mark.parametrize("name", ["row", "rows", "write a row", "float", "int", "0-dim CPU tensor", "seed", "offset"])
def test_all_of_a_hundred_values_are_one_program(name):
    x = ones(100, 6)
    REPEATED[name](x, 0)
    assert compiles(lambda: [REPEATED[name](x, i) for i in range(100)]) == 0


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1),
    "adamw, one by one": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=False),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_hundred_learning_rates_compile_nothing(name):
    params = [torch.nn.Parameter(ones(4, 3)), torch.nn.Parameter(ones(5))]
    optimizer = OPTIMIZERS[name](params)

    def step(i: int) -> None:
        optimizer.param_groups[0]["lr"] = 0.1 / (i + 1.7)
        for p in params:
            p.grad = torch.full_like(p, 0.01 * i + 0.3)
        optimizer.step()

    for i in range(3):
        step(i)
    assert compiles(lambda: [step(i) for i in range(3, 103)]) == 0


# ---- key: each of these is another program

CHANGES: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
    "dtype": (lambda: ones(4, 4).exp(), lambda: ones(4, 4, dtype=torch.bfloat16).exp()),
    "sizes": (lambda: ones(4, 4).exp(), lambda: ones(4, 5).exp()),
    "rank": (lambda: ones(4, 4).exp(), lambda: ones(16).exp()),
    "strides": (lambda: ones(4, 4) + 1, lambda: ones(4, 4).t() + 1),
    "dims of the storage": (lambda: ones(8, 4)[:4] + 1, lambda: ones(9, 4)[:4] + 1),
    "step of a window": (lambda: ones(9)[0:4] + 1, lambda: ones(9)[0:8:2] + 1),
    "kind of the view": (
        lambda: ones(3, 8).as_strided((2, 4), (8, 1), 1).exp(),
        lambda: ones(3, 8).as_strided((2, 4), (8, 1), 6).exp(),  # wraps a row
    ),
    "dtype of the storage": (lambda: ones(8).view(torch.int32) + 1, lambda: torch.ones(8, dtype=torch.int32).to("tpu") + 1),
    "which storages are one": (lambda: ones(4) * ones(4), lambda: (lambda x: x * x)(ones(4))),
    "conj bit": (
        lambda: ones(4, dtype=torch.complex64).exp(),
        lambda: ones(4, dtype=torch.complex64).conj() * ones(4, dtype=torch.complex64),
    ),
    "neg bit": (lambda: ones(4).clone(), lambda: ones(4)._neg_view().clone()),
    "keyed scalar": (lambda: torch.arange(5, device="tpu"), lambda: torch.arange(6, device="tpu")),
    "tested scalar": (lambda: ones(4).add(ones(4), alpha=1), lambda: ones(4).add(ones(4), alpha=3)),
    "kind of a scalar": (lambda: torch.add(ones(4), 2), lambda: torch.add(ones(4), 2.5)),
    "wrapped number": (lambda: ones(4) * 2.5, lambda: ones(4) * torch.tensor(2.5)),
    "dtype of a 0-dim CPU tensor": (lambda: ones(4) * torch.tensor(2.5), lambda: ones(4) * torch.tensor(2.5).double()),
    "static int": (lambda: ones(4, 4).sum(0), lambda: ones(4, 4).sum(1)),
    "static bool": (lambda: ones(4, 4).sum(0), lambda: ones(4, 4).sum(0, keepdim=True)),
    "missing optional": (lambda: ones(4).clamp(min=0.5), lambda: ones(4).clamp(0.5, 2.5)),
    "length of a list": (lambda: torch.cat([ones(4)] * 2), lambda: torch.cat([ones(4)] * 3)),
    "string": (
        lambda: torch.div(ones(4), ones(4), rounding_mode="floor"),
        lambda: torch.div(ones(4), ones(4), rounding_mode="trunc"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_another_program(name):
    first, second = CHANGES[name]
    first()
    assert compiles(first) == 0
    assert compiles(second) >= 1
    assert compiles(second) == 0
    assert compiles(first) == 0


GLOBALS: dict[str, Callable[[], None]] = {
    "default dtype": lambda: torch.set_default_dtype(torch.float64),
    "deterministic": lambda: torch.use_deterministic_algorithms(True),
    "float32 precision": lambda: torch.set_float32_matmul_precision("medium"),
}


@pytest.mark.parametrize("name", GLOBALS)
def test_a_global_state_is_another_program(name):
    a, b = ones(4, 4), ones(4, 4)
    assert compiles(lambda: a @ b) == 1
    GLOBALS[name]()
    assert compiles(lambda: a @ b) == 1
    assert compiles(lambda: a @ b) == 0


def test_fill_of_uninitialized_memory_is_another_program():
    a = ones(4, 4)
    a.exp()
    old = torch.utils.deterministic.fill_uninitialized_memory
    torch.utils.deterministic.fill_uninitialized_memory = not old
    try:
        assert compiles(a.exp) == 1
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = old


def test_neither_the_device_nor_donation_is_in_the_key():
    a = ones(4, 4)
    a.mul_(3)
    held = a.clone()  # shares the buffer: the next write may not donate it
    assert compiles(lambda: a.mul_(3)) == 0
    assert held.cpu().eq(3).all()
    if torch.accelerator.device_count() > 1:
        other = torch.ones(4, 4).to("tpu:1")
        assert compiles(lambda: other.mul_(3)) == 0
        assert other.cpu().eq(3).all()


# ---- values that share a program are right


@pytest.mark.parametrize(
    "name", [n for n in REPEATED if n not in ("dropout", "seed", "offset", "uniform", "fill", "foreach")]
)
def test_operands_reach_the_program(name):
    base = torch.arange(606.0).reshape(101, 6) / 64
    for i in (0, 1, 7, 57):
        host, device = base.clone(), base.to("tpu")
        want, got = REPEATED[name](host, i), REPEATED[name](device, i)
        torch.testing.assert_close(got.cpu(), want)
        torch.testing.assert_close(device.cpu(), host)
