"""A functional FX graph as a callable of its flat inputs.

A graph whose nodes all have rules is one program. Else it is cut: what has no rule (opaque custom ops, ops of other
devices) runs eagerly between two programs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import sympy
import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx import GraphModule, Node

from torch_tpu.compile import bounds, insight, lower, partition
from torch_tpu.compile.random import is_random
from torch_tpu.runtime import disk_cache, extension

aten = torch.ops.aten


def _describe(node: Node) -> str:
    types = torch.utils._pytree.tree_map_only(
        torch.Tensor, lambda t: (t.dtype, tuple(map(str, t.shape)), tuple(map(str, t.stride()))), node.meta.get("val")
    )
    text = f"{node.op} {node.name} {node.target} {node.args} {node.kwargs} {types}"
    if node.op != "get_attr":
        return text
    held = partition.held(node)
    if isinstance(held, GraphModule):
        return f"{text} {{{_describe_graph(held)}}}"
    if not partition.is_constant(held):
        return text
    with unset_fake_temporarily():  # dynamo's, around the compilation of a graph
        return f"{text} {held.item()}"


def _describe_graph(gm: GraphModule) -> str:
    return "\n".join(map(_describe, gm.graph.nodes))


def compile_graph(gm: GraphModule, kind: str, *, consumed: Collection[int] = ()) -> Callable[[list[Any]], Any]:
    """A callable for ``gm``: takes the list of its inputs, returns the list of its outputs.

    Args:
        kind: forward, backward or inference, for names.
        consumed: inputs that nobody reads after the call; their memory may be reused.
    """
    pieces = partition.split(gm)
    if len(pieces) == 1 and pieces[0].supported:
        return _program(gm, kind, consumed)
    return _boxed(partition.Chain(gm, [_piece(piece, kind) for piece in pieces]), ())


def _piece(piece: partition.Piece, kind: str) -> partition.Piece:
    if piece.supported:
        piece.call = _program(piece.gm, kind, ())
    return piece


def _program(gm: GraphModule, kind: str, consumed: Collection[int]) -> Callable[[list[Any]], Any]:
    constants = _lift_constants(gm)
    nodes = list(gm.graph.nodes)
    inputs = [n for n in nodes if n.op == "placeholder"]
    text = _describe_graph(gm)
    name = f"{kind}_{disk_cache.digest(text)[:12]}"
    insight.made(gm, name)
    rng = any(is_random(n.target) for n in nodes)
    written = sorted({inputs.index(n.args[0]) for n in nodes if n.target is aten.copy_.default})
    kinds = "".join("t" if isinstance(n.meta.get("val"), torch.Tensor) else "s" for n in inputs)

    def static() -> extension.CompiledGraph:
        lowering = functools.partial(lower.lower, gm, text, frozenset(consumed), rng)
        return extension.CompiledGraph(name, kinds, written, rng, lowering)

    def at(found: Mapping[sympy.Symbol, sympy.Integer]) -> extension.CompiledGraph:
        all_kinds = "".join(_kind(n) for n in inputs) + "o" * len(found)
        lowering = functools.partial(lower.lower_bounded, gm, text, frozenset(consumed), found)
        return extension.CompiledGraph(f"{name}_bounded", all_kinds, written, False, lowering)

    run = static() if rng or not bounds.is_symbolic(gm) else bounds.BoundedGraph(gm, name, at, static)
    return _boxed(run, constants)


def _kind(node: Node) -> str:
    """How a CompiledGraph at bounds takes an input."""
    val = node.meta.get("val")
    return "t" if isinstance(val, torch.Tensor) else "o" if isinstance(val, torch.SymInt) else "s"


def _boxed(run: Callable[[list[Any]], Any], constants: Sequence[torch.Tensor]) -> Callable[[list[Any]], Any]:
    """A function, because dynamo wraps the backward and asks functions only whether they take one list."""

    def call(args: list[Any]) -> Any:
        return run(args)

    def call_with_constants(args: list[Any]) -> Any:
        args += constants
        return run(args)

    chosen = call_with_constants if constants else call
    chosen._boxed_call = True  # type: ignore[attr-defined]  # AOTAutograd: takes one list, and empties it
    return chosen


def _lift_constants(gm: GraphModule) -> Sequence[torch.Tensor]:
    """Make tensors that the graph holds inputs of it, behind the others; a number stays in the program."""
    found: list[torch.Tensor] = []
    last = [n for n in gm.graph.nodes if n.op == "placeholder"]
    for node in [n for n in gm.graph.nodes if n.op == "get_attr"]:
        held = partition.held(node)
        if not isinstance(held, torch.Tensor) or partition.is_constant(held):
            continue
        with gm.graph.inserting_after(last[-1]) if last else gm.graph.inserting_before(None):
            new = gm.graph.placeholder(f"constant_{node.name}")
        new.meta["val"] = node.meta.get("val", held)
        last.append(new)
        node.replace_all_uses_with(new)
        gm.graph.erase_node(node)
        found.append(held)
    return found
