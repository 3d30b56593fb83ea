"""Host cost of a compiled call on "tpu" above what dynamo and AOTAutograd cost by themselves, in one run.

    python benchmarks/compile_overhead.py [--rounds 15] [--number 1000]

The graph is tiny: ten 8x8 float32 inputs, one result. The empty backend goes through the same dynamo and AOTAutograd and
returns tensors made beforehand. Both are timed in interleaved rounds; the minimum counts. One JSON line a case:
microseconds of both, their difference (what is meant) and their ratio.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._dynamo.backends.common import aot_autograd
from torch.utils._pytree import tree_leaves


class Pool:
    """An AOTAutograd compiler whose programs compute nothing: each call takes results made beforehand."""

    def __init__(self, calls: int) -> None:
        self.calls = calls
        self.ready: list[list[Any]] = []

    def compile(self, gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[[list[Any]], list[Any]]:
        nodes = tree_leaves(next(n for n in gm.graph.nodes if n.op == "output").args[0])
        inputs = [n for n in gm.graph.nodes if n.op == "placeholder"]

        def make(node: Any, args: list[Any]) -> Any:
            if node in inputs:
                return args[inputs.index(node)]
            return torch.empty(node.meta["val"].shape, device="tpu")

        def run(args: list[Any]) -> list[Any]:
            if not self.ready:
                self.ready = [[make(n, args) for n in nodes] for _ in range(self.calls)]
            args.clear()
            return self.ready.pop()

        run._boxed_call = True  # type: ignore[attr-defined]
        return run


def product(*xs: torch.Tensor) -> torch.Tensor:
    """Sum of the products of neighbours, [8, 8]."""
    total = xs[0] * xs[1]
    for a, b in zip(xs[2::2], xs[3::2], strict=True):
        total = total + a * b
    return total


def microseconds(call: Callable[[], object], number: int) -> float:
    """Of one call, over ``number`` of them."""
    start = time.perf_counter()
    for _ in range(number):
        call()
    return (time.perf_counter() - start) / number * 1e6


def measure(grad: bool, rounds: int, number: int) -> dict[str, float]:
    """Both backends on ten inputs; ``grad``: the forward of a call whose inputs require gradients."""
    pool = Pool(number + 8)
    empty = aot_autograd(fw_compiler=pool.compile, inference_compiler=pool.compile)
    inputs = [torch.rand(8, 8).to("tpu").requires_grad_(grad) for _ in range(10)]
    best: dict[str, float] = {}
    calls = {}
    for name, backend in (("empty", empty), ("tpu", "tpu")):
        torch._dynamo.reset()

        def fresh(*xs: torch.Tensor) -> torch.Tensor:
            return product(*xs)

        calls[name] = torch.compile(fresh, backend=backend, fullgraph=True)
        calls[name](*inputs)
    with torch.set_grad_enabled(grad):
        for _ in range(rounds):
            for name, fn in calls.items():
                fn(*inputs)
                torch.tpu.synchronize()
                pool.ready = []
                fn(*inputs)  # fills the pool
                spent = microseconds(lambda fn=fn: fn(*inputs), number)
                best[name] = min(best.get(name, spent), spent)
    return {**best, "difference": best["tpu"] - best["empty"], "ratio": best["tpu"] / best["empty"]}


def main() -> None:
    """Print one line a case."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--number", type=int, default=1000)
    args = parser.parse_args()
    for name, grad in (("no_grad", False), ("with grad", True)):
        figures = measure(grad, args.rounds, args.number)
        sys.stdout.write(json.dumps({"case": name, **{k: round(v, 2) for k, v in figures.items()}}) + "\n")


if __name__ == "__main__":
    main()
