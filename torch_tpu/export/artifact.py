"""StableHLO text as bytes for other tools, by the MLIR that jaxlib brings (extra ``export``). JAX is not imported."""

from __future__ import annotations

import io
from typing import Any

from torch_tpu.errors import ExportUnsupported, ExtraMissing

ARTIFACT_VERSION = "1.7.0"
"""StableHLO version of portable artifacts: the oldest that holds every op of the lowering library."""


def _mlir() -> tuple[Any, Any]:
    try:
        from jaxlib.mlir import ir  # noqa: PLC0415  (optional, half a second)
        from jaxlib.mlir.dialects import stablehlo  # noqa: PLC0415
    except ImportError as e:
        raise ExtraMissing(
            "portable artifacts need the package jaxlib.",
            hint="pip install 'torch_tpu[export]', or save the text only.",
        ) from e
    return ir, stablehlo


def portable_artifact(text: str) -> bytes:
    """``text`` as a portable artifact: MLIR bytecode of ops with versions, which later StableHLO readers accept.

    Raises:
        ExtraMissing: jaxlib is not installed.
        ExportUnsupported: an op is not in StableHLO `ARTIFACT_VERSION`.
    """
    return _serialized(text, ARTIFACT_VERSION)


def _serialized(text: str, stablehlo_version: str) -> bytes:
    _, stablehlo = _mlir()
    try:
        return bytes(stablehlo.serialize_portable_artifact_str(text, stablehlo_version))
    except ValueError as e:
        raise ExportUnsupported(
            f"the program cannot be written as StableHLO {stablehlo_version}: {e}.",
            hint="save it without portable=True.",
        ) from e


def bytecode(text: str) -> bytes:
    """``text`` as plain MLIR bytecode, for tools of jaxlib's version. Raises as `portable_artifact`."""
    ir, stablehlo = _mlir()
    with ir.Context() as context:
        stablehlo.register_dialect(context)
        current = _serialized(text, stablehlo.get_current_version())
        out = io.BytesIO()
        stablehlo.deserialize_portable_artifact(context, current).operation.write_bytecode(out)
    return out.getvalue()
