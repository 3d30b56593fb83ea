"""Meta kernels of ops that have a rule here and no meta kernel in PyTorch.

A rule's result types come from the meta kernel, so without one the op would run on the CPU. Registered for the meta
device only; where PyTorch has a meta kernel, its own is kept.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._ops import OpOverload

from torch_tpu.lowering.composed import COMPOSED

aten = torch.ops.aten

Tensor = torch.Tensor
Maybe = Tensor | None


def _wide(t: Tensor) -> torch.dtype:
    return torch.float32 if t.dtype in (torch.float16, torch.bfloat16) else t.dtype


def _channels(input: Tensor) -> Tensor:
    return input.new_empty((input.shape[1],), dtype=_wide(input))


def _stats(input: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return _channels(input), _channels(input)


def _update_stats(input: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return input.new_empty((input.shape[1],)), input.new_empty((input.shape[1],))


def _gather_stats(input: Tensor, mean: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return mean.new_empty(mean.shape[1:], dtype=_wide(mean)), mean.new_empty(mean.shape[1:], dtype=_wide(mean))


def _elemt(input: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(input)


def _backward_reduce(
    grad_out: Tensor,
    input: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Maybe,
    input_g: bool,
    weight_g: bool,
    bias_g: bool,
) -> tuple[Maybe, Maybe, Maybe, Maybe]:
    c = (input.shape[1],)
    like = input if weight is None else weight
    return (
        mean.new_empty(c) if input_g else None,
        mean.new_empty(c) if input_g else None,
        like.new_empty(c) if weight_g else None,
        like.new_empty(c) if bias_g else None,
    )


def _backward_elemt(grad_out: Tensor, input: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(input)


def _like_self(grad_output: Tensor, self: Tensor, *_: Any, **__: Any) -> Tensor:
    return torch.empty_like(self)


def _fake_quantized(self: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(self), torch.empty_like(self, dtype=torch.bool)


def _learnable_backward(
    grad: Tensor, self: Tensor, scale: Tensor, zero_point: Tensor, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(self), torch.empty_like(scale), torch.empty_like(zero_point)


def _same(self: Tensor, *_: Any, **__: Any) -> Tensor:
    return torch.empty_like(self)


def _dequantized(self: Tensor) -> Tensor:
    return torch.empty_like(self, dtype=torch.float32)


def _geqrf(self: Tensor) -> tuple[Tensor, Tensor]:
    *batch, m, n = self.shape
    return torch.empty_like(self), self.new_empty([*batch, min(m, n)])


def _bincount(self: Tensor, weights: Maybe = None, minlength: int = 0) -> Tensor:
    """The dispatcher passes the number of bins as ``minlength``."""
    if weights is None:
        return self.new_empty(minlength, dtype=torch.int64)
    return self.new_empty(minlength, dtype=weights.dtype if weights.dtype == torch.float32 else torch.float64)


def _ctc_backward(grad: Tensor, log_probs: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(log_probs)


def _gru(input_gates: Tensor, hidden_gates: Tensor, hx: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return hx.new_empty(hx.shape), hx.new_empty((hx.shape[0], 5 * hx.shape[1]))


def _gru_backward(grad_hy: Tensor, workspace: Tensor, has_bias: bool) -> tuple[Tensor, Tensor, Tensor, Maybe, Maybe]:
    rows, hidden = grad_hy.shape
    gates = workspace.new_empty((rows, 3 * hidden))
    biases = (workspace.new_empty(3 * hidden), workspace.new_empty(3 * hidden)) if has_bias else (None, None)
    return gates, torch.empty_like(gates), workspace.new_empty(grad_hy.shape), *biases


def _updated(op: OpOverload) -> Callable[..., Any]:
    """Results ``x_out`` are lists like the arguments ``x``."""
    names = [a.name for a in op._schema.arguments]
    results = [r.name.removesuffix("_out") for r in op._schema.returns]

    def kernel(*args: Any, **kwargs: Any) -> tuple[list[Tensor], ...]:
        given = dict(zip(names, args, strict=False)) | kwargs
        return tuple([torch.empty_like(t) for t in given[name]] for name in results)

    return kernel


_FUSED = (
    aten._fused_sgd.default,
    aten._fused_sgd.tensor_lr,
    aten._fused_adagrad.default,
    aten._fused_adagrad.tensor_lr,
    aten._fused_adam.tensor_lr,
    aten._fused_adamw.default,
    aten._fused_adamw.tensor_lr,
)

META: dict[OpOverload, Callable[..., Any]] = {
    aten.batch_norm_stats.default: _stats,
    aten.batch_norm_update_stats.default: _update_stats,
    aten.batch_norm_elemt.default: _elemt,
    aten.batch_norm_gather_stats.default: _gather_stats,
    aten.batch_norm_gather_stats_with_counts.default: _gather_stats,
    aten.batch_norm_backward_reduce.default: _backward_reduce,
    aten.batch_norm_backward_elemt.default: _backward_elemt,
    aten.multi_margin_loss_backward.default: _like_self,
    aten.multilabel_margin_loss_backward.default: _like_self,
    aten.fake_quantize_per_tensor_affine_cachemask.default: _fake_quantized,
    aten._fake_quantize_per_tensor_affine_cachemask_tensor_qparams.default: _fake_quantized,
    aten.fake_quantize_per_channel_affine_cachemask.default: _fake_quantized,
    aten._fake_quantize_learnable_per_tensor_affine.default: _same,
    aten._fake_quantize_learnable_per_channel_affine.default: _same,
    aten._fake_quantize_learnable_per_tensor_affine_backward.default: _learnable_backward,
    aten._fake_quantize_learnable_per_channel_affine_backward.default: _learnable_backward,
    aten.dequantize.self: _dequantized,
    aten.binomial.default: _same,
    aten._sample_dirichlet.default: _same,
    aten._standard_gamma_grad.default: _same,
    aten._dirichlet_grad.default: _same,
    aten.fractional_max_pool3d_backward.default: _like_self,
    aten._logcumsumexp.default: _same,
    aten.glu_jvp.default: _same,
    aten.glu_backward_jvp.default: _same,
    aten.geqrf.default: _geqrf,
    **{op: _updated(op) for op in _FUSED},
    aten._thnn_fused_gru_cell.default: _gru,
    aten._thnn_fused_gru_cell_backward.default: _gru_backward,
    aten.bincount.default: _bincount,
    aten._ctc_loss_backward.default: _ctc_backward,
}

_library = torch.library.Library("aten", "IMPL")
for _op, _kernel in (META | COMPOSED).items():
    if not torch._C._dispatch_has_kernel_for_dispatch_key(_op.name(), "Meta"):
        _library.impl(_op, _kernel, "Meta")
