"""The layers hold, and the tools that check them see what breaks them."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(list(map(str, command)), cwd=ROOT, capture_output=True, text=True, check=False)


def imported_modules(path: Path) -> set[str]:
    """Names that ``path`` imports, ``from a import b`` as ``a`` and ``a.b``."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def test_import_contracts():
    result = run(Path(sys.executable).with_name("lint-imports"), "--no-cache")
    assert result.returncode == 0, result.stdout


def test_only_the_runtime_imports_the_extension():
    package = ROOT / "torch_tpu"
    guilty = {
        str(path.relative_to(ROOT))
        for path in package.rglob("*.py")
        if "torch_tpu._C" in imported_modules(path) and path.relative_to(package).parts[0] != "runtime"
    }
    assert not guilty, "use what torch_tpu.runtime offers instead"


def test_cpp_includes():
    result = run(sys.executable, "tools/check_includes.py")
    assert (result.returncode, result.stdout) == (0, "")


@pytest.mark.parametrize(
    ("folder", "line", "why"),
    [
        ("pjrt", '#include "util/check.h"', "pjrt/ may not include util/"),
        ("pjrt", "#include <ATen/ATen.h>", "pjrt/ knows no torch"),
        ("cache", '#include "rng/generator.h"', "cache/ may not include rng/"),
        ("storage", '#include "dispatch/call.h"', "storage/ may not include dispatch/"),
        ("hooks", '#  include "python/module.h"', "hooks/ may not include python/"),
        ("dispatch", "#include <Python.h>", "only python/ may include Python"),
        ("dispatch", "#include <torch/extension.h>", "only python/ may include Python"),
        ("util", "#include <torch/csrc/utils/pybind.h>", "only python/ may include Python"),
        ("compiler", "", "no layer"),
    ],
)
def test_wrong_include_is_found(tmp_path, folder, line, why):
    (tmp_path / folder).mkdir()
    (tmp_path / folder / "a.cpp").write_text(f"// a comment\n{line}\n")
    result = run(sys.executable, "tools/check_includes.py", tmp_path)
    assert result.returncode == 1
    assert why in result.stdout


@pytest.mark.parametrize(
    ("folder", "line"),
    [
        ("pjrt", "#include <pjrt_c_api.h>"),
        ("dispatch", '#include "storage/storage.h"'),
        ("hooks", "#include <torch/library.h>"),
        ("python", "#include <torch/csrc/utils/pybind.h>"),
        ("python", '#include "python/module.h"'),
    ],
)
def test_right_include_passes(tmp_path, folder, line):
    (tmp_path / folder).mkdir()
    (tmp_path / folder / "a.h").write_text(f"{line}\n")
    assert run(sys.executable, "tools/check_includes.py", tmp_path).returncode == 0


def test_sizes():
    result = run(sys.executable, "tools/check_size.py")
    assert result.returncode == 0, result.stdout


def test_each_broken_limit_is_named(tmp_path):
    (tmp_path / "csrc" / "util").mkdir(parents=True)
    (tmp_path / "csrc" / "util" / "long.cpp").write_text("//\n" * 501)
    (tmp_path / "torch_tpu" / "lowering").mkdir(parents=True)
    (tmp_path / "torch_tpu" / "lowering" / "long.py").write_text("x = 1\n" * 16501)
    (tmp_path / "torch_tpu" / "f.py").write_text("def f():\n" + "    x = 1\n" * 60)
    result = run(sys.executable, "tools/check_size.py", tmp_path)
    assert result.returncode == 1
    for text in (
        "long.cpp: 501 lines, the limit is 500",
        "lowering: 16501 lines, the limit is 16500",
        "long.py: 16501 lines, the limit is 800",
        "f has 61 lines, the limit is 60",
    ):
        assert text in result.stdout
