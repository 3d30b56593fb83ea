"""The device as PyTorch's generic code sees it: presence, memory, streams, random state, storages, files, autograd."""

from __future__ import annotations

import copy
import io
import os
import pickle
import subprocess
import sys

import pytest
import torch
from torch.utils.checkpoint import checkpoint

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]


def data(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    x = torch.rand(shape, generator=g) * 8
    return x.to(dtype)


def run_python(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **env}, check=False
    )


# ---- presence


def test_accelerator_is_the_device():
    assert torch.accelerator.current_accelerator() == torch.device("tpu")
    assert torch.accelerator.is_available()
    assert torch.accelerator.device_count() == torch.tpu.device_count() == 2
    assert torch.get_device_module("tpu") is torch.tpu


def test_generated_methods():
    x = torch.ones(3)
    assert not x.is_tpu
    assert x.tpu().is_tpu
    assert torch.nn.Linear(2, 2).tpu().weight.device == torch.device("tpu:0")


def test_second_device_is_another_one():
    a, b = torch.ones(3, device="tpu:0"), torch.ones(3, device="tpu:1")
    b.add_(1)
    assert a.tolist() == [1, 1, 1]
    assert b.tolist() == [2, 2, 2]
    assert a.to("tpu:1").add(b).device == torch.device("tpu:1")


def test_current_device_is_per_block():
    with torch.tpu.device(1):
        assert torch.tpu.current_device() == 1
        assert torch.ones(1, device="tpu").device.index == 1
    assert torch.tpu.current_device() == 0


def test_import_touches_no_hardware():
    out = run_python("import torch; torch.tpu.is_available(); print(torch.tpu.is_initialized())")
    assert out.stdout.strip() == "False", out.stderr


# ---- memory


def test_statistics_follow_the_buffers():
    before = torch.accelerator.memory_allocated()
    x = torch.ones(1000, device="tpu")
    assert torch.accelerator.memory_allocated() == before + 4000
    torch.accelerator.reset_peak_memory_stats()
    y = x + x
    del y
    assert torch.accelerator.memory_allocated() == before + 4000
    assert torch.accelerator.max_memory_allocated() == before + 8000
    free, total = torch.tpu.mem_get_info()
    assert 0 < free <= total
    assert torch.tpu.memory_stats()["allocated_bytes.all.current"] == before + 4000
    del x
    assert torch.accelerator.memory_allocated() == before


def test_pinned_memory_is_plain_and_known():
    x = torch.arange(5).pin_memory()
    assert x.is_pinned()
    assert not torch.arange(5).is_pinned()
    assert x.to("tpu", non_blocking=True).tolist() == [0, 1, 2, 3, 4]
    assert torch.empty(3, pin_memory=True).is_pinned()


# ---- streams and events


def test_streams_are_real_names():
    s = torch.Stream(device="tpu")
    with s:
        assert torch.accelerator.current_stream() == s
        x = torch.ones(3, device="tpu") * 2
    s.synchronize()
    assert torch.accelerator.current_stream() == torch.tpu.default_stream()
    assert s.query()
    assert x.tolist() == [2, 2, 2]
    with torch.tpu.stream(torch.tpu.Stream()):
        assert torch.tpu.current_stream() != torch.tpu.default_stream()


def test_events_mark_the_work():
    first, second = (torch.Event(device="tpu", enable_timing=True) for _ in range(2))
    x = torch.ones(300, 300, device="tpu")
    first.record()
    for _ in range(3):
        x = x @ x / 300
    second.record()
    second.synchronize()
    assert first.query()
    assert second.query()
    assert first.elapsed_time(second) >= 0
    torch.tpu.current_stream().wait_event(second)
    torch.accelerator.synchronize()


# ---- random numbers


def test_seed_gives_the_same_numbers():
    torch.manual_seed(7)
    a = torch.rand(5, device="tpu"), torch.randn(5, device="tpu")
    torch.manual_seed(7)
    b = torch.rand(5, device="tpu"), torch.randn(5, device="tpu")
    assert torch.equal(a[0], b[0])
    assert torch.equal(a[1], b[1])
    assert not torch.equal(a[0], torch.rand(5, device="tpu"))


def test_state_is_16_bytes_and_restores():
    state = torch.tpu.get_rng_state()
    assert state.dtype == torch.uint8
    assert state.shape == (16,)
    a = torch.rand(6, device="tpu")
    torch.tpu.set_rng_state(state)
    assert torch.equal(a, torch.rand(6, device="tpu"))
    with torch.random.fork_rng(devices=[0], device_type="tpu"):
        torch.rand(6, device="tpu")
    assert len(torch.tpu.get_rng_state_all()) == 2


def test_generator_of_the_device():
    g = torch.Generator(device="tpu").manual_seed(3)
    a = torch.rand(4, device="tpu", generator=g)
    assert torch.equal(a, torch.rand(4, device="tpu", generator=torch.Generator(device="tpu").manual_seed(3)))
    with pytest.raises(RuntimeError, match=r"Expected a 'tpu' device type for generator but found 'cpu'"):
        torch.rand(4, device="tpu", generator=torch.Generator())


# ---- storages, copies, files


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_survives_copies_and_files(dtype):
    x = data(3, 4, dtype=dtype)
    t = x.to("tpu")
    same = [t.cpu(), copy.deepcopy(t).cpu(), t.clone().cpu()]
    if dtype.itemsize > 1 or not dtype.is_floating_point:  # torch cannot pickle float8 tensors of the CPU either
        same.append(pickle.loads(pickle.dumps(t)).cpu())
    file = io.BytesIO()
    torch.save(t, file)
    for where in ("tpu", "cpu", "tpu:1"):
        file.seek(0)
        loaded = torch.load(file, map_location=where)
        assert loaded.device.type == where.partition(":")[0]
        same.append(loaded.cpu())
    for y in same:
        assert y.dtype == dtype
        assert torch.equal(y.view(torch.uint8), x.view(torch.uint8))


def test_addresses_are_unique_and_consistent():
    x = torch.zeros(4, 4, device="tpu")
    assert x[1].data_ptr() == x.data_ptr() + 16
    assert x.untyped_storage().data_ptr() == x.data_ptr()
    assert torch.zeros(4, 4, device="tpu").data_ptr() != x.data_ptr()
    assert torch.empty(0, device="tpu").data_ptr() == 0


def test_storage_resize_keeps_the_address():
    x = torch.ones(8, device="tpu")
    address = x.data_ptr()
    x.untyped_storage().resize_(0)
    assert x.untyped_storage().nbytes() == 0
    x.untyped_storage().resize_(32)
    assert x.data_ptr() == address
    x.fill_(3)
    assert x.tolist() == [3] * 8


def test_resize_keeps_contents():
    x = torch.arange(4.0).to("tpu")
    x.resize_(2, 3)
    assert x.view(-1)[:4].tolist() == [0, 1, 2, 3]


def test_sizes_that_depend_on_data():
    x = torch.tensor([[0, 1], [2, 0]])
    t = x.to("tpu")
    assert t.nonzero().tolist() == x.nonzero().tolist()
    assert t[t > 0].tolist() == [1, 2]
    assert t.unique().tolist() == [0, 1, 2]
    repeats = torch.tensor([2, 3])
    assert t.repeat_interleave(repeats.to("tpu"), dim=0).tolist() == x.repeat_interleave(repeats, dim=0).tolist()
    t[t == 0] = 9
    assert t.tolist() == [[9, 1], [2, 9]]


# ---- modules


def test_assertions_raise():
    torch._assert_async(torch.ones(1, device="tpu"))
    torch._assert_async(torch.tensor(True, device="tpu"), "never")
    with pytest.raises(RuntimeError, match="Expected Tensor with single nonzero value"):
        torch._assert_async(torch.zeros((), device="tpu"))
    with pytest.raises(RuntimeError, match="too late"):
        torch._assert_async(torch.tensor(False, device="tpu"), "too late")


def test_ties_and_optimizers_survive_module_to():
    model = torch.nn.Sequential(torch.nn.Linear(3, 3, bias=False), torch.nn.Linear(3, 3, bias=False))
    model[1].weight = model[0].weight
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model.to("tpu")
    assert model[1].weight is model[0].weight
    model(torch.ones(1, 3, device="tpu")).sum().backward()
    before = model[0].weight.detach().clone()
    optimizer.step()
    assert not torch.equal(model[0].weight, before)


def test_batch_norm_statistics():
    cpu = torch.nn.BatchNorm1d(4)
    tpu = copy.deepcopy(cpu).to("tpu")
    x = data(6, 4)
    for _ in range(3):
        torch.testing.assert_close(tpu(x.to("tpu")).cpu(), cpu(x), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(tpu.running_mean.cpu(), cpu.running_mean, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(tpu.running_var.cpu(), cpu.running_var, rtol=1e-5, atol=1e-6)
    assert tpu.num_batches_tracked.item() == 3
    cpu.eval()
    tpu.eval()
    torch.testing.assert_close(tpu(x.to("tpu")).cpu(), cpu(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "RMSprop", "Adagrad"])
def test_training_equals_the_cpu(name):
    def train(device: str) -> list[float]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2)).to(device)
        optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.05)
        x, y = data(5, 6).to(device), data(5, 2, seed=1).to(device)
        losses = []
        for _ in range(5):
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    # Five float32 steps: sums are taken in another order.
    assert train("tpu") == pytest.approx(train("cpu"), rel=1e-4)


def test_double_backward_hooks_and_checkpoint():
    x = data(4).to("tpu").requires_grad_()
    seen = []
    y = (x**3).sum()
    (g,) = torch.autograd.grad(y, x, create_graph=True)
    g.register_hook(lambda grad: seen.append(grad.device.type))
    g.sum().backward()
    torch.testing.assert_close(x.grad.cpu(), 6 * x.detach().cpu())
    assert seen == ["tpu"]
    x.grad = None
    checkpoint(lambda v: torch.nn.functional.dropout(v, 0.5).sum(), x, use_reentrant=False).backward()
    assert x.grad is not None


def test_autocast_defaults_to_bfloat16():
    a = torch.ones(2, 2, device="tpu")
    with torch.autocast("tpu"):
        assert (a @ a).dtype == torch.bfloat16
        assert torch.softmax(a, 0).dtype == torch.float32
        with torch.autocast("tpu", enabled=False):
            assert (a @ a).dtype == torch.float32
    assert (a @ a).dtype == torch.float32


def test_dlpack_is_a_snapshot():
    x = torch.arange(4.0).to("tpu")
    y = torch.from_dlpack(x)
    assert y.device.type == "cpu"
    x.add_(1)
    assert y.tolist() == [0, 1, 2, 3]


def test_data_loader_with_pinned_memory():
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.arange(8)), batch_size=4, pin_memory=True)
    assert [b.to("tpu").sum().item() for (b,) in loader] == [6, 22]


# ---- errors: the type users catch, the op, the fix, the code; and everything stays usable


def test_tensors_on_two_devices():
    a = torch.ones(2, device="tpu")
    with pytest.raises(RuntimeError, match=r"(?s)same device, but \[aten\.add\.Tensor\] got .*Fix: .*TPU-E201"):
        a + torch.ones(2)
    with pytest.raises(RuntimeError, match=r"(?s)tpu:0 and tpu:1.*TPU-E201"):
        a + torch.ones(2, device="tpu:1")
    assert (a + 1).tolist() == [2, 2]


def test_device_that_does_not_exist():
    with pytest.raises(RuntimeError, match=r"(?s)tpu:7 does not exist: there are 2 devices.*Fix: .*TPU-E202"):
        torch.ones(2, device="tpu:7")


def test_unsupported_dtype():
    with pytest.raises(TypeError, match=r"(?s)ComplexHalf has no StableHLO element type.*Fix: .*TPU-E205"):
        torch.empty(2, dtype=torch.complex32, device="tpu")


def test_shape_errors_are_atens():
    a, b = torch.ones(2, 3, device="tpu"), torch.ones(4, 5, device="tpu")
    with pytest.raises(RuntimeError, match=r"must match|broadcast"):
        a + b
    with pytest.raises(RuntimeError, match=r"output with shape"):
        torch.ones(3, device="tpu").add_(a)
    with pytest.raises(RuntimeError, match=r"Integers to negative integer powers"):
        torch.ones(2, dtype=torch.int64, device="tpu") ** -1
    with pytest.raises(RuntimeError, match=r"bernoulli_? expects p to be in \[0, 1\]"):
        a.bernoulli_(1.5)


def test_plugin_none_means_no_device():
    out = run_python(
        "import torch; print(hasattr(torch, 'tpu'), torch.accelerator.is_available())", TORCH_TPU_PLUGIN="none"
    )
    assert out.stdout.split() == ["False", "False"], out.stderr


def test_missing_plugin_is_one_warning():
    code = "import warnings; warnings.simplefilter('error', DeprecationWarning); import torch; print(torch.ones(1) + 1)"
    out = run_python(code, TORCH_TPU_PLUGIN="/nowhere/plugin.so")
    assert "tensor([2.])" in out.stdout
    assert "no such file" in out.stderr
    assert "TPU-E301" in out.stderr


def test_use_after_fork_is_an_error():
    code = """
import os, torch
torch.ones(2, device="tpu")
pid = os.fork()
if pid == 0:
    try:
        torch.ones(2, device="tpu")
    except RuntimeError as e:
        os._exit(0 if "TPU-E303" in str(e) else 2)
    os._exit(3)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), (torch.ones(2, device="tpu") + 1).tolist())
"""
    out = run_python(code)
    assert out.stdout.strip() == "0 [2.0, 2.0]", out.stderr


def test_fallback_to_the_cpu_warns_once_and_can_be_an_error():
    code = """
import torch, warnings
x, c = torch.ones(3, 2), torch.ones(4, 3)
op = torch._compute_linear_combination
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    a = op(x.to("tpu"), c.to("tpu"))
    op(x.to("tpu"), c.to("tpu"))
name = "aten._compute_linear_combination.default"
print(a.device, torch.equal(a.cpu(), op(x, c)), sum(name in str(w.message) for w in seen))
"""
    out = run_python(code, TORCH_TPU_CPU_FALLBACK="warn")
    assert out.stdout.strip() == "tpu:0 True 1", out.stderr
    with pytest.raises(
        NotImplementedError, match=r"(?s)\[aten\._compute_linear_combination\.default\] no lowering rule.*TPU-E101"
    ):
        torch._compute_linear_combination(torch.ones(3, 2).to("tpu"), torch.ones(4, 3).to("tpu"))
