"""Ops over lists of tensors, and the fused optimizer steps: each tensor gets the rule of the plain op.

The lists of one call are one program, so XLA fuses each tensor's step into one loop and a launch is paid once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch._ops import OpOverload

from torch_tpu.ir.builder import Value
from torch_tpu.ir.types import compute_dtype
from torch_tpu.lowering import elementary, elementwise, gamma, special  # noqa: F401  the rules looked up below
from torch_tpu.lowering.expr import Expr, expr, where
from torch_tpu.lowering.promote import Operand, operand
from torch_tpu.lowering.registry import KEYED, RULES, LowerContext, Rule, ScalarPolicy, lowers, register

aten = torch.ops.aten
Values = list[Value]

UNARY = (
    "abs acos asin atan ceil cos cosh erf erfc exp expm1 floor frac lgamma log log10 log1p log2 neg reciprocal round "
    "rsqrt sigmoid sign sin sinh sqrt tan tanh trunc"
)
# Binary op: the plain op that takes tensor and tensor or number.
BINARY = {
    "add": aten.add.Tensor,
    "sub": aten.sub.Tensor,
    "mul": aten.mul.Tensor,
    "div": aten.div.Tensor,
    "maximum": aten.maximum.default,
    "minimum": aten.minimum.default,
    "clamp_min": aten.maximum.default,
    "clamp_max": aten.minimum.default,
    "pow": aten.pow.Tensor_Tensor,
}


def each(cx: LowerContext, op: OpOverload, *columns: Any, **fixed: Any) -> Values:
    """The rule of ``op`` on the i-th of every column, for result i. A column that is no list is the same for all."""
    rule = RULES[op].rule
    found: Values = []
    for i, out in enumerate(cx.outs):
        args = [column[i] if isinstance(column, (list, tuple)) else column for column in columns]
        found.append(rule(replace(cx, outs=(out,), op=op), *args, **fixed))  # type: ignore[arg-type]
    return found


def _contexts(cx: LowerContext) -> list[LowerContext]:
    return [replace(cx, outs=(out,)) for out in cx.outs]


# ---- plain ops over lists


def _unary(op: OpOverload) -> Rule:
    return lambda cx, self: each(cx, op, self)


for _name in UNARY.split():
    register(getattr(aten, f"_foreach_{_name}").default, _unary(getattr(aten, _name).default))


def _binary_list(op: OpOverload) -> Rule:
    return lambda cx, self, other: each(cx, op, self, other)


def _binary_scalar(op: OpOverload) -> Rule:
    return lambda cx, self, scalar: each(cx, op, self, scalar)


def _binary_scalars(op: OpOverload) -> Rule:
    return lambda cx, self, scalars: each(cx, op, self, scalars)


for _name, _op in BINARY.items():
    _packet = getattr(aten, f"_foreach_{_name}")
    if _name != "pow":  # its parameters have other names
        register(_packet.Scalar, _binary_scalar(_op))
        register(_packet.ScalarList, _binary_scalars(_op))
        if _name not in ("add", "sub"):  # these take alpha
            register(_packet.List, _binary_list(_op))

register(aten._foreach_mul.Tensor, _binary_list(aten.mul.Tensor))
register(aten._foreach_div.Tensor, _binary_list(aten.div.Tensor))


@lowers(aten._foreach_add.List, aten._foreach_add.Tensor, scalars={"alpha": (1,)})
def foreach_add(cx: LowerContext, self: Values, other: Values | Value, alpha: Operand = 1) -> Values:
    return each(cx, aten.add.Tensor, self, other, alpha=alpha)


@lowers(aten._foreach_sub.List, scalars={"alpha": (1,)})
def foreach_sub(cx: LowerContext, self: Values, other: Values, alpha: Operand = 1) -> Values:
    return each(cx, aten.sub.Tensor, self, other, alpha=alpha)


@lowers(aten._foreach_pow.List)
def foreach_pow(cx: LowerContext, self: Values, exponent: Values) -> Values:
    return each(cx, aten.pow.Tensor_Tensor, self, exponent)


_STATIC_EXPONENTS: dict[str, ScalarPolicy] = {"exponent": RULES[aten.pow.Tensor_Scalar].scalars["exponent"]}


@lowers(aten._foreach_pow.Scalar, aten._foreach_pow.ScalarList, scalars=_STATIC_EXPONENTS)
def foreach_pow_scalar(cx: LowerContext, self: Values, exponent: Operand | list[Operand]) -> Values:
    return each(cx, aten.pow.Tensor_Scalar, self, exponent)


@lowers(aten._foreach_pow.ScalarAndTensor)
def foreach_pow_base(cx: LowerContext, self: Operand, exponent: Values) -> Values:
    return each(cx, aten.pow.Scalar, self, exponent)


@lowers(aten._foreach_lerp.List)
def foreach_lerp(cx: LowerContext, self: Values, tensors1: Values, weights: Values) -> Values:
    return each(cx, aten.lerp.Tensor, self, tensors1, weights)


@lowers(aten._foreach_lerp.Scalar, aten._foreach_lerp.ScalarList)
def foreach_lerp_scalar(cx: LowerContext, self: Values, tensors1: Values, weight: Operand | list[Operand]) -> Values:
    return each(cx, aten.lerp.Scalar, self, tensors1, weight)


def _elements(cx: LowerContext, scalars: Value) -> Values:
    """The elements of a rank-1 value as rank-0 values that promote as numbers do."""
    parts = [cx.b.reshape(cx.b.slice(scalars, [i], [i + 1]), ()) for i in range(scalars.shape[0])]
    return [replace(part, wrapped=True) for part in parts]


@lowers(aten._foreach_addcmul.Scalar, scalars={"value": (1,)})
def foreach_addcmul(cx: LowerContext, self: Values, tensor1: Values, tensor2: Values, value: Operand = 1) -> Values:
    return each(cx, aten.addcmul.default, self, tensor1, tensor2, value)


@lowers(aten._foreach_addcmul.ScalarList, aten._foreach_addcmul.Tensor)
def foreach_addcmul_list(
    cx: LowerContext, self: Values, tensor1: Values, tensor2: Values, scalars: Value | list[Operand]
) -> Values:
    values = _elements(cx, scalars) if isinstance(scalars, Value) else scalars
    return each(cx, aten.addcmul.default, self, tensor1, tensor2, values)


@lowers(aten._foreach_addcdiv.Scalar, scalars={"value": (1,)})
def foreach_addcdiv(cx: LowerContext, self: Values, tensor1: Values, tensor2: Values, value: Operand = 1) -> Values:
    return each(cx, aten.addcdiv.default, self, tensor1, tensor2, value)


@lowers(aten._foreach_addcdiv.ScalarList, aten._foreach_addcdiv.Tensor)
def foreach_addcdiv_list(
    cx: LowerContext, self: Values, tensor1: Values, tensor2: Values, scalars: Value | list[Operand]
) -> Values:
    values = _elements(cx, scalars) if isinstance(scalars, Value) else scalars
    return each(cx, aten.addcdiv.default, self, tensor1, tensor2, values)


@lowers(aten._foreach_copy.default)
def foreach_copy(cx: LowerContext, self: Values, src: Values, non_blocking: bool = False) -> Values:
    return each(cx, aten.copy.default, self, src)


@lowers(aten._foreach_zero.default)
def foreach_zero(cx: LowerContext, self: Values) -> Values:
    return each(cx, aten.zero.default, self)


@lowers(aten._foreach_clone.default)
def foreach_clone(cx: LowerContext, self: Values, memory_format: torch.memory_format | None = None) -> Values:
    return self


# ---- norms


def _reduced(x: Expr, op: str, init: float) -> Expr:
    return Expr(x.b, x.b.reduce_op(op, x.v, init, range(x.v.rank)))


def _power_sum(x: Expr, p: float) -> Expr:
    """Sum of |x|**p; of p = 0 the count of non-zeros."""
    if p == 2:
        return _reduced(x * x, "add", 0)
    if p == 0:
        return _reduced(x.ne(0).to(x.dtype), "add", 0)
    return _reduced(x.abs() if p == 1 else x.abs().pow(p), "add", 0)


def _magnitudes(cx: LowerContext, x: Value, dtype: torch.dtype) -> Expr:
    """``x``, or the sizes of its complex elements, in the compute type of the real ``dtype``."""
    size = Expr(cx.b, x).abs() if x.dtype.is_complex else Expr(cx.b, x)
    return size.to(compute_dtype(dtype))


def _norm(x: Expr, p: float) -> Expr:
    if p == math.inf:
        return _reduced(x.abs(), "maximum", 0)
    if p == -math.inf:
        return _reduced(x.abs(), "minimum", math.inf)
    total = _power_sum(x, p)
    if p in (0, 1):
        return total
    return total.sqrt() if p == 2 else total.pow(1 / p)


def _sums(cx: LowerContext, xs: Values, power: float, function: Callable[[Expr, float], Expr]) -> Values:
    pairs = zip(_contexts(cx), xs, strict=True)
    return [one.result(function(_magnitudes(cx, x, one.out.dtype), power).v) for one, x in pairs]


@lowers(aten._foreach_norm.Scalar, scalars={"ord": KEYED})
def foreach_norm(cx: LowerContext, self: Values, ord: float = 2, dtype: torch.dtype | None = None) -> Values:
    return _sums(cx, self, ord, _norm)


@lowers(aten._foreach_powsum.Scalar, scalars={"ord": KEYED})
def foreach_powsum(cx: LowerContext, self: Values, ord: float = 2, dtype: torch.dtype | None = None) -> Values:
    return _sums(cx, self, ord, _power_sum)


@lowers(aten._foreach_max.default)
def foreach_max(cx: LowerContext, self: Values) -> Values:
    found: Values = []
    for x in self:
        info = None if x.dtype == torch.bool else torch.iinfo(x.dtype) if not x.dtype.is_floating_point else None
        low = -math.inf if x.dtype.is_floating_point else info.min if info else 0
        found.append(cx.b.reduce_op("maximum", x, low, range(x.rank)))
    return found


# ---- fused optimizer steps


def _scaled(cx: LowerContext, grad: Value, scale: Value | None, maximize: bool, like: Value) -> tuple[Expr, Value]:
    """The gradient to step along, and the one to store: unscaled, in its own dtype."""
    dtype = compute_dtype(like.dtype)
    g = Expr(cx.b, cx.b.convert(grad, compute_dtype(grad.dtype)))
    stored = grad
    if scale is not None:
        g = g / Expr(cx.b, cx.b.convert(cx.b.reshape(scale, ()), g.dtype))
        stored = cx.b.convert(g.v, grad.dtype)
    g = g.to(dtype)
    return (-g if maximize else g), stored


class _Step:
    """Results of a fused step: new values, kept back where ``found_inf`` says that the gradients are broken."""

    def __init__(self, cx: LowerContext, found_inf: Value | None, lists: int) -> None:
        self.cx = cx
        self.columns: list[Values] = [[] for _ in range(lists)]
        self.skip: Value | None = None
        if found_inf is not None:
            flat = cx.b.reshape(found_inf, ())
            self.skip = cx.b.compare("EQ", flat, cx.b.constant(1, flat.dtype))

    def put(self, column: int, new: Expr | Value, old: Value) -> None:
        b = self.cx.b
        value = b.convert(new.v if isinstance(new, Expr) else new, old.dtype)
        self.columns[column].append(value if self.skip is None else b.select(self.skip, old, value))

    def results(self) -> Values:
        return [value for column in self.columns for value in column]


def _of(cx: LowerContext, x: Operand, like: Expr, shape: Sequence[int] = ()) -> Expr:
    """A scalar, or one tensor of the state, in the compute type of ``like``."""
    return Expr(cx.b, operand(cx, x, like.dtype, x.shape if isinstance(x, Value) else shape))


def _is_zero(x: Operand) -> bool:
    return not isinstance(x, Value) and x == 0


_ADAM_SCALARS: dict[str, ScalarPolicy] = {"weight_decay": (0,), "beta2": KEYED}


def _adam_denominator(step: Expr, second: Expr, beta2: float, eps: Expr) -> Expr:
    """sqrt(v / (1 - beta2**t)) + eps. 1 - beta2**t comes from the log: beta2 in float32 costs five digits of it."""
    correction = -((step * math.log(beta2)).expm1()) if beta2 > 0 else step.const(1)
    return second.sqrt() / correction.sqrt() + eps


def _adam(*, decoupled: bool) -> Rule:
    def rule(
        cx: LowerContext,
        self: Values,
        grads: Values,
        exp_avgs: Values,
        exp_avg_sqs: Values,
        max_exp_avg_sqs: Values,
        state_steps: Values,
        lr: Operand,
        beta1: Operand,
        beta2: float,
        weight_decay: Operand,
        eps: Operand,
        amsgrad: bool,
        maximize: bool,
        grad_scale: Value | None = None,
        found_inf: Value | None = None,
    ) -> Values:
        step = _Step(cx, found_inf, 5)
        for i, param in enumerate(self):
            g, stored = _scaled(cx, grads[i], grad_scale, maximize, param)
            p = Expr(cx.b, cx.b.convert(param, g.dtype))
            rate, b1, count = (_of(cx, x, p) for x in (lr, beta1, state_steps[i]))
            if not _is_zero(weight_decay):
                decay = _of(cx, weight_decay, p)
                if decoupled:
                    p = p * (1 - rate * decay)
                else:
                    g = g + p * decay
            first, second = _of(cx, exp_avgs[i], p), _of(cx, exp_avg_sqs[i], p)
            first = first + (g - first) * (1 - b1)
            second = beta2 * second + (1 - beta2) * (g * g)
            largest = second
            if amsgrad:
                largest = _of(cx, max_exp_avg_sqs[i], p).maximum(second)
                step.put(4, largest, max_exp_avg_sqs[i])
            size = rate / (1 - b1.pow(count))
            p = p - size * (first / _adam_denominator(count, largest, beta2, _of(cx, eps, p)))
            step.put(0, p, param)
            step.put(1, stored, grads[i])
            step.put(2, first, exp_avgs[i])
            step.put(3, second, exp_avg_sqs[i])
        if not amsgrad:
            step.columns[4] = list(max_exp_avg_sqs)
        return step.results()

    return rule


for _name, _decoupled in (("_fused_adam", False), ("_fused_adamw", True)):
    for _overload in ("default", "tensor_lr"):
        register(getattr(getattr(aten, _name), _overload), _adam(decoupled=_decoupled), scalars=_ADAM_SCALARS)


@lowers(aten._fused_sgd.default, aten._fused_sgd.tensor_lr, scalars={"weight_decay": (0,), "momentum": (0,)})
def fused_sgd(
    cx: LowerContext,
    self: Values,
    grads: Values,
    momentum_buffer_list: Values,
    weight_decay: Operand,
    momentum: Operand,
    lr: Operand,
    dampening: Operand,
    nesterov: bool,
    maximize: bool,
    is_first_step: bool,
    grad_scale: Value | None = None,
    found_inf: Value | None = None,
) -> Values:
    step = _Step(cx, found_inf, 3)
    for i, param in enumerate(self):
        g, stored = _scaled(cx, grads[i], grad_scale, maximize, param)
        p = Expr(cx.b, cx.b.convert(param, g.dtype))
        if not _is_zero(weight_decay):
            g = g + p * _of(cx, weight_decay, p)
        if not _is_zero(momentum):
            m = _of(cx, momentum, p)
            old = momentum_buffer_list[i]
            buffer = g if is_first_step else m * _of(cx, old, p) + (1 - _of(cx, dampening, p)) * g
            g = g + m * buffer if nesterov else buffer
            step.put(2, buffer, old)
        step.put(0, p - _of(cx, lr, p) * g, param)
        step.put(1, stored, grads[i])
    if not step.columns[2]:
        step.columns[2] = list(momentum_buffer_list)
    return step.results()


@lowers(aten._fused_adagrad.default, aten._fused_adagrad.tensor_lr, scalars={"weight_decay": (0,)})
def fused_adagrad(
    cx: LowerContext,
    self: Values,
    grads: Values,
    state_sums: Values,
    state_steps: Values,
    lr: Operand,
    lr_decay: Operand,
    weight_decay: Operand,
    eps: Operand,
    maximize: bool,
    grad_scale: Value | None = None,
    found_inf: Value | None = None,
) -> Values:
    step = _Step(cx, found_inf, 3)
    for i, param in enumerate(self):
        g, stored = _scaled(cx, grads[i], grad_scale, maximize, param)
        p = Expr(cx.b, cx.b.convert(param, g.dtype))
        if not _is_zero(weight_decay):
            g = g + p * _of(cx, weight_decay, p)
        rate = _of(cx, lr, p) / (1 + (_of(cx, state_steps[i], p) - 1) * _of(cx, lr_decay, p))
        total = _of(cx, state_sums[i], p) + g * g
        step.put(0, p - rate * g / (total.sqrt() + _of(cx, eps, p)), param)
        step.put(1, stored, grads[i])
        step.put(2, total, state_sums[i])
    return step.results() + (list(state_steps) if cx.op is aten._fused_adagrad.default else [])


# ---- gradient scaler


@lowers(aten._amp_foreach_non_finite_check_and_unscale.default)
def amp_unscale(cx: LowerContext, self: Values, found_inf: Value, inv_scale: Value) -> Values:
    b = cx.b
    broken = b.constant(False, torch.bool)
    scaled: Values = []
    for grad in self:
        g = Expr(b, b.convert(grad, compute_dtype(grad.dtype)))
        finite = b.reduce_op("and", g.is_finite().v, True, range(grad.rank))
        broken = b.or_(broken, b.not_(finite))
        factor = Expr(b, b.convert(b.reshape(inv_scale, ()), g.dtype))
        scaled.append(b.convert((g * factor).v, grad.dtype))
    flag = b.broadcast_to(broken, found_inf.shape)
    return [*scaled, b.select(flag, b.constant(1, found_inf.dtype, found_inf.shape), found_inf)]


@lowers(aten._amp_update_scale.default)
def amp_update_scale(
    cx: LowerContext,
    self: Value,
    growth_tracker: Value,
    found_inf: Value,
    scale_growth_factor: Operand,
    scale_backoff_factor: Operand,
    growth_interval: int,
) -> tuple[Value, Value]:
    scale, tracker = Expr(cx.b, self), Expr(cx.b, growth_tracker)
    broken = Expr(cx.b, cx.b.reshape(found_inf, self.shape)).ne(0)
    grown = scale * expr(cx, scale_growth_factor, scale.dtype)
    due = (tracker + 1).eq(growth_interval)
    due_scale = where(due & grown.is_finite(), grown, scale)
    new_scale = where(broken, scale * expr(cx, scale_backoff_factor, scale.dtype), due_scale)
    return new_scale.v, where(broken | due, 0, tracker + 1).v
