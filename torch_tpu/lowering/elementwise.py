"""Element-wise arithmetic, comparison, logic, rounding, selection and copies.

Shapes: every rule broadcasts its operands to ``cx.out.shape``, computes in ``cx.compute_dtype`` and rounds once at the
end (``cx.result``). What only moves values (select, fill, copy) works in the result dtype.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from torch_tpu.ir.builder import Number, Value
from torch_tpu.ir.types import UNSIGNED
from torch_tpu.lowering.elementary import square_root
from torch_tpu.lowering.expr import Expr, complex_of, expr, where
from torch_tpu.lowering.promote import Operand, operand, promoted
from torch_tpu.lowering.registry import LowerContext, Rule, lowers, register

aten = torch.ops.aten

# ATen op -> the StableHLO op of one type that is the same function.
UNARY = {
    aten.exp.default: "exponential",
    aten.expm1.default: "exponential_minus_one",
    aten.log.default: "log",
    aten.log1p.default: "log_plus_one",
    aten.neg.default: "negate",
    aten.sigmoid.default: "logistic",
    aten.tan.default: "tan",
    aten.tanh.default: "tanh",
    aten.bitwise_not.default: "not",
}

# Of an integer, these are the integer.
ROUNDING = {
    aten.ceil.default: "ceil",
    aten.floor.default: "floor",
    aten.round.default: "round_nearest_even",
}

BINARY = {
    aten.bitwise_and.Tensor: "and",
    aten.bitwise_and.Scalar: "and",
    aten.bitwise_or.Tensor: "or",
    aten.bitwise_or.Scalar: "or",
    aten.bitwise_xor.Tensor: "xor",
    aten.bitwise_xor.Scalar: "xor",
    aten.__lshift__.Tensor: "shift_left",
    aten.__lshift__.Scalar: "shift_left",
    aten.bitwise_left_shift.Tensor: "shift_left",
    aten.bitwise_left_shift.Tensor_Scalar: "shift_left",
    aten.div.Tensor: "divide",
    aten.div.Scalar: "divide",
}

SCALAR_FIRST = {
    aten.bitwise_and.Scalar_Tensor: "and",
    aten.bitwise_or.Scalar_Tensor: "or",
    aten.bitwise_xor.Scalar_Tensor: "xor",
    aten.bitwise_left_shift.Scalar_Tensor: "shift_left",
}

COMPARE = {aten.eq: "EQ", aten.ne: "NE", aten.lt: "LT", aten.le: "LE", aten.gt: "GT", aten.ge: "GE"}

LOGICAL = {aten.logical_and.default: "and", aten.logical_or.default: "or", aten.logical_xor.default: "xor"}


def _unary(hlo: str) -> Rule:
    return lambda cx, self: cx.result(cx.b.unary(hlo, operand(cx, self)))


def _rounding(hlo: str) -> Rule:
    def rule(cx: LowerContext, self: Value) -> Value:
        x = operand(cx, self)
        return cx.result(cx.b.unary(hlo, x) if x.dtype.is_floating_point else x)

    return rule


def _binary(hlo: str) -> Rule:
    return lambda cx, self, other: cx.result(cx.b.binary(hlo, operand(cx, self), operand(cx, other)))


def _compare(direction: str) -> Rule:
    return lambda cx, self, other: cx.result(cx.b.compare(direction, *promoted(cx, self, other)))


def _logical(hlo: str) -> Rule:
    return lambda cx, self, other: cx.result(
        cx.b.binary(hlo, operand(cx, self, torch.bool), operand(cx, other, torch.bool))
    )


for _op, _hlo in UNARY.items():
    register(_op, _unary(_hlo))
for _op, _hlo in ROUNDING.items():
    register(_op, _rounding(_hlo))
for _op, _hlo in (BINARY | SCALAR_FIRST).items():
    register(_op, _binary(_hlo))
for _packet, _direction in COMPARE.items():
    register(_packet.Tensor, _compare(_direction))
    register(_packet.Scalar, _compare(_direction))
for _op, _hlo in LOGICAL.items():
    register(_op, _logical(_hlo))


# ---- add, multiply, divide


def is_one(x: Operand) -> bool:
    """The number 1, known at lowering time."""
    return not isinstance(x, Value) and x == 1


@lowers(aten.add.Tensor, aten.add.Scalar, scalars={"alpha": (1,)})
def add(cx: LowerContext, self: Value, other: Operand, alpha: Operand = 1) -> Value:
    rhs = operand(cx, other)
    if not is_one(alpha):
        rhs = cx.b.mul(rhs, operand(cx, alpha))
    return cx.result(cx.b.add(operand(cx, self), rhs))


@lowers(aten.sub.Tensor, aten.sub.Scalar, scalars={"alpha": (1,)})
def sub(cx: LowerContext, self: Value, other: Operand, alpha: Operand = 1) -> Value:
    rhs = operand(cx, other)
    if not is_one(alpha):
        rhs = cx.b.mul(rhs, operand(cx, alpha))
    return cx.result(cx.b.sub(operand(cx, self), rhs))


@lowers(aten.rsub.Tensor, aten.rsub.Scalar, scalars={"alpha": (1,)})
def rsub(cx: LowerContext, self: Value, other: Operand, alpha: Operand = 1) -> Value:
    rhs = operand(cx, self)
    if not is_one(alpha):
        rhs = cx.b.mul(rhs, operand(cx, alpha))
    return cx.result(cx.b.sub(operand(cx, other), rhs))


@lowers(aten.mul.Tensor, aten.mul.Scalar)
def mul(cx: LowerContext, self: Value, other: Operand) -> Value:
    return cx.result(cx.b.mul(operand(cx, self), operand(cx, other)))


@lowers(aten._add_relu.Tensor, aten._add_relu.Scalar, scalars={"alpha": (1,)})
def add_relu(cx: LowerContext, self: Value, other: Operand, alpha: Operand = 1) -> Value:
    rhs = expr(cx, other)
    if not is_one(alpha):
        rhs = rhs * expr(cx, alpha)
    return cx.result((expr(cx, self) + rhs).max(0).v)


def _trunc(x: Expr) -> Expr:
    if not x.dtype.is_floating_point:
        return x
    return where(x < 0, x.ceil(), x.floor())


def _float_floor_divide(a: Expr, b: Expr) -> Expr:
    """Python's floor division: from the remainder, because a rounded quotient can reach the next integer."""
    mod = a % b
    div = (a - mod) / b
    div = where(mod.ne(0) & ((b < 0) ^ (mod < 0)), div - 1, div)
    low = div.floor()
    low = where(div - low > 0.5, low + 1, low)
    quotient = a / b
    zero = where(quotient.sign_bit(), quotient.const(-0.0), 0.0)
    return where(b.eq(0), quotient, where(div.ne(0), low, zero))


def _floor_divide(a: Expr, b: Expr) -> Expr:
    if a.dtype.is_floating_point:
        return _float_floor_divide(a, b)
    div = a / b
    if a.dtype in UNSIGNED:
        return div
    rem = a % b
    return where(rem.ne(0) & ((rem < 0) ^ (b < 0)), div - 1, div)


@lowers(aten.div.Tensor_mode, aten.div.Scalar_mode)
def div_mode(cx: LowerContext, self: Value, other: Operand, rounding_mode: str | None) -> Value:
    a, b = expr(cx, self), expr(cx, other)
    if rounding_mode == "floor":
        return cx.result(_floor_divide(a, b).v)
    quotient = cx.result((a / b).v)
    return cx.result(_trunc(Expr(cx.b, quotient)).v) if rounding_mode == "trunc" else quotient


@lowers(aten.floor_divide.default, aten.floor_divide.Scalar)
def floor_divide(cx: LowerContext, self: Value, other: Operand) -> Value:
    return cx.result(_floor_divide(expr(cx, self), expr(cx, other)).v)


@lowers(aten.remainder.Tensor, aten.remainder.Scalar, aten.remainder.Scalar_Tensor)
def remainder(cx: LowerContext, self: Operand, other: Operand) -> Value:
    a, b = expr(cx, self), expr(cx, other)
    mod = a % b
    if a.dtype not in UNSIGNED:
        mod = where(mod.ne(0) & ((b < 0) ^ (mod < 0)), mod + b, mod)
    return cx.result(mod.v)


@lowers(aten.fmod.Tensor, aten.fmod.Scalar)
def fmod(cx: LowerContext, self: Value, other: Operand) -> Value:
    return cx.result((expr(cx, self) % expr(cx, other)).v)


@lowers(aten.reciprocal.default)
def reciprocal(cx: LowerContext, self: Value) -> Value:
    return cx.result((1 / expr(cx, self)).v)


@lowers(aten.addcmul.default, scalars={"value": (1,)})
def addcmul(cx: LowerContext, self: Value, tensor1: Value, tensor2: Value, value: Operand = 1) -> Value:
    lhs = operand(cx, tensor1)
    if not is_one(value):
        lhs = cx.b.mul(operand(cx, value), lhs)
    return cx.result(cx.b.add(operand(cx, self), cx.b.mul(lhs, operand(cx, tensor2))))


@lowers(aten.addcdiv.default, scalars={"value": (1,)})
def addcdiv(cx: LowerContext, self: Value, tensor1: Value, tensor2: Value, value: Operand = 1) -> Value:
    lhs = operand(cx, tensor1)
    if not is_one(value):
        lhs = cx.b.mul(operand(cx, value), lhs)
    return cx.result(cx.b.add(operand(cx, self), cx.b.div(lhs, operand(cx, tensor2))))


@lowers(aten.lerp.Scalar, aten.lerp.Tensor)
def lerp(cx: LowerContext, self: Value, end: Value, weight: Operand) -> Value:
    """From the nearer end, as ATen: exact at weights 0 and 1."""
    shape = weight.shape if isinstance(weight, Value) else ()
    w = expr(cx, weight, shape=shape)
    near = (w.abs() if w.dtype.is_complex else w) < 0.5
    start, stop = expr(cx, self), expr(cx, end)
    step = where(near, w, w - 1)  # small when the weight is: a rank-0 weight costs nothing per element
    if near.v.rank:
        near, step = (Expr(cx.b, cx.b.broadcast_to(e.v, cx.out.shape)) for e in (near, step))
    return cx.result((where(near, start, stop) + (stop - start) * step).v)


# ---- powers


def _int_power(base: Expr, exponent: Expr) -> Expr:
    """Square and multiply, wrapping; a negative exponent truncates 1 / base**n to 0 unless the base is ±1."""
    b = base.b
    one = base.const(1)

    def body(state: list[Value]) -> list[Value]:
        total, square, left = (Expr(b, v) for v in state)
        total = where((left & 1).ne(0), total * square, total)
        return [total.v, (square * square).v, b.binary("shift_right_logical", left.v, left.const(1).v)]

    def busy(state: list[Value]) -> Value:
        return b.reduce_op("or", b.convert(state[2], torch.bool), False, range(state[2].rank))

    total = Expr(b, b.while_([one.v, base.v, exponent.v], busy, body)[0])  # type: ignore[arg-type]
    if base.dtype in UNSIGNED:
        return total
    inverse = where(base.eq(1), one, where(base.eq(-1), where((exponent & 1).eq(0), one, base), 0))
    return where(exponent < 0, inverse, total)


def _power(base: Expr, exponent: Expr) -> Expr:
    exact = base.dtype.is_floating_point or base.dtype.is_complex
    return base.pow(exponent) if exact else _int_power(base, exponent)


@lowers(aten.pow.Tensor_Tensor, aten.pow.Scalar)
def pow_tensor(cx: LowerContext, self: Operand, exponent: Value) -> Value:
    return cx.result(_power(expr(cx, self), expr(cx, exponent)).v)


def _static_power(x: Expr, exponent: Number) -> Expr | None:
    """Powers that need no transcendental function."""
    table: dict[Number, Callable[[], Expr]] = {
        0: lambda: x.const(1),
        1: lambda: x,
        2: lambda: x * x,
        3: lambda: x * x * x,
        4: lambda: (x * x) * (x * x),
    }
    if x.dtype.is_floating_point or x.dtype.is_complex:
        table |= {
            0.5: lambda: square_root(x),
            -0.5: lambda: x.rsqrt() if x.dtype.is_floating_point else 1 / square_root(x),
            -1: lambda: 1 / x,
            -2: lambda: 1 / (x * x),
        }
    found = table.get(exponent)
    return found() if found else None


@lowers(aten.pow.Tensor_Scalar, scalars={"exponent": (0, 1, 2, 3, 4, 0.5, -0.5, -1, -2)})
def pow_scalar(cx: LowerContext, self: Value, exponent: Operand) -> Value:
    x = expr(cx, self)
    static = None if isinstance(exponent, Value) else _static_power(x, exponent)
    return cx.result((_power(x, expr(cx, exponent)) if static is None else static).v)


# ---- shifts


@lowers(
    aten.bitwise_right_shift.Tensor,
    aten.bitwise_right_shift.Tensor_Scalar,
    aten.bitwise_right_shift.Scalar_Tensor,
    aten.__rshift__.Tensor,
    aten.__rshift__.Scalar,
)
def right_shift(cx: LowerContext, self: Operand, other: Operand) -> Value:
    kind = "logical" if cx.out.dtype in UNSIGNED else "arithmetic"
    return cx.result(cx.b.binary(f"shift_right_{kind}", operand(cx, self), operand(cx, other)))


# ---- rounding and sign


@lowers(aten.trunc.default)
def trunc(cx: LowerContext, self: Value) -> Value:
    return cx.result(_trunc(expr(cx, self)).v)


@lowers(aten.frac.default)
def frac(cx: LowerContext, self: Value) -> Value:
    x = expr(cx, self)
    return cx.result((x - _trunc(x)).v)


@lowers(aten.round.decimals)
def round_decimals(cx: LowerContext, self: Value, decimals: int) -> Value:
    x = expr(cx, self)
    if not x.dtype.is_floating_point:
        return cx.result(x.v)
    if decimals == 0:
        return cx.result(x.round().v)
    scale = 10.0 ** abs(decimals)
    return cx.result(((x * scale).round() / scale if decimals > 0 else (x / scale).round() * scale).v)


def absolute(x: Expr) -> Expr:
    """``|x|`` of any dtype; real for a complex value."""
    return x if x.dtype in UNSIGNED else x.abs()


@lowers(aten.abs.default)
def abs_(cx: LowerContext, self: Value) -> Value:
    dtype = self.dtype if self.dtype.is_complex else None
    return cx.result(absolute(expr(cx, self, dtype)).v)


@lowers(aten.sign.default)
def sign(cx: LowerContext, self: Value) -> Value:
    """ATen's sign of NaN and of -0 is 0."""
    x = expr(cx, self)
    if x.dtype == torch.bool:
        return cx.result(x.v)
    if x.dtype in UNSIGNED:
        return cx.result((x > 0).to(x.dtype).v)
    if not x.dtype.is_floating_point:
        return cx.result(x.sign().v)
    return cx.result(((x > 0).to(x.dtype) - (x < 0).to(x.dtype)).v)


@lowers(aten.sgn.default)
def sgn(cx: LowerContext, self: Value) -> Value:
    if not self.dtype.is_complex:
        return sign(cx, self)
    x = expr(cx, self)
    size = x.abs()
    return cx.result(where(size.eq(0), 0, complex_of(x.real() / size, x.imag() / size)).v)


@lowers(aten.atan2.default)
def atan2(cx: LowerContext, self: Value, other: Value) -> Value:
    return cx.result(expr(cx, self).atan2(expr(cx, other)).v)


@lowers(aten.signbit.default)
def signbit(cx: LowerContext, self: Value) -> Value:
    if self.dtype in UNSIGNED:
        return cx.b.constant(False, torch.bool, cx.out.shape)
    x = expr(cx, self, self.dtype)
    return cx.result((x.sign_bit() if self.dtype.is_floating_point else x < 0).v)


@lowers(aten.copysign.Tensor, aten.copysign.Scalar)
def copysign(cx: LowerContext, self: Value, other: Operand) -> Value:
    size = expr(cx, self).abs()
    return cx.result(where(expr(cx, other).sign_bit(), -size, size).v)


@lowers(aten.heaviside.default)
def heaviside(cx: LowerContext, self: Value, values: Value) -> Value:
    x = expr(cx, self)
    return cx.result(where(x.eq(0), expr(cx, values), (x > 0).to(x.dtype)).v)


_BITS = {
    torch.float32: torch.int32,
    torch.float64: torch.int64,
    torch.bfloat16: torch.int16,
    torch.float16: torch.int16,
}


@lowers(aten.nextafter.default)
def nextafter(cx: LowerContext, self: Value, other: Value) -> Value:
    """One step on the integers that the bits are; their order is that of the magnitudes."""
    x, y = expr(cx, self, cx.out.dtype), expr(cx, other, cx.out.dtype)
    ints = _BITS[cx.out.dtype]
    i, j = x.bits(ints), y.bits(ints)
    least, magnitude = torch.iinfo(ints).min, torch.iinfo(ints).max
    x_zero, y_zero = (i & magnitude).eq(0), (j & magnitude).eq(0)
    ordered = [where(k < 0, k.const(least) - k, k) for k in (i, j)]  # the float order, as integers
    away = (ordered[1] > ordered[0]) ^ (i < 0)
    step = where(x_zero, (j & least) | 1, where(away, i + 1, i - 1))
    same = ordered[0].eq(ordered[1]) | (x_zero & y_zero)
    moved = where(same, y, step.bits(cx.out.dtype))
    return cx.result(where(x.is_nan() | y.is_nan(), x + y, moved).v)


# ---- bounds


@lowers(aten.maximum.default)
def maximum(cx: LowerContext, self: Value, other: Value) -> Value:
    return cx.result(expr(cx, self).maximum(expr(cx, other)).v)


@lowers(aten.minimum.default)
def minimum(cx: LowerContext, self: Value, other: Value) -> Value:
    return cx.result(expr(cx, self).minimum(expr(cx, other)).v)


@lowers(aten.fmax.default, aten.fmin.default)
def fmax(cx: LowerContext, self: Value, other: Value) -> Value:
    """The other operand where one is NaN."""
    x, y = expr(cx, self), expr(cx, other)
    best = x.max(y) if cx.op is aten.fmax.default else x.min(y)
    if x.dtype.is_floating_point:
        best = where(x.is_nan(), y, where(y.is_nan(), x, best))
    return cx.result(best.v)


@lowers(aten.clamp.default, aten.clamp.Tensor)
def clamp(cx: LowerContext, self: Value, min: Operand | None = None, max: Operand | None = None) -> Value:
    x = expr(cx, self)
    if min is not None:
        x = x.maximum(expr(cx, min))
    if max is not None:
        x = x.minimum(expr(cx, max))
    return cx.result(x.v)


@lowers(aten.clamp_min.default, aten.clamp_min.Tensor)
def clamp_min(cx: LowerContext, self: Value, min: Operand) -> Value:
    return clamp(cx, self, min=min)


@lowers(aten.clamp_max.default, aten.clamp_max.Tensor)
def clamp_max(cx: LowerContext, self: Value, max: Operand) -> Value:
    return clamp(cx, self, max=max)


# ---- classification


def is_infinite(x: Expr) -> Expr:
    """True for ±inf; for a complex value, if a part is."""
    if x.dtype.is_complex:
        return is_infinite(x.real()) | is_infinite(x.imag())
    return x.abs().eq(float("inf"))


@lowers(aten.isnan.default)
def isnan(cx: LowerContext, self: Value) -> Value:
    return cx.result(cx.b.is_nan(self))


@lowers(aten.isinf.default)
def isinf(cx: LowerContext, self: Value) -> Value:
    if not self.dtype.is_floating_point and not self.dtype.is_complex:
        return cx.b.constant(False, torch.bool, cx.out.shape)
    return cx.result(is_infinite(Expr(cx.b, self)).v)


@lowers(aten.isposinf.default, aten.isneginf.default)
def isposinf(cx: LowerContext, self: Value) -> Value:
    if not self.dtype.is_floating_point:
        return cx.b.constant(False, torch.bool, cx.out.shape)
    limit = float("inf") if cx.op is aten.isposinf.default else -float("inf")
    return cx.result(Expr(cx.b, self).eq(limit).v)


def _replace_specials(x: Expr, nan: Expr | Number, posinf: Expr | Number, neginf: Expr | Number) -> Expr:
    x = where(x.is_nan(), nan, x)
    x = where(x.eq(float("inf")), posinf, x)
    return where(x.eq(-float("inf")), neginf, x)


@lowers(aten.nan_to_num.default)
def nan_to_num(
    cx: LowerContext,
    self: Value,
    nan: Operand | None = None,
    posinf: Operand | None = None,
    neginf: Operand | None = None,
) -> Value:
    x = expr(cx, self, cx.out.dtype)
    if not x.dtype.is_floating_point and not x.dtype.is_complex:
        return cx.result(x.v)
    part = x.real().dtype if x.dtype.is_complex else x.dtype
    info = torch.finfo(part)
    new = [
        default if given is None else expr(cx, given, part)
        for given, default in ((nan, 0.0), (posinf, info.max), (neginf, info.min))
    ]
    if not x.dtype.is_complex:
        return cx.result(_replace_specials(x, *new).v)
    return cx.result(complex_of(_replace_specials(x.real(), *new), _replace_specials(x.imag(), *new)).v)


# ---- logic and selection


@lowers(aten.logical_not.default)
def logical_not(cx: LowerContext, self: Value) -> Value:
    return cx.result(cx.b.compare("EQ", self, cx.b.constant(0, self.dtype, self.shape)))


@lowers(aten.where.self)
def where_(cx: LowerContext, condition: Value, self: Value, other: Value) -> Value:
    dtype = cx.out.dtype
    pred = cx.b.convert(condition, torch.bool)
    if pred.rank:
        pred = cx.b.broadcast_to(pred, cx.out.shape)
    return cx.b.select(pred, operand(cx, self, dtype), operand(cx, other, dtype))


@lowers(aten.masked_fill.Scalar, aten.masked_fill.Tensor)
def masked_fill(cx: LowerContext, self: Value, mask: Value, value: Operand) -> Value:
    dtype = cx.out.dtype
    return cx.b.select(operand(cx, mask, torch.bool), operand(cx, value, dtype), operand(cx, self, dtype))


# ---- fills and copies


@lowers(aten.fill.Scalar, aten.fill.Tensor)
def fill(cx: LowerContext, self: Value, value: Operand) -> Value:
    return operand(cx, value, cx.out.dtype)


@lowers(aten.zero.default)
def zero(cx: LowerContext, self: Value) -> Value:
    return cx.b.constant(0, cx.out.dtype, cx.out.shape)


@lowers(aten.copy.default)
def copy(cx: LowerContext, self: Value, src: Value, non_blocking: bool = False) -> Value:
    return operand(cx, src, cx.out.dtype)


@lowers(aten._to_copy.default)
def to_copy(
    cx: LowerContext,
    self: Value,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
    non_blocking: bool = False,
    memory_format: torch.memory_format | None = None,
) -> Value:
    return cx.result(self)


# ---- complex values


@lowers(aten.complex.default)
def complex_(cx: LowerContext, real: Value, imag: Value) -> Value:
    part = torch.float64 if cx.out.dtype == torch.complex128 else torch.float32
    return cx.result(cx.b.complex(operand(cx, real, part), operand(cx, imag, part)))


@lowers(aten.polar.default)
def polar(cx: LowerContext, abs: Value, angle: Value) -> Value:
    part = torch.float64 if cx.out.dtype == torch.complex128 else torch.float32
    r, phi = expr(cx, abs, part), expr(cx, angle, part)
    return cx.result(complex_of(r * phi.cos(), r * phi.sin()).v)


@lowers(aten._conj_physical.default)
def conj_physical(cx: LowerContext, self: Value) -> Value:
    if not self.dtype.is_complex:
        return cx.result(self)
    z = expr(cx, self)
    return cx.result(complex_of(z.real(), -z.imag()).v)


@lowers(aten.angle.default)
def angle(cx: LowerContext, self: Value) -> Value:
    if self.dtype.is_complex:
        z = expr(cx, self, self.dtype)
        return cx.result(z.imag().atan2(z.real()).v)
    x = expr(cx, self)
    return cx.result(where(x.is_nan(), x, where(x < 0, x.const(torch.pi), 0)).v)
