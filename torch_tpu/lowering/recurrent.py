"""Cells of LSTM and GRU: the fused forms that PyTorch's recurrent layers call on a device of this kind.

Gates lie side by side in the last dim: input, forget, cell, output for an LSTM; reset, update, new for a GRU. The
workspace keeps what the backward needs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from torch_tpu.ir.builder import Value
from torch_tpu.ir.types import compute_dtype
from torch_tpu.lowering.registry import LowerContext, lowers

aten = torch.ops.aten


def _wide(cx: LowerContext, x: Value) -> Value:
    return cx.b.convert(x, compute_dtype(x.dtype))


def _gates(cx: LowerContext, x: Value, bias: Value | None, count: int) -> list[Value]:
    """The ``count`` gates of (batch, count * hidden) with the bias added, in the compute type."""
    b = cx.b
    x = _wide(cx, x)
    if bias is not None:
        x = b.add(x, b.broadcast_in_dim(_wide(cx, bias), x.shape, [1]))
    hidden = x.shape[1] // count
    return [b.slice_dim(x, 1, k * hidden, (k + 1) * hidden) for k in range(count)]


def _complement(cx: LowerContext, x: Value) -> Value:
    return cx.b.sub(cx.b.constant(1, x.dtype, x.shape), x)


def _sigmoid_gradient(cx: LowerContext, grad: Value, s: Value) -> Value:
    return cx.b.mul(grad, cx.b.mul(s, _complement(cx, s)))


def _tanh_gradient(cx: LowerContext, grad: Value, t: Value) -> Value:
    return cx.b.mul(grad, _complement(cx, cx.b.mul(t, t)))


def _without_bias(args: Mapping[str, Any], meta: Callable[[], list[Any]]) -> list[Any]:
    """The meta kernel looks at the biases even if there are none."""
    if args["input_bias"] is not None:
        return meta()
    hidden = torch.empty_like(args["cx"], memory_format=torch.contiguous_format)
    gates = torch.empty_like(args["input_gates"], memory_format=torch.contiguous_format)
    return [hidden, torch.empty_like(hidden), gates]


@lowers(aten._thnn_fused_lstm_cell.default, promise=_without_bias)
def thnn_fused_lstm_cell(
    cx_: LowerContext,
    input_gates: Value,
    hidden_gates: Value,
    cx: Value,
    input_bias: Value | None = None,
    hidden_bias: Value | None = None,
) -> tuple[Value, ...]:
    b = cx_.b
    from_input, from_hidden = _gates(cx_, input_gates, input_bias, 4), _gates(cx_, hidden_gates, hidden_bias, 4)
    i, f, g, o = (b.add(x, h) for x, h in zip(from_input, from_hidden, strict=True))
    i, f, o = (b.unary("logistic", v) for v in (i, f, o))
    g = b.unary("tanh", g)
    cy = b.add(b.mul(f, _wide(cx_, cx)), b.mul(i, g))
    hy = b.mul(o, b.unary("tanh", cy))
    return cx_.result(hy, 0), cx_.result(cy, 1), cx_.result(b.concatenate([i, f, g, o], 1), 2)


@lowers(aten._thnn_fused_lstm_cell_backward_impl.default)
def thnn_fused_lstm_cell_backward_impl(
    cx_: LowerContext,
    grad_hy: Value | None,
    grad_cy: Value | None,
    cx: Value,
    cy: Value,
    workspace: Value,
    has_bias: bool,
) -> tuple[Value | None, ...]:
    b = cx_.b
    i, f, g, o = _gates(cx_, workspace, None, 4)
    zero = b.constant(0, i.dtype, i.shape)
    grad_h = zero if grad_hy is None else _wide(cx_, grad_hy)
    grad_c = zero if grad_cy is None else _wide(cx_, grad_cy)
    tanh_c = b.unary("tanh", _wide(cx_, cy))
    grad_c = b.add(_tanh_gradient(cx_, b.mul(grad_h, o), tanh_c), grad_c)
    grads = b.concatenate(
        [
            _sigmoid_gradient(cx_, b.mul(grad_c, g), i),
            _sigmoid_gradient(cx_, b.mul(grad_c, _wide(cx_, cx)), f),
            _tanh_gradient(cx_, b.mul(grad_c, i), g),
            _sigmoid_gradient(cx_, b.mul(grad_h, tanh_c), o),
        ],
        1,
    )
    grad_bias = b.convert(b.reduce_op("add", grads, 0, [0]), workspace.dtype) if has_bias else None
    return b.convert(grads, workspace.dtype), b.convert(b.mul(grad_c, f), cx.dtype), grad_bias


@lowers(aten._thnn_fused_gru_cell.default)
def thnn_fused_gru_cell(
    cx: LowerContext,
    input_gates: Value,
    hidden_gates: Value,
    hx: Value,
    input_bias: Value | None = None,
    hidden_bias: Value | None = None,
) -> tuple[Value, ...]:
    b = cx.b
    x_reset, x_update, x_new = _gates(cx, input_gates, input_bias, 3)
    h_reset, h_update, h_new = _gates(cx, hidden_gates, hidden_bias, 3)
    hidden = _wide(cx, hx)
    reset = b.unary("logistic", b.add(x_reset, h_reset))
    update = b.unary("logistic", b.add(x_update, h_update))
    new = b.unary("tanh", b.add(x_new, b.mul(reset, h_new)))
    hy = b.add(new, b.mul(update, b.sub(hidden, new)))
    return cx.result(hy, 0), cx.result(b.concatenate([reset, update, new, hidden, h_new], 1), 1)


@lowers(aten._thnn_fused_gru_cell_backward.default)
def thnn_fused_gru_cell_backward(
    cx: LowerContext, grad_hy: Value, workspace: Value, has_bias: bool
) -> tuple[Value | None, ...]:
    b, dtype = cx.b, workspace.dtype
    reset, update, new, hidden, h_new = _gates(cx, workspace, None, 5)
    grad = _wide(cx, grad_hy)
    grad_update = _sigmoid_gradient(cx, b.mul(grad, b.sub(hidden, new)), update)
    grad_new = _tanh_gradient(cx, b.mul(grad, _complement(cx, update)), new)
    grad_reset = _sigmoid_gradient(cx, b.mul(grad_new, h_new), reset)
    grad_input = b.concatenate([grad_reset, grad_update, grad_new], 1)
    grad_hidden = b.concatenate([grad_reset, grad_update, b.mul(grad_new, reset)], 1)
    biases = [b.convert(b.reduce_op("add", g, 0, [0]), dtype) if has_bias else None for g in (grad_input, grad_hidden)]
    return (b.convert(grad_input, dtype), b.convert(grad_hidden, dtype), b.convert(b.mul(grad, update), dtype), *biases)
