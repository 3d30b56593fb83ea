"""Run the rule of one ATen node and check its results against the meta kernel's promise."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._ops import HigherOrderOperator, OpOverload
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_map_only

from torch_tpu.errors import LoweringMismatch, LoweringMissing
from torch_tpu.ir.builder import Builder, Value
from torch_tpu.ir.types import TensorType
from torch_tpu.lowering import control_flow
from torch_tpu.lowering.registry import KEYED, RULES, Dynamic, GlobalState, LowerContext, RngOperands


def _show(types: Sequence[TensorType | None]) -> str:
    return f"({', '.join(map(str, types))})"


def lower_node(
    b: Builder,
    op: OpOverload,
    outs: Sequence[Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    state: GlobalState,
    rng: RngOperands | None = None,
) -> tuple[Value | None, ...] | Dynamic:
    """Emit the StableHLO of ``op`` into ``b``.

    Args:
        outs: result types from the meta kernel, flattened (None: a result that this call does not have); empty for rules
            marked dynamic.
        args, kwargs: as ATen gets them, with each tensor replaced by a :class:`Value`.

    Returns:
        The results of the schema, then those of the entry's ``writes``.

    Raises:
        LoweringMissing: no rule for ``op``.
        LoweringMismatch: the rule returned another type than ``outs``; a bug in the rule.
    """
    entry = RULES.get(op)
    if entry is None:
        raise LoweringMissing(
            "no lowering rule and no decomposition.",
            op=str(op),
            hint="set TORCH_TPU_CPU_FALLBACK=warn to run this op on the CPU, or add a rule (CONTRIBUTING.md).",
        )
    got = entry.rule(LowerContext(b, op, tuple(outs), state, rng), *args, **kwargs)
    if isinstance(got, Dynamic):
        return got
    flat = tuple(got) if isinstance(got, (tuple, list)) else (got,)
    types = tuple(None if v is None else v.type for v in flat[: len(outs)])
    if types != tuple(outs):
        raise LoweringMismatch(
            f"the rule at {entry.where} returned {_show(types)}; the meta kernel promised {_show(outs)}.", op=str(op)
        )
    return flat


Size = Callable[[Any], int]

aten = torch.ops.aten

UNINITIALIZED = frozenset(
    {
        aten.empty.memory_format,
        aten.empty_like.default,
        aten.empty_permuted.default,
        aten.empty_strided.default,
        aten.new_empty.default,
        aten.new_empty_strided.default,
        torch.ops.prims.empty_strided.default,
    }
)
"""Ops of graphs that have no rule: an eager call of one is an allocation and no program."""


def uninitialized(b: Builder, out: TensorType, state: GlobalState) -> Value:
    """Any value, because there is no memory to leave as it is; with deterministic algorithms ATen's own filling."""
    fill: bool | int | float = 0
    if state.deterministic and state.fill_uninitialized:
        inexact = out.dtype.is_floating_point or out.dtype.is_complex
        fill = math.nan if inexact else out.dtype == torch.bool or torch.iinfo(out.dtype).max
    return b.constant(fill, out.dtype, out.shape)


@dataclass(slots=True)
class Draws:
    """Random numbers of a graph: each node takes its counters behind those of the node before, as eager ops do."""

    operands: RngOperands
    used: int = 0

    def take(self, b: Builder, elements: int) -> RngOperands:
        """Seed and first counter of a node whose first result has ``elements`` elements."""
        offset = b.add(self.operands.offset, b.constant(self.used, torch.uint64))
        self.used += -(-elements // 4) * 4
        return RngOperands(self.operands.seed, offset)


def result_types(val: Any, size: Size = int) -> list[Any]:
    """The TensorType of each result of a node; None for a result that it does not give."""
    given = val if isinstance(val, (tuple, list)) else [val]
    leaves = torch.utils._pytree.tree_leaves(given, is_leaf=lambda x: x is None)
    return [TensorType(tuple(map(size, t.shape)), t.dtype) if isinstance(t, torch.Tensor) else None for t in leaves]


def lower_graph(
    b: Builder,
    gm: GraphModule,
    inputs: Sequence[Any],
    *,
    state: GlobalState,
    draws: Draws | None = None,
    size: Size = int,
    written: dict[int, Value] | None = None,
) -> tuple[list[Any], Mapping[Node, Any]]:
    """Emit a traced graph whose nodes all have rules; ``inputs`` are the Values of its placeholders.

    Args:
        draws: where random nodes get their numbers; advanced.
        size: the number that a symbolic size stands for.
        written: filled with the value that each placeholder has after the graph's ``copy_`` to it, by its position.

    Returns:
        The leaves of the graph's output (Values, numbers, None), and what each node is.

    Raises:
        LoweringMissing: a node has no rule.
    """
    lowering = GraphLowering(b, gm, state, draws, size, {} if written is None else written)
    return lowering.run(inputs), lowering.env


@dataclass(slots=True)
class GraphLowering:
    """The lowering of one graph, node by node."""

    b: Builder
    gm: GraphModule
    state: GlobalState
    draws: Draws | None
    size: Size
    written: dict[int, Value]
    env: dict[Node, Any] = field(default_factory=dict)
    position: dict[Node, int] = field(default_factory=dict)

    def run(self, inputs: Sequence[Any]) -> list[Any]:
        """Lower all nodes; the leaves of the graph's output."""
        given = iter(inputs)
        for node in self.gm.graph.nodes:
            if node.op == "placeholder":
                self.position[node] = len(self.position)
                self.env[node] = next(given)
            elif node.op == "get_attr":
                self.env[node] = self.constant(node)
            elif node.op == "output":
                leaves = torch.utils._pytree.tree_leaves(node.args[0])
                return [self.env[out] if isinstance(out, Node) else out for out in leaves]
            else:
                self.env[node] = self.call(node)
        raise AssertionError("graph without output")

    def constant(self, node: Node) -> Any:
        """A tensor or a graph that the graph holds."""
        t = getattr(self.gm, str(node.target))
        if isinstance(t, GraphModule):
            return t
        if t.numel() == 1:
            return self.b.constant(t.item(), t.dtype, t.shape)
        return self.b.reshape(self.b.constant_list(t.flatten().tolist(), t.dtype), t.shape)

    def call(self, node: Node) -> Any:
        """What ``node``, a call, is."""
        val = node.meta.get("val")
        args, kwargs = tree_map_only(Node, lambda n: self.env[n], (node.args, dict(node.kwargs)))
        if node.target in control_flow.NUMBER_OPS and any(isinstance(x, Value) for x in args):
            return control_flow.compute_number(self.b, node.target, *args)
        if isinstance(val, (torch.SymInt, int)):
            return self.size(val)
        if isinstance(node.target, HigherOrderOperator):
            return self.control_flow(node.target, val, args)
        if not isinstance(node.target, OpOverload):
            if getattr(node.target, "__name__", "") == "getitem":
                return args[0][args[1]]
            raise LoweringMissing("a Python function in a graph has no rule.", op=str(node.target))
        if node.target is aten.copy_.default:
            return self.copy(node, *args)
        types = result_types(val, self.size)
        if node.target in UNINITIALIZED:
            return uninitialized(self.b, types[0], self.state)
        args, kwargs = scalars_as_values(self.b, node.target, args, kwargs, types)
        rng = None
        if self.draws is not None and node.target in RULES and RULES[node.target].rng:
            rng = self.draws.take(self.b, types[0].numel)
        got = lower_node(self.b, node.target, types, args, kwargs, state=self.state, rng=rng)
        if isinstance(got, Dynamic):
            raise LoweringMissing("data-dependent sizes inside a graph.", op=str(node.target))
        return list(got) if isinstance(val, (tuple, list)) else got[0]

    def control_flow(self, op: HigherOrderOperator, val: Any, args: Sequence[Any]) -> Sequence[Value | None]:
        rule = control_flow.RULES.get(op)
        if rule is None:
            raise LoweringMissing("no program can contain this higher-order op.", op=str(op))

        def emit(gm: GraphModule, inputs: Sequence[Any]) -> Sequence[Any]:
            return GraphLowering(self.b, gm, self.state, None, self.size, {}).run(inputs)

        outs = result_types(val, self.size)
        return rule(control_flow.RegionContext(self.b, op, outs, emit), *args)

    def copy(self, node: Node, target: Value, source: Value, non_blocking: bool = False) -> Value:
        """A write to an input: the functional graph has it at its end."""
        where = node.args[0]
        assert isinstance(where, Node)
        value = self.b.broadcast_to(self.b.convert(source, target.dtype), target.shape)
        self.env[where] = self.written[self.position[where]] = value
        return value


_SCALARS = {"number", "float", "Optional[number]", "Optional[float]", "List[number]", "List[float]"}
_WIDE = (torch.float64, torch.complex128)


def scalars_as_values(
    b: Builder, op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], outs: Sequence[Any]
) -> tuple[list[Any], dict[str, Any]]:
    """A graph's numbers as a rule gets them from an eager call: rank-0 values, unless the rule keys or tests them."""
    entry = RULES.get(op)
    if entry is None:
        return list(args), dict(kwargs)
    found = [t.dtype for t in outs if t is not None]
    tree_map_only(Value, lambda v: found.append(v.dtype), (args, kwargs))
    number = torch.float64 if any(d in _WIDE for d in found) else torch.float32

    def one(x: Any, policy: Any) -> Any:
        if isinstance(x, (list, tuple)):
            return [one(item, policy) for item in x]
        if isinstance(x, bool) or not isinstance(x, (int, float)) or policy == KEYED or x in policy:
            return x
        v = b.constant(x, torch.int64 if isinstance(x, int) else number)
        return Value(v.name, v.type, wrapped=True)

    def convert(a: Any, x: Any) -> Any:
        is_number = str(a.type) in _SCALARS or (str(a.type) == "Tensor" and not isinstance(x, Value))
        return one(x, entry.scalars.get(a.name, ())) if is_number else x

    schema = op._schema.arguments
    by_name = {a.name: a for a in schema}
    return (
        [convert(a, x) for a, x in zip(schema, args, strict=False)],
        {k: convert(by_name[k], x) for k, x in kwargs.items()},
    )
