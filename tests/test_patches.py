"""Patches of foreign objects: each is applied, is about "tpu" only, and is still needed."""

from __future__ import annotations

import ast
import inspect
import re
import signal
from pathlib import Path

import numpy as np
import pytest
import torch

from torch_tpu import patches

ROOT = Path(__file__).resolve().parents[1]
BY_TARGET = {p.target: p for p in patches.PATCHES}

SWAP = """
import resource, torch
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
torch.UntypedStorage._byteswap.__wrapped__(torch.ones(2, device="tpu").untyped_storage(), 2)
"""


def original(target: str):
    owner, name = BY_TARGET[target].owner()
    return getattr(owner, name).__wrapped__


def test_all_are_applied():
    for patch in patches.PATCHES:
        assert patch.applies(), f"{patch.target}: remove it, torch {torch.__version__} is outside of its range"
        assert callable(original(patch.target))
        assert len(patch.reason) > 20


@pytest.mark.parametrize(
    ("since", "before", "applies"), [("2.13", "2.14", True), ("2.14", "3", False), ("1", "2.13", False)]
)
def test_the_range_decides(since, before, applies):
    assert patches.Patch("torch:Tensor.cpu", lambda f: f, since, before, "").applies() is applies


def test_a_patch_replaces_and_keeps_the_original(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "nothing_yet", lambda self: 1, raising=False)
    patch = patches.Patch("torch:Tensor.nothing_yet", lambda f: lambda self: f(self) + 1, "2.13", "2.14", "")
    patch.apply()
    assert torch.ones(1).nothing_yet() == 2
    assert torch.Tensor.nothing_yet.__wrapped__(None) == 1
    with pytest.raises(AttributeError):
        patches.Patch("torch:Tensor.never_there", lambda f: f, "2.13", "2.14", "").apply()


# ---- each fails when torch does without


def test_dlpack_device_is_needed():
    with pytest.raises(ValueError, match="Unknown device type tpu for Dlpack"):
        original("torch:Tensor.__dlpack_device__")(torch.ones(2, device="tpu"))


def test_dlpack_is_needed():
    class Exported:
        def __dlpack__(self, **kwargs):
            return original("torch:Tensor.__dlpack__")(torch.ones(2, device="tpu"))

        def __dlpack_device__(self):
            return 1, 0

    with pytest.raises((RuntimeError, BufferError), match="Unsupported device in DLTensor"):
        np.from_dlpack(Exported())


def test_validate_device_is_needed():
    q = torch.ones(1, 1, 2, 2, device="tpu")
    with pytest.raises(ValueError, match="FlexAttention is only supported on"):
        original("torch.nn.attention.flex_attention:_validate_device")(q, q, q)


@pytest.mark.parametrize("module", ["torch._higher_order_ops", "torch._higher_order_ops.associative_scan"])
def test_associative_scan_is_needed(module):
    with pytest.raises(ValueError, match="combine_mode='pointwise'"):
        original(f"{module}:associative_scan")(torch.add, torch.ones(3, device="tpu"), 0)


def test_init_is_needed():
    class Op(torch._ops.HigherOrderOperator):
        def __call__(self):
            raise AssertionError

    op = Op.__new__(Op)
    original("torch._ops:HigherOrderOperator.__init__")(op, "torch_tpu_unpatched")
    assert op.non_fallthrough_keys.has(torch._C.DispatchKey.AutocastPrivateUse1)
    assert not torch.ops.higher_order.cond.non_fallthrough_keys.has(torch._C.DispatchKey.AutocastPrivateUse1)


def test_byteswap_is_needed(run_program):
    with pytest.raises(AssertionError, match=f"assert {-signal.SIGSEGV} == 0"):
        run_program(SWAP)


def test_each_patch_has_its_test():
    tests = {name for name in globals() if name.startswith("test_") and name.endswith("_is_needed")}
    wanted = {f"test_{re.split('[.:]', p.target)[-1].strip('_')}_is_needed" for p in patches.PATCHES}
    assert tests == wanted


# ---- nobody else assigns to foreign objects


def assignments(path: Path) -> list[str]:
    """Attributes of torch that ``path`` assigns to, as ``file:line``."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign):
            text = [ast.unparse(t) for t in targets if t is not None]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "setattr":
            text = [ast.unparse(node.args[0]) + "."]
        else:
            continue
        found += [f"{path.name}:{node.lineno}" for t in text if t.startswith("torch.")]
    return found


def test_only_patches_py_assigns_to_torch():
    allowed = {"_loader.py": 1}  # torch.backends.tpu, which is ours to make
    for path in sorted((ROOT / "torch_tpu").rglob("*.py")):
        if path.name != "patches.py":
            found = assignments(path)
            assert len(found) <= allowed.get(path.name, 0), found


def test_the_check_sees_assignments(tmp_path):
    (tmp_path / "a.py").write_text("import torch\ntorch.x = 1\nsetattr(torch.Tensor, 'y', 2)\nz = torch.x\n")
    assert assignments(tmp_path / "a.py") == ["a.py:2", "a.py:3"]
    assert inspect.getsource(assignments)
