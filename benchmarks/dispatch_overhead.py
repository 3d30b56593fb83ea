"""Host cost of eager ops on "tpu" beside torch on the CPU, in one run.

    python benchmarks/dispatch_overhead.py [--rounds 15] [--number 1000]

Each case runs on both devices in interleaved rounds; the minimum counts. One JSON line a case: microseconds on both, and
``ratio``, the cost on "tpu" over what ``a + b`` costs torch on the CPU in the same rounds (for the MLP step: over the same
step on the CPU).
Absolute times move by half from hour to hour on a shared machine; the ratios are what is meant.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable

import torch

Case = Callable[[], object]


def op_cases(device: str) -> dict[str, Case]:
    """8x8 float32 operands, hot."""
    a, b, c = (torch.rand(8, 8, device=device) for _ in range(3))
    return {
        "a + b": lambda: a + b,
        "a.add_(b)": lambda: c.add_(b),
        "a * 1.5": lambda: a * 1.5,
        "a @ b": lambda: a @ b,
        "a.sum()": lambda: a.sum(),
        "a.t() + b": lambda: a.t() + b,
        "a[2:6] + b[2:6]": lambda: a[2:6] + b[2:6],
        "torch.rand(8, 8)": lambda: torch.rand(8, 8, device=device),
        "a[0, 0].item()": lambda: a[0, 0].item(),
    }


def mlp_step(device: str) -> Case:
    """Forward, backward and AdamW of a 64-128-64 MLP, batch 32."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 64)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x, y = torch.randn(32, 64).to(device), torch.randn(32, 64).to(device)

    def step() -> None:
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()

    return step


def window_cases(columns: int) -> dict[str, Case]:
    """Writes of 256 elements into windows of a float32 base of 1024 rows; 256 columns are 1 MB, 16384 are 64 MB."""
    base, other = (torch.zeros(1024, columns, device="tpu") for _ in range(2))
    update = torch.ones(256, device="tpu")
    return {
        "row": lambda: base[512, :256].copy_(update),
        "column": lambda: base[:256, 77].copy_(update),
        "flat window": lambda: other.view(-1)[1000:1256].copy_(update),
    }


def best(cases: list[Case], rounds: int, number: int) -> list[float]:
    """Least seconds a call of each case over interleaved rounds."""
    result = [float("inf")] * len(cases)
    for case in cases:
        for _ in range(50):
            case()
    torch.tpu.synchronize()
    for _ in range(rounds):
        for i, case in enumerate(cases):
            start = time.perf_counter()
            for _ in range(number):
                case()
            result[i] = min(result[i], (time.perf_counter() - start) / number)
            torch.tpu.synchronize()
    return result


def report(**fields: object) -> None:
    """One JSON line."""
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


def main() -> None:
    """Run all cases."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--number", type=int, default=1000)
    args = parser.parse_args()
    cpu, tpu = op_cases("cpu"), op_cases("tpu")
    for name in cpu:
        base, c, t = best([cpu["a + b"], cpu[name], tpu[name]], args.rounds, args.number)
        report(case=name, cpu_us=round(c * 1e6, 2), tpu_us=round(t * 1e6, 2), ratio=round(t / base, 2))
    c, t = best([mlp_step("cpu"), mlp_step("tpu")], args.rounds, max(20, args.number // 20))
    report(case="MLP step", cpu_us=round(c * 1e6, 1), tpu_us=round(t * 1e6, 1), ratio=round(t / c, 2))
    small, large = window_cases(256), window_cases(16384)
    for name in small:
        s, b = best([small[name], large[name]], args.rounds, max(50, args.number // 10))
        report(
            case=f"write a {name}", base_1MB_us=round(s * 1e6, 2), base_64MB_us=round(b * 1e6, 2), ratio=round(b / s, 2)
        )


if __name__ == "__main__":
    main()
