"""Cuts a graph where the lowering library ends: programs, and what runs eagerly between them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import Graph, GraphModule, Node
from torch.fx._lazy_graph_module import _LazyGraphModule  # its code is never run, and some of it is no Python
from torch.utils._pytree import tree_leaves, tree_map_only

from torch_tpu.lowering.registry import RULES

aten = torch.ops.aten


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


def _has_rule(node: Node) -> bool:
    if isinstance(node.meta.get("val"), (torch.SymInt, int)) and not isinstance(node.meta["val"], bool):
        return not any(_tensors(n.meta.get("val")) for n in node.all_input_nodes) or "sym_" in str(node.target)
    if not isinstance(node.target, OpOverload):
        return False
    if node.target is aten.copy_.default:
        return isinstance(node.args[0], Node) and node.args[0].op == "placeholder"
    if node.target in _OF_THE_STORAGE and not _is_all_of_its_storage(node.args[0]):
        return False
    entry = RULES.get(node.target)
    return entry is not None and not entry.dynamic and not entry.writes


def supported(node: Node) -> bool:
    """Whether a program can compute ``node``: it has a rule, and all its tensors are on the device."""
    if _is_getitem(node):
        return supported(node.args[0])  # type: ignore[arg-type]
    if not _has_rule(node):
        return False
    results = _tensors(node.meta.get("val"))
    operands = [t for n in node.all_input_nodes for t in _tensors(n.meta.get("val"))]
    held = [n for n in node.all_input_nodes if n.op == "get_attr" and not _tensors(n.meta.get("val"))]
    return (
        not held
        and all(t.device.type == "tpu" for t in results)
        and all(t.device.type == "tpu" or _is_scalar(t) for t in operands)
    )


def split(gm: GraphModule) -> list[Piece]:
    """``gm`` in pieces, in the order of its nodes; one piece if all or nothing is supported."""
    groups: list[tuple[bool, list[Node]]] = []
    for node in gm.graph.nodes:
        if node.op in ("placeholder", "get_attr", "output"):
            continue
        kind = supported(node)
        if not groups or groups[-1][0] != kind:
            groups.append((kind, []))
        groups[-1][1].append(node)
    if not groups:
        return [_piece(gm, True, [])]
    return [_piece(gm, kind, nodes) for kind, nodes in groups]


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
