"""Plans and programs on disk: what makes a warm start neither lower nor compile.

Two entries a program. The plan, under a digest of the call and of everything that lowering reads; it holds the
StableHLO text. The executable, under a digest of that text and of everything that compiling reads: after an edit of a
rule, only programs whose text changed are compiled again.

    call ──digest──► plan entry ──digest of its text──► executable entry ──► Plan.serialized
             └─miss: lower, keep the plan                    └─miss: C++ compiles, calls back, keep the executable
"""

from __future__ import annotations

import functools
import json
import logging
import re
from pathlib import Path
from typing import Any

import torch
from torch._logging._internal import trace_structured_artifact

from torch_tpu import config
from torch_tpu.lowering.registry import RULES, RuleEntry
from torch_tpu.modes.parameters import DEFERRED, OPTIONS_SHIFT
from torch_tpu.modes.plan import Output, Plan
from torch_tpu.runtime import compiler, disk_cache, extension, hlo

_PACKAGE = Path(__file__).resolve().parents[1]
_SOURCES = ("lowering", "ir", "modes", "compile", "export")

log = logging.getLogger("torch_tpu")


# ---- keys


def _stable(x: Any) -> str:
    """Text that is equal in all processes for equal values. Raises TypeError for a type it does not know."""
    if x is None or isinstance(x, (bool, int, float, complex, str)):
        return repr(x)
    if isinstance(x, (tuple, list)):
        return f"[{','.join(map(_stable, x))}]"
    if isinstance(x, (torch.dtype, torch.layout, torch.memory_format)):
        return str(x)
    if isinstance(x, torch.device):
        return x.type  # programs are portable
    if isinstance(x, torch.Generator):
        return "generator"  # its state is an operand
    raise TypeError(f"{type(x).__name__} has no stable text")


@functools.cache
def _files_digest(files: frozenset[Path]) -> str:
    """Digest of sources; empty if they cannot be read or were edited after this process may have read them."""
    parts: list[str | bytes] = []
    try:
        for path in sorted(files):
            parts += (path.name, path.read_bytes())
            if path.stat().st_mtime_ns >= extension.LOADED_NS:
                return ""
    except OSError:  # made in a shell: its text is nowhere
        return ""
    return disk_cache.digest(*parts)


@functools.cache
def _own_files() -> frozenset[Path]:
    return frozenset(path for folder in _SOURCES for path in (_PACKAGE / folder).rglob("*.py"))


@functools.lru_cache(maxsize=1)
def _foreign_files(num_rules: int) -> frozenset[Path]:
    """Files outside the package that registered rules; ``num_rules`` only says when to look again."""
    return frozenset(path for entry in RULES.values() if (path := _file_of(entry)) not in _own_files())


def _file_of(entry: RuleEntry) -> Path:
    return Path(entry.where.rpartition(":")[0])


def rules_digest(entry: RuleEntry | None = None) -> str:
    """Digest of the source of all rules; empty if some of it is not known."""
    files = _foreign_files(len(RULES))
    if entry is not None and (own := _file_of(entry)) not in _own_files():
        files |= {own}
    digests = [_files_digest(_own_files()), *(_files_digest(frozenset((f,))) for f in sorted(files))]
    return "" if "" in digests else disk_cache.digest(*digests)


def plan_name(call: Any, entry: RuleEntry | None, graph: str = "") -> str:
    """Name of the plan's entry; empty if the call cannot be kept. ``graph``: the text of a compiled graph."""
    if not disk_cache.enabled():
        return ""
    sources = rules_digest(entry)
    if not sources:
        return ""
    state = call.state & ~DEFERRED & (1 << OPTIONS_SHIFT) - 1
    try:
        text = _stable((call.name, state, call.args, call.tensors, call.slots, call.operands))
    except TypeError:
        return ""
    return disk_cache.digest(text, graph, sources, disk_cache.build_fingerprint()) + ".plan"


# ---- plans as JSON


def _encode(plan: Plan) -> bytes:
    outputs = [
        [str(o.dtype).removeprefix("torch."), o.dims, o.slot, o.sizes, o.strides, o.count, o.count_dim]
        for o in plan.outputs
    ]
    fields = {
        "rung": plan.rung,
        "stablehlo": plan.stablehlo,
        "arg_slots": plan.arg_slots,
        "donated": plan.donated,
        "consumed": plan.consumed,
        "encodings": plan.encodings,
        "outputs": outputs,
        "returns": plan.returns,
        "resizes": plan.resizes,
        "counters": plan.counters,
    }
    return json.dumps(fields, separators=(",", ":")).encode()


def _return(r: list[Any]) -> tuple[Any, ...]:
    return ("list", [_return(item) for item in r[1]]) if r[0] == "list" else tuple(r)


def _decode(data: bytes) -> Plan:
    fields = json.loads(data)
    fields["outputs"] = [
        Output(getattr(torch, dtype), tuple(dims), slot, tuple(sizes), tuple(strides), count, count_dim)
        for dtype, dims, slot, sizes, strides, count, count_dim in fields["outputs"]
    ]
    fields["returns"] = [_return(r) for r in fields["returns"]]
    fields["resizes"] = [(tensor, tuple(sizes), tuple(strides)) for tensor, sizes, strides in fields["resizes"]]
    return Plan(**fields)


def find_plan(name: str) -> Plan | None:
    """The plan that was kept under ``name``, if any."""
    data = disk_cache.load(name) if name else None
    return None if data is None else _decode(data)


def describe_plan(name: str) -> dict[str, Any] | None:
    """What is kept under ``name``, for people: rung, types, results. None if it cannot be read."""
    data = disk_cache.peek(name)
    if data is None:
        return None
    plan = _decode(data)
    module = re.match(r"module @(\w+)", plan.stablehlo)
    return {
        "rung": plan.rung,
        "program": module[1] if module else "",
        "types": _signature(plan.stablehlo) if plan.stablehlo else "",
        "stablehlo": plan.stablehlo,
    }


def keep_plan(name: str, plan: Plan) -> None:
    """Keep ``plan`` for other processes. Nothing happens for an empty name."""
    if name:
        disk_cache.store(name, _encode(plan))


def attach_executable(plan: Plan) -> Plan:
    """Give ``plan`` the compiler options in force, and its compiled program from the disk, else a name to keep it under."""
    if plan.stablehlo:
        plan.compile_options = compiler.serialized()
    if plan.stablehlo and disk_cache.enabled():
        options = [plan.compile_options] if plan.compile_options else []
        plan.store_key = disk_cache.digest(plan.stablehlo, disk_cache.build_fingerprint(), *options) + ".exe"
        plan.serialized = disk_cache.load(plan.store_key) or b""
    if plan.stablehlo and (path := _dump_path(plan.stablehlo)) is not None:
        path.with_suffix(".mlir").write_text(plan.stablehlo, encoding="utf-8")
    return plan


# ---- what the user may see


def _dump_path(stablehlo: str) -> Path | None:
    """Where the dumps of this program go, without a suffix."""
    folder = config.DUMP_DIR.value
    if folder is None:
        return None
    name = re.match(r"module @(\w+)", stablehlo)
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"{name[1] if name else 'program'}_{disk_cache.digest(stablehlo)[:16]}"


def _write_optimized(path: Path, optimized: bytes) -> None:
    """Text, or for lack of a printer the bytes that one can print elsewhere."""
    text = hlo.text(optimized)
    if text is None:
        path.with_suffix(".hlo.pb").write_bytes(optimized)
    else:
        path.with_suffix(".hlo.txt").write_text(text, encoding="utf-8")


@functools.cache
def _show_log() -> None:
    log.setLevel(logging.INFO)
    if not log.hasHandlers():
        log.addHandler(logging.StreamHandler())


def _signature(stablehlo: str) -> str:
    """Parameters and results of a module, as ``(f32[8,16]) -> (f32[])``."""
    main = next(line for line in stablehlo.splitlines() if "@main" in line)

    def types(part: str) -> str:
        found = (t.rpartition("x") for t in re.findall(r"tensor<(.*?)>[,:){ ]", part))
        return "(" + ", ".join(f"{dtype}[{dims.replace('x', ',')}]" for dims, _, dtype in found) + ")"

    args, _, results = main.partition(") -> ")
    return f"{types(args + ')')} -> {types(results)}"


def compiled(op: str, stablehlo: str, store_key: str, executable: bytes, optimized: bytes, duration_ms: float) -> None:
    """C++ compiled a program of ``op``: log it and keep it. ``optimized``: as the plugin gives it, if it was asked."""
    if config.DEBUG.value >= 1:
        _show_log()
    if log.isEnabledFor(logging.INFO):
        log.info("compiled %s %s in %.1f ms", op, _signature(stablehlo), duration_ms)
    if optimized and (path := _dump_path(stablehlo)) is not None:
        _write_optimized(path, optimized)
    if optimized and not op.startswith("aten."):
        trace_structured_artifact(f"torchtpu_optimized_hlo_{op}", "string", lambda: hlo.text(optimized))
    if store_key:
        disk_cache.store(store_key, executable)
