"""Matrix products on "tpu" with and without PyTorch's own kernels, beside torch on the CPU.

    python benchmarks/products.py [--rounds 6]

Square products of each dtype; the setting TORCH_TPU_HOST_KERNELS is fixed for a process, so each side has its own, and
their rounds alternate. One JSON line a case: milliseconds, the least of all rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time

SIZES = (128, 256, 512, 1024)
DTYPES = ("float32", "float64", "bfloat16")


def measure(device: str) -> dict[str, float]:
    """Milliseconds of each case on ``device``."""
    import torch

    found = {}
    for dtype in DTYPES:
        for n in SIZES:
            x = torch.randn(n, n, dtype=getattr(torch, dtype)).to(device)
            times = []
            for _ in range(8):
                start = time.perf_counter()
                for _ in range(5):
                    x @ x
                torch.tpu.synchronize()
                times.append((time.perf_counter() - start) * 200)
            found[f"{dtype} {n}"] = min(times)
    return found


def main() -> None:
    """Alternate the three sides and print the least of each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        sys.stdout.write(json.dumps(measure(args.worker)))
        return
    sides = {"cpu": ("cpu", "0"), "xla": ("tpu", "0"), "host": ("tpu", "1")}
    least: dict[str, dict[str, float]] = {side: {} for side in sides}
    for _ in range(args.rounds):
        for side, (device, setting) in sides.items():
            env = os.environ | {"TORCH_TPU_HOST_KERNELS": setting}
            out = subprocess.run(
                [sys.executable, __file__, "--worker", device], env=env, check=True, capture_output=True
            )
            for case, ms in json.loads(out.stdout).items():
                least[side][case] = min(ms, least[side].get(case, ms))
    for case in least["cpu"]:
        row = {side: round(least[side][case], 3) for side in sides}
        ratio = round(least["host"][case] / least["xla"][case], 2)
        sys.stdout.write(json.dumps({"case": case, **row, "host/xla": ratio}) + "\n")


if __name__ == "__main__":
    main()
