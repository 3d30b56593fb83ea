"""OpInfo entries that are known to differ from the CPU, with the reason. An entry that passes must leave the table."""

from __future__ import annotations

from typing import Literal

_CSR = "sparse CSR tensors are not supported"
_EIGENVECTORS = "eigenvectors are right up to their sign, which is free"
_INDICES = "PyTorch wants the indices of tensor_split on the CPU, whatever the device"
_COMPLEX_HALF = "StableHLO has no complex element type of two float16"

FORWARD: dict[str, str] = {
    "chalf": _COMPLEX_HALF,
    "linalg.eigh": _EIGENVECTORS,
    "matrix_exp": "the CPU's float32 squarings are further from float64 than ours",
    "sparse.mm.reduce": _CSR,
    "sparse.sampled_addmm": _CSR,
    "tensor_split": _INDICES,
}
"""Name of the entry (``name.variant``) to why its values, dtypes or errors differ."""

BACKWARD: dict[str, str] = {
    "chalf": _COMPLEX_HALF,
    "linalg.eigh": _EIGENVECTORS,
    "sparse.mm.reduce": _CSR,
    "sparse.sampled_addmm": _CSR,
    "tensor_split": _INDICES,
}
"""The same for its gradients."""

_WIDER = "the CPU rounds intermediate values to the dtype; ours are float32 and nearer to float64"
_STATS = "statistics are float32, as PyTorch's meta kernel and CUDA have them; the CPU's are narrow"

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
    ("chalf", "float32"): _COMPLEX_HALF,
    ("complex", "float16"): _COMPLEX_HALF,
    ("logcumsumexp", "complex64"): "the imaginary part is in (-pi, pi]; the CPU's adds up multiples of 2 pi",
    ("special.bessel_j0", "float64"): "the CPU is off by 2e-7; ours agrees with a reference to the last digit",
    ("special.bessel_y1", "float64"): "the CPU is off by 3e-7; ours agrees with a reference to the last digit",
}
"""(Entry, dtype of the inputs) to why forward values or dtypes differ."""

MODULES: dict[str, str] = {}
"""Name of a module of torch's module_db to why it differs from the CPU."""

OPTIMIZERS: dict[str, str] = {}
"""Name of an optimizer's run (``name-implementation``) to why it differs from the CPU."""

ERRORS: dict[tuple[str, int], Literal["none", "words"]] = {
    # The CPU raises nothing either.
    ("clamp_max", 0): "none",
    ("clamp_min", 0): "none",
    ("__rmod__", 0): "none",
    ("__rpow__", 0): "none",
    ("__rsub__", 0): "none",
    # A result that overlaps an input: results are computed before anything is written, so it is right here.
    ("kthvalue", 0): "none",
    ("masked_select", 1): "none",
    ("masked_select", 2): "none",
    ("gather", 5): "none",
    ("gather", 6): "none",
    ("take", 1): "none",
    ("cat", 6): "none",
    ("cat", 7): "none",
    # Texts of PyTorch's own meta kernels, decompositions and Python, which differ from those of its CPU kernels.
    ("masked_fill", 1): "words",
    ("masked_fill", 2): "words",
    ("nn.functional.multi_margin_loss", 1): "words",
    ("nn.functional.multi_margin_loss", 2): "words",
    ("nn.functional.multi_margin_loss", 3): "words",
    ("nn.functional.multi_margin_loss", 4): "words",
    ("nn.functional.multi_margin_loss", 7): "words",
    ("nn.functional.multilabel_margin_loss", 1): "words",
    ("nn.functional.multilabel_margin_loss", 2): "words",
    ("nn.functional.multilabel_margin_loss", 3): "words",
    ("nn.functional.multilabel_margin_loss", 4): "words",
    ("nn.functional.gaussian_nll_loss", 2): "words",
    ("ormqr", 1): "words",
    ("mean", 0): "words",
    ("mean", 1): "words",
}
"""Wrong arguments of the operator database, by op and number. ``"none"``: nothing is raised, and the result is right;
``"words"``: the exception has ATen's type, and other words than its CPU kernels. The reasons stand above the lines."""
