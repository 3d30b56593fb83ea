"""Count lines and compare them with the budgets, so that growth is a decision and not an accident.

Usage: check_size.py [ROOT]. Prints a table of folders and one line per broken limit; exit status 1 if there is one.

A limit breaks the check: the two totals, the length of a file, the length of a Python function. A guide is what a
folder was planned to need; the table shows it, and passing it is a reason to look, not an error. Raise a limit in the
change that needs it and say why in its text.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

# lowering: planned at 8000; special functions, pooling, interpolation and random numbers written as rules took more; so
# did CTC, the ops that PyTorch has no decomposition for, checks of arguments that its meta kernels leave out, control flow;
# programs for graphs of symbolic size (bounded*.py, size_math.py) are 1,500 of its lines.
TOTAL_LIMITS = {"csrc": 8000, "torch_tpu/lowering": 16500}
FILE_LIMITS = {".py": 800, ".cpp": 500, ".h": 500}
FUNCTION_LIMIT = 60  # lines of a Python function; tests and tables of cases may be longer

GUIDES = {
    "csrc/pjrt": 1200,
    "csrc/util": 300,
    "csrc/storage": 1200,
    "csrc/cache": 400,
    "csrc/dispatch": 2000,
    "csrc/rng": 250,
    "csrc/hooks": 700,
    "csrc/python": 700,
    "torch_tpu/ir": 800,
    "torch_tpu/runtime": 1200,
    "torch_tpu/modes": 1000,
    "torch_tpu/compile": 1200,
    "torch_tpu/export": 800,
}
SOURCES = ("csrc", "torch_tpu", "tools", "tests", "examples", "benchmarks")


def files(folder: Path) -> list[Path]:
    """Source files under ``folder``, sorted."""
    return sorted(p for p in folder.rglob("*") if p.suffix in FILE_LIMITS and p.is_file())


def count(path: Path) -> int:
    """Lines of a file, blank ones and comments included: they are read too."""
    return len(path.read_text(encoding="utf-8").splitlines())


def long_functions(path: Path) -> Iterator[str]:
    """Functions of ``path`` that are over the limit, as ``file:line: name ...``."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > FUNCTION_LIMIT:
                yield f"{path}:{node.lineno}: {node.name} has {length} lines, the limit is {FUNCTION_LIMIT}"


def problems(root: Path) -> Iterator[str]:
    """Every broken limit, one line each."""
    for folder, limit in TOTAL_LIMITS.items():
        total = sum(map(count, files(root / folder)))
        if total > limit:
            yield f"{root / folder}: {total} lines, the limit is {limit}"
    for folder in SOURCES:
        for path in files(root / folder):
            lines, limit = count(path), FILE_LIMITS[path.suffix]
            if lines > limit:
                yield f"{path}: {lines} lines, the limit is {limit}"
            if path.suffix == ".py" and folder in {"torch_tpu", "tools"}:
                yield from long_functions(path)


def table(root: Path) -> Iterator[str]:
    """Lines per folder beside its limit or guide; ``over`` marks a folder that has outgrown it."""
    yield f"{'folder':<24}{'files':>6}{'lines':>8}{'budget':>8}"
    for folder, budget in sorted({**GUIDES, **TOTAL_LIMITS}.items()):
        found = files(root / folder)
        total = sum(map(count, found))
        mark = "  over" if total > budget else ""
        yield f"{folder:<24}{len(found):>6}{total:>8}{budget:>8}{mark}"


def main(args: list[str]) -> int:
    """Print the table and the problems; 1 if there are any problems."""
    root = Path(args[0] if args else ".")
    found = list(problems(root))
    sys.stdout.writelines(f"{line}\n" for line in [*table(root), *found])
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
