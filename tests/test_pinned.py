"""Pinned host memory, and transfers that need not block."""

from __future__ import annotations

import threading

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset


def test_pin_memory():
    x = torch.arange(6.0).view(2, 3)
    p = x.pin_memory()
    assert (x.is_pinned(), p.is_pinned()) == (False, True)
    assert p[1:, 2].is_pinned()
    assert p.pin_memory() is p
    assert torch.equal(p, x)
    assert torch.zeros(3, pin_memory=True).is_pinned()
    assert p.untyped_storage().is_pinned()
    assert x.untyped_storage().pin_memory().is_pinned()
    assert p.data_ptr() % 4096 == 0


def test_only_cpu_tensors_are_pinned():
    x = torch.ones(2, device="tpu")
    assert not x.is_pinned()
    with pytest.raises(RuntimeError, match="only dense CPU tensors can be pinned"):
        x.pin_memory()
    with pytest.raises(RuntimeError, match="Only dense CPU tensors can be pinned"):
        torch.empty(2, device="tpu", pin_memory=True)


def test_no_room_for_pinned_memory():
    with pytest.raises(
        torch.OutOfMemoryError, match=r"(?s)bytes of pinned host memory.*Fix: .*\(TPU-E304, see docs/errors.md\)"
    ):
        torch.empty(1 << 60, dtype=torch.uint8, pin_memory=True)
    assert torch.ones(2, pin_memory=True).sum() == 2


@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize("non_blocking", [False, True])
def test_transfers(pinned, non_blocking):
    host = torch.arange(1000.0)
    source = host.pin_memory() if pinned else host.clone()
    x = source.to("tpu:1", non_blocking=non_blocking)
    torch.tpu.synchronize(1)
    source.zero_()  # the caller may reuse it once the transfer is synchronized
    assert torch.equal(x.cpu(), host)
    back = torch.empty(1000, pin_memory=pinned)
    back.copy_(x * 2, non_blocking=non_blocking)
    torch.tpu.synchronize(1)
    assert torch.equal(back, host * 2)


def test_to_cpu_without_blocking():
    x = torch.arange(1000.0, device="tpu")
    y = (x @ x).to("cpu", non_blocking=True)
    torch.tpu.current_stream().synchronize()
    torch.testing.assert_close(y, torch.arange(1000.0) @ torch.arange(1000.0))


@pytest.mark.parametrize("workers", [0, 1])
def test_data_loader(workers):
    data = TensorDataset(torch.arange(8.0).view(4, 2), torch.arange(4))
    loader = DataLoader(data, batch_size=2, pin_memory=True, num_workers=workers)
    for n, (x, y) in enumerate(loader):
        assert x.is_pinned()
        assert y.is_pinned()
        assert (x.tpu(non_blocking=True).sum() + y.tpu(non_blocking=True).sum()).item() == (7, 27)[n]


def test_pinning_from_threads():
    failed = []

    def run(n: int) -> None:
        for _ in range(50):
            p = torch.full((n,), float(n)).pin_memory()
            if not (p.is_pinned() and (p == n).all()):
                failed.append(n)

    threads = [threading.Thread(target=run, args=(n,)) for n in (1, 100, 5000, 70000)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
