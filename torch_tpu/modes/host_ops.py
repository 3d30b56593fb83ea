"""The ops that the host computes by design, with the reason. Everything else has a rule, or is made of ops that have.

An op in this table copies its inputs to the host and its results back, each call. It is no fallback: it does not warn,
`TORCH_TPU_CPU_FALLBACK` does not concern it, and `docs/ops.md` lists it.
"""

from __future__ import annotations

import torch
from torch._ops import OpOverload

aten = torch.ops.aten

_EIG = "a general matrix: LAPACK's Hessenberg QR iteration is sequential, and XLA has no counterpart"
_LDL = "Bunch-Kaufman pivoting in LAPACK's packed form is sequential, and XLA has no counterpart"
_LSTSQ = "the sizes of its results depend on the numerical rank, which LAPACK's driver decides"

HOST: dict[OpOverload, str] = {
    aten.linalg_eig.default: _EIG,
    aten.linalg_eig.out: _EIG,
    aten._linalg_eigvals.default: _EIG,
    aten.linalg_eigvals.out: _EIG,
    aten.linalg_ldl_factor_ex.default: _LDL,
    aten.linalg_ldl_factor_ex.out: _LDL,
    aten.linalg_ldl_solve.default: _LDL,
    aten.linalg_ldl_solve.out: _LDL,
    aten.linalg_lstsq.default: _LSTSQ,
    aten.linalg_lstsq.out: _LSTSQ,
}
