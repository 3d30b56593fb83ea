"""What one op becomes, without running it."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from typing import Any

import torch
from torch._ops import OpOverload

from torch_tpu.ir.builder import Builder
from torch_tpu.ir.types import TensorType
from torch_tpu.lowering import decompose
from torch_tpu.lowering.driver import lower_graph, lower_node
from torch_tpu.lowering.registry import KEYED, RULES, GlobalState
from torch_tpu.lowering.siblings import form_of
from torch_tpu.modes.describe import describe
from torch_tpu.modes.host_ops import HOST

_SHAPE = re.compile(r"(scalar|\d+(?:x\d+)*)(?::(\w+))?")


def find(name: str) -> OpOverload:
    """The overload that ``aten.add.Tensor``, ``add.Tensor`` or ``add`` (the first one) names.

    Raises:
        ValueError: there is none, with the overloads that there are.
    """
    parts = name.removeprefix("aten.").removeprefix("aten::").split(".")
    packet = getattr(torch.ops.aten, parts[0], None)
    if packet is None:
        raise ValueError(f"aten has no op {parts[0]!r}.\n  Fix: `torch-tpu ops {parts[0][:4]}` lists names like it.")
    last = parts[1] if len(parts) > 1 else packet.overloads()[0]
    if last not in packet.overloads():
        raise ValueError(f"aten.{parts[0]} has the overloads {', '.join(packet.overloads())}, not {last!r}.")
    found: OpOverload = getattr(packet, last)
    return found


def _tensor(text: str) -> torch.Tensor:
    match = _SHAPE.fullmatch(text)
    dtype = getattr(torch, match[2] or "float32", None) if match else None
    if match is None or not isinstance(dtype, torch.dtype):
        raise ValueError(f"{text!r} is no shape.\n  Fix: write 8x16, 8x16:int64, or scalar for a tensor without dims.")
    sizes = [] if match[1] == "scalar" else [int(n) for n in match[1].split("x")]
    return torch.empty(sizes, dtype=dtype, device="meta")


def _value(text: str) -> Any:
    if text.startswith("torch."):
        return getattr(torch, text.removeprefix("torch."), text)
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _arguments(op: OpOverload, shapes: Sequence[str], given: Sequence[str]) -> dict[str, Any]:
    tensors = [_tensor(s) for s in shapes]
    named = {name: _value(value) for name, _, value in (g.partition("=") for g in given)}
    values: dict[str, Any] = {}
    for a in op._schema.arguments:
        kind = str(a.type)
        if a.name in named:
            values[a.name] = named.pop(a.name)
        elif kind.startswith("List[Tensor") and tensors:
            values[a.name], tensors = tensors, []
        elif "Tensor" in kind and tensors:
            values[a.name] = tensors.pop(0)
        elif a.has_default_value():
            values[a.name] = a.default_value
        else:
            raise ValueError(
                f"{op} needs {a.name} ({kind}).\n  Fix: give a shape for a tensor, else --arg {a.name}=value."
            )
    if tensors or named:
        raise ValueError(f"{op} takes no {', '.join(named) or 'more tensors'}: {op._schema}")
    return values


def _lower(functional: OpOverload, arguments: dict[str, Any]) -> tuple[str, list[str]]:
    """The module's text, and the ops that the op was split into (none for a rule)."""
    b, state = Builder(), GlobalState(default_dtype=torch.get_default_dtype())
    if functional not in RULES:
        graph, sources = decompose.trace(functional, arguments)
        flat = [arguments[s] if isinstance(s, str) else arguments[s[0]][s[1]] for s in sources]
        outs = lower_graph(b, graph, [b.arg(TensorType.of(t)) for t in flat], state=state)[0]
        parts = [str(n.target) for n in graph.graph.nodes if n.op == "call_function"]
        return b.module("explain", [o for o in outs if o is not None]), parts

    def operand(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return b.arg(TensorType.of(value))
        return [operand(v) for v in value] if isinstance(value, list) else value

    result = functional(**arguments)
    types = [TensorType.of(t) for t in (result if isinstance(result, (tuple, list)) else [result])]
    names = [a.name for a in functional._schema.arguments if not a.kwarg_only]
    args = [operand(arguments[name]) for name in names]
    kwargs = {k: operand(v) for k, v in arguments.items() if k not in names}
    results = lower_node(b, functional, types, args, kwargs, state=state)
    assert isinstance(results, tuple), "a data-dependent rule has no fixed text"
    return b.module("explain", [o for o in results if o is not None]), []


def explain(name: str, shapes: Sequence[str], given: Sequence[str]) -> dict[str, Any]:
    """How the op is computed, and its StableHLO (``stablehlo``) if there are shapes or arguments.

    Raises:
        ValueError: no such op, or arguments that do not fit it.
        RuntimeError: what the op's meta kernel raises for these arguments.
    """
    op = find(name)
    told: dict[str, Any] = {"op": str(op), "schema": str(op._schema)}
    if op in HOST:
        return told | {"computed by": "the host", "because": HOST[op]}
    if torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "CompositeImplicitAutograd"):
        return told | {"computed by": "PyTorch, which splits it into other ops before the device sees it"}
    form = form_of(op)
    rung = describe(str(op)).rung
    if form is None or rung not in ("program", "functional"):
        return told | {"computed by": {"composite": "PyTorch's composite kernel, on the device"}.get(rung, rung)}
    if form.functional is not op:
        told["functional form"] = str(form.functional)
    entry = RULES.get(form.functional)
    told["computed by"] = "a decomposition" if entry is None else "a rule"
    if entry is not None:
        told["rule"] = entry.where
        if keyed := [n for n, policy in entry.scalars.items() if policy is KEYED]:
            told["compiles anew for each value of"] = ", ".join(keyed)
    if shapes or given:
        if entry is not None and (entry.rng or entry.dynamic):
            told["stablehlo"] = ""
            told["note"] = "the text of random and data-dependent ops is not shown; TORCH_TPU_DUMP_DIR keeps it"
        else:
            told["stablehlo"], parts = _lower(form.functional, _arguments(form.functional, shapes, given))
            if parts:
                told["split into"] = ", ".join(dict.fromkeys(parts))
    return told
