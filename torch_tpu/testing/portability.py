"""Compile the rule cases ahead of time for a TPU that is not there: libtpu's compiler needs no hardware.

A rule that only the CPU plugin accepts is not done. What a TPU cannot run is in `torch_tpu.testing.not_on_tpu`.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch._ops import OpOverload
from torch._subclasses import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map_only

from torch_tpu import config
from torch_tpu.lowering.registry import RULES
from torch_tpu.runtime import extension, plugins
from torch_tpu.testing import cases
from torch_tpu.testing.cases import quant
from torch_tpu.testing.run_rule import lower_call

TOPOLOGIES = ("v5e:2x2", "tpu7x:2x2x1")


@dataclass(frozen=True, slots=True)
class RuleCase:
    """One call of the case table; ``name`` is its family, op and place."""

    name: str
    op: OpOverload
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


def rule_cases() -> list[RuleCase]:
    """Every case of every family, in order."""
    found = []
    for module in pkgutil.iter_modules(cases.__path__):
        table = importlib.import_module(f"{cases.__name__}.{module.name}").CASES
        found += [RuleCase(f"{module.name}-{op}-{i}", op, args, kw) for i, (op, args, kw) in enumerate(table)]
    return found


def _results(case: RuleCase) -> list[torch.Tensor]:
    """Tensors of the result types."""
    if case.op in quant.NO_CPU_KERNEL:
        with FakeTensorMode() as mode:
            call = tree_map_only(torch.Tensor, mode.from_tensor, (case.args, dict(case.kwargs)))
            found = case.op(*call[0], **call[1])
    else:
        call = tree_map_only(torch.Tensor, torch.Tensor.clone, (case.args, dict(case.kwargs)))
        found = case.op(*call[0], **call[1])
    return [t for t in tree_leaves(found) if isinstance(t, torch.Tensor)]


def stablehlo(case: RuleCase) -> str:
    """The module of one case, as `run_rule.check` would run it on the CPU plugin."""
    outs = [] if RULES[case.op].dynamic else _results(case)
    return lower_call(case.op, case.args, case.kwargs, outs)[0]


def compile_for(case: RuleCase, topology: str) -> None:
    """Compile ``case`` with libtpu for ``topology``, such as ``v5e:2x2``. Blocks for about half a second.

    Raises:
        RuntimeError: libtpu refuses the program.
    """
    config.compile_without_tpu()
    extension.compile_for_topology(plugins.libtpu_path(), topology, stablehlo(case))
