"""Lowering rules one by one against ATen, and what the rule table refuses."""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any

import pytest
import torch
from torch._ops import OpOverload

from torch_tpu.errors import LoweringMismatch, LoweringMissing
from torch_tpu.ir.builder import Builder
from torch_tpu.ir.types import TensorType
from torch_tpu.lowering.driver import lower_node
from torch_tpu.lowering.registry import RULES, GlobalState, register
from torch_tpu.testing import cases
from torch_tpu.testing.cases import quant
from torch_tpu.testing.run_rule import check, lower_call, run_rule
from torch_tpu.testing.without_case import WITHOUT_CASE

aten = torch.ops.aten

TABLES = {
    m.name: importlib.import_module(f"{cases.__name__}.{m.name}").CASES for m in pkgutil.iter_modules(cases.__path__)
}
CASES = [
    pytest.param(op, args, kwargs, id=f"{family}-{op}-{i}")
    for family, table in TABLES.items()
    for i, (op, args, kwargs) in enumerate(table)
    if op not in quant.NO_CPU_KERNEL
]


@pytest.mark.parametrize(("op", "args", "kwargs"), CASES)
def test_matches_aten(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    check(op, *args, **kwargs)


def test_a_product_with_packed_int4_weights_is_that_with_the_unpacked_ones() -> None:
    nibbles = quant.NIBBLES  # n=64, k=64, two to a byte
    packed = run_rule(
        aten._convert_weight_to_int4pack.default,
        (nibbles, 2),
        {},
        [aten._convert_weight_to_int4pack(nibbles.to("meta"), 2)],
    )
    weights = torch.stack([nibbles >> 4, nibbles & 15], 2).reshape(64, 64).float() - 8
    scales = torch.full((2, 64, 2), 0.5, dtype=torch.bfloat16)
    rows = torch.eye(64, dtype=torch.bfloat16)
    call = (rows, packed[0], 32, scales)
    got = run_rule(aten._weight_int4pack_mm.default, call, {}, [torch.empty(64, 64, dtype=torch.bfloat16)])
    torch.testing.assert_close(got[0].float(), (weights * 0.5 + 0.5).t())


def test_every_rule_has_a_case() -> None:
    covered = {str(op) for table in TABLES.values() for op, _, _ in table}
    rules = {str(op) for op, entry in RULES.items() if "torch_tpu" in entry.where}
    assert rules - covered == WITHOUT_CASE, (
        "add a case, or take the op off the list of torch_tpu/testing/without_case.py"
    )


def test_no_case_without_a_rule() -> None:
    assert [str(op) for table in TABLES.values() for op, _, _ in table if op not in RULES] == []


# ---- the rule table


def test_a_second_rule_is_refused() -> None:
    with pytest.raises(TypeError, match=r"aten\.add\.Tensor has a rule already, at .*\.py:\d+"):
        register(aten.add.Tensor, lambda cx, self, other, *, alpha=1: self)


def test_a_composite_op_is_refused() -> None:
    with pytest.raises(TypeError, match=r"aten\.matmul\.default is composite; write rules for the ops it is made of"):
        register(aten.matmul.default, lambda cx, self, other: self)


@pytest.mark.parametrize("op", [aten.add_.Tensor, aten.add.out, aten._foreach_add_.Scalar])
def test_an_op_that_writes_is_refused(op) -> None:
    with pytest.raises(TypeError, match="writes to an argument; register the functional overload instead"):
        register(op, lambda cx, *args: args[0])


@pytest.fixture
def free_op() -> Any:
    """An overload that has no rule for the time of a test."""
    op = aten.sub.Tensor
    entry = RULES.pop(op)
    yield op
    RULES[op] = entry


def test_parameters_must_be_those_of_the_schema(free_op) -> None:
    with pytest.raises(TypeError, match=r"rule takes \['x', 'other', 'alpha=1'\], the schema has \['self', 'other', "):
        register(free_op, lambda cx, x, other, *, alpha=1: x)


def test_defaults_must_be_those_of_the_schema(free_op) -> None:
    with pytest.raises(TypeError, match=r"rule takes .*'alpha=2'\], the schema has .*'alpha=1'\]"):
        register(free_op, lambda cx, self, other, *, alpha=2: self)


@pytest.mark.parametrize("what", [{"scalars": {"beta": "keyed"}}, {"writes": ("out",)}])
def test_policies_must_name_parameters(free_op, what) -> None:
    with pytest.raises(TypeError, match=r"\['(beta|out)'\] are no parameters of it"):
        register(free_op, lambda cx, self, other, *, alpha=1: self, **what)
    assert free_op not in RULES


def test_a_missing_rule_names_the_op_and_the_way_out(free_op) -> None:
    with pytest.raises(LoweringMissing) as e:
        lower_node(Builder(), free_op, [], [], {}, state=GlobalState())
    assert isinstance(e.value, NotImplementedError)
    assert str(e.value).startswith("[aten.sub.Tensor] no lowering rule and no decomposition.")
    assert "TORCH_TPU_CPU_FALLBACK=warn" in str(e.value)
    assert "TPU-E101" in str(e.value)


def test_a_rule_must_keep_the_promise_of_the_meta_kernel(free_op) -> None:
    register(free_op, lambda cx, self, other, *, alpha=1: cx.b.convert(self, torch.int32))
    b = Builder()
    x = b.arg(TensorType((2,), torch.float32))
    with pytest.raises(LoweringMismatch, match=r"(?s)returned \(i32\[2\]\); the meta kernel promised \(f32\[2\]\)"):
        lower_node(b, free_op, [x.type], [x, x], {}, state=GlobalState())


# ---- the runner itself


def test_a_wrong_rule_is_found(free_op) -> None:
    register(free_op, lambda cx, self, other, *, alpha=1: cx.b.add(self, other))
    with pytest.raises(AssertionError, match="not close"):
        check(free_op, torch.ones(3), torch.ones(3))


def test_scalars_are_operands_unless_tested() -> None:
    x = torch.ones(3)
    texts = [lower_call(aten.add.Tensor, (x, x), {"alpha": alpha}, [x])[0] for alpha in (1, 2.5, 3.5)]
    assert texts[0] != texts[1]
    assert texts[1] == texts[2]
    assert [run_rule(aten.add.Tensor, (x, x), {"alpha": a}, [x])[0][0].item() for a in (1, 2.5)] == [2, 3.5]


def test_random_bits_follow_seed_and_offset() -> None:
    x = torch.empty(8)
    one, same, seed, later = (
        run_rule(aten.uniform.default, (x,), {}, [x], **k)[0] for k in ({}, {}, {"seed": 1}, {"offset": 4})
    )
    assert torch.equal(one, same)
    assert not torch.equal(one, seed)
    assert torch.equal(one[4:], later[:4])  # an element owns a counter
