"""The rule cases compiled ahead of time for a TPU, which takes libtpu but no TPU. The whole table, for every topology:
tools/portability.py."""

from __future__ import annotations

import pytest

from torch_tpu.runtime import plugins
from torch_tpu.testing.not_on_tpu import NOT_ON_TPU
from torch_tpu.testing.portability import TOPOLOGIES, RuleCase, compile_for, rule_cases

pytestmark = pytest.mark.skipif(
    not plugins.libtpu_path(), reason="libtpu is not installed: pip install 'torch_tpu[test]' on Linux x86-64"
)

EVERY = 16
CASES = rule_cases()
# Linear algebra stands on custom calls, which are what plugins differ in most: all of it, and a sample of the rest.
SAMPLE = [c for i, c in enumerate(CASES) if i % EVERY == 0 or "linalg" in c.name or "qr" in c.name]
LISTED = [c for c in CASES if c.name in NOT_ON_TPU or str(c.op) in NOT_ON_TPU]


@pytest.mark.parametrize("case", [c for c in SAMPLE if c not in LISTED], ids=lambda c: c.name)
def test_compiles_for_a_tpu(case: RuleCase) -> None:
    compile_for(case, TOPOLOGIES[0])


def test_what_a_tpu_refuses_is_refused() -> None:
    for case in LISTED:
        with pytest.raises(RuntimeError, match="PJRT_Compile"):
            compile_for(case, TOPOLOGIES[0])


def test_the_table_names_cases() -> None:
    names = {c.name for c in CASES} | {str(c.op) for c in CASES}
    assert set(NOT_ON_TPU) <= names
