"""Compile the rule cases for a TPU with libtpu, which needs no TPU; print what fails, and the percentage.

Usage: portability.py [--topology v5e:2x2|tpu7x:2x2x1] [--match TEXT]. Exit status 1 if a case fails that is not in
torch_tpu/testing/not_on_tpu.py, or one passes that is.

The cases run in a child process: if the compiler aborts, that costs only the case, and a new child takes the rest.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence

from torch_tpu.testing.not_on_tpu import NOT_ON_TPU
from torch_tpu.testing.portability import TOPOLOGIES, compile_for, rule_cases


def work(topology: str, todo: Sequence[int]) -> None:
    """Compile the cases with these numbers; one JSON line each: number, and the error or null."""
    cases = rule_cases()
    for i in todo:
        try:
            compile_for(cases[i], topology)
            why = None
        except RuntimeError as error:
            why = " ".join(str(error).split())
        sys.stdout.write(json.dumps([i, why]) + "\n")
        sys.stdout.flush()


def results(topology: str, todo: Sequence[int]) -> Iterator[tuple[int, str | None]]:
    """Number and error of each case, as children report them."""
    left = list(todo)
    while left:
        argv = [sys.executable, __file__, "--topology", topology, "--worker"]
        child = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.write(json.dumps(left))
        child.stdin.close()
        for line in child.stdout:
            if line.startswith("["):
                number, why = json.loads(line)
                left.remove(number)
                yield number, why
        if child.wait() and left:
            yield left.pop(0), f"the compiler ended the process (status {child.returncode})"


def main() -> int:
    """The table of failures, then the figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--topology", choices=TOPOLOGIES, default=TOPOLOGIES[0])
    parser.add_argument("--match", default="", help="only cases whose name contains this")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work(args.topology, json.load(sys.stdin))
        return 0
    cases, start = rule_cases(), time.monotonic()
    todo = [i for i, case in enumerate(cases) if args.match in case.name]
    failed = unexpected = 0
    for i, why in results(args.topology, todo):
        case = cases[i]
        listed = NOT_ON_TPU.get(case.name, NOT_ON_TPU.get(str(case.op)))
        failed += why is not None
        unexpected += (why is None) != (listed is None)
        if why is not None:
            sys.stdout.write(f"{'fails' if listed is None else 'known'}  {case.name}: {listed or why}\n")
        elif listed is not None:
            sys.stdout.write(f"passes though listed  {case.name}: {listed}\n")
        sys.stdout.flush()
    passed, seconds = len(todo) - failed, time.monotonic() - start
    sys.stdout.write(
        f"{args.topology}: {passed} of {len(todo)} cases compile ({100 * passed / max(len(todo), 1):.1f} %), "
        f"{unexpected} unexpected results, {seconds:.0f} s\n"
    )
    return int(unexpected > 0)


if __name__ == "__main__":
    sys.exit(main())
