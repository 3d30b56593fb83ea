"""Every setting of the package, in one table. The only module that reads the environment.

A setting is read when it is first asked for, not at import: launchers set variables between importing torch and first
using the device. The answer is remembered, so a later change of the variable has no effect. A variable that is set to
nothing counts as not set. docs/env.md is printed from this table.
"""

from __future__ import annotations

import difflib
import enum
import os
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

T = TypeVar("T")

PREFIX = "TORCH_TPU_"


class Stage(enum.Enum):
    """What a user may expect of a setting."""

    STABLE = "kept for at least two releases after a deprecation warning"
    EXPERIMENTAL = "may change in any release"
    INTERNAL = "for developers and tests; no promise"
    EXTERNAL = "belongs to another program; we only follow it"


SETTINGS: dict[str, Setting[Any]] = {}


@dataclass(slots=True, kw_only=True)
class Setting(Generic[T]):
    """One environment variable.

    ``parse`` turns its text into the value, or raises ValueError with what it wanted. ``default`` gives the value when
    the variable is not set; ``shown_default`` is how the docs write it.
    """

    name: str
    default: Callable[[], T]
    shown_default: str
    parse: Callable[[str], T]
    help: str
    stage: Stage = Stage.STABLE
    # At most one value; empty before the first read. Threads that race compute the same value twice, no harm.
    _read: list[T] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.name in SETTINGS:
            raise TypeError(f"{self.name} is declared twice")
        SETTINGS[self.name] = self

    @property
    def value(self) -> T:
        """The value, from the environment at the first call.

        Raises:
            ValueError: the variable holds something else than what the setting takes.
        """
        memo = self._read
        if not memo:
            memo = self._read = [self._parsed(os.environ.get(self.name, ""))]
        return memo[0]

    @property
    def is_set(self) -> bool:
        """Whether the environment names a value, so that it must win over a guess."""
        return bool(os.environ.get(self.name))

    def _parsed(self, text: str) -> T:
        if not text:
            return self.default()
        try:
            return self.parse(text)
        except ValueError as e:
            raise ValueError(f"{self.name}={text!r}: {e}.\n  {self.name}: {self.help}") from None

    def forget(self) -> None:
        """Read the environment again at the next use. For tests."""
        self._read = []

    @contextmanager
    def override(self, value: T) -> Iterator[None]:
        """Set the value for a block. For tests: other threads see it too."""
        old, self._read = self._read, [value]
        try:
            yield
        finally:
            self._read = old


# ---- parsers


def flag(text: str) -> bool:
    """Parse ``0`` or ``1``."""
    if text not in ("0", "1"):
        raise ValueError("want 0 or 1")
    return text == "1"


def one_of(*names: str) -> Callable[[str], str]:
    """Parser of a fixed set of words."""

    def parse(text: str) -> str:
        if text not in names:
            raise ValueError(f"want {', '.join(names[:-1])} or {names[-1]}")
        return text

    return parse


def integer(low: int, high: int | None = None) -> Callable[[str], int]:
    """Parser of a whole number of at least ``low`` and, if given, at most ``high``."""
    wanted = f"want a whole number of at least {low}" if high is None else f"want a whole number from {low} to {high}"

    def parse(text: str) -> int:
        try:
            n = int(text)
        except ValueError:
            raise ValueError(wanted) from None
        if n < low or (high is not None and n > high):
            raise ValueError(wanted)
        return n

    return parse


def path(text: str) -> Path:
    """Parse a path; ``~`` is the home folder. Made absolute, so that a later chdir does not move it."""
    return Path(os.path.abspath(os.path.expanduser(text)))


PLUGINS = ("auto", "cpu", "tpu", "cuda", "none")


def plugin(text: str) -> str | Path:
    """Parse one of ``PLUGINS``, or the path of a PJRT plugin: anything with a slash in it or that ends in .so."""
    if text in PLUGINS:
        return text
    if os.sep not in text and not text.endswith(".so"):
        raise ValueError(f"want {', '.join(PLUGINS)} or the path of a PJRT plugin (.so)")
    return path(text)


def _user_cache_dir() -> Path:
    """``$XDG_CACHE_HOME/torch_tpu``, else ``~/.cache/torch_tpu``; a user without a home gets a temporary folder."""
    xdg = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(xdg):  # the specification says to ignore relative ones
        return Path(xdg, "torch_tpu")
    home = os.path.expanduser("~")
    if os.path.isabs(home):
        return Path(home, ".cache", "torch_tpu")
    return Path(tempfile.gettempdir(), f"torch_tpu-{os.getuid()}")


# ---- the table

PLUGIN: Setting[str | Path] = Setting(
    name="TORCH_TPU_PLUGIN",
    default=lambda: "auto",
    shown_default="auto",
    parse=plugin,
    help="Which PJRT plugin runs the device: auto, cpu, tpu, cuda, none (no device), or the path of a plugin (.so).",
)
TPU_LIBRARY_PATH: Setting[Path | None] = Setting(
    name="TPU_LIBRARY_PATH",
    default=lambda: None,
    shown_default="not set",
    parse=path,
    help="Path of libtpu.so; libtpu's own variable. Used when the plugin is tpu.",
    stage=Stage.EXTERNAL,
)
XLA_FLAGS: Setting[str] = Setting(
    name="XLA_FLAGS",
    default=str,
    shown_default="not set",
    parse=str,
    help="Options of XLA; the plugin's own variable. Programs on disk are told apart by it.",
    stage=Stage.EXTERNAL,
)
LIBTPU_INIT_ARGS: Setting[str] = Setting(
    name="LIBTPU_INIT_ARGS",
    default=str,
    shown_default="not set",
    parse=str,
    help="Options of libtpu; its own variable. Programs on disk are told apart by it.",
    stage=Stage.EXTERNAL,
)
TRACE: Setting[Path | None] = Setting(
    name="TORCH_TRACE",
    default=lambda: None,
    shown_default="not set",
    parse=path,
    help="Folder of PyTorch's structured trace, for tlparse; PyTorch's own variable. Gets the FX text, StableHLO and "
    "optimised HLO of compiled graphs too.",
    stage=Stage.EXTERNAL,
)
CPU_DEVICES: Setting[int] = Setting(
    name="TORCH_TPU_CPU_DEVICES",
    default=lambda: 1,
    shown_default="1",
    parse=integer(1, 64),
    help="How many devices the cpu plugin shows, 1 to 64.",
)
HOST_KERNELS: Setting[bool] = Setting(
    name="TORCH_TPU_HOST_KERNELS",
    default=lambda: True,
    shown_default="1",
    parse=flag,
    help="1 lets programs of the cpu plugin call PyTorch's own CPU kernels where they are faster (products), "
    "0 leaves everything to XLA.",
)
CPU_FALLBACK: Setting[str] = Setting(
    name="TORCH_TPU_CPU_FALLBACK",
    default=lambda: "warn",
    shown_default="warn",
    parse=one_of("warn", "error", "silent"),
    help="What an op without rule, decomposition or composite kernel does: run on the CPU with one warning an op "
    "(warn), raise (error), or run on the CPU without a word (silent).",
)
EAGER_MODE: Setting[str] = Setting(
    name="TORCH_TPU_EAGER_MODE",
    default=lambda: "strict",
    shown_default="strict",
    parse=one_of("strict", "debug", "fused"),
    help="How eager ops run: launched at once (strict), waited for one by one and checked (debug), or recorded and run "
    "as one program when a value is needed (fused). torch.tpu.eager_mode changes it.",
)
DEBUG: Setting[int] = Setting(
    name="TORCH_TPU_DEBUG",
    default=lambda: 0,
    shown_default="0",
    parse=integer(0, 5),
    help="How much is checked and logged, 0 to 5; see docs/debugging.md for the ladder.",
)
DUMP_DIR: Setting[Path | None] = Setting(
    name="TORCH_TPU_DUMP_DIR",
    default=lambda: None,
    shown_default="not set",
    parse=path,
    help="Folder that gets the StableHLO of each program, the FX text of compiled graphs, and the optimised HLO of what is "
    "compiled in this process; nothing is written when it is not set.",
)
CACHE: Setting[bool] = Setting(
    name="TORCH_TPU_CACHE",
    default=lambda: True,
    shown_default="1",
    parse=flag,
    help="1 keeps compiled programs on disk, 0 does not.",
)
CACHE_DIR: Setting[Path] = Setting(
    name="TORCH_TPU_CACHE_DIR",
    default=_user_cache_dir,
    shown_default="$XDG_CACHE_HOME/torch_tpu or ~/.cache/torch_tpu",
    parse=path,
    help="Folder of the disk cache.",
)
CACHE_BYTES: Setting[int] = Setting(
    name="TORCH_TPU_CACHE_BYTES",
    default=lambda: 4 << 30,
    shown_default="4294967296 (4 GiB)",
    parse=integer(0),
    help="Size limit of the disk cache in bytes; the entries used longest ago go first.",
)
CACHE_TRUST: Setting[bool] = Setting(
    name="TORCH_TPU_CACHE_TRUST",
    default=lambda: False,
    shown_default="0",
    parse=flag,
    help="1 also loads cache entries that another user owns. An entry is native code: only for folders you trust.",
)
MAX_PROGRAMS: Setting[int] = Setting(
    name="TORCH_TPU_MAX_PROGRAMS",
    default=lambda: 4000,
    shown_default="4000",
    parse=integer(1),
    help="How many compiled programs stay loaded; the ones used longest ago are dropped.",
)


# ---- names that are no setting

_warned: set[str] = set()
_warned_lock = threading.Lock()  # guards _warned


def unknown() -> dict[str, str]:
    """Warn once of each ``TORCH_TPU_*`` variable that is no setting.

    Returns:
        All such names, each with the nearest real one or ``""``.
    """
    names = sorted(n for n in os.environ if n.startswith(PREFIX) and n not in SETTINGS)
    ours = {s.removeprefix(PREFIX): s for s in SETTINGS}  # the common prefix would make every name look close
    near = {n: difflib.get_close_matches(n.removeprefix(PREFIX), ours, 1) for n in names}
    found = {n: ours[close[0]] if close else "" for n, close in near.items()}
    with _warned_lock:
        fresh = [n for n in names if n not in _warned]
        _warned.update(fresh)
    for name in fresh:
        hint = f"; did you mean {found[name]}?" if found[name] else ""
        warnings.warn(f"{name} is set, but torch_tpu has no such setting{hint}", stacklevel=2)
    return found


def compile_without_tpu() -> None:
    """For compiling ahead of time, before libtpu is loaded.

    Keeps it from asking a metadata server, for minutes, which TPU this host has, and from allowing one process at a time.
    """
    os.environ["TPU_SKIP_MDS_QUERY"] = "1"
    os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"
