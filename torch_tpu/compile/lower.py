"""A miss of a compiled graph: one program for the forms that its inputs have in this call.

The same graph gives one program a set of sizes, views and storage forms; all of that is in the key. Symbols of a
graph with dynamic shapes get the numbers of the call.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import sympy
import torch
from torch.fx import GraphModule, Node

from torch_tpu.compile import bounds as bounding
from torch_tpu.compile import insight, partition
from torch_tpu.errors import LoweringMissing
from torch_tpu.ir.builder import Value
from torch_tpu.lowering import bounded, views
from torch_tpu.lowering.bounded import Bounded, whole
from torch_tpu.lowering.driver import Draws, lower_graph
from torch_tpu.lowering.size_math import Sizes, expression
from torch_tpu.modes import stored
from torch_tpu.modes.parameters import WIDE, Parameters
from torch_tpu.modes.plan import Plan


class Source:
    """A graph that may still be on disk: only lowering needs it. ``history``: of the calls of its program."""

    def __init__(
        self, history: insight.History, gm: GraphModule | None, load: Callable[[], GraphModule] | None = None
    ) -> None:
        self.history = history
        self._gm = gm
        self._load = load

    def get(self) -> GraphModule:
        """The graph."""
        if self._gm is None:
            assert self._load is not None
            self._gm = self._load()
        return self._gm


def lower(source: Source, text: str, consumed: Collection[int], rng: bool, call: Any) -> Plan:
    """The plan of a graph for ``call`` (a MissCall). ``text`` is all of the graph that the program depends on."""
    return _plan(source, text, call, lambda: _Graph(source.get(), call, rng).lower(consumed))


def lower_bounded(
    source: Source, text: str, consumed: Collection[int], bounds: Mapping[sympy.Symbol, sympy.Integer], call: Any
) -> Plan:
    """As `lower`, of a graph with symbolic sizes at ``bounds``; behind the inputs are the numbers of the symbols.

    Raises:
        Unbounded: an op has no bounded form.
    """
    text = f"{text}\n{sorted((str(s), int(n)) for s, n in bounds.items())}"
    return _plan(source, text, call, lambda: _BoundedGraph(source.get(), call, bounds).lower(consumed), bounds)


def _plan(
    source: Source,
    text: str,
    call: Any,
    make: Callable[[], Plan],
    bounds: Mapping[sympy.Symbol, sympy.Integer] | None = None,
) -> Plan:
    name = stored.plan_name(call, None, text)
    plan = stored.find_plan(name)
    if plan is None:
        with torch._C.DisableTorchFunction(), torch.no_grad():
            plan = make()
        stored.keep_plan(name, plan)
    inputs = [n for n in source.get().graph.nodes if n.op == "placeholder"] if bounds else ()
    insight.lowered(source.history, call, plan.stablehlo, bounds or {}, inputs)
    return stored.attach_executable(plan)


class _Graph(Parameters):
    """State of one miss."""

    def __init__(self, gm: GraphModule, call: Any, rng: bool) -> None:
        super().__init__(call, rng=rng)
        self.gm = gm
        self.placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
        self.call_args: list[Any] = call.args
        self._bind_all()

    def _bind_all(self) -> None:
        self.numbers: dict[sympy.Symbol, sympy.Integer] = {}
        for node, arg in zip(self.placeholders, self.call_args, strict=True):
            self._bind(node.meta.get("val"), arg)

    def _bind(self, val: Any, arg: Any) -> None:
        if isinstance(val, torch.SymInt):
            self._bind_size(val, arg[1])
        elif isinstance(val, torch.Tensor) and arg is not None and arg[0] == "tensor":
            view = self.views[arg[1]]
            for size, n in zip((*val.shape, *val.stride()), (*view.sizes, *view.strides), strict=True):
                self._bind_size(size, n)

    def _bind_size(self, size: Any, n: int) -> None:
        if isinstance(size, torch.SymInt) and isinstance(size.node.expr, sympy.Symbol):
            self.numbers.setdefault(size.node.expr, sympy.Integer(n))

    def size(self, n: Any) -> int:
        """The number that a size is in this call."""
        if not isinstance(n, torch.SymInt):
            return int(n)
        value = sympy.sympify(n.node.expr).xreplace(self.numbers)
        if not value.is_number:
            raise LoweringMissing(f"the size {n} is not known before the program runs.", op=self.call.name)
        return int(value)

    def lower(self, consumed: Collection[int]) -> Plan:
        dtypes = [t.dtype for t in self.slots] + [v.dtype for v in self.views]
        for node in partition.all_nodes(self.gm):
            dtypes += [
                t.dtype for t in torch.utils._pytree.tree_leaves(node.meta.get("val")) if isinstance(t, torch.Tensor)
            ]
        self.load(wide=any(d in WIDE for d in dtypes))
        draws = Draws(self.rng) if self.rng is not None else None
        written: dict[int, Value] = {}
        results = self._run(draws, written)
        plan = Plan(encodings=self.all_encodings)
        if draws is not None:
            plan.counters = draws.used
        values = self.write_back(plan, written)
        self._return(plan, values, results)
        self.finish(plan, values, consumed=self._consumed_slots(consumed))
        return plan

    def _run(self, draws: Draws | None, written: dict[int, Value]) -> list[Any]:
        inputs = [self.value(arg) for arg in self.call_args]
        results, self.env = lower_graph(
            self.b, self.gm, inputs, state=self.state, draws=draws, size=self.size, written=written
        )
        return results

    def _return(self, plan: Plan, values: list[Value], results: list[Any]) -> None:
        output = next(n for n in self.gm.graph.nodes if n.op == "output")
        leaves = torch.utils._pytree.tree_leaves(output.args[0])
        bases = self._bases(leaves)
        made: dict[Node, tuple[Any, ...]] = {}
        for leaf, result in zip(leaves, results, strict=True):
            if result is None:
                plan.returns.append(("none",))
            elif not isinstance(result, Value):
                plan.returns.append(("int", int(result)))
            else:
                base = bases[leaf]
                if base not in made:
                    made[base] = self._base(plan, values, base)
                plan.returns.append(made[base] if base is leaf else self._as_view(made[base], base, leaf))

    def _base(self, plan: Plan, values: list[Value], node: Node) -> tuple[Any, ...]:
        if node.op == "placeholder":
            return ("argument", self.placeholders.index(node))
        strides = tuple(map(self.size, node.meta["val"].stride()))
        return ("output", self.new_output(plan, values, self.env[node], strides))

    def _as_view(self, made: tuple[Any, ...], base: Node, node: Node) -> tuple[Any, ...]:
        val = node.meta["val"]
        offset = self.size(val.storage_offset()) - self.size(base.meta["val"].storage_offset())
        return ("view", made, tuple(map(self.size, val.shape)), tuple(map(self.size, val.stride())), offset)

    def _bases(self, leaves: Sequence[Any]) -> dict[Node, Node]:
        """The node in whose storage each result lies: an input, the node that made the storage, or itself."""
        first: dict[int, Node] = {}
        for node in self.gm.graph.nodes:
            val = node.meta.get("val")
            if node.op != "output" and isinstance(val, torch.Tensor):
                first.setdefault(val.untyped_storage()._cdata, node)
        found: dict[Node, Node] = {}
        for leaf in leaves:
            val = leaf.meta.get("val") if isinstance(leaf, Node) else None
            if isinstance(val, torch.Tensor):
                base = first[val.untyped_storage()._cdata]
                found[leaf] = base if base is not leaf and self._is_view(base, leaf) else leaf
        return found

    def _is_view(self, base: Node, node: Node) -> bool:
        """Whether ``node`` can be returned as sizes and strides over what is returned for ``base``."""
        if not isinstance(self.env[base], Value):
            return False
        whole, part = base.meta["val"], node.meta["val"]
        flags = (whole.dtype, whole.is_conj(), whole.is_neg()) == (part.dtype, part.is_conj(), part.is_neg())
        if not flags or base.op == "placeholder":
            return bool(flags)
        sizes, strides = (tuple(map(self.size, x)) for x in (whole.shape, whole.stride()))
        return views.physical_order(sizes, strides) is not None and 0 not in sizes

    def _consumed_slots(self, consumed: Collection[int]) -> set[int]:
        """Storages of which nothing is returned, only read by inputs that nobody reads again."""
        tensors = {i: arg[1] for i, arg in enumerate(self.call_args) if arg is not None and arg[0] == "tensor"}
        kept = {self.views[t].slot for i, t in tensors.items() if i not in consumed}
        return {self.views[t].slot for i, t in tensors.items() if i in consumed} - kept


class _BoundedGraph(_Graph):
    """State of one miss of a graph at the bounds of its symbols."""

    def __init__(self, gm: GraphModule, call: Any, bounds: Mapping[sympy.Symbol, sympy.Integer]) -> None:
        self.bounds = bounds
        super().__init__(gm, call, rng=False)

    def _bind_all(self) -> None:
        """Nothing: symbols are operands."""

    def _run(self, draws: Draws | None, written: dict[int, Value]) -> list[Any]:
        operands = [self.value(arg) for arg in self.call_args[len(self.placeholders) :]]
        sizes = Sizes(
            self.b, {s: int(n) for s, n in self.bounds.items()}, dict(zip(self.bounds, operands, strict=True))
        )
        self.lowering = bounded.Lowering(self.b, self.gm, self.state, None, int, written, sizes=sizes)
        inputs = [self._input(n, arg) for n, arg in zip(self.placeholders, self.call_args, strict=False)]
        results = self.lowering.run(inputs)
        self.env = {n: x.value if isinstance(x, Bounded) and x.whole else x for n, x in self.lowering.env.items()}
        return [x.value if isinstance(x, Bounded) and x.whole else x for x in results]

    def _input(self, node: Node, arg: Any) -> Any:
        val = node.meta.get("val")
        if isinstance(val, torch.SymInt):
            return expression(val)
        value = self.value(arg)
        if not isinstance(val, torch.Tensor):
            return value
        if not bounding.is_dynamic(val):
            return whole(value)
        return self.lowering.unflat(
            value, self.lowering.prefix_dims(val.shape), bounding.memory_order(val, self.bounds)
        )

    def _return(self, plan: Plan, values: list[Value], results: list[Any]) -> None:
        output = next(n for n in self.gm.graph.nodes if n.op == "output")
        leaves = torch.utils._pytree.tree_leaves(output.args[0])
        bases = bounding.origins(self.gm, leaves, self.bounds)
        made: dict[Node, tuple[Any, ...]] = {}
        for leaf in leaves:
            base = bases.get(leaf)
            if base is None or base.op == "placeholder":
                plan.returns.append(("none",))  # the form of the call has it
                continue
            if base not in made:
                value = self.env[base]
                index = (self._flat if isinstance(value, Bounded) else self._whole)(
                    plan, values, base.meta["val"], value
                )
                made[base] = ("output", index)
            plan.returns.append(made[base])

    def _flat(self, plan: Plan, values: list[Value], val: torch.Tensor, result: Bounded) -> int:
        capacity = bounding.capacity(val, self.bounds, bounding.growth(self.gm))
        flat = self.lowering.flat(result, bounding.memory_order(val, self.bounds), capacity)
        return self.new_output(plan, values, flat, (1,))

    def _whole(self, plan: Plan, values: list[Value], val: torch.Tensor, value: Value) -> int:
        fixed = all(not expression(n).free_symbols for n in val.stride())
        strides = tuple(map(int, val.stride())) if fixed else views.contiguous_strides(value.shape)
        return self.new_output(plan, values, value, strides)
