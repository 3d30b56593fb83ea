"""Compiled programs on disk, shared by all processes of a user. Bytes by name: knows neither plans nor ops.

Entry: a file of its own, ``<folder>/ab/abcdef….plan``, ``….exe`` or ``….aot``: magic, SHA-256 of name and payload, payload.
Key: a digest that the caller makes of all that the payload depends on; ``build_fingerprint`` is the part of it that
belongs to the machine and the compiler. Limit: TORCH_TPU_CACHE_BYTES, the least recently used go first (a read touches
the file). Nothing invalidates an entry. What cannot be read, is damaged or belongs to another user is a miss, and what
cannot be written is not kept: no function here raises because of the disk.

Thread- and process-safe without locks: entries appear whole (rename) and never change.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
import re
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from torch_tpu import _C, config
from torch_tpu.runtime import extension

_MAGIC = b"tputorch1\n"
_TEMPORARY = ".new-"
_NAME = re.compile(r"\w+\.(plan|exe|aot)")
_STALE_S = 3600  # a temporary file older than this was left by a killed writer
_CHECK_EVERY = 64  # stores between two looks at the size of the folder

log = logging.getLogger("torch_tpu")


@dataclass(slots=True)
class Counts:
    """What this process asked of the cache. Guarded by the GIL; a lost increment does no harm."""

    hits: int = 0
    misses: int = 0
    stores: int = 0
    evictions: int = 0
    # Not the same for all: of many short processes, some must look at the size.
    stores_until_check: int = 1 + os.getpid() % _CHECK_EVERY


counts = Counts()


def enabled() -> bool:
    """Whether TORCH_TPU_CACHE and TORCH_TPU_CACHE_BYTES allow a cache."""
    return config.CACHE.value and config.CACHE_BYTES.value > 0


def digest(*parts: str | bytes) -> str:
    """SHA-256 of the parts, in hex. Where a part ends matters: ("a", "bc") is not ("ab", "c")."""
    h = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        h.update(len(data).to_bytes(8, "little"))
        h.update(data)
    return h.hexdigest()


def _cpu_features() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as f:
            return next((line for line in f if line.startswith(("flags", "Features"))), "")
    except OSError:
        return ""


def _extension_digest() -> str:
    """Digest of the extension module's file; one that no other process has if the file may not be what was loaded."""
    path = Path(_C.__file__)
    try:
        data = path.read_bytes()
        if path.stat().st_mtime_ns < extension.LOADED_NS:
            return digest(data)
    except OSError:  # removed since: a build is under way
        pass
    return os.urandom(16).hex()


def fingerprint_parts() -> dict[str, str]:
    """What decides a compilation besides the program, by name. Creates the client if there is none."""
    info = _C.device_info(0)
    try:
        plugin = os.stat(info["plugin"])
        file = (plugin.st_size, plugin.st_mtime_ns)
    except OSError:
        file = (0, 0)
    devices = (info["platform"], info["platform_version"], info["kind"], _C.device_count())
    return {
        "plugin": repr((info["plugin"], file, devices, info["api_version"])),
        "compile options": info["compile_options"].hex(),
        "CPU features": _cpu_features(),
        config.XLA_FLAGS.name: config.XLA_FLAGS.value,
        config.LIBTPU_INIT_ARGS.name: config.LIBTPU_INIT_ARGS.value,
        "torch": f"{torch.__version__} {torch.version.git_version}",
        "torch_tpu._C": _extension_digest(),
    }


@functools.cache
def build_fingerprint() -> str:
    """Digest of `fingerprint_parts`. Computed once."""
    return digest(*(text for part in fingerprint_parts().items() for text in part))


def _path(name: str) -> Path:
    return config.CACHE_DIR.value / name[:2] / name


def _checksum(name: str, payload: bytes) -> bytes:
    return hashlib.sha256(name.encode() + b"\n" + payload).digest()


def load(name: str) -> bytes | None:
    """The payload of entry ``name``, or None if there is none that may be used. Raises nothing."""
    payload = _read(name)
    if payload is None:
        counts.misses += 1
    else:
        counts.hits += 1
    return payload


def _read(name: str, *, touch: bool = True) -> bytes | None:
    try:
        with open(_path(name), "rb") as f:
            owner = os.fstat(f.fileno()).st_uid
            if owner != os.geteuid() and not config.CACHE_TRUST.value:
                return None
            data = f.read()
    except OSError:
        return None
    payload = _payload(name, data)
    if payload is None:
        return None
    with contextlib.suppress(OSError):  # evicted meanwhile, or not ours to touch
        if touch:
            os.utime(_path(name))
    return payload


def _payload(name: str, data: bytes) -> bytes | None:
    """What the file of entry ``name`` holds, or None if it is not whole."""
    start = len(_MAGIC) + 32
    payload = data[start:]
    whole = data.startswith(_MAGIC) and data[len(_MAGIC) : start] == _checksum(name, payload)
    return payload if whole else None


def store(name: str, payload: bytes) -> None:
    """Keep ``payload`` as entry ``name``; one that is there is replaced. Raises nothing."""
    data = _MAGIC + _checksum(name, payload) + payload
    if len(data) > config.CACHE_BYTES.value:
        return
    try:
        _write(_path(name), data)
    except OSError as e:
        _complain(str(e))
        return
    counts.stores += 1
    counts.stores_until_check -= 1
    if counts.stores_until_check <= 0:
        counts.stores_until_check = _CHECK_EVERY
        evict()


@functools.cache
def _complain(why: str) -> None:
    log.warning("the disk cache keeps nothing: %s", why)


def _write(path: Path, data: bytes) -> None:
    for folder in (path.parent.parent, path.parent):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    fd, temporary = tempfile.mkstemp(prefix=_TEMPORARY, dir=path.parent)  # mode 0600
    try:
        with open(fd, "wb") as f:
            f.write(data)
        os.replace(temporary, path)
    except BaseException:
        _remove(temporary)
        raise


def _remove(path: str) -> bool:
    try:
        os.unlink(path)
    except OSError:  # another process was quicker, or it is not ours
        return False
    return True


def _files() -> Iterator[tuple[str, os.stat_result]]:
    """Entries and temporary files. Whatever else lies in the folder is not ours to count or remove."""
    for folder, _, names in os.walk(config.CACHE_DIR.value):
        for name in names:
            entry = _NAME.fullmatch(name) and os.path.basename(folder) == name[:2]
            if not entry and not name.startswith(_TEMPORARY):
                continue
            path = os.path.join(folder, name)
            try:
                yield path, os.stat(path)
            except OSError:  # removed meanwhile
                continue


def evict() -> None:
    """Bring the folder to nine tenths of its limit if it is over it, and remove what killed writers left.

    Reads the status of every file: about 2 µs each.
    """
    now = time.time()
    entries: list[tuple[float, int, str]] = []
    for path, status in _files():
        if not os.path.basename(path).startswith(_TEMPORARY):
            entries.append((status.st_mtime, status.st_size, path))
        elif now - status.st_mtime > _STALE_S:
            _remove(path)
    total = sum(size for _, size, _ in entries)
    limit = config.CACHE_BYTES.value
    if total <= limit:
        return
    for _, size, path in sorted(entries):
        if total <= limit * 0.9:
            return
        if _remove(path):
            counts.evictions += 1
            total -= size


# ---- for people


@dataclass(frozen=True, slots=True)
class Entry:
    """One file of the cache. ``kind``: ``plan``, ``exe`` or ``aot``. ``used``: time of the last use, as `time.time`."""

    name: str
    kind: str
    bytes: int
    used: float


def entries() -> list[Entry]:
    """All entries, the last used first."""
    found = [
        Entry(base, base.rpartition(".")[2], status.st_size, status.st_mtime)
        for path, status in _files()
        if not (base := os.path.basename(path)).startswith(_TEMPORARY)
    ]
    return sorted(found, key=lambda e: e.used, reverse=True)


def damaged() -> list[str]:
    """Names of the entries that would not be used: damaged ones, and those of another user. Reads every file."""
    return [e.name for e in entries() if _read(e.name, touch=False) is None]


def peek(name: str) -> bytes | None:
    """As `load`, but it is no use of the entry: nothing is counted, and its place among the others stays."""
    return _read(name, touch=False)


def remove(name: str) -> bool:
    """Remove the entry ``name``. False: it is not there, or not ours."""
    return _remove(str(_path(name)))
