"""Losses, forward and backward. Composite ones (cross entropy, kl_div, l1) are made of these and of other families.

A loss is computed element-wise in the compute type, then reduced as ``reduction`` says (0 none, 1 mean, 2 sum).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from torch_tpu.ir.builder import Value
from torch_tpu.lowering.promote import Operand, operand
from torch_tpu.lowering.reduce import divided, finish, first_position, kept, reduce_sum
from torch_tpu.lowering.registry import KEYED, LowerContext, lowers

aten = torch.ops.aten

_MEAN = 1
_SUM = 2
# Up to this many classes a masked sum over them is cheaper than a gather.
_FEW_CLASSES = 32


# ---- helpers


def _full(cx: LowerContext, x: Operand, like: Value) -> Value:
    """``x`` in the dtype and shape of ``like``."""
    return operand(cx, x, like.dtype, like.shape)


def _together(cx: LowerContext, *xs: Value, dtype: torch.dtype | None = None) -> list[Value]:
    """``xs`` broadcast against each other, in ``dtype`` (default: the compute type)."""
    shape = torch.broadcast_shapes(*(x.shape for x in xs))
    return [cx.b.broadcast_to(cx.b.convert(x, dtype or cx.compute_dtype), shape) for x in xs]


def _reduced(cx: LowerContext, loss: Value, reduction: int) -> Value:
    if reduction in (_MEAN, _SUM):
        n = loss.type.numel
        loss = reduce_sum(cx, loss, range(loss.rank))
        loss = divided(cx, loss, n) if reduction == _MEAN else loss
    return finish(cx, loss)


def _scaled_grad(cx: LowerContext, grad_output: Value, like: Value, reduction: int) -> Value:
    """What one element of the unreduced loss, shaped as ``like``, receives."""
    g = cx.b.convert(grad_output, like.dtype)
    if reduction == _MEAN:
        g = divided(cx, g, like.type.numel)
    return cx.b.broadcast_to(g, like.shape)


# ---- element-wise losses


@lowers(aten.mse_loss.default)
def mse_loss(cx: LowerContext, self: Value, target: Value, reduction: int = 1) -> Value:
    x, t = _together(cx, self, target)
    d = cx.b.sub(x, t)
    return _reduced(cx, cx.b.mul(d, d), reduction)


@lowers(aten.mse_loss_backward.default)
def mse_loss_backward(cx: LowerContext, grad_output: Value, self: Value, target: Value, reduction: int) -> Value:
    b = cx.b
    x, t = _together(cx, self, target)
    d = b.sub(x, t)
    return finish(cx, b.mul(b.add(d, d), _scaled_grad(cx, grad_output, d, reduction)))


@lowers(aten.smooth_l1_loss.default)
def smooth_l1_loss(cx: LowerContext, self: Value, target: Value, reduction: int = 1, beta: Operand = 1.0) -> Value:
    b = cx.b
    x, t = _together(cx, self, target)
    z = b.unary("abs", b.sub(x, t))
    half, edge = b.constant(0.5, z.dtype, z.shape), _full(cx, beta, z)
    square = b.div(b.mul(half, b.mul(z, z)), edge)
    line = b.sub(z, b.mul(half, edge))
    return _reduced(cx, b.select(b.compare("LT", z, edge), square, line), reduction)


@lowers(aten.smooth_l1_loss_backward.default)
def smooth_l1_loss_backward(
    cx: LowerContext, grad_output: Value, self: Value, target: Value, reduction: int, beta: Operand
) -> Value:
    b = cx.b
    x, t = _together(cx, self, target)
    d = b.sub(x, t)
    g, edge = _scaled_grad(cx, grad_output, d, reduction), _full(cx, beta, d)
    inner = b.div(b.mul(d, g), edge)
    upper = b.select(b.compare("GE", d, edge), g, inner)
    return finish(cx, b.select(b.compare("LE", d, b.neg(edge)), b.neg(g), upper))


@lowers(aten.huber_loss.default)
def huber_loss(cx: LowerContext, self: Value, target: Value, reduction: int = 1, delta: Operand = 1.0) -> Value:
    b = cx.b
    x, t = _together(cx, self, target)
    z = b.unary("abs", b.sub(x, t))
    half, edge = b.constant(0.5, z.dtype, z.shape), _full(cx, delta, z)
    square = b.mul(half, b.mul(z, z))
    line = b.mul(edge, b.sub(z, b.mul(half, edge)))
    return _reduced(cx, b.select(b.compare("LE", z, edge), square, line), reduction)


@lowers(aten.huber_loss_backward.default)
def huber_loss_backward(
    cx: LowerContext, grad_output: Value, self: Value, target: Value, reduction: int, delta: Operand
) -> Value:
    b = cx.b
    x, t = _together(cx, self, target)
    d = b.sub(x, t)
    edge = _full(cx, delta, d)
    clipped = b.maximum(b.minimum(d, edge), b.neg(edge))
    return finish(cx, b.mul(clipped, _scaled_grad(cx, grad_output, d, reduction)))


@lowers(aten.binary_cross_entropy.default)
def binary_cross_entropy(
    cx: LowerContext, self: Value, target: Value, weight: Value | None = None, reduction: int = 1
) -> Value:
    b = cx.b
    x, t = _together(cx, self, target)
    one, floor = b.constant(1, x.dtype, x.shape), b.constant(-100, x.dtype, x.shape)
    no = b.mul(b.sub(t, one), b.maximum(b.unary("log_plus_one", b.neg(x)), floor))
    loss = b.sub(no, b.mul(t, b.maximum(b.unary("log", x), floor)))
    loss = loss if weight is None else b.mul(loss, _full(cx, weight, loss))
    return _reduced(cx, loss, reduction)


@lowers(aten.binary_cross_entropy_backward.default)
def binary_cross_entropy_backward(
    cx: LowerContext,
    grad_output: Value,
    self: Value,
    target: Value,
    weight: Value | None = None,
    reduction: int = 1,
) -> Value:
    b = cx.b
    x, t = _together(cx, self, target)
    one, tiny = b.constant(1, x.dtype, x.shape), b.constant(1e-12, x.dtype, x.shape)
    slope = b.div(b.sub(x, t), b.maximum(b.mul(b.sub(one, x), x), tiny))
    grad = b.mul(slope, _scaled_grad(cx, grad_output, x, reduction))
    return finish(cx, grad if weight is None else b.mul(grad, _full(cx, weight, grad)))


@lowers(aten.binary_cross_entropy_with_logits.default)
def binary_cross_entropy_with_logits(
    cx: LowerContext,
    self: Value,
    target: Value,
    weight: Value | None = None,
    pos_weight: Value | None = None,
    reduction: int = 1,
) -> Value:
    b = cx.b
    x, t = _together(cx, self, target)
    one, zero = b.constant(1, x.dtype, x.shape), b.constant(0, x.dtype, x.shape)
    # -log(sigmoid(x)) without overflow
    softplus = b.add(
        b.unary("log_plus_one", b.unary("exponential", b.neg(b.unary("abs", x)))), b.maximum(b.neg(x), zero)
    )
    if pos_weight is not None:
        softplus = b.mul(b.add(b.mul(b.sub(_full(cx, pos_weight, x), one), t), one), softplus)
    loss = b.add(b.mul(b.sub(one, t), x), softplus)
    loss = loss if weight is None else b.mul(loss, _full(cx, weight, loss))
    return _reduced(cx, loss, reduction)


@lowers(aten.soft_margin_loss.default)
def soft_margin_loss(cx: LowerContext, self: Value, target: Value, reduction: int = 1) -> Value:
    b = cx.b
    x, t = _together(cx, self, target)
    return _reduced(cx, b.unary("log_plus_one", b.unary("exponential", b.neg(b.mul(x, t)))), reduction)


@lowers(aten.soft_margin_loss_backward.default)
def soft_margin_loss_backward(
    cx: LowerContext, grad_output: Value, self: Value, target: Value, reduction: int
) -> Value:
    b = cx.b
    x, t = _together(cx, self, target)
    slope = b.mul(b.neg(t), b.unary("logistic", b.neg(b.mul(x, t))))
    return finish(cx, b.mul(slope, _scaled_grad(cx, grad_output, x, reduction)))


# ---- negative log likelihood; classes are dim 1 of the input, samples are all other dims


@dataclass(frozen=True, slots=True)
class _Samples:
    """Scores with classes in dim 1, targets shaped as the samples, and which of them count."""

    x: Value
    target: Value
    valid: Value

    @property
    def sample_dims(self) -> list[int]:
        return kept(self.x, [1])


def _samples(cx: LowerContext, self: Value, target: Value, ignore_index: int | None = None) -> _Samples:
    b = cx.b
    x = b.reshape(self, (1, self.type.numel)) if self.rank < 2 else self
    shape = (x.shape[0], *x.shape[2:])
    t = b.reshape(target, shape)
    if ignore_index is None:
        valid = b.constant(True, torch.bool, shape)
    else:
        wide = b.convert(t, torch.int64)
        valid = b.compare("NE", wide, b.constant(ignore_index, torch.int64, shape))
    return _Samples(x, b.convert(t, torch.int32), valid)


def _is_class(cx: LowerContext, s: _Samples) -> Value:
    """One-hot targets, shaped as the scores."""
    b = cx.b
    wide = b.broadcast_in_dim(s.target, s.x.shape, s.sample_dims)
    return b.compare("EQ", b.iota(s.x.shape, 1, torch.int32), wide)


def _picked(cx: LowerContext, s: _Samples) -> Value:
    """Each sample's score for its target."""
    b, x = cx.b, s.x
    if x.shape[1] <= _FEW_CLASSES:
        return reduce_sum(cx, b.select(_is_class(cx, s), x, b.constant(0, x.dtype, x.shape)), [1])
    return b.gather(
        x,
        b.reshape(s.target, (*s.target.shape, 1)),
        offset_dims=[],
        collapsed=[1],
        start_index_map=[1],
        index_vector_dim=x.rank - 1,
        slice_sizes=[1] * x.rank,
        batch=(s.sample_dims, list(range(x.rank - 1))),
    )


def _class_weights(cx: LowerContext, s: _Samples, weight: Value) -> Value:
    """Each sample's weight."""
    b, c = cx.b, weight.shape[0]
    if c <= _FEW_CLASSES:
        wide = b.broadcast_in_dim(weight, s.x.shape, [1])
        return reduce_sum(cx, b.select(_is_class(cx, s), wide, b.constant(0, wide.dtype, wide.shape)), [1])
    return b.gather(
        weight,
        b.reshape(s.target, (*s.target.shape, 1)),
        offset_dims=[],
        collapsed=[0],
        start_index_map=[0],
        index_vector_dim=s.target.rank,
        slice_sizes=[1],
    )


@lowers(aten.nll_loss_forward.default, aten.nll_loss2d_forward.default)
def nll_loss_forward(
    cx: LowerContext, self: Value, target: Value, weight: Value | None, reduction: int, ignore_index: int
) -> tuple[Value, Value]:
    b, dtype = cx.b, cx.compute_dtype
    s = _samples(cx, self, target, ignore_index)
    w = b.constant(1, dtype, s.target.shape) if weight is None else b.convert(_class_weights(cx, s, weight), dtype)
    zero = b.constant(0, dtype, w.shape)
    loss = b.neg(b.mul(b.convert(_picked(cx, s), dtype), w))
    loss = b.select(s.valid, loss, zero)
    if reduction not in (_MEAN, _SUM) and self.rank > 1:  # ATen sums where there is one sample without a batch dim
        return finish(cx, loss), b.constant(0, cx.outs[1].dtype)
    total = reduce_sum(cx, b.select(s.valid, w, zero), range(w.rank))
    loss = reduce_sum(cx, loss, range(w.rank))
    return finish(cx, b.div(loss, total) if reduction == _MEAN else loss), finish(cx, total, 1)


@lowers(aten.nll_loss_backward.default, aten.nll_loss2d_backward.default)
def nll_loss_backward(
    cx: LowerContext,
    grad_output: Value,
    self: Value,
    target: Value,
    weight: Value | None,
    reduction: int,
    ignore_index: int,
    total_weight: Value,
) -> Value:
    b, dtype = cx.b, cx.compute_dtype
    s = _samples(cx, self, target, ignore_index)
    g = b.neg(b.convert(grad_output, dtype))
    if reduction == _MEAN:
        g = b.div(g, b.reshape(b.convert(total_weight, dtype), g.shape))
    g = b.broadcast_to(g, s.target.shape) if g.rank == 0 else b.reshape(g, s.target.shape)
    g = b.select(s.valid, g, b.constant(0, dtype, g.shape))
    grad = b.broadcast_in_dim(g, s.x.shape, s.sample_dims)
    if weight is not None:
        grad = b.mul(grad, b.broadcast_in_dim(b.convert(weight, dtype), grad.shape, [1]))
    return finish(cx, b.select(_is_class(cx, s), grad, b.constant(0, dtype, grad.shape)))


# ---- margin losses over classes


def _margins(cx: LowerContext, s: _Samples, margin: Operand) -> Value:
    """``margin - x[target] + x[class]``, -1 for the target itself."""
    b = cx.b
    gap = b.sub(s.x, b.broadcast_in_dim(_picked(cx, s), s.x.shape, [0]))
    gap = b.add(gap, _full(cx, margin, gap))
    return b.select(_is_class(cx, s), b.constant(-1, gap.dtype, gap.shape), gap)


@lowers(aten.multi_margin_loss.default, scalars={"p": KEYED})
def multi_margin_loss(
    cx: LowerContext,
    self: Value,
    target: Value,
    p: int = 1,
    margin: Operand = 1,
    weight: Value | None = None,
    reduction: int = 1,
) -> Value:
    b = cx.b
    s = _samples(cx, b.convert(self, cx.compute_dtype), target)
    gap = _margins(cx, s, margin)
    gap = b.maximum(gap, b.constant(0, gap.dtype, gap.shape))
    loss = divided(cx, reduce_sum(cx, b.mul(gap, gap) if p == 2 else gap, [1]), gap.shape[1])
    if weight is not None:
        loss = b.mul(loss, b.convert(_class_weights(cx, s, weight), loss.dtype))
    return _reduced(cx, loss, reduction)


@lowers(aten.multi_margin_loss_backward.default, scalars={"p": KEYED})
def multi_margin_loss_backward(
    cx: LowerContext,
    grad_output: Value,
    self: Value,
    target: Value,
    p: int,
    margin: Operand,
    weight: Value | None = None,
    reduction: int = 1,
) -> Value:
    b = cx.b
    s = _samples(cx, b.convert(self, cx.compute_dtype), target)
    gap = _margins(cx, s, margin)
    zero = b.constant(0, gap.dtype, gap.shape)
    slope = b.add(gap, gap) if p == 2 else b.constant(1, gap.dtype, gap.shape)
    slope = b.select(b.compare("GT", gap, zero), slope, zero)
    own = b.broadcast_in_dim(b.neg(reduce_sum(cx, slope, [1])), gap.shape, [0])
    slope = divided(cx, b.select(_is_class(cx, s), own, slope), gap.shape[1])
    g = b.reshape(b.convert(grad_output, gap.dtype), grad_output.shape or (1,))
    g = b.broadcast_to(divided(cx, g, gap.shape[0]) if reduction == _MEAN else g, s.target.shape)
    if weight is not None:
        g = b.mul(g, b.convert(_class_weights(cx, s, weight), g.dtype))
    return finish(cx, b.mul(slope, b.broadcast_in_dim(g, gap.shape, [0])))


@dataclass(frozen=True, slots=True)
class _Labels:
    """Labels [N, K] of scores [N, C] up to the first negative one; all values are [N, K, C]."""

    x: Value  # scores, along K the same
    is_label: Value  # class c is the k-th label
    active: Value  # label k counts and class c is no label of the sample
    gap: Value  # 1 - x[label k] + x[c]


def _labels(cx: LowerContext, self: Value, target: Value) -> tuple[_Labels, Value]:
    """The pairs (label, class), and [N, C]: is the class one of the labels."""
    b = cx.b
    n, c = self.shape if self.rank == 2 else (1, self.type.numel)
    x, t = b.reshape(self, (n, c)), b.reshape(target, (n, c))
    end = first_position(cx, b.compare("LT", t, b.constant(0, t.dtype, t.shape)), 1)
    counts = b.compare("LT", b.iota(t.shape, 1, end.dtype), b.broadcast_in_dim(end, t.shape, [0]))
    cube = (n, c, c)
    hit = b.compare("EQ", b.broadcast_in_dim(b.convert(t, torch.int32), cube, [0, 1]), b.iota(cube, 2, torch.int32))
    is_label = b.and_(hit, b.broadcast_in_dim(counts, cube, [0, 1]))
    any_label = reduce_sum(cx, is_label, [1])
    wide = b.broadcast_in_dim(x, cube, [0, 2])
    own = reduce_sum(cx, b.select(is_label, wide, b.constant(0, x.dtype, cube)), [2])
    gap = b.sub(b.add(b.constant(1, x.dtype, cube), wide), b.broadcast_in_dim(own, cube, [0, 1]))
    active = b.and_(b.broadcast_in_dim(counts, cube, [0, 1]), b.broadcast_in_dim(b.not_(any_label), cube, [0, 2]))
    return _Labels(wide, is_label, active, gap), any_label


@lowers(aten.multilabel_margin_loss_forward.default)
def multilabel_margin_loss_forward(cx: LowerContext, self: Value, target: Value, reduction: int) -> tuple[Value, Value]:
    b = cx.b
    pairs, any_label = _labels(cx, b.convert(self, cx.compute_dtype), target)
    zero = b.constant(0, pairs.gap.dtype, pairs.gap.shape)
    loss = reduce_sum(cx, b.select(pairs.active, b.maximum(pairs.gap, zero), zero), [1, 2])
    return _reduced(cx, divided(cx, loss, self.shape[-1] if self.rank else 1), reduction), finish(cx, any_label, 1)


@lowers(aten.multilabel_margin_loss_backward.default)
def multilabel_margin_loss_backward(
    cx: LowerContext, grad_output: Value, self: Value, target: Value, reduction: int, is_target: Value
) -> Value:
    b = cx.b
    pairs, _ = _labels(cx, b.convert(self, cx.compute_dtype), target)
    n, _, c = pairs.gap.shape
    zero, one = (b.constant(v, pairs.gap.dtype, pairs.gap.shape) for v in (0, 1))
    up = b.select(b.and_(pairs.active, b.compare("GT", pairs.gap, zero)), one, zero)
    down = b.broadcast_in_dim(reduce_sum(cx, up, [2]), up.shape, [0, 1])
    slope = divided(cx, reduce_sum(cx, b.sub(up, b.select(pairs.is_label, down, zero)), [1]), c)
    g = b.reshape(b.convert(grad_output, slope.dtype), grad_output.shape or (1,))
    g = b.broadcast_to(divided(cx, g, n) if reduction == _MEAN else g, (n,))
    return finish(cx, b.mul(slope, b.broadcast_in_dim(g, slope.shape, [0])))
