"""Cuts a graph where the lowering library ends: programs, and what runs eagerly between them."""

from __future__ import annotations

import itertools
import logging
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch._ops import HigherOrderOperator, OpOverload
from torch.fx import Graph, GraphModule, Node
from torch.fx._lazy_graph_module import _LazyGraphModule  # its code is never run, and some of it is no Python
from torch.fx.experimental.symbolic_shapes import free_symbols
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils._sympy.symbol import SymT, symbol_is_type

from torch_tpu.compile.random import is_random
from torch_tpu.lowering import control_flow
from torch_tpu.lowering.driver import UNINITIALIZED
from torch_tpu.lowering.registry import RULES

aten = torch.ops.aten
log = logging.getLogger("torch_tpu")


@dataclass(slots=True)
class Piece:
    """Consecutive nodes: ``gm`` from the values of ``inputs`` to those of ``outputs``, nodes of the whole graph."""

    supported: bool
    nodes: list[Node]
    inputs: list[Node]
    outputs: list[Node]
    gm: GraphModule
    call: Callable[[list[Any]], Any] | None = None


def _tensors(val: Any) -> list[torch.Tensor]:
    return [t for t in tree_leaves(val) if isinstance(t, torch.Tensor)]


def _is_scalar(t: torch.Tensor) -> bool:
    return t.device.type == "cpu" and t.dim() == 0


# Their strides are those of the storage, whatever part of it their argument shows.
_OF_THE_STORAGE = {aten.as_strided.default, aten.as_strided_scatter.default}


def _is_all_of_its_storage(node: Any) -> bool:
    t = node.meta["val"]
    return bool(
        t.is_contiguous()
        and t.storage_offset() == 0
        and t.untyped_storage().nbytes() == t.numel() * t.element_size()
        and not t.is_conj()
        and not t.is_neg()
    )


def _is_getitem(node: Node) -> bool:
    return getattr(node.target, "__name__", "") == "getitem"


def _is_number(node: Node) -> bool:
    return isinstance(node.meta.get("val"), (torch.SymInt, int)) and not isinstance(node.meta["val"], bool)


def _has_rule(node: Node) -> bool:
    if _is_number(node):
        return not any(_tensors(n.meta.get("val")) for n in node.all_input_nodes) or "sym_" in str(node.target)
    if isinstance(node.target, HigherOrderOperator):
        return refusal(node) is None
    if not isinstance(node.target, OpOverload):
        return False
    if node.target is aten.copy_.default:
        return isinstance(node.args[0], Node) and node.args[0].op == "placeholder"
    if node.target in _OF_THE_STORAGE and not _is_all_of_its_storage(node.args[0]):
        return False
    if node.target in UNINITIALIZED:
        return True
    entry = RULES.get(node.target)
    return entry is not None and not entry.dynamic and not entry.writes


def held(node: Node) -> Any:
    """The tensor, graph or other object of a node ``get_attr``."""
    return operator.attrgetter(str(node.target))(node.graph.owning_module)


def is_constant(x: Any) -> bool:
    """Whether a program has what a graph holds written in it: a number, or a graph."""
    return isinstance(x, GraphModule) or (isinstance(x, torch.Tensor) and _is_scalar(x))


def graphs(node: Node) -> Iterator[GraphModule]:
    """The graphs that a higher-order op calls."""
    for n in node.all_input_nodes:
        if n.op == "get_attr" and isinstance(gm := held(n), GraphModule):
            yield gm


def all_nodes(gm: GraphModule) -> Iterator[Node]:
    """The nodes of ``gm`` and of the graphs inside."""
    for node in gm.graph.nodes:
        yield node
        if node.op == "call_function":
            for inner in graphs(node):
                yield from all_nodes(inner)


def symbols(nodes: Iterable[Node]) -> set[Any]:
    """The symbols in the sizes and numbers that ``nodes`` are."""
    found: set[Any] = set()
    for node in nodes:
        for t in tree_leaves(node.meta.get("val")):
            found |= free_symbols([*t.shape, *t.stride()] if isinstance(t, torch.Tensor) else t)
    return found


def is_unbacked(symbol: Any) -> bool:
    """Whether no input of the graph has the number of ``symbol``."""
    return bool(symbol_is_type(symbol, (SymT.UNBACKED_INT, SymT.UNBACKED_FLOAT)))


def refusal(node: Node) -> str | None:
    """Why a program cannot contain the higher-order op of ``node``; None where it can."""
    if node.target not in control_flow.RULES or node.kwargs:
        return "it has no rule"
    read = {user.args[1] for user in node.users}
    if any(not isinstance(t, torch.Tensor | None) and i in read for i, t in enumerate(node.meta["val"])):
        return "a result that is a number is read"
    known = symbols(node.all_input_nodes)
    if symbols(n for n in node.users) - known:
        return "the size of a result depends on data"
    for gm in graphs(node):
        inner = [n for n in gm.graph.nodes if n.op != "output"]
        if symbols(n for n in inner if _tensors(n.meta.get("val"))) - known:
            return "a size inside is not one of its operands"
        for n in inner:
            if (why := _refusal_inside(n, known)) is not None:
                return why
    return None


def _refusal_inside(node: Node, known: set[Any]) -> str | None:
    if node.op == "get_attr" and not is_constant(held(node)):
        return f"a graph holds the tensor {node.target}"
    if node.op != "call_function":
        return None
    if symbols([node]) - known:  # a number that the loop carries
        return None if node.target in control_flow.NUMBER_OPS else f"{node.target} of a number that is carried"
    if is_random(node.target):
        return f"{node.target} draws numbers, and how many must be known before"
    if node.target is aten.copy_.default or not supported(node, scalars=True):
        return f"no program can contain {node.target}"
    return None


def supported(node: Node, *, scalars: bool = False) -> bool:
    """Whether a program can compute ``node``: it has a rule, and all its tensors are on the device.

    Args:
        scalars: count rank-0 tensors of the CPU as such; for a node that only the program reads.
    """
    if _is_getitem(node):
        return supported(node.args[0], scalars=scalars)  # type: ignore[arg-type]
    if not _has_rule(node):
        return False
    is_higher_order = isinstance(node.target, HigherOrderOperator)
    if not is_higher_order and any(map(is_unbacked, symbols([node]) - symbols(node.all_input_nodes))):
        return False  # its size is data
    results = _tensors(node.meta.get("val"))
    operands = [t for n in node.all_input_nodes for t in _tensors(n.meta.get("val"))]
    objects = [n for n in node.all_input_nodes if n.op == "get_attr" and not _tensors(n.meta.get("val"))]
    if is_higher_order:
        objects = []  # its graphs
        read = {user.args[1] for user in node.users}
        results = [t for i, t in enumerate(node.meta["val"]) if i in read and t is not None]
    inside = scalars and not is_random(node.target) and node.target is not aten.copy_.default
    return (
        not objects
        and all(t.device.type == "tpu" or (inside and _is_scalar(t)) for t in results)
        and all(t.device.type == "tpu" or _is_scalar(t) for t in operands)
    )


def _is_ordered(node: Node, supported: bool) -> bool:
    """Whether ``node`` keeps its place among others like it: it draws numbers, or may do what its schema does not say."""
    if isinstance(node.target, OpOverload):
        is_known = node.target.namespace in ("aten", "prims") and node.target._schema.returns
        return is_random(node.target) or torch.Tag.nondeterministic_seeded in node.target.tags or not is_known
    return not supported and not _is_getitem(node) and not _is_number(node)


def _gathered(nodes: list[Node], kinds: Mapping[Node, bool]) -> list[Node]:
    """``nodes`` in an order in which those of one kind come together, up to the first that writes to memory."""
    writes = (i for i, n in enumerate(nodes) if isinstance(n.target, OpOverload) and n.target._schema.is_mutable)
    end = next(writes, len(nodes))
    waiting, rest = nodes[:end], nodes[end:]
    needs: dict[Node, set[Node]] = {n: set(n.all_input_nodes).intersection(waiting) for n in waiting}
    for before, after in itertools.pairwise(n for n in waiting if _is_ordered(n, kinds[n])):
        needs[after].add(before)
    taken: dict[Node, None] = {}
    kind = True
    while len(taken) < end:
        for n in waiting:
            if n not in taken and kinds[n] == kind and needs[n] <= taken.keys():
                taken[n] = None
        kind = not kind
    return [*taken, *rest]


def split(gm: GraphModule) -> list[Piece]:
    """``gm`` in pieces, as few as its data allows; one piece if all or nothing is supported."""
    nodes = [n for n in gm.graph.nodes if n.op not in ("placeholder", "get_attr", "output")]
    kinds = {n: supported(n) for n in nodes}
    for node in nodes:
        if not kinds[node] and isinstance(node.target, HigherOrderOperator):
            log.info("%s runs eagerly, between programs: %s", node.target, refusal(node) or "its tensors are elsewhere")
    scalars = [n for n in reversed(nodes) if not kinds[n] and supported(n, scalars=True)]
    kinds |= dict.fromkeys(scalars, True)
    while True:
        groups = [list(group) for _, group in itertools.groupby(_gathered(nodes, kinds), kinds.__getitem__)]
        place = {n: i for i, group in enumerate(groups) for n in group}
        outside = [n for n in scalars if kinds[n] and any(place.get(user) != place[n] for user in n.users)]
        if not outside:
            break
        kinds |= dict.fromkeys(outside, False)
    return [_piece(gm, kinds[group[0]], group) for group in groups] or [_piece(gm, True, [])]


def _piece(gm: GraphModule, kind: bool, nodes: list[Node]) -> Piece:
    inside = set(nodes)
    # Sizes first: they name the symbols in the shapes of the rest.
    inputs = [n for n in gm.graph.nodes if n.op == "placeholder" and isinstance(n.meta.get("val"), torch.SymInt)]
    for node in nodes:
        inputs += [n for n in node.all_input_nodes if n not in inside and n.op != "get_attr" and n not in inputs]
    outputs = [n for n in nodes if any(user not in inside for user in n.users)]
    graph = Graph()
    copies: dict[Node, Node] = {}
    for n in inputs:
        copies[n] = graph.placeholder(n.name)
        copies[n].meta = dict(n.meta)
    for node in nodes:
        for n in node.all_input_nodes:
            if n.op == "get_attr" and n not in copies:
                copies[n] = graph.node_copy(n)
        copies[node] = graph.node_copy(node, lambda n: copies[n])
    graph.output([copies[n] for n in outputs])
    return Piece(kind, nodes, inputs, outputs, _LazyGraphModule(gm, graph))


class Chain:
    """The pieces of a graph, one after the other. Values are dropped after their last use."""

    def __init__(self, gm: GraphModule, pieces: list[Piece]) -> None:
        self.gm = gm
        self.pieces = pieces
        self.placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
        self.held = [n for n in gm.graph.nodes if n.op == "get_attr"]
        self.output = tree_leaves(next(n for n in gm.graph.nodes if n.op == "output").args[0])
        kept = {n for n in self.output if isinstance(n, Node)}
        last: dict[Node, int] = {}
        for i, piece in enumerate(pieces):
            for n in piece.inputs + piece.outputs:
                last[n] = i
        self.dead = [[n for n, at in last.items() if at == i and n not in kept] for i in range(len(pieces))]

    def __call__(self, args: list[Any]) -> list[Any]:
        """Outputs of the graph for ``args``, which is emptied."""
        env: dict[Node, Any] = dict(zip(self.placeholders, args, strict=True))
        args.clear()
        for n in self.held:
            env[n] = getattr(self.gm, str(n.target))
        for piece, dead in zip(self.pieces, self.dead, strict=True):
            if piece.call is None:
                self._run_eagerly(piece, env)
            else:
                results = piece.call([env[n] for n in piece.inputs])
                env.update(zip(piece.outputs, results, strict=True))
            for n in dead:
                env.pop(n, None)
        return [env[n] if isinstance(n, Node) else n for n in self.output]

    def _run_eagerly(self, piece: Piece, env: dict[Node, Any]) -> None:
        local = dict(env)
        for node in piece.nodes:
            args, kwargs = tree_map_only(Node, lambda n: local[n], (node.args, dict(node.kwargs)))
            local[node] = node.target(*args, **kwargs)  # type: ignore[operator]
        env.update((n, local[n]) for n in piece.outputs)
