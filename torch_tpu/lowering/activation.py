"""Activation functions and their derivatives, as PyTorch's autograd formulas call them."""

from __future__ import annotations

import math

import torch

from torch_tpu.ir.builder import Value
from torch_tpu.lowering.expr import Expr, expr, where
from torch_tpu.lowering.promote import Operand, norm_dim, operand
from torch_tpu.lowering.registry import LowerContext, lowers
from torch_tpu.lowering.special import erf

aten = torch.ops.aten


# ---- threshold family


@lowers(aten.relu.default)
def relu(cx: LowerContext, self: Value) -> Value:
    return cx.result(expr(cx, self).max(0).v)


@lowers(aten.threshold.default)
def threshold(cx: LowerContext, self: Value, threshold: Operand, value: Operand) -> Value:
    x = expr(cx, self)
    return cx.result(where(x <= expr(cx, threshold), expr(cx, value), x).v)


@lowers(aten.threshold_backward.default)
def threshold_backward(cx: LowerContext, grad_output: Value, self: Value, threshold: Operand) -> Value:
    return cx.result(where(expr(cx, self) <= expr(cx, threshold), 0, expr(cx, grad_output)).v)


@lowers(aten.leaky_relu.default)
def leaky_relu(cx: LowerContext, self: Value, negative_slope: Operand = 0.01) -> Value:
    x = expr(cx, self)
    return cx.result(where(x > 0, x, x * expr(cx, negative_slope)).v)


@lowers(aten.leaky_relu_backward.default)
def leaky_relu_backward(
    cx: LowerContext, grad_output: Value, self: Value, negative_slope: Operand, self_is_result: bool
) -> Value:
    grad = expr(cx, grad_output)
    return cx.result(where(expr(cx, self) > 0, grad, grad * expr(cx, negative_slope)).v)


@lowers(aten._prelu_kernel.default)
def prelu(cx: LowerContext, self: Value, weight: Value) -> Value:
    x = expr(cx, self)
    return cx.result(where(x > 0, x, x * expr(cx, weight)).v)


@lowers(aten._prelu_kernel_backward.default)
def prelu_backward(cx: LowerContext, grad_output: Value, self: Value, weight: Value) -> tuple[Value, Value]:
    """The weight is already broadcast; autograd sums its gradient."""
    grad, x = expr(cx, grad_output), expr(cx, self)
    positive = x > 0
    of_input = where(positive, grad, grad * expr(cx, weight))
    return cx.result(of_input.v, 0), cx.result(where(positive, 0, grad * x).v, 1)


@lowers(aten.rrelu_with_noise_backward.default)
def rrelu_with_noise_backward(
    cx: LowerContext,
    grad_output: Value,
    self: Value,
    noise: Value,
    lower: Operand,
    upper: Operand,
    training: bool,
    self_is_result: bool,
) -> Value:
    grad = expr(cx, grad_output)
    if training:  # ATen skips the noise where lower and upper are nearly equal: there it is constant
        span = expr(cx, upper, shape=()) - expr(cx, lower, shape=())
        leak = (expr(cx, lower) + expr(cx, upper)) * 0.5
        flat = where(expr(cx, self) > 0, grad, grad * leak)
        return cx.result(where(span > 1e-6, grad * expr(cx, noise), flat).v)
    leak = (expr(cx, lower) + expr(cx, upper)) * 0.5
    return cx.result(where(expr(cx, self) > 0, grad, grad * leak).v)


@lowers(aten.hardtanh.default)
def hardtanh(cx: LowerContext, self: Value, min_val: Operand = -1, max_val: Operand = 1) -> Value:
    return cx.result(expr(cx, self).max(expr(cx, min_val)).min(expr(cx, max_val)).v)


@lowers(aten.hardtanh_backward.default)
def hardtanh_backward(cx: LowerContext, grad_output: Value, self: Value, min_val: Operand, max_val: Operand) -> Value:
    x = expr(cx, self)
    outside = (x <= expr(cx, min_val)) | (x >= expr(cx, max_val))
    return cx.result(where(outside, 0, expr(cx, grad_output)).v)


@lowers(aten.hardshrink.default)
def hardshrink(cx: LowerContext, self: Value, lambd: Operand = 0.5) -> Value:
    x, bound = expr(cx, self), expr(cx, lambd)
    return cx.result(where((x >= -bound) & (x <= bound), 0, x).v)


@lowers(aten.hardshrink_backward.default)
def hardshrink_backward(cx: LowerContext, grad_out: Value, self: Value, lambd: Operand) -> Value:
    x, bound = expr(cx, self), expr(cx, lambd)
    return cx.result(where((x >= -bound) & (x <= bound), 0, expr(cx, grad_out)).v)


@lowers(aten.softshrink.default)
def softshrink(cx: LowerContext, self: Value, lambd: Operand = 0.5) -> Value:
    x, bound = expr(cx, self), expr(cx, lambd)
    inside = where(x.is_nan(), x, 0)
    return cx.result(where(x > bound, x - bound, where(x < -bound, x + bound, inside)).v)


@lowers(aten.softshrink_backward.default)
def softshrink_backward(cx: LowerContext, grad_output: Value, self: Value, lambd: Operand) -> Value:
    x, bound = expr(cx, self), expr(cx, lambd)
    return cx.result(where((x >= -bound) & (x <= bound), 0, expr(cx, grad_output)).v)


@lowers(aten.hardsigmoid.default)
def hardsigmoid(cx: LowerContext, self: Value) -> Value:
    return cx.result(((expr(cx, self) + 3).max(0).min(6) / 6).v)


@lowers(aten.hardsigmoid_backward.default)
def hardsigmoid_backward(cx: LowerContext, grad_output: Value, self: Value) -> Value:
    x = expr(cx, self)
    return cx.result(where((x > -3) & (x < 3), expr(cx, grad_output) / 6, 0).v)


@lowers(aten.hardswish.default)
def hardswish(cx: LowerContext, self: Value) -> Value:
    x = expr(cx, self)
    return cx.result((x * (x + 3).max(0).min(6) / 6).v)


@lowers(aten.hardswish_backward.default)
def hardswish_backward(cx: LowerContext, grad_output: Value, self: Value) -> Value:
    x, grad = expr(cx, self), expr(cx, grad_output)
    return cx.result(where(x <= -3, 0, where(x < 3, grad * (x / 3 + 0.5), grad)).v)


# ---- exponential family


def _elu(cx: LowerContext, self: Value, alpha: Expr, scale: Expr | None, input_scale: Expr | None) -> Value:
    x = expr(cx, self)
    low = (x if input_scale is None else x * input_scale).expm1() * (alpha if scale is None else alpha * scale)
    return cx.result(where(x < 0, low, x if scale is None else x * scale).v)


@lowers(aten.elu.default, scalars={"scale": (1,), "input_scale": (1,)})
def elu(cx: LowerContext, self: Value, alpha: Operand = 1, scale: Operand = 1, input_scale: Operand = 1) -> Value:
    factors = [expr(cx, f) if isinstance(f, Value) or f != 1 else None for f in (scale, input_scale)]
    return _elu(cx, self, expr(cx, alpha), *factors)


@lowers(aten.celu.default)
def celu(cx: LowerContext, self: Value, alpha: Operand = 1.0) -> Value:
    a = expr(cx, alpha)
    return _elu(cx, self, a, None, 1 / a)


@lowers(aten.elu_backward.default)
def elu_backward(
    cx: LowerContext,
    grad_output: Value,
    alpha: Operand,
    scale: Operand,
    input_scale: Operand,
    is_result: bool,
    self_or_result: Value,
) -> Value:
    grad, x = expr(cx, grad_output), expr(cx, self_or_result)
    a, s, k = (expr(cx, f) for f in (alpha, scale, input_scale))
    low = grad * k * (x + a * s) if is_result else grad * (k * a * s) * (x * k).exp()
    return cx.result(where(x <= 0, low, grad * s).v)


@lowers(aten.sigmoid_backward.default)
def sigmoid_backward(cx: LowerContext, grad_output: Value, output: Value) -> Value:
    y = conjugate(expr(cx, output))
    return cx.result((expr(cx, grad_output) * ((1 - y) * y)).v)


@lowers(aten.tanh_backward.default)
def tanh_backward(cx: LowerContext, grad_output: Value, output: Value) -> Value:
    y = conjugate(expr(cx, output))
    return cx.result((expr(cx, grad_output) * (1 - y * y)).v)


def conjugate(x: Expr) -> Expr:
    """The complex conjugate; a real value as it is."""
    return Expr(x.b, x.b.complex(x.real().v, (-x.imag()).v)) if x.dtype.is_complex else x


@lowers(aten.silu.default)
def silu(cx: LowerContext, self: Value) -> Value:
    x = expr(cx, self)
    return cx.result((x * x.sigmoid()).v)


def _tanh_of_softplus(x: Expr) -> Expr:
    """tanh(log(1 + e^x)) as a quotient, in e^-|x|, which does not overflow."""
    e = (-x.abs()).exp()
    positive = x >= 0
    top = where(positive, 1 + 2 * e, e * (e + 2))
    return top / (top + where(positive, 2 * e * e, e.const(2)))


@lowers(aten.mish.default)
def mish(cx: LowerContext, self: Value) -> Value:
    x = expr(cx, self)
    return cx.result((x * _tanh_of_softplus(x)).v)


@lowers(aten.softplus.default, scalars={"beta": (1,)})
def softplus(cx: LowerContext, self: Value, beta: Operand = 1, threshold: Operand = 20) -> Value:
    x = expr(cx, self)
    unit = not isinstance(beta, Value) and beta == 1
    z = x if unit else x * expr(cx, beta)
    soft = z.exp().log1p()
    return cx.result(where(z > expr(cx, threshold), x, soft if unit else soft / expr(cx, beta)).v)


@lowers(aten.softplus_backward.default, scalars={"beta": (1,)})
def softplus_backward(cx: LowerContext, grad_output: Value, self: Value, beta: Operand, threshold: Operand) -> Value:
    grad, x = expr(cx, grad_output), expr(cx, self)
    z = x if not isinstance(beta, Value) and beta == 1 else x * expr(cx, beta)
    return cx.result(where(z > expr(cx, threshold), grad, grad * z.sigmoid()).v)


@lowers(aten.log_sigmoid_forward.default)
def log_sigmoid_forward(cx: LowerContext, self: Value) -> tuple[Value, Value]:
    """The buffer is e^-|x| where the meta kernel gives it elements; our derivative does not read it."""
    x = expr(cx, self)
    e = (-x.abs()).exp()
    buffer = cx.outs[1]
    second = cx.result(e.v, 1) if buffer.shape == x.v.shape else cx.b.constant(0, buffer.dtype, buffer.shape)
    return cx.result((x.min(0) - e.log1p()).v), second


@lowers(aten.log_sigmoid_backward.default)
def log_sigmoid_backward(cx: LowerContext, grad_output: Value, self: Value, buffer: Value) -> Value:
    return cx.result((expr(cx, grad_output) * (-expr(cx, self)).sigmoid()).v)


# ---- gelu


def _gelu_inner(x: Expr) -> Expr:
    """Argument of the tanh in the approximate form."""
    return math.sqrt(2 / math.pi) * (x + 0.044715 * (x * x * x))


@lowers(aten.gelu.default)
def gelu(cx: LowerContext, self: Value, approximate: str = "none") -> Value:
    x = expr(cx, self)
    bent = _gelu_inner(x).tanh() if approximate == "tanh" else erf(x * math.sqrt(0.5))
    return cx.result((0.5 * x * (1 + bent)).v)


@lowers(aten.gelu_backward.default)
def gelu_backward(cx: LowerContext, grad_output: Value, self: Value, approximate: str = "none") -> Value:
    x, grad = expr(cx, self), expr(cx, grad_output)
    if approximate == "tanh":
        t = _gelu_inner(x).tanh()
        slope = math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * (x * x))
        return cx.result((grad * (0.5 * (1 + t) + 0.5 * x * (1 - t * t) * slope)).v)
    cdf = 0.5 * (1 + erf(x * math.sqrt(0.5)))
    pdf = (-0.5 * (x * x)).exp() * (1 / math.sqrt(2 * math.pi))
    return cx.result((grad * (cdf + x * pdf)).v)


# ---- gated linear unit


def _halves(cx: LowerContext, x: Value, dim: int) -> tuple[Expr, Expr]:
    """Both halves of ``x`` along ``dim``, in the compute type."""
    dim = norm_dim(dim, x.rank)
    half = x.shape[dim] // 2
    parts = (cx.b.slice_dim(x, dim, 0, half), cx.b.slice_dim(x, dim, half, 2 * half))
    first, second = (Expr(cx.b, cx.b.convert(p, cx.compute_dtype)) for p in parts)
    return first, second


@lowers(aten.glu.default)
def glu(cx: LowerContext, self: Value, dim: int = -1) -> Value:
    x, gate = _halves(cx, self, dim)
    return cx.result((x * gate.sigmoid()).v)


@lowers(aten.glu_backward.default)
def glu_backward(cx: LowerContext, grad_output: Value, self: Value, dim: int) -> Value:
    x, gate = _halves(cx, self, dim)
    grad = Expr(cx.b, operand(cx, grad_output, shape=x.v.shape))
    s = gate.sigmoid()
    parts = (grad * s, grad * x * s * (1 - s))
    return cx.b.concatenate([cx.b.convert(p.v, cx.out.dtype) for p in parts], norm_dim(dim, self.rank))


@lowers(aten.glu_jvp.default)
def glu_jvp(cx: LowerContext, glu: Value, x: Value, dx: Value, dim: int) -> Value:
    gate = _halves(cx, x, dim)[1]
    left, right = _halves(cx, dx, dim)
    s = gate.sigmoid()
    return cx.result((left * s + right * (1 - s) * expr(cx, glu)).v)


@lowers(aten.glu_backward_jvp.default)
def glu_backward_jvp(
    cx: LowerContext, grad_x: Value, grad_glu: Value, x: Value, dgrad_glu: Value, dx: Value, dim: int
) -> Value:
    """Tangent of `glu_backward`: with s the gate, its results are g s and g a s (1 - s)."""
    a, gate = _halves(cx, x, dim)
    da, dgate = _halves(cx, dx, dim)
    g, dg = (Expr(cx.b, operand(cx, v, shape=a.v.shape)) for v in (grad_glu, dgrad_glu))
    s = gate.sigmoid()
    slope = s * (1 - s)
    ds = slope * dgate
    second = dg * a * slope + g * da * slope + g * a * ds * (1 - 2 * s)
    parts = (dg * s + g * ds, second)
    return cx.b.concatenate([cx.b.convert(p.v, cx.out.dtype) for p in parts], norm_dim(dim, x.rank))
