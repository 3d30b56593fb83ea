"""PyTorch's own module database on the device against the CPU: outputs and gradients, in train and eval mode."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from torch_tpu.testing.expected_failures import MODULES

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # the database warns about optional packages while it is imported
    from torch.testing._internal.common_modules import module_db

# What these compute is drawn from the device's own generator: only shapes are compared.
RANDOM = {"Dropout", "Dropout1d", "Dropout2d", "Dropout3d", "AlphaDropout", "FeatureAlphaDropout", "RReLU"}
RANDOM |= {"FractionalMaxPool2d", "FractionalMaxPool3d"}
# Long sums, recurrences over steps, and statistics of few numbers: some ulps more than one operation has.
TOLERANCE = {"rtol": 2e-4, "atol": 2e-5}


def name_of(info: Any) -> str:
    return str(info.name).removeprefix("nn.").replace(".", "_")


def moved(x: Any, device: str) -> Any:
    def move(t: torch.Tensor) -> torch.Tensor:
        return t.detach().to(device, copy=True).requires_grad_(t.requires_grad)

    return tree_map_only(torch.Tensor, move, x)


def first_sample(info: Any, *, training: bool) -> Any:
    torch.manual_seed(0)
    return next(
        iter(info.module_inputs_func(info, device="cpu", dtype=torch.float32, requires_grad=True, training=training))
    )


def run(module: torch.nn.Module, args: Any, kwargs: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Outputs and gradients: of the inputs, then of the parameters."""
    torch.manual_seed(0)
    outs = [t for t in tree_leaves(module(*args, **kwargs)) if isinstance(t, torch.Tensor)]
    total = [(t.abs() if t.is_complex() else t).sum() for t in outs if t.requires_grad]
    if total:
        torch.autograd.backward(total)
    inputs = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
    leaves = [*inputs, *module.parameters()]
    return outs, [t.grad for t in leaves if t.requires_grad and t.grad is not None]


def compare_mode(info: Any, *, training: bool) -> None:
    sample = first_sample(info, training=training)
    built, given = sample.constructor_input, sample.forward_input
    torch.manual_seed(0)
    module = info.module_cls(*built.args, **built.kwargs).train(training).to(torch.float32)
    with torch.no_grad():
        module(*moved(given.args, "cpu"), **moved(given.kwargs, "cpu"))  # a lazy module gets its parameters
    twin = copy.deepcopy(module).to("tpu")
    want = run(module, *moved((given.args, given.kwargs), "cpu"))
    got = run(twin, *moved((given.args, given.kwargs), "tpu"))
    for some, others in zip(got, want, strict=True):
        assert len(some) == len(others)
        for g, w in zip(some, others, strict=True):
            assert (g.device.type, g.shape, g.dtype) == ("tpu", w.shape, w.dtype)
            if not (training and name_of(info) in RANDOM) and "Fractional" not in name_of(info):
                torch.testing.assert_close(g.detach().cpu(), w.detach(), equal_nan=True, **TOLERANCE)
    for (name, g), (_, w) in zip(twin.named_buffers(), module.named_buffers(), strict=True):
        torch.testing.assert_close(g.cpu(), w, msg=lambda text, name=name: f"{name}: {text}", **TOLERANCE)


INFOS = {name_of(info): info for info in module_db}


def test_the_table_names_modules() -> None:
    assert set(MODULES) <= set(INFOS)


@pytest.mark.parametrize("name", INFOS)
def test_module(name: str) -> None:
    info = INFOS[name]

    def both() -> None:
        for training in (True, False) if info.train_and_eval_differ else (True,):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # modules warn about their samples' arguments
                compare_mode(info, training=training)

    if name not in MODULES:
        both()
        return
    try:
        both()
    except (AssertionError, RuntimeError, TypeError, ValueError):
        pytest.xfail(MODULES[name])
    pytest.fail(f"{name} passes: take it out of torch_tpu/testing/expected_failures.py ({MODULES[name]})")
