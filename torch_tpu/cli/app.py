"""``torch-tpu``: what is installed, what is cached, what an op becomes. ``--json`` everywhere."""

from __future__ import annotations

import json
import os
import platform
import re
import runpy
import sys
import time
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from torch_tpu import config
from torch_tpu.cli import explain as explaining
from torch_tpu.errors import TpuError
from torch_tpu.modes import op_table, stored
from torch_tpu.runtime import device, disk_cache, plugins

app = typer.Typer(
    name="torch-tpu", no_args_is_help=True, help="PyTorch on XLA devices.", pretty_exceptions_enable=False
)
cache = typer.Typer(no_args_is_help=True, help="Compiled programs on disk.")
app.add_typer(cache, name="cache")

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
_out = Console()


def _print(data: Any, as_json: bool, *tables: Table) -> None:
    if as_json:
        typer.echo(json.dumps(data, indent=1, default=str))
        return
    for table in tables:
        _out.print(table)


def _table(title: str, rows: dict[str, Any]) -> Table:
    table = Table(title=title, show_header=False, title_justify="left")
    for name, value in rows.items():
        table.add_row(name, str(value))
    return table


def _fail(message: str) -> typer.Exit:
    typer.echo(message, err=True)
    return typer.Exit(1)


# ---- doctor


def _cpu_flags() -> list[str]:
    wanted = ("avx2", "avx512f", "avx512_bf16", "amx_tile", "amx_bf16")
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    return [flag for flag in wanted if re.search(rf"\b{flag}\b", text)]


def _devices() -> list[dict[str, Any]]:
    found = []
    for index in range(device.device_count()):
        free, total = device.mem_get_info(index)
        found.append({"device": f"tpu:{index}", "kind": device.get_device_name(index), "free": free, "total": total})
    return found


@app.command()
def doctor(as_json: Json = False) -> None:
    """Versions, plugin, devices, cache and settings; a first program. Exit status 1 if the device does not work."""
    report: dict[str, Any] = {
        "versions": {
            "torch_tpu": version("torch_tpu"),
            "torch": torch.__version__,
            "python": platform.python_version(),
            "system": platform.platform(),
            "cpu": " ".join(_cpu_flags()),
        }
    }
    try:
        spec = plugins.choose()
        report["plugin"] = {"kind": spec.kind, "path": spec.path}
        if spec.kind != "none":
            result = (torch.ones(2, 2, device="tpu") @ torch.ones(2, 2, device="tpu")).sum().item()
            report["plugin"]["first program"] = "right" if result == 8 else f"wrong: {result} for 8.0"
            properties = device.get_device_properties(0)
            report["plugin"] |= {"platform": properties.platform, "version": properties.platform_version}
            report["devices"] = _devices()
    except (RuntimeError, ValueError) as e:  # all that the device raises
        report.setdefault("plugin", {})["error"] = str(e)
    report["cache"] = _cache_summary(disk_cache.entries())
    report["settings"] = {s.name: str(s.value) for s in config.SETTINGS.values() if s.is_set}
    rows = {
        d["device"]: f"{d['kind']}, {_size(d['free'])} of {_size(d['total'])} free" for d in report.get("devices", ())
    }
    tables = [_table(name.capitalize(), report[name]) for name in ("versions", "plugin")]
    tables += [_table("Devices", rows), _table("Cache", report["cache"]), _table("Settings", report["settings"])]
    _print(report, as_json, *(t for t in tables if t.row_count))
    if report["plugin"].get("first program") != "right":
        raise typer.Exit(1)


def _size(n: int) -> str:
    value = float(n)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} GiB"


# ---- cache


def _cache_summary(found: list[disk_cache.Entry]) -> dict[str, Any]:
    return {
        "folder": str(config.CACHE_DIR.value),
        "enabled": disk_cache.enabled(),
        "plans": sum(e.kind == "plan" for e in found),
        "programs": sum(e.kind == "exe" for e in found),
        "traces": sum(e.kind == "aot" for e in found),
        "bytes": sum(e.bytes for e in found),
        "limit": config.CACHE_BYTES.value,
    }


@cache.command("ls")
def cache_ls(limit: Annotated[int, typer.Option(help="Entries to show.")] = 20, as_json: Json = False) -> None:
    """The entries used last."""
    found = disk_cache.entries()
    summary = _cache_summary(found)
    table = Table("entry", "kind", "size", "last use", "what")
    rows = []
    for e in found[:limit]:
        what = (stored.describe_plan(e.name) or {}) if e.kind == "plan" else {}
        rows.append(asdict(e) | {"program": what.get("program", ""), "types": what.get("types", "")})
        ago = f"{(time.time() - e.used) / 3600:.1f} h ago"
        table.add_row(e.name[:12], e.kind, _size(e.bytes), ago, f"{rows[-1]['program']} {rows[-1]['types']}"[:80])
    _print({"summary": summary, "entries": rows}, as_json, _table("Cache", summary), table)


@cache.command("verify")
def cache_verify(
    repair: Annotated[bool, typer.Option(help="Remove what is damaged.")] = False, as_json: Json = False
) -> None:
    """Read every entry. Exit status 1 if one is damaged; it would never be used, only made anew."""
    bad = disk_cache.damaged()
    removed = [name for name in bad if repair and disk_cache.remove(name)]
    rows = {"entries": len(disk_cache.entries()), "damaged": len(bad), "removed": len(removed)}
    _print(rows | {"names": bad}, as_json, _table("Cache", rows))
    if len(bad) > len(removed):
        raise typer.Exit(1)


@cache.command("clear")
def cache_clear(
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False, as_json: Json = False
) -> None:
    """Remove all entries. Programs that run are not disturbed."""
    found = disk_cache.entries()
    if not yes:
        typer.confirm(f"Remove {len(found)} entries of {config.CACHE_DIR.value}?", abort=True)
    removed = sum(disk_cache.remove(e.name) for e in found)
    _print({"removed": removed, "left": len(found) - removed}, as_json, _table("Cache", {"removed": removed}))


@cache.command("explain")
def cache_explain(
    name: Annotated[str, typer.Argument(help="Start of an entry's name.")], as_json: Json = False
) -> None:
    """What an entry holds; of a plan also its StableHLO."""
    found = [e for e in disk_cache.entries() if e.name.startswith(name)]
    if len(found) != 1:
        raise _fail(
            f"{len(found)} entries begin with {name!r}.\n  Fix: give more of the name; `torch-tpu cache ls` shows them."
        )
    what = asdict(found[0]) | ((stored.describe_plan(found[0].name) or {}) if found[0].kind == "plan" else {})
    text = what.get("stablehlo", "")
    _print(what, as_json, _table("Entry", {k: v for k, v in what.items() if k != "stablehlo"}))
    if text and not as_json:
        typer.echo(text)


# ---- ops


@app.command()
def ops(pattern: Annotated[str, typer.Argument(help="Part of the op's name.")] = "", as_json: Json = False) -> None:
    """How each ATen overload is computed: by a rule, a decomposition, a composite kernel, C++ or the host."""
    found = {str(op): rung for rung, listed in op_table.table().items() for op in listed if pattern in str(op)}
    if not found:
        raise _fail(
            f"No overload of a kernel has {pattern!r} in its name.\n  Fix: ops that PyTorch splits are not listed."
        )
    table = Table("overload", "computed by")
    for name, rung in found.items():
        table.add_row(name, rung)
    _print(found, as_json, table)


@app.command()
def explain(
    op: Annotated[str, typer.Argument(help="An overload, such as aten.add.Tensor, or add.")],
    shapes: Annotated[list[str] | None, typer.Argument(help="Shapes of the tensors: 8x16, or 8x16:int64.")] = None,
    arg: Annotated[list[str] | None, typer.Option(help="Other arguments, name=value.")] = None,
    as_json: Json = False,
) -> None:
    """How an op is computed and why; with shapes also its StableHLO."""
    try:
        told = explaining.explain(op, shapes or [], arg or [])
    except (TpuError, ValueError, RuntimeError, TypeError, IndexError) as e:  # all that meta kernels raise
        raise _fail(str(e)) from None
    text = told.pop("stablehlo", "")
    _print(told | {"stablehlo": text}, as_json, _table(told["op"], told))
    if text and not as_json:
        typer.echo(text)


# ---- run


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def run(
    context: typer.Context,
    script: Annotated[
        Path, typer.Argument(exists=True, dir_okay=False, help="A Python program; its arguments follow.")
    ],
    mode: Annotated[str, typer.Option(help="Eager mode: strict, debug or fused.")] = "",
    plugin: Annotated[str, typer.Option(help="cpu, tpu, cuda or the path of a plugin.")] = "",
    fallback: Annotated[str, typer.Option(help="What an op on the CPU does: warn, error or silent.")] = "",
) -> None:
    """Run a program with settings; the program need not know of torch_tpu."""
    given = {"TORCH_TPU_EAGER_MODE": mode, "TORCH_TPU_PLUGIN": plugin, "TORCH_TPU_CPU_FALLBACK": fallback}
    os.environ.update({name: value for name, value in given.items() if value})
    for name in given:
        config.SETTINGS[name].forget()
    sys.argv = [str(script), *context.args]
    sys.path.insert(0, str(script.resolve().parent))
    runpy.run_path(str(script), run_name="__main__")
