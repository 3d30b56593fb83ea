"""`import torch` with torch_tpu installed brings the device, and nothing slow or loud."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

LISTING = "import torch, sys, json; json.dump(sorted(sys.modules), sys.stderr)"
SLOW = ("torch._dynamo", "torch._inductor", "sympy", "torch_tpu.lowering")


def imported(*, autoload: bool) -> tuple[set[str], str]:
    """Modules that a new interpreter holds after `import torch`, and what it printed to stdout."""
    env = os.environ | {"TORCH_DEVICE_BACKEND_AUTOLOAD": str(int(autoload))}
    result = subprocess.run([sys.executable, "-c", LISTING], env=env, capture_output=True, text=True, check=True)
    return set(json.loads(result.stderr)), result.stdout


@pytest.fixture(scope="module")
def with_us() -> tuple[set[str], str]:
    return imported(autoload=True)


def test_the_entry_point_is_found(with_us):
    assert "torch_tpu._loader" in with_us[0], "the entry point group torch.backends does not name torch_tpu"


def test_autoload_can_be_turned_off():
    assert "torch_tpu._loader" not in imported(autoload=False)[0]


@pytest.mark.parametrize("package", SLOW)
def test_slow_packages_stay_out(with_us, package):
    assert not {m for m in with_us[0] if m == package or m.startswith(f"{package}.")}


def test_nothing_is_printed(with_us):
    # stderr held the list of modules and nothing else, or it would not have been JSON
    assert with_us[1] == ""


@pytest.mark.parametrize("program", ["import torch_tpu", "import torch_tpu.errors", "from torch_tpu import _loader"])
@pytest.mark.parametrize("autoload", ["0", "1"])
def test_our_package_may_come_first(program, autoload):
    # torch's autoload then runs while our own import is under way
    program += "; import torch; assert torch.device('tpu').type == 'tpu'"
    env = os.environ | {"TORCH_DEVICE_BACKEND_AUTOLOAD": autoload}
    result = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
