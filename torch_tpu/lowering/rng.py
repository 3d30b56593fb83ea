"""Random numbers: counter-based, so that a program needs no state and any element can be computed alone.

The source of bits is Philox4x32-10 (J. Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC'11): a
bijection from a 128-bit counter to 128 bits, under a 64-bit key. The key is the generator's seed. The low half of the
counter of element ``i`` is ``offset + i``, its high half the number of the draw: rules that need more than one block an
element (rejection samplers) count there. So no two elements, and no two launches, share a block: the generator advances
its offset by the elements of the first result.

    seed, offset + i, draw --> `bits` --> `Fraction` (uniform) --> a distribution

Bits are the same on every plugin and in every mode; what is made of them with log, cos and the like is so within the
tolerance of these.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from torch_tpu.ir.builder import Builder, Number, Value
from torch_tpu.ir.types import compute_dtype
from torch_tpu.lowering.expr import Expr, complex_of, expr, where
from torch_tpu.lowering.indexing import gather_points
from torch_tpu.lowering.promote import Operand
from torch_tpu.lowering.reduce import extreme, reduce_max, reduce_sum, spread
from torch_tpu.lowering.registry import LowerContext, lowers
from torch_tpu.lowering.scan import scan

aten = torch.ops.aten

u32, u64 = torch.uint32, torch.uint64
Generator = object  # which generator it was, the caller has put into seed and offset

# Multipliers and key increments of Philox4x32, from the paper (section 3.3 and table 2 of its reference code).
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10


# ---- bits


def _shift_right(x: Expr, by: int) -> Expr:
    """Logical shift."""
    return Expr(x.b, x.b.binary("shift_right_logical", x.v, x.const(by).v))


def _low(x: Expr) -> Expr:
    return x.to(u32)


def _high(x: Expr) -> Expr:
    return _shift_right(x, 32).to(u32)


def _const(b: Builder, value: Number, dtype: torch.dtype, shape: Sequence[int]) -> Expr:
    return Expr(b, b.constant(value, dtype, shape))


def position(cx: LowerContext, shape: Sequence[int]) -> Expr:
    """Row-major index of each element of ``shape``, uint64."""
    small = math.prod(shape) < 1 << 32
    total = _const(cx.b, 0, u32 if small else u64, shape)
    stride = 1
    for dim in reversed(range(len(shape))):
        if shape[dim] > 1:
            total = total + Expr(cx.b, cx.b.iota(shape, dim, total.dtype)) * stride
        stride *= shape[dim]
    return total.to(u64)


def bits(cx: LowerContext, index: Expr, draw: Expr | int = 0) -> tuple[Expr, Expr, Expr, Expr]:
    """Four uint32 words for each element: Philox of ``offset + index`` and ``draw`` (a rank-0 uint32)."""
    assert cx.rng is not None, f"the rule of {cx.op} is not marked rng"
    b, shape = cx.b, index.v.shape
    low = index + Expr(b, cx.rng.offset)
    high = _const(b, draw, u32, shape) if isinstance(draw, int) else Expr(b, b.broadcast_to(draw.v, shape))
    words = (_low(low), _high(low), high, _const(b, 0, u32, shape))
    seed = Expr(b, cx.rng.seed)
    key = (_low(seed), _high(seed))
    for r in range(ROUNDS):
        if r:
            key = (key[0] + WEYL[0], key[1] + WEYL[1])
        left, right = words[0].to(u64) * MULTIPLIERS[0], words[2].to(u64) * MULTIPLIERS[1]
        words = (_high(right) ^ words[1] ^ key[0], _low(right), _high(left) ^ words[3] ^ key[1], _low(left))
    return words


def _join(low: Expr, high: Expr) -> Expr:
    return low.to(u64) | (high.to(u64) << 32)


# ---- uniform fractions


@dataclass(frozen=True, slots=True)
class Fraction:
    """Random bits that become a uniform number: 32 of them for a float32, 64 for a float64."""

    word: Expr
    dtype: torch.dtype

    @property
    def _digits(self) -> int:
        return 53 if self.dtype == torch.float64 else 24

    def _scaled(self, num_bits: int) -> Expr:
        # Through a signed type: there is no vector conversion from an unsigned one on most CPUs.
        width = self.word.dtype.itemsize * 8
        signed = torch.int64 if width == 64 else torch.int32
        return _shift_right(self.word, width - num_bits).bits(signed).to(self.dtype) * 2.0**-num_bits

    def coarse(self) -> Expr:
        """In [0, 1): all multiples of 2**-24 (2**-53), as ATen's uniform."""
        return self._scaled(self._digits)

    def fine(self) -> Expr:
        """In [0, 1), finer near 0: for comparison with a small probability."""
        return self._scaled(self.word.dtype.itemsize * 8 - 1).min(1 - 2.0**-self._digits)

    def positive(self) -> Expr:
        """In (0, 1], finer near 0: for logarithms."""
        num_bits = self.word.dtype.itemsize * 8 - 1
        return self._scaled(num_bits) + 2.0 ** (-num_bits - 1)

    def inner(self) -> Expr:
        """In (0, 1), symmetric about 1/2."""
        return self._scaled(self._digits - 1) + 2.0**-self._digits


def fractions(cx: LowerContext, index: Expr, dtype: torch.dtype, count: int, draw: Expr | int = 0) -> list[Fraction]:
    """``count`` fractions an element from as many blocks as it takes; ``draw`` counts calls, not blocks."""
    per_block = 2 if dtype == torch.float64 else 4
    num_blocks = -(-count // per_block)
    out: list[Fraction] = []
    for k in range(num_blocks):
        words = bits(cx, index, draw * num_blocks + k)
        if dtype == torch.float64:
            words = (_join(words[0], words[1]), _join(words[2], words[3]))  # type: ignore[assignment]
        out += [Fraction(w, dtype) for w in words]
    return out[:count]


def _normal_pair(radius: Fraction, angle: Fraction) -> tuple[Expr, Expr]:
    """Two independent standard normal numbers (Box and Muller 1958)."""
    r = (radius.positive().log() * -2.0).sqrt()
    theta = angle.coarse() * (2 * math.pi)
    return r * theta.cos(), r * theta.sin()


def _float_dtype(cx: LowerContext) -> torch.dtype:
    """Where the first result is computed: float32, or float64 for float64 and complex128."""
    return torch.float64 if cx.out.dtype in (torch.float64, torch.complex128) else torch.float32


def draw_fraction(cx: LowerContext, dtype: torch.dtype | None = None) -> Fraction:
    """One fraction for each element of the first result."""
    return fractions(cx, position(cx, cx.out.shape), _float_dtype(cx) if dtype is None else dtype, 1)[0]


def standard_normal(cx: LowerContext) -> tuple[Expr, Expr]:
    """Two standard normal numbers for each element of the first result (the second is free if unused)."""
    return _normal_pair(*fractions(cx, position(cx, cx.out.shape), _float_dtype(cx), 2))


# ---- continuous distributions


def _range(args: Sequence[Operand], kwargs: dict[str, Operand]) -> tuple[Operand, Operand]:
    """``from`` and ``to``: the first is a keyword of Python, so no rule can have it as a parameter."""
    given = dict(zip(("from", "to"), args, strict=False)) | kwargs
    return given.get("from", 0.0), given.get("to", 1.0)


@lowers(aten.uniform.default, rng=True)
def uniform(cx: LowerContext, self: Value, *args: Operand, **kwargs: Operand) -> Value:
    dtype = _float_dtype(cx)
    low, high = (expr(cx, x, dtype) for x in _range(args, kwargs))
    part = compute_dtype(cx.out.dtype) if cx.out.dtype.is_complex else cx.out.dtype
    part = {torch.complex64: torch.float32, torch.complex128: torch.float64}.get(part, part)

    def between(fraction: Fraction) -> Expr:
        x = (fraction.coarse() * (high - low) + low).to(part)
        return where(x.eq(high.to(part)), low.to(part), x)  # rounding must not reach the upper end

    num_parts = 2 if cx.out.dtype.is_complex else 1
    parts = [between(f) for f in fractions(cx, position(cx, cx.out.shape), dtype, num_parts)]
    return complex_of(*parts).v if cx.out.dtype.is_complex else parts[0].v


def _normal(cx: LowerContext, mean: Operand, std: Operand) -> Value:
    dtype = _float_dtype(cx)
    mu, sigma = expr(cx, mean, cx.compute_dtype), expr(cx, std, dtype)
    x, y = standard_normal(cx)
    if cx.out.dtype.is_complex:  # the variance is that of both parts together
        sigma = sigma * math.sqrt(0.5)
        return (complex_of(x * sigma, y * sigma) + mu).v
    return cx.result((x * sigma + mu).v)


@lowers(aten.normal_functional.default, rng=True)
def normal_functional(
    cx: LowerContext, self: Value, mean: Operand = 0.0, std: Operand = 1.0, *, generator: Generator = None
) -> Value:
    if cx.out.dtype.is_complex:  # in place, ATen fills the real view: the mean goes to both parts
        mu = expr(cx, mean, _float_dtype(cx))
        return _normal(cx, complex_of(mu, mu).v, std)
    return _normal(cx, mean, std)


@lowers(aten.normal.Tensor_float, rng=True)
def normal_tensor_float(cx: LowerContext, mean: Value, std: Operand = 1.0, *, generator: Generator = None) -> Value:
    return _normal(cx, mean, std)


@lowers(aten.normal.float_Tensor, rng=True)
def normal_float_tensor(cx: LowerContext, mean: Operand, std: Value, *, generator: Generator = None) -> Value:
    return _normal(cx, mean, std)


@lowers(aten.normal.Tensor_Tensor, rng=True)
def normal_tensor_tensor(cx: LowerContext, mean: Value, std: Value, *, generator: Generator = None) -> Value:
    return _normal(cx, mean, std)


@lowers(aten.log_normal.default, rng=True)
def log_normal(
    cx: LowerContext, self: Value, mean: Operand = 1.0, std: Operand = 2.0, *, generator: Generator = None
) -> Value:
    x = standard_normal(cx)[0] * expr(cx, std, _float_dtype(cx)) + expr(cx, mean, _float_dtype(cx))
    return cx.result(x.exp().v)


@lowers(aten.cauchy.default, rng=True)
def cauchy(
    cx: LowerContext, self: Value, median: Operand = 0.0, sigma: Operand = 1.0, *, generator: Generator = None
) -> Value:
    x = ((draw_fraction(cx).inner() - 0.5) * math.pi).tan()
    return cx.result((x * expr(cx, sigma, x.dtype) + expr(cx, median, x.dtype)).v)


def _standard_exponential(fraction: Fraction) -> Expr:
    """Never 0: samplers divide by it."""
    return (-fraction.positive().log()).max(torch.finfo(fraction.dtype).eps / 2)


@lowers(aten.exponential.default, rng=True)
def exponential(cx: LowerContext, self: Value, lambd: Operand = 1.0, *, generator: Generator = None) -> Value:
    x = _standard_exponential(draw_fraction(cx))
    return cx.result((x / expr(cx, lambd, x.dtype)).v)


@lowers(aten.geometric.default, rng=True)
def geometric(cx: LowerContext, self: Value, p: Operand, *, generator: Generator = None) -> Value:
    u = draw_fraction(cx).positive()
    return cx.result(_trials(u, (-expr(cx, p, u.dtype)).log1p()).v)


def _trials(u: Expr, log_failure: Expr) -> Expr:
    """How many trials until the first success, by inversion."""
    return (u.log() / log_failure).ceil().max(1.0)


# ---- discrete distributions


def _hits(cx: LowerContext, p: Operand) -> Value:
    """True with probability ``p``."""
    wide = isinstance(p, Value) and p.dtype == torch.float64
    u = draw_fraction(cx, torch.float64 if wide else None).fine()
    return (u < expr(cx, p, u.dtype)).v


@lowers(aten.bernoulli.default, rng=True)
def bernoulli(cx: LowerContext, self: Value, *, generator: Generator = None) -> Value:
    return cx.result(_hits(cx, self))


@lowers(aten.bernoulli.p, aten.bernoulli.Tensor, rng=True)
def bernoulli_p(cx: LowerContext, self: Value, p: Operand, *, generator: Generator = None) -> Value:
    return cx.result(_hits(cx, p))


def _times_high(x: Expr, n: int) -> Expr:
    """The upper half of the 128-bit product of uint64 ``x`` and ``n``: uniform in [0, n) when ``x`` is uniform.

    Unlike a remainder it divides nothing; the bias is at most n / 2**64.
    """
    low, high = n & 0xFFFFFFFF, n >> 32
    x_low, x_high = _low(x).to(u64), _shift_right(x, 32)
    middle = x_high * low + _shift_right(x_low * low, 32)
    if not high:
        return _shift_right(middle, 32)
    other = x_low * high + _low(middle).to(u64)
    return x_high * high + _shift_right(middle, 32) + _shift_right(other, 32)


def _integers(cx: LowerContext, low: int, span: int) -> Value:
    """Uniform whole numbers in [low, low + span)."""
    words = bits(cx, position(cx, cx.out.shape))
    x = _join(words[0], words[1])
    if span < 1 << 64:
        x = _times_high(x, span)
    return cx.b.convert((x.bits(torch.int64) + low).v, cx.out.dtype)


def _count_below(dtype: torch.dtype) -> int:
    """How many whole numbers from 0 up ATen's ``random_()`` draws from."""
    if dtype.is_floating_point:
        return int(2 / torch.finfo(dtype).eps) + 1  # all that the dtype holds exactly
    return 2 if dtype == torch.bool else torch.iinfo(dtype).max + 1


@lowers(aten.random.default, rng=True)
def random(cx: LowerContext, self: Value, *, generator: Generator = None) -> Value:
    return _integers(cx, 0, _count_below(cx.out.dtype))


@lowers(aten.random.to, rng=True)
def random_to(cx: LowerContext, self: Value, to: int, *, generator: Generator = None) -> Value:
    return _random_from(cx, 0, to)


@lowers(getattr(aten.random, "from"), rng=True)
def random_from(cx: LowerContext, self: Value, *args: int | None, **kwargs: int | None) -> Value:
    given = dict(zip(("from", "to"), args, strict=False)) | kwargs
    low = given["from"]
    assert low is not None
    return _random_from(cx, low, given.get("to"))


def _random_from(cx: LowerContext, low: int, high: int | None) -> Value:
    dtype = cx.out.dtype
    if high is None:
        whole = low == -(1 << 63)  # ATen's way to ask for all 64 bits
        return _integers(cx, 0, 1 << 64) if whole else _integers(cx, low, _count_below(dtype) - low)
    if dtype.is_floating_point:
        low, high = _inside(low, high, dtype)
    return _integers(cx, low, (high - low) % (1 << 64))


def _inside(low: int, high: int, dtype: torch.dtype) -> tuple[int, int]:
    """The part of [low, high) whose numbers stay there when they are rounded to ``dtype``."""
    digits = 1 - round(math.log2(torch.finfo(dtype).eps))

    def rounded(n: int) -> int:
        return int(torch.tensor(n, dtype=torch.int64).to(dtype).item())

    if rounded(low + 1) < low:
        low = rounded(low + 1) + (1 << (abs(low + 1).bit_length() - digits))
    if rounded(high - 1) >= high:
        high = rounded(high - 1) - (1 << (abs(high - 1).bit_length() - digits))
    return low, high


@lowers(aten.randperm.default, rng=True)
def randperm(
    cx: LowerContext,
    n: int,
    *,
    dtype: torch.dtype | int | None = 4,  # as the schema spells int64
    layout: object = None,
    device: object = None,
    pin_memory: bool | None = None,
) -> Value:
    return _permutation(cx, n)


def _permutation(cx: LowerContext, n: int) -> Value:
    b, shape = cx.b, cx.out.shape
    index = position(cx, shape)
    words = bits(cx, index)
    key = _join(words[0], words[1])
    num_bits = max(n - 1, 0).bit_length()
    if num_bits <= 24:  # the index goes into the key: 40 random bits are left, and one array sorts 6 times as fast
        packed = (key << num_bits) | index
        out = b.sort([packed.v], 0, lambda left, right: b.compare("LT", left[0], right[0]), stable=False)[0]
        return b.convert((Expr(b, out) & ((1 << num_bits) - 1)).v, cx.out.dtype)
    order = b.iota(shape, 0, torch.int32 if n < 1 << 31 else torch.int64)
    out = b.sort([key.v, order], 0, lambda left, right: b.compare("LT", left[0], right[0]), stable=False)[1]
    return b.convert(out, cx.out.dtype)


@lowers(aten.randperm.generator, rng=True)
def randperm_generator(
    cx: LowerContext,
    n: int,
    *,
    generator: Generator,
    dtype: torch.dtype | int | None = 4,  # as the schema spells int64
    layout: object = None,
    device: object = None,
    pin_memory: bool | None = None,
) -> Value:
    return _permutation(cx, n)


# ---- dropout


@lowers(aten.native_dropout.default, rng=True)
def native_dropout(cx: LowerContext, input: Value, p: Operand, train: bool | None) -> tuple[Value, Value]:
    b = cx.b
    if train is False:
        return cx.result(input), b.constant(True, torch.bool, cx.outs[1].shape)
    dtype = compute_dtype(input.dtype)
    chance = expr(cx, p, _float_dtype(cx), ())
    keep = 1.0 - chance
    mask = draw_fraction(cx).fine() < keep
    scale = where(keep.eq(0.0), 0.0, 1.0 / keep).to(dtype)
    x = expr(cx, input, dtype)
    return cx.result((x * where(mask, scale, 0.0)).v), mask.v


@lowers(aten.native_dropout_backward.default)
def native_dropout_backward(cx: LowerContext, grad_output: Value, mask: Value, scale: Operand) -> Value:
    factor = where(expr(cx, mask, torch.bool), expr(cx, scale, cx.compute_dtype, ()), 0.0)
    return cx.result((expr(cx, grad_output) * factor).v)


@lowers(aten.rrelu_with_noise_functional.default, rng=True)
def rrelu_with_noise_functional(
    cx: LowerContext,
    self: Value,
    noise: Value,
    lower: Operand = 0.125,
    upper: Operand = 0.3333333333333333,
    training: bool = False,
    generator: Generator = None,
) -> tuple[Value, Value]:
    x = expr(cx, self)
    low, high = expr(cx, lower, x.dtype), expr(cx, upper, x.dtype)
    if not training:
        return cx.result(where(x > 0.0, x, x * (low + high) * 0.5).v), noise
    slope = where(x <= 0.0, draw_fraction(cx).coarse() * (high - low) + low, 1.0)
    return cx.result((x * slope).v), cx.result(slope.v, 1)


# ---- sampling of categories


def _race(cx: LowerContext, weights: Value, num_samples: int) -> Value:
    """Without replacement: the categories whose exponential clocks of rate ``weights`` ring first, in that order."""
    b, last = cx.b, weights.rank - 1
    # A row has num_samples elements and so as many low counters: category c takes draw c // num_samples of one of them.
    category = Expr(b, b.iota(weights.shape, last, u32))
    index = (category % num_samples).to(u64)
    if last:
        index = index + Expr(b, b.iota(weights.shape, 0, u64)) * num_samples
    words = bits(cx, index, Expr(b, b.div(category.v, category.const(num_samples).v)))
    scale = spread(cx, reduce_max(cx, weights, [last]), weights, [last])
    speed = (Expr(b, weights) / Expr(b, scale)).to(torch.float32)  # at most 1: no overflow when divided by a time
    key = speed / _standard_exponential(Fraction(words[0], torch.float32))
    if num_samples == 1:
        best = extreme(cx, key.v, last, largest=True)[1]
        return b.reshape(best, cx.out.shape)
    # Bits of non-negative floats are ordered like the floats; with the index below them there is one array to sort.
    packed = (key.bits(u32).to(u64) << 32) | category.to(u64)
    order = b.sort([packed.v], last, lambda left, right: b.compare("GT", left[0], right[0]), stable=False)[0]
    return _low(Expr(b, b.slice_dim(order, last, 0, num_samples))).v


def _look_up(cx: LowerContext, weights: Value, num_samples: int) -> Value:
    """With replacement: the first category whose cumulative weight exceeds a uniform part of the total."""
    b, last, n = cx.b, weights.rank - 1, weights.shape[-1]
    p = Expr(b, weights)
    # A scan rounds each element on its own, so it may fall. It must rise, and only where there is weight.
    cumulative = Expr(b, scan(cx, weights, last, "add", 0))
    rising = scan(cx, where(p > 0.0, cumulative, -math.inf).v, last, "maximum", -math.inf)
    total = b.slice_dim(rising, last, n - 1, n)
    target = draw_fraction(cx, weights.dtype).coarse() * Expr(b, b.broadcast_to(total, cx.out.shape))
    if cx.out.numel * n <= _COMPARE_AT_MOST:
        shape = (*cx.out.shape, n)
        limits = b.broadcast_in_dim(rising, shape, [*range(last), last + 1])
        passed = b.compare("LE", limits, b.broadcast_in_dim(target.v, shape, range(last + 1)))
        return b.reduce_op("add", b.convert(passed, torch.int32), 0, [last + 1])
    return _bisect(cx, rising, target).v


_COMPARE_AT_MOST = 1 << 22  # elements: above, log2(n) gathers are faster than comparing with all (on a CPU)


def _bisect(cx: LowerContext, rising: Value, target: Expr) -> Expr:
    """How many elements of the last dim of ``rising`` are at most ``target``."""
    b, last, n = cx.b, rising.rank - 1, rising.shape[-1]
    start = 1 << (n.bit_length() - 1)

    def halve(state: Sequence[Value]) -> list[Value]:
        step, found = Expr(b, state[0]), Expr(b, state[1])
        probe = found + step
        at = gather_points(cx, rising, last, (probe.min(n) - 1).v)
        passed = (probe <= n) & (Expr(b, at) <= target)
        return [(step >> 1).v, where(passed, probe, found).v]

    init = [b.constant(start, torch.int32), b.constant(0, torch.int32, target.v.shape)]
    return Expr(b, b.while_(init, lambda state: (Expr(b, state[0]) > 0).v, halve)[1])


@lowers(aten.multinomial.default, rng=True)
def multinomial(
    cx: LowerContext, self: Value, num_samples: int, replacement: bool = False, *, generator: Generator = None
) -> Value:
    weights = cx.b.convert(self, compute_dtype(self.dtype))
    if num_samples > 1 and replacement:
        return cx.result(_look_up(cx, weights, num_samples))
    return cx.result(_race(cx, weights, num_samples))


# ---- rejection samplers

_MAX_DRAWS = 1024  # a sampler accepts more than half of its draws; this bounds a loop over NaN and the like

Step = Callable[[Expr, list[Expr]], tuple[Expr, list[Expr]]]


def _until_accepted(cx: LowerContext, done: Expr, state: Sequence[Expr], step: Step) -> list[Expr]:
    """Run ``step(draw, state)`` until it has accepted every element; an accepted element keeps its state.

    ``step`` returns which elements it accepts and the new state. Elements that are ``done`` at the start never change.
    """
    b = cx.b
    init = [b.constant(0, u32), done.v, *(s.v for s in state)]
    dims = list(range(done.v.rank))

    def unfinished(values: Sequence[Value]) -> Value:
        all_done = b.reduce_op("and", values[1], True, dims) if dims else values[1]
        return (~Expr(b, all_done) & (Expr(b, values[0]) < _MAX_DRAWS)).v

    def body(values: Sequence[Value]) -> list[Value]:
        draw, finished, *old = (Expr(b, v) for v in values)
        accepted, new = step(draw, old)
        kept = [where(finished, o, n).v for o, n in zip(old, new, strict=True)]
        return [(draw + 1).v, (finished | accepted).v, *kept]

    return [Expr(b, v) for v in b.while_(init, unfinished, body)[2:]]


def _log_gamma_tail(k: Expr) -> Expr:
    """What Stirling's formula lacks: log k! - (k log k - k + log(2 pi k) / 2), for k >= 1."""
    r = 1.0 / k
    r2 = r * r
    return r * (1 / 12 - r2 * (1 / 360 - r2 * (1 / 1260)))


def _deviance(k: Expr, mean: Expr) -> Expr:
    """k log(k / mean) - k + mean, without the cancellation of its terms."""
    x = (k - mean) / mean
    return mean * ((x + 1.0) * x.log1p() - x)


def _poisson_small(cx: LowerContext, rate: Expr, done: Expr, index: Expr) -> Expr:
    """Count uniform factors until their product is below exp(-rate) (Knuth)."""
    limit, per_block = (-rate).exp(), 2 if rate.dtype == torch.float64 else 4

    def step(draw: Expr, state: list[Expr]) -> tuple[Expr, list[Expr]]:
        count, product = state
        for u in fractions(cx, index, rate.dtype, per_block, draw):
            product = product * u.positive()
            count = count + (product > limit).to(rate.dtype)  # the product only falls, so it counts no more once below
        return ~(product > limit), [count, product]

    return _until_accepted(cx, done, [rate.const(0), rate.const(1)], step)[0]


def _poisson_large(cx: LowerContext, rate: Expr, done: Expr, index: Expr) -> Expr:
    """Transformed rejection: algorithm PTRS of W. Hoermann, Insurance: Mathematics and Economics 12 (1993)."""
    b = rate.sqrt() * 2.53 + 0.931
    a = b * 0.02483 - 0.059
    inverse_alpha = 1.1328 / (b - 3.4) + 1.1239
    squeeze = 0.9277 - 3.6224 / (b - 2.0)

    def step(draw: Expr, state: list[Expr]) -> tuple[Expr, list[Expr]]:
        first, second = fractions(cx, index, rate.dtype, 2, draw)
        u, v = first.coarse() - 0.5, second.positive()
        s = 0.5 - u.abs()
        k = ((a * 2.0 / s + b) * u + rate + 0.43).floor()
        k1 = k.max(1.0)
        log_pmf = -_log_gamma_tail(k1) - _deviance(k1, rate) - (k1 * (2 * math.pi)).log() * 0.5
        log_pmf = where(k < 1.0, -rate, log_pmf)
        below = (v * inverse_alpha / (a / (s * s) + b)).log() <= log_pmf
        return ((s >= 0.07) & (v <= squeeze)) | ((k >= 0.0) & below), [k]

    return _until_accepted(cx, done, [rate.const(0)], step)[0]


@lowers(aten.poisson.default, rng=True)
def poisson(cx: LowerContext, self: Value, generator: Generator = None) -> Value:
    rate, index = expr(cx, self), position(cx, cx.out.shape)
    large = rate >= 10.0
    small_count = _poisson_small(cx, rate, ~(rate < 10.0), index)
    large_count = _poisson_large(cx, rate, ~(large & rate.is_finite()), index)
    count = where(large, large_count, small_count)
    return cx.result(where(rate.is_finite(), count, rate).v)


def _binomial_small(cx: LowerContext, n: Expr, p: Expr, done: Expr, index: Expr) -> Expr:
    """Add waiting times between successes until they exceed ``n``."""
    log_failure, per_block = (-p).log1p(), 2 if n.dtype == torch.float64 else 4

    def step(draw: Expr, state: list[Expr]) -> tuple[Expr, list[Expr]]:
        count, trials = state
        for u in fractions(cx, index, n.dtype, per_block, draw):
            trials = trials + _trials(u.positive(), log_failure)
            count = count + (trials <= n).to(n.dtype)
        return trials > n, [count, trials]

    return _until_accepted(cx, done, [n.const(0), n.const(0)], step)[0]


def _binomial_large(cx: LowerContext, n: Expr, p: Expr, done: Expr, index: Expr) -> Expr:
    """Transformed rejection: algorithm BTRS of W. Hoermann, J. Statistical Computation and Simulation 46 (1993)."""
    q, mean = 1.0 - p, n * p
    deviation = (mean * q).sqrt()
    b = deviation * 2.53 + 1.15
    a = b * 0.0248 - 0.0873 + p * 0.01
    alpha = (5.1 / b + 2.83) * deviation
    squeeze = 0.92 - 4.2 / b

    def log_pmf(k: Expr) -> Expr:
        inside = k.max(1.0).min(n - 1.0)
        rest = n - inside
        tails = _log_gamma_tail(n) - _log_gamma_tail(inside) - _log_gamma_tail(rest)
        square = (n / (inside * rest * (2 * math.pi))).log() * 0.5
        x = tails - _deviance(inside, mean) - _deviance(rest, n * q) + square
        return where(k < 1.0, n * (-p).log1p(), where(k > n - 1.0, n * p.log(), x))

    at_mode = log_pmf(((n + 1.0) * p).floor())

    def step(draw: Expr, state: list[Expr]) -> tuple[Expr, list[Expr]]:
        first, second = fractions(cx, index, n.dtype, 2, draw)
        u, v = first.coarse() - 0.5, second.positive()
        s = 0.5 - u.abs()
        k = ((a * 2.0 / s + b) * u + mean + 0.5).floor()
        below = (v * alpha / (a / (s * s) + b)).log() <= log_pmf(k) - at_mode
        inside = (k >= 0.0) & (k <= n)
        return ((s >= 0.07) & (v <= squeeze)) | (inside & below), [k]

    return _until_accepted(cx, done, [n.const(0)], step)[0]


@lowers(aten.binomial.default, rng=True)
def binomial(cx: LowerContext, count: Value, prob: Value, generator: Generator = None) -> Value:
    n, chance, index = expr(cx, count), expr(cx, prob), position(cx, cx.out.shape)
    flip = chance > 0.5
    p = where(flip, 1.0 - chance, chance)
    valid = (n > 0.0) & (p > 0.0) & n.is_finite()
    large = n * p >= 10.0
    few = _binomial_small(cx, n, p, ~valid | large, index)
    many = _binomial_large(cx, n, p, ~(valid & large), index)
    hits = where(large & valid, many, few)
    hits = where(flip, n - hits, hits)
    return cx.result(where(n.is_nan() | p.is_nan(), math.nan, where(n > 0.0, hits, 0.0)).v)


def _gamma(cx: LowerContext, alpha: Expr) -> tuple[Expr, Expr]:
    """A gamma number as ``x`` and ``log_factor``: their product may underflow, ``log(x) + log_factor`` does not.

    G. Marsaglia and W. Tsang, "A simple method for generating gamma variables", ACM TOMS 26 (2000).
    """
    index, small = position(cx, cx.out.shape), alpha < 1.0
    d = where(small, alpha + 1.0, alpha) - 1 / 3
    c = 1.0 / (d * 9.0).sqrt()

    def step(draw: Expr, state: list[Expr]) -> tuple[Expr, list[Expr]]:
        radius, angle, height, _ = fractions(cx, index, alpha.dtype, 4, draw)
        z = _normal_pair(radius, angle)[0]
        t = c * z
        excess = t * (t * (t + 3.0) + 3.0)  # v - 1 with v = (1 + t)**3
        # d - d v + d log v, grouped so that it does not cancel for large d
        bound = z * z * 0.5 + d * (t.log1p() * 3.0 - excess)
        return (t > -1.0) & (height.positive().log() < bound), [d * (excess + 1.0)]

    x = _until_accepted(cx, ~(alpha > 0.0), [where(alpha.eq(0.0), 0.0, alpha)], step)[0]
    boost = fractions(cx, index, alpha.dtype, 4)[3].positive().log() / alpha
    return x, where(small, boost, 0.0)


@lowers(aten._standard_gamma.default, rng=True)
def standard_gamma(cx: LowerContext, self: Value, generator: Generator = None) -> Value:
    alpha = expr(cx, self)
    x, log_factor = _gamma(cx, alpha)
    tiny = torch.finfo(cx.out.dtype).tiny
    sample = (x * log_factor.exp()).max(tiny)
    return cx.result(where(alpha.is_nan(), alpha, sample).v)


@lowers(aten._sample_dirichlet.default, rng=True)
def sample_dirichlet(cx: LowerContext, self: Value, generator: Generator = None) -> Value:
    b, last = cx.b, self.rank - 1
    x, log_factor = _gamma(cx, expr(cx, self))
    log_x = x.log() + log_factor  # small concentrations: all gammas of a row may underflow, their ratios do not
    top = reduce_max(cx, log_x.v, [last])
    share = (log_x - Expr(b, spread(cx, top, log_x.v, [last]))).exp()
    total = Expr(b, spread(cx, reduce_sum(cx, share.v, [last]), share.v, [last]))
    tiny, below_one = torch.finfo(cx.out.dtype).tiny, 1 - torch.finfo(share.dtype).eps / 2
    return cx.result((share / total).max(tiny).min(below_one).v)
