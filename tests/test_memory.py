"""Memory statistics are true: the bytes of the buffers alive, on each device for itself."""

from __future__ import annotations

import gc
import re

import pytest
import torch

MIB = 1 << 20


@pytest.fixture
def base() -> int:
    """Bytes that earlier tests left on device 1, which counts for nobody else here."""
    gc.collect()
    torch.tpu.synchronize(1)
    torch.tpu.reset_peak_memory_stats(1)
    torch.tpu.reset_accumulated_memory_stats(1)
    return torch.tpu.memory_allocated(1)


def used(base: int, read=torch.tpu.memory_allocated) -> int:
    """Mebibytes since ``base``. Programs may keep a few bytes of operands, or drop some."""
    since = read(1) - base
    whole = round(since / MIB)
    assert abs(since - whole * MIB) < 1024
    return whole


def mib(n: int) -> torch.Tensor:
    return torch.ones(n * MIB // 4, device="tpu:1")


def test_a_tensor_counts_from_its_first_write_to_its_end(base):
    x = torch.empty(MIB // 4, device="tpu:1")
    assert used(base) == 0
    x.fill_(1)
    assert used(base) == 1
    del x
    assert used(base) == 0


def test_views_and_aliases_take_none(base):
    x = mib(1)
    views = [x[10:], x.view(2, -1).t(), x.detach(), x.expand(3, -1)]
    assert used(base) == 1
    del x
    assert used(base) == 1
    views.clear()
    assert used(base) == 0


def test_writes_in_place_take_none(base):
    x = mib(1)
    x.add_(1)
    x[5:10] = 3
    torch.mul(x, 2, out=x)
    assert used(base) == 1


def test_a_resized_storage_gives_its_memory_back(base):
    x = mib(2)
    x.untyped_storage().resize_(0)
    assert used(base) == 0


def test_peak(base):
    a, b = mib(1), mib(2)
    del b
    assert used(base, torch.tpu.max_memory_allocated) == used(base, torch.tpu.max_memory_reserved) == 3
    assert used(base) == used(base, torch.tpu.memory_reserved) == 1
    torch.tpu.reset_peak_memory_stats(1)
    assert used(base, torch.tpu.max_memory_allocated) == 1
    del a


def test_totals(base):
    mib(1)
    torch.tpu.reset_accumulated_memory_stats(1)
    for _ in range(3):
        mib(1)
    stats = torch.tpu.memory_stats("tpu:1")
    assert stats["allocated_bytes.all.allocated"] == stats["allocated_bytes.all.freed"] == 3 * MIB
    assert stats["allocation.all.allocated"] == 3
    torch.tpu.reset_accumulated_memory_stats(1)
    assert torch.tpu.memory_stats(1)["allocated_bytes.all.allocated"] == 0


def test_devices_count_for_themselves(base):
    other = torch.tpu.memory_allocated(0)
    x = mib(1)
    assert torch.tpu.memory_allocated(0) == other
    assert used(base) == 1
    with torch.tpu.device(1):
        now = torch.tpu.memory_allocated()
    assert now == torch.tpu.memory_allocated(1) == torch.tpu.memory_allocated("tpu:1")
    del x


def test_autograd_frees_what_backward_used(base):
    x = mib(1).requires_grad_()
    loss = (x.exp() * x.sin()).sum()
    assert used(base) == 3  # x, exp(x), sin(x)
    loss.backward()
    del loss
    assert used(base) == 2  # x and its gradient


def test_mem_get_info():
    free, total = torch.tpu.mem_get_info(1)
    assert 0 < free <= total == torch.tpu.get_device_properties(1).total_memory
    torch.tpu.empty_cache()


def test_no_memory_is_an_error_that_is_counted_and_harms_nothing(base):
    x = mib(1)
    with pytest.raises(torch.OutOfMemoryError, match=r"(?s)^\[aten\..*Tensors hold .*Fix: free tensors.*\(TPU-E304"):
        torch.zeros(1 << 40, device="tpu:1")
    assert torch.tpu.memory_stats(1)["num_ooms"] == 1
    assert used(base) == 1
    assert (x + 1)[0].item() == 2
    torch.tpu.synchronize(1)


def held_by(x):
    """The entry of the snapshot that belongs to the storage of ``x``."""
    (entry,) = (e for e in torch.tpu.memory_snapshot() if e["address"] == x.untyped_storage().data_ptr())
    return entry


def test_snapshot_says_what_each_storage_holds(base):
    x = torch.zeros(4, 256, device="tpu:1") + 1
    view, twin = x[1:], torch.empty(3, dtype=torch.float64, device="tpu:1")
    entry = held_by(view)
    assert entry["device"] == 1
    assert entry["state"] == "allocated"
    assert entry["op"].startswith("aten.add")
    assert (entry["dtype"], entry["shape"], entry["bytes"]) == (torch.float32, (4, 256), 4096)
    assert entry["storage_bytes"] == 4096
    assert held_by(twin) == {
        "device": 1, "address": twin.untyped_storage().data_ptr(), "storage_bytes": 24, "state": "unwritten"
    }  # fmt: skip
    assert entry in torch.tpu.memory_snapshot(1)
    assert entry not in torch.tpu.memory_snapshot("tpu:0")
    with torch.tpu.set_eager_mode(torch.tpu.EagerMode.FUSED):
        y = x * 2
        assert (held_by(y)["state"], held_by(y)["bytes"]) == ("recorded", 0)
    assert (held_by(y)["state"], held_by(y)["bytes"]) == ("allocated", 4096)


def test_snapshot_adds_up(base):
    before = torch.tpu.memory_allocated(1)
    tensors = [mib(1) for _ in range(3)] + [torch.ones(7, device="tpu:1")]
    arrays = {e["array"]: e["bytes"] for e in torch.tpu.memory_snapshot(1) if e["state"] == "allocated"}
    assert sum(arrays.values()) >= torch.tpu.memory_allocated(1) - before >= 3 * MIB
    del tensors


def test_summary_groups_alike_arrays(base):
    tensors = [torch.zeros(1 << 17, 3, device="tpu:1") + i for i in range(4)]
    text = torch.tpu.memory_summary(1)
    assert text.startswith("tpu:1: now ")
    assert "out of memory" in text
    assert re.search(r"6\.0 MiB  4 x tpu:1 float32\[131072, 3\] of aten\.add", text)
    del tensors


def test_statistics_of_a_device_that_is_not_there():
    torch.zeros(1, device="tpu")  # before the first use there are no devices to ask
    with pytest.raises(RuntimeError, match=r"tpu:7 does not exist: there are 2 devices"):
        torch.tpu.memory_allocated(7)
    with pytest.raises(ValueError, match="cpu"):
        torch.tpu.memory_allocated("cpu")
