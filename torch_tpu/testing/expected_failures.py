"""OpInfo entries that are known to differ from the CPU, with the reason. An entry that passes must leave the table."""

from __future__ import annotations

FORWARD: dict[str, str] = {}
"""Name of the entry (``name.variant``) to why its values, dtypes or errors differ."""

BACKWARD: dict[str, str] = {}
"""The same for its gradients."""

MODULES: dict[str, str] = {}
"""Name of a module of torch's module_db to why it differs from the CPU."""

OPTIMIZERS: dict[str, str] = {}
"""Name of an optimizer's run (``name-implementation``) to why it differs from the CPU."""
