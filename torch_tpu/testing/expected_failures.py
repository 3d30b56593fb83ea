"""OpInfo entries that are known to differ from the CPU, with the reason. An entry that passes must leave the table."""

from __future__ import annotations

FORWARD: dict[str, str] = {}
"""Name of the entry (``name.variant``) to why its values, dtypes or errors differ."""

_STRIDES = (
    "a gradient whose strides are not its leaf's is copied into new_empty_strided, which the device does not have"
)

BACKWARD: dict[str, str] = {
    "add": _STRIDES,
    "sub": _STRIDES,
    "addcmul": _STRIDES,
    "einsum": _STRIDES,
    "baddbmm": _STRIDES,
    "scatter_add": _STRIDES,
    "index_put": _STRIDES,
    "cat": _STRIDES,
    "stack": _STRIDES,
    "roll": _STRIDES,
    "nn.functional.layer_norm": _STRIDES,
    "nn.functional.scaled_dot_product_attention": _STRIDES,
    "linalg.cholesky": _STRIDES,
    "linalg.qr": _STRIDES,
    "fft.rfft": _STRIDES,
}
"""The same for its gradients."""
