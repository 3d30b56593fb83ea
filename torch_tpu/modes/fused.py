"""Fused mode: the programs of a recorded stretch of ops, put together into one (csrc/trace/deferred.h).

The text of each op's program becomes a private function once, and ``main`` calls it wherever the op was recorded; XLA
inlines the calls and fuses across them. Nothing is lowered again.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch

from torch_tpu.ir.types import TensorType
from torch_tpu.modes import stored
from torch_tpu.modes.plan import Output, Plan

_TYPE = r"tensor<(?:[^<>]|<[^<>]*>)*>"
_MAIN = re.compile(
    rf"func\.func public @main\((?P<args>(?:%arg\d+: {_TYPE}(?: \{{[^}}]*\}})?(?:, )?)*)\) -> \((?P<results>[^\n]*)\) \{{\n"
)

Array = tuple[torch.dtype, Sequence[int]]
Node = tuple[int, Sequence[int], int]
"""Index of its text; wires: an external, or ``~value``; words of operands."""


class _Function:
    """The program of one op as a private function."""

    def __init__(self, name: str, text: str) -> None:
        found = _MAIN.search(text)
        assert found is not None, text[:200]
        self.name = name
        args = re.findall(rf"(%arg\d+): ({_TYPE})", found["args"])
        self.args = [t for _, t in args]
        self.results = re.findall(_TYPE, found["results"])
        head = f"func.func private @{name}({', '.join(f'{arg}: {t}' for arg, t in args)})"
        body = text[found.end() : text.rindex("}")]  # up to the end of the module
        self.text = f"{head} -> ({found['results']}) {{\n{body}"


def _slice(pack: str, name: str, first: int, last: int, total: int) -> str:
    return (
        f'{name} = "stablehlo.slice"({pack}) {{limit_indices = array<i64: {last}>, start_indices = array<i64: {first}>, '
        f"strides = array<i64: 1>}} : (tensor<{total}xui32>) -> tensor<{last - first}xui32>"
    )


def _aliases(
    externals: Sequence[Array], values: Sequence[Array], live: Sequence[int], dying: Sequence[int]
) -> dict[int, int]:
    """Result number for each dying external whose memory a result can take."""
    free: dict[tuple[torch.dtype, tuple[int, ...]], list[int]] = {}
    for result, value in reversed(list(enumerate(live))):
        dtype, dims = values[value]
        free.setdefault((dtype, tuple(dims)), []).append(result)
    found = {}
    for e in dying:
        dtype, dims = externals[e]
        if results := free.get((dtype, tuple(dims))):
            found[e] = results.pop()
    return found


def fuse(
    texts: Sequence[str],
    nodes: Sequence[Node],
    externals: Sequence[Array],
    values: Sequence[Array],
    live: Sequence[int],
    dying: Sequence[int],
) -> Plan:
    """One program for ``nodes``: its results are the ``live`` values, its parameters the externals, then the words."""
    functions = [_Function(f"f{i}", text) for i, text in enumerate(texts)]
    aliases = _aliases(externals, values, live, dying)
    total = sum(words for _, _, words in nodes)
    lines: list[str] = []
    names: list[str] = []
    at = 0
    for n, (text, wires, words) in enumerate(nodes):
        f = functions[text]
        operands = [names[~w] if w < 0 else f"%arg{w}" for w in wires]
        if words:
            lines.append(_slice(f"%arg{len(externals)}", f"%w{n}", at, at + words, total))
            operands.append(f"%w{n}")
            at += words
        count = len(f.results)
        left = f"%v{n}:{count}" if count > 1 else f"%v{n}"
        signature = f"({', '.join(f.args)}) -> ({', '.join(f.results)})"
        lines.append(f'{left} = "func.call"({", ".join(operands)}) {{callee = @{f.name}}} : {signature}')
        names += [f"%v{n}#{i}" for i in range(count)] if count > 1 else [f"%v{n}"]
    types = [TensorType(tuple(dims), dtype).mlir for dtype, dims in externals]
    params = [
        f"%arg{i}: {t}" + (f" {{tf.aliasing_output = {aliases[i]} : i32}}" if i in aliases else "")
        for i, t in enumerate(types)
    ]
    if total:
        params.append(f"%arg{len(externals)}: tensor<{total}xui32>")
    outs = [TensorType(tuple(values[v][1]), values[v][0]).mlir for v in live]
    lines.append(f'"func.return"({", ".join(names[v] for v in live)}) : ({", ".join(outs)}) -> ()')
    main = f"func.func public @main({', '.join(params)}) -> ({', '.join(outs)}) {{\n" + "\n".join(lines) + "\n}\n"
    plan = Plan(
        stablehlo="module @fused {\n" + main + "".join(f.text for f in functions) + "}\n",
        donated=sorted(aliases),
        outputs=[Output(values[v][0], tuple(values[v][1]), slot=v) for v in live],
    )
    return stored.attach_executable(plan)
