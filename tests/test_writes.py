"""What writes cost in memory: a window of a large storage is written in place, and a copy is made only when it must be.

Peaks of the device's own accounting are compared, not times.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable

import pytest
import torch

from torch_tpu.runtime import extension

BYTES = 64 << 20
SLACK = 1 << 20  # operands, windows and small results


def peak_above_now(run: Callable[[], object]) -> int:
    """Bytes that ``run`` had alive at once, beyond those before it."""
    torch.accelerator.synchronize()
    before = torch.accelerator.memory_allocated()
    torch.accelerator.reset_peak_memory_stats()
    run()
    torch.accelerator.synchronize()
    return torch.accelerator.max_memory_allocated() - before


def fresh() -> torch.Tensor:
    return torch.zeros(4096, 4096, device="tpu")


def loaded() -> torch.Tensor:
    file = io.BytesIO()
    torch.save(torch.zeros(4096, 4096), file)
    file.seek(0)
    x = torch.load(file, map_location="tpu")
    x[0, 0] = 0  # a file holds bytes: the storage takes its type at the first write, once
    return x


def from_empty() -> torch.Tensor:
    return torch.empty(4096, 4096, device="tpu").fill_(0)


def from_the_host() -> torch.Tensor:
    return torch.zeros(4096, 4096).to("tpu")


def copied_deep() -> torch.Tensor:
    return copy.deepcopy(torch.zeros(4096, 4096, device="tpu").add_(0))


WINDOWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "row": lambda x: x[7],
    "column": lambda x: x[:, 7],
    "window": lambda x: x[3:9, 100:200],
    "flat window": lambda x: x.view(-1)[5000:14_000],
    "other dims": lambda x: x.view(64, 64, 4096)[3, 5],
    "element": lambda x: x[5, 6],
    "transposed": lambda x: x.t()[5:9],
    "steps": lambda x: x[::512, ::512],
}


@pytest.mark.parametrize("make", [fresh, loaded, from_empty, from_the_host, copied_deep], ids=lambda f: f.__name__)
@pytest.mark.parametrize("name", WINDOWS)
def test_a_window_is_written_in_place(name, make):
    x = make()
    x[9].add_(0)  # a deep copy shares its buffer until the first write

    def write() -> None:
        WINDOWS[name](x).fill_(3)
        WINDOWS[name](x).add_(1)

    assert peak_above_now(write) < SLACK
    assert WINDOWS[name](x).eq(4).all().item()
    assert x.count_nonzero().item() == WINDOWS[name](x).numel()


def test_a_window_of_a_transposed_base_is_written_in_place():
    x = fresh().t()
    assert peak_above_now(lambda: x[:, 3].fill_(1)) < SLACK
    assert peak_above_now(lambda: x[3].fill_(1)) < SLACK
    assert x.sum().item() == 2 * 4096 - 1


def test_windows_of_many_kinds_in_turn():
    x = fresh()
    x[0].fill_(1)

    def write() -> None:
        for i in range(3):
            x[i].add_(1)
            x.view(-1)[i * 5000 : i * 5000 + 3000].add_(1)
            x[:, i].add_(1)

    assert peak_above_now(write) < SLACK
    assert x.sum().item() == 4096 + 3 * (4096 + 3000 + 4096)


IN_PLACE: dict[str, Callable[[torch.Tensor], object]] = {
    "scalar": lambda x: x.mul_(0.5),
    "copy": lambda x: x[1:].copy_(torch.ones(4096, device="tpu")),
    "zero": lambda x: x[1:].zero_(),
    "out": lambda x: torch.neg(x, out=x),
    "foreach": lambda x: torch._foreach_add_([x], 1.5),
    "mask": lambda x: x.masked_fill_(torch.ones(4096, dtype=torch.bool, device="tpu"), 2.5),
    "index": lambda x: x.index_fill_(0, torch.tensor([3], device="tpu"), 1.5),
    "random": lambda x: x[:9].uniform_(),
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_an_op_in_place_needs_no_second_buffer(name):
    x = fresh()

    def run() -> None:
        for _ in range(4):
            IN_PLACE[name](x)

    assert peak_above_now(run) < SLACK
    assert torch.accelerator.memory_allocated() >= BYTES


def test_an_optimizer_step_needs_no_second_copy_of_its_state():
    p = torch.nn.Parameter(fresh())
    p.grad = torch.ones_like(p)
    optimizer = torch.optim.SGD([p], lr=0.1, momentum=0.9)
    for _ in range(2):  # the first momentum is a clone of the gradient and shares its buffer
        optimizer.step()
    assert peak_above_now(optimizer.step) < SLACK


# ---- sharing


def test_a_clone_shares_until_one_side_writes():
    x = fresh()
    held: list[torch.Tensor] = []
    assert peak_above_now(lambda: held.append(x.clone())) < SLACK
    (y,) = held
    assert peak_above_now(lambda: y[3].fill_(1)) >= BYTES  # now there are two
    assert x.sum().item() == 0
    assert y.sum().item() == 4096
    assert peak_above_now(lambda: (x[4].fill_(1), y[4].fill_(1))) < SLACK
    assert x.sum().item() == 4096


def test_a_write_to_the_source_leaves_the_clone_alone():
    x = fresh()
    y = x.clone()
    x.add_(1)
    assert y.sum().item() == 0
    assert x.mean().item() == 1


def test_a_detached_alias_follows_every_write():
    x = fresh()
    alias, window = x.detach(), x.view(-1)[4096:8192]
    x[1].fill_(2)
    alias[1, :5] = 7
    assert window.sum().item() == 7 * 5 + 2 * 4091
    assert window.data_ptr() == x.data_ptr() + 4096 * 4


def test_a_result_that_is_freed_is_given_back():
    x = fresh()
    before = torch.accelerator.memory_allocated()
    y = x + 1
    assert torch.accelerator.memory_allocated() - before >= BYTES
    del y
    assert torch.accelerator.memory_allocated() == before


# ---- capacity


def test_a_storage_may_be_larger_than_its_tensor():
    x = torch.arange(10.0, device="tpu")
    x.resize_(4)
    x.add_(1)
    assert x.tolist() == [1, 2, 3, 4]
    assert extension.storage_form(x) == (torch.float32, [10])
    x.resize_(10)
    assert x.tolist() == [1, 2, 3, 4, 4, 5, 6, 7, 8, 9]


def test_a_storage_that_grows_keeps_its_elements():
    x = torch.arange(4.0, device="tpu")
    x.resize_(6)
    x[4:] = -1
    assert x.tolist() == [0, 1, 2, 3, -1, -1]


def test_an_out_tensor_of_less_keeps_its_storage():
    out = torch.zeros(10, device="tpu")
    rest = out[6:]
    rest.fill_(5)
    out.resize_(0)
    torch.add(torch.ones(3, device="tpu"), 1, out=out)
    assert out.tolist() == [2, 2, 2]
    assert rest.tolist() == [5] * 4


def test_a_data_dependent_result_is_exact():
    x = torch.tensor([0.0, 3.0, 0.0, 5.0], device="tpu")
    found = x.nonzero()
    found.add_(1)
    assert found.tolist() == [[2], [4]]
    assert x[x > 1].mul_(2).tolist() == [6, 10]


def test_random_numbers_of_a_window_count_its_elements():
    x = torch.zeros(100, 8, device="tpu")
    generator = torch.Generator(device="tpu").manual_seed(3)
    x[5].normal_(generator=generator)
    after = torch.rand(8, device="tpu", generator=generator)
    generator.manual_seed(3)
    dense = torch.empty(8, device="tpu").normal_(generator=generator)
    assert torch.equal(x[5].cpu(), dense.cpu())
    assert torch.equal(after.cpu(), torch.rand(8, device="tpu", generator=generator).cpu())
