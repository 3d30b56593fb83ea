"""Gamma function family: log-gamma, its derivatives, the Hurwitz zeta function, incomplete gamma.

Arguments are shifted to where an asymptotic series holds; loops run on all elements until none is active.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from torch_tpu.ir.builder import Value
from torch_tpu.lowering import coefficients as table
from torch_tpu.lowering.expr import Expr, expr, polynomial, where
from torch_tpu.lowering.promote import Operand
from torch_tpu.lowering.registry import LowerContext, lowers

aten = torch.ops.aten

# fmt: off
# Bernoulli numbers B2, B4, …
_BERNOULLI = (
    1 / 6, -1 / 30, 1 / 42, -1 / 30, 5 / 66, -691 / 2730, 7 / 6, -3617 / 510, 43867 / 798, -174611 / 330,
    854513 / 138, -236364091 / 2730,
)
# fmt: on


def _is_wide(x: Expr) -> bool:
    return x.dtype == torch.float64


def _sin_pi(x: Expr) -> Expr:
    """|sin(pi x)|, exact zero at the integers."""
    size = x.abs()
    part = size - size.floor()
    return (math.pi * part.min(1 - part)).sin()


# ---- log-gamma


def _stirling(x: Expr) -> Expr:
    """lgamma(x) - ((x - 1/2) log(x) - x + log(2 pi) / 2) of a large x."""
    terms = 8 if _is_wide(x) else 3
    series = [_BERNOULLI[k] / ((2 * k + 1) * (2 * k + 2)) for k in range(terms)]
    inverse = 1 / x
    return inverse * polynomial(inverse * inverse, series[::-1])


def _lgamma_near_two(u: Expr) -> Expr:
    return u * polynomial(u, table.LGAMMA64 if _is_wide(u) else table.LGAMMA32)


def _lgamma_positive(x: Expr) -> Expr:
    """lgamma of x >= 1/2."""
    shifts = 8 if _is_wide(x) else 4
    shift = (x - 1.5).floor()
    r = x - shift
    product = x.const(1)
    for k in range(shifts):
        product = where(shift > k, product * (r + k), product)
    log = where(shift < 0, -x.log(), product.log())
    near = _lgamma_near_two(r - 2) + log
    far = (x - 0.5) * (x.log() - 1) + (0.5 * math.log(2 * math.pi) - 0.5) + _stirling(x)
    return where(shift > shifts, far, near)


def lgamma(x: Expr) -> Expr:
    """log |gamma(x)| of a float32 or float64 value."""
    low = x < 0.5
    direct = _lgamma_positive(where(low, 1 - x, x))
    reflected = (math.log(math.pi) - _sin_pi(x).log()) - direct
    return where(x.abs().eq(math.inf), x.abs(), where(low, reflected, direct))


def _lgamma1p(x: Expr) -> Expr:
    """lgamma(1 + x) for x >= 0 without rounding 1 + x."""
    return where(x < 0.5, _lgamma_near_two(x) - x.log1p(), _lgamma_positive(1 + x))


@lowers(aten.lgamma.default)
def lgamma_(cx: LowerContext, self: Value) -> Value:
    return cx.result(lgamma(expr(cx, self)).v)


# ---- derivatives


def digamma(x: Expr) -> Expr:
    """Derivative of log-gamma."""
    wide = _is_wide(x)
    limit, terms = (10, 7) if wide else (6, 3)
    a = where(x < 0, 1 - x, x)
    total = x.const(0)
    for _ in range(limit):
        low = a < limit
        total = where(low, total - 1 / a, total)
        a = where(low, a + 1, a)
    inverse = 1 / a
    square = inverse * inverse
    series = [_BERNOULLI[k] / (2 * k + 2) for k in range(terms)]
    value = total + (a.log() - 0.5 * inverse - square * polynomial(square, series[::-1]))
    part = x - x.round()
    pole = math.pi / (math.pi * part).tan()
    value = where(x < 0, where(part.eq(0), x.const(math.nan), value - pole), value)
    at_zero = where(x.sign_bit(), x.const(math.inf), -math.inf)
    return where(x.eq(0), at_zero, value)


@lowers(aten.digamma.default)
def digamma_(cx: LowerContext, self: Value) -> Value:
    return cx.result(digamma(expr(cx, self)).v)


# Loops end here even where they have not converged: the incomplete gamma function of a = 1e6 needs 8000 terms.
_MAX_TERMS = 20000


def _any(flags: Expr) -> Value:
    return flags.b.reduce_op("or", flags.v, False, range(flags.v.rank))


def loop(
    state: Sequence[Expr], busy: Callable[[list[Expr]], Expr], body: Callable[[list[Expr]], list[Expr]]
) -> list[Expr]:
    """Run ``body`` while ``busy`` is true for an element."""
    b = state[0].b

    def wrap(values: Sequence[Value]) -> list[Expr]:
        return [Expr(b, v) for v in values]

    found = b.while_(
        [s.v for s in state], lambda values: _any(busy(wrap(values))), lambda values: [s.v for s in body(wrap(values))]
    )
    return wrap(found)


def _hurwitz(q: Expr, s: Expr, power: Callable[[Expr], Expr]) -> Expr:
    """Euler-Maclaurin sum of (q + k)**-s, with ``power(a) = a**-s``. Sums until q + k > 9, nine terms at least."""
    first = power(q)
    count = q.const(0)
    usual = q.is_finite() & ((q > 0) | q.floor().ne(q))  # the others are poles, and need no sum

    def busy(state: list[Expr]) -> Expr:
        a, total, term, n = state
        small = term.abs() < total.abs() * torch.finfo(q.dtype).eps
        return usual & ((n < 9) | (a <= 9)) & ~small & (n < _MAX_TERMS)

    def body(state: list[Expr]) -> list[Expr]:
        a, total, term, n = state
        active = busy(state)
        following = a + 1
        new = power(following)
        return [
            where(active, following, a),
            where(active, total + new, total),
            where(active, new, term),
            where(active, n + 1, n),
        ]

    w, total, term, _ = loop([q, first, first, count], busy, body)
    converged = term.abs() < total.abs() * torch.finfo(q.dtype).eps
    tail = term * w / (s - 1) - 0.5 * term
    inverse = 1 / (w * w)
    step = s * term / w
    for k in range(12 if _is_wide(q) else 6):
        tail = tail + step * (_BERNOULLI[k] / math.factorial(2 * k + 2))
        step = step * ((s + (2 * k + 1)) * (s + (2 * k + 2))) * inverse
    return where(converged | q.eq(math.inf), total, total + tail)


def zeta(s: Expr, q: Expr) -> Expr:
    """Hurwitz zeta function, with ATen's values at the poles."""
    value = _hurwitz(q, s, lambda a: a.pow(-s))
    nan, inf = s.const(math.nan), s.const(math.inf)
    at_pole = where(q.floor().eq(q), inf, where(s.floor().ne(s), nan, value))
    value = where(q <= 0, at_pole, value)
    return where(s.eq(1), inf, where(s < 1, nan, value))


@lowers(aten.special_zeta.default, aten.special_zeta.other_scalar, aten.special_zeta.self_scalar)
def zeta_(cx: LowerContext, self: Operand, other: Operand) -> Value:
    return cx.result(zeta(expr(cx, self), expr(cx, other)).v)


def _integer_power(x: Expr, n: int) -> Expr:
    result = None
    while n:
        if n & 1:
            result = x if result is None else result * x
        n >>= 1
        x = x * x
    assert result is not None
    return result


def _trigamma(x: Expr) -> Expr:
    low = x < 0.5
    a = where(low, 1 - x, x)
    value = _hurwitz(a, a.const(2), lambda v: 1 / (v * v))
    ratio = math.pi / _sin_pi(x)
    return where(low, ratio * ratio - value, value)


@lowers(aten.polygamma.default)
def polygamma(cx: LowerContext, n: int, self: Value) -> Value:
    x = expr(cx, self)
    if n == 0:
        return cx.result(digamma(x).v)
    if n == 1:
        return cx.result(_trigamma(x).v)
    value = _hurwitz(x, x.const(n + 1), lambda a: 1 / _integer_power(a, n + 1))
    value = where((x <= 0) & x.floor().eq(x), x.const(math.inf), value)
    scale = math.factorial(n) * (1.0 if n % 2 else -1.0)
    return cx.result((value * scale).v)


# ---- incomplete gamma


def _log1p_minus(mu: Expr) -> Expr:
    """log(1 + mu) - mu for mu > -1, accurate near 0."""
    y = mu / (mu + 2)
    square = y * y
    terms = 18 if _is_wide(mu) else 8
    series = [1 / (2 * k + 3) for k in range(terms)]
    near = 2 * y * square * polynomial(square, series[::-1]) - mu * y
    return where(mu.abs() < 0.5, near, mu.log1p() - mu)


def _gamma_density(a: Expr, x: Expr) -> Expr:
    """x**a exp(-x) / gamma(a + 1)."""
    mu = (x - a) / a
    large = (a * _log1p_minus(mu) - _stirling(a)).exp() / (2 * math.pi * a).sqrt()
    small = (a * x.log() - x - _lgamma1p(a)).exp()
    return where(a > 10, large, small)


def _lower_series(a: Expr, x: Expr, active: Expr) -> Expr:
    """1 + x / (a + 1) + x² / ((a + 1)(a + 2)) + …"""
    eps = torch.finfo(a.dtype).eps

    def busy(state: list[Expr]) -> Expr:
        _, term, total, n = state
        return active & (term > total * eps) & (n < _MAX_TERMS)

    def body(state: list[Expr]) -> list[Expr]:
        r, term, total, n = state
        r = r + 1
        term = term * (x / r)
        return [r, term, total + term, n + 1]

    one = a.const(1)
    return loop([a, one, one, a.const(0)], busy, body)[2]


def _upper_fraction(a: Expr, x: Expr, active: Expr) -> Expr:
    """Lentz's evaluation of gamma(a, x) / (x**a exp(-x)) as a continued fraction, for x > max(1, a)."""
    eps = torch.finfo(a.dtype).eps
    tiny = torch.finfo(a.dtype).tiny * 1e6

    def away(v: Expr) -> Expr:
        return where(v.abs() < tiny, tiny, v)

    def busy(state: list[Expr]) -> Expr:
        _, _, _, _, change, n = state
        return active & ((change - 1).abs() > eps) & (n < _MAX_TERMS)

    def body(state: list[Expr]) -> list[Expr]:
        b, c, d, total, _, n = state
        n = n + 1
        b = b + 2
        numerator = n * (a - n)
        d = 1 / away(numerator * d + b)
        c = away(b + numerator / c)
        change = c * d
        return [b, c, d, total * change, change, n]

    b = x + 1 - a
    d = 1 / away(b)
    start = [b, a.const(1 / tiny), d, d, a.const(0), a.const(0)]
    return loop(start, busy, body)[3]


def _upper_small(a: Expr, x: Expr) -> Expr:
    """Q(a, x) for small a and x <= 1.1, where 1 - P(a, x) would cancel."""
    total, factor = a.const(0), a.const(1)
    for n in range(1, 22 if _is_wide(a) else 13):
        factor = factor * (x / -float(n))
        total = total + factor / (a + n)
    log = x.log()
    lead = a * log - _lgamma1p(a)
    return -lead.expm1() - a * lead.exp() * total


def _incomplete_gamma(a: Expr, x: Expr) -> tuple[Expr, Expr]:
    """P(a, x) and Q(a, x) inside the domain."""
    usual = (x > 0) & (a > 0) & x.is_finite() & a.is_finite()
    fraction = usual & (x > 1.1) & (x > a)
    small = usual & (x <= 1.1) & where(x <= 0.5, a * x.log() > -0.4, a <= x * 1.1)
    density = _gamma_density(a, x)
    series = density * _lower_series(a, x, usual & ~fraction)
    upper = density * a * _upper_fraction(a, x, fraction)
    p = where(fraction, 1 - upper, series)
    q = where(fraction, upper, where(small, _upper_small(a, x), 1 - series))
    return p, q


@lowers(aten.igamma.default, aten.igammac.default)
def igamma(cx: LowerContext, self: Value, other: Value) -> Value:
    a, x = expr(cx, self), expr(cx, other)
    lower = cx.op is aten.igamma.default
    p, q = _incomplete_gamma(a, x)
    empty, full = (0, 1) if lower else (1, 0)
    nan = a.const(math.nan)
    value = p if lower else q
    value = where(x.eq(math.inf), a.const(full), value)
    value = where(a.eq(math.inf), where(x.eq(math.inf), nan, empty), value)
    value = where(x.eq(0), a.const(empty), value)
    value = where(a.eq(0), where(x > 0, a.const(full), nan), value)
    return cx.result(where((x < 0) | (a < 0), nan, value).v)
