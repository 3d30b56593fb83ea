"""Long runs in a process of their own: memory and memory maps stay flat. benchmarks/soak.py does ten times as much."""

from __future__ import annotations

import json

PROGRAM = """
import gc, json
from pathlib import Path
import torch
from torch_tpu.runtime import extension

def now():
    gc.collect()
    torch.accelerator.synchronize()
    return {
        "rss_mb": int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 1e6,
        "maps": Path("/proc/self/maps").read_text().count(chr(10)),
        "device_bytes": torch.accelerator.memory_allocated(),
    }

def ops(count):
    x = torch.zeros(16, 16, device="tpu")
    for i in range(count // 5):
        y = x + 1
        x.mul_(0.5)
        x[i % 16].add_(y[3])
        torch.rand(4, device="tpu")

def programs(count, start):
    for i in range(start, start + count):
        torch.full((1 + i % 40, 1 + i // 40), 2.0, device="tpu")

ops(5_000)
seen = [now()]
ops(100_000)
seen.append(now())
programs(200, 0)
seen.append(now())
programs(400, 200)
seen.append(now())
print(json.dumps({"seen": seen, "stats": extension.cache_stats()}))
"""


def test_memory_is_flat(run_program):
    result = json.loads(run_program(PROGRAM, TORCH_TPU_MAX_PROGRAMS="100").splitlines()[-1])
    start, after_ops, before_programs, after_programs = result["seen"]
    assert after_ops["rss_mb"] - start["rss_mb"] < 10
    assert after_ops["maps"] - start["maps"] < 50
    assert after_ops["device_bytes"] <= start["device_bytes"] + 4096
    assert after_programs["rss_mb"] - before_programs["rss_mb"] < 30
    assert after_programs["maps"] - before_programs["maps"] < 100
    assert after_programs["device_bytes"] <= before_programs["device_bytes"] + 4096
    assert result["stats"]["programs"] <= 100
    assert result["stats"]["evictions"] >= 450
