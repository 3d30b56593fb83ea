"""Devices: how many there are, which is current, what they tell of themselves, and that two of them are two."""

from __future__ import annotations

import threading

import pytest
import torch

DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64, torch.uint64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128,
    torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz, torch.float8_e8m0fnu,
]  # fmt: skip

# A launcher sets variables after torch is imported; the program seeds and trains on the CPU before it uses the device.
LATE = """
import os, torch
os.environ["TORCH_TPU_CPU_DEVICES"] = "3"
torch.manual_seed(1)
torch.ones(2, requires_grad=True).sum().backward()
state = torch.tpu.get_rng_state(2)
torch.Generator("tpu")
assert torch.tpu.is_available() and torch.accelerator.is_available() and torch.backends.tpu.is_available()
assert torch.tpu.device_count() == 3
assert not torch.tpu.is_initialized()
x = torch.rand(4, device="tpu:2", requires_grad=True)
assert torch.tpu.is_initialized()
(x * 3).sum().backward()
assert x.grad.tolist() == [3.0] * 4
torch.tpu.set_rng_state(state, 2)
assert torch.equal(torch.rand(4, device="tpu:2"), x)
assert torch.tpu.initial_seed() == 1
"""


def test_presence():
    assert torch.tpu.is_available()
    assert torch.backends.tpu.is_available()
    assert torch.tpu.device_count() == 2
    assert torch.tpu.current_device() == 0
    torch.tpu.init()
    assert torch.tpu.is_initialized()
    assert not torch.tpu._is_in_bad_fork()


def test_the_module_is_the_registered_one():
    assert torch.get_device_module("tpu") is torch.tpu
    assert torch.get_device_module() is torch.tpu
    assert set(torch.tpu.__all__) <= set(dir(torch.tpu))
    assert not hasattr(torch.tpu, "is_bf16_supported")  # transformers takes its absence for a yes
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = torch.tpu.nothing


def test_a_cpu_program_touches_no_hardware_and_settings_are_read_late(run_program):
    run_program(LATE, TORCH_TPU_CPU_DEVICES=None)


def test_set_device():
    torch.tpu.set_device("tpu:1")
    assert torch.tpu.current_device() == 1
    assert torch.empty(2, device="tpu").device == torch.device("tpu", 1)
    assert torch.ones(2).to("tpu").device.index == 1
    assert torch.ones(2).tpu().device.index == 1
    torch.tpu.set_device(-1)
    assert torch.tpu.current_device() == 1
    torch.tpu.set_device(torch.device("tpu", 0))
    assert torch.tpu.current_device() == 0


def test_device_context_nests_and_ends_with_an_exception():
    with pytest.raises(KeyError), torch.tpu.device(1):
        assert torch.zeros(1, device="tpu").device.index == 1
        with torch.tpu.device("tpu:0"):
            assert torch.tpu.current_device() == 0
        with torch.tpu.device(-1):
            assert torch.tpu.current_device() == 1
        raise KeyError
    assert torch.tpu.current_device() == 0


def test_device_of_follows_tensors_and_nothing_else():
    with torch.tpu.device_of(torch.ones(1, device="tpu:1")):
        assert torch.tpu.current_device() == 1
    with torch.tpu.device(1), torch.tpu.device_of(torch.ones(1)):
        assert torch.tpu.current_device() == 1


def test_torch_device_is_a_context_too():
    with torch.device("tpu:1"):
        assert torch.ones(2).device == torch.device("tpu:1")
        assert torch.nn.Linear(2, 2).weight.device == torch.device("tpu:1")


def test_the_current_device_is_one_of_the_thread():
    torch.tpu.set_device(1)
    seen = []
    thread = threading.Thread(target=lambda: seen.append(torch.tpu.current_device()))
    thread.start()
    thread.join()
    assert seen == [0]
    assert torch.tpu.current_device() == 1


def test_ops_run_where_their_tensors_are():
    torch.tpu.set_device(0)
    x = torch.arange(4.0, device="tpu:1")
    results = (
        x + 1,
        x.sum(),
        x[1:3],
        x.view(2, 2) @ x.view(2, 2),
        torch.zeros_like(x),
        x.new_ones(3),
        torch.rand_like(x),
    )
    assert {r.device.index for r in results} == {1}
    torch.testing.assert_close(results[3].cpu(), torch.tensor([[2.0, 3.0], [6.0, 11.0]]))


def test_a_copy_on_another_device_is_another_tensor():
    x = torch.arange(6.0, device="tpu:0").view(2, 3)
    y = x.t().to("tpu:1")
    x.add_(10)
    assert y.device.index == 1
    torch.testing.assert_close(y.cpu(), torch.arange(6.0).view(2, 3).t())
    x.copy_(y.t())
    torch.testing.assert_close(x.cpu(), torch.arange(6.0).view(2, 3))
    assert torch.equal(y.to("tpu:0").t(), x)
    y[0].copy_(x[0, :2])
    assert y[0].tolist() == [0.0, 1.0]


def test_to_the_same_device_is_the_same_tensor():
    x = torch.ones(2, device="tpu:1")
    assert x.to("tpu:1") is x
    assert x.tpu(1) is x
    assert x.to("tpu:1", copy=True) is not x


def test_facts():
    properties = torch.tpu.get_device_properties(1)
    assert properties.name == torch.tpu.get_device_name("tpu:1") != ""
    assert properties.total_memory > 1 << 20
    assert properties.platform
    assert properties.platform_version
    assert properties.multi_processor_count == 1


def test_capability_lists_what_a_tensor_may_hold():
    supported = torch.tpu.get_device_capability()["supported_dtypes"]
    assert supported == torch.accelerator.get_device_capability("tpu:1")["supported_dtypes"] == set(DTYPES)
    assert [torch.empty(2, dtype=d, device="tpu").dtype for d in DTYPES] == DTYPES


@pytest.mark.parametrize(
    "call", [torch.tpu.device, torch.tpu.set_device, torch.tpu.current_stream, torch.tpu.synchronize]
)
def test_a_device_of_another_type_is_refused(call):
    with pytest.raises(ValueError, match="Expected a tpu device, but got: cpu"):
        call("cpu")


def test_a_device_as_default():
    torch.set_default_device("tpu")
    try:
        assert torch.ones(2).is_tpu
        assert torch.get_default_device().type == "tpu"
    finally:
        torch.set_default_device(None)
