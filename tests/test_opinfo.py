"""PyTorch's own operator database, on the device against the CPU: values and gradients in float32.

A fixed sample; with the variable OPINFO=all (`make coverage`) every entry whose values can be compared.
"""

from __future__ import annotations

import fnmatch
import itertools
import os
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from torch_tpu.testing.expected_failures import BACKWARD, FORWARD
from torch_tpu.testing.opinfo import OPS

# Elementwise, reductions, products, indexing, shapes, normalisation, losses, pooling, linear algebra, sorting.
NAMES = [
    "add",
    "sub",
    "mul",
    "div.floor_rounding",
    "pow",
    "atan2",
    "sigmoid",
    "erf",
    "exp",
    "log1p",
    "clamp",
    "where",
    "lerp",
    "addcmul",
    "sum",
    "mean",
    "var",
    "amax",
    "prod",
    "cumsum",
    "logsumexp",
    "std_mean",
    "mm",
    "bmm",
    "addmm",
    "matmul",
    "einsum",
    "baddbmm",
    "gather",
    "scatter_add",
    "index_select",
    "index_add",
    "index_put",
    "masked_fill",
    "take_along_dim",
    "cat",
    "stack",
    "roll",
    "flip",
    "tril",
    "repeat",
    "nn.functional.pad.constant",
    "softmax",
    "log_softmax.with_dtype",
    "nn.functional.layer_norm",
    "nn.functional.batch_norm",
    "nn.functional.group_norm",
    "nn.functional.gelu",
    "nn.functional.silu",
    "nn.functional.cross_entropy",
    "nn.functional.mse_loss",
    "nn.functional.smooth_l1_loss",
    "nn.functional.embedding",
    "nn.functional.conv2d",
    "nn.functional.max_pool2d",
    "nn.functional.avg_pool2d",
    "nn.functional.interpolate.bilinear",
    "nn.functional.scaled_dot_product_attention",
    "sort",
    "topk",
    "linalg.norm",
    "linalg.cholesky",
    "linalg.qr",
    "fft.rfft",
]
SAMPLES = 3


# Values that are random, uninitialised, or made for a device that is an argument; what needs CUDA's runtime compiler.
NOT_COMPARED = (
    "bernoulli", "cauchy", "exponential", "geometric", "log_normal", "multinomial", "normal", "normal.*", "rand*", "uniform",
    "*dropout*", "*rrelu", "*fractional_max_pool*", "*multi_head_attention*", "*_lowrank", "*empty*", "zeros", "ones", "full",
    "eye", "arange", "linspace*", "logspace*", "scalar_tensor", "signal.*", "tri?_indices", "broadcast_shapes", "item", "to",
    "to_sparse", "jiterator*", "as_strided.partial_views",
)  # fmt: skip
if os.environ.get("OPINFO") == "all":
    NAMES = [
        name
        for name, op in OPS.items()
        if torch.float32 in op.dtypes and not any(fnmatch.fnmatchcase(name, pattern) for pattern in NOT_COMPARED)
    ]


def test_the_sample_is_in_the_database() -> None:
    assert sorted(set(NAMES) - set(OPS)) == []
    assert set(FORWARD) | set(BACKWARD) <= set(OPS)


def fresh(x: Any, device: str) -> Any:
    """Copies without gradients: samples share tensors."""

    def move(t: torch.Tensor) -> torch.Tensor:
        return t.detach().to(device, copy=True).requires_grad_(t.requires_grad)

    return tree_map_only(torch.Tensor, move, x)


def samples(op: Any, *, requires_grad: bool) -> list[tuple[Any, Any]]:
    torch.manual_seed(0)
    found = op.sample_inputs("cpu", torch.float32, requires_grad=requires_grad)
    fixed = (s for s in found if not s.kwargs.get("dropout_p"))  # random numbers are the device's own
    return [((s.input, *s.args), s.kwargs) for s in itertools.islice(fixed, SAMPLES)]


def compare(got: Any, want: Any) -> None:
    got, want = tree_leaves(got), tree_leaves(want)
    assert len(got) == len(want)
    for g, w in zip(got, want, strict=True):
        if not isinstance(w, torch.Tensor):
            assert g == w
            continue
        assert g.device.type == "tpu"
        torch.testing.assert_close(g.detach().cpu(), w.detach(), rtol=1e-4, atol=1e-4, equal_nan=True)


def run_forward(op: Any) -> None:
    for args, kwargs in samples(op, requires_grad=False):
        compare(op(*fresh(args, "tpu"), **fresh(kwargs, "tpu")), op(*args, **kwargs))


def gradients(op: Any, args: Any, kwargs: Any) -> list[torch.Tensor | None]:
    outs = [t for t in tree_leaves(op(*args, **kwargs)) if isinstance(t, torch.Tensor) and t.requires_grad]
    torch.autograd.backward([(t.abs() if t.is_complex() else t).sum() * 0.5 for t in outs])
    leaves = tree_leaves((args, kwargs))
    return [t.grad for t in leaves if isinstance(t, torch.Tensor) and t.requires_grad and t.grad is not None]


def run_backward(op: Any) -> None:
    for args, kwargs in samples(op, requires_grad=True):
        compare(*(gradients(op, *fresh((args, kwargs), device)) for device in ("tpu", "cpu")))


def expect(table: Mapping[str, str], name: str, run: Any) -> None:
    """Run; an entry of the table must fail, and any other must not."""
    if name not in table:
        run(OPS[name])
        return
    try:
        run(OPS[name])
    except (AssertionError, RuntimeError, TypeError, ValueError):
        pytest.xfail(table[name])
    pytest.fail(f"{name} passes: take it out of torch_tpu/testing/expected_failures.py ({table[name]})")


@pytest.mark.parametrize("name", NAMES)
def test_forward(name: str) -> None:
    expect(FORWARD, name, run_forward)


WITH_GRADIENTS = [name for name in NAMES if name in OPS and OPS[name].supports_autograd]


@pytest.mark.parametrize("name", WITH_GRADIENTS)
def test_backward(name: str) -> None:
    expect(BACKWARD, name, run_backward)
