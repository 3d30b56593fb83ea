"""A fixed sample of PyTorch's operator database in the dtypes other than float32, on the device against the CPU."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from torch_tpu.testing.expected_failures import BY_DTYPE
from torch_tpu.testing.opinfo import OPS

pytestmark = [
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental"),
    pytest.mark.filterwarnings("ignore:Using torch.cross without specifying the dim arg"),
]

FLOATS = ["add", "pow", "exp", "erf", "sigmoid", "sum", "var", "cumsum", "mm", "softmax", "nn.functional.layer_norm"]
INTEGERS = ["add", "mul", "div.floor_rounding", "pow", "remainder", "sum", "prod", "cumsum", "mm", "bmm", "bitwise_xor"]
COMPLEX = ["mul", "div.no_rounding_mode", "exp", "sqrt", "asin", "prod", "mm", "linalg.solve", "fft.fft", "sgn"]
SAMPLE = {
    "bfloat16": FLOATS,
    "float16": FLOATS,
    "float64": [*FLOATS, "linalg.inv", "lgamma", "special.erfcx"],
    "int64": INTEGERS,
    "uint8": [*INTEGERS, "nn.functional.interpolate.bicubic", "nn.functional.interpolate.bilinear"],
    "bool": ["any", "all", "logical_xor", "cumsum", "where", "sum"],
    "complex64": COMPLEX,
}
# Relative and absolute, by dtype of the result; what is not here must be equal. Narrow floats: two or three roundings
# on the CPU, one on the device. float32 comes from integers.
TOLERANCES = {
    torch.bfloat16: (2e-2, 2e-2),
    torch.float16: (5e-3, 5e-3),
    torch.float32: (1e-4, 1e-5),
    torch.float64: (1e-7, 1e-7),
    torch.complex64: (1e-4, 1e-5),
}
SAMPLES = 5


def run(name: str, dtype: str) -> None:
    """Compare the first samples; those that the CPU refuses do not count."""
    op = OPS[name]
    torch.manual_seed(0)
    for sample in itertools.islice(op.sample_inputs("cpu", getattr(torch, dtype)), SAMPLES):
        call = (sample.input, sample.args, sample.kwargs)
        try:
            want = _called(op, call, "cpu")
        except RuntimeError:
            continue
        got = tree_leaves(_called(op, call, "tpu"))
        for g, w in zip(got, tree_leaves(want), strict=True):
            rtol, atol = TOLERANCES.get(w.dtype, (0.0, 0.0))
            torch.testing.assert_close(g.cpu(), w, rtol=rtol, atol=atol, equal_nan=True, check_stride=False)


def _called(op: Any, call: Any, device: str) -> Any:
    first, args, kwargs = tree_map_only(torch.Tensor, lambda t: t.detach().to(device, copy=True), call)
    return op(first, *args, **kwargs)


@pytest.mark.parametrize(("name", "dtype"), [(name, dtype) for dtype, names in SAMPLE.items() for name in names])
def test_agrees_with_the_cpu(name: str, dtype: str) -> None:
    run(name, dtype)


@pytest.mark.parametrize(("name", "dtype"), list(BY_DTYPE))
def test_known_difference(name: str, dtype: str) -> None:
    with pytest.raises((AssertionError, RuntimeError, TypeError)):
        run(name, dtype)
