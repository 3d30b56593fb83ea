"""What an eager op and a compiled graph have in common: the parameters of a program and the views on them.

storages, packed operands --load--> Values --lowering--> Values --finish--> Plan
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from torch_tpu.ir.builder import Builder, Value
from torch_tpu.ir.types import TensorType
from torch_tpu.lowering import views
from torch_tpu.lowering.registry import GlobalState, RngOperands
from torch_tpu.lowering.views import View, Window
from torch_tpu.modes import plan as plans
from torch_tpu.modes.plan import Output, Plan

WIDE = (torch.float64, torch.complex128)
# c10::ScalarType of the dtypes that may be the default.
_DEFAULT_DTYPES = {5: torch.float16, 6: torch.float32, 7: torch.float64, 15: torch.bfloat16}
# Bit of the state word: the call is recorded, see fused.py. Lowering does not depend on it.
DEFERRED = 1 << 13
# Above it: the number of the compiler options in force (runtime/compiler.py). Lowering does not depend on it either.
OPTIONS_SHIFT = 16
_PRECISIONS = ("HIGHEST", "HIGH", "DEFAULT")  # at::Float32MatmulPrecision


def global_state(word: int) -> GlobalState:
    """The state that csrc/dispatch/call.cpp packed into a word of the key."""
    return GlobalState(
        default_dtype=_DEFAULT_DTYPES[word & 0xFF],
        deterministic=bool(word >> 8 & 1),
        fill_uninitialized=bool(word >> 9 & 1),
        precision=_PRECISIONS[word >> 10 & 3],
        host_kernels=bool(word >> 12 & 1),
    )


def _view(t: tuple[Any, ...]) -> View:
    dtype, sizes, strides, slot, conj, neg, wrapped, written, plan = t
    view = View(dtype, tuple(sizes), tuple(strides), slot, conj, neg, wrapped, written)
    if plan is None:
        return view
    kind, dims, windows, covers = plan
    return View(
        dtype, view.sizes, view.strides, slot, conj, neg, wrapped, written,
        kind, tuple(dims), tuple(Window(*w) for w in windows), covers,
    )  # fmt: skip


class Parameters:
    """Of one miss. ``call`` is a MissCall; ``rng``: seed and offset are operands too."""

    def __init__(self, call: Any, *, rng: bool) -> None:
        self.call = call
        self.has_rng = rng
        self.b = Builder()
        self.views = [_view(t) for t in call.tensors]
        self.slots = [TensorType(tuple(dims), dtype) for dtype, dims in call.slots]
        self.state = global_state(call.state)
        self.operand_kinds: list[tuple[str, int, torch.dtype | None, bool]] = call.operands

    def load(self, wide: bool) -> None:
        """Parameters: one a storage, then the packed operands; then the tensors and scalars as values."""
        self.bases = [self.b.arg(t) for t in self.slots]
        self.encodings = [self._encoding(kind, dtype, wide) for kind, _, dtype, _ in self.operand_kinds]
        words = sum((0, 1, 2, 1, 2)[e] for e in self.encodings) + (4 if self.has_rng else 0)
        self.pack = self.b.arg(TensorType((words,), torch.uint32)) if words else None
        self.operands: list[Value] = []
        at = 0
        for (kind, _, dtype, wrapped), encoding in zip(self.operand_kinds, self.encodings, strict=True):
            value, at = self._unpack(encoding, at)
            if kind == "tensor" and not wrapped and dtype is not None and not (dtype in WIDE and not wide):
                value = self.b.convert(value, dtype)
            if kind == "tensor" and wrapped and dtype is torch.bool:
                value = self.b.convert(value, torch.bool)
            self.operands.append(Value(value.name, value.type, wrapped))
        self.rng = self._unpack_rng(at) if self.has_rng else None
        self.starts: list[list[Value]] = [[] for _ in self.views]
        for (kind, source, _, _), value in zip(self.operand_kinds, self.operands, strict=True):
            if kind == "start":
                self.starts[source].append(value)
        self.loaded: dict[int, Value] = {}

    def _encoding(self, kind: str, dtype: torch.dtype | None, wide: bool) -> int:
        if kind == "start":
            return plans.I32 if all(t.numel < 2**31 for t in self.slots) else plans.I64
        if kind == "int" or (dtype is not None and not dtype.is_floating_point):
            return plans.I64
        return plans.F64 if wide else plans.F32

    def _word(self, at: int) -> Value:
        assert self.pack is not None
        return self.b.reshape(self.b.slice(self.pack, [at], [at + 1]), ())

    def _long(self, at: int) -> Value:
        low, high = (self.b.convert(self._word(at + i), torch.uint64) for i in range(2))
        return self.b.or_(low, self.b.binary("shift_left", high, self.b.constant(32, torch.uint64)))

    def _unpack(self, encoding: int, at: int) -> tuple[Value, int]:
        b = self.b
        if encoding == plans.F32:
            return b.bitcast(self._word(at), torch.float32), at + 1
        if encoding == plans.I32:
            return b.bitcast(self._word(at), torch.int32), at + 1
        if encoding == plans.I64:
            return b.convert(self._long(at), torch.int64), at + 2
        assert self.pack is not None
        return b.bitcast(b.slice(self.pack, [at], [at + 2]), torch.float64), at + 2

    def _unpack_rng(self, at: int) -> RngOperands:
        return RngOperands(self._long(at), self._long(at + 2))

    def tensor(self, i: int) -> Value:
        """Tensor argument ``i``, read through its view."""
        if i not in self.loaded:
            view = self.views[i]
            value = views.read(self.b, self.bases[view.slot], view, self.starts[i])
            self.loaded[i] = Value(value.name, value.type, view.wrapped)
        return self.loaded[i]

    def value(self, arg: Any) -> Any:
        """What a rule gets for one argument."""
        if arg is None:
            return None
        kind, what = arg
        if kind == "tensor":
            return self.tensor(what)
        if kind == "operand":
            return self.operands[what]
        if kind == "list":
            return [self.value(item) for item in what]
        return what

    @property
    def all_encodings(self) -> list[int]:
        """Of the operands, then of seed and offset."""
        return self.encodings + [plans.I64] * (2 if self.has_rng else 0)

    def new_output(self, plan: Plan, values: list[Value], value: Value, strides: Sequence[int]) -> int:
        """Index of a new output: ``value`` as a tensor of its own, with ``strides`` if they are dense."""
        stored, strides = views.store_new(self.b, value, strides)
        plan.outputs.append(Output(value.dtype, stored.shape, sizes=value.shape, strides=tuple(strides)))
        values.append(stored)
        return len(values) - 1

    def write_back(self, plan: Plan, written: Mapping[int, Value]) -> list[Value]:
        """Outputs of ``plan`` that are the next buffers of the storages of written arguments, by their position."""
        current = dict(enumerate(self.bases))
        for i, value in written.items():
            target = self.call.args[i][1]
            view = self.views[target]
            current[view.slot] = views.write(self.b, current[view.slot], view, value, self.starts[target])
        slots = list(dict.fromkeys(self.views[self.call.args[i][1]].slot for i in written))
        plan.outputs += [Output(current[slot].dtype, current[slot].shape, slot=slot) for slot in slots]
        return [current[slot] for slot in slots]

    def finish(self, plan: Plan, values: list[Value], *, consumed: Collection[int] = ()) -> None:
        """Drop unused parameters, mark donations, print the module. ``consumed``: slots that nobody reads again."""
        b = self.b
        if not values:
            return
        names = {v.name for v in values}
        used = set(re.findall(r"%arg\d+", "\n".join(b._lines))) | {n for n in names if n.startswith("%arg")}
        kept = [i for i, base in enumerate(self.bases) if base.name in used]
        plan.arg_slots = kept
        params = [self.bases[i] for i in kept]
        aliased = {
            out.slot: i
            for i, out in enumerate(plan.outputs)
            if out.slot >= 0 and values[i].type == self.slots[out.slot]
        }
        fresh = [i for i, out in enumerate(plan.outputs) if out.slot < 0]
        for position, slot in enumerate(kept):
            output = aliased.get(slot)
            if output is None and slot in consumed:
                output = next((i for i in fresh if values[i].type == self.slots[slot]), None)
                if output is not None:
                    fresh.remove(output)
                    plan.consumed.append(position)
            if output is not None:
                b.arg_attrs[position] = f"tf.aliasing_output = {output} : i32"
                plan.donated.append(position)
        if self.pack is not None and self.pack.name in used:
            params.append(self.pack)
        else:
            plan.encodings = [plans.SKIP] * len(plan.encodings)
        b.args = params
        plan.stablehlo = b.module(re.sub(r"\W", "_", self.call.name), values)
