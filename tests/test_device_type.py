"""Tests in the form of PyTorch's own suite, a class made for the device: every 24th entry of the operator database."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.testing._internal.common_device_type import instantiate_device_type_tests, ops
from torch.testing._internal.common_utils import TestCase
from torch.utils._pytree import tree_map_only

from torch_tpu.testing.expected_failures import FORWARD
from torch_tpu.testing.opinfo import op_db

pytestmark = pytest.mark.filterwarnings("ignore")  # ATen warns of strided inputs and of beta ops

# Values that are random or uninitialised cannot be compared.
NO_VALUES = ("empty", "new_empty", "rand", "normal", "dropout", "bernoulli", "multinomial", "lowrank", "uniform")
# Of polygamma the device's values are nearer to float64 than the CPU's, which are the expected ones here.
NEARER = ("polygamma",)
# StableHLO has no complex element type of two float16.
NO_TYPE = ("chalf",)
SAMPLE = [
    op
    for op in op_db[::24]
    if not any(word in op.name for word in NO_VALUES + NO_TYPE + NEARER) and op.formatted_name not in FORWARD
]


class TestOps(TestCase):
    """Memory order of the inputs is not to be seen in the results."""

    @ops(SAMPLE, allowed_dtypes=(torch.float32, torch.int64))
    def test_noncontiguous_inputs(self, device: str, dtype: torch.dtype, op: Any) -> None:
        for number, sample in enumerate(op.sample_inputs("cpu", dtype)):
            if number == 3:
                break
            strided = sample.noncontiguous()
            want = op(strided.input, *strided.args, **strided.kwargs)
            moved = tree_map_only(
                torch.Tensor,
                lambda t: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=device).copy_(t),
                (strided.input, strided.args, strided.kwargs),
            )
            if "device" in moved[2]:
                moved[2]["device"] = device
            got = op(moved[0], *moved[1], **moved[2])
            got, want = (tree_map_only(torch.Tensor, torch.Tensor.cpu, tree) for tree in (got, want))
            # Some hundred float32 roundings, in another order than the CPU's.
            torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-4, equal_nan=True)


instantiate_device_type_tests(TestOps, globals(), only_for=("tpu",))
