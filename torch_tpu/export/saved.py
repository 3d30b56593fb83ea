"""The files of a saved program, in a folder or a .zip.

program.mlir          StableHLO text
program.mlir.bc       the same as a portable artifact, if asked for
weights.safetensors   parameters, buffers and constants
manifest.json         what the program takes and gives; written last
"""

from __future__ import annotations

import hashlib
import os
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.export import ExportedProgram

from torch_tpu.errors import ExtraMissing, ProgramFileInvalid
from torch_tpu.export import artifact
from torch_tpu.export.lower import Lowered, lower
from torch_tpu.export.manifest import Input, Manifest, decode, encode

PROGRAM, ARTIFACT, WEIGHTS, MANIFEST = "program.mlir", "program.mlir.bc", "weights.safetensors", "manifest.json"

# What the format of safetensors names; other tensors are stored as their bytes.
_NAMED = frozenset(
    getattr(torch, name)
    for name in ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64")
)


def _safetensors() -> Any:
    try:
        import safetensors.torch  # noqa: PLC0415  (optional)
    except ImportError as e:
        raise ExtraMissing(
            "saved programs need the package safetensors.", hint="pip install 'torch_tpu[export]'."
        ) from e
    return safetensors


def save(
    model: ExportedProgram | torch.nn.Module | Lowered,
    path: str | os.PathLike[str],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    portable: bool = False,
) -> None:
    """Write ``model`` to ``path`` as a program that `load` runs without the model.

    Args:
        model: an `ExportedProgram`; or a module, with example inputs ``args`` and ``kwargs``; or what `lower` returned.
        path: a folder, which is created; or a file that ends in ``.zip``. A program that is there is replaced.
        portable: also write a portable artifact, for other tools. Needs jaxlib.

    Raises:
        ExportUnsupported, LoweringMissing, TypeError: as `lower`.
        ExtraMissing: safetensors or jaxlib is not installed.
        FileExistsError: ``path`` is a folder with other contents.
    """
    target = Path(path)
    safetensors = _safetensors()
    lowered = model if isinstance(model, Lowered) else lower(model, args, kwargs)
    files: dict[str, bytes | dict[str, torch.Tensor]] = {PROGRAM: lowered.text.encode()}
    manifest = lowered.manifest
    if portable:
        files[ARTIFACT] = artifact.portable_artifact(lowered.text)
        manifest = replace(manifest, stablehlo=artifact.ARTIFACT_VERSION)
    files[WEIGHTS] = {name: _stored(t) for name, t in lowered.weights.items()}
    files[MANIFEST] = encode(manifest).encode()
    if target.suffix == ".zip":
        _write_zip(target, {k: v if isinstance(v, bytes) else safetensors.torch.save(v) for k, v in files.items()})
        return
    _clear(target)
    for name, data in files.items():
        if isinstance(data, bytes):
            (target / name).write_bytes(data)
        else:
            safetensors.torch.save_file(data, target / name)


def _clear(folder: Path) -> None:
    """Make ``folder``, without the files of an earlier program: one that is not whole must not look like one."""
    if folder.exists() and not (folder / MANIFEST).is_file() and any(folder.iterdir()):
        raise FileExistsError(f"{folder} holds other files than a saved program; choose another folder")
    folder.mkdir(parents=True, exist_ok=True)
    for name in (MANIFEST, ARTIFACT, PROGRAM, WEIGHTS):
        (folder / name).unlink(missing_ok=True)


def _write_zip(target: Path, files: Mapping[str, bytes]) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        with zipfile.ZipFile(part, "w") as archive:
            for name, data in files.items():
                archive.writestr(name, data)
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)


def _stored(t: torch.Tensor) -> torch.Tensor:
    """A tensor of the CPU that shares memory with none, in a dtype of safetensors."""
    t = t.detach().cpu().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    return t if t.dtype in _NAMED else t.reshape(-1).view(torch.uint8)


def _restored(t: torch.Tensor, want: Input, where: Path) -> torch.Tensor:
    if want.type.dtype not in _NAMED and t.dtype == torch.uint8:
        t = t.view(want.type.dtype).reshape(want.shape)
    if (t.dtype, tuple(t.shape)) != (want.type.dtype, want.shape):
        raise ProgramFileInvalid(
            f"tensor {want.weight!r} of {where}: the program takes {want.type}, the file has {t.dtype}{list(t.shape)}.",
            hint="save the program again.",
        )
    return t


def read(path: Path) -> tuple[Manifest, str, dict[str, torch.Tensor]]:
    """Manifest, text and weights (tensors of the CPU) of a saved program.

    Raises:
        FileNotFoundError: nothing is there.
        ProgramFileInvalid: it is no saved program, is damaged, was changed, or is of a newer format.
        ExtraMissing: safetensors is not installed.
    """
    safetensors = _safetensors()
    if path.is_dir():
        return _read(path, lambda name: _file(path / name), lambda: safetensors.torch.load_file(path / WEIGHTS))
    try:
        with zipfile.ZipFile(path) as archive:
            return _read(path, archive.read, lambda: safetensors.torch.load(archive.read(WEIGHTS)))
    except zipfile.BadZipFile as e:
        raise ProgramFileInvalid(
            f"{path} is no .zip file: {e}.", hint="give the folder or file that save wrote."
        ) from e


def _file(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError as e:
        raise KeyError(path.name) from e  # as an archive says it


def _read(
    path: Path, file: Callable[[str], bytes], tensors: Callable[[], Mapping[str, torch.Tensor]]
) -> tuple[Manifest, str, dict[str, torch.Tensor]]:
    safetensors = _safetensors()
    try:
        manifest = decode(file(MANIFEST), f"{path}/{MANIFEST}")
        text = file(PROGRAM)
        found = tensors()
    except (KeyError, FileNotFoundError) as e:
        raise ProgramFileInvalid(
            f"{path} is not a whole saved program: {e}.", hint="give the folder or file that save wrote."
        ) from e
    except safetensors.SafetensorError as e:
        raise ProgramFileInvalid(f"{path}/{WEIGHTS} is damaged: {e}.", hint="save the program again.") from e
    if hashlib.sha256(text).hexdigest() != manifest.program_sha256:
        raise ProgramFileInvalid(
            f"{path}/{PROGRAM} is not the program that was saved: it is damaged or was changed.",
            hint="save the program again.",
        )
    missing = sorted(set(manifest.weights) - set(found))
    if missing:
        raise ProgramFileInvalid(
            f"{path}/{WEIGHTS} lacks {', '.join(map(repr, missing))}.", hint="save the program again."
        )
    restored = {k: _restored(found[k], want, path / WEIGHTS) for k, want in manifest.weights.items()}
    return manifest, text.decode(), restored
