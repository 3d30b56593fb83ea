"""Higher-order ops that are no control flow, written out in a graph before it is cut into programs.

PyTorch defines each of these by a plain computation: a region that is called (``invoke_subgraph``), flex attention and
its backward, ``associative_scan``. That is traced, with what is known of the operands, and put in the place of the op.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch._C import DispatchKey
from torch._guards import detect_fake_mode
from torch._higher_order_ops.associative_scan import associative_scan_op
from torch._higher_order_ops.flex_attention import flex_attention, flex_attention_backward
from torch._higher_order_ops.invoke_subgraph import invoke_subgraph
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_arg
from torch.utils._pytree import tree_flatten, tree_unflatten

from torch_tpu.compile.partition import graphs, held, symbols

aten = torch.ops.aten


def _definition(op: Any) -> Callable[..., Any] | None:
    if op is invoke_subgraph:
        return lambda gm, name, *operands: gm(*operands)
    if op in (flex_attention, flex_attention_backward, associative_scan_op):
        return op.py_kernels[DispatchKey.CompositeExplicitAutograd]  # type: ignore[no-any-return]
    return None


Decompositions = Mapping[Any, Callable[..., Any]]


def expand(gm: GraphModule, decompositions: Decompositions) -> None:
    """Write out these ops in ``gm``, in place, and in the graphs inside. ``decompositions`` are those of the backend."""
    for node in list(gm.graph.nodes):
        if node.op != "call_function":
            continue
        for inner in graphs(node):
            expand(inner, decompositions)
        definition = _definition(node.target)
        if definition is not None and not (node.target is invoke_subgraph and _is_impure(node)):
            traced, operands = _trace(node, definition, decompositions)
            _inline(node, traced, operands)


def _is_impure(node: Node) -> bool:
    """Whether the graph of ``node`` writes to its inputs, or has sizes that depend on data."""
    known = symbols(node.all_input_nodes)
    return any(n.target is aten.copy_.default or symbols([n]) - known for gm in graphs(node) for n in gm.graph.nodes)


def _trace(
    node: Node, definition: Callable[..., Any], decompositions: Decompositions
) -> tuple[GraphModule, list[Node]]:
    """The ``definition`` of the op of ``node``, as a functional graph of the nodes that are returned with it."""
    leaves, spec = tree_flatten((node.args, node.kwargs))
    operands = list(dict.fromkeys(n for n in leaves if isinstance(n, Node) and n.op != "get_attr"))
    constants = {n: held(n) for n in leaves if isinstance(n, Node) and n.op == "get_attr"}

    def run(*given: Any) -> Any:
        values = constants | dict(zip(operands, given, strict=True))
        args, kwargs = tree_unflatten([values[n] if isinstance(n, Node) else n for n in leaves], spec)
        return definition(*args, **kwargs)

    examples = [n.meta["val"] for n in operands]
    if node.target is flex_attention_backward:  # gives a captured tensor a gradient if that says it wants one
        examples = [t.detach().requires_grad_(t.is_floating_point()) for t in examples]
    table = {**decompositions, torch.ops.flex_lib.zeros_and_scatter.default: _zeros_and_scatter}
    with detect_fake_mode(examples) or nullcontext(), torch.no_grad():
        traced = make_fx(run, decomposition_table=table)(*examples)
    _make_functional(traced)
    traced.graph.eliminate_dead_code()  # vmap reads shapes from rows it makes for that
    return traced, operands


def _make_functional(gm: GraphModule) -> None:
    """The definitions copy their results to tensors made for that, of the right strides; nothing else is written."""
    for node in gm.graph.nodes:
        if node.target is aten.copy_.default:
            node.target = aten.copy.default
            node.args[0].replace_all_uses_with(node, delete_user_cb=lambda user, copy=node: user is not copy)


def _zeros_and_scatter(shape: Sequence[int], indices: Sequence[torch.Tensor], values: torch.Tensor) -> torch.Tensor:
    """The gradient of reading a captured tensor at ``indices``, as flex attention writes it."""
    return aten.index_put.default(values.new_zeros(shape), indices, values, accumulate=True)  # type: ignore[no-any-return]


def _inline(node: Node, inner: GraphModule, operands: Sequence[Node]) -> None:
    """Put the nodes of ``inner`` in the place of ``node``, with ``operands`` for its placeholders."""
    gm, graph = node.graph.owning_module, node.graph
    placeholders = (n for n in inner.graph.nodes if n.op == "placeholder")
    copies: dict[Node, Any] = dict(zip(placeholders, operands, strict=True))
    with graph.inserting_before(node):
        for n in [n for n in inner.graph.nodes if n.op == "get_attr"]:
            name, value = f"{node.name}_{n.target}".replace(".", "_"), held(n)
            if isinstance(value, torch.Tensor) and not value.dim():
                with unset_fake_temporarily():  # dynamo's
                    value = value.cpu()  # a number of the program, and no input of it
            setattr(gm, name, value)
            copies[n] = graph.create_node("get_attr", name)
            copies[n].meta = dict(n.meta)
        results = graph.graph_copy(inner.graph, copies)
    read = [n for n in node.all_input_nodes if n.op == "get_attr"]
    # What torch says of the storages of regions is that of another call of the same graph.
    _replace(node, results, set() if node.target is invoke_subgraph else set(copies.values()) - set(operands))
    for n in read:
        if not n.users:
            graph.erase_node(n)


def _replace(node: Node, value: Any, new: set[Node]) -> None:
    """Let the users of ``node`` use ``value``, and those of its items the items of that.

    A value that is ``new`` here takes what the graph around knows of the result: what shares its storage.
    """
    if isinstance(value, Node) and value in new:
        value.meta["val"] = node.meta["val"]
    for user in list(node.users):
        if isinstance(value, (tuple, list)):
            _replace(user, value[user.args[1]], new)  # type: ignore[index]
        else:
            user.args = map_arg(user.args, lambda n: value if n is node else n)
            user.kwargs = map_arg(user.kwargs, lambda n: value if n is node else n)
    node.graph.erase_node(node)
