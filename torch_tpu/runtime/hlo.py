"""Optimised programs as plugins give them (a serialized HloModuleProtoWithConfig), and as text where jaxlib is there."""

from __future__ import annotations

import importlib.util

_MODULE = 0x0A  # field 1, length-delimited


def module_proto(optimized: bytes) -> bytes:
    """The HloModuleProto in ``optimized``. Raises ValueError if there is none."""
    if not optimized or optimized[0] != _MODULE:
        raise ValueError("not a serialized HloModuleProtoWithConfig")
    length, at = 0, 1
    while True:
        byte = optimized[at]
        length |= (byte & 0x7F) << 7 * (at - 1)
        at += 1
        if byte < 0x80:
            return optimized[at : at + length]


def text(optimized: bytes) -> str | None:
    """HLO text; None without jaxlib, whose printer this needs."""
    if importlib.util.find_spec("jaxlib") is None:
        return None
    from jaxlib import xla_client  # noqa: PLC0415  (optional)

    return str(xla_client.XlaComputation(module_proto(optimized)).as_hlo_text())
