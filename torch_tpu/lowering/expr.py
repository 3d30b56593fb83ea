"""Infix notation for rules that are formulas: ``0.5 * x * (1 + erf(x))`` instead of nested builder calls.

An `Expr` is a `Value` with its `Builder`. Operators emit the StableHLO op of the left operand's type; Python numbers
become constants, and a rank-0 operand is broadcast. There is no type promotion: both sides have one dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from torch_tpu.ir.builder import Builder, Number, Value
from torch_tpu.ir.types import TensorType
from torch_tpu.lowering.promote import Operand, operand
from torch_tpu.lowering.registry import LowerContext


@dataclass(frozen=True, slots=True, eq=False)
class Expr:
    """A value that knows its builder. Comparisons give bool Exprs, so ``==`` is spelt ``eq``."""

    b: Builder
    v: Value

    @property
    def dtype(self) -> torch.dtype:
        return self.v.dtype

    def const(self, value: Number) -> Expr:
        """``value`` in this value's dtype and shape."""
        return Expr(self.b, self.b.constant(value, self.v.dtype, self.v.shape))

    def _pair(self, other: Expr | Number) -> tuple[Value, Value]:
        if not isinstance(other, Expr):
            return self.v, self.b.constant(other, self.v.dtype, self.v.shape)
        x, y = self.v, other.v
        return (x, self.b.broadcast_to(y, x.shape)) if x.rank >= y.rank else (self.b.broadcast_to(x, y.shape), y)

    def _binary(self, op: str, other: Expr | Number, *, swap: bool = False) -> Expr:
        x, y = self._pair(other)
        return Expr(self.b, self.b.binary(op, *((y, x) if swap else (x, y))))

    def _unary(self, op: str) -> Expr:
        return Expr(self.b, self.b.unary(op, self.v))

    def _compare(self, direction: str, other: Expr | Number) -> Expr:
        return Expr(self.b, self.b.compare(direction, *self._pair(other)))

    def __add__(self, other: Expr | Number) -> Expr:
        return self._binary("add", other)

    def __radd__(self, other: Number) -> Expr:
        return self._binary("add", other, swap=True)

    def __sub__(self, other: Expr | Number) -> Expr:
        return self._binary("subtract", other)

    def __rsub__(self, other: Number) -> Expr:
        return self._binary("subtract", other, swap=True)

    def __mul__(self, other: Expr | Number) -> Expr:
        return self._binary("multiply", other)

    def __rmul__(self, other: Number) -> Expr:
        return self._binary("multiply", other, swap=True)

    def __truediv__(self, other: Expr | Number) -> Expr:
        return self._binary("divide", other)

    def __rtruediv__(self, other: Number) -> Expr:
        return self._binary("divide", other, swap=True)

    def __mod__(self, other: Expr | Number) -> Expr:
        """C remainder: the sign of the dividend."""
        return self._binary("remainder", other)

    def __neg__(self) -> Expr:
        return self._unary("negate")

    def __and__(self, other: Expr | Number) -> Expr:
        return self._binary("and", other)

    def __or__(self, other: Expr | Number) -> Expr:
        return self._binary("or", other)

    def __xor__(self, other: Expr | Number) -> Expr:
        return self._binary("xor", other)

    def __invert__(self) -> Expr:
        return self._unary("not")

    def __lshift__(self, other: Expr | Number) -> Expr:
        return self._binary("shift_left", other)

    def __rshift__(self, other: Expr | Number) -> Expr:
        """Arithmetic shift."""
        return self._binary("shift_right_arithmetic", other)

    def __lt__(self, other: Expr | Number) -> Expr:
        return self._compare("LT", other)

    def __le__(self, other: Expr | Number) -> Expr:
        return self._compare("LE", other)

    def __gt__(self, other: Expr | Number) -> Expr:
        return self._compare("GT", other)

    def __ge__(self, other: Expr | Number) -> Expr:
        return self._compare("GE", other)

    def eq(self, other: Expr | Number) -> Expr:
        return self._compare("EQ", other)

    def ne(self, other: Expr | Number) -> Expr:
        return self._compare("NE", other)

    def max(self, other: Expr | Number) -> Expr:
        """NaN where this is NaN; a NaN of ``other`` may get lost (XLA's CPU plugin does so). See `maximum`."""
        return self._binary("maximum", other)

    def min(self, other: Expr | Number) -> Expr:
        """NaN where this is NaN; a NaN of ``other`` may get lost."""
        return self._binary("minimum", other)

    def maximum(self, other: Expr) -> Expr:
        """NaN where either is NaN."""
        best = self.max(other)
        return where(other.is_nan(), other, best) if self.dtype.is_floating_point else best

    def minimum(self, other: Expr) -> Expr:
        """NaN where either is NaN."""
        best = self.min(other)
        return where(other.is_nan(), other, best) if self.dtype.is_floating_point else best

    def atan2(self, other: Expr | Number) -> Expr:
        """The angle of the point (``other``, this), in [-pi, pi]; NaN where either is NaN."""
        y, x = (Expr(self.b, v) for v in self._pair(other))
        # The CPU plugin's own calls libm for each element: 17 times as long as ATen.
        return _atan2_of_float32(y, x) if y.dtype == torch.float32 else y._binary("atan2", x)

    def pow(self, other: Expr | Number) -> Expr:
        return self._binary("power", other)

    def exp(self) -> Expr:
        return self._unary("exponential")

    def expm1(self) -> Expr:
        return self._unary("exponential_minus_one")

    def log(self) -> Expr:
        return self._unary("log")

    def log1p(self) -> Expr:
        return self._unary("log_plus_one")

    def sqrt(self) -> Expr:
        return self._unary("sqrt")

    def rsqrt(self) -> Expr:
        return self._unary("rsqrt")

    def sin(self) -> Expr:
        return self._unary("sine")

    def cos(self) -> Expr:
        return self._unary("cosine")

    def tan(self) -> Expr:
        return self._unary("tan")

    def tanh(self) -> Expr:
        return self._unary("tanh")

    def sigmoid(self) -> Expr:
        return self._unary("logistic")

    def floor(self) -> Expr:
        return self._unary("floor")

    def ceil(self) -> Expr:
        return self._unary("ceil")

    def round(self) -> Expr:
        """Half to even."""
        return self._unary("round_nearest_even")

    def sign(self) -> Expr:
        """-1, 0 or 1 of a signed type; ±0 and NaN are kept."""
        return self._unary("sign")

    def abs(self) -> Expr:
        """Absolute value; real for a complex value."""
        dtype = {torch.complex64: torch.float32, torch.complex128: torch.float64}.get(self.dtype, self.dtype)
        return Expr(self.b, self.b.op("stablehlo.abs", [self.v], [TensorType(self.v.shape, dtype)])[0])

    def is_nan(self) -> Expr:
        return Expr(self.b, self.b.is_nan(self.v))

    def is_finite(self) -> Expr:
        return Expr(self.b, self.b.is_finite(self.v))

    def sign_bit(self) -> Expr:
        """True for negative floats, -0 and -NaN."""
        return Expr(self.b, self.b.compare("LT", self.v, self.const(0).v, total_order=True))

    def real(self) -> Expr:
        return Expr(self.b, self.b.real(self.v))

    def imag(self) -> Expr:
        return Expr(self.b, self.b.imag(self.v))

    def to(self, dtype: torch.dtype) -> Expr:
        return Expr(self.b, self.b.convert(self.v, dtype))

    def bits(self, dtype: torch.dtype) -> Expr:
        """The same bits as another dtype of the same width."""
        return Expr(self.b, self.b.bitcast(self.v, dtype))


def expr(cx: LowerContext, x: Operand, dtype: torch.dtype | None = None, shape: Sequence[int] | None = None) -> Expr:
    """`promote.operand` as an Expr: by default in the op's compute type and in the shape of its first result."""
    return Expr(cx.b, operand(cx, x, dtype, shape))


def where(pred: Expr, on_true: Expr | Number, on_false: Expr | Number) -> Expr:
    """Element-wise choice; at least one branch is an Expr. A rank-0 ``pred`` is not broadcast."""
    if isinstance(on_true, Expr):
        x, y = on_true._pair(on_false)
    else:
        assert isinstance(on_false, Expr)
        y, x = on_false._pair(on_true)
    if pred.v.rank and not x.rank:
        x, y = (pred.b.broadcast_to(v, pred.v.shape) for v in (x, y))
    return Expr(pred.b, pred.b.select(pred.v, x, y))


def complex_of(re: Expr, im: Expr) -> Expr:
    """A complex value from its parts."""
    return Expr(re.b, re.b.complex(re.v, im.v))


def polynomial(x: Expr, coefficients: Sequence[float]) -> Expr:
    """Horner's rule; highest power first."""
    total = x.const(coefficients[0])
    for c in coefficients[1:]:
        total = total * x + c
    return total


# atan(t) = t + t^3 p(t^2) on [0, 1], highest power first: a Chebyshev fit of atan(t) / t in t^2, relative error 4e-10.
_ATAN = (
    0.0010844927746802568, -0.007166164927184582, 0.02220345474779606, -0.04427366703748703, 0.0671011433005333,
    -0.08796117454767227, 0.11053784936666489, -0.14279048144817352, 0.1999959647655487, -0.33333322405815125,
)  # fmt: skip
_PI, _PI_LOW = 3.1415927410125732, -8.742277657347586e-08  # pi as the sum of two float32


def _atan2_of_float32(y: Expr, x: Expr) -> Expr:
    """Within 2 units in the last place; zeros, infinities and their signs as IEEE 754 has them."""
    up, along = y.abs(), x.abs()
    large, small = up.max(along), up.min(along)
    ratio = where(large.eq(small), where(large.eq(0), large, 1.0), small / large)
    square = ratio * ratio
    angle = ratio + ratio * (square * polynomial(square, _ATAN))
    angle = where(up > along, (_PI / 2 - angle) + _PI_LOW / 2, angle)
    angle = where(x.sign_bit(), (_PI - angle) + _PI_LOW, angle)
    angle = where(y.sign_bit(), -angle, angle)
    return where(y.is_nan(), y, where(x.is_nan(), x, angle))
