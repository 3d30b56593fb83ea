"""A saved program as a callable: one more compiled graph, whose lowering only reads views and calls the stored text.

tensors ──views, donation, key──► CompiledGraph ── miss ──► main: read views, call @program, write back
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from torch_tpu.errors import InputMismatch, ProgramFileInvalid
from torch_tpu.export import saved
from torch_tpu.export.manifest import Manifest
from torch_tpu.modes import stored
from torch_tpu.modes.parameters import Parameters
from torch_tpu.modes.plan import Plan
from torch_tpu.runtime import disk_cache, extension


def load(path: str | os.PathLike[str], device: torch.device | str = "tpu") -> Program:
    """The program that `save` wrote to ``path``, with its weights on ``device``. Compiles at the first call.

    Raises:
        FileNotFoundError: nothing is there.
        ProgramFileInvalid: it is no saved program, is damaged, was changed, or is of a newer format.
        ValueError: ``device`` is not a "tpu" device.
    """
    where = torch.device(device)
    if where.type != "tpu":
        raise ValueError(f'a saved program runs on device "tpu", not on {device!s}')
    manifest, text, tensors = saved.read(Path(path))
    return Program(manifest, text, {k: t.to(where) for k, t in tensors.items()}, name=str(path))


class Program:
    """Call it like the module that was saved: the same tree of tensors in and out, without gradients.

    Parameters and buffers are in ``weights``, by their names in the module; buffers that the module updates are updated
    by each call. Inputs that the module updates are, too. Calls of one program with such updates belong on one thread.
    """

    def __init__(self, manifest: Manifest, text: str, weights: Mapping[str, torch.Tensor], *, name: str) -> None:
        self.manifest = manifest
        self.text = text
        self.weights = dict(weights)
        self._name = name
        self._in_spec = _spec(manifest.in_spec, f"inputs of {name}")
        self._out_spec = _spec(manifest.out_spec, f"results of {name}")
        self._given = [i for i, x in enumerate(manifest.inputs) if x.weight is None]
        written = sorted(o.writes for o in manifest.outputs if o.writes is not None)
        self._written = [i for i in written if i in self._given]
        graph = f"exported_{manifest.program_sha256[:12]}"
        self._run = extension.CompiledGraph(graph, "t" * len(manifest.inputs), written, manifest.draws > 0, self._lower)

    def __repr__(self) -> str:
        return f"Program({self._name!r}, {len(self.weights)} weights, {len(self._given)} inputs)"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Results for ``args`` and ``kwargs``. Raises InputMismatch if they are not what the program takes."""
        given = self._tensors(args, kwargs)
        inputs = [
            self.weights[x.weight] if x.weight is not None else given[i] for i, x in enumerate(self.manifest.inputs)
        ]
        found = self._run(list(inputs))
        for i in self._written:
            torch.autograd.graph.increment_version(inputs[i])
        results = iter(found)
        leaves = [
            next(results) if leaf.output is not None or leaf.input is not None else leaf.value
            for leaf in self.manifest.results
        ]
        return pytree.tree_unflatten(leaves, self._out_spec)

    # ---- inputs

    def _tensors(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[int, torch.Tensor]:
        """The tensors that the caller gives, by parameter."""
        try:
            leaves = self._in_spec.flatten_up_to((args, kwargs))
        except ValueError as e:
            raise InputMismatch(
                f"the program takes {len(self._in_spec.child(0).children())} positional and the keyword arguments "
                f"{sorted(self._in_spec.child(1).context or ())}; got {len(args)} and {sorted(kwargs)}: {e}",
                op=self._name,
                hint="call it with the arguments that it was saved with.",
            ) from e
        found: dict[int, torch.Tensor] = {}
        for leaf, x in zip(self.manifest.arguments, leaves, strict=True):
            if leaf.input is None:
                self._check_constant(leaf.name, leaf.value, x)
            else:
                found[leaf.input] = self._checked(leaf.input, x)
        return found

    def _check_constant(self, name: str, want: Any, x: Any) -> None:
        if type(x) is not type(want) or x != want:
            raise InputMismatch(
                f"input {name!r} was {want!r} when the program was saved, and is part of it; got {x!r}.",
                op=self._name,
                hint="save a program for each value.",
            )

    def _checked(self, i: int, x: Any) -> torch.Tensor:
        want = self.manifest.inputs[i]
        if not isinstance(x, torch.Tensor):
            raise self._mismatch(i, f"a {type(x).__name__}", "make it a tensor.")
        if (x.dtype, tuple(x.shape)) != (want.type.dtype, want.shape):
            raise self._mismatch(i, f"{x.dtype}{list(x.shape)}", "convert it, or save a program for these sizes.")
        if x.device.type != "tpu" or x.layout is not torch.strided:
            raise self._mismatch(i, f"one on {x.device}, {x.layout}", "move it with .to('tpu').")
        if x.requires_grad and torch.is_grad_enabled():
            raise self._mismatch(i, "one that requires grad", "call it under torch.no_grad(): it has no backward.")
        return x

    def _mismatch(self, i: int, came: str, hint: str) -> InputMismatch:
        want = self.manifest.inputs[i]
        return InputMismatch(f"input {want.name!r} is {want.type} on tpu; got {came}.", op=self._name, hint=hint)

    # ---- the miss

    def _lower(self, call: Any) -> Plan:
        name = stored.plan_name(call, None, self.text)
        plan = stored.find_plan(name)
        if plan is None:
            plan = _Call(call, self.manifest, self.text).lower()
            stored.keep_plan(name, plan)
        return stored.attach_executable(plan)


class _Call(Parameters):
    """State of one miss."""

    def __init__(self, call: Any, manifest: Manifest, text: str) -> None:
        super().__init__(call, rng=manifest.draws > 0)
        self.manifest = manifest
        self.program = text

    def lower(self) -> Plan:
        self.load(wide=False)  # there are no scalars
        operands = [self.value(arg) for arg in self.call.args]
        if self.rng is not None:
            operands += [self.rng.seed, self.rng.offset]
        outputs = self.manifest.outputs
        results = self.b.op("func.call", operands, [o.type for o in outputs], "callee = @program")
        plan = Plan(encodings=self.all_encodings)
        if self.rng is not None:
            plan.counters = self.manifest.draws
        values = self.write_back(
            plan, {o.writes: v for o, v in zip(outputs, results, strict=True) if o.writes is not None}
        )
        made: dict[int, int] = {}
        for leaf in self.manifest.results:
            if leaf.input is not None:
                plan.returns.append(("argument", leaf.input))
            elif leaf.output is not None:
                if leaf.output not in made:
                    made[leaf.output] = self.new_output(
                        plan, values, results[leaf.output], outputs[leaf.output].strides
                    )
                plan.returns.append(("output", made[leaf.output]))
        self.finish(plan, values)
        if plan.stablehlo:
            plan.stablehlo = self._with_program(plan.stablehlo)
        return plan

    def _with_program(self, module: str) -> str:
        """``module`` and the stored program as a function of it, under a name that no other module gives it."""
        name = f"program_{disk_cache.digest(module, self.program)[:16]}"
        head, _, body = self.program.partition("{\n")
        assert head.startswith("module @")
        function = body[: body.rindex("}")].replace("func.func public @main(", f"func.func private @{name}(", 1)
        return module[: module.rindex("}")].replace("callee = @program", f"callee = @{name}", 1) + function + "}\n"


def _spec(text: str, what: str) -> pytree.TreeSpec:
    try:
        return pytree.treespec_loads(text)
    except NotImplementedError as e:
        raise ProgramFileInvalid(
            f"the {what} hold a container that this process does not know: {e}",
            hint="import the module that registers it before load, or save a module that uses dicts and tuples.",
        ) from e
    except (ValueError, TypeError, KeyError) as e:
        raise ProgramFileInvalid(f"the tree of the {what} cannot be read: {e}.", hint="save the program again.") from e
