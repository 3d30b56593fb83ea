"""Bessel functions of order 0 and 1, their modified and spherical forms, and Airy's function.

Near zero a polynomial (without the roots or the logarithm), beyond it an asymptotic form whose slow factors are
polynomials of 1/x.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from torch_tpu.ir.builder import Value
from torch_tpu.lowering import coefficients as table
from torch_tpu.lowering.expr import Expr, expr, polynomial, where
from torch_tpu.lowering.registry import LowerContext, Rule, register

aten = torch.ops.aten

J0_ROOTS = (2.4048255576957727686, 5.5200781102863106496)
J1_ROOT = 3.8317059702075123156


def _fit(x: Expr, name: str) -> Expr:
    """The table ``name`` of the width of ``x``, at ``x``."""
    coefficients: Sequence[float] = getattr(table, f"{name}{64 if x.dtype == torch.float64 else 32}")
    return polynomial(x, coefficients)


# ---- modified, first kind


def _scaled_i(x: Expr, order: int) -> Expr:
    """exp(-x) I(x) for x >= 0."""
    t = x * x * 0.25
    near = _fit(t.min(16.0), f"I{order}_NEAR") * (-x).exp()
    if order:
        near = near * (x * 0.5)
    far_x = x.max(8.0)
    far = _fit(1 / far_x - 1 / 16, f"I{order}_FAR") * far_x.rsqrt()
    return where(x <= 8, near, far)


def _grown(x: Expr, scaled: Expr) -> Expr:
    """exp(x) ``scaled``, infinite only where the product is."""
    half = (0.5 * x).exp()
    return (scaled * half) * half


def _signed(x: Expr, value: Expr) -> Expr:
    """An odd function from its value at |x|."""
    return where(x < 0, -value, value)


def i0e(x: Expr) -> Expr:
    return _scaled_i(x.abs(), 0)


def i1e(x: Expr) -> Expr:
    return _signed(x, _scaled_i(x.abs(), 1))


def i0(x: Expr) -> Expr:
    return _grown(x.abs(), i0e(x))


def i1(x: Expr) -> Expr:
    return _grown(x.abs(), i1e(x))


# ---- modified, second kind


def _k(x: Expr, order: int, *, scaled: bool) -> Expr:
    """K(x), or exp(x) K(x)."""
    near_x = x.min(2.0)
    t = near_x * near_x * 0.25
    log = (near_x * 0.5).log()
    if order:
        near = log * (near_x * 0.5) * _fit(t, "I1_NEAR") + _fit(t, "K1_NEAR") / near_x
    else:
        near = _fit(t, "K0_NEAR") - log * _fit(t, "I0_NEAR")
    far_x = x.max(2.0)
    far = _fit(1 / far_x - 0.25, f"K{order}_FAR") * far_x.rsqrt()
    value = where(x <= 2, near * near_x.exp(), far) if scaled else where(x <= 2, near, far * (-far_x).exp())
    return where(x.eq(0), x.const(math.inf), where(x < 0, x.const(math.nan), value))


# ---- first and second kind


def _hankel(x: Expr, order: int, *, second: bool) -> Expr:
    """Beyond 5: modulus and phase. The phase shift of pi/4 is done on sin and cos, not on the argument."""
    x = x.max(5.0)
    ratio = 5 / x
    t = ratio * ratio - 0.5
    p, q = _fit(t, f"P{order}_FAR"), _fit(t, f"Q{order}_FAR") * ratio
    s, c = x.sin(), x.cos()
    # cos and sin of x - pi/4 (order 0) or x - 3 pi/4 (order 1), times sqrt(2)
    cos, sin = (s - c, -(s + c)) if order else (c + s, s - c)
    wave = p * sin + q * cos if second else p * cos - q * sin
    return wave * (1 / math.sqrt(math.pi)) * x.rsqrt()


def _j_near(x: Expr, order: int) -> Expr:
    t = x * x
    if order:
        return x * ((t - J1_ROOT**2) * _fit(t - 12.5, "J1_NEAR"))
    return (t - J0_ROOTS[0] ** 2) * (t - J0_ROOTS[1] ** 2) * _fit(t - 12.5, "J0_NEAR")


def j0(x: Expr) -> Expr:
    size = x.abs()
    value = where(size <= 5, _j_near(size.min(5.0), 0), _hankel(size, 0, second=False))
    return where(size.eq(math.inf), 0, value)


def j1(x: Expr) -> Expr:
    size = x.abs()
    return _signed(x, where(size <= 5, _j_near(size.min(5.0), 1), _hankel(size, 1, second=False)))


def _y(x: Expr, order: int) -> Expr:
    near_x = x.min(5.0)
    t = near_x * near_x - 12.5
    product = near_x.log() * _j_near(near_x, order)
    if order:
        near = near_x * _fit(t, "Y1_NEAR") + (2 / math.pi) * (product - 1 / near_x)
    else:
        near = _fit(t, "Y0_NEAR") + (2 / math.pi) * product
    value = where(x <= 5, near, _hankel(x, order, second=True))
    return where(x.eq(0), x.const(-math.inf), where(x < 0, x.const(math.nan), value))


def spherical_j0(x: Expr) -> Expr:
    """sin(x) / x."""
    value = where(x.eq(0), 1, x.sin() / x)
    return where(x.abs().eq(math.inf), 0, value)


# ---- Airy


def airy_ai(x: Expr) -> Expr:
    """Airy's Ai; 0 beyond ATen's limit, NaN at the infinities."""
    near = _fit(x.max(-4.5).min(2.0) + 1.25, "AI_NEAR")
    right_x = x.max(2.0)
    s = (2 / 3) * right_x * right_x.sqrt()
    right = _fit(1 / s - 0.25, "AI_RIGHT") * (-s).exp() * (0.5 / math.sqrt(math.pi)) * right_x.sqrt().rsqrt()
    left_x = (-x).max(4.5)
    s = (2 / 3) * left_x * left_x.sqrt()
    inverse = 1 / s
    t = inverse * inverse - 1 / 80
    sin, cos = s.sin(), s.cos()
    wave = (cos + sin) * _fit(t, "AI_LEFT_P") + (sin - cos) * (_fit(t, "AI_LEFT_Q") * inverse)
    left = wave * (math.sqrt(0.5 / math.pi)) * left_x.sqrt().rsqrt()
    value = where(x < -4.5, left, where(x > 2, right, near))
    return where(x.abs().eq(math.inf), x.const(math.nan), where(x > 103.892, 0, value))


def _pointwise(function: Callable[[Expr], Expr]) -> Rule:
    def rule(cx: LowerContext, self: Value) -> Value:
        return cx.result(function(expr(cx, self)).v)

    return rule


def _pointwise_x(function: Callable[[Expr], Expr]) -> Rule:
    """For the overloads whose schema calls the argument ``x``."""
    return lambda cx, x: cx.result(function(expr(cx, x)).v)


for _op, _function in {
    aten.i0.default: i0,
    aten.special_i0e.default: i0e,
    aten.special_i1.default: i1,
    aten.special_i1e.default: i1e,
    aten.special_bessel_j0.default: j0,
    aten.special_bessel_j1.default: j1,
    aten.special_bessel_y0.default: lambda x: _y(x, 0),
    aten.special_bessel_y1.default: lambda x: _y(x, 1),
    aten.special_modified_bessel_i0.default: i0,
    aten.special_modified_bessel_i1.default: i1,
    aten.special_modified_bessel_k0.default: lambda x: _k(x, 0, scaled=False),
    aten.special_modified_bessel_k1.default: lambda x: _k(x, 1, scaled=False),
}.items():
    register(_op, _pointwise(_function))
for _op, _function in {
    aten.special_scaled_modified_bessel_k0.default: lambda x: _k(x, 0, scaled=True),
    aten.special_scaled_modified_bessel_k1.default: lambda x: _k(x, 1, scaled=True),
    aten.special_spherical_bessel_j0.default: spherical_j0,
    aten.special_airy_ai.default: airy_ai,
}.items():
    register(_op, _pointwise_x(_function))
