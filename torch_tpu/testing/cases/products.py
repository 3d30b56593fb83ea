"""Cases for products, convolutions, pools, resampling, linear algebra, distances, attention and recurrent cells."""

from __future__ import annotations

from typing import Any

import torch
from torch._ops import OpOverload

from torch_tpu.testing.cases import t

aten = torch.ops.aten

BF16, F64, I8, I64, C64 = torch.bfloat16, torch.float64, torch.int8, torch.int64, torch.complex64
NAN, INF = float("nan"), float("inf")
ALL = [True, True, True]

IMAGE = t(2, 3, 6, 8) - 1
VOLUME = t(1, 2, 4, 6, 5) - 1
LINE = t(2, 3, 7) - 1
MAX_2D = aten.max_pool2d_with_indices(IMAGE, [3, 3], [2, 2], [1, 1])[1]
MAX_3D = aten.max_pool3d_with_indices(VOLUME, [2, 2, 2])[1]
ADAPTIVE_2D = aten.adaptive_max_pool2d(IMAGE, [3, 5])[1]
ADAPTIVE_3D = aten.adaptive_max_pool3d(VOLUME, [2, 3, 5])[1]
SAMPLES_2D, SAMPLES_3D = t(2, 3, 2) - 0.5, t(1, 2, 3) - 0.5
FRACTION_2D = aten.fractional_max_pool2d(IMAGE, [2, 2], [3, 4], SAMPLES_2D)[1]
FRACTION_3D = aten.fractional_max_pool3d(VOLUME, [2, 2, 2], [2, 3, 3], SAMPLES_3D)[1]
GRID_2D, GRID_3D = (t(2, 4, 3, 2) - 1) * 2.6, (t(1, 2, 3, 4, 3) - 1) * 2.6

SQUARE = t(2, 4, 4, dtype=F64) + 3 * torch.eye(4, dtype=F64)
COMPLEX = t(3, 3, dtype=C64, seed=1) + 3 * torch.eye(3, dtype=C64)
POSITIVE = SQUARE @ SQUARE.mT
FACTOR = torch.linalg.cholesky(POSITIVE)
LU, PIVOTS, _ = torch.linalg.lu_factor_ex(SQUARE.flip(-1))
TALL = t(2, 5, 3, dtype=F64)
REFLECTORS, TAU = torch.geqrf(TALL)
RIGHT = t(2, 4, 3, dtype=F64)
BIG = t(130, 130, dtype=F64) + 20 * torch.eye(130, dtype=F64).roll(7, 0)
ROWS, OTHERS = t(2, 4, 3), t(2, 5, 3, seed=1)
PAIRS = t(5, 3)

QUERY, KEY, VALUE = t(2, 4, 5, 8), t(2, 2, 7, 8, seed=1), t(2, 2, 7, 6, seed=2)
BIAS, NUMBER = t(1, 4, 5, 7), torch.zeros((), dtype=I64)
GATES, STATE = t(2, 12) - 1, t(2, 3) - 1

Case = tuple[OpOverload, tuple[Any, ...], dict[str, Any]]

# Ops that ATen has for other devices only: nothing on the CPU to compare with.
NO_CPU_KERNEL: list[Case] = [
    (aten.mm.dtype, (t(3, 4, dtype=BF16), t(4, 5, dtype=BF16), torch.float32), {}),
    (aten.bmm.dtype, (t(2, 3, 4, dtype=BF16), t(2, 4, 5, dtype=BF16), torch.float32), {}),
    (aten.addmm.dtype, (t(5), t(3, 4, dtype=BF16), t(4, 5, dtype=BF16), torch.float32), {}),
    (aten.baddbmm.dtype, (t(3, 5), t(2, 3, 4, dtype=BF16), t(2, 4, 5, dtype=BF16), torch.float32), {}),
    (aten.convolution_overrideable.default, (IMAGE, t(4, 3, 3, 3), t(4), [1], [1], [1], False, [0], 1), {}),
    (
        aten.convolution_backward_overrideable.default,
        (t(2, 4, 6, 8), IMAGE, t(4, 3, 3, 3), [1], [1], [1], False, [0], 1, ALL),
        {},
    ),
    (aten._scaled_dot_product_fused_attention_overrideable.default, (QUERY, KEY, VALUE, BIAS, 0.0, True), {}),
    (
        aten._scaled_dot_product_fused_attention_overrideable_backward.default,
        (
            *(t(2, 4, 5, 6), QUERY, KEY, VALUE, BIAS, [*ALL, True], t(2, 4, 5, 6), t(2, 4, 5), None, None, 5, 7),
            *(0.0, True, NUMBER, NUMBER),
        ),
        {"scale": 0.3},
    ),
    (aten._thnn_fused_lstm_cell.default, (GATES, GATES, STATE, t(12), t(12)), {}),
    (aten._thnn_fused_lstm_cell_backward_impl.default, (STATE, None, STATE, STATE, GATES, True), {}),
    (aten._thnn_fused_gru_cell.default, (t(2, 9), t(2, 9), STATE, t(9), t(9)), {}),
    (aten._thnn_fused_gru_cell_backward.default, (STATE, t(2, 15), True), {}),
]

PRODUCTS: list[Case] = [
    (aten.mm.default, (t(3, 4), t(4, 5)), {}),
    (aten.mm.default, (t(3, 4, dtype=BF16), t(4, 5, dtype=BF16)), {}),
    (aten.mm.default, (t(3, 4, dtype=I64), t(4, 5, dtype=I64)), {}),
    (aten.mm.default, (t(3, 4, dtype=C64), t(4, 5, dtype=C64)), {}),
    (aten.mm.default, (t(3, 0), t(0, 5)), {}),
    (aten.bmm.default, (t(2, 3, 4), t(2, 4, 5)), {}),
    (aten.bmm.default, (t(2, 3, 4, dtype=I64) << 60, t(2, 4, 5, dtype=I64)), {}),
    (aten.addbmm.default, (t(3, 5, dtype=I64), t(2, 3, 4, dtype=I64), t(2, 4, 5, dtype=I64)), {}),
    (aten.mv.default, (t(3, 4, dtype=I64), t(4, dtype=I64)), {}),
    (aten.addmm.default, (t(5), t(3, 4), t(4, 5)), {}),
    (aten.addmm.default, (t(3, 5), t(3, 4), t(4, 5)), {"beta": 0.5, "alpha": 2}),
    (aten.addmm.default, (t(3, 5) * NAN, t(3, 4), t(4, 5)), {"beta": 0}),
    (aten.baddbmm.default, (t(3, 5), t(2, 3, 4), t(2, 4, 5)), {"alpha": 0.1}),
    (aten.addbmm.default, (t(3, 5), t(2, 3, 4), t(2, 4, 5)), {"beta": 2}),
    (aten.mv.default, (t(3, 4), t(4)), {}),
    (aten.addmv.default, (t(3), t(3, 4), t(4)), {"beta": 2, "alpha": 3}),
    (aten.addr.default, (t(4), t(3), t(4)), {"beta": 2, "alpha": 3}),
    (aten.addr.default, (t(3, 4, dtype=torch.bool), t(3, dtype=torch.bool), t(4, dtype=torch.bool)), {}),
    (aten.dot.default, (t(5, dtype=I64), t(5, dtype=I64)), {}),
    (aten.vdot.default, (t(5, dtype=C64), t(5, dtype=C64, seed=1)), {}),
    (aten._int_mm.default, (t(20, 16, dtype=I8), t(16, 24, dtype=I8)), {}),
]

CONVOLUTIONS: list[Case] = [
    (aten.convolution.default, (IMAGE, t(4, 3, 3, 3), t(4), [2, 1], [1, 0], [1, 2], False, [0, 0], 1), {}),
    (aten.convolution.default, (IMAGE.to(BF16), t(6, 1, 3, 3, dtype=BF16), None, [1], [1], [1], False, [0], 3), {}),
    (aten.convolution.default, (LINE, t(3, 2, 4), t(2), [2], [1], [1], True, [1], 1), {}),
    (aten.convolution.default, (IMAGE, t(3, 2, 3, 2), None, [2, 3], [1, 0], [2, 1], True, [1, 0], 3), {}),
    (aten.convolution.default, (VOLUME, t(4, 1, 2, 3, 1), None, [1], [1], [1], False, [0], 2), {}),
    (
        aten.convolution_backward.default,
        (t(2, 4, 3, 4), IMAGE, t(4, 3, 3, 3), [4], [2, 1], [1, 0], [1, 2], False, [0, 0], 1, ALL),
        {},
    ),
    (
        aten.convolution_backward.default,
        (t(2, 4, 6, 8), t(2, 4, 6, 8), t(4, 2, 3, 3), [4], [1], [1], [1], False, [0], 2, ALL),
        {},
    ),
    (
        aten.convolution_backward.default,
        (t(2, 3, 6, 8), IMAGE, t(3, 1, 3, 3), [3], [1], [1], [1], False, [0], 3, ALL),
        {},
    ),
    (aten.convolution_backward.default, (t(2, 2, 15), LINE, t(3, 2, 4), [2], [2], [1], [1], True, [1], 1, ALL), {}),
]

POOLS: list[Case] = [
    (aten.max_pool2d_with_indices.default, (IMAGE, [3, 3], [2, 2], [1, 1]), {}),
    (aten.max_pool2d_with_indices.default, (IMAGE.log(), [2, 3], [2, 1], [1, 1], [2, 1], True), {}),
    (aten.max_pool2d_with_indices.default, (t(1, 12, 12), [9, 9], [1, 2], [4, 4]), {}),
    (aten.max_pool2d_with_indices.default, (torch.full((1, 4, 4), -INF), [3, 3], [1, 1], [1, 1]), {}),
    (aten.max_pool3d_with_indices.default, (VOLUME, [2, 2, 2]), {}),
    (
        aten.max_pool2d_with_indices_backward.default,
        (t(2, 3, 3, 4), IMAGE, [3, 3], [2, 2], [1, 1], [1, 1], False, MAX_2D),
        {},
    ),
    (
        aten.max_pool3d_with_indices_backward.default,
        (t(1, 2, 2, 3, 2), VOLUME, [2, 2, 2], [2, 2, 2], [0, 0, 0], [1, 1, 1], False, MAX_3D),
        {},
    ),
    (aten.avg_pool2d.default, (IMAGE, [3, 2], [2, 2], [1, 1], True, False), {}),
    (aten.avg_pool2d.default, (IMAGE.to(BF16), [2, 2]), {}),
    (aten.avg_pool2d.default, (t(1, 6, 6, dtype=I64), [3, 3], [1, 1], [1, 1], False, True, 5), {}),
    (aten.avg_pool3d.default, (VOLUME, [2, 3, 2], [1, 3, 2], [1, 1, 0], True), {}),
    (aten.avg_pool2d_backward.default, (t(2, 3, 3, 5), IMAGE, [3, 2], [2, 2], [1, 1], False, False, None), {}),
    (aten.avg_pool2d_backward.default, (t(2, 3, 6, 8), IMAGE, [3, 3], [1, 1], [1, 1], False, True, None), {}),
    (
        aten.avg_pool3d_backward.default,
        (t(1, 2, 2, 3, 2), VOLUME, [2, 2, 2], [2, 2, 2], [0, 0, 0], False, True, 3),
        {},
    ),
    (aten._adaptive_avg_pool2d.default, (IMAGE, [3, 5]), {}),
    (aten._adaptive_avg_pool2d.default, (IMAGE.to(BF16), [3, 4]), {}),
    (aten._adaptive_avg_pool3d.default, (VOLUME, [2, 4, 5]), {}),
    (aten._adaptive_avg_pool2d_backward.default, (t(2, 3, 3, 5), IMAGE), {}),
    (aten._adaptive_avg_pool2d_backward.default, (t(2, 3, 3, 4), IMAGE), {}),
    (aten._adaptive_avg_pool3d_backward.default, (t(1, 2, 2, 4, 5), VOLUME), {}),
    (aten.adaptive_max_pool2d.default, (IMAGE, [3, 5]), {}),
    (aten.adaptive_max_pool2d.default, (IMAGE, [3, 4]), {}),
    (aten.adaptive_max_pool3d.default, (VOLUME, [2, 3, 5]), {}),
    (aten.adaptive_max_pool2d_backward.default, (t(2, 3, 3, 5), IMAGE, ADAPTIVE_2D), {}),
    (aten.adaptive_max_pool3d_backward.default, (t(1, 2, 2, 3, 5), VOLUME, ADAPTIVE_3D), {}),
    (aten.fractional_max_pool2d.default, (IMAGE, [2, 2], [3, 4], SAMPLES_2D), {}),
    (aten.fractional_max_pool3d.default, (VOLUME, [2, 2, 2], [2, 3, 3], SAMPLES_3D), {}),
    (aten.fractional_max_pool2d_backward.default, (t(2, 3, 3, 4), IMAGE, [2, 2], [3, 4], FRACTION_2D), {}),
    (aten.fractional_max_pool3d_backward.default, (t(1, 2, 2, 3, 3), VOLUME, [2, 2, 2], [2, 3, 3], FRACTION_3D), {}),
    (aten.max_unpool2d.default, (t(2, 3, 3, 5), ADAPTIVE_2D, [6, 8]), {}),
    (aten.max_unpool3d.default, (t(1, 2, 2, 3, 2), MAX_3D, [4, 6, 5], [2, 2, 2], [0, 0, 0]), {}),
]

RESAMPLING: list[Case] = [
    (aten.upsample_linear1d.default, (LINE, [10], False), {}),
    (aten.upsample_linear1d.default, (t(1, 2, 140), [33], True), {}),
    (aten.upsample_linear1d_backward.default, (t(2, 3, 10), [10], [2, 3, 7], False), {}),
    (aten.upsample_linear1d_backward.default, (t(1, 2, 33), [33], [1, 2, 140], True), {}),
    (aten.upsample_bilinear2d.default, (IMAGE, [12, 5], False, 2.0, None), {}),
    (aten.upsample_bilinear2d.default, (t(1, 2, 5, 5, dtype=torch.uint8) * 20, [10, 10], False), {}),
    (aten.upsample_bicubic2d.default, (IMAGE, [9, 16], True), {}),
    (aten.upsample_bicubic2d.default, (t(1, 3, 40, 50, dtype=torch.uint8) * 25, [28, 35], False), {}),
    (aten.upsample_bilinear2d_backward.default, (t(2, 3, 12, 5), [12, 5], [2, 3, 6, 8], False), {}),
    (aten.upsample_bicubic2d_backward.default, (t(2, 3, 9, 16), [9, 16], [2, 3, 6, 8], True), {}),
    (aten.upsample_bicubic2d_backward.default, (t(1, 1, 21, 9), [21, 9], [1, 1, 5, 140], False), {}),
    (aten.upsample_trilinear3d.default, (VOLUME, [8, 3, 7], False), {}),
    (aten.upsample_trilinear3d_backward.default, (t(1, 2, 8, 3, 7), [8, 3, 7], [1, 2, 4, 6, 5], False), {}),
    (aten._upsample_bilinear2d_aa.default, (IMAGE, [3, 5], False), {}),
    (aten._upsample_bilinear2d_aa.default, (t(1, 3, 40, 50, dtype=torch.uint8) * 25, [68, 45], False), {}),
    (aten._upsample_bicubic2d_aa.default, (IMAGE, [3, 12], True), {}),
    (aten._upsample_lanczos2d_aa.default, (IMAGE, [3, 5], False), {}),
    (aten._upsample_bilinear2d_aa_backward.default, (t(2, 3, 3, 5), [3, 5], [2, 3, 6, 8], False), {}),
    (aten._upsample_bicubic2d_aa_backward.default, (t(2, 3, 3, 12), [3, 12], [2, 3, 6, 8], True), {}),
    (aten._upsample_lanczos2d_aa_backward.default, (t(2, 3, 3, 5), [3, 5], [2, 3, 6, 8], False), {}),
    (aten.upsample_nearest1d_backward.default, (t(2, 3, 10), [10], [2, 3, 7]), {}),
    (aten.upsample_nearest2d_backward.default, (t(2, 3, 12, 4), [12, 4], [2, 3, 6, 8]), {}),
    (aten.upsample_nearest3d_backward.default, (t(1, 2, 8, 3, 5), [8, 3, 5], [1, 2, 4, 6, 5]), {}),
    (aten._upsample_nearest_exact1d_backward.default, (t(2, 3, 10), [10], [2, 3, 7]), {}),
    (aten._upsample_nearest_exact2d_backward.default, (t(2, 3, 12, 4), [12, 4], [2, 3, 6, 8]), {}),
    (aten._upsample_nearest_exact3d_backward.default, (t(1, 2, 8, 3, 5), [8, 3, 5], [1, 2, 4, 6, 5]), {}),
    (aten.grid_sampler_2d.default, (IMAGE, GRID_2D, 0, 0, False), {}),
    (aten.grid_sampler_2d.default, (IMAGE, GRID_2D, 1, 1, True), {}),
    (aten.grid_sampler_2d.default, (IMAGE, GRID_2D, 2, 2, False), {}),
    (aten.grid_sampler_3d.default, (VOLUME, GRID_3D, 0, 2, True), {}),
    (aten.grid_sampler_2d_backward.default, (t(2, 3, 4, 3), IMAGE, GRID_2D, 0, 1, False, [True, True]), {}),
    (aten.grid_sampler_2d_backward.default, (t(2, 3, 4, 3), IMAGE, GRID_2D, 2, 0, True, [True, True]), {}),
    (aten.grid_sampler_3d_backward.default, (t(1, 2, 2, 3, 4), VOLUME, GRID_3D, 0, 2, False, [True, True]), {}),
]

# Eigenvectors and singular vectors are unique up to a phase only: of diagonal matrices ATen's and ours are equal.
LINEAR_ALGEBRA: list[Case] = [
    (aten.linalg_cholesky_ex.default, (POSITIVE,), {}),
    (aten.linalg_cholesky_ex.default, (COMPLEX @ COMPLEX.mH,), {"upper": True}),
    (aten.cholesky.default, (POSITIVE,), {}),
    (aten.cholesky_inverse.default, (FACTOR[0],), {}),
    (aten._cholesky_solve_helper.default, (RIGHT, FACTOR.mT.contiguous(), True), {}),
    (aten.linalg_solve_triangular.default, (FACTOR, RIGHT), {"upper": False}),
    (aten.linalg_solve_triangular.default, (COMPLEX, t(2, 2, 3, dtype=C64)), {"upper": True, "left": False}),
    (aten.triangular_solve.default, (RIGHT, FACTOR, False, True), {}),
    (aten.linalg_qr.default, (TALL,), {}),
    (aten.linalg_qr.default, (TALL, "complete"), {}),
    (aten.linalg_qr.default, (TALL.mT.contiguous(), "r"), {}),
    (aten.geqrf.default, (TALL,), {}),
    (aten.linalg_householder_product.default, (REFLECTORS, TAU), {}),
    (aten.ormqr.default, (REFLECTORS, TAU, t(2, 5, 2, dtype=F64), True, True), {}),
    (aten.linalg_lu_factor_ex.default, (SQUARE.flip(-1),), {}),
    (aten.linalg_lu_factor_ex.default, (BIG,), {}),
    (aten.linalg_lu.default, (TALL.flip(1),), {}),
    (aten.lu_unpack.default, (LU, PIVOTS), {}),
    (aten.linalg_lu_solve.default, (LU, PIVOTS, RIGHT), {"adjoint": True}),
    (aten.linalg_lu_solve.default, (LU, PIVOTS, RIGHT.mT.contiguous()), {"left": False}),
    (aten._linalg_solve_ex.default, (SQUARE, RIGHT), {}),
    (aten._linalg_solve_ex.default, (COMPLEX, t(3, dtype=C64)), {}),
    (aten.linalg_inv_ex.default, (SQUARE.flip(-1),), {}),
    (aten._linalg_det.default, (SQUARE.flip(-1),), {}),
    (aten._linalg_slogdet.default, (COMPLEX.flip(-1),), {}),
    (aten._linalg_eigh.default, (POSITIVE, "L", False), {}),
    (aten._linalg_eigh.default, (torch.diag(torch.tensor([1.0, 2.0, 4.0])), "U"), {}),
    (aten._linalg_svd.default, (TALL, False, False), {}),
    (aten._linalg_svd.default, (torch.diag(torch.tensor([4.0, 2.0, 1.0])), True), {}),
    (aten.linalg_matrix_exp.default, (SQUARE - 3,), {}),
    (aten.linalg_matrix_exp.default, (COMPLEX,), {}),
    (aten.linalg_cross.default, (t(2, 3, 4), t(2, 3, 1, seed=1)), {"dim": 1}),
]

DISTANCES: list[Case] = [
    *((aten._cdist_forward.default, (ROWS, OTHERS, p, None), {}) for p in (0.0, 0.5, 1.0, 2.0, 3.0, INF)),
    (aten._cdist_forward.default, (ROWS, OTHERS, 2.0, 1), {}),
    *(
        (aten._cdist_backward.default, (t(2, 4, 5), ROWS, OTHERS, p, torch.cdist(ROWS, OTHERS, p)), {})
        for p in (1.0, 1.5, 2.0, 3.0, INF)
    ),
    (aten._pdist_forward.default, (PAIRS, 2.0), {}),
    (aten._pdist_backward.default, (t(10), PAIRS, 3.0, torch.pdist(PAIRS, 3.0)), {}),
]

# Not part of CASES while `register` takes these for composite (see lowering/resample_nearest.py).
NEAREST: list[Case] = [
    (aten.upsample_nearest1d.default, (LINE, [10]), {}),
    (aten.upsample_nearest2d.default, (IMAGE, [12, 4]), {}),
    (aten.upsample_nearest2d.default, (IMAGE, [12, 9], 2.0, 1.2), {}),
    (aten.upsample_nearest3d.default, (VOLUME, [8, 3, 5]), {}),
    (aten._upsample_nearest_exact1d.default, (LINE, [10]), {}),
    (aten._upsample_nearest_exact2d.default, (IMAGE, [12, 4]), {}),
    (aten._upsample_nearest_exact3d.default, (VOLUME, [8, 3, 5]), {}),
]

CASES: list[Case] = [*PRODUCTS, *CONVOLUTIONS, *POOLS, *RESAMPLING, *LINEAR_ALGEBRA, *DISTANCES]
