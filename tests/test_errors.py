"""Bad input: each mistake gets an exception of the type that PyTorch users catch, which names the op, the next thing to do
and a code; the process and the other tensors stay usable.

After a fork: test_fork.py. No memory: test_memory.py, test_pinned.py. Gone storages: test_storage.py.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

nn = torch.nn

# Tries each setting in a child that imports torch_tpu afresh, and prints what it warned of and what a use gave.
TRIALS = """
import json, os, sys, warnings
import torch

def outcome(use):
    try:
        return ["ok", str(use())]
    except Exception as e:
        return [[c.__name__ for c in type(e).__mro__], str(e)]

def trial():
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        import torch_tpu
    results = {"warnings": [f"{w.category.__name__}: {w.message}" for w in seen]}
    for name in ("first", "second"):
        results[name] = outcome(lambda: torch.ones(2, device="tpu").tolist())
    results["to"] = outcome(lambda: torch.ones(2).to("tpu"))
    results["available"] = [torch.accelerator.is_available(), torch.backends.tpu.is_available(), hasattr(torch, "tpu")]
    results["cpu"] = (torch.ones(2) + 1).tolist()
    return results

found = {}
for name, env in json.loads(sys.argv[1]).items():
    read, write = os.pipe()
    if os.fork() == 0:
        os.environ.update(env)
        os.write(write, json.dumps(trial()).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        found[name] = json.load(pipe)
print(json.dumps(found))
"""

SETTINGS = {
    "none": {"TORCH_TPU_PLUGIN": "none"},
    "missing": {"TORCH_TPU_PLUGIN": "/no/such/plugin.so"},
    "broken": {"TORCH_TPU_PLUGIN": __file__},
    "word": {"TORCH_TPU_PLUGIN": "gpu"},
    "not installed": {"TORCH_TPU_PLUGIN": "cuda"},
    "devices": {"TORCH_TPU_CPU_DEVICES": "many"},
    "too many devices": {"TORCH_TPU_CPU_DEVICES": "65"},
    "fallback": {"TORCH_TPU_CPU_FALLBACK": "maybe"},
    "programs": {"TORCH_TPU_MAX_PROGRAMS": "-1"},
    "unknown": {"TORCH_TPU_CPU_DEVISES": "2"},
}


@pytest.fixture(scope="module")
def trials(run_program) -> dict:
    return json.loads(run_program(TRIALS, json.dumps(SETTINGS), TORCH_DEVICE_BACKEND_AUTOLOAD="0"))


@pytest.fixture(autouse=True)
def stays_usable():
    """A tensor made before the mistake is as it was, and the device works on."""
    before = torch.arange(3.0, device="tpu")
    yield
    assert (before + 1).tolist() == [1, 2, 3]
    torch.tpu.synchronize()


def message(use: Callable[[], object], kind: type[Exception], code: str) -> str:
    """What ``use`` says when it fails, in the form of docs/errors.md, without the line of the code."""
    with pytest.raises(kind) as e:
        use()
    text, _, tail = str(e.value).rpartition("\n")
    assert tail == f"  (TPU-{code}, see docs/errors.md)"
    return text


# ---- devices


def on(*devices: str) -> list[torch.Tensor]:
    return [torch.ones(2, 2, device=d) for d in devices]


MIXED = {
    "add": ("aten.add.Tensor", ("tpu:0", "tpu:1"), lambda a, b: a + b),
    "add cpu": ("aten.add.Tensor", ("tpu:0", "cpu"), lambda a, b: a + b),
    "cpu add": ("aten.add.Tensor", ("tpu:0", "cpu"), lambda a, b: b + a),
    "in place": ("aten.add_.Tensor", ("tpu:0", "cpu"), lambda a, b: b.add_(a)),
    "mm": ("aten.mm.default", ("tpu:0", "cpu"), torch.mm),
    "linear": ("aten.addmm.default", ("tpu:0", "cpu"), lambda a, b: nn.Linear(2, 2).tpu()(b)),
    "cat": ("aten.cat.default", ("tpu:0", "tpu:1"), lambda a, b: torch.cat([a, b])),
    "where": ("aten.where.self", ("tpu:0", "tpu:1"), lambda a, b: torch.where(a > 0, a, b)),
    "out": ("aten.add.out", ("tpu:0", "cpu"), lambda a, b: torch.add(a, a, out=b)),
    "embedding": ("aten.embedding.default", ("tpu:0", "cpu"), lambda a, b: nn.functional.embedding(b.long(), a)),
}


@pytest.mark.parametrize("case", MIXED)
def test_tensors_on_two_devices(case):
    op, devices, use = MIXED[case]
    text = message(lambda: use(*on(*devices)), RuntimeError, "E201")
    assert text == (
        f"Expected all tensors to be on the same device, but [{op}] got tensors on {devices[0]} and {devices[1]}\n"
        "  Fix: move them to one device with .to()."
    )


def test_an_index_on_another_device():
    a, b = on("tpu:0", "tpu:1")
    message(lambda: a[b.long()].cpu(), RuntimeError, "E201")


def test_numbers_may_come_from_the_cpu():
    x = torch.ones(2, device="tpu")
    assert (x + torch.tensor(2.0)).tolist() == [3, 3]
    assert x[torch.tensor([0])].tolist() == [1]  # as CUDA: indices may, too


@pytest.mark.parametrize(
    "use",
    [
        lambda: torch.empty(2, device="tpu:7"),
        lambda: torch.ones(2, device="tpu:7"),
        lambda: torch.ones(2).to("tpu:7"),
        lambda: torch.ones(2).tpu(7),
        lambda: torch.ones(2, device="tpu").to(7),
        lambda: nn.Linear(2, 2).to("tpu:7"),
        lambda: torch.tpu.set_device(7),
        lambda: torch.accelerator.set_device_index(7),
        lambda: torch.tpu.device(7).__enter__(),
        lambda: torch.Generator("tpu:7"),
        lambda: torch.tpu.get_device_properties(7),
        lambda: torch.tpu.synchronize(7),
        lambda: torch.tpu.memory_stats(7),
    ],
)
def test_a_device_that_is_not_there(use):
    assert message(use, RuntimeError, "E202") == (
        "tpu:7 does not exist: there are 2 devices\n"
        "  Fix: use an index below torch.tpu.device_count(); TORCH_TPU_CPU_DEVICES sets how many the CPU plugin has."
    )
    assert torch.tpu.current_device() == 0


# ---- dtypes


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize(
    ("name", "use"),
    [
        ("ComplexHalf", lambda: torch.empty(2, dtype=torch.complex32, device="tpu")),
        ("ComplexHalf", lambda: torch.zeros(2, dtype=torch.complex64, device="tpu").to(torch.complex32)),
        ("ComplexHalf", lambda: torch.zeros(2, dtype=torch.complex32).to("tpu")),
        ("UInt4", lambda: torch.empty(2, dtype=torch.uint4).to("tpu")),
        ("Bits8", lambda: torch.empty(2, dtype=torch.bits8, device="tpu")),
        ("Float4_e2m1fn_x2", lambda: torch.empty(2, dtype=torch.float4_e2m1fn_x2, device="tpu")),
    ],
)
def test_a_dtype_the_device_cannot_hold(name, use):
    assert message(use, TypeError, "E205") == (
        f'{name} has no StableHLO element type, so "tpu" cannot hold it.\n'
        "  Fix: convert on the CPU first, for example x.to(torch.float32).to('tpu')."
    )


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_a_dtype_that_an_op_would_make():
    text = message(lambda: torch.zeros(2, dtype=torch.complex32, device="tpu"), TypeError, "E103")
    assert text.startswith('torch.complex32 has no StableHLO element type; supported on "tpu": bool, int8')
    assert "\n  Fix: " in text


def quantized() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is deprecated
        return torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)


@pytest.mark.parametrize(
    ("op", "use"),
    [
        ("aten.empty_quantized.default", lambda: quantized().to("tpu")),
        ("aten.empty.memory_format", lambda: torch.empty(2, dtype=torch.qint8, device="tpu")),
        ("aten._copy_from.default", lambda: torch.ones(2, device="tpu").copy_(quantized())),
        (
            "aten.quantize_per_tensor.default",
            lambda: torch.quantize_per_tensor(torch.ones(2, device="tpu"), 0.1, 0, torch.qint8),
        ),
    ],
)
def test_quantized_dtypes(op, use):
    assert message(use, TypeError, "E205") == (
        f'[{op}] quantized dtypes have no StableHLO element type, so "tpu" cannot hold them.\n'
        "  Fix: dequantize on the CPU first: x.dequantize().to('tpu')."
    )


@pytest.mark.parametrize("make", [torch.Tensor.to_sparse_csr, torch.Tensor.to_mkldnn])
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")
def test_other_layouts(make):
    with pytest.raises(NotImplementedError, match="'tpu' backend"):
        make(torch.eye(2, device="tpu"))
    with pytest.raises(NotImplementedError):
        make(torch.eye(2)).to("tpu").to_dense()


# ---- arguments of ops: what the CPU raises


@pytest.mark.parametrize(
    "use",
    [
        lambda x: x + x.new_ones(3),
        lambda x: x @ x.new_ones(3, 3),
        lambda x: x[5],
        lambda x: x.reshape(3),
        lambda x: x.view(torch.float64)[:, 0].view(3),
        lambda x: x.sum(4),
        lambda x: bool(x),
        lambda x: x.item(),
        lambda x: x.expand(3, 3),
        lambda x: torch.mm(x, x.half()),
        lambda x: torch.mm(x.half(), x.bfloat16()),
        lambda x: x.long().requires_grad_(),
        lambda x: torch.empty(-1, device=x.device),
        lambda x: torch.empty(1 << 62, device=x.device),
        lambda x: x.as_strided((4, 4), (4, 1)).sum(),
        lambda x: x.normal_(std=-1),
        lambda x: nn.functional.dropout(x, 1.5),
        lambda x: torch.mm(x > 0, x > 0),
    ],
)
def test_arguments_that_no_device_takes(use):
    with pytest.raises((RuntimeError, ValueError, TypeError, IndexError)) as want:
        use(torch.ones(2, 2))
    with pytest.raises((RuntimeError, ValueError, TypeError, IndexError)) as got:
        use(torch.ones(2, 2, device="tpu"))
    assert got.type in (want.type, *want.type.__mro__[:-2], TypeError)
    assert "INTERNAL ASSERT" not in str(got.value)


def test_a_wrong_device_string():
    for text in ("tpu:x", "tpu:-1", "tpus"):
        with pytest.raises(RuntimeError, match=r"(?i)device"):
            torch.empty(2, device=text)


# ---- settings


def test_turned_off_torch_knows_no_such_device(trials):
    off = trials["none"]
    assert off["warnings"] == []
    assert off["first"][0][0] == "RuntimeError"
    assert "device string: tpu" in off["first"][1]
    assert off["available"] == [False, False, False]
    assert off["cpu"] == [2, 2]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("missing", "TORCH_TPU_PLUGIN=/no/such/plugin.so: no such file.\n  Fix: give the path of a PJRT plugin (.so)."),
        ("not installed", "TORCH_TPU_PLUGIN=cuda: its plugin is not installed.\n  Fix: pip install jax-cuda12-plugin"),
    ],
)
def test_a_plugin_that_is_not_there(trials, name, text):
    text += "\n  (TPU-E301, see docs/errors.md)"
    trial = trials[name]
    assert trial["warnings"] == [f'RuntimeWarning: torch_tpu: the device "tpu" cannot be used: {text}']
    for use in ("first", "second", "to"):
        assert trial[use][0][:3] == ["PluginNotFound", "TpuError", "RuntimeError"]
        assert trial[use][1] == text
    assert trial["available"] == [False, False, True]
    assert trial["cpu"] == [2, 2]


def test_a_file_that_is_no_plugin(trials):
    for use in ("first", "second", "to"):
        kinds, text = trials["broken"][use]
        assert "RuntimeError" in kinds
        assert text.startswith(f"PJRT plugin {__file__} cannot be used: ")
        assert Path(__file__).name in text
        assert text.endswith(
            "\n  Fix: check TORCH_TPU_PLUGIN and the installation of the plugin (xla-cpu-pjrt, libtpu)."
            "\n  (TPU-E301, see docs/errors.md)"
        )
    assert trials["broken"]["cpu"] == [2, 2]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("word", "TORCH_TPU_PLUGIN='gpu': want auto, cpu, tpu, cuda, none or the path of a PJRT plugin (.so)."),
        ("devices", "TORCH_TPU_CPU_DEVICES='many': want a whole number from 1 to 64."),
        ("too many devices", "TORCH_TPU_CPU_DEVICES='65': want a whole number from 1 to 64."),
        ("fallback", "TORCH_TPU_CPU_FALLBACK='maybe': want warn, error or silent."),
        ("programs", "TORCH_TPU_MAX_PROGRAMS='-1': want a whole number of at least 1."),
    ],
)
def test_a_wrong_value_of_a_setting(trials, name, text):
    setting = text.partition("=")[0]
    for use in ("first", "second", "to"):
        kinds, got = trials[name][use]
        assert kinds[0] == "ValueError"
        assert got.startswith(f"{text}\n  {setting}: ")
    assert trials[name]["cpu"] == [2, 2]


def test_a_setting_that_does_not_exist_is_a_warning(trials):
    trial = trials["unknown"]
    (warning,) = trial["warnings"]
    assert warning.startswith("UserWarning: TORCH_TPU_CPU_DEVISES is set, but torch_tpu has no such setting")
    assert "TORCH_TPU_CPU_DEVICES" in warning
    assert trial["first"] == ["ok", "[1.0, 1.0]"]
