"""DLPack: out as a copy in the CPU's memory, in as a copy on the device."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils import dlpack

CPU = (dlpack.DLDeviceType.kDLCPU, 0)


@pytest.mark.parametrize(
    "view", [lambda x: x, lambda x: x.t(), lambda x: x[1:, ::2], lambda x: x[:0], lambda x: x[0, 0]]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64], ids=str)
def test_out(view, dtype):
    x = torch.arange(12).view(3, 4).to(dtype)
    got = torch.from_dlpack(view(x.tpu()))
    assert got.device.type == "cpu"
    torch.testing.assert_close(got, view(x))


@pytest.mark.parametrize("device", ["tpu:0", "tpu:1"])
def test_it_says_that_it_is_on_the_cpu(device):
    x = torch.arange(3.0, device=device)
    assert x.__dlpack_device__() == CPU
    for capsule in (
        x.__dlpack__(),
        x.__dlpack__(max_version=(1, 0)),
        x.__dlpack__(stream=None, dl_device=CPU, copy=True),
    ):
        assert torch.from_dlpack(capsule).tolist() == [0, 1, 2]


def test_numpy_takes_it():
    x = torch.arange(6.0, device="tpu").view(2, 3)
    np.testing.assert_array_equal(np.from_dlpack(x), np.arange(6.0).reshape(2, 3))


def test_it_is_a_snapshot():
    x = torch.zeros(3, device="tpu")
    host = torch.from_dlpack(x)
    x.add_(1)
    assert host.tolist() == [0, 0, 0]
    host.sub_(1)
    assert x.tolist() == [1, 1, 1]
    del x
    assert host.tolist() == [-1, -1, -1]


def test_bits_of_views_are_resolved():
    x = torch.tensor([1 + 2j, 3j])
    torch.testing.assert_close(torch.from_dlpack(x.tpu().conj()), x.conj().resolve_conj())


@pytest.mark.parametrize(
    "source", [lambda: np.arange(4.0, dtype=np.float32), lambda: torch.arange(4.0)], ids=["numpy", "torch"]
)
@pytest.mark.parametrize("device", ["tpu", "tpu:1"])
def test_in(source, device):
    host = source()
    x = torch.from_dlpack(host, device=device)
    host[0] = 9
    assert x.device == torch.empty(0, device=device).device
    assert x.tolist() == [0, 1, 2, 3]
    assert torch.from_dlpack(torch.from_dlpack(source()).__dlpack__()).to(device).tolist() == [0, 1, 2, 3]


def test_device_to_device():
    x = torch.arange(3.0, device="tpu:0")
    y = torch.from_dlpack(x, device="tpu:1")
    assert (y.device.index, y.tolist()) == (1, [0, 1, 2])


def test_a_capsule_of_torch_itself_shares():
    x = torch.arange(6.0, device="tpu:1").view(2, 3)
    y = dlpack.from_dlpack(dlpack.to_dlpack(x))
    assert (y.device, y.data_ptr()) == (x.device, x.data_ptr())
    x.add_(1)
    assert y.tolist() == [[1, 2, 3], [4, 5, 6]]


def test_what_cannot_be_exported():
    x = torch.ones(2, device="tpu")
    with pytest.raises(BufferError, match=r"require gradient, use tensor.detach\(\)"):
        torch.from_dlpack(x.clone().requires_grad_())
    with pytest.raises(BufferError, match="cannot be exported without a copy"):
        torch.from_dlpack(x, copy=False)
    with pytest.raises(BufferError, match="to the CPU only"):
        x.__dlpack__(dl_device=(dlpack.DLDeviceType.kDLCUDA, 0))
    with pytest.raises(ValueError, match="without copying"):
        torch.from_dlpack(torch.ones(2), device="tpu", copy=False)


def test_other_tensors_are_none_of_our_business():
    x = torch.arange(3.0)
    y = torch.from_dlpack(x)
    y[0] = 5
    assert x[0] == 5
    assert x.__dlpack_device__() == CPU
    with pytest.raises(ValueError, match="Unknown device type meta"):
        torch.empty(2, device="meta").__dlpack_device__()


def test_a_subclass_is_asked_first():
    class Loud(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            seen.append(func.__name__)
            return super().__torch_function__(func, types, args, kwargs or {})

    seen: list[str] = []
    x = torch.ones(2, device="tpu").as_subclass(Loud)
    assert x.__dlpack_device__() == CPU
    assert torch.from_dlpack(x).tolist() == [1, 1]
    assert "__dlpack__" in seen
    assert "__dlpack_device__" in seen
