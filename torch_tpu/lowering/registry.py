"""The rule table: one entry per functional ATen overload, checked against the ATen schema when it is added.

    @lowers(aten.addmm.default, scalars={"beta": (0, 1), "alpha": (1,)})
    def addmm(cx, self, mat1, mat2, beta=1, alpha=1): ...

A rule gets the arguments as the schema names them: a tensor is a `Value` of its logical shape (views, conj and neg bits
are applied before), a missing optional is None, a list is a list, a ``Scalar`` or ``float`` is a rank-0 `Value` unless
the entry says otherwise, everything else is the Python value. It returns one Value a result, in schema order.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, TypeAlias, TypeVar

import torch
from torch._ops import OpOverload

from torch_tpu.ir.builder import Builder, Value
from torch_tpu.ir.types import TensorType, compute_dtype

KEYED = "keyed"
"""Scalar policy: the value is part of the program key and arrives as a Python number."""

ScalarPolicy: TypeAlias = str | tuple[bool | int | float, ...]


@dataclass(frozen=True, slots=True)
class GlobalState:
    """Everything a rule may read besides its arguments. All of it is in every program key."""

    default_dtype: torch.dtype = torch.float32
    deterministic: bool = False
    fill_uninitialized: bool = False
    precision: str = "HIGHEST"  # of float32 products: DEFAULT, HIGH, HIGHEST
    host_kernels: bool = False  # the program runs where it can call lowering/host.py's kernels


@dataclass(frozen=True, slots=True)
class RngOperands:
    """Philox key and first counter of this launch: rank-0 uint64 values."""

    seed: Value
    offset: Value


@dataclass(slots=True)
class LowerContext:
    """What a rule may read besides its arguments."""

    b: Builder
    op: OpOverload
    outs: tuple[TensorType, ...]  # promised by the meta kernel; a rule never computes a result shape or dtype
    state: GlobalState = field(default_factory=GlobalState)
    rng: RngOperands | None = None

    @property
    def out(self) -> TensorType:
        """Type of the first result."""
        return self.outs[0]

    @property
    def compute_dtype(self) -> torch.dtype:
        """Where pointwise arithmetic of the first result happens: float32 for float16, bfloat16 and float8."""
        return compute_dtype(self.outs[0].dtype)

    def precision_of(self, dtype: torch.dtype) -> str:
        """Precision of a product over ``dtype``; only float32 has a choice."""
        return self.state.precision if dtype in (torch.float32, torch.complex64) else "HIGHEST"

    def result(self, value: Value, index: int = 0) -> Value:
        """``value`` rounded to the dtype and broadcast to the shape of result ``index``."""
        out = self.outs[index]
        return self.b.broadcast_to(self.b.convert(value, out.dtype), out.shape)


@dataclass(frozen=True, slots=True)
class Dynamic:
    """Result of a rule whose result sizes depend on data.

    Each value is padded along its dim ``dims[i]`` (None: static); the true size is ``count``, a rank-0 int64.
    """

    values: tuple[Value, ...]
    count: Value
    dims: tuple[int | None, ...]


F = TypeVar("F", bound=Callable[..., Any])
Promise = Callable[[Mapping[str, Any], Callable[[], list[Any]]], list[Any]]
"""``(meta arguments by name, call of the meta kernel) -> results as the CPU kernel gives them``, on meta tensors."""
Rule = Callable[..., "Value | tuple[Value | None, ...] | list[Value] | Dynamic"]


@dataclass(frozen=True, slots=True)
class RuleEntry:
    """A rule, and what the dispatcher must know of it without running it."""

    rule: Rule
    # Scalar parameter -> KEYED, or the values a rule tests for. Any other value is a rank-0 operand: it is not in the
    # program key and a new value does not recompile.
    scalars: Mapping[str, ScalarPolicy]
    rng: bool  # takes cx.rng; the generator advances by the elements of the first result, rounded up to 4
    writes: tuple[str, ...]  # arguments the op updates though its schema does not say so; extra results, in this order
    dynamic: bool  # returns Dynamic: no meta kernel can know the sizes
    where: str  # file:line, for `torch-tpu explain`
    promise: Promise | None = None  # the result types, where PyTorch's meta kernel is wrong


RULES: dict[OpOverload, RuleEntry] = {}
_NO_SCALARS: Mapping[str, ScalarPolicy] = MappingProxyType({})
_REQUIRED = inspect.Parameter.empty


def _show(name: str, default: object) -> str:
    return name if default is _REQUIRED else f"{name}={default!r}"


def register(
    op: OpOverload,
    rule: Rule,
    *,
    scalars: Mapping[str, ScalarPolicy] = _NO_SCALARS,
    rng: bool = False,
    writes: tuple[str, ...] = (),
    dynamic: bool = False,
    promise: Promise | None = None,
) -> None:
    """Add ``rule`` for ``op``.

    Raises:
        TypeError: ``op`` has a rule already; is composite (PyTorch splits it above us; a kernel for it would lose its
            derivative); writes to an argument (write the functional overload; the dispatcher derives ``out=`` and
            in-place forms from the schema); or has other parameters than the schema.
    """
    if op in RULES:
        raise TypeError(f"{op} has a rule already, at {RULES[op].where}")
    args = op._schema.arguments
    if any(a.alias_info is not None and a.alias_info.is_write for a in args):
        raise TypeError(f"{op} writes to an argument; register the functional overload instead")
    if op.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd):
        raise TypeError(f"{op} is composite; write rules for the ops it is made of")
    want = [_show(a.name, a.default_value if a.has_default_value() else _REQUIRED) for a in args]
    params = list(inspect.signature(rule).parameters.values())[1:]
    got = [_show(p.name, p.default) for p in params]
    variadic = any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in params)
    if got != want and not variadic:
        raise TypeError(f"{op}: rule takes {got}, the schema has {want}")
    names = {a.name for a in args}
    if unknown := (set(scalars) | set(writes)) - names:
        raise TypeError(f"{op}: {sorted(unknown)} are no parameters of it")
    code = inspect.unwrap(rule).__code__
    where = f"{code.co_filename}:{code.co_firstlineno}"
    RULES[op] = RuleEntry(rule, scalars, rng, writes, dynamic, where, promise)


def lowers(
    *ops: OpOverload,
    scalars: Mapping[str, ScalarPolicy] = _NO_SCALARS,
    rng: bool = False,
    writes: tuple[str, ...] = (),
    dynamic: bool = False,
    promise: Promise | None = None,
) -> Callable[[F], F]:
    """Decorator form of :func:`register`: the first line of every rule."""

    def add(rule: F) -> F:
        for op in ops:
            register(op, rule, scalars=scalars, rng=rng, writes=writes, dynamic=dynamic, promise=promise)
        return rule

    return add
