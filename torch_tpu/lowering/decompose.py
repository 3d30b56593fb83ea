"""Ops without a rule, through PyTorch's decompositions and those of `composed`, traced down to ops that have one.

The first trace of a process costs about a second (sympy, dynamo's tracing machinery), each later one milliseconds:
plain ops have rules.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import GraphModule

from torch_tpu.lowering.composed import COMPOSED
from torch_tpu.lowering.registry import RULES


@cache
def _table() -> dict[Any, Callable[..., Any]]:
    from torch._decomp import decomposition_table

    return {op: fn for op, fn in (decomposition_table | COMPOSED).items() if op not in RULES}


def has_decomposition(op: OpOverload) -> bool:
    """Whether PyTorch can express ``op`` in other ops. Imports the decompositions on first use."""
    return op in _table()


def trace(op: OpOverload, args: Mapping[str, Any]) -> tuple[GraphModule, list[str | tuple[str, int]]]:
    """``op`` on meta tensors, decomposed to ops with rules.

    Args:
        op: a functional overload.
        args: its arguments by name; tensors on the meta device, or rank-0 on the CPU.

    Returns:
        The graph, and where each of its placeholders comes from: an argument's name, or name and position in a list.
    """
    from torch.fx.experimental.proxy_tensor import make_fx

    tensors: list[torch.Tensor] = []
    sources: list[str | tuple[str, int]] = []
    for name, value in args.items():
        if isinstance(value, torch.Tensor):
            tensors.append(value)
            sources.append(name)
        elif isinstance(value, (list, tuple)):
            for i, item in enumerate(value):
                if isinstance(item, torch.Tensor):
                    tensors.append(item)
                    sources.append((name, i))

    def call(*given: torch.Tensor) -> Any:
        full = {k: list(v) if isinstance(v, (list, tuple)) else v for k, v in args.items()}
        for source, t in zip(sources, given, strict=True):
            if isinstance(source, str):
                full[source] = t
            else:
                full[source[0]][source[1]] = t
        schema = op._schema.arguments
        return op(
            *[full[a.name] for a in schema if not a.kwarg_only],
            **{a.name: full[a.name] for a in schema if a.kwarg_only},
        )

    graph = make_fx(call, decomposition_table=_table(), tracing_mode="fake")(*tensors)
    if any(isinstance(n.target, OpOverload) and n.target._schema.is_mutable for n in graph.graph.nodes):
        pure = torch.func.functionalize(call, remove="mutations_and_views")
        graph = make_fx(pure, decomposition_table=_table(), tracing_mode="fake")(*tensors)
    return graph, sources
