"""PyTorch's own operator database, as the tests look entries up."""

from __future__ import annotations

import warnings
from typing import Any

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # the database warns about optional packages while it is imported
    from torch.testing._internal.common_methods_invocations import op_db


def full_name(op: Any) -> str:
    """``name.variant``, or the name of an entry without variants."""
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else str(op.name)


OPS: dict[str, Any] = {full_name(op): op for op in op_db}
