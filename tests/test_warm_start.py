"""A process that finds the caches of an earlier one: it neither traces a backward, nor lowers, nor compiles."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

# Each function returns what it is to be compared by.
PROGRAM = """
import json, os, sys
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch_tpu.compile import lower
from torch_tpu.runtime import disk_cache, extension

exec(os.environ.get("PRELUDE", ""))
DTYPE = getattr(torch, os.environ.get("DTYPE", "float32"))
EXTRA = float(os.environ.get("EXTRA", "1"))
lowered = 0
original = lower._Graph.lower

def counted(self, *args):
    global lowered
    lowered += 1
    return original(self, *args)

lower._Graph.lower = counted

def arange(*shape):
    return torch.arange(float(torch.Size(shape).numel())).reshape(shape).to(DTYPE).to("tpu") / 8

def compiled(fn, **kwargs):
    return torch.compile(fn, backend="tpu", fullgraph=True, **kwargs)

def inference():
    return [compiled(lambda x: torch.relu(x @ x.t()) + EXTRA)(arange(3, 4))]

def training():
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).to(DTYPE).to("tpu")
    compiled(lambda x: model(x).square().sum() * EXTRA)(arange(3, 4)).backward()
    return [p.grad for p in model.parameters()]

def mutation():
    x = arange(3, 4)
    def fn(x):
        x[1:].mul_(EXTRA + 1)
        return x.sum()
    return [compiled(fn)(x), x]

def aliases():
    def fn(x):
        y = x * EXTRA
        return y, y.view(-1), x[1:], x
    x = arange(3, 4)
    y, flat, part, same = compiled(fn)(x)
    assert same is x
    y.zero_()
    x.add_(1)
    return [y, flat, part]

def random():
    x = arange(16, 16).requires_grad_()
    y = compiled(lambda x: nn.functional.dropout(x * EXTRA, 0.5) + torch.rand_like(x))(x)
    y.sum().backward()
    return [y.detach(), x.grad, torch.rand(2, device="tpu")]

def constants():
    return [compiled(lambda x: x * torch.tensor([1.0, 2.0, EXTRA], device=x.device))(arange(2, 3))]

def eager_part():
    def fn(x):
        return (x * 2).cpu().add(EXTRA).to("tpu") * 3
    return [compiled(fn)(arange(3, 4))]

def dynamic():
    def fn(x):
        return x.view(-1)[: x.shape[0]] * x.shape[1] + EXTRA
    step = compiled(fn, dynamic=True)
    x = arange(5, 3).requires_grad_()
    step(x).sum().backward()
    return [step(arange(4, 6)), step(arange(7, 3)), x.grad]

results = {}
for fn in (inference, training, mutation, aliases, random, constants, eager_part, dynamic):
    torch.manual_seed(7)
    results[fn.__name__] = [t.detach().cpu().tolist() for t in fn()]
print(json.dumps({
    "results": results,
    "lowered": lowered,
    "compiled": extension.cache_stats()["compiled"],
    "partitioned": "torch._inductor.pattern_matcher" in sys.modules,
    **{k.removeprefix("autograd_cache_"): n for k, n in counters["aot_autograd"].items()},
}))
"""
GRAPHS = 9  # dynamic: one with gradients, one without


def run(folder: Path, **env: str) -> dict:
    settings = {"TORCH_TPU_CACHE": "1", "TORCH_TPU_CACHE_DIR": str(folder)}
    process = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=os.environ | settings | env, capture_output=True, text=True, check=False
    )
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def filled(tmp_path_factory) -> tuple[Path, dict]:
    """A folder that one process filled, and what that process reported."""
    folder = tmp_path_factory.mktemp("cache")
    cold = run(folder)
    assert cold["miss"] == cold["saved"] == GRAPHS
    assert cold["lowered"] >= GRAPHS
    return folder, cold


def test_a_warm_process_only_loads(filled) -> None:
    folder, cold = filled
    warm = run(folder)
    assert warm["results"] == cold["results"]
    assert warm["hit"] == GRAPHS
    assert "miss" not in warm
    assert warm["lowered"] == warm["compiled"] == 0
    assert not warm["partitioned"]


@pytest.mark.parametrize(
    "env",
    [
        {"DTYPE": "float64"},
        {"PRELUDE": "torch._functorch.config.donated_buffer = False"},
        {"PRELUDE": "from torch_tpu.modes import stored; stored.rules_digest = lambda entry=None: 'edited'"},
    ],
    ids=["dtype", "config", "rules"],
)
def test_what_matters_is_in_the_key(filled, env: dict[str, str]) -> None:
    assert run(filled[0], **env)["miss"] == GRAPHS


def test_another_number_in_the_graph_is_another_graph(filled) -> None:
    other = run(filled[0], EXTRA="2")
    assert other["miss"] == GRAPHS - 2  # with dynamic=True a number is an input
    assert other["results"] == run(filled[0], EXTRA="2", TORCH_TPU_CACHE="0")["results"] != filled[1]["results"]


def test_a_loaded_graph_can_be_lowered(filled) -> None:
    folder, cold = filled
    for path in folder.rglob("*.plan"):
        path.unlink()
    warm = run(folder)
    assert warm["results"] == cold["results"]
    assert warm["hit"] == GRAPHS
    assert warm["lowered"] >= GRAPHS


def test_damaged_entries_are_misses_and_mended(filled) -> None:
    folder, cold = filled
    for i, path in enumerate(sorted(folder.rglob("*.aot"))):
        data = path.read_bytes()
        path.write_bytes(data[: len(data) // 2] if i % 2 else data[:-9] + bytes([data[-9] ^ 1]) + data[-8:])
    again = run(folder)
    assert again["results"] == cold["results"]
    assert again["miss"] == again["saved"] == GRAPHS
    assert run(folder)["hit"] == GRAPHS


CUSTOM = """
@torch.library.custom_op("warm_test::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2

twice.register_fake(torch.empty_like)
assert torch.compile(lambda x: twice(x), backend="tpu")(torch.ones(2, device="tpu")).tolist() == [2, 2]
assert counters["aot_autograd"]["autograd_cache_bypass"] == 1
"""


def test_a_graph_of_unknown_code_is_not_kept(filled) -> None:
    assert run(filled[0], PRELUDE=CUSTOM)["bypass"] == 1


EFFECTS = """
x = torch.eye(3, device="tpu") * 2
y = torch.compile(lambda x: torch.linalg.inv(x) @ x, backend="tpu")(x)  # a check of the result: an op with effects
assert torch.equal(y.cpu(), torch.eye(3))
counters["aot_autograd"].clear()
"""


def test_a_graph_with_effects_is_traced_each_time(filled) -> None:
    for _ in range(2):
        assert run(filled[0], PRELUDE=EFFECTS)["results"] == filled[1]["results"]


def test_without_the_disk_cache(tmp_path: Path) -> None:
    off = run(tmp_path, TORCH_TPU_CACHE="0")
    assert "miss" not in off
    assert not list(tmp_path.rglob("*.aot"))
