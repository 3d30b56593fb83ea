"""The entry point of the backend: from dynamo's graph through AOTAutograd to programs.

dynamo graph ──AOTAutograd──► forward and backward graphs, functional, of ops with rules ──graph.compile──► callables
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch._decomp import decomposition_table
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.fx import GraphModule

from torch_tpu.compile import expand, graph, random, warm
from torch_tpu.errors import CompileOptionUnknown
from torch_tpu.lowering import bounded
from torch_tpu.lowering.composed import COMPOSED
from torch_tpu.lowering.registry import RULES
from torch_tpu.runtime import compiler

_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")


def _trilinear(
    i1: torch.Tensor, i2: torch.Tensor, i3: torch.Tensor,
    expand1: Sequence[int], expand2: Sequence[int], expand3: Sequence[int], sumdim: Sequence[int], unroll_dim: int = 1,
) -> torch.Tensor:  # fmt: skip
    dims = range(i1.dim() + len(expand1))
    letters = ["".join(chr(ord("a") + d) for d in dims if d not in out) for out in (expand1, expand2, expand3, sumdim)]
    return torch.einsum(f"{letters[0]},{letters[1]},{letters[2]}->{letters[3]}", i1, i2, i3)


def _cholesky_solve(b: torch.Tensor, factor: torch.Tensor, upper: bool = False) -> torch.Tensor:
    lower = factor.mH if upper else factor
    half = torch.linalg.solve_triangular(lower, b, upper=False)
    return torch.linalg.solve_triangular(lower.mH, half, upper=True)  # type: ignore[no-any-return]


_pinv = torch.ops.aten.linalg_pinv.atol_rtol_tensor
_COMPOSITE: dict[Any, Callable[..., Any]] = {
    torch.ops.aten._trilinear.default: _trilinear,
    torch.ops.aten.cholesky_solve.default: _cholesky_solve,
    _pinv: partial(_pinv._op_dk, torch._C.DispatchKey.CompositeExplicitAutogradNonFunctional),
}
"""For ops that eager mode runs by PyTorch's composite kernels, which a trace does not see into."""


@cache
def decompositions(symbolic: bool = False) -> dict[Any, Callable[..., Any]]:
    """PyTorch's, for ops without a rule and for those that update arguments without saying so in their schema.

    Args:
        symbolic: the graph has symbolic sizes, so an op needs a bounded form as well.
    """

    graph.load_rules()

    def is_lowered(op: Any) -> bool:
        return op in RULES and not RULES[op].writes and (not symbolic or bounded.has_form(op) or RULES[op].rng)

    known = {**decomposition_table, **COMPOSED, **_COMPOSITE}
    return {op: fn for op, fn in known.items() if not is_lowered(op)} | random.DECOMPOSITIONS


class _Decompositions(Mapping[Any, Callable[..., Any]]):
    """`decompositions`, made when a trace first asks."""

    def __init__(self, symbolic: bool) -> None:
        self.symbolic = symbolic

    def __getitem__(self, op: Any) -> Callable[..., Any]:
        return decompositions(self.symbolic)[op]

    def __iter__(self) -> Iterator[Any]:
        return iter(decompositions(self.symbolic))

    def __len__(self) -> int:
        return len(decompositions(self.symbolic))


def _donated() -> Sequence[int]:
    """Inputs of the backward that nobody reads after it, as AOTAutograd found them."""
    context = torch._guards.TracingContext.try_get()
    meta = None if context is None else context.fw_metadata
    return () if meta is None else meta.bw_donated_idxs or ()


def _compile(
    kind: str, options: compiler.Options, gm: GraphModule, example_inputs: Sequence[Any]
) -> Callable[..., Any]:
    expand.expand(gm, decompositions())
    consumed = _donated() if kind == "backward" else ()
    if warm.active():
        return warm.Artifact(gm, kind, consumed, options)
    return graph.with_options(graph.compile_graph(gm, kind, consumed=consumed), options)


def _partition(joint: GraphModule, *args: Any, **kwargs: Any) -> tuple[GraphModule, GraphModule]:
    random.keep_random_results(joint)
    return min_cut_rematerialization_partition(joint, *args, **kwargs)


def _is_symbolic(inputs: Sequence[Any]) -> bool:
    tensors = [x for x in inputs if isinstance(x, torch.Tensor)]
    return any(isinstance(n, torch.SymInt) for x in tensors for n in x.shape) or any(
        isinstance(x, torch.SymInt) for x in inputs
    )


def tpu(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """The backend ``"tpu"`` of `torch.compile`.

    Args:
        gm: dynamo's graph.
        example_inputs: its inputs, fake.
        mode: Inductor's names are taken and change nothing.
        options: of XLA, by name, for the programs of this graph; see `torch.tpu.compiler.custom_compiler_options`.

    Raises:
        CompileOptionUnknown: a mode that does not exist, or an option that the plugin's compiler does not take.
    """
    if mode is not None and mode not in _MODES:
        raise CompileOptionUnknown(f"there is no mode {mode!r}.", hint=f"use one of {', '.join(_MODES)}.")
    given = compiler.normalized(options) if options else ()
    with warm.cache(given) as kept:
        backend = aot_autograd(
            fw_compiler=kept(partial(_compile, "forward", given)),
            bw_compiler=kept(partial(_compile, "backward", given)),
            inference_compiler=kept(partial(_compile, "inference", given)),
            partition_fn=_partition,
            decompositions=_Decompositions(_is_symbolic(example_inputs)),
            keep_inference_input_mutations=True,
        )
        return backend(gm, example_inputs)
