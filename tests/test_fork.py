"""Forked processes: a client does not survive a fork, and says so; a child that starts its own is fine."""

from __future__ import annotations

import json

import pytest

# Prints one JSON object: what each use of the device gave in a child of a parent that had used it.
USED = """
import json, os, sys, torch
held = torch.arange(3.0, device="tpu")
event = torch.tpu.Event()
USES = {
    "new": lambda: torch.empty(2, device="tpu"),
    "op": lambda: held + 1,
    "read": lambda: held.tolist(),
    "copy in": lambda: held.copy_(torch.ones(3)),
    "copy out": lambda: held.cpu(),
    "repr": lambda: repr(held),
    "synchronize": torch.tpu.synchronize,
    "record": event.record,
    "state": torch.tpu.get_rng_state,
    "set device": lambda: torch.tpu.set_device(1),
    "memory": torch.tpu.memory_allocated,
    "name": torch.tpu.get_device_name,
}
def outcome(use):
    try:
        use()
        return "ok"
    except Exception as e:
        return f"{type(e).__name__}: {e}"
read, write = os.pipe()
child = os.fork()
if child == 0:
    results = {name: outcome(use) for name, use in USES.items()}
    results["bad fork"] = torch.tpu._is_in_bad_fork()
    results["initialized"] = torch.tpu.is_initialized()
    results["query"] = event.query()
    torch.manual_seed(3)
    results["cpu"] = (torch.ones(2) + 1).tolist()
    results["metadata"] = [list(held[1:].shape), str(held.device)]
    del held
    os.write(write, json.dumps(results).encode())
    sys.exit(0)
os.close(write)
results = json.loads(os.read(read, 1 << 16))
results["exit"] = os.waitpid(child, 0)[1]
results["parent"] = (held + 1).tolist()
print(json.dumps(results))
"""

# Workers of a DataLoader are forked. Before the parent uses the device a worker may; afterwards only the CPU's tensors go.
WORKERS = """
import torch
from torch.utils.data import DataLoader, Dataset

class Numbers(Dataset):
    def __init__(self, device):
        self.device = device
    def __len__(self):
        return 8
    def __getitem__(self, i):
        return (torch.full((2,), float(i), device=self.device) + 1 - torch.ones(2, device=self.device)).cpu()

def total(device):
    loader = DataLoader(Numbers(device), batch_size=4, num_workers=1, multiprocessing_context="fork")
    return sum(batch.sum().item() for batch in loader)

assert total("tpu") == 56
assert not torch.tpu.is_initialized()
assert torch.ones(2, device="tpu").sum().item() == 2
assert total("cpu") == 56
try:
    total("tpu")
except RuntimeError as e:
    print(e)
assert torch.ones(2, device="tpu").sum().item() == 2
"""


@pytest.fixture(scope="module")
def child(run_program) -> dict:
    return json.loads(run_program(USED))


@pytest.mark.parametrize(
    "use",
    [
        "new",
        "op",
        "read",
        "copy in",
        "copy out",
        "repr",
        "synchronize",
        "record",
        "state",
        "set device",
        "memory",
        "name",
    ],
)
def test_use_after_fork_is_an_error(child, use):
    assert child[use] == (
        'RuntimeError: the device "tpu" was used before this process was forked, and PJRT clients do not survive a fork.\n'
        "  Fix: use the spawn start method: torch.multiprocessing.set_start_method('spawn').\n"
        "  (TPU-E303, see docs/errors.md)"
    )


def test_the_rest_of_the_child_works(child):
    assert child["bad fork"]
    assert not child["initialized"]
    assert child["query"]
    assert child["cpu"] == [2.0, 2.0]
    assert child["metadata"] == [[2], "tpu:0"]
    assert child["exit"] == 0


def test_the_parent_does_not_notice(child):
    assert child["parent"] == [1.0, 2.0, 3.0]


def test_workers(run_program):
    assert "TPU-E303" in run_program(WORKERS)
