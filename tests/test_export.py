"""torch_tpu.export: models as files, and the files as programs."""

from __future__ import annotations

import copy
import json
import shutil
import zipfile
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.attention.flex_attention import flex_attention

from torch_tpu import errors, export
from torch_tpu._internal import export as internal
from torch_tpu.runtime import extension, modes

TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}

# Of torch's own code, on the way through export.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


def on_device(tree):
    return torch.utils._pytree.tree_map_only(torch.Tensor, lambda t: t.to("tpu"), tree)


def on_cpu(tree):
    return torch.utils._pytree.tree_map_only(torch.Tensor, lambda t: t.detach().cpu(), tree)


def saved(module, path: Path, *args, **kwargs) -> export.Program:
    export.save(module, path, args, kwargs)
    return export.load(path)


def same(module, path: Path, *args, **kwargs) -> export.Program:
    """The saved program gives what the module gives on the CPU."""
    with torch.no_grad():
        twin = copy.deepcopy(module)
        program = saved(module, path, *args, **kwargs)
        want = twin(*args, **kwargs)
        got = program(*on_device(args), **on_device(kwargs))
    torch.testing.assert_close(on_cpu(got), want, **TOLERANCE)
    return program


class Block(nn.Module):
    """A small transformer block."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 16)
        self.norm = nn.LayerNorm(16)
        self.qkv = nn.Linear(16, 48)
        self.out = nn.Linear(16, 11, bias=False)
        self.out.weight = self.embed.weight  # tied

    def forward(self, tokens, *, mask=None, scale: float = 1.0):
        x = self.embed(tokens)
        q, k, v = (t.unflatten(-1, (2, 8)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        y = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + y.transpose(1, 2).flatten(2) * scale
        return {"logits": self.out(x), "hidden": (x, None), "count": 3}


class Counter(nn.Module):
    """Updates a buffer, one that is not in the state_dict, and an input."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(3))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64), persistent=False)

    def forward(self, x, out):
        self.total += x.sum(0)
        self.calls += 1
        out.mul_(2)
        return self.total * 2, x


def linear() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2))


# ---- models


def test_mlp(tmp_path) -> None:
    program = same(linear(), tmp_path / "mlp", torch.randn(3, 4))
    assert sorted(p.name for p in (tmp_path / "mlp").iterdir()) == [
        "manifest.json",
        "program.mlir",
        "weights.safetensors",
    ]
    assert set(program.weights) == {"0.weight", "0.bias", "2.weight", "2.bias"}


def test_no_host_kernels(tmp_path) -> None:
    export.save(nn.Linear(256, 256), tmp_path / "p", (torch.randn(256, 256),))
    assert "custom_call" not in (tmp_path / "p" / "program.mlir").read_text()


def test_convolution_and_batch_norm(tmp_path) -> None:
    module = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2)).eval()
    x = torch.randn(2, 3, 8, 8)
    program = same(module, tmp_path / "conv", x)
    torch.testing.assert_close(program(x.to("tpu")).cpu(), module(x).detach(), **TOLERANCE)


def test_batch_norm_training_updates_statistics(tmp_path) -> None:
    module = nn.BatchNorm1d(3)
    program = saved(module, tmp_path / "bn", torch.randn(5, 3))
    for _ in range(3):
        x = torch.randn(5, 3)
        with torch.no_grad():
            torch.testing.assert_close(program(x.to("tpu")).cpu(), module(x), **TOLERANCE)
    for name, buffer in module.named_buffers():
        torch.testing.assert_close(program.weights[name].cpu(), buffer, **TOLERANCE)


def test_transformer_block(tmp_path) -> None:
    mask = torch.ones(5, 5, dtype=torch.bool).tril()
    program = same(Block(), tmp_path / "block", torch.randint(0, 11, (2, 5)), mask=mask, scale=0.5)
    assert "out.weight" not in program.weights  # tied: once


@pytest.mark.parametrize("mask", ["none", "causal", "bool", "float", "grouped"])
def test_attention(tmp_path, mask) -> None:
    """Traced on the CPU, whose kernel gives a result of other strides; the view behind it must not mind."""

    class Attention(nn.Module):
        def forward(self, q, k, v, m=None):
            y = nn.functional.scaled_dot_product_attention(
                q, k, v, attn_mask=m, is_causal=mask == "causal", enable_gqa=mask == "grouped"
            )
            return y.transpose(1, 2).reshape(2, 16, -1).contiguous().view(32, -1)

    heads = 2 if mask == "grouped" else 4
    q, k, v = torch.randn(2, 4, 16, 8), torch.randn(2, heads, 16, 8), torch.randn(2, heads, 16, 8)
    masks = {"bool": torch.rand(16, 16).tril() > 0.1, "float": torch.randn(2, 4, 16, 16)}
    masks["bool"].fill_diagonal_(True)
    same(Attention(), tmp_path / "attention", q, k, v, *[masks[mask]] if mask in masks else [])


def test_mutated_buffers_and_inputs(tmp_path) -> None:
    module = Counter()
    program = saved(copy.deepcopy(module), tmp_path / "counter", torch.randn(2, 3), torch.randn(4))
    out = torch.randn(4)
    device_out = out.to("tpu")
    version = device_out._version
    for _ in range(3):
        x = torch.randn(2, 3)
        device_x = x.to("tpu")
        got = program(device_x, device_out)
        torch.testing.assert_close(on_cpu(got), module(x, out))
        assert got[1] is device_x
    torch.testing.assert_close(device_out.cpu(), out)
    assert device_out._version > version
    torch.testing.assert_close(program.weights["total"].cpu(), module.total)
    assert program.weights["calls"].item() == 3


def test_views_as_inputs(tmp_path) -> None:
    program = saved(Counter(), tmp_path / "counter", torch.randn(2, 3), torch.randn(4))
    base, out = torch.randn(3, 2), torch.randn(8)
    device_out = out.to("tpu")
    got = program(base.to("tpu").t(), device_out[::2])
    torch.testing.assert_close(on_cpu(got), Counter()(base.t(), out[::2]))
    torch.testing.assert_close(device_out.cpu(), out)


def test_dtypes_of_weights(tmp_path) -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for dtype in (torch.float64, torch.bfloat16, torch.complex64, torch.complex128, torch.bool, torch.uint16):
                self.register_buffer(f"b_{str(dtype).removeprefix('torch.')}", torch.randn(2, 3).to(dtype))

        def forward(self, x):
            return [b.reshape(-1) for b in self.buffers()], x + self.b_float64

    same(Mixed(), tmp_path / "mixed", torch.randn(3))


@pytest.mark.parametrize(
    ("module", "args"),
    [
        (nn.Bilinear(3, 4, 5), (torch.randn(2, 3), torch.randn(2, 4))),
        (nn.CircularPad2d(1), (torch.randn(1, 2, 4, 4),)),
        (nn.HingeEmbeddingLoss(), (torch.randn(4, 3), torch.randn(4, 3).sign())),
        (nn.LSTM(3, 4, 2), (torch.randn(5, 2, 3),)),
        (nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval(), (torch.randn(2, 5, 8),)),
        (nn.Upsample(scale_factor=2, mode="bilinear"), (torch.randn(1, 2, 3, 3),)),
    ],
    ids=lambda x: type(x).__name__ if isinstance(x, nn.Module) else "",
)
@pytest.mark.filterwarnings("ignore:The tensor attributes")  # torch's, about its own LSTM
def test_modules(tmp_path, module, args) -> None:
    same(module, tmp_path / "module", *args)


class Branch(nn.Module):
    """A branch with a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x):
        return torch.cond(x.sum() > 0, lambda x: self.linear(x).sin(), lambda x: x.cos(), (x * 2,)) * 3


class Loop(nn.Module):
    """Runs five times."""

    def forward(self, x):
        return torch.while_loop(lambda i, x: i < 5, lambda i, x: (i + 1, x * 1.1), (torch.tensor(0), x))


class Flex(nn.Module):
    """flex_attention with a score of its own."""

    def forward(self, q, k, v):
        return flex_attention(q, k, v, score_mod=lambda score, b, h, i, j: torch.where(i >= j, score, -1e9))


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_higher_order_ops(tmp_path) -> None:
    for sign in (1, -1):
        same(Branch(), tmp_path / "branch", torch.full((2, 3), float(sign)))
    same(Loop(), tmp_path / "loop", torch.randn(3))
    same(Flex(), tmp_path / "flex", *[torch.randn(1, 2, 16, 8) for _ in range(3)])


def test_random_factories(tmp_path) -> None:
    class Noise(nn.Module):
        def forward(self, x):
            return x + torch.rand(3, device=x.device) + torch.randn_like(x)

    module, x = Noise(), torch.zeros(3, device="tpu")
    program = saved(module, tmp_path / "noise", torch.zeros(3))
    found = []
    for call in (program, module):
        torch.tpu.manual_seed(5)
        found.append(call(x).cpu())
    torch.testing.assert_close(*found)


def test_strides_of_results(tmp_path) -> None:
    class Turn(nn.Module):
        def forward(self, x):
            return x.permute(2, 0, 1).exp()

    x = torch.randn(2, 3, 4)
    got = same(Turn(), tmp_path / "turn", x)(x.to("tpu"))
    assert got.stride() == x.permute(2, 0, 1).exp().stride()


def test_random_numbers_follow_the_generator(tmp_path) -> None:
    program = saved(nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.5)).train(), tmp_path / "drop", torch.ones(64))
    module = nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.5)).train()
    x = torch.ones(64, device="tpu")
    found = []
    for call in (program, module):
        torch.tpu.manual_seed(5)
        found.append([call(x).cpu() for _ in range(2)] + [torch.tpu.default_generators[0].get_offset()])
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])
    assert found[0][2] == found[1][2]


def test_model_on_the_device(tmp_path) -> None:
    module = linear().to("tpu")
    x = torch.randn(3, 4, device="tpu")
    program = saved(module, tmp_path / "p", x)
    torch.testing.assert_close(program(x).cpu(), module(x).detach().cpu(), **TOLERANCE)


def test_autocast_and_no_grad_inside(tmp_path) -> None:
    class Regions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            with torch.no_grad():
                y = x.sin()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                z = self.linear(y)
            return z.float() + torch.tensor([1.0, 2.0, 3.0, 4.0])

    program = saved(Regions(), tmp_path / "p", torch.randn(3, 4))
    assert "bf16" in program.text


def test_fused_mode(tmp_path) -> None:
    first, second = linear(), nn.Linear(2, 4)
    x = torch.randn(3, 4)
    a, b = saved(first, tmp_path / "a", x), saved(second, tmp_path / "b", torch.randn(3, 2))
    with modes.set_eager_mode(modes.EagerMode.FUSED), torch.no_grad():
        got = a(b(a(x.to("tpu")) + 1)).cpu()
    torch.testing.assert_close(got, first(second(first(x) + 1)).detach(), **TOLERANCE)


def test_one_compile(tmp_path) -> None:
    program = saved(linear(), tmp_path / "p", torch.randn(3, 4))
    x = torch.randn(3, 4, device="tpu")
    program(x)
    before = extension.cache_stats()["misses"]
    program(x)
    assert extension.cache_stats()["misses"] == before


def test_second_device(tmp_path) -> None:
    module = linear()
    export.save(module, tmp_path / "p", (torch.randn(3, 4),))
    x = torch.randn(3, 4)
    got = export.load(tmp_path / "p", "tpu:1")(x.to("tpu:1"))
    assert got.device == torch.device("tpu:1")
    torch.testing.assert_close(got.cpu(), module(x).detach(), **TOLERANCE)


# ---- files


def test_another_process_without_the_model(tmp_path, run_program) -> None:
    module = Block()
    tokens = torch.randint(0, 11, (2, 5))
    for name in ("p", "p.zip"):
        export.save(torch.export.export(module, (tokens,)), tmp_path / name)
    torch.save({"tokens": tokens, "want": module(tokens)["logits"].detach()}, tmp_path / "data.pt")
    run_program(
        "import sys, torch\n"
        "from torch_tpu import export\n"
        "folder = sys.argv[1]\n"
        "data = torch.load(f'{folder}/data.pt')\n"
        "for name in ('p', 'p.zip'):\n"
        "    got = export.load(f'{folder}/{name}')(data['tokens'].to('tpu'))\n"
        "    torch.testing.assert_close(got['logits'].cpu(), data['want'], rtol=1e-4, atol=1e-5)\n"
        "    assert got['hidden'][1] is None and got['count'] == 3\n"
        "assert not {m for m in sys.modules if m.split('.')[0] in ('jax', 'jaxlib')}\n",
        str(tmp_path),
    )


def test_portable_artifact(tmp_path) -> None:
    stablehlo = pytest.importorskip("jaxlib.mlir.dialects.stablehlo")
    from jaxlib.mlir import ir

    export.save(linear(), tmp_path / "p", (torch.randn(3, 4),), portable=True)
    data = (tmp_path / "p" / "program.mlir.bc").read_bytes()
    assert export.load(tmp_path / "p").manifest.stablehlo == "1.7.0"
    with ir.Context() as context:
        stablehlo.register_dialect(context)
        read = str(stablehlo.deserialize_portable_artifact(context, data))
    assert "func.func public @main" in read
    assert "stablehlo.dot_general" in read


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of ATen, about some of the cases
def test_every_rule_fits_into_the_artifact() -> None:
    pytest.importorskip("jaxlib")
    from torch_tpu.testing import portability

    for case in portability.rule_cases():
        assert export.portable_artifact(portability.stablehlo(case)), case.name


def test_ops_that_the_artifact_version_lacks() -> None:
    pytest.importorskip("jaxlib")
    text = (
        "module { func.func @main(%a: tensor<f32>) -> tensor<f32> {\n"
        '%0 = "chlo.erf"(%a) : (tensor<f32>) -> tensor<f32>\n'
        "return %0 : tensor<f32> } }"
    )
    with pytest.raises(errors.ExportUnsupported, match=r"(?s)StableHLO 1.7.0.*without portable=True"):
        export.portable_artifact(text)


def test_internal_names() -> None:
    pytest.importorskip("jaxlib")
    x = torch.randn(3, 4)
    mlir = internal.exported_to_mlir(torch.export.export(linear(), (x,)))
    assert mlir.serialize_text() == internal.fx_to_mlir(linear(), (x,)).serialize_text()
    assert mlir.serialize_bytecode().startswith(b"ML\xefR")
    assert b"StableHLO_v1.7.0" in mlir.serialize_portable_artifact()


def test_saving_twice_replaces(tmp_path) -> None:
    x = torch.randn(3, 4)
    export.save(linear(), tmp_path / "p", (x,))
    same(linear(), tmp_path / "p", x)


def test_other_files_are_not_touched(tmp_path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="other files"):
        export.save(linear(), tmp_path, (torch.randn(3, 4),))
    assert (tmp_path / "notes.txt").read_text() == "mine"


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("export") / "good"
    export.save(linear(), path, (torch.ones(3, 4),))
    return path


@pytest.fixture
def copied(good, tmp_path) -> Path:
    return Path(shutil.copytree(good, tmp_path / "copy"))


def edit(path: Path, **changes) -> None:
    fields = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps(fields | changes))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda p: (p / "manifest.json").unlink(), "not a whole saved program: 'manifest.json'"),
        (lambda p: (p / "program.mlir").unlink(), "program.mlir"),
        (lambda p: (p / "weights.safetensors").unlink(), "weights.safetensors"),
        (lambda p: (p / "weights.safetensors").write_bytes(b"short"), "weights.safetensors is damaged"),
        (lambda p: (p / "program.mlir").write_text("module {}"), "damaged or was changed"),
        (lambda p: (p / "manifest.json").write_text("{"), "not the manifest of a saved program"),
        (lambda p: edit(p, format=2), "format 2; this version of torch_tpu reads formats up to 1"),
        (lambda p: edit(p, inputs=[{"name": "x", "dtype": "float3", "shape": [1]}]), "no tensor type 'float3'"),
        (lambda p: edit(p, results=[{"output": 7}]), "index 7 of"),
        (lambda p: edit(p, in_spec="[7, {}]"), "cannot be read"),
        (
            lambda p: edit(p, out_spec='[1, {"type": "a.B", "context": "null", "children_spec": []}]'),
            "a.B in pytree is not registered",
        ),
    ],
)
def test_damaged_files(copied, damage, message) -> None:
    damage(copied)
    with pytest.raises(errors.ProgramFileInvalid, match=r"(?s)" + message + ".*TPU-E112"):
        export.load(copied)


def test_weights_of_another_model(copied, tmp_path) -> None:
    export.save(nn.Linear(4, 2), tmp_path / "other", (torch.randn(3, 4),))
    shutil.copy(tmp_path / "other" / "weights.safetensors", copied)
    with pytest.raises(errors.ProgramFileInvalid, match=r"lacks '0.bias', '0.weight'"):
        export.load(copied)


def test_weights_of_other_sizes(copied, tmp_path) -> None:
    other = nn.Sequential(nn.Linear(5, 8), nn.GELU(), nn.Linear(8, 2))
    export.save(other, tmp_path / "other", (torch.randn(3, 5),))
    shutil.copy(tmp_path / "other" / "weights.safetensors", copied)
    with pytest.raises(errors.ProgramFileInvalid, match=r"'0.weight'.*f32\[8,4\].*\[8, 5\]"):
        export.load(copied)


def test_not_a_program(tmp_path) -> None:
    with pytest.raises(FileNotFoundError):
        export.load(tmp_path / "nothing")
    (tmp_path / "file.zip").write_bytes(b"nothing")
    with pytest.raises(errors.ProgramFileInvalid, match="no .zip file"):
        export.load(tmp_path / "file.zip")
    with zipfile.ZipFile(tmp_path / "empty.zip", "w"):
        pass
    with pytest.raises(errors.ProgramFileInvalid, match="not a whole saved program"):
        export.load(tmp_path / "empty.zip")


def test_missing_packages(tmp_path, monkeypatch) -> None:
    for package, portable in (("safetensors.torch", False), ("jaxlib.mlir", True)):
        with monkeypatch.context() as patch:
            patch.setitem(__import__("sys").modules, package, None)
            with pytest.raises(errors.ExtraMissing, match=r"(?s)torch_tpu\[export\].*TPU-E305"):
                export.save(linear(), tmp_path / "p", (torch.randn(3, 4),), portable=portable)


# ---- calls


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        ((), {}, "takes 1 positional"),
        ((torch.ones(3, 4), torch.ones(1)), {}, "got 2"),
        ((torch.ones(3, 4),), {"mask": None}, "'mask'"),
        ((torch.ones(3, 5),), {}, r"f32\[3,4\] on tpu; got torch.float32\[3, 5\]"),
        ((torch.ones(3, 4, dtype=torch.float64),), {}, r"got torch.float64\[3, 4\]"),
        ((1.5,), {}, "got a float"),
        (([torch.ones(3, 4)],), {}, "got a list"),
        ((torch.ones(3, 4, requires_grad=True),), {}, "requires grad"),
    ],
)
def test_wrong_inputs(good, args, kwargs, message) -> None:
    with pytest.raises(errors.InputMismatch, match=r"(?s)" + message + ".*TPU-E211"):
        export.load(good)(*on_device(args), **kwargs)


def test_wrong_device(good) -> None:
    with pytest.raises(errors.InputMismatch, match="one on cpu"):
        export.load(good)(torch.ones(3, 4))
    with pytest.raises(ValueError, match='runs on device "tpu"'):
        export.load(good, "cpu")


def test_constants_are_part_of_the_program(tmp_path) -> None:
    tokens = torch.randint(0, 11, (2, 5))
    program = saved(Block(), tmp_path / "p", tokens, scale=0.5)
    with pytest.raises(errors.InputMismatch, match=r"'scale' was 0.5 .* got 2.0"):
        program(tokens.to("tpu"), scale=2.0)


# ---- what cannot be saved


def test_dynamic_dims_are_refused(tmp_path) -> None:
    dynamic = torch.export.export(
        linear(), (torch.randn(3, 4),), dynamic_shapes={"input": {0: torch.export.Dim("batch")}}
    )
    with pytest.raises(errors.ExportUnsupported, match=r"(?s)dim 0 of input 'input' is dynamic.*TPU-E111"):
        export.save(dynamic, tmp_path / "p")


def test_data_dependent_sizes_are_refused() -> None:
    class Select(nn.Module):
        def forward(self, x):
            return x[x > 0]

    with pytest.raises(errors.ExportUnsupported, match=r"(?s)\[aten.(index|nonzero|sym).* depends on data"):
        export.lower(Select(), (torch.randn(3),))


def test_example_inputs_are_asked_for(tmp_path) -> None:
    with pytest.raises(TypeError, match="needs example inputs"):
        export.save(linear(), tmp_path / "p")
    with pytest.raises(TypeError, match="has its example inputs"):
        export.lower(torch.export.export(linear(), (torch.randn(3, 4),)), (torch.randn(3, 4),))
