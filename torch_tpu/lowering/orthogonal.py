"""Orthogonal polynomials of a degree that is data: one recurrence loop for all elements.

Chebyshev polynomials inside (-1, 1) and of a high degree use their trigonometric form, as in ATen.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from torch_tpu.ir.builder import Value
from torch_tpu.lowering.expr import Expr, expr, where
from torch_tpu.lowering.gamma import loop
from torch_tpu.lowering.promote import Operand
from torch_tpu.lowering.registry import LowerContext, Rule, register

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Family:
    """``first(x)`` is the polynomial of degree 1, ``step(k, x, p, q)`` that of degree k + 1 after p and q."""

    first: Callable[[Expr], Expr]
    step: Callable[[Expr, Expr, Expr, Expr], Expr]
    fixed: Callable[[Expr, Expr], tuple[Expr, Expr]] | None = None  # (x, n) -> (where, value) without recurrence
    shifted: bool = False  # takes 2x - 1
    limited: bool = False  # overflows: ATen gives NaN above a degree


def _is_even(n: Expr) -> Expr:
    return (n % 2.0).eq(0)


def _chebyshev_step(k: Expr, x: Expr, p: Expr, q: Expr) -> Expr:
    return (x + x) * q - p


def _fixed_t(x: Expr, n: Expr) -> tuple[Expr, Expr]:
    inside = (n > 6) & (x.abs() < 1)
    ends = where((x > 0) | _is_even(n), x.const(1), -1)
    return inside | x.abs().eq(1), where(inside, (n * _acos(x)).cos(), ends)


def _fixed_u(x: Expr, n: Expr) -> tuple[Expr, Expr]:
    inside = (n > 8) & (x.abs() < 1)
    angle = _acos(x)
    ends = where((x > 0) | _is_even(n), n + 1, -(n + 1))
    return inside | x.abs().eq(1), where(inside, ((n + 1) * angle).sin() / angle.sin(), ends)


def _fixed_v(x: Expr, n: Expr) -> tuple[Expr, Expr]:
    inside = (n > 8) & (x.abs() < 1)
    angle = _acos(x)
    odd = n + n + 1
    ends = where(x > 0, 1, where(_is_even(n), odd, -odd))
    return inside | x.abs().eq(1), where(inside, ((n + 0.5) * angle).cos() / (angle * 0.5).cos(), ends)


def _fixed_w(x: Expr, n: Expr) -> tuple[Expr, Expr]:
    inside = (n > 8) & (x.abs() < 1)
    angle = _acos(x)
    ends = where(x > 0, n + n + 1, where(_is_even(n), x.const(1), -1))
    return inside | x.abs().eq(1), where(inside, ((n + 0.5) * angle).sin() / (angle * 0.5).sin(), ends)


def _fixed_legendre(x: Expr, n: Expr) -> tuple[Expr, Expr]:
    return x.abs().eq(1), where((x > 0) | _is_even(n), x.const(1), -1)


def _acos(x: Expr) -> Expr:
    return ((1 - x) * (1 + x)).sqrt().atan2(x)


_T = (lambda x: x, _chebyshev_step, _fixed_t)
_U = (lambda x: x + x, _chebyshev_step, _fixed_u)
_V = (lambda x: x + x - 1, _chebyshev_step, _fixed_v)
_W = (lambda x: x + x + 1, _chebyshev_step, _fixed_w)

FAMILIES = {
    "chebyshev_polynomial_t": Family(*_T),
    "chebyshev_polynomial_u": Family(*_U),
    "chebyshev_polynomial_v": Family(*_V),
    "chebyshev_polynomial_w": Family(*_W),
    "shifted_chebyshev_polynomial_t": Family(*_T, shifted=True),
    "shifted_chebyshev_polynomial_u": Family(*_U, shifted=True),
    "shifted_chebyshev_polynomial_v": Family(*_V, shifted=True),
    "shifted_chebyshev_polynomial_w": Family(*_W, shifted=True),
    "hermite_polynomial_h": Family(lambda x: x + x, lambda k, x, p, q: (x + x) * q - (k + k) * p, limited=True),
    "hermite_polynomial_he": Family(lambda x: x, lambda k, x, p, q: x * q - k * p, limited=True),
    "laguerre_polynomial_l": Family(
        lambda x: 1 - x,
        lambda k, x, p, q: ((k + k + (1 - x)) * q - k * p) / (k + 1),
        lambda x, n: (x.eq(0), x.const(1)),
    ),
    "legendre_polynomial_p": Family(
        lambda x: x, lambda k, x, p, q: ((k + k + 1) * x * q - k * p) / (k + 1), _fixed_legendre
    ),
}


def _evaluate(family: Family, x: Expr, n: Expr) -> Expr:
    n = where(n < 0, n.ceil(), n.floor())
    if family.shifted:
        x = x + x - 1
    known, value = family.fixed(x, n) if family.fixed else (n < 0, x.const(0))
    limit = (512 if x.dtype == torch.float64 else 128) if family.limited else math.inf

    def busy(state: list[Expr]) -> Expr:
        k, _, q = state
        return (n > k) & (n <= limit) & ~known & ~q.is_nan()

    def body(state: list[Expr]) -> list[Expr]:
        k, p, q = state
        active = busy(state)
        return [k + 1, where(active, q, p), where(active, family.step(k, x, p, q), q)]

    one = x.const(1)
    found = loop([one, one, family.first(x)], busy, body)[2]
    found = where(known, value, where(n.eq(0), 1, found))
    if family.limited:
        found = where(n > limit, x.const(math.nan), found)
    return where(n < 0, 0, found)


def _rule(family: Family) -> Rule:
    def rule(cx: LowerContext, x: Operand, n: Operand) -> Value:
        return cx.result(_evaluate(family, expr(cx, x), expr(cx, n)).v)

    return rule


for _name, _family in FAMILIES.items():
    _packet = getattr(aten, f"special_{_name}")
    for _overload in ("default", "x_scalar", "n_scalar"):
        register(getattr(_packet, _overload), _rule(_family))
