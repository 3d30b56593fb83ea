"""The methods PyTorch generates for a backend, and torch.accelerator, which has to be complete."""

from __future__ import annotations

import gc
import warnings

import pytest
import torch


def test_tensor():
    x = torch.arange(3.0)
    assert x.tpu().device == torch.device("tpu:0")
    assert x.tpu(1).device == x.tpu("tpu:1").device == x.tpu(torch.device("tpu", 1)).device == torch.device("tpu:1")
    assert (x.is_tpu, x.tpu().is_tpu) == (False, True)
    assert x.tpu().tolist() == [0.0, 1.0, 2.0]
    assert x.tpu(non_blocking=True).is_tpu


def test_module():
    module = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    parameter = module[0].weight
    assert module.tpu() is module
    assert module[0].weight is parameter
    assert {t.device.index for t in module.state_dict().values()} == {0}
    assert all(t.is_tpu for t in module.state_dict().values())
    module.tpu(1)
    assert {t.device for t in module.state_dict().values()} == {torch.device("tpu:1")}
    assert not any(t.is_tpu for t in module.cpu().state_dict().values())


def test_storage():
    storage = torch.arange(3.0).untyped_storage()
    assert (storage.is_tpu, storage.tpu().is_tpu) == (False, True)
    assert storage.tpu(1).device == torch.device("tpu:1")
    assert storage.tpu().tolist() == storage.tolist()
    typed = torch.TypedStorage(wrap_storage=storage, dtype=torch.float32, _internal=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "TypedStorage is deprecated")
        assert typed.tpu().device == torch.device("tpu:0")


def test_packed_sequence():
    packed = torch.nn.utils.rnn.pack_padded_sequence(torch.rand(3, 2, 1), [3, 2])
    assert packed.tpu().data.is_tpu
    assert packed.tpu().is_tpu
    assert not packed.is_tpu


def test_accelerator_devices():
    acc = torch.accelerator
    assert acc.current_accelerator() == torch._C._get_accelerator() == torch.device("tpu")
    assert acc.current_accelerator(check_available=True) == torch.device("tpu")
    assert acc.is_available()
    assert acc.device_count() == 2
    acc.set_device_index(1)
    assert acc.current_device_index() == 1
    with acc.device_index(0):
        assert acc.current_device_index() == 0
    with acc.device_index(None):
        assert acc.current_device_index() == 1
    assert torch.empty(1, device=acc.current_accelerator()).device.index == 1


def test_accelerator_streams():
    acc = torch.accelerator
    stream = torch.Stream("tpu:1")
    acc.set_stream(stream)
    assert acc.current_device_index() == 1
    assert acc.current_stream() == acc.current_stream("tpu:1") == stream
    assert acc.current_stream(0).stream_id == 0
    acc.synchronize()
    acc.synchronize("tpu:0")
    acc.synchronize(1)


def test_accelerator_memory():
    acc = torch.accelerator
    gc.collect()
    torch.ones(1 << 18, device="tpu:1")  # what a program keeps, it keeps from now on
    acc.reset_peak_memory_stats(1)
    before = acc.memory_allocated(1)
    x = torch.ones(1 << 18, device="tpu:1")
    assert acc.memory_allocated(1) == acc.memory_allocated("tpu:1") == acc.memory_reserved(1) == before + x.nbytes
    del x
    assert acc.memory_allocated(1) == before
    assert acc.max_memory_allocated(1) == acc.max_memory_reserved(1) >= before + (1 << 20)
    acc.reset_accumulated_memory_stats(1)
    stats = acc.memory_stats(1)
    assert stats["allocated_bytes.all.current"] == before
    assert stats["allocated_bytes.all.allocated"] == 0
    free, total = acc.get_memory_info(1)
    assert 0 < free <= total
    acc.empty_cache()
    acc.empty_host_cache()


def test_nothing_of_accelerator_is_missing():
    tested = {
        "current_accelerator", "is_available", "device_count", "set_device_index", "current_device_index", "device_index",
        "set_stream", "current_stream", "synchronize", "get_device_capability", "memory_stats", "memory_allocated",
        "memory_reserved", "max_memory_allocated", "max_memory_reserved", "reset_peak_memory_stats",
        "reset_accumulated_memory_stats", "get_memory_info", "empty_cache", "empty_host_cache",
    }  # fmt: skip
    old_names = {"current_device_idx", "set_device_idx"}
    assert set(torch.accelerator.__all__) - old_names - {"Graph"} <= tested


@pytest.mark.parametrize("key", ["TPU", "AutogradTPU", "AutocastTPU"])
def test_dispatch_keys_have_the_name(key):
    assert str(torch._C._dispatch_key_parse(key)).endswith(key.replace("TPU", "PrivateUse1"))


def test_custom_ops_of_the_device():
    @torch.library.custom_op("torch_tpu_tests::twice", mutates_args=(), device_types="tpu")
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    assert twice(torch.ones(2, device="tpu")).tolist() == [2.0, 2.0]
    with pytest.raises(NotImplementedError):
        twice(torch.ones(2))
