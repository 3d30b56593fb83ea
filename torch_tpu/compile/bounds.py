"""Graphs with symbolic sizes: which program a call needs, and the sizes of its results.

    call ──sizes of its symbols──► form (made once for each set of sizes) ──bounds──► CompiledGraph (one for each set)

A symbol's bound is the maximum that the user declared with ``mark_dynamic``. Without one it is the first size that is seen,
and the next power of two for the sizes above it, so what changes compiles O(log n) programs and what does not is not
padded. What lowering/bounded.py has no form for is compiled for each size, and the log says why.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch.fx import GraphModule, Node

from torch_tpu.lowering.size_math import Unbounded, bound_of, expression
from torch_tpu.lowering.views import contiguous_strides, physical_order
from torch_tpu.runtime import extension

log = logging.getLogger("torch_tpu")

_MAX_FORMS = 4096


def _tensors(gm: GraphModule) -> Iterator[torch.Tensor]:
    for node in gm.graph.nodes:
        for t in torch.utils._pytree.tree_leaves(node.meta.get("val")):
            if isinstance(t, torch.Tensor):
                yield t


def is_symbolic(gm: GraphModule) -> bool:
    """Whether a size in ``gm`` is a symbol."""
    return any(map(is_dynamic, _tensors(gm)))


def _power(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def capacity(t: torch.Tensor, bounds: Mapping[sympy.Symbol, sympy.Integer], growing: Mapping[sympy.Symbol, int]) -> int:
    """Elements of the flat buffer of a tensor of symbolic size.

    A power of two in dims that grow from call to call, so that what one call returns can enter the next as it is.
    """

    def room(n: Any) -> int:
        e = expression(n)
        return _power(bound_of(e, bounds)) if e.free_symbols & growing.keys() else bound_of(e, bounds)

    return math.prod(map(room, t.shape))


def memory_order(t: torch.Tensor, bounds: Mapping[sympy.Symbol, sympy.Integer]) -> list[int]:
    """Dims of a fake tensor, outermost in memory first; row-major if its strides leave gaps or overlap."""
    return physical_order(*_at(t, bounds)) or list(range(t.dim()))


def is_dynamic(t: Any) -> bool:
    """Whether ``t`` is a tensor with a symbolic size."""
    return isinstance(t, torch.Tensor) and any(expression(n).free_symbols for n in t.shape)


def origins(gm: GraphModule, leaves: Sequence[Any], bounds: Mapping[sympy.Symbol, sympy.Integer]) -> dict[Node, Node]:
    """The node in whose storage each result lies: an input, the node that made the storage, or itself."""
    first: dict[int, Node] = {}
    for node in gm.graph.nodes:
        val = node.meta.get("val")
        if node.op != "output" and isinstance(val, torch.Tensor):
            first.setdefault(val.untyped_storage()._cdata, node)
    found: dict[Node, Node] = {}
    for leaf in leaves:
        val = leaf.meta.get("val") if isinstance(leaf, Node) else None
        if isinstance(val, torch.Tensor):
            base = first[val.untyped_storage()._cdata]
            found[leaf] = base if _shows(base, val, bounds) else leaf
    return found


def _shows(base: Node, part: torch.Tensor, bounds: Mapping[sympy.Symbol, sympy.Integer]) -> bool:
    """Whether ``part`` is sizes and strides over what ``base`` will be."""
    whole = base.meta["val"]
    flags = (whole.dtype, whole.is_conj(), whole.is_neg()) == (part.dtype, part.is_conj(), part.is_neg())
    if base.op == "placeholder" or not flags:
        return flags
    return physical_order(*_at(whole, bounds)) is not None


def _at(t: torch.Tensor, bounds: Mapping[sympy.Symbol, sympy.Integer]) -> tuple[list[int], list[int]]:
    """Sizes and strides of a fake tensor at bounds."""
    sizes, strides = ([bound_of(expression(n), bounds) for n in x] for x in (t.shape, t.stride()))
    return sizes, strides


@dataclass(frozen=True, slots=True)
class Symbol:
    """Where a call shows its size, and how large it may get."""

    symbol: sympy.Symbol
    input: int
    dim: int | None  # None: the input is the number
    declared: int | None  # by the user
    most: int | None  # what guards allow
    slack: int  # sizes in the graph that exceed it by this much


def _declared(env: Any) -> dict[sympy.Symbol, int]:
    """Maxima that the user gave with ``mark_dynamic(..., max=)``."""
    found: dict[sympy.Symbol, int] = {}
    for fake in env.tracked_fakes or ():
        sizes = getattr(fake.symbolic_context, "constraint_sizes", None) or ()
        for constraint, n in zip(sizes, getattr(fake.fake, "shape", ()), strict=False):
            most = getattr(getattr(constraint, "vr", None), "upper", None)
            e = expression(n)
            if isinstance(e, sympy.Symbol) and most is not None and most.is_Integer:
                found[e] = int(most)
    return found


def growth(gm: GraphModule) -> dict[sympy.Symbol, int]:
    """Symbols that ``gm`` adds to, and how much: what a `cat` in a loop does to the size of its input."""
    found: dict[sympy.Symbol, int] = {}
    for t in _tensors(gm):
        for n in t.shape:
            e = expression(n)
            if len(e.free_symbols) == 1 and isinstance(e, sympy.Add):
                (s,) = e.free_symbols
                more = e - s
                if more.is_Integer and more > 0:
                    found[s] = max(found.get(s, 0), int(more))
    return found


def symbols_of(gm: GraphModule, placeholders: Sequence[Node]) -> list[Symbol]:
    """The symbols of a graph. Raises Unbounded if no input shows one."""
    shown: dict[sympy.Symbol, tuple[int, int | None]] = {}
    env = None
    for i, node in enumerate(placeholders):
        val = node.meta.get("val")
        sizes: Iterable[tuple[int | None, Any]] = ()
        if isinstance(val, torch.SymInt):
            sizes = [(None, val)]
        elif isinstance(val, torch.Tensor):
            sizes = enumerate(val.shape)
        for dim, n in sizes:
            e = expression(n)
            if isinstance(e, sympy.Symbol):
                env = n.node.shape_env
                if e not in shown or dim is None:
                    shown[e] = (i, dim)
    used = {s for t in _tensors(gm) for n in t.shape for s in expression(n).free_symbols}
    if not used <= shown.keys():
        raise Unbounded(f"the size {next(iter(used - shown.keys()))}, which no input shows")
    declared, slack = _declared(env), growth(gm)
    found = []
    for s, (i, dim) in sorted(shown.items(), key=lambda item: item[1][0]):
        upper = env.var_to_range[s].upper if env is not None and s in env.var_to_range else None
        most = int(upper) if upper is not None and upper.is_Integer and upper < 2**31 else None
        found.append(Symbol(s, i, dim, declared.get(s), most, slack.get(s, 0)))
    return found


def choose_bound(s: Symbol, n: int, seen: list[int]) -> int:
    """The bound for a size of ``n``; added to ``seen``, the bounds of this symbol so far."""
    if s.declared is not None and n <= s.declared:
        return s.declared
    power = _power(n + s.slack) - s.slack
    room = [b for b in seen if n <= b <= max(power, 2 * n)]
    if room:
        return min(room)
    bound = power if seen or s.slack else n
    if s.most is not None:
        bound = max(min(bound, s.most), n)
    seen.append(bound)
    return bound


@dataclass(slots=True)
class _Program:
    run: Any  # a CompiledGraph
    bounds: Mapping[sympy.Symbol, sympy.Integer]
    proven: bool = False  # it has been lowered


Make = Callable[[Mapping[sympy.Symbol, sympy.Integer]], Any]


class BoundedGraph:
    """A graph with symbolic sizes as a callable of its flat inputs."""

    def __init__(
        self, gm: GraphModule, name: str, make: Make, static: Callable[[], Callable[[list[Any]], Any]]
    ) -> None:
        """``make(bounds)`` gives the CompiledGraph for bounds; ``static()`` the one for all sizes, a program each."""
        self.gm = gm
        self.name = name
        self.make = make
        self.make_static = static
        self.static: Callable[[list[Any]], Any] | None = None
        self.placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
        output = next(n for n in gm.graph.nodes if n.op == "output")
        self.leaves = torch.utils._pytree.tree_leaves(output.args[0])
        self.seen: dict[sympy.Symbol, list[int]] = {}
        self.growing = growth(gm)
        self.programs: dict[tuple[int, ...], _Program] = {}
        self.forms: dict[tuple[int, ...], tuple[_Program, Any]] = {}
        try:
            self.symbols = symbols_of(gm, self.placeholders)
            self.where = [(s.input, s.dim) for s in self.symbols]
        except Unbounded as e:
            self._give_up(e)

    def _give_up(self, why: Unbounded) -> Callable[[list[Any]], Any]:
        log.info("[%s] one program a size: no bounded form of %s", self.name, why)
        self.static = self.make_static()
        return self.static

    def __call__(self, args: list[Any]) -> Any:
        """Results for ``args``, which is emptied."""
        if self.static is not None:
            return self.static(args)
        numbers = tuple([args[i] if d is None else args[i].shape[d] for i, d in self.where])
        found = self.forms.get(numbers)
        if found is None:
            try:
                found = self._add(numbers)
            except Unbounded as e:
                return self._give_up(e)(args)
        program, form = found
        return program.run(args, form) if program.proven else self._first(program, form, args)

    def _first(self, program: _Program, form: Any, args: list[Any]) -> Any:
        """The first call of a program: only lowering tells whether all ops have a bounded form."""
        kept = list(args)
        try:
            results = program.run(args, form)
        except Unbounded as e:
            return self._give_up(e)(kept)
        program.proven = True
        return results

    def _add(self, numbers: tuple[int, ...]) -> tuple[_Program, Any]:
        found = {
            s.symbol: choose_bound(s, n, self.seen.setdefault(s.symbol, []))
            for s, n in zip(self.symbols, numbers, strict=True)
        }
        key = tuple(found.values())
        program = self.programs.get(key)
        if program is None:
            bounds = {s: sympy.Integer(n) for s, n in found.items()}
            program = self.programs[key] = _Program(self.make(bounds), bounds)
        if len(self.forms) >= _MAX_FORMS:
            self.forms.clear()
        exact = {s.symbol: sympy.Integer(n) for s, n in zip(self.symbols, numbers, strict=True)}
        made = self.forms[numbers] = program, self._form(numbers, exact, program.bounds)
        return made

    def _form(self, numbers: tuple[int, ...], exact: Any, bounds: Mapping[sympy.Symbol, sympy.Integer]) -> Any:
        inputs = []
        for i, node in enumerate(self.placeholders):
            val = node.meta.get("val")
            if is_dynamic(val):
                inputs.append((i, memory_order(val, bounds), capacity(val, bounds, self.growing)))
        bases = origins(self.gm, self.leaves, bounds)
        results = [self._result(leaf, bases.get(leaf), exact, bounds) for leaf in self.leaves]
        return extension.Form(list(numbers), inputs, results)

    def _result(self, leaf: Any, base: Node | None, exact: Any, bounds: Any) -> tuple[Any, ...] | None:
        val = leaf.meta.get("val") if isinstance(leaf, Node) else leaf
        if isinstance(val, (torch.SymInt, int)) and not isinstance(val, bool):
            return ("int", int(expression(val).xreplace(exact)))
        if not isinstance(val, torch.Tensor):
            return None
        assert base is not None
        made = base.op != "placeholder"
        if leaf is base and (not made or not is_dynamic(val)):
            return None if made else ("argument", self.placeholders.index(base))
        sizes, strides, (offset,) = (
            [int(expression(n).xreplace(exact)) for n in x] for x in (val.shape, val.stride(), [_offset(leaf, base)])
        )
        if leaf is base:
            order = memory_order(val, bounds)
            dense = contiguous_strides([sizes[d] for d in order])
            strides = [dense[order.index(d)] for d in range(len(sizes))]
        return ("sized" if made else "view", 0 if made else self.placeholders.index(base), sizes, strides, offset)


def _offset(leaf: Node, base: Node) -> sympy.Expr:
    return expression(leaf.meta["val"].storage_offset()) - expression(base.meta["val"].storage_offset())
