"""Time to the first result of torch.compile(backend="tpu"): a first process, and a second one that finds its caches.

    python benchmarks/warm_start.py [--case mlp] [--rounds 1]

Each process is new; the first of a round starts with an empty cache folder, the second with what the first left. One
JSON line a case, in seconds, the smallest of the rounds:

    cold, warm          from before torch.compile to the first result on the device, in the first and the second process
    ... with imports    the same and the import of torch and torch_tpu
    ... imported        the same in processes that imported torch._dynamo before (which torch.compile does otherwise)
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from typing import Any

CASES = ("mlp", "mlp training", "transformer", "transformer training")


def _model(case: str) -> tuple[Any, Any]:
    """The model and its input, on the device."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    torch.backends.mha.set_fastpath_enabled(False)  # one fused op of inference, without a rule
    if case.startswith("mlp"):
        model: nn.Module = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
        x = torch.randn(32, 64)
    else:
        layer = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True)
        model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        x = torch.randn(2, 128, 256)
    return model.to("tpu"), x.to("tpu")


def child(case: str, imported: bool) -> None:
    """Measure in this process; prints one JSON line."""
    started = time.perf_counter()
    import torch

    imports = time.perf_counter() - started
    if imported:
        import torch._dynamo  # the import binds a local name: torch is one either way
    model, x = _model(case)
    training = case.endswith("training")
    model.train(training)
    torch.tpu.synchronize()
    began = time.perf_counter()
    step = torch.compile(model, backend="tpu")
    with torch.set_grad_enabled(training):
        y = step(x)
        if training:
            y.square().mean().backward()
    torch.tpu.synchronize()
    first = time.perf_counter() - began
    value = float(sum(p.grad.abs().sum() for p in model.parameters()) if training else y.abs().sum())
    sys.stdout.write(json.dumps({"first": first, "with imports": first + imports, "value": value}) + "\n")


def _process(case: str, folder: str, *options: str) -> dict[str, float]:
    environment = os.environ | {"XDG_CACHE_HOME": folder, "TORCH_TPU_CACHE": "1"}
    environment.pop("TORCH_TPU_CACHE_DIR", None)
    command = [sys.executable, __file__, "--child", case, *options]
    out = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout
    return dict(json.loads(out.splitlines()[-1]))


def measure(case: str, rounds: int) -> dict[str, float]:
    """Seconds of the processes, and the ratios that are meant."""
    found: dict[str, float] = {}

    def least(name: str, seconds: float) -> None:
        found[name] = min(found.get(name, seconds), seconds)

    for _ in range(rounds):
        for options, suffix in ((), ""), (("--imported",), " imported"):
            with tempfile.TemporaryDirectory() as folder:
                cold, warm = _process(case, folder, *options), _process(case, folder, *options)
            if cold["value"] != warm["value"]:
                raise RuntimeError(f"{case}: the first process got {cold['value']}, the second {warm['value']}")
            for name, figures in (("cold", cold), ("warm", warm)):
                least(name + suffix, figures["first"])
                if not options:
                    least(name + " with imports", figures["with imports"])
    for suffix in ("", " with imports", " imported"):
        found["ratio" + suffix] = found["warm" + suffix] / found["cold" + suffix]
    return found


def main() -> None:
    """Print one line a case."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--case", choices=CASES, action="append")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--child", choices=CASES)
    parser.add_argument("--imported", action="store_true")
    args = parser.parse_args()
    if args.child is not None:
        child(args.child, args.imported)
        return
    for case in args.case or CASES:
        figures = {k: round(v, 3) for k, v in measure(case, args.rounds).items()}
        sys.stdout.write(json.dumps({"case": case, **figures}) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
