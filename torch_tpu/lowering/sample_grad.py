"""Derivatives of gamma and Dirichlet samples with respect to their parameters, for ``rsample``.

A sample x with distribution function F(x; a) and density p moves with its parameter by dx/da = -(dF/da) / p. Here F is
an integral of a density whose logarithm is concave, and dF/da the same integral with one more factor. It is taken over
the side of x without the mode, so that nothing cancels: over t = x e^(v) or logit t = logit x + v, with v from 0 away.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from torch_tpu.ir.builder import Value
from torch_tpu.lowering.expr import Expr, expr, where
from torch_tpu.lowering.gamma import digamma
from torch_tpu.lowering.reduce import reduce_sum
from torch_tpu.lowering.registry import LowerContext, lowers

aten = torch.ops.aten

# Nodes of the double exponential rule (Takahasi and Mori 1974) v = scale * exp(u - exp(-u)) on an even grid of u.
_FIRST, _LAST = -3.5, 4.5
_NODES = {torch.float32: 40, torch.float64: 96}


def _integral(cx: LowerContext, scale: Expr, integrand: Callable[[Expr], Expr]) -> Expr:
    """Integral from 0 to infinity of what falls off like exp(-v / scale) or faster; ``scale`` need not be exact."""
    b, shape, num_nodes = cx.b, scale.v.shape, _NODES[scale.dtype]
    step = (_LAST - _FIRST) / (num_nodes - 1)
    grid = (num_nodes, *shape)
    u = Expr(b, b.iota(grid, 0, scale.dtype)) * step + _FIRST
    inner = (-u).exp()
    v = (u - inner).exp() * _spread(scale, grid)
    terms = integrand(v) * v * (inner + 1.0)
    return Expr(b, reduce_sum(cx, terms.v, [0])) * step


def _spread(x: Expr, grid: tuple[int, ...]) -> Expr:
    return Expr(x.b, x.b.broadcast_to(x.v, grid))


def _log_ratio(x: Expr, y: Expr) -> Expr:
    """log(x / y), also of nearly equal numbers."""
    part = (x - y) / y
    return where(part.abs() < 0.5, part.log1p(), x.log() - y.log())


def _log_minus_digamma(x: Expr) -> Expr:
    """log x - digamma(x), also of large x, where the two are nearly equal."""
    r = 1.0 / x
    r2 = r * r
    series = r * 0.5 + r2 * (1 / 12 - r2 * (1 / 120 - r2 * (1 / 252 - r2 * (1 / 240 - r2 / 132))))
    return where(x > 8.0, series, x.log() - digamma(x))


@lowers(aten._standard_gamma_grad.default)
def standard_gamma_grad(cx: LowerContext, self: Value, output: Value) -> Value:
    a, x = expr(cx, self), expr(cx, output)
    sign = where(x > a, x.const(1), -1.0)
    near = (x - a).abs() + x.sqrt()
    scale = 1.0 / where(x > a, near, near.min(a))
    level = _log_ratio(x, a) + _log_minus_digamma(a)

    def integrand(v: Expr) -> Expr:
        y = v * _spread(sign, v.v.shape)
        a_, x_, level_ = (_spread(e, v.v.shape) for e in (a, x, level))
        fall = (a_ - x_) * y - x_ * (y.expm1() - y)
        return where(fall < -80.0, 0.0, (level_ + y) * fall.exp())

    grad = sign * x * _integral(cx, scale, integrand)
    return cx.result(where(x.eq(0.0), 0.0, grad).v)


@lowers(aten._dirichlet_grad.default)
def dirichlet_grad(cx: LowerContext, x: Value, alpha: Value, total: Value) -> Value:
    p, a, n = expr(cx, x), expr(cx, alpha), expr(cx, total)
    excess = n * p - a
    right = excess > 0.0
    far = where(right, n - a, a)  # how fast the density falls at last; near x it is the curvature that counts
    scale = 1.0 / (excess.abs() + (n * p * (1.0 - p)).sqrt()).min(far)
    level = _log_ratio(n * p, a) + _log_minus_digamma(a) - _log_minus_digamma(n)
    rest = where(right, p, 1.0 - p)
    share = where(right, 1.0 - p, p)

    def integrand(v: Expr) -> Expr:
        right_, n_, far_, level_, rest_, share_ = (_spread(e, v.v.shape) for e in (right, n, far, level, rest, share))
        # -log(t / x) is this on the right, and v more on the left
        d = where(v < 0.5, (share_ * (-v).expm1()).log1p(), (rest_ + share_ * (-v).exp()).log())
        fall = -n_ * d - far_ * v
        return where(fall < -80.0, 0.0, (level_ - where(right_, d, d + v)) * fall.exp())

    grad = p * _integral(cx, scale, integrand)
    return cx.result(where(right, grad, -grad).v)
