"""Check that the C++ of csrc/ includes only what lies below it.

Usage: check_includes.py [CSRC]. Prints one line per wrong include; exit status 1 if there is one.

Three rules. A folder includes itself and folders of lower rows, never a stranger of its own row. pjrt/ knows no torch;
it is the lowest row, so torch cannot come in through another folder either. Only python/ knows Python, and with it the
part of torch that binds Python. Headers that lie in csrc/ itself (pch.h) belong to the build, not to a layer.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

# Low to high. Folders of one row are strangers.
LAYERS = (
    ("pjrt",),
    ("util", "ffi"),
    ("storage",),
    ("cache", "rng"),
    ("trace",),
    ("dispatch", "hooks"),
    ("python",),
)
RANK = {folder: rank for rank, row in enumerate(LAYERS) for folder in row}

INCLUDE = re.compile(r'\s*#\s*include\s+[<"]([^>"]+)[>"]')
TORCH = re.compile(r"(torch|ATen|c10)/")
PYTHON = re.compile(r"Python\.h|pybind11/|torch/(extension|python)\.h|torch/csrc/(Exceptions\.h|.*(python|pybind))")


def why_wrong(folder: str, header: str) -> str | None:
    """The rule that ``#include`` of ``header`` breaks in ``folder``, or None."""
    target = header.partition("/")[0]
    if target in RANK and target != folder and RANK[target] >= RANK[folder]:
        return f"{folder}/ may not include {target}/"
    if folder == "pjrt" and TORCH.match(header):
        return f"pjrt/ knows no torch, so not <{header}>"
    if folder != "python" and PYTHON.match(header):
        return f"only python/ may include Python, so not <{header}>"
    return None


def problems(csrc: Path) -> Iterator[str]:
    """Each wrong include under ``csrc`` as ``file:line: why``, and each folder that has no layer."""
    for folder in sorted(p for p in csrc.iterdir() if p.is_dir()):
        if folder.name not in RANK:
            yield f"{folder}: no layer; add it to LAYERS in {Path(__file__).name}"
            continue
        for path in sorted(p for p in folder.rglob("*") if p.suffix in {".h", ".cpp"}):
            for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
                if (found := INCLUDE.match(line)) and (why := why_wrong(folder.name, found[1])):
                    yield f"{path}:{number}: {why}"


def main(args: list[str]) -> int:
    """Print the problems; 1 if there are any."""
    found = list(problems(Path(args[0] if args else "csrc")))
    sys.stdout.writelines(f"{line}\n" for line in found)
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
