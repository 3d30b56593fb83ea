"""What a user sees of compiled graphs: logs, traces, dumps, and why there is another program."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch

from torch_tpu import config
from torch_tpu.compile import insight

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()


@pytest.fixture
def reasons(caplog):
    """The reasons that were logged since the last look."""
    caplog.set_level(logging.INFO, "torch_tpu.compile")

    def look() -> list[str]:
        found = [r.getMessage() for r in caplog.records if r.name == "torch_tpu.compile"]
        caplog.clear()
        return found

    return look


def why(fn, *calls, reasons) -> list[str]:
    """Why calls needed another program than those before."""
    step = torch.compile(fn, backend="tpu", fullgraph=True, dynamic=True)
    found = []
    for args in (*calls, *calls):
        step(*args)
        found += reasons()
    return found


def test_sizes(reasons) -> None:
    """Random numbers have no bounded form: a program a size."""
    calls = [(torch.randn(n, 5, device="tpu"),) for n in (4, 6)]
    (reason,) = why(lambda t: t + torch.rand_like(t), *calls, reasons=reasons)
    assert "program 2, because input" in reason
    assert "has sizes [6, 5], before [4, 5]" in reason


def test_bounds(reasons) -> None:
    calls = [(torch.randn(n, 5, device="tpu"),) for n in (4, 6, 7)]
    (reason,) = why(lambda t: t.sin() * 3, *calls, reasons=reasons)
    assert "has the bound 8, before 4" in reason
    assert "dim 0 of " in reason
    assert "input" not in reason


def test_form_of_a_view(reasons) -> None:
    calls = [(torch.randn(n, 8, device="tpu")[:4],) for n in (6, 9)]
    (reason,) = why(lambda t: t + torch.rand_like(t), *calls, reasons=reasons)
    assert "has stored form torch.float32[9, 8], before torch.float32[6, 8]" in reason


def test_global_state(reasons) -> None:
    step = torch.compile(lambda t: t @ t, backend="tpu", fullgraph=True)
    x = torch.randn(4, 4, device="tpu")
    step(x)
    with torch.tpu.compiler.custom_compiler_options({"xla_optimization_level": "O1"}):
        step(x)
    (reason,) = reasons()
    assert "compiler options" in reason
    assert "'xla_optimization_level': 'O1'" in reason


def test_the_nearest_call_is_named() -> None:
    def form(*sizes: str) -> insight.Form:
        return {f"input {i} (x)": {"dtype": "f32", "sizes": s, "strides": s} for i, s in enumerate(sizes)}

    earlier = [form("[1]", "[9]"), form("[3]", "[2]"), form("[4]", "[4]")]
    assert insight.explain(form("[5]", "[2]"), earlier) == "input 0 (x) has sizes [5], before [3]"
    both = insight.explain(form("[5]", "[5]"), earlier[:1])
    assert both == "input 0 (x) has sizes [5], before [1]; input 1 (x) has sizes [5], before [9]"


def test_dumps(tmp_path) -> None:
    with config.DUMP_DIR.override(tmp_path):
        torch.compile(lambda t: t.sin() @ t.t(), backend="tpu")(torch.randn(3, 4, device="tpu"))
    (fx,) = tmp_path.glob("*.fx.txt")
    assert "torch.ops.aten.sin.default" in fx.read_text()
    assert any("stablehlo.sine" in p.read_text() for p in tmp_path.glob("*.mlir"))


PROGRAM = """
import torch
step = torch.compile(lambda t: t.sin() * 3, backend="tpu", dynamic=True)
for n in (4, 6):
    step(torch.randn(n, 5).to("tpu"))
"""


def artifacts(folder: Path) -> list[str]:
    found = []
    for path in folder.glob("*.log"):
        for line in path.read_text().splitlines():
            _, brace, rest = line.partition("{")
            if brace and '"artifact"' in rest:
                found.append(json.loads(brace + rest)["artifact"]["name"])
    return found


def test_torch_trace_and_torch_logs(tmp_path, run_program) -> None:
    run_program(
        PROGRAM.replace("import torch\n", "import torch, warnings\nwarnings.simplefilter('ignore')\n", 1),
        TORCH_TRACE=str(tmp_path / "trace"),
        TORCH_LOGS="torch_tpu",
        TORCH_LOGS_OUT=str(tmp_path / "log"),
        TORCH_TPU_DUMP_DIR=str(tmp_path / "dump"),
        TORCH_TPU_CACHE="0",
    )
    names = artifacts(tmp_path / "trace")
    assert any(n.startswith("torchtpu_fx_graph_inference_") for n in names)
    assert sum(n.startswith("torchtpu_stablehlo_graph_inference_") for n in names) == 2
    assert sum(n.startswith("torchtpu_optimized_hlo_inference_") for n in names) == 2
    text = (tmp_path / "log").read_text()
    assert "has the bound 8, before 4" in text
    assert "compiled inference_" in text
    optimised = list((tmp_path / "dump").glob("inference_*.hlo.*"))
    assert optimised
    assert all(p.stat().st_size for p in optimised)
