"""Storages: addresses, sizes, sharing, copies of objects, and files."""

from __future__ import annotations

import copy
import io
import itertools
import pickle

import pytest
import torch

from torch_tpu.runtime import extension

DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64, torch.uint64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128,
    torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz, torch.float8_e8m0fnu,
]  # fmt: skip


def same(got: torch.Tensor, want: torch.Tensor) -> None:
    assert (got.dtype, got.shape, got.stride()) == (want.dtype, want.shape, want.stride())
    assert got.cpu().contiguous().view(torch.uint8).tolist() == want.contiguous().view(torch.uint8).tolist()


def sample(dtype: torch.dtype) -> torch.Tensor:
    """Every bit pattern of a byte, as many of longer types; for bool 0 and 1."""
    raw = torch.randint(0, 256, (128,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    return (raw % 2).bool() if dtype is torch.bool else raw.view(dtype)


def saved_and_loaded(obj: object, **options: object) -> object:
    file = io.BytesIO()
    torch.save(obj, file, **{k: v for k, v in options.items() if k.startswith("_")})
    file.seek(0)
    return torch.load(file, **{k: v for k, v in options.items() if not k.startswith("_")})


# ---- addresses


def test_addresses_are_unique_among_live_storages_and_zero_when_empty():
    tensors = [torch.empty(n, device=f"tpu:{n % 2}") for n in range(1, 200)]
    spans = sorted((t.data_ptr(), t.data_ptr() + t.nbytes) for t in tensors)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
    assert torch.empty(0, device="tpu").data_ptr() == 0
    assert torch.empty(3, 0, 2, device="tpu").untyped_storage().data_ptr() == 0


def test_addresses_follow_offsets():
    x = torch.arange(24.0, device="tpu").view(4, 6)
    base = x.data_ptr()
    assert base == x.untyped_storage().data_ptr() != 0
    assert x[2].data_ptr() == base + 2 * 6 * 4
    assert x[1:, 3].data_ptr() == base + (6 + 3) * 4
    assert x.t().data_ptr() == x.detach().data_ptr() == base
    assert x[1].untyped_storage().data_ptr() == base
    assert (x + 1).data_ptr() != base


def test_a_write_keeps_the_address():
    x = torch.zeros(4, device="tpu")
    address = x.data_ptr()
    x.add_(1)
    x[1:3] = 5
    x.copy_(torch.ones(4))
    assert x.data_ptr() == address


# ---- sizes


def test_resize_to_zero_and_back_keeps_the_address():
    x = torch.arange(6.0, device="tpu")
    storage, address = x.untyped_storage(), x.data_ptr()
    storage.resize_(0)
    assert (storage.nbytes(), storage.data_ptr(), x.shape) == (0, 0, (6,))
    storage.resize_(24)
    assert storage.data_ptr() == x.data_ptr() == address
    x.copy_(torch.arange(6.0) * 2)  # what FSDP does after it gathered
    assert x.tolist() == [0, 2, 4, 6, 8, 10]


@pytest.mark.parametrize(
    "read", [torch.Tensor.cpu, torch.Tensor.tolist, lambda x: x + 1, lambda x: x.sum().item(), repr]
)
def test_a_tensor_whose_storage_is_gone_cannot_be_read(read):
    x = torch.arange(6.0, device="tpu")
    x.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match=r"(?s)sizes \[6\].*Fix: .*\(TPU-E204, see docs/errors.md\)"):
        read(x)


def test_resize_keeps_what_fits():
    x = torch.arange(6, device="tpu")
    x.resize_(2, 2)
    assert x.tolist() == [[0, 1], [2, 3]]
    x.resize_(8)
    assert x[:6].tolist() == [0, 1, 2, 3, 4, 5]
    x.untyped_storage().resize_(100 * 8)
    assert x[:6].tolist() == [0, 1, 2, 3, 4, 5]
    assert x.untyped_storage().nbytes() == 800


def test_set_():
    x, y = torch.arange(8.0, device="tpu"), torch.empty(0, device="tpu")
    y.set_(x)
    assert y.data_ptr() == x.data_ptr()
    y.set_(x.untyped_storage(), 2, (2, 3), (3, 1))
    same(y, torch.arange(8.0)[2:].view(2, 3))
    y.fill_(-1)
    assert x.tolist() == [0, 1, -1, -1, -1, -1, -1, -1]
    y.set_(x.untyped_storage())
    assert y.shape == (8,)
    y.set_()
    assert (y.numel(), y.data_ptr(), y.device) == (0, 0, x.device)
    with pytest.raises(RuntimeError, match="storage of a tensor on device"):
        x.set_(torch.ones(2))
    with pytest.raises(RuntimeError, match="storage of a tensor on device"):
        x.set_(torch.ones(2, device="tpu:1"))


def test_a_storage_of_its_own():
    storage = torch.UntypedStorage(8, device="tpu:1")
    assert (storage.device, storage.nbytes()) == (torch.device("tpu:1"), 8)
    storage.fill_(0)
    storage[1] = 7
    assert (storage[1], storage.tolist()) == (7, [0, 7, 0, 0, 0, 0, 0, 0])
    assert storage.clone().tolist() == storage.cpu().tolist() == storage.tolist()
    host = torch.UntypedStorage(8).copy_(storage)
    host[0] = 1
    assert storage.copy_(host).tolist() == [1, 7, 0, 0, 0, 0, 0, 0]
    storage.byteswap(torch.int16)
    assert storage.tolist() == [7, 1, 0, 0, 0, 0, 0, 0]
    assert storage.data_ptr() == torch.empty(0, device="tpu:1").set_(storage).data_ptr()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32, torch.float64, torch.complex64], ids=str)
def test_bytes_are_read_as_another_dtype(dtype):
    x = sample(torch.uint8)
    same(x.tpu().view(dtype), x.view(dtype))
    y = x.tpu().view(dtype).view(torch.bfloat16)
    same(y, x.view(torch.bfloat16))


def test_data_moves_between_devices():
    x = torch.ones(2, device="tpu")
    x.data = torch.zeros(3, device="tpu:1")
    assert (x.device, x.tolist()) == (torch.device("tpu:1"), [0, 0, 0])
    x.data = torch.full((1,), 4.0)
    assert (x.device.type, x.tolist()) == ("cpu", [4])


# ---- every dtype


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_survives(dtype):
    x = sample(dtype)
    t = x.to("tpu")
    same(t, x)
    same(t.to("tpu:1"), x)
    copied = copy.deepcopy({"t": t, "half": t[: len(t) // 2]})
    same(copied["half"], x[: len(x) // 2])
    assert copied["t"].data_ptr() == copied["half"].data_ptr() != t.data_ptr()
    for loaded in (saved_and_loaded(t), saved_and_loaded(x, map_location="tpu:0")):
        assert loaded.device == t.device
        same(loaded, x)
    same(saved_and_loaded(t, map_location="cpu"), x)
    assert extension.storage_form(t)[0] in (dtype, torch.uint8)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_pickle(dtype):
    x = sample(dtype).view(2, -1).t()
    try:
        want = pickle.loads(pickle.dumps(x))
    except AttributeError:  # torch itself cannot, on any device: dtypes that are younger than typed storages
        assert dtype in torch.storage._new_dtypes()
        return
    got = pickle.loads(pickle.dumps(x.to("tpu:1")))
    assert got.device == torch.device("tpu:1")
    same(got, want)


# ---- copies of objects


def test_deepcopy_keeps_views_and_ties():
    base = torch.arange(6.0, device="tpu")
    group = copy.deepcopy({"base": base, "view": base[2:].view(2, 2).t(), "again": base})
    assert group["again"] is group["base"]
    group["base"][3] = 9
    same(group["view"], torch.tensor([2.0, 9.0, 4.0, 5.0]).view(2, 2).t())
    assert base.tolist() == [0, 1, 2, 3, 4, 5]
    module = torch.nn.Linear(2, 2).tpu()
    module.tied = module.weight
    clone = copy.deepcopy(module)
    assert clone.tied is clone.weight
    assert clone.weight.data_ptr() != module.weight.data_ptr()
    assert torch.equal(clone.weight, module.weight)


def test_deepcopy_of_views_that_are_no_plain_bits():
    x = torch.tensor([1 + 2j, 3 - 1j])
    for view in (lambda t: t.conj(), lambda t: t.conj().imag, lambda t: t.imag.neg()):
        torch.testing.assert_close(copy.deepcopy(view(x.tpu())).cpu(), copy.deepcopy(view(x)))


# ---- files


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize(
    ("options", "device"),
    [
        ({}, "tpu:1"),
        ({"map_location": "tpu"}, "tpu:0"),
        ({"map_location": "tpu:1"}, "tpu:1"),
        ({"map_location": torch.device("tpu", 0)}, "tpu:0"),
        ({"map_location": {"tpu:1": "tpu:0"}}, "tpu:0"),
        ({"map_location": lambda storage, location: storage.tpu(int(location[-1]))}, "tpu:1"),
        ({"map_location": "cpu"}, "cpu"),
    ],
    ids=["as saved", "tpu", "tpu:1", "device", "dict", "function", "cpu"],
)
def test_load_puts_it_where_it_is_told(zipped, options, device):
    base = torch.arange(6.0)
    moved = base.to("tpu:1")
    loaded = saved_and_loaded({"base": moved, "view": moved[1:4]}, _use_new_zipfile_serialization=zipped, **options)
    assert loaded["base"].device == torch.device(device)
    loaded["base"][2] = 7
    assert loaded["view"].tolist() == [1, 7, 3]


@pytest.mark.parametrize("zipped", [True, False])
def test_a_file_from_the_cpu_goes_to_the_device(zipped):
    x = torch.arange(6.0).view(2, 3)
    loaded = saved_and_loaded(x.t(), map_location="tpu:1", _use_new_zipfile_serialization=zipped)
    same(loaded, x.t())
    assert loaded.device == torch.device("tpu:1")


def test_map_location_follows_the_current_device():
    with torch.tpu.device(1):
        assert saved_and_loaded(torch.ones(2), map_location="tpu").device == torch.device("tpu:1")


def test_mapped_file(tmp_path):
    x = torch.arange(1000.0)
    torch.save({"x": x}, tmp_path / "x.pt")
    same(torch.load(tmp_path / "x.pt", mmap=True, map_location="tpu")["x"], x)


def test_a_file_of_a_device_that_is_not_there():
    file = io.BytesIO()
    torch.save(torch.ones(2, device="tpu:1"), file)
    with pytest.raises(RuntimeError, match="device_count"):
        torch.load(io.BytesIO(file.getvalue().replace(b"tpu:1", b"tpu:7")))


def test_state_dict_and_optimizer_go_through_a_file():
    torch.manual_seed(1)
    module = torch.nn.Linear(3, 2).tpu()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    module(torch.ones(1, 3, device="tpu")).sum().backward()
    optimizer.step()
    state = saved_and_loaded({"module": module.state_dict(), "optimizer": optimizer.state_dict()}, map_location="cpu")
    other = torch.nn.Linear(3, 2).to("tpu:1")
    resumed = torch.optim.AdamW(other.parameters(), lr=0.5)
    other.load_state_dict(state["module"])
    resumed.load_state_dict(state["optimizer"])
    assert resumed.param_groups[0]["lr"] == 0.1
    for p, q in zip(module.parameters(), other.parameters(), strict=True):
        assert torch.equal(p.cpu(), q.cpu())
        assert resumed.state[q]["exp_avg"].device == q.device
        assert torch.equal(resumed.state[q]["exp_avg"].cpu(), optimizer.state[p]["exp_avg"].cpu())


def test_parameters_keep_what_they_are():
    p = torch.nn.Parameter(torch.ones(2, device="tpu:1"), requires_grad=False)
    for other in (copy.deepcopy(p), pickle.loads(pickle.dumps(p)), saved_and_loaded(p)):
        assert isinstance(other, torch.nn.Parameter)
        assert (other.device, other.requires_grad, other.tolist()) == (p.device, False, [1, 1])


def test_nothing_is_shared_through_host_memory():
    x = torch.ones(2, device="tpu")
    assert x.share_memory_() is x  # as CUDA: nothing to do
    assert x.is_shared()
    with pytest.raises(TypeError, match=r"can't convert tpu:0 device type tensor to numpy. Use Tensor.cpu\(\)"):
        x.numpy()
