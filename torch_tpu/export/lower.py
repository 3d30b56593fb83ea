"""An exported graph as one portable program: no kernels of the host, no views, no state but its parameters.

ExportedProgram ──decompositions──► functional graph of ops with rules ──lower_graph──► StableHLO text
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, InputKind, OutputKind, TensorArgument
from torch.fx import Node
from torch.utils import _pytree as pytree

from torch_tpu.compile import expand
from torch_tpu.compile.random import is_random
from torch_tpu.errors import ExportUnsupported
from torch_tpu.export import decompose
from torch_tpu.export.manifest import FORMAT, Input, Leaf, Manifest, Output, dtype_name
from torch_tpu.ir.builder import Builder, Value
from torch_tpu.ir.types import TensorType
from torch_tpu.lowering.driver import Draws, lower_graph
from torch_tpu.lowering.registry import GlobalState, RngOperands

_PRECISIONS = {"highest": "HIGHEST", "high": "HIGH", "medium": "DEFAULT"}
_HELD = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)
_WRITES = (OutputKind.BUFFER_MUTATION, OutputKind.USER_INPUT_MUTATION, OutputKind.PARAMETER_MUTATION)


@dataclass(frozen=True, slots=True)
class Lowered:
    """A program in memory: StableHLO text, what its parameters and results are, and the tensors it is saved with."""

    text: str
    manifest: Manifest
    weights: Mapping[str, torch.Tensor]


def lower(
    model: ExportedProgram | torch.nn.Module, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
) -> Lowered:
    """Lower ``model`` for the sizes of its example inputs. Float32 products get the present matmul precision.

    Args:
        model: an `ExportedProgram`, or a module that `torch.export.export` is called on.
        args, kwargs: example inputs of a module; an `ExportedProgram` has its own.

    Raises:
        ExportUnsupported: a dim is dynamic, or an input or a result is of a kind that a file cannot hold.
        LoweringMissing: an op has no rule, or sizes that depend on data.
        TypeError: a module without ``args`` and ``kwargs``, or an `ExportedProgram` with them.

    Touches no device. Costs a trace and seconds for a large model.
    """
    if isinstance(model, ExportedProgram):
        if args or kwargs:
            raise TypeError("an ExportedProgram has its example inputs; args and kwargs are for modules")
        exported = model
    else:
        if not args and not kwargs:
            raise TypeError("a module needs example inputs: args=(...), kwargs={...}")
        exported = torch.export.export(model, tuple(args), dict(kwargs or {}))
    _check_static(exported)
    table = decompose.table()
    exported = exported.run_decompositions(table)
    expand.expand(exported.graph_module, table)
    return _Lowering(exported).run()


def _check_static(exported: ExportedProgram) -> None:
    for node in exported.graph.nodes:
        for val in pytree.tree_leaves(node.meta.get("val")):
            dims = enumerate(val.shape) if isinstance(val, torch.Tensor) else [("value", val)]
            for dim, size in dims:
                if isinstance(size, (torch.SymInt, torch.SymFloat, torch.SymBool)):
                    raise _not_static(node, dim, size)


def _not_static(node: Node, dim: int | str, size: Any) -> ExportUnsupported:
    if node.op == "placeholder":
        return ExportUnsupported(
            f"dim {dim} of input {node.name!r} is dynamic ({size}); a saved program has fixed sizes.",
            hint="export with dynamic_shapes=None, once for each size.",
        )
    return ExportUnsupported(
        f"dim {dim} of its result depends on data ({size}); a saved program has fixed sizes.",
        op=str(node.target),
        hint="compute with a mask instead of selecting.",
    )


def _global_state() -> GlobalState:
    return GlobalState(
        default_dtype=torch.get_default_dtype(),
        deterministic=torch.are_deterministic_algorithms_enabled(),
        precision=_PRECISIONS[torch.get_float32_matmul_precision()],
    )


def _constant(x: Any, what: str) -> Any:
    """``x`` if JSON holds it."""
    if x is None or isinstance(x, (bool, int, str)) or (isinstance(x, float) and math.isfinite(x)):
        return x
    raise ExportUnsupported(
        f"{what} is {x!r}, a {type(x).__name__}; a saved program takes and gives tensors, finite numbers, strings and None.",
        hint="bind it in the module: export a wrapper that passes it on.",
    )


class _Lowering:
    """State of one export: graph nodes on one side, parameters and results on the other."""

    def __init__(self, exported: ExportedProgram) -> None:
        self.exported = exported
        self.b = Builder()
        self.nodes: list[Node] = [n for n in exported.graph.nodes if n.op == "placeholder"]
        self.inputs: list[Input] = []
        self.weights: dict[str, torch.Tensor] = {}
        self.position: dict[str, int] = {}  # of a placeholder among the inputs
        self.arguments: list[Leaf] = []
        self._seen: dict[Any, str] = {}

    def run(self) -> Lowered:
        exported = self.exported
        values = [
            self._input(node, spec) for node, spec in zip(self.nodes, exported.graph_signature.input_specs, strict=True)
        ]
        draws = self._draws()
        for node in list(exported.graph.nodes):
            if node.target is torch.ops.aten._assert_tensor_metadata.default:
                exported.graph.erase_node(node)  # says what tracing has made true
        with torch.no_grad():
            leaves, _ = lower_graph(self.b, exported.graph_module, values, state=_global_state(), draws=draws)
        outputs, results, returned = self._results(leaves)
        name = hashlib.sha256("\n".join(self.b._lines).encode()).hexdigest()[:12]
        text = self.b.module(f"exported_{name}", returned)
        in_spec, out_spec = exported.call_spec.in_spec, exported.call_spec.out_spec
        assert in_spec is not None
        assert out_spec is not None
        manifest = Manifest(
            format=FORMAT,
            torch_tpu=version("torch_tpu"),
            torch=torch.__version__,
            stablehlo="",
            program_sha256=hashlib.sha256(text.encode()).hexdigest(),
            inputs=tuple(self.inputs),
            outputs=tuple(outputs),
            arguments=tuple(self.arguments),
            results=tuple(results),
            in_spec=_dumps(in_spec, "inputs"),
            out_spec=_dumps(out_spec, "results"),
            draws=0 if draws is None else draws.used,
        )
        return Lowered(text, manifest, self.weights)

    def _input(self, node: Node, spec: Any) -> Any:
        if spec.kind is InputKind.USER_INPUT and isinstance(spec.arg, ConstantArgument):
            value = _constant(spec.arg.value, f"input {node.name!r}")
            self.arguments.append(Leaf(node.name, value=value))
            return value
        if not isinstance(spec.arg, TensorArgument) or spec.kind not in (*_HELD, InputKind.USER_INPUT):
            raise ExportUnsupported(f"input {node.name!r} is a {type(spec.arg).__name__}; only tensors can be saved.")
        t = TensorType.of(node.meta["val"])
        weight = self._weight(spec) if spec.kind in _HELD else None
        self.position[node.name] = len(self.inputs)
        if weight is None:
            self.arguments.append(Leaf(node.name, input=len(self.inputs)))
        self.inputs.append(Input(node.name, dtype_name(t.dtype), t.shape, weight))
        return self.b.arg(t)

    def _weight(self, spec: Any) -> str:
        """Name in the weights file; parameters that are one tensor have one name."""
        name = str(spec.target)
        held = self.exported.state_dict if name in self.exported.state_dict else self.exported.constants
        t = held[name].detach()
        where = (t.untyped_storage().data_ptr(), t.storage_offset(), t.shape, t.stride(), t.dtype)
        first = self._seen.setdefault(where if t.numel() else name, name)
        self.weights.setdefault(first, t)
        return first

    def _draws(self) -> Draws | None:
        if not any(is_random(n.target) for n in self.exported.graph.nodes):
            return None
        word = TensorType((), torch.uint64)
        return Draws(RngOperands(self.b.arg(word), self.b.arg(word)))

    def _results(self, leaves: Sequence[Any]) -> tuple[list[Output], list[Leaf], list[Value]]:
        outputs: list[Output] = []
        results: list[Leaf] = []
        returned: list[Value] = []
        made: dict[Any, int] = {}
        written = self.exported.graph_signature
        nodes = pytree.tree_leaves(next(n for n in self.exported.graph.nodes if n.op == "output").args[0])
        for node, leaf, spec in zip(nodes, leaves, written.output_specs, strict=True):
            writes = self._written(spec) if spec.kind in _WRITES else None
            if spec.kind is not OutputKind.USER_OUTPUT and writes is None:
                raise ExportUnsupported(f"a result of kind {spec.kind.name} cannot be saved.")
            if not isinstance(leaf, Value):
                results.append(Leaf(value=_constant(leaf, "a result")))
            elif writes is None and isinstance(node, Node) and node.name in self.position:
                results.append(Leaf(node.name, input=self.position[node.name]))
            elif writes is None and node in made:
                results.append(Leaf(node.name, output=made[node]))
            else:
                if writes is None:
                    made[node] = len(outputs)
                    results.append(Leaf(node.name, output=len(outputs)))
                strides = tuple(node.meta["val"].stride())
                outputs.append(Output(dtype_name(leaf.dtype), leaf.shape, strides, writes))
                returned.append(leaf)
        return outputs, results, returned

    def _written(self, spec: Any) -> int:
        """Position of the input that a result is the next contents of."""
        signature = self.exported.graph_signature
        if spec.kind is OutputKind.USER_INPUT_MUTATION:
            return self.position[str(spec.target)]
        return next(
            self.position[n.name]
            for n, s in zip(self.nodes, signature.input_specs, strict=True)
            if s.target == spec.target and s.kind in _HELD
        )


def _dumps(spec: pytree.TreeSpec, what: str) -> str:
    try:
        return pytree.treespec_dumps(spec)
    except NotImplementedError as e:
        raise ExportUnsupported(
            f"the {what} hold a container that has no serialized name: {e}",
            hint="register it with torch.utils._pytree.register_pytree_node(..., serialized_type_name=...), or use dicts.",
        ) from e
