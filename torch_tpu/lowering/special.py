"""Error functions, their relatives and inverses, and products with a logarithm.

Each has a short polynomial for float32 and a long one for float64 (`coefficients`).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from torch_tpu.ir.builder import Value
from torch_tpu.lowering import coefficients as table
from torch_tpu.lowering.elementary import sine
from torch_tpu.lowering.expr import Expr, expr, polynomial, where
from torch_tpu.lowering.promote import Operand
from torch_tpu.lowering.registry import LowerContext, Rule, lowers, register

aten = torch.ops.aten


# ---- error functions


def _erfcx_positive(x: Expr) -> Expr:
    """exp(x²) erfc(x) for x >= 0."""
    wide = x.dtype == torch.float64
    center = 3.75 if wide else 2.0
    y = 1 - (2 * center) / (x + center)
    return polynomial(y, table.ERFCX64 if wide else table.ERFCX32) / (1 + 2 * x)


def exp_square(x: Expr, sign: float) -> Expr:
    """exp(±x²) without the rounding of x², which a large x would blow up."""
    x = x.max(-1000.0).min(1000.0)
    high = (x * 16).round() * 0.0625  # few bits: its square is exact
    low = x - high
    return (sign * (high * high)).exp() * (sign * (low * (x + high))).exp()


def _erfc_positive(x: Expr) -> Expr:
    return _erfcx_positive(x) * exp_square(x, -1.0)


def erf(x: Expr) -> Expr:
    """The error function of a float32 or float64 value."""
    if x.dtype == torch.float32:
        near = x.max(-3.937).min(3.937)
        t = near * near
        return near * (polynomial(t, table.ERF32_P) / polynomial(t, table.ERF32_Q))
    size = x.abs()
    t = size.min(1.0)
    far = x.sign() * (1 - _erfcx_positive(size) * (-(x * x)).exp())
    return where(size < 1, x * polynomial(t * t, table.ERF64), far)


def erfc(x: Expr) -> Expr:
    """1 - erf(x), accurate in the tail."""
    tail = _erfc_positive(x.abs())
    return where(x < 0, 2 - tail, tail)


def erfcx(x: Expr) -> Expr:
    """exp(x²) erfc(x)."""
    scaled = _erfcx_positive(x.abs())
    return where(x < 0, 2 * exp_square(x, 1.0) - scaled, scaled)


# ---- inverses and the normal distribution


def _inverse_tail(w: Expr, target: Expr) -> Expr:
    """z > 0 with erfc(z) = exp(-target), by Newton's method on logarithms. ``w`` gives the start."""
    root = w.sqrt()
    z = root * polynomial(1 / root, table.ERFINV_TAIL)
    for _ in range(2 if w.dtype == torch.float64 else 1):
        scaled = _erfcx_positive(z)
        z = z + (target - z * z + scaled.log()) * (0.5 * math.sqrt(math.pi)) * scaled
    return z


def _inverse_erf(x: Expr, w: Expr) -> Expr:
    """erfinv(x) where ``w`` is -log(1 - x²), known exactly."""
    near = x * polynomial(w - 2.5, table.ERFINV64 if x.dtype == torch.float64 else table.ERFINV32)
    far = x.sign() * _inverse_tail(w.max(5.0), w + x.abs().log1p())
    return where(w < 5, near, far)


def erfinv(x: Expr) -> Expr:
    """Inverse of the error function."""
    value = _inverse_erf(x, -((1 - x) * (1 + x)).log())
    return where(x.abs().eq(1), x * math.inf, value)


def ndtri(p: Expr) -> Expr:
    """Inverse of the normal distribution function."""
    value = math.sqrt(2.0) * _inverse_erf(2 * p - 1, -(4 * p * (1 - p)).log())
    return where(p.eq(0), p.const(-math.inf), where(p.eq(1), p.const(math.inf), value))


def log_ndtr(x: Expr) -> Expr:
    """Logarithm of the normal distribution function."""
    t = x * math.sqrt(0.5)
    left = (0.5 * _erfcx_positive((-t).max(0.0))).log() - t * t
    return where(x < -1, left, (-0.5 * erfc(t)).log1p())


def _pointwise(function: Callable[[Expr], Expr]) -> Rule:
    return lambda cx, self: cx.result(function(expr(cx, self)).v)


# ---- products with a logarithm, sin(x) / x


def entr(x: Expr) -> Expr:
    """-x log(x), 0 at 0, -inf below."""
    value = where(x.eq(0), 0, -x * x.log())
    return where(x < 0, x.const(-math.inf), value)


def sinc(x: Expr) -> Expr:
    """sin(pi x) / (pi x)."""
    y = x * math.pi
    return where(x.eq(0), 1, sine(y) / y)


for _op, _function in {
    aten.erf.default: erf,
    aten.erfc.default: erfc,
    aten.erfinv.default: erfinv,
    aten.sinc.default: sinc,
    aten.special_entr.default: entr,
    aten.special_erfcx.default: erfcx,
    aten.special_log_ndtr.default: log_ndtr,
    aten.special_ndtri.default: ndtri,
}.items():
    register(_op, _pointwise(_function))


@lowers(aten.xlogy.Tensor, aten.xlogy.Scalar_Other, aten.xlogy.Scalar_Self)
def xlogy(cx: LowerContext, self: Operand, other: Operand) -> Value:
    x, y = expr(cx, self), expr(cx, other)
    return cx.result(where(y.is_nan(), y, where(x.eq(0), 0, x * y.log())).v)


@lowers(aten.special_xlog1py.default, aten.special_xlog1py.other_scalar, aten.special_xlog1py.self_scalar)
def xlog1py(cx: LowerContext, self: Operand, other: Operand) -> Value:
    x, y = expr(cx, self), expr(cx, other)
    return cx.result(where(y.is_nan(), y, where(x.eq(0), 0, x * y.log1p())).v)


@lowers(aten.logit.default)
def logit(cx: LowerContext, self: Value, eps: Operand | None = None) -> Value:
    x = expr(cx, self)
    if eps is not None:
        bound = expr(cx, eps)
        x = where(x < bound, bound, where(x > 1 - bound, 1 - bound, x))
    return cx.result((x / (1 - x)).log().v)


@lowers(aten.logit_backward.default)
def logit_backward(cx: LowerContext, grad_output: Value, self: Value, eps: Operand | None = None) -> Value:
    """Zero where the forward clamped; NaN outside of [0, 1] where it did not."""
    grad, x = expr(cx, grad_output), expr(cx, self)
    slope = grad / (x * (1 - x))
    if eps is None:
        outside = (x < 0) | (x > 1)
        return cx.result(where(outside, x.const(math.nan), slope).v)
    bound = expr(cx, eps)
    outside = (x < bound) | (x > 1 - bound)
    unclamped = where((x < 0) | (x > 1), x.const(math.nan), slope)
    return cx.result(where(bound < 0, unclamped, where(outside, 0, slope)).v)
