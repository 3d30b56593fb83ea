"""Text StableHLO builder: one method per StableHLO op that the rules use.

Everything is written in MLIR's generic form: one printer for all ops, and a subset that StableHLO 1.13 (CPU plugin)
and 1.24 (libtpu) both parse. A method computes the result type of its op; shapes are static. Rules normally use the
methods of this class only; `op` is the door to StableHLO ops that have none.

    b = Builder()
    x = b.arg(TensorType((4,), torch.float32))
    total = b.reduce([x], [b.constant(0, x.dtype)], [0], lambda l, r: [b.add(l[0], r[0])])[0]
    text = b.module("sum", [total])
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from torch_tpu.ir.types import UNSIGNED, TensorType, element_type

Number = bool | int | float | complex


@dataclass(frozen=True, slots=True)
class Value:
    """An SSA value: its name and its type.

    ``wrapped`` marks a Python number that arrived as a rank-0 operand: it takes part in type promotion as a number
    does, not as a tensor.
    """

    name: str
    type: TensorType
    wrapped: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        return self.type.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.type.dtype

    @property
    def rank(self) -> int:
        return len(self.type.shape)


def _array(values: Sequence[int]) -> str:
    return f"array<i64: {', '.join(map(str, values))}>" if len(values) else "array<i64>"


def _pairs(values: Sequence[tuple[int, int]]) -> str:
    body = ", ".join(f"[{lo}, {hi}]" for lo, hi in values)
    return f"dense<[{body}]> : tensor<{len(values)}x2xi64>" if values else "dense<> : tensor<0x2xi64>"


def _float_literal(value: float, dtype: torch.dtype) -> str:
    """A finite value in decimal, others as the bits of ``dtype`` (MLIR has no inf or nan literal)."""
    if math.isfinite(value):
        rounded = torch.tensor(value, dtype=torch.float64).to(dtype)
        if math.isfinite(float(rounded)):
            return f"{value:.17e}"
        value = float(rounded)
    if dtype == torch.float64:
        return f"0x{struct.unpack('<Q', struct.pack('<d', value))[0]:016X}"
    bits = torch.tensor([value], dtype=torch.float64).to(dtype).view(torch.uint8).tolist()
    return "0x" + "".join(f"{byte:02X}" for byte in reversed(bits))


def literal(value: Number, dtype: torch.dtype) -> str:
    """MLIR literal of ``value`` as ``dtype``. Integers wrap like a C cast."""
    if dtype.is_complex:
        part = torch.float64 if dtype == torch.complex128 else torch.float32
        z = complex(value)
        return f"({_float_literal(z.real, part)}, {_float_literal(z.imag, part)})"
    if dtype.is_floating_point:
        return _float_literal(float(value), dtype)  # type: ignore[arg-type]
    if dtype == torch.bool:
        return "true" if value else "false"
    bits = torch.iinfo(dtype).bits
    n = int(value) & ((1 << bits) - 1)  # type: ignore[arg-type]
    if dtype not in UNSIGNED and n >= 1 << (bits - 1):
        n -= 1 << bits
    return str(n)


Body = Callable[..., Sequence[Value]]


@dataclass(slots=True)
class Builder:
    """Appends StableHLO lines; one Builder is one module with one function."""

    args: list[Value] = field(default_factory=list)
    arg_attrs: dict[int, str] = field(default_factory=dict)
    transposes: dict[str, tuple[Value, tuple[int, ...]]] = field(default_factory=dict)
    """Results of ``transpose`` by name: its operand and permutation."""
    _lines: list[str] = field(default_factory=list)
    _next: int = 0
    _constants: dict[tuple[str, TensorType], Value] = field(default_factory=dict)
    _depth: int = 0

    # ---- plumbing

    def arg(self, type: TensorType, *, wrapped: bool = False) -> Value:
        """A new parameter of the program."""
        v = Value(f"%arg{len(self.args)}", type, wrapped)
        self.args.append(v)
        return v

    def _name(self) -> str:
        self._next += 1
        return f"%{self._next - 1}"

    def op(
        self,
        name: str,
        operands: Sequence[Value],
        results: Sequence[TensorType],
        attrs: str = "",
        regions: Sequence[str] = (),
    ) -> tuple[Value, ...]:
        """Any op in generic form: ``name`` with its dialect, ``attrs`` as the text between the braces."""
        base = self._name()
        ins = ", ".join(v.name for v in operands)
        in_types = ", ".join(v.type.mlir for v in operands)
        out_types = ", ".join(t.mlir for t in results)
        left = f"{base}:{len(results)} = " if len(results) > 1 else f"{base} = " if results else ""
        body = f" ({', '.join(regions)})" if regions else ""
        braces = f" {{{attrs}}}" if attrs else ""
        self._lines.append(f'{left}"{name}"({ins}){body}{braces} : ({in_types}) -> ({out_types})')
        if len(results) == 1:
            return (Value(base, results[0]),)
        return tuple(Value(f"{base}#{i}", t) for i, t in enumerate(results))

    def _one(self, name: str, operands: Sequence[Value], result: TensorType, attrs: str = "") -> Value:
        return self.op(f"stablehlo.{name}", operands, [result], attrs)[0]

    def region(self, types: Sequence[TensorType], body: Callable[[Sequence[Value]], Sequence[Value]]) -> str:
        """Text of a region with block arguments of ``types`` whose ``body`` returns what the block yields.

        The body may use values from outside in the regions of `while_`, `if_` and `case`, not in those of reduce,
        sort and scatter (XLA wants these closed; constants made inside are inside).
        """
        lines, self._lines = self._lines, []
        constants, self._constants = self._constants, {}
        params = [Value(self._name(), t) for t in types]
        outs = body(params)
        self._lines.append(
            f'"stablehlo.return"({", ".join(v.name for v in outs)}) : ({", ".join(v.type.mlir for v in outs)}) -> ()'
        )
        text, self._lines, self._constants = "\n".join(self._lines), lines, constants
        head = f"^bb0({', '.join(f'{p.name}: {p.type.mlir}' for p in params)}):\n" if params else ""
        return f"{{\n{head}{text}\n}}"

    def module(self, name: str, outs: Sequence[Value]) -> str:
        """The whole module. ``arg_attrs[i]`` is put on parameter ``i`` (donation)."""
        args = ", ".join(
            f"{a.name}: {a.type.mlir}" + (f" {{{self.arg_attrs[i]}}}" if i in self.arg_attrs else "")
            for i, a in enumerate(self.args)
        )
        types = ", ".join(o.type.mlir for o in outs)
        body = "\n".join(self._lines)
        ret = f'"func.return"({", ".join(o.name for o in outs)}) : ({types}) -> ()'
        return f"module @{name} {{\nfunc.func public @main({args}) -> ({types}) {{\n{body}\n{ret}\n}}\n}}\n"

    # ---- constants and shapes

    def constant(self, value: Number, dtype: torch.dtype, shape: Sequence[int] = ()) -> Value:
        """A splat of ``value``."""
        t = TensorType(tuple(shape), dtype)
        text = literal(value, dtype)
        found = self._constants.get((text, t))
        if found is None:
            found = self._one("constant", [], t, f"value = dense<{text}> : {t.mlir}")
            self._constants[text, t] = found
        return found

    def constant_list(self, values: Sequence[Number], dtype: torch.dtype) -> Value:
        """A rank-1 constant. For short lists only: large constants belong in arguments."""
        t = TensorType((len(values),), dtype)
        body = f"[{', '.join(literal(v, dtype) for v in values)}]" if values else ""
        return self._one("constant", [], t, f"value = dense<{body}> : {t.mlir}")

    def iota(self, shape: Sequence[int], dim: int, dtype: torch.dtype) -> Value:
        """Each element is its index along ``dim``."""
        return self._one("iota", [], TensorType(tuple(shape), dtype), f"iota_dimension = {dim} : i64")

    def reshape(self, x: Value, shape: Sequence[int]) -> Value:
        """Row-major reshape; a no-op when the shape is already right."""
        t = TensorType(tuple(shape), x.dtype)
        assert t.numel == x.type.numel, (x.type, t)
        return x if t.shape == x.shape else self._one("reshape", [x], t)

    def transpose(self, x: Value, perm: Sequence[int]) -> Value:
        """Dim ``i`` of the result is dim ``perm[i]`` of ``x``."""
        if list(perm) == list(range(x.rank)):
            return x
        t = TensorType(tuple(x.shape[p] for p in perm), x.dtype)
        out = self._one("transpose", [x], t, f"permutation = {_array(perm)}")
        self.transposes[out.name] = (x, tuple(perm))
        return out

    def broadcast_in_dim(self, x: Value, shape: Sequence[int], dims: Sequence[int]) -> Value:
        """Dim ``i`` of ``x`` becomes dim ``dims[i]`` of the result."""
        t = TensorType(tuple(shape), x.dtype)
        if t.shape == x.shape and list(dims) == list(range(x.rank)):
            return x
        return self._one("broadcast_in_dim", [x], t, f"broadcast_dimensions = {_array(dims)}")

    def broadcast_to(self, x: Value, shape: Sequence[int]) -> Value:
        """NumPy broadcast of ``x`` to ``shape``; a no-op when the shape is already right."""
        lead = len(shape) - x.rank
        return self.broadcast_in_dim(x, shape, range(lead, len(shape)))

    def slice(self, x: Value, start: Sequence[int], limit: Sequence[int], step: Sequence[int] | None = None) -> Value:
        """Static ``x[start:limit:step]`` of every dim."""
        step = [1] * x.rank if step is None else step
        shape = tuple(max(0, -(-(hi - lo) // st)) for lo, hi, st in zip(start, limit, step, strict=True))
        if shape == x.shape:
            return x
        attrs = f"limit_indices = {_array(limit)}, start_indices = {_array(start)}, strides = {_array(step)}"
        return self._one("slice", [x], TensorType(shape, x.dtype), attrs)

    def slice_dim(self, x: Value, dim: int, start: int, limit: int, step: int = 1) -> Value:
        """Static slice of one dim."""
        lo, hi, st = [0] * x.rank, list(x.shape), [1] * x.rank
        lo[dim], hi[dim], st[dim] = start, limit, step
        return self.slice(x, lo, hi, st)

    def dynamic_slice(self, x: Value, starts: Sequence[Value], sizes: Sequence[int]) -> Value:
        """Window of ``sizes`` at ``starts`` (one rank-0 integer a dim). XLA clamps the starts silently."""
        if not x.rank:
            return x
        t = TensorType(tuple(sizes), x.dtype)
        return self._one("dynamic_slice", [x, *starts], t, f"slice_sizes = {_array(sizes)}")

    def dynamic_update_slice(self, x: Value, update: Value, starts: Sequence[Value]) -> Value:
        """``x`` with the window at ``starts`` replaced by ``update``."""
        return self._one("dynamic_update_slice", [x, update, *starts], x.type) if x.rank else update

    def concatenate(self, xs: Sequence[Value], dim: int) -> Value:
        """Concatenation along ``dim``; all values have one dtype."""
        if len(xs) == 1:
            return xs[0]
        shape = list(xs[0].shape)
        shape[dim] = sum(x.shape[dim] for x in xs)
        return self._one("concatenate", xs, TensorType(tuple(shape), xs[0].dtype), f"dimension = {dim} : i64")

    def pad(
        self, x: Value, value: Value, low: Sequence[int], high: Sequence[int], interior: Sequence[int] | None = None
    ) -> Value:
        """Pads with rank-0 ``value``; negative ``low``/``high`` crop; ``interior`` goes between elements."""
        interior = [0] * x.rank if interior is None else interior
        shape = tuple(
            lo + hi + d + max(d - 1, 0) * mid for d, lo, hi, mid in zip(x.shape, low, high, interior, strict=True)
        )
        attrs = f"edge_padding_high = {_array(high)}, edge_padding_low = {_array(low)}, interior_padding = {_array(interior)}"
        return self._one("pad", [x, value], TensorType(shape, x.dtype), attrs)

    def reverse(self, x: Value, dims: Sequence[int]) -> Value:
        """Flip along ``dims``."""
        return self._one("reverse", [x], x.type, f"dimensions = {_array(dims)}") if len(dims) else x

    # ---- element-wise

    def convert(self, x: Value, dtype: torch.dtype) -> Value:
        """Element conversion as ATen casts: float to bool is ``x != 0``, complex to real drops the imaginary part."""
        if x.dtype == dtype:
            return x
        if dtype == torch.bool:
            return self.compare("NE", x, self.constant(0, x.dtype, x.shape))
        if x.dtype.is_complex and not dtype.is_complex:
            return self.convert(self.real(x), dtype)
        if x.dtype.is_floating_point and dtype == torch.uint8:  # C casts through a signed type: -1.0 is 255
            x = self._one("convert", [x], TensorType(x.shape, torch.int64))
        if dtype == torch.float8_e4m3fn:  # XLA makes NaN of what is too large, ATen the largest number
            x = self.convert(x, torch.float32)
            limits = [self.constant(v, x.dtype, x.shape) for v in (-448, 448)]
            x = self.minimum(self.maximum(x, limits[0]), limits[1])
        elif dtype == torch.float8_e8m0fnu:  # powers of two: ATen drops the sign and makes the smallest one of 0
            bits = self.bitcast(self.convert(x, torch.float32), torch.uint32)  # float ops would flush 2**-127
            bits = self.and_(bits, self.constant(0x7FFFFFFF, bits.dtype, bits.shape))
            x = self.bitcast(self.maximum(bits, self.constant(0x00400000, bits.dtype, bits.shape)), torch.float32)
        return self._one("convert", [x], TensorType(x.shape, dtype))

    def bitcast(self, x: Value, dtype: torch.dtype) -> Value:
        """Reinterpret the bits; a change of width adds or removes a last dim. Not for bool or complex."""
        a, b = x.dtype.itemsize, dtype.itemsize
        shape = x.shape if a == b else (*x.shape, a // b) if a > b else x.shape[:-1]
        return x if x.dtype == dtype else self._one("bitcast_convert", [x], TensorType(shape, dtype))

    def unary(self, op: str, x: Value) -> Value:
        """Any unary op of one type, for example ``exponential``, ``negate``, ``cosine``, ``not``."""
        return self._one(op, [x], x.type)

    def binary(self, op: str, x: Value, y: Value) -> Value:
        """Any binary op of one type, for example ``add``, ``and``, ``shift_left``, ``atan2``."""
        assert x.type == y.type, (op, x.type, y.type)
        return self._one(op, [x, y], x.type)

    def add(self, x: Value, y: Value) -> Value:
        return self.binary("or" if x.dtype == torch.bool else "add", x, y)

    def sub(self, x: Value, y: Value) -> Value:
        return self.binary("subtract", x, y)

    def mul(self, x: Value, y: Value) -> Value:
        return self.binary("and" if x.dtype == torch.bool else "multiply", x, y)

    def div(self, x: Value, y: Value) -> Value:
        return self.binary("divide", x, y)

    def maximum(self, x: Value, y: Value) -> Value:
        return self.binary("maximum", x, y)

    def minimum(self, x: Value, y: Value) -> Value:
        return self.binary("minimum", x, y)

    def and_(self, x: Value, y: Value) -> Value:
        return self.binary("and", x, y)

    def or_(self, x: Value, y: Value) -> Value:
        return self.binary("or", x, y)

    def not_(self, x: Value) -> Value:
        return self.unary("not", x)

    def neg(self, x: Value) -> Value:
        return self.unary("negate", x)

    def compare(self, direction: str, x: Value, y: Value, *, total_order: bool = False) -> Value:
        """``direction`` is EQ, NE, LT, LE, GT or GE. ``total_order``: -NaN < -inf < … < -0 < 0 < … < inf < NaN."""
        assert x.type == y.type, (direction, x.type, y.type)
        if x.dtype.is_floating_point or x.dtype.is_complex:
            kind = "TOTALORDER" if total_order else "FLOAT"
        else:
            kind = "UNSIGNED" if x.dtype in UNSIGNED else "SIGNED"
        attrs = (
            f"compare_type = #stablehlo<comparison_type {kind}>, "
            f"comparison_direction = #stablehlo<comparison_direction {direction}>"
        )
        return self._one("compare", [x, y], TensorType(x.shape, torch.bool), attrs)

    def select(self, pred: Value, on_true: Value, on_false: Value) -> Value:
        """Element-wise choice; ``pred`` is bool, of the same shape or rank 0."""
        assert on_true.type == on_false.type, (on_true.type, on_false.type)
        return self._one("select", [pred, on_true, on_false], on_true.type)

    def complex(self, re: Value, im: Value) -> Value:
        """A complex value from two float32 or float64 parts."""
        dtype = torch.complex128 if re.dtype == torch.float64 else torch.complex64
        return self._one("complex", [re, im], TensorType(re.shape, dtype))

    def real(self, x: Value) -> Value:
        return self._part("real", x)

    def imag(self, x: Value) -> Value:
        return self._part("imag", x)

    def _part(self, op: str, x: Value) -> Value:
        dtype = torch.float64 if x.dtype == torch.complex128 else torch.float32
        return self._one(op, [x], TensorType(x.shape, dtype))

    def is_finite(self, x: Value) -> Value:
        return self._one("is_finite", [x], TensorType(x.shape, torch.bool))

    def is_nan(self, x: Value) -> Value:
        return self.compare("NE", x, x)

    # ---- products

    def dot_general(
        self,
        x: Value,
        y: Value,
        *,
        batch: tuple[Sequence[int], Sequence[int]] = ((), ()),
        contract: tuple[Sequence[int], Sequence[int]],
        precision: str = "HIGHEST",
        out_dtype: torch.dtype | None = None,
    ) -> Value:
        """Product: result dims are batch, then the rest of ``x``, then the rest of ``y``.

        ``precision`` is DEFAULT, HIGH or HIGHEST (``cx.precision``). ``out_dtype`` accumulates in another dtype.
        """
        rest_x = [d for i, d in enumerate(x.shape) if i not in batch[0] and i not in contract[0]]
        rest_y = [d for i, d in enumerate(y.shape) if i not in batch[1] and i not in contract[1]]
        t = TensorType((*(x.shape[i] for i in batch[0]), *rest_x, *rest_y), out_dtype or x.dtype)
        dims = (
            f"lhs_batching_dimensions = {list(batch[0])}, rhs_batching_dimensions = {list(batch[1])}, "
            f"lhs_contracting_dimensions = {list(contract[0])}, rhs_contracting_dimensions = {list(contract[1])}"
        )
        attrs = f"dot_dimension_numbers = #stablehlo.dot<{dims}>, {_precision(precision)}"
        return self._one("dot_general", [x, y], t, attrs)

    def convolution(
        self,
        x: Value,
        w: Value,
        out_shape: Sequence[int],
        *,
        dims: str,
        stride: Sequence[int],
        padding: Sequence[tuple[int, int]],
        lhs_dilation: Sequence[int],
        rhs_dilation: Sequence[int],
        feature_groups: int = 1,
        batch_groups: int = 1,
        reverse: bool = False,
        precision: str = "HIGHEST",
        out_dtype: torch.dtype | None = None,
    ) -> Value:
        """Convolution; ``dims`` as StableHLO writes it: ``[b, f, 0, 1]x[o, i, 0, 1]->[b, f, 0, 1]``."""
        flags = ", ".join(["true" if reverse else "false"] * len(stride))
        attrs = (
            f"batch_group_count = {batch_groups} : i64, dimension_numbers = #stablehlo.conv<{dims}>, "
            f"feature_group_count = {feature_groups} : i64, lhs_dilation = {_array(lhs_dilation)}, "
            f"padding = {_pairs(padding)}, {_precision(precision)}, rhs_dilation = {_array(rhs_dilation)}, "
            f"window_reversal = array<i1{': ' + flags if flags else ''}>, window_strides = {_array(stride)}"
        )
        return self._one("convolution", [x, w], TensorType(tuple(out_shape), out_dtype or x.dtype), attrs)

    # ---- reductions and windows

    def reduce(self, xs: Sequence[Value], inits: Sequence[Value], dims: Sequence[int], body: Body) -> tuple[Value, ...]:
        """Reduce several values of one shape together. ``body(lefts, rights)`` gets and returns rank-0 values."""
        n = len(xs)
        scalars = [TensorType((), x.dtype) for x in xs]
        region = self.region([*scalars, *scalars], lambda p: body(p[:n], p[n:]))
        shape = tuple(d for i, d in enumerate(xs[0].shape) if i not in dims)
        outs = [TensorType(shape, x.dtype) for x in xs]
        return self.op("stablehlo.reduce", [*xs, *inits], outs, f"dimensions = {_array(dims)}", [region])

    def reduce_op(self, op: str, x: Value, init: Number, dims: Sequence[int]) -> Value:
        """Reduce one value with a binary op (``add``, ``multiply``, ``maximum``, ``minimum``, ``and``, ``or``)."""
        one = self.constant(init, x.dtype)
        return self.reduce([x], [one], dims, lambda left, right: [self.binary(op, left[0], right[0])])[0]

    def reduce_window(
        self,
        xs: Sequence[Value],
        inits: Sequence[Value],
        body: Body,
        *,
        window: Sequence[int],
        stride: Sequence[int] | None = None,
        padding: Sequence[tuple[int, int]] | None = None,
        base_dilation: Sequence[int] | None = None,
        window_dilation: Sequence[int] | None = None,
    ) -> tuple[Value, ...]:
        """Sliding-window reduction over all dims (give 1 for the dims that do not slide)."""
        rank = xs[0].rank
        ones = [1] * rank
        stride, base, dil = stride or ones, base_dilation or ones, window_dilation or ones
        pads = padding or [(0, 0)] * rank
        shape = []
        for d, w, s, (lo, hi), bd, wd in zip(xs[0].shape, window, stride, pads, base, dil, strict=True):
            extent = ((d - 1) * bd + 1 if d else 0) + lo + hi
            span = (w - 1) * wd + 1
            shape.append((extent - span) // s + 1 if extent >= span else 0)
        n = len(xs)
        scalars = [TensorType((), x.dtype) for x in xs]
        region = self.region([*scalars, *scalars], lambda p: body(p[:n], p[n:]))
        attrs = (
            f"base_dilations = {_array(base)}, padding = {_pairs(pads)}, window_dilations = {_array(dil)}, "
            f"window_dimensions = {_array(window)}, window_strides = {_array(stride)}"
        )
        outs = [TensorType(tuple(shape), x.dtype) for x in xs]
        return self.op("stablehlo.reduce_window", [*xs, *inits], outs, attrs, [region])

    def sort(
        self, xs: Sequence[Value], dim: int, less: Callable[[Sequence[Value], Sequence[Value]], Value], *, stable: bool
    ) -> tuple[Value, ...]:
        """Sort values together along ``dim``. ``less(lefts, rights)`` returns a rank-0 bool."""
        n = len(xs)
        types = [TensorType((), x.dtype) for x in xs for _ in range(2)]
        region = self.region(types, lambda p: [less([p[2 * i] for i in range(n)], [p[2 * i + 1] for i in range(n)])])
        attrs = f"dimension = {dim} : i64, is_stable = {'true' if stable else 'false'}"
        return self.op("stablehlo.sort", xs, [x.type for x in xs], attrs, [region])

    # ---- indexing

    def gather(
        self,
        x: Value,
        indices: Value,
        *,
        offset_dims: Sequence[int],
        collapsed: Sequence[int],
        start_index_map: Sequence[int],
        index_vector_dim: int,
        slice_sizes: Sequence[int],
        batch: tuple[Sequence[int], Sequence[int]] = ((), ()),
        sorted_: bool = False,
    ) -> Value:
        """StableHLO gather. XLA clamps indices silently: rules that must not clamp select afterwards."""
        batch_shape = [d for i, d in enumerate(indices.shape) if i != index_vector_dim]
        offsets = [s for i, s in enumerate(slice_sizes) if i not in collapsed and i not in batch[0]]
        rank = len(batch_shape) + len(offsets)
        off, bat = iter(offsets), iter(batch_shape)
        shape = tuple(next(off) if i in offset_dims else next(bat) for i in range(rank))
        numbers = (
            f"offset_dims = {list(offset_dims)}, collapsed_slice_dims = {list(collapsed)}, "
            f"operand_batching_dims = {list(batch[0])}, start_indices_batching_dims = {list(batch[1])}, "
            f"start_index_map = {list(start_index_map)}, index_vector_dim = {index_vector_dim}"
        )
        attrs = (
            f"dimension_numbers = #stablehlo.gather<{numbers}>, "
            f"indices_are_sorted = {'true' if sorted_ else 'false'}, slice_sizes = {_array(slice_sizes)}"
        )
        return self._one("gather", [x, indices], TensorType(shape, x.dtype), attrs)

    def scatter(
        self,
        xs: Sequence[Value],
        indices: Value,
        updates: Sequence[Value],
        body: Body,
        *,
        update_window_dims: Sequence[int],
        inserted: Sequence[int],
        scatter_dims: Sequence[int],
        index_vector_dim: int,
        batch: tuple[Sequence[int], Sequence[int]] = ((), ()),
        unique: bool = False,
        sorted_: bool = False,
    ) -> tuple[Value, ...]:
        """StableHLO scatter; ``body(olds, news)`` combines. An index out of bounds is skipped."""
        n = len(xs)
        scalars = [TensorType((), x.dtype) for x in xs]
        region = self.region([*scalars, *scalars], lambda p: body(p[:n], p[n:]))
        numbers = (
            f"update_window_dims = {list(update_window_dims)}, inserted_window_dims = {list(inserted)}, "
            f"input_batching_dims = {list(batch[0])}, scatter_indices_batching_dims = {list(batch[1])}, "
            f"scatter_dims_to_operand_dims = {list(scatter_dims)}, index_vector_dim = {index_vector_dim}"
        )
        attrs = (
            f"indices_are_sorted = {'true' if sorted_ else 'false'}, "
            f"scatter_dimension_numbers = #stablehlo.scatter<{numbers}>, "
            f"unique_indices = {'true' if unique else 'false'}"
        )
        return self.op("stablehlo.scatter", [*xs, indices, *updates], [x.type for x in xs], attrs, [region])

    # ---- control flow, linear algebra, the rest

    def while_(
        self,
        inits: Sequence[Value],
        cond: Callable[[Sequence[Value]], Value],
        body: Callable[[Sequence[Value]], Sequence[Value]],
    ) -> tuple[Value, ...]:
        """Loop while ``cond(state)`` (a rank-0 bool) holds; ``body`` maps state to state."""
        types = [v.type for v in inits]
        regions = [self.region(types, lambda p: [cond(p)]), self.region(types, body)]
        return self.op("stablehlo.while", inits, types, "", regions)

    def if_(
        self,
        pred: Value,
        on_true: Callable[[], Sequence[Value]],
        on_false: Callable[[], Sequence[Value]],
        types: Sequence[TensorType],
    ) -> tuple[Value, ...]:
        """Run one of two regions; both return values of ``types``."""
        regions = [self.region([], lambda _: on_true()), self.region([], lambda _: on_false())]
        return self.op("stablehlo.if", [pred], types, "", regions)

    def cholesky(self, x: Value, *, lower: bool) -> Value:
        return self._one("cholesky", [x], x.type, f"lower = {'true' if lower else 'false'}")

    def triangular_solve(
        self, a: Value, b: Value, *, left: bool, lower: bool, unit: bool, transpose: str = "NO_TRANSPOSE"
    ) -> Value:
        """``transpose`` is NO_TRANSPOSE, TRANSPOSE or ADJOINT. Batch dims of ``a`` and ``b`` are equal."""
        flags = {"left_side": left, "lower": lower, "unit_diagonal": unit}
        attrs = ", ".join(f"{k} = {'true' if v else 'false'}" for k, v in flags.items())
        return self._one(
            "triangular_solve", [a, b], b.type, f"{attrs}, transpose_a = #stablehlo<transpose {transpose}>"
        )

    def fft(self, x: Value, kind: str, lengths: Sequence[int], result: TensorType) -> Value:
        """``kind`` is FFT, IFFT, RFFT or IRFFT over the last ``len(lengths)`` dims."""
        return self._one("fft", [x], result, f"fft_length = {_array(lengths)}, fft_type = #stablehlo<fft_type {kind}>")

    def custom_call(
        self, target: str, operands: Sequence[Value], results: Sequence[TensorType], backend_config: str = ""
    ) -> tuple[Value, ...]:
        """A call the compiler expands itself (for example ``Qr``, ``Eigh``)."""
        attrs = f'api_version = 1 : i32, backend_config = "{backend_config}", call_target_name = "{target}"'
        return self.op("stablehlo.custom_call", operands, results, attrs)

    def host_call(self, target: str, operands: Sequence[Value], result: TensorType, integers: Sequence[int]) -> Value:
        """A call of one of our FFI handlers (csrc/ffi/) in the plugin's process. Arrays are row-major."""

        def layouts(types: Sequence[TensorType]) -> str:
            texts = (f"dense<{list(reversed(range(len(t.shape))))}> : tensor<{len(t.shape)}xindex>" for t in types)
            return "[" + ", ".join(t.replace("dense<[]>", "dense<>") for t in texts) + "]"

        attrs = (
            f'api_version = 4 : i32, backend_config = {{integers = {_array(integers)}}}, call_target_name = "{target}", '
            f"operand_layouts = {layouts([x.type for x in operands])}, result_layouts = {layouts([result])}"
        )
        return self.op("stablehlo.custom_call", operands, [result], attrs)[0]


def _precision(precision: str) -> str:
    one = f"#stablehlo<precision {precision}>"
    return f"precision_config = [{one}, {one}]"


__all__ = ["Builder", "Number", "Value", "element_type", "literal"]
