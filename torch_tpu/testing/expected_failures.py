"""OpInfo entries that are known to differ from the CPU, with the reason. An entry that passes must leave the table."""

from __future__ import annotations

FORWARD: dict[str, str] = {}
"""Name of the entry (``name.variant``) to why its values, dtypes or errors differ."""

BACKWARD: dict[str, str] = {}
"""The same for its gradients."""
