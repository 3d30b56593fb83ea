"""A miss of the executable cache: one ATen call to one StableHLO program.

C++ calls `lower` with a MissCall: the arguments, the views, the storages. The program reads each tensor through its
view, computes the functional form of the op, and returns new buffers for the results and for every written storage.

    storages ──view──► values ──rule or decomposition──► results ──► new tensors
       ▲                                                    └──view──► next buffers of written storages
       └── donated where an output has their type
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch._ops import OpOverload

import torch_tpu.lowering.rules  # noqa: F401  (fills the rule table)
from torch_tpu.ir.builder import Builder, Value
from torch_tpu.ir.types import TensorType
from torch_tpu.lowering import argument_checks, decompose, views
from torch_tpu.lowering.driver import lower_graph, lower_node
from torch_tpu.lowering.registry import RULES, Dynamic, RuleEntry
from torch_tpu.lowering.siblings import Form, form_of, overload
from torch_tpu.lowering.views import View, Window
from torch_tpu.modes import stored
from torch_tpu.modes.parameters import DEFERRED, WIDE, Parameters
from torch_tpu.modes.plan import Output, Plan


class _Lowering(Parameters):
    """State of one miss."""

    def __init__(self, call: Any, form: Form) -> None:
        self.form = form
        self.entry: RuleEntry | None = RULES.get(form.functional)
        super().__init__(call, rng=self.entry is not None and self.entry.rng)
        self.schema = form.op._schema.arguments
        self.call_args: list[Any] = call.args

    # ---- computing

    def outs(self) -> list[Any]:
        """Results of the functional form on meta tensors: tensors, lists of tensors, None."""
        name, _, last = self.form.functional.name().partition(".")

        def meta() -> list[Any]:
            return list(self.call.meta(name, last))

        if self.form.factory:
            return [torch.empty_like(meta()[0], dtype=self.views[self.written_tensors()[0][0]].dtype)]
        if self.entry is not None and self.entry.promise is not None:
            return self.entry.promise(self.call.meta_args(), meta)
        return meta()

    def compute(self, outs: Sequence[Any]) -> tuple[Value | None, ...] | Dynamic:
        flat = [o for o in _flatten(outs) if o is not None]
        types = [TensorType.of(o) for o in flat]
        if self.entry is None:
            return self._decomposed()
        by_name = dict(zip((a.name for a in self.schema), self.call_args, strict=True))
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        for a in self.form.functional._schema.arguments:
            value = self.value(by_name[a.name]) if a.name in by_name else _option(a, types)
            if a.kwarg_only:
                kwargs[a.name] = value
            else:
                args.append(value)
        return self._call_rule(types, outs, args, kwargs)

    def _call_rule(
        self, types: list[TensorType], outs: Sequence[Any], args: list[Any], kwargs: dict[str, Any]
    ) -> tuple[Value | None, ...] | Dynamic:
        promised: Any = types if len(types) == len(_flatten(outs)) else [_type(o) for o in _flatten(outs)]
        return lower_node(self.b, self.form.functional, promised, args, kwargs, state=self.state, rng=self.rng)

    def _decomposed(self) -> tuple[Value | None, ...]:
        names = {a.name for a in self.form.functional._schema.arguments}
        meta = {k: v for k, v in self.call.meta_args().items() if k in names}
        graph, sources = decompose.trace(self.form.functional, meta)
        by_name = dict(zip((a.name for a in self.schema), self.call_args, strict=True))
        inputs = []
        for source in sources:
            if isinstance(source, str):
                inputs.append(self.value(by_name[source]))
            else:
                inputs.append(self.value(by_name[source[0]][1][source[1]]))
        return tuple(lower_graph(self.b, graph, inputs, state=self.state)[0])

    # ---- results

    def written_tensors(self) -> list[list[int]]:
        """Tensor argument numbers of each written argument of the schema, then of the hidden writes."""
        by_name = dict(zip((a.name for a in self.schema), self.call_args, strict=True))
        hidden = self.entry.writes if self.entry is not None else ()
        found = []
        for name in (*self.form.writes, *hidden):
            arg = by_name[name]
            items = [] if arg is None else arg[1] if arg[0] == "list" else [arg]
            found.append([-1 if item is None else item[1] for item in items] or [-1])
        return found


def _option(argument: Any, types: Sequence[TensorType]) -> Any:
    """An argument that a factory's out= form does not have."""
    return types[0].dtype if argument.name == "dtype" else argument.default_value


def _flatten(outs: Sequence[Any]) -> list[Any]:
    flat: list[Any] = []
    for o in outs:
        flat.extend(o if isinstance(o, (list, tuple)) else [o])
    return flat


def _type(o: Any) -> TensorType | None:
    return None if o is None else TensorType.of(o)


def lower(call: Any) -> Plan:
    """The plan of one call. Raises what the op's meta kernel raises for these arguments."""
    op = overload(call.name)
    form = form_of(op)
    assert form is not None, f"{op} was described as a program but has no functional form"
    argument_checks.check(op, call.meta_args)
    name = stored.plan_name(call, RULES.get(form.functional))
    plan = stored.find_plan(name)
    if plan is None:
        plan = _fresh_plan(call, op, form)
        stored.keep_plan(name, plan)
    return plan if call.state & DEFERRED else stored.attach_executable(plan)


def _fresh_plan(call: Any, op: OpOverload, form: Form) -> Plan:
    try:
        with torch._C.DisableTorchFunction(), torch.no_grad():
            return _lower(call, form)
    except NotImplementedError:  # LoweringMissing, or an op without a meta kernel: the next rung
        return Plan(rung=_lower_rung(op))


def _lower_rung(op: OpOverload) -> str:
    composite = torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "CompositeExplicitAutograd")
    return "composite" if composite else "cpu"


def _lower(call: Any, form: Form) -> Plan:
    low = _Lowering(call, form)
    checked: list[Any] = _check(call, form)
    dynamic = low.entry is not None and low.entry.dynamic
    outs = [] if dynamic else low.outs()
    dtypes = (
        [t.dtype for t in low.slots] + [v.dtype for v in low.views] + [o.dtype for o in _flatten(outs) if o is not None]
    )
    low.load(wide=any(d in WIDE for d in dtypes))
    results = low.compute(outs)
    plan = Plan(encodings=low.all_encodings)
    values: list[Value] = []
    if isinstance(results, Dynamic):
        _dynamic_outputs(plan, values, results)
    elif form.writes:
        fresh = sum(r.alias_info is None for r in form.op._schema.returns)  # results that are no argument come first
        _new_outputs(low, plan, values, results[:fresh], outs[:fresh])
        _write_results(low, plan, values, results[fresh:], checked[fresh:])
    else:
        _new_outputs(low, plan, values, results, outs)
    if not isinstance(results, Dynamic) and low.entry is not None and low.entry.writes:
        _write_hidden(low, plan, values, results, len(_flatten(outs)))
    low.finish(plan, values)
    return plan


def _check(call: Any, form: Form) -> list[Any]:
    """Run the call's own overload on meta tensors: its errors, and the sizes that out= tensors take."""
    if not form.writes:
        return []
    name, _, last = form.op.name().partition(".")
    try:
        return _flatten(call.meta(name, last))
    except NotImplementedError:
        return []


def _dynamic_outputs(plan: Plan, values: list[Value], results: Dynamic) -> None:
    count = len(results.values)
    for value, dim in zip(results.values, results.dims, strict=True):
        out = Output(value.dtype, value.shape, sizes=value.shape, strides=views.contiguous_strides(value.shape))
        if dim is not None:
            out.count, out.count_dim = count, dim
        plan.returns.append(("output", len(values)))
        plan.outputs.append(out)
        values.append(value)
    plan.outputs.append(Output(torch.int64, ()))
    values.append(results.count)


def _new_outputs(
    low: _Lowering, plan: Plan, values: list[Value], results: Sequence[Value | None], outs: Sequence[Any]
) -> None:
    given = iter(results)

    def one(meta: torch.Tensor | None) -> tuple[Any, ...]:
        value = next(given)
        if value is None or meta is None:
            return ("none",)
        return ("output", low.new_output(plan, values, value, meta.stride()))

    for o in outs:
        plan.returns.append(("list", [one(item) for item in o]) if isinstance(o, (list, tuple)) else one(o))


def _write_results(
    low: _Lowering, plan: Plan, values: list[Value], results: Sequence[Value | None], checked: Sequence[Any]
) -> None:
    """Results of the functional form go through the views of the written arguments; one output a storage."""
    targets = [i for group in low.written_tensors()[: len(low.form.writes)] for i in group]
    current = dict(enumerate(low.bases))
    touched: list[int] = []
    for n, (target, value) in enumerate(zip(targets, results, strict=False)):
        if target < 0 or value is None:
            continue
        view = low.views[target]
        if low.form.out and value.shape != view.sizes:
            view = _resized(low, plan, target, value, checked[n] if n < len(checked) else None)
        update = low.b.broadcast_to(low.b.convert(value, view.dtype), view.sizes)
        current[view.slot] = views.write(low.b, current[view.slot], view, update, low.starts[target])
        if view.slot not in touched:
            touched.append(view.slot)
    for slot in touched:
        value = current[slot]
        plan.outputs.append(Output(value.dtype, value.shape, slot=slot))
        values.append(value)
    names = [a.name for a in low.schema]
    returned = [r for r in low.form.op._schema.returns if r.alias_info is not None]
    plan.returns += [("argument", names.index(w)) for w, _ in zip(low.form.writes, returned, strict=False)]


def _resized(low: _Lowering, plan: Plan, target: int, value: Value, meta: torch.Tensor | None) -> View:
    """An out= tensor of another size: it takes the result's, and all of its storage is written."""
    strides = views.contiguous_strides(value.shape) if meta is None else tuple(meta.stride())
    plan.resizes.append((target, value.shape, strides))
    view = low.views[target]
    dense = views.physical_order(value.shape, strides) is not None
    room = low.slots[view.slot].numel * low.slots[view.slot].dtype.itemsize // view.dtype.itemsize
    if dense and value.type.numel < room:  # the rest of the storage stays
        window = Window(value.type.numel, 1, sliced=False)
        return replace(
            view, sizes=value.shape, strides=strides, kind="box", dims=(room,), windows=(window,), covers=False
        )
    return View(view.dtype, value.shape, strides, view.slot, kind="box" if dense else "whole", covers=True)


def _write_hidden(low: _Lowering, plan: Plan, values: list[Value], results: Sequence[Value | None], first: int) -> None:
    """Arguments that the op updates though its schema does not say so."""
    groups = low.written_tensors()[len(low.form.writes) :]
    for group, value in zip(groups, results[first:], strict=True):
        if value is None or group[0] < 0:
            continue
        view = low.views[group[0]]
        update = low.b.convert(value, view.dtype)
        stored = views.write(low.b, low.bases[view.slot], view, update, low.starts[group[0]])
        plan.outputs.append(Output(stored.dtype, stored.shape, slot=view.slot))
        values.append(stored)


def lower_reshape(dtype: torch.dtype, dims: Sequence[int], to: Sequence[int]) -> Plan:
    """A storage's buffer in other dims, in place when it is donated (csrc/dispatch/rebase.cpp)."""
    b = Builder()
    x = b.arg(TensorType(tuple(dims), dtype))
    b.arg_attrs[0] = "tf.aliasing_output = 0 : i32"
    out = b.reshape(x, to)
    plan = Plan(
        stablehlo=b.module("storage_reshape", [out]),
        arg_slots=[0],
        donated=[0],
        outputs=[Output(dtype, tuple(to), slot=0)],
    )
    return stored.attach_executable(plan)
