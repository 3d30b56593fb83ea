"""Symbolic sizes: as numbers at the bounds of their symbols, and as values that a program computes from operands."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import sympy
import torch
from torch.utils._sympy import functions as sym

from torch_tpu.ir.builder import Builder, Value


class Unbounded(Exception):
    """A graph, or an op of it, that cannot be computed at the bounds of its symbols. Text: which, and why."""


def expression(n: Any) -> sympy.Expr:
    """The formula of a number, symbolic or not."""
    if isinstance(n, (torch.SymInt, torch.SymFloat)):
        return n.node.expr
    return sympy.sympify(n)


_FLOOR = (sym.FloorDiv, sym.CleanDiv)
_EXTREMES = (sympy.Max, sympy.Min, sym.Max, sym.Min)


def _common(directions: list[int | None]) -> int | None:
    """The direction of a sum of terms."""
    if None in directions or {1, -1} <= set(directions):
        return None
    return next((d for d in directions if d), 0)


def direction(e: sympy.Expr) -> int | None:
    """1: does not fall when a symbol grows; -1: does not rise; 0: has no symbol; None: not known. Symbols are >= 0."""
    if not e.free_symbols:
        return 0
    if isinstance(e, sympy.Symbol):
        return 1
    if isinstance(e, (sympy.Add, *_EXTREMES)):
        return _common([direction(a) for a in e.args])
    if isinstance(e, sympy.Mul):
        coefficient, rest = e.as_coeff_Mul()
        if coefficient != 1:
            inner = direction(rest)
            return None if inner is None else inner * (1 if coefficient > 0 else -1)
        return 1 if all(direction(a) == 1 and _is_natural(a) for a in e.args) else None
    if isinstance(e, sympy.Pow) and e.exp.is_Integer and e.exp > 0 and _is_natural(e.base):
        return direction(e.base)
    if isinstance(e, _FLOOR) and e.args[1].is_Integer and e.args[1] > 0:
        return direction(e.args[0])
    return None


_LEAST = 2  # of a symbolic size: PyTorch makes 0 and 1 constants


def _is_natural(e: sympy.Expr) -> bool:
    """Whether a formula of sizes is never negative."""
    if isinstance(e, (sympy.Max, sym.Max)):
        return any(map(_is_natural, e.args))
    return direction(e) in (0, 1) and bool(e.xreplace({s: sympy.Integer(_LEAST) for s in e.free_symbols}) >= 0)


class Sizes:
    """Of one program: what each symbol is at most, and the operand that holds what it is."""

    def __init__(self, b: Builder, bounds: Mapping[sympy.Symbol, int], operands: Mapping[sympy.Symbol, Value]) -> None:
        self.b = b
        self.bounds = {s: sympy.Integer(n) for s, n in bounds.items()}
        self.operands = operands
        self._bound: dict[sympy.Expr, int] = {}
        self._value: dict[sympy.Expr, Value] = {}

    def bound(self, n: Any) -> int:
        """The largest that a size can be.

        Raises:
            Unbounded: it is not largest at the bounds of its symbols.
        """
        if type(n) is int:
            return n
        e = expression(n)
        found = self._bound.get(e)
        if found is None:
            found = self._bound[e] = bound_of(e, self.bounds)
        return found

    def value(self, n: Any) -> Value:
        """A size as a rank-0 int64 value. Raises Unbounded for a formula that is not made of whole numbers."""
        e = expression(n)
        if e not in self._value:
            self._value[e] = self._integer(e)
        return self._value[e]

    def number(self, n: Any) -> Value:
        """A number of a graph, whole or not, as a rank-0 value that promotes like a Python number."""
        e = expression(n)
        v = self.value(e) if e.is_integer else self._real(e)
        return Value(v.name, v.type, wrapped=True)

    def _chain(self, args: Any, one: Callable[[Any], Value], combine: Callable[[Value, Value], Value]) -> Value:
        first, *rest = map(one, args)
        for x in rest:
            first = combine(first, x)
        return first

    def _integer(self, e: sympy.Expr) -> Value:
        b = self.b
        if e.is_Integer:
            return b.constant(int(e), torch.int64)
        if isinstance(e, sympy.Symbol) and e in self.operands:
            return self.operands[e]
        if isinstance(e, sympy.Add):
            return self._chain(e.args, self.value, b.add)
        if isinstance(e, sympy.Mul):
            return self._chain(e.args, self.value, b.mul)
        if isinstance(e, sympy.Pow) and e.exp.is_Integer and e.exp > 0:
            return self._chain([e.base] * int(e.exp), self.value, b.mul)
        if isinstance(e, (sympy.Max, sym.Max)):
            return self._chain(e.args, self.value, b.maximum)
        if isinstance(e, (sympy.Min, sym.Min)):
            return self._chain(e.args, self.value, b.minimum)
        if isinstance(e, _FLOOR):
            return self._floor(*map(self.value, e.args))[0]
        if isinstance(e, (sym.Mod, sym.PythonMod, sympy.Mod)):
            return self._floor(*map(self.value, e.args))[1]
        raise Unbounded(f"the size {e}")

    def _floor(self, x: Value, y: Value) -> tuple[Value, Value]:
        """Quotient rounded down, and what is left."""
        b = self.b
        q, zero = b.div(x, y), b.constant(0, torch.int64)
        rest = b.sub(x, b.mul(q, y))
        signs = b.binary("xor", b.compare("LT", rest, zero), b.compare("LT", y, zero))
        down = b.and_(b.not_(b.compare("EQ", rest, zero)), signs)
        return (
            b.select(down, b.sub(q, b.constant(1, torch.int64)), q),
            b.select(down, b.add(rest, y), rest),
        )

    def _real(self, e: sympy.Expr) -> Value:
        b = self.b
        if e.is_number:
            return b.constant(float(e), torch.float32)
        if e.is_integer:
            return b.convert(self.value(e), torch.float32)
        if isinstance(e, sym.ToFloat):
            return self._real(e.args[0])
        if isinstance(e, (sym.IntTrueDiv, sym.FloatTrueDiv)):
            return b.div(*map(self._real, e.args))
        if isinstance(e, sympy.Add):
            return self._chain(e.args, self._real, b.add)
        if isinstance(e, sympy.Mul):
            return self._chain(e.args, self._real, b.mul)
        if isinstance(e, (sympy.Pow, sym.FloatPow)):
            return b.binary("power", *map(self._real, e.args))
        name = type(e).__name__.removeprefix("OpaqueUnaryFn_")
        if name in ("sqrt", "exp", "log", "tanh"):
            return b.unary({"exp": "exponential"}.get(name, name), self._real(e.args[0]))
        raise Unbounded(f"the number {e}")


def bound_of(e: sympy.Expr, bounds: Mapping[sympy.Symbol, sympy.Integer]) -> int:
    """A size at the bounds of its symbols. Raises Unbounded if it can be larger elsewhere."""
    if not e.free_symbols <= bounds.keys():
        raise Unbounded(f"the size {e}, which no input shows")
    if direction(e) not in (0, 1) and not _is_largest_at(e, bounds):
        raise Unbounded(f"the size {e}, which may be largest below the bounds")
    return int(e.xreplace(bounds))


def _is_largest_at(e: sympy.Expr, bounds: Mapping[sympy.Symbol, sympy.Integer]) -> bool:
    """Whether a formula of one symbol is largest at its bound, by trying; not for bounds that take long."""
    if len(e.free_symbols) != 1:
        return False
    (s,) = e.free_symbols
    if bounds[s] > _MOST_TRIES:
        return False
    largest = e.xreplace(bounds)
    return all(at <= largest for at in _values(e, s, int(bounds[s])))


_MOST_TRIES = 2048


def _values(e: sympy.Expr, s: sympy.Symbol, end: int) -> Iterator[sympy.Expr]:
    """A formula at the sizes below ``end`` that it is made for."""
    for n in range(_LEAST, end):
        try:
            yield e.xreplace({s: sympy.Integer(n)})
        except ZeroDivisionError:
            continue
