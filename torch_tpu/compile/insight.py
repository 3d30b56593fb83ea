"""What a user may see of compiled graphs: their FX text, their StableHLO, and why one got another program.

logger "torch_tpu.compile" (TORCH_LOGS=torch_tpu), TORCH_LOGS=recompiles, TORCH_TRACE, TORCH_TPU_DUMP_DIR
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import sympy
import torch
from torch._guards import CompileContext, CompileId
from torch._logging._internal import getArtifactLogger, trace_structured_artifact
from torch.fx import GraphModule, Node

from torch_tpu import config
from torch_tpu.lowering.size_math import expression
from torch_tpu.modes.parameters import DEFERRED, OPTIONS_SHIFT, global_state
from torch_tpu.runtime import compiler

_KEPT = 64  # calls of a graph that a new one is compared with

log = logging.getLogger("torch_tpu.compile")
_recompiles = getArtifactLogger("torch._dynamo", "recompiles")

Form = Mapping[str, Mapping[str, str]]
"""What the program of a call depends on: per input, and of the global state, facts by name, the important first."""


@dataclass(slots=True)
class History:
    """What a graph was called with so far: ``inputs`` are the names of its inputs."""

    name: str
    inputs: Sequence[str]
    compile_id: CompileId | None = field(default_factory=CompileContext.current_compile_id)
    forms: list[Form] = field(default_factory=list)
    programs: int = 0


def made(gm: GraphModule, name: str) -> None:
    """A graph was traced: show it."""
    trace_structured_artifact(f"torchtpu_fx_graph_{name}", "string", lambda: _text(gm))
    folder = config.DUMP_DIR.value
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.fx.txt").write_text(_text(gm), encoding="utf-8")


def _text(gm: GraphModule) -> str:
    return str(gm.graph.python_code("self", verbose=True, include_stride=True, include_device=True).src)


def lowered(
    history: History,
    call: Any,
    stablehlo: str,
    bounds: Mapping[sympy.Symbol, sympy.Integer],
    inputs: Sequence[Node] = (),
) -> None:
    """A call of a graph (a MissCall) got a program: show it, and say why an earlier one does not do.

    Args:
        bounds: of the symbolic sizes, if the program is for all sizes up to them; then ``inputs`` shows them.
    """
    trace_structured_artifact(
        f"torchtpu_stablehlo_graph_{history.name}_{history.programs}",
        "string",
        lambda: stablehlo,
        compile_id=history.compile_id,
    )
    history.programs += 1
    form = _form(call, history.inputs, inputs, bounds)
    if history.forms:
        message = f"{history.name}: program {history.programs}, because " + explain(form, history.forms)
        log.info("%s", message)
        _recompiles.debug("%s", message)
    history.forms = [*history.forms[1 - _KEPT :], form]


def explain(new: Form, earlier: list[Form]) -> str:
    """How ``new`` differs from the nearest of ``earlier``, in words."""
    differences = [list(_differences(new, old)) for old in earlier]
    nearest = min(differences, key=len)
    return "; ".join(nearest) if nearest else "an earlier one was dropped"


def _differences(new: Form, old: Form) -> Iterator[str]:
    """One a part: of an input, the first fact that differs, for it brings the others along."""
    for part, facts in new.items():
        before = old.get(part, {})
        for name in dict.fromkeys([*facts, *before]):
            if facts.get(name) != before.get(name):
                yield f"{part} has {name} {facts.get(name, 'none')}, before {before.get(name, 'none')}"
                break


def _form(
    call: Any, names: Sequence[str], inputs: Sequence[Node], bounds: Mapping[sympy.Symbol, sympy.Integer]
) -> Form:
    slots: dict[int, str] = {}
    form: dict[str, Mapping[str, str]] = {
        _where(symbol, inputs): {"the bound": str(bound)} for symbol, bound in bounds.items()
    }
    for i, (name, arg) in enumerate(zip(names, call.args, strict=False)):  # behind them: numbers of symbols, operands
        part = f"input {i} ({name})"
        if arg is not None and arg[0] == "tensor":
            is_bounded = bool(bounds) and bool(_symbols(inputs[i]))
            form[part] = _tensor(call, call.tensors[arg[1]], slots, part, is_bounded=is_bounded)
        else:
            form[part] = {"value": repr(arg if arg is None or arg[0] != "value" else arg[1])}
    state = global_state(call.state)
    facts = {f.name.replace("_", " "): str(getattr(state, f.name)) for f in fields(state)}
    facts["fused mode"] = str(bool(call.state & DEFERRED))
    facts["compiler options"] = str(dict(compiler.current(call.state >> OPTIONS_SHIFT)))
    form |= {f"the call, whose {k} counts,": {k: v} for k, v in facts.items()}
    return form


def _symbols(node: Node) -> list[Any]:
    """The symbol of each dim of an input; a number for the others."""
    val = node.meta.get("val")
    dims = [expression(n) for n in val.shape] if isinstance(val, torch.Tensor) else []
    return dims if any(n.free_symbols for n in dims) else []


def _where(symbol: sympy.Symbol, inputs: Sequence[Node]) -> str:
    """The first dim that has this size."""
    found = (f"dim {dim} of {n.name}" for n in inputs for dim, size in enumerate(_symbols(n)) if size == symbol)
    return next(found, f"the size {symbol}")


def _tensor(call: Any, t: tuple[Any, ...], slots: dict[int, str], part: str, *, is_bounded: bool) -> Mapping[str, str]:
    dtype, sizes, strides, slot, conj, neg, _, _, plan = t
    stored, dims = call.slots[slot]
    shared = slots.setdefault(slot, part)
    facts = {"dtype": str(dtype)}
    if not is_bounded:  # else it is the room for its bound
        facts |= {"sizes": str(list(sizes)), "strides": str(list(strides))}
    facts["flags"] = f"conj={conj} neg={neg}"
    facts["storage"] = "of its own" if shared == part else f"of {shared}"
    if not is_bounded:
        facts["view"] = "the whole storage" if plan is None else f"{plan[0]} {[tuple(w) for w in plan[2]]}"
        facts["stored form"] = f"{stored}{list(dims)}"
    return facts
