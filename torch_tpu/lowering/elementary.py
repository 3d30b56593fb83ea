"""Elementary functions that StableHLO does not have, or not well enough for complex values.

The formulas keep relative accuracy near zeros and do not overflow before the function does. Complex inverse functions
are Kahan's, whose branch cuts are C99's.
"""

from __future__ import annotations

import math

import torch

from torch_tpu.ir.builder import Value
from torch_tpu.lowering.expr import Expr, complex_of, expr, where
from torch_tpu.lowering.registry import LowerContext, Rule, lowers, register

aten = torch.ops.aten
LN2 = math.log(2.0)


# ---- roots, exponentials and logarithms


def _complex_sqrt(z: Expr) -> Expr:
    """The sign of a zero imaginary part chooses the side of the cut (XLA's own root loses it)."""
    x, y = z.real(), z.imag()
    root = (0.5 * x.abs() + 0.5 * z.abs()).sqrt()
    other = where(root.eq(0), root, y.abs() * 0.5 / root)
    left = x < 0
    im = where(left, root, other)
    return complex_of(where(left, other, root), where(y.sign_bit(), -im, im))


def square_root(x: Expr) -> Expr:
    """Principal root of a real or complex value."""
    return _complex_sqrt(x) if x.dtype.is_complex else x.sqrt()


@lowers(aten.sqrt.default)
def sqrt(cx: LowerContext, self: Value) -> Value:
    return cx.result(square_root(expr(cx, self)).v)


@lowers(aten.rsqrt.default)
def rsqrt(cx: LowerContext, self: Value) -> Value:
    x = expr(cx, self)
    return cx.result((1 / _complex_sqrt(x) if x.dtype.is_complex else x.rsqrt()).v)


@lowers(aten.exp2.default)
def exp2(cx: LowerContext, self: Value) -> Value:
    x = expr(cx, self)
    return cx.result(((x * LN2).exp() if x.dtype.is_complex else x.const(2).pow(x)).v)


def _log_to_base(x: Expr, base: float) -> Expr:
    """Exact at powers of the base in float32: the exponent is taken out first, and log(2) of the base is split."""
    if x.dtype.is_complex:
        log = x.log()
        return complex_of(log.real() / math.log(base), log.imag() / math.log(base))
    plain = x.log() / math.log(base)
    if x.dtype != torch.float32:
        return plain
    bits = x.bits(torch.int32)
    exponent = (bits - 0x3F3504F3) >> 23  # of sqrt(1/2): the mantissa is in [sqrt(1/2), sqrt(2))
    mantissa = (bits - (exponent << 23)).bits(torch.float32)
    scale = LN2 / math.log(base)
    high = float(int(scale * 4096)) / 4096  # short enough that its product with the exponent is exact
    n = exponent.to(torch.float32)
    exact = n * high + (n * (scale - high) + mantissa.log() / math.log(base))
    normal = (x >= torch.finfo(torch.float32).tiny) & x.is_finite()
    return where(normal, exact, plain)


@lowers(aten.log2.default, aten.log10.default)
def log2(cx: LowerContext, self: Value) -> Value:
    return cx.result(_log_to_base(expr(cx, self), 2.0 if cx.op is aten.log2.default else 10.0).v)


def _complex_log_add_exp(x: Expr, y: Expr) -> Expr:
    """ATen's: ordered by real part, with the infinities told apart."""
    swap = y.real().is_nan() | (x.real() < y.real())
    small, large = where(swap, x, y), where(swap, y, x)
    nan = large.is_nan()
    tie = small.real().eq(large.real()) & ~large.real().is_finite()
    plain = (small - large).exp().log1p() + large
    both = where(large.real() < 0, small, (small.exp() + large.exp()).log())
    total = where(tie, both, plain)
    return where(nan, large.const(complex(math.nan, math.nan)), total)


@lowers(aten.logaddexp.default, aten.logaddexp2.default)
def logaddexp(cx: LowerContext, self: Value, other: Value) -> Value:
    x, y = expr(cx, self), expr(cx, other)
    base2 = cx.op is aten.logaddexp2.default
    if x.dtype.is_complex:
        if not base2:
            return cx.result(_complex_log_add_exp(x, y).v)
        return cx.result((_complex_log_add_exp(x * LN2, y * LN2) / LN2).v)
    gap = -(x - y).abs()
    rest = (gap * LN2).exp().log1p() / LN2 if base2 else gap.exp().log1p()
    same = x.eq(y) & ~x.is_finite()  # the gap of two infinities is NaN
    return cx.result(where(same, x, x.max(y) + rest).v)


@lowers(aten.hypot.default)
def hypot(cx: LowerContext, self: Value, other: Value) -> Value:
    x, y = expr(cx, self).abs(), expr(cx, other).abs()
    large, small = x.max(y), x.min(y)
    ratio = small / large
    size = where(large.eq(0), large, large * (1 + ratio * ratio).sqrt())
    size = where(x.is_nan() | y.is_nan(), x + y, size)
    infinite = x.eq(math.inf) | y.eq(math.inf)
    return cx.result(where(infinite, x.const(math.inf), size).v)


# ---- trigonometric and hyperbolic


def _sinh(x: Expr) -> Expr:
    """(e - 1/e)(e + 1/e) / 2 with e = exp(|x|/2): accurate at 0, finite as long as sinh is."""
    half = (x.abs() * 0.5).min(700.0 if x.dtype == torch.float64 else 88.0)
    grow = half.expm1()
    e = grow + 1
    inverse = 1 / e
    return x.sign() * ((0.5 * (grow + grow * inverse)) * (e + inverse))


def _cosh(x: Expr) -> Expr:
    e = (x.abs() * 0.5).exp()
    half = (0.5 * e) * e
    return half + 0.25 / half


def sine(z: Expr) -> Expr:
    """sin of a real or complex value."""
    if not z.dtype.is_complex:
        return z.sin()
    x, y = z.real(), z.imag()
    return complex_of(x.sin() * _cosh(y), x.cos() * _sinh(y))


@lowers(aten.sin.default)
def sin(cx: LowerContext, self: Value) -> Value:
    return cx.result(sine(expr(cx, self)).v)


@lowers(aten.cos.default)
def cos(cx: LowerContext, self: Value) -> Value:
    z = expr(cx, self)
    if not z.dtype.is_complex:
        return cx.result(z.cos().v)
    x, y = z.real(), z.imag()
    return cx.result(complex_of(x.cos() * _cosh(y), -(x.sin() * _sinh(y))).v)


@lowers(aten.sinh.default)
def sinh(cx: LowerContext, self: Value) -> Value:
    z = expr(cx, self)
    if not z.dtype.is_complex:
        return cx.result(_sinh(z).v)
    x, y = z.real(), z.imag()
    return cx.result(complex_of(_sinh(x) * y.cos(), _cosh(x) * y.sin()).v)


@lowers(aten.cosh.default)
def cosh(cx: LowerContext, self: Value) -> Value:
    z = expr(cx, self)
    if not z.dtype.is_complex:
        return cx.result(_cosh(z).v)
    x, y = z.real(), z.imag()
    return cx.result(complex_of(_cosh(x) * y.cos(), _sinh(x) * y.sin()).v)


# ---- inverse functions


def _asinh(x: Expr) -> Expr:
    size = x.abs()
    square = size * size
    near = (size + square / (1 + (square + 1).sqrt())).log1p()
    return x.sign() * where(size > 1e9, size.log() + LN2, near)


def _acosh(x: Expr) -> Expr:
    t = x - 1
    near = (t + (t * (t + 2)).sqrt()).log1p()
    return where(x < 1, x.const(math.nan), where(x > 1e9, x.log() + LN2, near))


def _atanh(x: Expr) -> Expr:
    size = x.abs()
    return x.sign() * (0.5 * (2 * size / (1 - size)).log1p())


def _asin(x: Expr) -> Expr:
    return x.atan2(((1 - x) * (1 + x)).sqrt())


def _acos(x: Expr) -> Expr:
    return ((1 - x) * (1 + x)).sqrt().atan2(x)


def _atan(x: Expr) -> Expr:
    return x.atan2(1)


def _conj(z: Expr) -> Expr:
    return complex_of(z.real(), -z.imag())


def _times_i(z: Expr) -> Expr:
    return complex_of(-z.imag(), z.real())


def _over_i(z: Expr) -> Expr:
    return complex_of(z.imag(), -z.real())


def _complex_roots(z: Expr) -> tuple[Expr, Expr]:
    """sqrt(1 - z) and sqrt(1 + z) with the sign of a zero imaginary part kept."""
    x, y = z.real(), z.imag()
    return _complex_sqrt(complex_of(1 - x, -y)), _complex_sqrt(complex_of(1 + x, y))


def _complex_asin(z: Expr) -> Expr:
    low, high = _complex_roots(z)
    return complex_of(z.real().atan2((low * high).real()), _asinh((_conj(low) * high).imag()))


def _complex_acos(z: Expr) -> Expr:
    low, high = _complex_roots(z)
    return complex_of(2 * low.real().atan2(high.real()), _asinh((_conj(high) * low).imag()))


def _complex_acosh(z: Expr) -> Expr:
    x, y = z.real(), z.imag()
    low, high = (_complex_sqrt(complex_of(x + shift, y)) for shift in (-1.0, 1.0))
    return complex_of(_asinh((_conj(low) * high).real()), 2 * low.imag().atan2(high.real()))


def _complex_atanh(z: Expr) -> Expr:
    x, y = z.real(), z.imag()
    size = x.abs()
    re = 0.25 * (4 * size / ((1 - size) * (1 - size) + y * y)).log1p()
    im = 0.5 * (2 * y).atan2((1 - x) * (1 + x) - y * y)
    return complex_of(x.sign() * re, im)


# ATen op -> (of a real value, of a complex value)
INVERSE = {
    aten.asin.default: (_asin, _complex_asin),
    aten.acos.default: (_acos, _complex_acos),
    aten.atan.default: (_atan, lambda z: _over_i(_complex_atanh(_times_i(z)))),
    aten.asinh.default: (_asinh, lambda z: _over_i(_complex_asin(_times_i(z)))),
    aten.acosh.default: (_acosh, _complex_acosh),
    aten.atanh.default: (_atanh, _complex_atanh),
}


def _inverse(op: torch._ops.OpOverload) -> Rule:
    real, of_complex = INVERSE[op]

    def rule(cx: LowerContext, self: Value) -> Value:
        z = expr(cx, self)
        return cx.result((of_complex if z.dtype.is_complex else real)(z).v)

    return rule


for _op in INVERSE:
    register(_op, _inverse(_op))


# ---- integers and float parts


def _greatest_common_divisor(x: Expr, y: Expr) -> Expr:
    """Euclid on all elements together until every remainder is 0."""
    b = x.b

    def body(state: list[Value]) -> list[Value]:
        left, right = (Expr(b, v) for v in state)
        done = left.eq(0)
        return [where(done, 0, right % where(done, 1, left)).v, where(done, right, left).v]

    def busy(state: list[Value]) -> Value:
        return b.reduce_op("or", b.convert(state[0], torch.bool), False, range(state[0].rank))

    return Expr(b, b.while_([x.v, y.v], busy, body)[1])  # type: ignore[arg-type]


def _magnitude(x: Expr) -> Expr:
    return x if x.dtype == torch.uint8 else x.abs()


@lowers(aten.gcd.default)
def gcd(cx: LowerContext, self: Value, other: Value) -> Value:
    return cx.result(_greatest_common_divisor(*(_magnitude(expr(cx, x)) for x in (self, other))).v)


@lowers(aten.lcm.default)
def lcm(cx: LowerContext, self: Value, other: Value) -> Value:
    dtype = cx.out.dtype if cx.out.dtype.itemsize > 2 else torch.int32  # ATen wraps the result only
    x, y = expr(cx, self, dtype), expr(cx, other, dtype)
    g = _greatest_common_divisor(_magnitude(x), _magnitude(y))
    none = g.eq(0)
    return cx.result(where(none, 0, _magnitude(x / where(none, 1, g) * y)).v)


@lowers(aten.frexp.Tensor)
def frexp(cx: LowerContext, self: Value) -> tuple[Value, Value]:
    """Exponent from the bits; a subnormal is scaled into the normal range first."""
    x = expr(cx, self)
    wide = x.dtype == torch.float64
    ints, mantissa_bits, bias = (torch.int64, 52, 1022) if wide else (torch.int32, 23, 126)
    subnormal = x.abs() < torch.finfo(x.dtype).tiny
    scaled = where(subnormal, x * 2.0**mantissa_bits, x)
    bits = scaled.bits(ints)
    field = (bits >> mantissa_bits) & (0x7FF if wide else 0xFF)
    exponent = field - bias - where(subnormal, field.const(mantissa_bits), 0)
    sign_and_mantissa = ((1 << mantissa_bits) - 1) | torch.iinfo(ints).min
    fraction = ((bits & sign_and_mantissa) | (bias << mantissa_bits)).bits(x.dtype)
    special = x.eq(0) | ~x.is_finite()
    return cx.result(where(special, x, fraction).v, 0), cx.result(where(special, 0, exponent).v, 1)
