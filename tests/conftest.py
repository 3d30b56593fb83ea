"""What every test relies on: settings fixed before torch is imported, two devices, seeds, and a clean thread state."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator

os.environ["TORCH_TPU_CPU_FALLBACK"] = "error"
os.environ["TORCH_TPU_CPU_DEVICES"] = "2"

import pytest
import torch


@pytest.fixture(autouse=True)
def clean_state() -> Iterator[None]:
    """Seed everything, and make device 0 and its default stream current again when the test is over."""
    torch.manual_seed(0)
    yield
    for index in (1, 0):
        torch.tpu.set_stream(torch.tpu.default_stream(index))


@pytest.fixture(scope="session")
def run_program() -> Callable[..., str]:
    """Run a program in a new interpreter, warnings as errors, and return what it printed.

    Keyword arguments are environment variables; None removes one.
    """

    def run(program: str, *args: str, **env: str | None) -> str:
        settings = {k: v for k, v in (os.environ | env).items() if v is not None}
        command = [sys.executable, "-W", "error", "-c", program, *args]
        done = subprocess.run(command, env=settings, capture_output=True, text=True, check=False, timeout=120)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run
