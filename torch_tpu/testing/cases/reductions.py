"""Reductions, scans, norms, losses, sorting and searching."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch._ops import OpOverload

from torch_tpu.testing.cases import t

aten = torch.ops.aten

Case = tuple[OpOverload, tuple[Any, ...], dict[str, Any]]

_bf16 = torch.bfloat16
_i64 = torch.int64
_bool = torch.bool

_x = t(2, 3, 5)
_nan = torch.where(t(2, 3, 5, dtype=_bool, seed=1), t(2, 3, 5), torch.tensor(math.nan))
_signed = t(4, 7) - 1.0


_HASHES: list[Case] = [
    (aten.hash_tensor.default, (_signed,), {}),
    (aten.hash_tensor.default, (_signed, [1]), {"keepdim": True}),
    (aten.hash_tensor.default, (t(3, 4, dtype=_i64), [0]), {}),
    (aten.hash_tensor.default, (_signed.to(_bf16), [0, 1]), {}),
]


def _each(ops: list[OpOverload], *args: Any, **kwargs: Any) -> list[Case]:
    return [(op, args, kwargs) for op in ops]


REDUCTIONS: list[Case] = [
    *_each([aten.sum.default, aten.mean.default, aten.prod.default, aten.max.default, aten.min.default], _x),
    *_each([aten.any.default, aten.all.default], t(2, 3, dtype=_bool)),
    *_each([aten.any.dim, aten.all.dim], t(2, 3), 1, True),
    *_each([aten.any.dims, aten.all.dims], t(2, 3, 4, dtype=torch.uint8), [0, 2]),
    *_each(
        [aten.sum.dim_IntList, aten.mean.dim, aten.amax.default, aten.amin.default], t(2, 3, 5, dtype=_bf16), [0, 2]
    ),
    *_each([aten.amax.default, aten.amin.default], _nan, [1], True),
    *_each([aten.max.dim, aten.min.dim, aten.argmax.default, aten.argmin.default], _nan, 1),
    *_each([aten.max.dim, aten.min.dim], t(2, 3, dtype=_i64), -1, True),
    *_each([aten.argmax.default, aten.argmin.default], t(4, 9, dtype=torch.int32)),
    *_each([aten.var.correction, aten.std.correction, aten.var_mean.correction, aten.std_mean.correction], _x, [1]),
    *_each([aten.var.correction, aten.std.correction], t(3, 4, dtype=torch.complex64), None, correction=0.5),
    (aten.var_mean.correction, (t(6, 4) + 1000.0, [0]), {"correction": 0, "keepdim": True}),
    (aten.sum.dim_IntList, (t(2, 3, dtype=torch.uint8), [1]), {}),
    (aten.sum.default, (t(2, 3, dtype=_bool),), {}),
    (aten.sum.default, (t(2, 3, dtype=_i64),), {"dtype": torch.float64}),
    (aten.nansum.default, (_nan, [1]), {}),
    (aten.prod.dim_int, (t(2, 3, dtype=torch.int32), 0), {}),
    (aten.count_nonzero.default, (t(3, 4, dtype=_i64), 1), {}),
    (aten.count_nonzero.dim_IntList, (t(3, 4, dtype=_bf16), [0, 1]), {}),
    (aten.trace.default, (t(3, 5, dtype=_i64),), {}),
    (aten.aminmax.default, (_nan,), {"dim": 2, "keepdim": True}),
    (aten.aminmax.default, (_x,), {}),
    (aten.logsumexp.default, (_x, [0, 2]), {}),
    (aten.logsumexp.default, (t(2, 3, dtype=torch.complex64), [1]), {}),
    *[(aten.linalg_vector_norm.default, (_signed, p, [1]), {}) for p in (0, 1, 2, 2.5, math.inf, -math.inf)],
    (aten.linalg_vector_norm.default, (t(3, 4, dtype=torch.complex64), 2, None, True), {}),
    (aten.norm.Scalar, (_signed, 3), {}),
    (aten.norm.ScalarOpt_dtype, (_signed, None), {"dtype": torch.float64}),
    (aten.norm.ScalarOpt_dim, (_signed, 1, [0]), {}),
    (aten.norm.ScalarOpt_dim_dtype, (t(2, 3, dtype=_bf16), 2, [1], True), {"dtype": torch.float32}),
    (aten.renorm.default, (_signed, 2, 0, 1.5), {}),
]

SCANS: list[Case] = [
    *_each([aten.cumsum.default, aten.cumprod.default, aten.logcumsumexp.default], t(3, 40), 1),
    *_each([aten.cumsum.default, aten.cumprod.default], t(300, dtype=_i64), 0),
    *_each([aten.cummax.default, aten.cummin.default], _nan, 2),
    *_each([aten.cummax.default, aten.cummin.default], t(40, 2, dtype=_i64), 0),
    (aten.cumsum.default, (t(5, 3, dtype=_bool), 0), {}),
    (aten._logcumsumexp.default, (_signed, 0), {}),
]


def _batch_norm(*last: Any) -> tuple[Any, ...]:
    return (t(4, 3, 5), t(3), t(3, seed=1), t(3, seed=2), t(3, seed=3), *last)


_ln_args = (t(2, 4), t(2, 1, seed=1), t(2, 1, seed=2), t(4, seed=3), t(4, seed=4))

NORMS: list[Case] = [
    (aten._softmax.default, (_signed, 1, False), {}),
    (aten._softmax.default, (t(2, 3, dtype=_bf16), 0, False), {}),
    (aten._log_softmax.default, (_signed, -1, False), {}),
    (aten._safe_softmax.default, (torch.cat([_signed, torch.full((1, 7), -math.inf)]), -1), {}),
    (aten._softmax_backward_data.default, (t(4, 7), t(4, 7, seed=1), 1, torch.float32), {}),
    (aten._log_softmax_backward_data.default, (t(4, 7), _signed, 1, torch.float32), {}),
    (aten.native_layer_norm.default, (t(2, 4), [4], t(4), None, 1e-5), {}),
    (
        aten.native_layer_norm_backward.default,
        (t(2, 4), _ln_args[0], [4], *_ln_args[1:], [True, True, True]),
        {},
    ),
    (aten.native_group_norm.default, (t(2, 6, 4), t(6), t(6, seed=1), 2, 6, 4, 3, 1e-5), {}),
    (
        aten.native_group_norm_backward.default,
        (t(2, 6, 4), t(2, 6, 4, seed=1), t(2, 3), t(2, 3, seed=1), t(6), 2, 6, 4, 3, [True, True, True]),
        {},
    ),
    (aten.native_batch_norm.default, _batch_norm(True, 0.1, 1e-5), {}),
    (aten.native_batch_norm.default, _batch_norm(False, 0.1, 1e-5), {}),
    (aten._native_batch_norm_legit.no_stats, (t(4, 3), None, None, True, 0.1, 1e-5), {}),
    (aten._native_batch_norm_legit_functional.default, _batch_norm(True, 0.1, 1e-5), {}),
    (aten._native_batch_norm_legit_no_training.default, _batch_norm(0.1, 1e-5), {}),
    (aten._batch_norm_with_update_functional.default, _batch_norm(0.1, 1e-5), {}),
    (aten._batch_norm_no_update.default, _batch_norm(0.1, 1e-5), {}),
    *[
        (
            aten.native_batch_norm_backward.default,
            (t(4, 3, 5, seed=5), *_batch_norm()[:2], *_batch_norm()[3:], t(3), t(3, seed=1), train, 1e-5, [True] * 3),
            {},
        )
        for train in (True, False)
    ],
    (
        aten.batch_norm_backward.default,
        (
            *(t(4, 3, 5, seed=5), *_batch_norm()[:2], *_batch_norm()[3:], t(3), t(3, seed=1)),
            *(True, 1e-5, [True] * 3, torch.empty(0, dtype=torch.uint8)),
        ),
        {},
    ),
    (aten.batch_norm_update_stats.default, (t(4, 3, 5), t(3), t(3, seed=1), 0.1), {}),
    (aten._weight_norm_interface.default, (t(3, 4), t(3, 1)), {}),
    (aten._weight_norm_interface_backward.default, (t(3, 4), t(3, 4, seed=1), t(3, 1), t(3, 1, seed=1), 0), {}),
]

_label = torch.tensor([1, 0, 2, 1])
_labels = torch.tensor([[1, 0, -1], [2, -1, 0], [-1, 1, 1], [0, 1, 2]])
_scores = t(4, 3) - 1.0
_plane = t(2, 3, 2, 2), torch.tensor([[[0, 1], [2, 1]], [[1, 1], [0, -100]]])
_one = torch.tensor(0.5)
_element_wise = [aten.mse_loss, aten.smooth_l1_loss, aten.huber_loss, aten.soft_margin_loss]
_more: dict[OpOverload, tuple[Any, ...]] = {
    aten.smooth_l1_loss_backward.default: (0.3,),
    aten.huber_loss_backward.default: (0.3,),
}

LOSSES: list[Case] = [
    *[(p.default, (_scores, t(4, 3, seed=1), r), {}) for p in _element_wise for r in (0, 1, 2)],
    *[
        (op, (_one, _scores, t(4, 3, seed=1), 1, *_more.get(op, ())), {})
        for op in (
            aten.mse_loss_backward.default,
            aten.smooth_l1_loss_backward.default,
            aten.huber_loss_backward.default,
            aten.soft_margin_loss_backward.default,
        )
    ],
    (aten.binary_cross_entropy.default, (t(4, 3) - 0.5, t(4, 3, seed=1) - 0.5, t(3)), {}),
    (aten.binary_cross_entropy_backward.default, (_one, t(4, 3) - 0.5, t(4, 3, seed=1) - 0.5), {}),
    (aten.binary_cross_entropy_with_logits.default, (_scores, t(4, 3, seed=1), t(3), t(3, seed=2), 0), {}),
    (aten.nll_loss_forward.default, (_scores, _label, t(3), 1, 0), {}),
    (aten.nll_loss_forward.default, (t(4, 40), _label, t(40), 0, -100), {}),
    (aten.nll_loss_backward.default, (_one, _scores, _label, t(3), 1, 0, torch.tensor(2.0)), {}),
    (aten.nll_loss2d_forward.default, (*_plane, None, 2, -100), {}),
    (aten.nll_loss2d_backward.default, (_one, *_plane, None, 1, -100, torch.tensor(7.0)), {}),
    (aten.multi_margin_loss.default, (_scores, _label, 2, 1.0, t(3)), {}),
    (aten.multi_margin_loss_backward.default, (_one, _scores, _label, 1, 1.0), {}),
    (aten.multilabel_margin_loss_forward.default, (_scores, _labels, 1), {}),
    (aten.multilabel_margin_loss_backward.default, (_one, _scores, _labels, 1, torch.zeros(4, 3)), {}),
]

_bounds = torch.tensor([0.2, 0.6, 0.9, 1.2])

ORDER: list[Case] = [
    *[(aten.sort.stable, (x,), {"stable": True, "descending": d}) for x in (_nan, _x.double()) for d in (False, True)],
    (aten.sort.stable, (t(40, 2, dtype=_i64),), {"stable": True, "dim": 0}),
    (aten.sort.default, (torch.randperm(9, generator=torch.Generator().manual_seed(0)).to(torch.int16),), {}),
    (aten.topk.default, (_signed, 2), {}),
    (aten.topk.default, (t(50, 2, dtype=_bf16), 1, 0, False), {}),
    (aten.topk.default, (torch.arange(6).reshape(2, 3), 2), {}),
    (aten.kthvalue.default, (_signed, 3, 1, True), {}),
    *_each([aten.median.default, aten.nanmedian.default], _nan),
    *_each([aten.median.dim, aten.nanmedian.dim], _signed, 0),
    (aten.mode.default, (t(3, 9, dtype=_i64), 1), {}),
    (aten.searchsorted.Tensor, (_bounds, t(3, 4)), {"right": True}),
    (aten.searchsorted.Tensor, (torch.arange(200.0), t(3, 4) * 100), {"side": "left"}),
    (aten.searchsorted.Scalar, (_bounds, 0.7), {"sorter": torch.tensor([0, 1, 2, 3])}),
    (aten.bucketize.Tensor, (t(3, 4), _bounds), {"out_int32": True}),
    (aten.bucketize.Scalar, (0.6, _bounds), {}),
    (aten.histc.default, (t(50), 8), {}),
    (aten.histc.default, (t(50), 200, 0.6, 1.4), {}),
]

# Sequences that fill their length: the CPU leaves what is beyond a shorter one's unset.
_CTC = (t(6, 2, 4).log_softmax(2), torch.tensor([[1, 1, 3], [2, 3, 1]]), [6, 6], [3, 3])
CTC: list[Case] = [
    (aten._ctc_loss.default, _CTC, {}),
    (aten._ctc_loss_backward.default, (t(2), *_CTC, *torch._ctc_loss(*_CTC), 0, True), {}),
]

CASES: list[Case] = [*CTC, *_HASHES, *REDUCTIONS, *SCANS, *NORMS, *LOSSES, *ORDER]

# Rules of ops that ATen has for accelerators only: these compile, there is nothing to compare them with.
NO_REFERENCE: list[Case] = [
    (aten.batch_norm_stats.default, (t(4, 3, 5), 1e-5), {}),
    (aten.batch_norm_elemt.default, (t(4, 3, 5), t(3), t(3), t(3), t(3), 1e-5), {}),
    (aten.batch_norm_gather_stats.default, (t(4, 3), t(2, 3), t(2, 3), t(3), t(3), 0.1, 1e-5, 4), {}),
    (
        aten.batch_norm_gather_stats_with_counts.default,
        (t(4, 3), t(2, 3), t(2, 3), t(3), t(3), 0.1, 1e-5, torch.tensor([4.0, 4.0])),
        {},
    ),
    (aten.batch_norm_backward_reduce.default, (t(4, 3), t(4, 3), t(3), t(3), t(3), True, True, True), {}),
    (
        aten.batch_norm_backward_elemt.default,
        (t(4, 3), t(4, 3), t(3), t(3), t(3), t(3), t(3), torch.tensor([4, 4])),
        {},
    ),
]
