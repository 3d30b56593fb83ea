"""Print the docs that are made from tables in the code, so that there is nothing to keep in step by hand.

Usage: gen_docs.py env|ops > docs/PAGE.md (`make docs` writes them all). A test compares the files with this output.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

from torch_tpu import config
from torch_tpu.modes import op_table


def env() -> str:
    """docs/env.md: every setting of config.py, grouped by what a user may expect of it."""
    lines = [
        "# Settings",
        "",
        "Every environment variable we read. Printed from `torch_tpu/config.py` by `make docs`: edit there.",
        "A variable is read when it is first needed and remembered from then on. Set to nothing counts as not set.",
        "A `TORCH_TPU_` name that is not in these tables gets a warning with the nearest name that is.",
    ]
    for stage in config.Stage:
        settings = [s for s in config.SETTINGS.values() if s.stage is stage]
        if not settings:
            continue
        lines += ["", f"## {stage.name.capitalize()}: {stage.value}", ""]
        lines += ["| Variable | Default | Meaning |", "|---|---|---|"]
        lines += [f"| `{s.name}` | {_cell(s.shown_default)} | {_cell(s.help)} |" for s in settings]
    return "\n".join(lines) + "\n"


_RUNGS = {
    "rule": "a rule of `torch_tpu/lowering`",
    "decomposition": "PyTorch's decomposition of it, or ours (`torch_tpu/lowering/composed.py`), into ops with rules",
    "composite": "PyTorch's own composite kernel, run on device tensors",
    "kernel": "metadata or data movement, written in C++ (`csrc/dispatch`)",
    "host": "the host, by design",
}


def ops() -> str:
    """docs/ops.md: every ATen overload that the device handles, and how."""
    table = op_table.table()
    reasons = op_table.host_reasons()
    lines = [
        "# Ops",
        "",
        'Every overload of `aten` that device "tpu" handles, and how. Printed by `make docs`. Ops that PyTorch splits into',
        "others before they reach a device (`CompositeImplicitAutograd`) are not listed: they work if their parts do.",
        "",
        "| Rung | What computes it | Overloads |",
        "|---|---|---|",
    ]
    lines += [f"| {rung} | {what} | {len(table.get(rung, []))} |" for rung, what in _RUNGS.items()]
    lines += ["", "## On the host by design", "", "| Op | Reason |", "|---|---|"]
    lines += [f"| `{name}` | {_cell(reason)} |" for name, reason in reasons.items()]
    for rung in ("rule", "decomposition", "composite", "kernel"):
        lines += ["", f"## {rung.capitalize()}", ""]
        lines += [f"- `{base}`: {', '.join(overloads)}" for base, overloads in op_table.grouped(table[rung]).items()]
    lines += ["", "## Without any", ""]
    lines += ["These fall back to the CPU (`TORCH_TPU_CPU_FALLBACK`).", ""]
    lines += [f"- `{base}`: {', '.join(overloads)}" for base, overloads in op_table.grouped(table["cpu"]).items()]
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


PAGES: dict[str, Callable[[], str]] = {"env": env, "ops": ops}


def main(args: list[str]) -> int:
    """Print one page; 2 if it is not a page."""
    if len(args) != 1 or args[0] not in PAGES:
        sys.stderr.write(f"usage: gen_docs.py {'|'.join(PAGES)}\n")
        return 2
    sys.stdout.write(PAGES[args[0]]())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
