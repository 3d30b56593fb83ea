"""Programs as MLIR, see :mod:`torch_tpu.export`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.export import ExportedProgram

from torch_tpu import export

__all__ = ["ExportedMlir", "exported_to_mlir", "fx_to_mlir"]


@dataclass(frozen=True, slots=True)
class ExportedMlir:
    """A StableHLO module. Bytes need jaxlib, see :func:`torch_tpu.export.portable_artifact`."""

    lowered: export.Lowered

    def serialize_text(self) -> str:
        """The module's text."""
        return self.lowered.text

    def serialize_bytecode(self) -> bytes:
        """MLIR bytecode, for tools of the same version."""
        return export.bytecode(self.lowered.text)

    def serialize_portable_artifact(self) -> bytes:
        """Versioned bytecode, for tools of later versions too."""
        return export.portable_artifact(self.lowered.text)


def exported_to_mlir(exported: ExportedProgram) -> ExportedMlir:
    """The module of an exported program. Raises as `torch_tpu.export.lower`."""
    return ExportedMlir(export.lower(exported))


def fx_to_mlir(module: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None) -> ExportedMlir:
    """The module of ``module`` for these example inputs. Raises as `torch_tpu.export.lower`."""
    return ExportedMlir(export.lower(module, args, kwargs))
