"""Eager modes beside torch on the CPU, in one run: chains of pointwise ops, an MLP step, a transformer block.

    python benchmarks/fused.py [--rounds 5]

Interleaved rounds, the least counts. One JSON line a case: milliseconds on the CPU, Strict and Fused, and both ratios.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable

import torch
from torch import nn

Case = Callable[[], object]


def chain(device: str, tanh: bool) -> Case:
    """60 ops on 512x512 float32; add (or tanh), multiply, subtract in turn."""
    torch.manual_seed(0)
    a, b = torch.rand(512, 512).to(device), torch.rand(512, 512).to(device)

    first: Callable[[torch.Tensor], torch.Tensor] = torch.tanh if tanh else lambda x: x + b
    ops = (first, lambda x: x * 0.5, lambda x: x - b)

    def run() -> torch.Tensor:
        x = a
        for i in range(60):
            x = ops[i % 3](x)
        return x[0, 0].item()

    return run


def training_step(model: nn.Module, x: torch.Tensor, y: torch.Tensor, device: str) -> Case:
    """Forward, backward, AdamW."""
    model = model.to(device)
    x, y = x.to(device), y.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        if device == "tpu":
            torch.tpu.synchronize()

    return step


def mlp(device: str) -> Case:
    """64-128-64, batch 32."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64))
    return training_step(model, torch.randn(32, 64), torch.randn(32, 64), device)


def block(device: str) -> Case:
    """One transformer layer, T=128, D=256, 4 heads, no dropout."""
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True)
    return training_step(model, torch.randn(1, 128, 256), torch.randn(1, 128, 256), device)


def in_mode(mode: torch.tpu.EagerMode, case: Case) -> Case:
    """``case`` under an eager mode."""

    def run() -> None:
        with torch.tpu.set_eager_mode(mode):
            case()

    return run


def main() -> None:
    """Run all cases."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    cases: dict[str, Callable[[str], Case]] = {
        "60-op chain": lambda d: chain(d, tanh=False),
        "60-op chain, 20 tanh": lambda d: chain(d, tanh=True),
        "MLP step": mlp,
        "transformer block step": block,
    }
    for name, make in cases.items():
        sides = {
            "cpu": make("cpu"),
            "strict": in_mode(torch.tpu.EagerMode.STRICT, make("tpu")),
            "fused": in_mode(torch.tpu.EagerMode.FUSED, make("tpu")),
        }
        least = dict.fromkeys(sides, float("inf"))
        for side in sides.values():
            for _ in range(5):
                side()
        for _ in range(args.rounds):
            for side, case in sides.items():
                start = time.perf_counter()
                for _ in range(10):
                    case()
                least[side] = min(least[side], (time.perf_counter() - start) * 100)
        row = {f"{side}_ms": round(ms, 3) for side, ms in least.items()}
        row["strict/fused"] = round(least["strict"] / least["fused"], 2)
        row["cpu/fused"] = round(least["cpu"] / least["fused"], 2)
        sys.stdout.write(json.dumps({"case": name, **row}) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
