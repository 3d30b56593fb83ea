"""Rule cases that libtpu's compiler refuses, with the reason. A case that compiles must leave the table."""

from __future__ import annotations

NOT_ON_TPU: dict[str, str] = {}
"""ATen overload, as ``str(op)``, or the name of one case to why a TPU cannot run it."""
