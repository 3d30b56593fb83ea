"""What ``manifest.json`` of a saved program says: the parameters and results of the program, and the user's trees.

Parameters and results are in the order of ``main``. A random program has two parameters more, at the end: seed and
first counter of the generator, rank-0 uint64.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from torch_tpu.errors import ProgramFileInvalid
from torch_tpu.ir.types import ELEMENT_TYPES, TensorType

FORMAT = 1
"""Version of the files. A reader takes files of this version and older ones."""

_DTYPES = {str(t).removeprefix("torch."): t for t in ELEMENT_TYPES}


def dtype_name(dtype: torch.dtype) -> str:
    """``float32``, as the manifest writes it."""
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True, slots=True)
class Input:
    """A parameter of the program: a tensor of the weights file (``weight`` names it), or one that the caller gives."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    weight: str | None = None

    @property
    def type(self) -> TensorType:
        return TensorType(self.shape, _DTYPES[self.dtype])


@dataclass(frozen=True, slots=True)
class Output:
    """A result of the program: a new tensor, or (``writes``) the next contents of parameter ``writes``."""

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    writes: int | None = None

    @property
    def type(self) -> TensorType:
        return TensorType(self.shape, _DTYPES[self.dtype])


@dataclass(frozen=True, slots=True)
class Leaf:
    """A leaf of the tree that the caller gives or gets: at most one of parameter, result and constant ``value``."""

    name: str = ""
    input: int | None = None
    output: int | None = None
    value: bool | int | float | str | None = None


@dataclass(frozen=True, slots=True)
class Manifest:
    """All of ``manifest.json``. ``in_spec`` is of ``(args, kwargs)``; both specs are torch's, as JSON text."""

    format: int
    torch_tpu: str
    torch: str
    stablehlo: str  # version of the portable artifact; empty: there is none
    program_sha256: str
    inputs: tuple[Input, ...]
    outputs: tuple[Output, ...]
    arguments: tuple[Leaf, ...]
    results: tuple[Leaf, ...]
    in_spec: str
    out_spec: str
    draws: int  # how far a call advances the generator; 0: nothing is random

    @property
    def weights(self) -> Mapping[str, Input]:
        """The first parameter that each tensor of the weights file is."""
        found: dict[str, Input] = {}
        for x in self.inputs:
            if x.weight is not None:
                found.setdefault(x.weight, x)
        return found


def encode(manifest: Manifest) -> str:
    """The text of ``manifest.json``."""
    return json.dumps(asdict(manifest), indent=1) + "\n"


def decode(text: str | bytes, where: str) -> Manifest:
    """The manifest in ``text``, which is the contents of ``where``.

    Raises:
        ProgramFileInvalid: it is no manifest, or one of a format that this version does not read.
    """
    try:
        fields = json.loads(text)
        found = fields["format"]
        if isinstance(found, int) and found > FORMAT:
            raise ProgramFileInvalid(
                f"{where} has format {found}; this version of torch_tpu reads formats up to {FORMAT}.",
                hint=f"load it with torch_tpu {fields.get('torch_tpu', 'of a newer version')} or newer.",
            )
        manifest = _decode(fields)
    except (ValueError, TypeError, KeyError) as e:
        if isinstance(e, ProgramFileInvalid):
            raise
        raise ProgramFileInvalid(
            f"{where} is not the manifest of a saved program: {type(e).__name__}: {e}.", hint="save the program again."
        ) from e
    return manifest


def _tuples(x: Mapping[str, Any]) -> dict[str, Any]:
    return {k: tuple(v) if isinstance(v, list) else v for k, v in x.items()}


def _decode(fields: Mapping[str, Any]) -> Manifest:
    kinds: Mapping[str, Any] = {"inputs": Input, "outputs": Output, "arguments": Leaf, "results": Leaf}
    lists = {k: tuple(kind(**_tuples(x)) for x in fields[k]) for k, kind in kinds.items()}
    manifest = Manifest(**{**fields, **lists})
    _check(manifest)
    return manifest


def _check(m: Manifest) -> None:
    """Raise ValueError if an index or a dtype is none."""
    tensors: tuple[Input | Output, ...] = (*m.inputs, *m.outputs)
    for x in tensors:
        if x.dtype not in _DTYPES or not _are_sizes(x.shape):
            raise ValueError(f"no tensor type {x.dtype!r} {x.shape!r}")
    indices = [(o.writes, m.inputs) for o in m.outputs]
    indices += [(leaf.input, m.inputs) for leaf in (*m.arguments, *m.results)]
    for i, of in [*indices, *((leaf.output, m.outputs) for leaf in m.results)]:
        if i is not None and not 0 <= i < len(of):
            raise ValueError(f"index {i} of {len(of)}")


def _are_sizes(shape: Sequence[Any]) -> bool:
    return all(isinstance(n, int) and n >= 0 for n in shape)
