"""PyTorch's own optimizer database on the device against the CPU: five steps, each implementation there is."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch

from torch_tpu.testing.expected_failures import OPTIMIZERS

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # the database warns about optional packages while it is imported
    from torch.testing._internal.common_optimizers import optim_db

STEPS = 5
IMPLEMENTATIONS: dict[str, dict[str, bool]] = {
    "single": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}
INFOS = {info.optim_cls.__name__: info for info in optim_db}
SPARSE = {"SparseAdam"}


def implementations(info: Any) -> list[str]:
    supported = set(info.supported_impls)
    return ["single", *(name for name in ("foreach", "fused") if name in supported)]


RUNS = [(name, how) for name, info in INFOS.items() for how in implementations(info)]


def model(dtype: torch.dtype) -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3)).to(dtype)


def parameters_of(info: Any, module: torch.nn.Module) -> list[torch.nn.Parameter]:
    """Muon takes matrices only."""
    return [p for p in module.parameters() if p.dim() == 2 or info.optim_cls.__name__ != "Muon"]


def train(info: Any, module: torch.nn.Module, kwargs: dict[str, Any], device: str) -> list[torch.Tensor]:
    kwargs = {
        k: v.to(device) if isinstance(v, torch.Tensor) and v.dim() else copy.deepcopy(v) for k, v in kwargs.items()
    }
    optimizer = info.optim_cls(parameters_of(info, module), **kwargs)
    torch.manual_seed(1)
    dtype = next(module.parameters()).dtype
    batches = [(torch.randn(16, 5, dtype=dtype), torch.randn(16, 3, dtype=dtype)) for _ in range(STEPS)]
    for x, y in batches:

        def closure(x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(module(x.to(device)), y.to(device))
            loss.backward()
            return loss

        if info.step_requires_closure:
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()
    return [p.detach().cpu() for p in module.parameters()]


def compare(info: Any, how: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of deprecated arguments in the database
        inputs = info.optim_inputs_func(device="cpu")
    for sample in inputs:
        kwargs = dict(sample.kwargs)
        choice = IMPLEMENTATIONS[how] if how in info.supported_impls or len(implementations(info)) > 1 else {}
        if how == "fused" and kwargs.get("differentiable"):
            continue
        if how != "single" and isinstance(kwargs.get("lr"), torch.Tensor) and kwargs.get("capturable") is False:
            continue
        # L-BFGS without line search is chaotic: in float32 any other rounding ends elsewhere.
        dtype = torch.float64 if info.optim_cls is torch.optim.LBFGS else torch.float32
        reference, twin = model(dtype), model(dtype).to("tpu")
        want = train(info, reference, kwargs | (choice if how != "fused" else {}), "cpu")
        got = train(info, twin, kwargs | choice, "tpu")
        for g, w in zip(got, want, strict=True):
            # Five steps carry the rounding of the gradients, and the first divide by their size.
            torch.testing.assert_close(g, w, rtol=1e-3, atol=1e-5, msg=lambda text, s=sample: f"{s.desc}: {text}")


@pytest.mark.parametrize(("name", "how"), [pytest.param(*run, id="-".join(run)) for run in RUNS])
def test_five_steps(name: str, how: str) -> None:
    if name in SPARSE:
        pytest.skip("takes sparse gradients only: tests/test_sparse.py")
    key = f"{name}-{how}"
    if key not in OPTIMIZERS:
        compare(INFOS[name], how)
        return
    try:
        compare(INFOS[name], how)
    except (AssertionError, RuntimeError, TypeError, ValueError):
        pytest.xfail(OPTIMIZERS[key])
    pytest.fail(f"{key} passes: take it out of torch_tpu/testing/expected_failures.py ({OPTIMIZERS[key]})")
