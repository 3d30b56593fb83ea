"""OpInfo entries that are known to differ from the CPU, with the reason. An entry that passes must leave the table."""

from __future__ import annotations

FORWARD: dict[str, str] = {}
"""Name of the entry (``name.variant``) to why its values, dtypes or errors differ."""

BACKWARD: dict[str, str] = {}
"""The same for its gradients."""

_WIDER = "the CPU rounds intermediate values to the dtype; ours are float32 and nearer to float64"
_STATS = "statistics are float32, as PyTorch's meta kernel and CUDA have them; the CPU's are narrow"
_HALF = "StableHLO has no complex element type of two float16"

BY_DTYPE: dict[tuple[str, str], str] = {
    ("_batch_norm_with_update", "bfloat16"): _STATS,
    ("_native_batch_norm_legit", "bfloat16"): _STATS,
    ("native_batch_norm", "bfloat16"): _STATS,
    ("native_layer_norm", "bfloat16"): _STATS,
    ("cross", "bfloat16"): _WIDER,
    ("grid_sampler_2d", "bfloat16"): _WIDER,
    ("grid_sampler_3d", "bfloat16"): _WIDER,
    ("nn.functional.grid_sample", "bfloat16"): _WIDER,
    ("matrix_exp", "bfloat16"): "the CPU's result is NaN",
    ("matrix_exp", "float16"): "the CPU's result is NaN",
    ("nn.functional.soft_margin_loss", "float16"): "the CPU's sum overflows to inf",
    ("chalf", "float32"): _HALF,
    ("complex", "float16"): _HALF,
    ("logcumsumexp", "complex64"): "the imaginary part is in (-pi, pi]; the CPU's adds up multiples of 2 pi",
    ("special.bessel_j0", "float64"): "the CPU is off by 2e-7; ours agrees with a reference to the last digit",
    ("special.bessel_y1", "float64"): "the CPU is off by 3e-7; ours agrees with a reference to the last digit",
}
"""(Entry, dtype of the inputs) to why forward values or dtypes differ."""

MODULES: dict[str, str] = {}
"""Name of a module of torch's module_db to why it differs from the CPU."""

OPTIMIZERS: dict[str, str] = {}
"""Name of an optimizer's run (``name-implementation``) to why it differs from the CPU."""
