"""The command torch-tpu, called in this process."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest
import torch

pytest.importorskip("typer")

from typer.testing import CliRunner

from torch_tpu import config
from torch_tpu.cli.app import app
from torch_tpu.runtime import extension


def call(*args: str, code: int = 0) -> str:
    done = CliRunner().invoke(app, list(args), env={"COLUMNS": "200"})
    assert done.exit_code == code, done.output
    return done.output


@pytest.fixture
def cache_folder(tmp_path):
    """A cache of its own with one program in it."""
    with config.CACHE_DIR.override(tmp_path), config.CACHE.override(True):
        extension.clear_cache()
        (torch.ones(3, 17, device="tpu") * 2).cpu()
        yield tmp_path


def test_the_script_is_declared():
    project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["scripts"] == {"torch-tpu": "torch_tpu.cli:main"}


def test_doctor():
    report = json.loads(call("doctor", "--json"))
    assert report["versions"]["torch"] == torch.__version__
    assert report["plugin"]["first program"] == "right"
    assert [d["device"] for d in report["devices"]] == [f"tpu:{i}" for i in range(torch.tpu.device_count())]
    assert "first program" in call("doctor")


def test_doctor_without_a_device(run_program):
    program = """
from typer.testing import CliRunner
from torch_tpu.cli.app import app
done = CliRunner().invoke(app, ["doctor"])
print(done.exit_code, done.output)
"""
    assert run_program(program, TORCH_TPU_PLUGIN="none").startswith("1 ")


def test_the_cache_is_listed_and_explained(cache_folder):
    listed = json.loads(call("cache", "ls", "--json"))
    assert listed["summary"]["folder"] == str(cache_folder)
    plan = next(e for e in listed["entries"] if e["kind"] == "plan" and "mul" in e["program"])
    assert plan["types"].endswith("-> (f32[3,17])")
    assert "stablehlo.multiply" in call("cache", "explain", plan["name"])
    assert "0 entries begin with 'zz'" in call("cache", "explain", "zz", code=1)
    assert plan["name"][:12] in call("cache", "ls")


def test_damaged_entries_are_found_and_removed(cache_folder):
    assert json.loads(call("cache", "verify", "--json"))["damaged"] == 0
    victim = next(cache_folder.rglob("*.plan"))
    victim.write_bytes(victim.read_bytes()[:-1])
    assert json.loads(call("cache", "verify", "--json", code=1))["names"] == [victim.name]
    assert json.loads(call("cache", "verify", "--repair", "--json"))["removed"] == 1
    assert not victim.exists()


def test_the_cache_is_cleared_when_told_so(cache_folder):
    assert list(cache_folder.rglob("*.plan"))
    call("cache", "clear", code=1)  # nobody answers
    assert list(cache_folder.rglob("*.plan"))
    call("cache", "clear", "--yes")
    assert not list(cache_folder.rglob("*.plan"))


def test_ops():
    found = json.loads(call("ops", "atan2", "--json"))
    assert found["aten.atan2.default"] == "rule"
    assert "no_such_op" in call("ops", "no_such_op", code=1)


@pytest.mark.parametrize(
    ("args", "texts"),
    [
        (["add.Tensor", "8x8", "8"], ["a rule", "elementwise.py", "broadcast_in_dim", "tensor<8x8xf32>"]),
        (["aten.add_.Tensor", "4:int64", "4:int64"], ["functional form", "aten.add.Tensor", "tensor<4xi64>"]),
        (["sum.dim_IntList", "2x3", "--arg", "dim=[1]"], ["stablehlo.reduce", "tensor<2xf32>"]),
        (["cat", "2x3", "2x4", "--arg", "dim=1"], ["stablehlo.concatenate"]),
        (["isin.Tensor_Tensor", "4:int64", "2:int64"], ["a decomposition", "split into", "aten.eq"]),
        (["linalg_eig"], ["the host", "LAPACK"]),
        (["matmul"], ["PyTorch, which splits it"]),
        (["rand_like", "3"], ["composite"]),
        (["bernoulli.p", "3", "--arg", "p=0.5"], ["TORCH_TPU_DUMP_DIR"]),
    ],
)
def test_explain(args, texts):
    output = call("explain", *args)
    for text in texts:
        assert text in output


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (["no_such_op"], "aten has no op 'no_such_op'"),
        (["add.Nothing"], "overloads Tensor, Scalar"),
        (["add.Tensor", "3", "4"], "3"),
        (["add.Tensor", "3"], "needs other"),
        (["add.Tensor", "a", "3"], "'a' is no shape"),
        (["add.Tensor", "3:int", "3:nothing"], "'3:nothing' is no shape"),
        (["add.Tensor", "3", "3", "3"], "takes no more tensors"),
        (["add.Tensor", "3", "3", "--arg", "beta=1"], "takes no beta"),
    ],
)
def test_what_explain_cannot_do(args, text):
    assert text in call("explain", *args, code=1)


def test_run(tmp_path, run_program):
    script = tmp_path / "script.py"
    lines = [
        "import sys, torch",
        "torch.ones(1, device='tpu')",
        "print(torch.tpu.eager_mode.name, sys.argv[1:], __name__)",
    ]
    script.write_text("\n".join(lines), encoding="utf-8")
    program = f"""
import sys
from torch_tpu.cli import main
sys.argv = ["torch-tpu", "run", "--mode", "fused", {str(script)!r}, "--epochs", "3"]
main()
"""
    assert run_program(program).strip() == "FUSED ['--epochs', '3'] __main__"


def test_without_its_packages_the_command_says_what_to_install(run_program):
    program = """
import sys
sys.modules["typer"] = None
from torch_tpu.cli import main
try:
    main()
except SystemExit as e:
    print(e)
"""
    assert "pip install 'torch_tpu[cli]'" in run_program(program)
