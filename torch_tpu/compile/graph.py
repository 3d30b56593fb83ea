"""A functional FX graph as a callable of its flat inputs.

A graph whose nodes all have rules is one program. Else it is cut: what has no rule (opaque custom ops, ops of other
devices) runs eagerly between two programs.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx import GraphModule, Node

from torch_tpu.compile import bounds, insight, lower, partition
from torch_tpu.compile.random import is_random
from torch_tpu.runtime import compiler, disk_cache, extension

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


def load_rules() -> None:
    """Fill the tables of rules. A warm start does without, and without the half second that it takes."""
    importlib.import_module("torch_tpu.lowering.rules")
    importlib.import_module("torch_tpu.lowering.bounded_rules")


@dataclass(frozen=True, slots=True)
class Program:
    """All that the calls of one program need of its graph; what a miss needs besides is the graph itself.

    ``text`` is all of the graph that the program depends on, ``consumed`` and ``written`` are positions of inputs,
    ``kinds`` is what a CompiledGraph says of them, ``constants`` are passed behind them.
    """

    name: str
    inputs: list[str]
    text: str
    kinds: str
    written: list[int]
    rng: bool
    consumed: frozenset[int]
    constants: Sequence[torch.Tensor]


def compile_graph(gm: GraphModule, kind: str, *, consumed: Collection[int] = ()) -> Callable[[list[Any]], Any]:
    """A callable for ``gm``: takes the list of its inputs, returns the list of its outputs.

    Args:
        kind: forward, backward or inference, for names.
        consumed: inputs that nobody reads after the call; their memory may be reused.
    """
    load_rules()
    pieces = partition.split(gm)
    if len(pieces) == 1 and pieces[0].supported:
        return _whole(gm, kind, consumed)
    return _boxed(partition.Chain(gm, [_piece(piece, kind) for piece in pieces]), ())


def as_program(gm: GraphModule, kind: str, consumed: Collection[int]) -> Program | None:
    """``gm`` as one program that needs no graph to be called; None if it is several, or has symbolic sizes.

    Constants become inputs of ``gm``.
    """
    load_rules()
    pieces = partition.split(gm)
    if len(pieces) != 1 or not pieces[0].supported or bounds.is_symbolic(gm):
        return None
    return _program(gm, kind, consumed)


def _whole(gm: GraphModule, kind: str, consumed: Collection[int]) -> Callable[[list[Any]], Any]:
    program = _program(gm, kind, consumed)
    if bounds.is_symbolic(gm) and not program.rng:
        return _start_bounded(program, gm)
    return start(program, gm)


def _piece(piece: partition.Piece, kind: str) -> partition.Piece:
    if piece.supported:
        piece.call = _whole(piece.gm, kind, ())
    return piece


def with_options(run: Callable[[list[Any]], Any], options: compiler.Options) -> Callable[[list[Any]], Any]:
    """``run`` with options of XLA in force."""
    if not options:
        return run

    def run_with_options(args: list[Any]) -> Any:
        with compiler.in_force(options):
            return run(args)

    run_with_options._boxed_call = True  # type: ignore[attr-defined]  # as in _boxed
    return run_with_options


def _program(gm: GraphModule, kind: str, consumed: Collection[int]) -> Program:
    constants = _lift_constants(gm)
    nodes = list(gm.graph.nodes)
    inputs = [n for n in nodes if n.op == "placeholder"]
    text = _describe_graph(gm)
    name = f"{kind}_{disk_cache.digest(text)[:12]}"
    insight.made(gm, name)
    return Program(
        name=name,
        inputs=[n.name for n in inputs],
        text=text,
        kinds="".join("t" if isinstance(n.meta.get("val"), torch.Tensor) else "s" for n in inputs),
        written=sorted({inputs.index(n.args[0]) for n in nodes if n.target is aten.copy_.default}),
        rng=any(is_random(n.target) for n in nodes),
        consumed=frozenset(consumed),
        constants=constants,
    )


def start(
    program: Program, gm: GraphModule | None, load: Callable[[], GraphModule] | None = None
) -> Callable[[list[Any]], Any]:
    """A callable for ``program``. Its graph is ``gm`` or what ``load`` gives; only a miss of all caches asks."""
    source = lower.Source(insight.History(program.name, program.inputs), gm, load)
    return _boxed(_static(program, source), program.constants)


def _static(program: Program, source: lower.Source) -> extension.CompiledGraph:
    miss = functools.partial(lower.lower, source, program.text, program.consumed, program.rng)
    return extension.CompiledGraph(program.name, program.kinds, program.written, program.rng, miss)


def _start_bounded(program: Program, gm: GraphModule) -> Callable[[list[Any]], Any]:
    source = lower.Source(insight.History(program.name, program.inputs), gm)
    kinds = "".join(_kind(n) for n in gm.graph.nodes if n.op == "placeholder")

    def at(found: Mapping[sympy.Symbol, sympy.Integer]) -> extension.CompiledGraph:
        miss = functools.partial(lower.lower_bounded, source, program.text, program.consumed, found)
        name = f"{program.name}_bounded"
        return extension.CompiledGraph(name, kinds + "o" * len(found), program.written, False, miss)

    run = bounds.BoundedGraph(gm, program.name, at, lambda: _static(program, source))
    return _boxed(run, program.constants)


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
