"""Wrong arguments from PyTorch's own operator database: the device raises what ATen raises, and stays usable."""

from __future__ import annotations

import re

import pytest
import torch

from torch_tpu.testing.expected_failures import ERRORS
from torch_tpu.testing.opinfo import OPS

WITH_ERRORS = [name for name, op in OPS.items() if op.error_inputs_func is not None]


def test_the_table_names_ops_of_the_database() -> None:
    assert sorted(name for name, _ in ERRORS if name not in WITH_ERRORS) == []


@pytest.mark.parametrize("name", WITH_ERRORS)
@pytest.mark.filterwarnings("ignore")
def test_wrong_arguments(name: str) -> None:
    op = OPS[name]
    for number, wrong in enumerate(op.error_inputs("tpu")):
        sample = wrong.sample_input
        expected = ERRORS.get((name, number))
        if expected == "none":
            kwargs = {k: v for k, v in sample.kwargs.items() if k != "out"}
            want = op(sample.input, *sample.args, **kwargs)
            got = op(sample.input, *sample.args, **sample.kwargs)
            if want is not NotImplemented or got is not NotImplemented:
                torch.testing.assert_close(got, want)
            continue
        with pytest.raises(wrong.error_type) as raised:
            op(sample.input, *sample.args, **sample.kwargs)
        text = str(raised.value)
        assert "could not be compiled" not in text
        as_aten = re.search(wrong.error_regex, text) is not None
        assert as_aten == (expected is None), f"number {number}: {text!r} against {wrong.error_regex!r}"
    assert (torch.ones(2, device="tpu") + 1).tolist() == [2, 2]
