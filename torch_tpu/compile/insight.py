"""What a user may see of compiled graphs: their FX text, their StableHLO, and why one got another program.

logger "torch_tpu.compile" (TORCH_LOGS=torch_tpu), TORCH_LOGS=recompiles, TORCH_TRACE, TORCH_TPU_DUMP_DIR
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any
from weakref import WeakKeyDictionary

from torch._guards import CompileContext, CompileId
from torch._logging._internal import getArtifactLogger, trace_structured_artifact
from torch.fx import GraphModule

from torch_tpu import config
from torch_tpu.modes.parameters import DEFERRED, OPTIONS_SHIFT, global_state
from torch_tpu.runtime import compiler

_KEPT = 64  # calls of a graph that a new one is compared with

log = logging.getLogger("torch_tpu.compile")
_recompiles = getArtifactLogger("torch._dynamo", "recompiles")

Form = Mapping[str, Mapping[str, str]]
"""What the program of a call depends on: per input, and of the global state, facts by name, the important first."""


@dataclass(slots=True)
class _History:
    name: str
    compile_id: CompileId | None
    forms: list[Form] = field(default_factory=list)
    programs: int = 0


_graphs: WeakKeyDictionary[GraphModule, _History] = WeakKeyDictionary()


def made(gm: GraphModule, name: str) -> None:
    """A graph became a callable: show it."""
    history = _graphs[gm] = _History(name, CompileContext.current_compile_id())
    trace_structured_artifact(f"torchtpu_fx_graph_{name}", "string", lambda: _text(gm), compile_id=history.compile_id)
    folder = config.DUMP_DIR.value
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.fx.txt").write_text(_text(gm), encoding="utf-8")


def _text(gm: GraphModule) -> str:
    return str(gm.graph.python_code("self", verbose=True, include_stride=True, include_device=True).src)


def lowered(gm: GraphModule, call: Any, stablehlo: str) -> None:
    """A call of ``gm`` (a MissCall) got a program: show it, and say why an earlier one does not do."""
    history = _graphs.get(gm)
    if history is None:
        return
    trace_structured_artifact(
        f"torchtpu_stablehlo_graph_{history.name}_{history.programs}",
        "string",
        lambda: stablehlo,
        compile_id=history.compile_id,
    )
    history.programs += 1
    names = [n.name for n in gm.graph.nodes if n.op == "placeholder"]
    form = _form(call, names)
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


def _form(call: Any, names: list[str]) -> Form:
    slots: dict[int, str] = {}
    form: dict[str, Mapping[str, str]] = {}
    for i, (name, arg) in enumerate(zip(names, call.args, strict=False)):  # behind them: numbers of symbols, operands
        part = f"input {i} ({name})"
        if arg is not None and arg[0] == "tensor":
            form[part] = _tensor(call, call.tensors[arg[1]], slots, part)
        else:
            form[part] = {"value": repr(arg if arg is None or arg[0] != "value" else arg[1])}
    state = global_state(call.state)
    facts = {f.name.replace("_", " "): str(getattr(state, f.name)) for f in fields(state)}
    facts["fused mode"] = str(bool(call.state & DEFERRED))
    facts["compiler options"] = str(dict(compiler.current(call.state >> OPTIONS_SHIFT)))
    form |= {f"the call, whose {k} counts,": {k: v} for k, v in facts.items()}
    return form


def _tensor(call: Any, t: tuple[Any, ...], slots: dict[int, str], part: str) -> Mapping[str, str]:
    dtype, sizes, strides, slot, conj, neg, _, _, plan = t
    stored, dims = call.slots[slot]
    shared = slots.setdefault(slot, part)
    return {
        "dtype": str(dtype),
        "sizes": str(list(sizes)),
        "strides": str(list(strides)),
        "flags": f"conj={conj} neg={neg}",
        "storage": "of its own" if shared == part else f"of {shared}",
        "view": "the whole storage" if plan is None else f"{plan[0]} {[tuple(w) for w in plan[2]]}",
        "stored form": f"{stored}{list(dims)}",
    }
