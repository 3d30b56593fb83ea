"""Long runs: memory and memory maps must stay flat, and threads must agree with the CPU.

    python benchmarks/soak.py [--ops 1000000] [--programs 30000] [--threads 4] [--each 10000]

One JSON line a run. ``rss_growth_mb`` compares the resident size at the end with that after the first tenth.
"""

from __future__ import annotations

import argparse
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch


def rss_mb() -> float:
    """Resident memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 1e6


def maps() -> int:
    """Memory maps of this process; a process may have 65,530."""
    return Path("/proc/self/maps").read_text().count("\n")


def run(name: str, count: int, step: Callable[[int], object]) -> None:
    """Call ``step`` ``count`` times and report growth after the first tenth."""
    start = time.perf_counter()
    for i in range(count // 10):
        step(i)
    rss, old_maps = rss_mb(), maps()
    for i in range(count // 10, count):
        step(i)
    torch.tpu.synchronize()
    print(
        json.dumps(
            {
                "run": name,
                "count": count,
                "seconds": round(time.perf_counter() - start, 1),
                "rss_mb": round(rss_mb(), 1),
                "rss_growth_mb": round(rss_mb() - rss, 1),
                "maps": maps(),
                "maps_growth": maps() - old_maps,
                "device_bytes": torch.accelerator.memory_allocated(),
            }
        ),
        flush=True,
    )


def stress(threads: int, each: int) -> None:
    """Each thread computes the same chain on its own tensors; all must equal the CPU."""
    wanted = torch.zeros(8, 8)
    for i in range(each // 4):
        wanted = (wanted * 0.5 + (i % 7)).clamp(max=3.0)
    wrong: list[int] = []

    def work(n: int) -> None:
        x = torch.zeros(8, 8, device="tpu")
        for i in range(each // 4):
            x.mul_(0.5)
            x = (x + (i % 7)).clamp(max=3.0)
            torch.rand(2, device="tpu")
        if not torch.equal(x.cpu(), wanted):
            wrong.append(n)

    start = time.perf_counter()
    workers = [threading.Thread(target=work, args=(n,)) for n in range(threads)]
    for w in workers:
        w.start()
    for w in workers:
        w.join()
    seconds = round(time.perf_counter() - start, 1)
    print(json.dumps({"run": "threads", "threads": threads, "ops_each": each, "seconds": seconds, "wrong": wrong}))


def main() -> None:
    """Run all three."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ops", type=int, default=1_000_000)
    parser.add_argument("--programs", type=int, default=30_000)
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--each", type=int, default=10_000)
    args = parser.parse_args()
    stress(args.threads, args.each)
    a = torch.rand(8, 8, device="tpu")
    run("ops", args.ops, lambda _: a + a)
    run("programs", args.programs, lambda i: torch.ones(1 + i % 200, 1 + i // 200, device="tpu"))


if __name__ == "__main__":
    main()
