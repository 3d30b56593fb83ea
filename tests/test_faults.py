"""A plugin that fails, delays, runs out of memory or does not fit: errors name the op, and everything else goes on."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from torch_tpu.runtime import plugins

CASES = Path(__file__).parent / "stub_plugin" / "cases.py"
NAMES = re.findall(r"^@case\ndef (\w+)", CASES.read_text(encoding="utf-8"), re.MULTILINE)
USE = """
import torch
for _ in range(2):  # the second time says the same
    try:
        torch.ones(2, device="tpu")
    except RuntimeError as e:
        print(type(e).__mro__, e)
print(torch.ones(2).sum().item())
"""


@pytest.fixture(scope="session")
def stub() -> str:
    """Path of the stub plugin."""
    spec = importlib.util.find_spec("torch_tpu.testing._stub_plugin")
    assert spec is not None, "not built: TORCH_TPU_BUILD_TESTS=OFF?"
    assert spec.origin is not None
    return spec.origin


@pytest.fixture(scope="session")
def stub_env(stub: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return {
        "TORCH_TPU_PLUGIN": stub,
        "STUB_PLUGIN_REAL": plugins.choose().path,
        "TORCH_TPU_CACHE": "1",
        "TORCH_TPU_CACHE_DIR": str(tmp_path_factory.mktemp("cache")),
    }


class Worker:
    """A process whose plugin is the stub, and that runs cases by name."""

    def __init__(self, env: dict[str, str]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, CASES],
            env=os.environ | env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __call__(self, name: str) -> str:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{name}\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        assert answer, f"the process ended with {self.process.wait()}"
        return str(json.loads(answer))


@pytest.fixture(scope="module", params=["cpu", "stub"])
def worker(request: pytest.FixtureRequest, stub_env: dict[str, str]) -> Iterator[Worker]:
    """``cpu``: the host can read device memory; ``stub``: it has to transfer."""
    worker = Worker(stub_env | {"STUB_PLUGIN_PLATFORM": request.param})
    yield worker
    worker.process.communicate()


@pytest.mark.parametrize("name", NAMES)
def test_fault(worker: Worker, name: str) -> None:
    error = worker(name)
    assert not error, error


# ---- plugins that do not fit


@pytest.mark.parametrize(
    ("api", "base", "texts"),
    [
        ("old", "NotImplementedError", ["PJRT_LoadedExecutable_Execute is not in this plugin (PJRT 0.7,", "TPU-E302"]),
        ("major", "NotImplementedError", ["it speaks PJRT 1.", "TPU-E302"]),
        ("garbage", "NotImplementedError", ["it speaks PJRT -", "TPU-E302"]),
        ("null", "RuntimeError", ["GetPjrtApi returned nothing", "TPU-E301"]),
    ],
)
def test_plugin_that_does_not_fit(
    run_program: Callable[..., str], stub_env: dict[str, str], api: str, base: str, texts: list[str]
) -> None:
    out = run_program(USE, **stub_env, STUB_PLUGIN_API=api)
    assert out.count("see docs/errors.md") == 2
    assert out.rstrip().endswith("2.0")  # the process goes on
    assert all(text in out for text in [f"<class '{base}'>", stub_env["TORCH_TPU_PLUGIN"], "Fix: ", *texts])


@pytest.mark.parametrize("library", ["text", "elf"])
def test_file_that_is_no_plugin(run_program: Callable[..., str], tmp_path: Path, library: str) -> None:
    path = tmp_path / "plugin.so"
    if library == "text":
        path.write_text("not a library")
    else:  # a library, but of another kind
        path = Path(next(m.__file__ for m in [__import__("_ctypes")] if m.__file__))
    out = run_program(USE, TORCH_TPU_PLUGIN=str(path))
    assert out.count("TPU-E301") == 2
    assert "Fix: check TORCH_TPU_PLUGIN" in out
    assert out.rstrip().endswith("2.0")


def test_missing_file(run_program: Callable[..., str], tmp_path: Path) -> None:
    program = "import warnings; warnings.simplefilter('ignore', RuntimeWarning)\n" + USE
    out = run_program(program, TORCH_TPU_PLUGIN=str(tmp_path / "nothing.so"))
    assert out.count("TPU-E301") == 2
    assert "no such file" in out
    assert "PluginNotFound" in out
    assert out.rstrip().endswith("2.0")
