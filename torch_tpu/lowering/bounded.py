"""Graphs with symbolic sizes as programs with fixed ones: every symbol at its bound, the true sizes as operands.

    tensor [b, s, d]                  value [b, S, d], S the bound of s; what lies behind s is undefined, it may be NaN
    view(b, s, d -> b * s, d)         value [b * S, d], its first dim made of two factors: b, and S with s of it true
    sum over s                        the rest is replaced by 0 first (`Lowering.fill`); rules: bounded_rules.py
    flat                              true elements in front, dense, in memory order: what enters and leaves a program

The rules of single ops are the ones of static graphs: they see the fixed sizes. An op without a bounded form raises
`Unbounded`, and the graph is compiled for each size anew.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import sympy
import torch
from torch._ops import OpOverload
from torch.fx import Node
from torch.utils._pytree import tree_leaves, tree_map_only

from torch_tpu.ir.builder import Number, Value
from torch_tpu.ir.types import TensorType
from torch_tpu.lowering.driver import (
    UNINITIALIZED,
    GraphLowering,
    lower_node,
    result_types,
    scalars_as_values,
    uninitialized,
)
from torch_tpu.lowering.registry import RULES as STATIC_RULES
from torch_tpu.lowering.size_math import Sizes, Unbounded, expression


@dataclass(frozen=True, slots=True)
class Factor:
    """``extent`` elements of a dim, of which the first ``size`` are true (None: all)."""

    extent: int
    size: sympy.Expr | None = None


Dim: TypeAlias = tuple[Factor, ...]
"""A dim as a product of factors, outermost first."""


def normal(factors: Iterable[Factor]) -> Dim:
    """The same dim with as few factors as possible: all that follows a factor and is whole belongs to it."""
    out: list[Factor] = []
    for f in factors:
        if f.size is not None or not out:
            out.append(f)
        else:
            last = out[-1]
            out[-1] = Factor(last.extent * f.extent, None if last.size is None else last.size * f.extent)
    if len(out) > 1 and out[0] == Factor(1):
        del out[0]
    return tuple(out) or (Factor(1),)


def is_whole(dim: Dim) -> bool:
    """Whether every element of the dim is true."""
    return all(f.size is None for f in dim)


def is_prefix(dim: Dim) -> bool:
    """Whether the true elements of the dim are its first ones."""
    return len(normal(dim)) == 1


@dataclass(frozen=True, slots=True)
class Bounded:
    """A value and, a dim of it, where the true elements are."""

    value: Value
    dims: tuple[Dim, ...]

    @property
    def whole(self) -> bool:
        return all(map(is_whole, self.dims))

    @property
    def rank(self) -> int:
        return len(self.dims)

    @property
    def dtype(self) -> torch.dtype:
        return self.value.dtype


def whole(value: Value) -> Bounded:
    """A value that is all true."""
    return Bounded(value, tuple((Factor(n),) for n in value.shape))


def _factors(dims: Iterable[Dim]) -> list[Factor]:
    return [f for dim in dims for f in dim if f != Factor(1)]


Rule: TypeAlias = Callable[..., Any]
RULES: dict[OpOverload, Rule] = {}
"""op -> ``(lowering, node, *args, **kwargs)``: arguments with `Bounded` for tensors and sympy for symbolic numbers."""


def bounded(*ops: OpOverload) -> Callable[[Rule], Rule]:
    """Decorator: the bounded form of ``ops``."""

    def add(rule: Rule) -> Rule:
        for op in ops:
            assert op not in RULES, op
            RULES[op] = rule
        return rule

    return add


def has_form(op: Any) -> bool:
    """Whether ``op`` has a bounded form."""
    return isinstance(op, OpOverload) and (op in RULES or torch.Tag.pointwise in op.tags)


@dataclass(slots=True)
class Lowering(GraphLowering):
    """One graph at the bounds of its symbols. Inputs and results are `Bounded`; symbolic numbers stay symbolic."""

    sizes: Sizes = field(kw_only=True)

    # ---- nodes

    def call(self, node: Node) -> Any:
        val = node.meta.get("val")
        if isinstance(val, (torch.SymInt, torch.SymFloat)):
            return expression(val)
        if isinstance(val, (int, float)):
            return val
        args, kwargs = tree_map_only(Node, lambda n: self.env[n], (node.args, dict(node.kwargs)))
        op = node.target
        if not isinstance(op, OpOverload):
            if getattr(op, "__name__", "") == "getitem":
                return args[0][args[1]]
            raise Unbounded(str(op))
        if op is torch.ops.aten.copy_.default:
            return self._write(node, *args)
        if self._is_static(args, kwargs, val):
            return self.results(node, self.emit(op, val, args, kwargs), None)
        rule = RULES.get(op)
        if rule is None and torch.Tag.pointwise in op.tags:
            rule = pointwise
        if rule is None or (op in STATIC_RULES and STATIC_RULES[op].rng):
            raise Unbounded(str(op))
        return rule(self, node, *args, **kwargs)

    def constant(self, node: Node) -> Any:
        held = GraphLowering.constant(self, node)
        return whole(held) if isinstance(held, Value) else held

    def _is_static(self, args: Any, kwargs: Any, val: Any) -> bool:
        leaves = tree_leaves((args, kwargs))
        symbolic = any(isinstance(x, sympy.Basic) or (isinstance(x, Bounded) and not x.whole) for x in leaves)
        outs = [t for t in tree_leaves(val) if isinstance(t, torch.Tensor)]
        return not symbolic and all(is_whole(d) for t in outs for d in self.prefix_dims(t.shape))

    def _write(self, node: Node, target: Bounded, source: Bounded, non_blocking: bool = False) -> Bounded:
        if not (target.whole and source.whole):
            raise Unbounded("a write to an input of symbolic size")
        where = node.args[0]
        result = whole(self.copy(node, target.value, source.value))
        assert isinstance(where, Node)
        self.env[where] = result
        return result

    def emit(self, op: OpOverload, val: Any, args: Any, kwargs: Any) -> list[Any]:
        """``op`` at the fixed sizes; ``val``: what its node promises."""
        return self.emit_as(op, result_types(val, self.sizes.bound), args, kwargs)

    def emit_as(self, op: OpOverload, types: Sequence[Any], args: Any, kwargs: Any | None = None) -> list[Any]:
        """``op`` with results of ``types``. Numbers that the schema calls sizes are bounds, others are values."""
        if op in UNINITIALIZED:
            return [uninitialized(self.b, types[0], self.state)]
        by_name = {a.name: a for a in op._schema.arguments}
        args = [self._argument(a, x) for a, x in zip(op._schema.arguments, args, strict=False)]
        kwargs = {k: self._argument(by_name[k], x) for k, x in (kwargs or {}).items()}
        args, kwargs = scalars_as_values(self.b, op, args, kwargs, types)
        got = lower_node(self.b, op, types, args, kwargs, state=self.state)
        assert isinstance(got, tuple)  # an op with data-dependent sizes is no node of a program
        return list(got)

    def _argument(self, schema: Any, x: Any) -> Any:
        x = tree_map_only(Bounded, lambda t: t.value, x)
        if "int" in str(schema.type).lower():
            return tree_map_only(sympy.Basic, self.sizes.bound, x)
        return tree_map_only(sympy.Basic, self.sizes.number, x)

    def results(self, node: Node, values: Sequence[Value | None], dims: Sequence[tuple[Dim, ...]] | None) -> Any:
        """What a node is: its values, with ``dims`` a value (None: all of it is true)."""
        out: list[Bounded | None] = []
        for i, v in enumerate(values):
            if v is None:
                out.append(None)
            else:
                out.append(whole(v) if dims is None else self.checked(v, dims[i]))
        return out if isinstance(node.meta["val"], (tuple, list)) else out[0]

    def checked(self, value: Value, dims: tuple[Dim, ...]) -> Bounded:
        """``value`` with ``dims``. Raises Unbounded if they are not its extents: two symbols that are one size."""
        if value.shape != tuple(math.prod(f.extent for f in d) for d in dims):
            raise Unbounded("sizes that are equal, but not in their bounds")
        return Bounded(value, dims)

    # ---- types

    def type_of(self, t: torch.Tensor) -> TensorType:
        """The fixed type of a fake tensor."""
        return TensorType(tuple(map(self.sizes.bound, t.shape)), t.dtype)

    def prefix_dims(self, shape: Sequence[Any]) -> tuple[Dim, ...]:
        """Dims of a tensor whose true elements are the first ones of each dim."""
        found: list[Dim] = []
        for n in shape:
            e = expression(n)
            found.append((Factor(self.sizes.bound(e), e if e.free_symbols else None),))
        return tuple(found)

    # ---- what lies behind the true elements

    def mask(self, dims: Sequence[Dim], which: Iterable[int]) -> Value | None:
        """[extents of ``dims``] bool: true elements, as to the dims ``which``. None: all are."""
        b, which = self.b, set(which)
        shape = tuple(math.prod(f.extent for f in d) for d in dims)
        parts = [f.extent for d in dims for f in d]
        found: Value | None = None
        at = 0
        for d, dim in enumerate(dims):
            for f in dim:
                if f.size is not None and d in which:
                    index = b.iota((f.extent,), 0, torch.int32)
                    end = b.broadcast_to(b.convert(self.sizes.value(f.size), torch.int32), (f.extent,))
                    one = b.broadcast_in_dim(b.compare("LT", index, end), parts, [at])
                    found = one if found is None else b.and_(found, one)
                at += 1
        return None if found is None else b.reshape(found, shape)

    def fill(self, x: Bounded, which: Iterable[int] | None, number: Number) -> Bounded:
        """``x`` with ``number`` behind the true elements of the dims ``which`` (None: all)."""
        mask = self.mask(x.dims, range(x.rank) if which is None else which)
        if mask is None:
            return x
        return replace(x, value=self.b.select(mask, x.value, self.b.constant(number, x.dtype, x.value.shape)))

    # ---- layout

    def prefix(self, x: Bounded, which: Iterable[int] | None = None) -> Bounded:
        """``x`` with the true elements first in the dims ``which`` (None: all)."""
        for d in range(x.rank) if which is None else which:
            if is_prefix(x.dims[d]):
                continue
            n = x.value.shape[d]
            rows = self._true_positions(normal(x.dims[d]), n)
            size = math.prod((f.size if f.size is not None else sympy.Integer(f.extent)) for f in x.dims[d])
            dims = (*x.dims[:d], (Factor(n, size),), *x.dims[d + 1 :])
            x = Bounded(self.take(x.value, rows, d), dims)
        return x

    def take(self, x: Value, rows: Value, dim: int) -> Value:
        """Slices ``rows`` of ``x`` along ``dim``; indices are in bounds."""
        shape = tuple(rows.shape[0] if i == dim else n for i, n in enumerate(x.shape))
        offset = [i for i in range(x.rank) if i != dim]
        picked = [1 if i == dim else n for i, n in enumerate(x.shape)]
        column = self.b.reshape(rows, (rows.shape[0], 1))
        out = self.b.gather(
            x, column, offset_dims=offset, collapsed=[dim], start_index_map=[dim], index_vector_dim=1,
            slice_sizes=picked,
        )  # fmt: skip
        assert out.shape == shape
        return out

    def _size(self, f: Factor) -> Value:
        size = self.b.constant(f.extent, torch.int64) if f.size is None else self.sizes.value(f.size)
        return self.b.convert(size, torch.int32)

    def _digits(self, n: int, radix: Sequence[Value], weight: Sequence[Value], last: int) -> Value:
        """[n] int32: the digits of 0 … n - 1 (outermost first), each times its weight; at most ``last``."""
        b = self.b
        rest = b.iota((n,), 0, torch.int32)
        at = b.constant(0, torch.int32, (n,))
        for i in range(len(radix) - 1, -1, -1):
            digit = rest
            if i > 0:
                r = b.broadcast_to(radix[i], (n,))
                digit, rest = b.binary("remainder", rest, r), b.div(rest, r)
            at = b.add(at, b.mul(digit, b.broadcast_to(weight[i], (n,))))
        return b.minimum(at, b.constant(last, torch.int32, (n,)))

    def _weights(self, radix: Sequence[Value]) -> list[Value]:
        weights = [self.b.constant(1, torch.int32)]
        for r in reversed(radix[1:]):
            weights.append(self.b.mul(weights[-1], r))
        return weights[::-1]

    def _extents(self, factors: Sequence[Factor]) -> list[Value]:
        return [self.b.constant(f.extent, torch.int32) for f in factors]

    def _true_positions(self, factors: Sequence[Factor], n: int) -> Value:
        """[n] int32: where the i-th true element of a dim lies."""
        last = math.prod(f.extent for f in factors) - 1
        return self._digits(n, [self._size(f) for f in factors], self._weights(self._extents(factors)), last)

    def _ranks(self, factors: Sequence[Factor], last: int) -> Value:
        """[product of extents] int32: how many true elements of a dim lie before each position; at most ``last``."""
        n = math.prod(f.extent for f in factors)
        return self._digits(n, self._extents(factors), self._weights([self._size(f) for f in factors]), last)

    @staticmethod
    def _rows(factors: list[Factor]) -> tuple[list[Factor], int]:
        """The factors without the whole ones at the end, and how many elements those are."""
        row = 1
        while factors and factors[-1].size is None:
            row *= factors[-1].extent
            factors = factors[:-1]
        return factors, row

    def flat(self, x: Bounded, order: Sequence[int], capacity: int) -> Value:
        """[capacity]: the true elements first, with the dims of ``x`` in memory order ``order``."""
        b = self.b
        factors, row = self._rows(_factors(x.dims[d] for d in order))
        value = b.transpose(x.value, order)
        total = value.type.numel
        _check_index(max(total, capacity))
        if total == 0:
            return b.constant(0, value.dtype, (capacity,))
        if len(factors) > 1 or (factors and factors[0].extent * row != total):
            value = b.reshape(value, (total // row, row))
            value = self.take(value, self._true_positions(normal(factors), total // row), 0)
        value = b.reshape(value, (total,))
        if capacity > total:
            return b.pad(value, b.constant(0, value.dtype), [0], [capacity - total])
        return value if capacity == total else b.slice_dim(value, 0, 0, capacity)

    def unflat(self, value: Value, dims: tuple[Dim, ...], order: Sequence[int]) -> Bounded:
        """The reverse of `flat`."""
        b = self.b
        ordered = [dims[d] for d in order]
        factors, row = self._rows(_factors(ordered))
        shape = [math.prod(f.extent for f in dim) for dim in ordered]
        total = math.prod(shape)
        capacity = value.shape[0]
        _check_index(max(total, capacity))
        if total == 0:
            return Bounded(b.constant(0, value.dtype, [math.prod(f.extent for f in d) for d in dims]), dims)
        if len(factors) > 1:
            value = b.reshape(b.slice_dim(value, 0, 0, capacity // row * row), (capacity // row, row))
            value = self.take(value, self._ranks(normal(factors), capacity // row - 1), 0)
        elif capacity > total:
            value = b.slice_dim(value, 0, 0, total)
        value = b.transpose(b.reshape(value, shape), [list(order).index(d) for d in range(len(order))])
        return Bounded(value, dims)

    def reshape(self, x: Bounded, dims: tuple[Dim, ...]) -> Bounded:
        """``x`` with the sizes of ``dims`` (prefixes, as the result promises them)."""
        extents = [d[0].extent for d in dims]
        shared = _regroup(_factors(x.dims), dims)
        if shared is not None:
            return Bounded(self.b.reshape(x.value, extents), shared)
        total = max(math.prod(extents), x.value.type.numel)
        return self.unflat(self.flat(x, range(x.rank), total), dims, range(len(dims)))

    # ---- several values in one op

    def align(self, xs: Sequence[Bounded], shape: Sequence[int]) -> tuple[list[Bounded], tuple[Dim, ...]]:
        """``xs`` so that they broadcast to ``shape`` with their true elements in the same places, and those places."""
        xs = list(xs)
        dims: list[Dim] = []
        for d, n in enumerate(shape):
            places = {i: x.rank - len(shape) + d for i, x in enumerate(xs) if x.rank - len(shape) + d >= 0}
            extents = {i: xs[i].value.shape[at] for i, at in places.items()}
            if not set(extents.values()) <= {n, 1}:
                raise Unbounded("sizes that are equal, but not in their bounds")
            places = {i: at for i, at in places.items() if extents[i] == n}
            if len({normal(xs[i].dims[at]) for i, at in places.items()}) > 1:
                for i, at in places.items():
                    xs[i] = self.prefix(xs[i], [at])
            found = [xs[i].dims[at] for i, at in places.items()]
            dims.append(max(found, key=lambda dim: not is_whole(dim), default=(Factor(n),)))
        return xs, tuple(dims)

    def agree(self, x: Bounded, dx: int, y: Bounded, dy: int) -> tuple[Bounded, Bounded]:
        """Two values with their true elements in the same places of dim ``dx`` and of dim ``dy``."""
        if x.value.shape[dx] != y.value.shape[dy]:
            raise Unbounded("sizes that are equal, but not in their bounds")
        if normal(x.dims[dx]) == normal(y.dims[dy]):
            return x, y
        return self.prefix(x, [dx]), self.prefix(y, [dy])


def _check_index(n: int) -> None:
    if n >= 2**31:
        raise Unbounded(f"{n} elements at the bounds")


def _regroup(factors: list[Factor], dims: Sequence[Dim]) -> tuple[Dim, ...] | None:
    """``factors`` as dims with the extents of ``dims``; None if the true elements do not stay in place."""
    rest = list(factors)
    out: list[Dim] = []
    for (want,) in dims:
        need, taken = want.extent, []
        while need > 1:
            if not rest:
                return None
            f = rest.pop(0)
            if need % f.extent == 0:
                taken.append(f)
                need //= f.extent
                continue
            if f.extent % need:
                return None
            inner = f.extent // need
            size = None
            if f.size is not None:
                size = sympy.expand(f.size / inner)
                if not _is_integral(size):
                    return None
            taken.append(Factor(need, size))
            rest.insert(0, Factor(inner))
            need = 1
        if (want.size is None) != is_whole(tuple(taken)):
            return None
        out.append(tuple(taken) or (Factor(1),))
    return tuple(out) if not rest else None


def _is_integral(e: sympy.Expr) -> bool:
    """Whether a polynomial has whole coefficients."""
    return all(c.is_integer for c in (term.as_coeff_Mul()[0] for term in sympy.Add.make_args(e)))


def pointwise(g: Lowering, node: Node, *args: Any, **kwargs: Any) -> Any:
    """An op whose elements depend on those in the same place only."""
    val = node.meta["val"]
    first = next(t for t in tree_leaves(val) if isinstance(t, torch.Tensor))
    shape = g.type_of(first).shape
    leaves = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Bounded)]
    aligned, dims = g.align(leaves, shape)
    given = iter(aligned)
    args, kwargs = tree_map_only(Bounded, lambda _: next(given), (args, kwargs))
    values = g.emit(node.target, val, args, kwargs)  # type: ignore[arg-type]
    return g.results(node, values, [dims] * len(values))


# ---- for the rules

ONE: Dim = (Factor(1),)


def dim_of(d: int, rank: int) -> int:
    """A dim counted from the front."""
    return d % max(rank, 1)


def dims_of(dims: Any, rank: int) -> list[int]:
    """Dims of a reduction: none named means all."""
    if dims is None or (isinstance(dims, (list, tuple)) and not dims):
        return list(range(rank))
    return sorted(dim_of(d, rank) for d in (dims if isinstance(dims, (list, tuple)) else [dims]))


def lowest(dtype: torch.dtype) -> Number:
    """What no element is below."""
    if dtype == torch.bool:
        return False
    return -math.inf if dtype.is_floating_point else torch.iinfo(dtype).min


def highest(dtype: torch.dtype) -> Number:
    """What no element is above."""
    if dtype == torch.bool:
        return True
    return math.inf if dtype.is_floating_point else torch.iinfo(dtype).max


def need_whole(x: Bounded, dims: Sequence[int], why: str) -> None:
    """Raise Unbounded if one of ``dims`` has elements that are not true."""
    if not all(is_whole(x.dims[d]) for d in dims):
        raise Unbounded(f"{why} over a dim of symbolic size")


def size_of(x: Bounded, dim: int) -> sympy.Expr:
    """How many elements of a dim are true."""
    return math.prod(
        (f.size if f.size is not None else sympy.Integer(f.extent) for f in x.dims[dim]), start=sympy.Integer(1)
    )
