"""Cases of the element-wise, activation, special-function, foreach and fused-optimizer rules."""

from __future__ import annotations

from typing import Any

import torch
from torch._ops import OpOverload

from torch_tpu.testing.cases import t

aten = torch.ops.aten
Case = tuple[OpOverload, tuple[Any, ...], dict[str, Any]]

F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16
I32, I64, BOOL, C64 = torch.int32, torch.int64, torch.bool, torch.complex64


def _case(op: OpOverload, *args: Any, **kwargs: Any) -> Case:
    return op, args, kwargs


def _names(text: str) -> list[OpOverload]:
    """Overloads from ``name`` or ``name.overload`` words."""
    found = []
    for word in text.split():
        name, _, overload = word.partition(".")
        found.append(getattr(getattr(aten, name), overload or "default"))
    return found


# Domains: t() is in [0.5, 1.5); where a function wants less than 1 the argument is scaled.
UNARY = _names(
    "abs angle asin acos acosh asinh atan atanh ceil cos cosh digamma erf erfc erfinv exp exp2 expm1 floor frac i0 "
    "isinf isnan isneginf isposinf lgamma log log10 log1p log2 logit nan_to_num neg reciprocal round rsqrt sgn sigmoid "
    "sign signbit sin sinc sinh sqrt tan tanh trunc _conj_physical logical_not frexp.Tensor zero "
    "special_airy_ai special_bessel_j0 special_bessel_j1 special_bessel_y0 special_bessel_y1 special_entr "
    "special_erfcx special_i0e special_i1 special_i1e special_log_ndtr special_modified_bessel_i0 "
    "special_modified_bessel_i1 special_modified_bessel_k0 special_modified_bessel_k1 special_ndtri "
    "special_scaled_modified_bessel_k0 special_scaled_modified_bessel_k1 special_spherical_bessel_j0 "
    "celu elu gelu glu hardshrink hardsigmoid hardswish hardtanh leaky_relu log_sigmoid_forward mish relu silu "
    "softplus softshrink"
)
INTEGER_UNARY = _names("abs bitwise_not ceil neg sign sqrt round reciprocal signbit isinf nan_to_num logical_not")
COMPLEX_UNARY = _names(
    "abs angle acos acosh asin asinh atan atanh cos cosh exp log log2 reciprocal rsqrt sgn sigmoid sin sinh sqrt tan "
    "tanh _conj_physical isnan isinf"
)
FLOAT_BINARY = _names(
    "add.Tensor sub.Tensor rsub.Tensor mul.Tensor div.Tensor atan2 copysign.Tensor floor_divide fmax fmin fmod.Tensor "
    "heaviside hypot igamma igammac logaddexp logaddexp2 maximum minimum nextafter pow.Tensor_Tensor remainder.Tensor "
    "clamp.Tensor clamp_max.Tensor clamp_min.Tensor copy special_xlog1py special_zeta xlogy.Tensor "
    "eq.Tensor ne.Tensor lt.Tensor le.Tensor gt.Tensor ge.Tensor logical_and logical_or logical_xor complex polar "
    "_add_relu.Tensor _prelu_kernel"
)
INTEGER_BINARY = _names(
    "add.Tensor sub.Tensor mul.Tensor div.Tensor maximum gcd lcm pow.Tensor_Tensor bitwise_and.Tensor "
    "bitwise_or.Tensor bitwise_xor.Tensor bitwise_left_shift.Tensor bitwise_right_shift.Tensor "
    "__lshift__.Tensor __rshift__.Tensor eq.Tensor lt.Tensor logical_and"
)
FLOAT_SCALAR = _names(
    "add.Scalar sub.Scalar rsub.Scalar mul.Scalar div.Scalar clamp clamp_max clamp_min copysign.Scalar fill.Scalar "
    "floor_divide.Scalar fmod.Scalar pow.Tensor_Scalar remainder.Scalar special_xlog1py.other_scalar "
    "special_zeta.other_scalar xlogy.Scalar_Other eq.Scalar ne.Scalar lt.Scalar le.Scalar gt.Scalar ge.Scalar "
    "_add_relu.Scalar"
)
SCALAR_FIRST = _names(
    "pow.Scalar remainder.Scalar_Tensor special_xlog1py.self_scalar special_zeta.self_scalar xlogy.Scalar_Self"
)
INTEGER_SCALAR = _names(
    "bitwise_and.Scalar bitwise_or.Scalar bitwise_xor.Scalar bitwise_left_shift.Tensor_Scalar "
    "bitwise_right_shift.Tensor_Scalar __lshift__.Scalar __rshift__.Scalar "
    "pow.Tensor_Scalar floor_divide.Scalar remainder.Scalar fmod.Scalar"
)
INTEGER_SCALAR_FIRST = _names(
    "bitwise_and.Scalar_Tensor bitwise_or.Scalar_Tensor bitwise_xor.Scalar_Tensor bitwise_left_shift.Scalar_Tensor "
    "bitwise_right_shift.Scalar_Tensor"
)
POLYNOMIALS = (
    "chebyshev_polynomial_t chebyshev_polynomial_u chebyshev_polynomial_v chebyshev_polynomial_w hermite_polynomial_h "
    "hermite_polynomial_he laguerre_polynomial_l legendre_polynomial_p shifted_chebyshev_polynomial_t "
    "shifted_chebyshev_polynomial_u shifted_chebyshev_polynomial_v shifted_chebyshev_polynomial_w"
)
# Those that want an argument of less than 1 in size, or of more than 1.
SCALED = dict.fromkeys(_names("asin acos atanh erfinv logit special_ndtri"), 0.6) | {aten.acosh.default: 3.0}


def _tables() -> list[Case]:
    x, y, n, m, z, w = (
        t(3, 4),
        t(4, seed=1),
        t(3, 4, dtype=I64),
        t(4, dtype=I64, seed=1),
        t(6, dtype=C64),
        t(3, 1, seed=2),
    )
    cases = [_case(op, x * SCALED.get(op, 1.0)) for op in UNARY]
    narrow = [op for op in UNARY if not op.name().startswith("aten::special")]
    cases += [_case(op, (x * SCALED.get(op, 1.0)).to(BF16)) for op in narrow]
    cases += [_case(op, n) for op in INTEGER_UNARY]
    cases += [_case(op, z) for op in COMPLEX_UNARY]
    cases += [_case(op, x, y) for op in FLOAT_BINARY]
    cases += [_case(op, n, m + 1) for op in INTEGER_BINARY]
    cases += [_case(op, x, 1.5) for op in FLOAT_SCALAR] + [_case(op, 1.5, x) for op in SCALAR_FIRST]
    cases += [_case(op, n, 3) for op in INTEGER_SCALAR] + [_case(op, 3, n) for op in INTEGER_SCALAR_FIRST]
    for name in POLYNOMIALS.split():
        packet = getattr(aten, f"special_{name}")
        cases += [
            _case(packet.default, x, m.to(F32)),
            _case(packet.x_scalar, 0.3, m.to(F32)),
            _case(packet.n_scalar, w, 5),
        ]
    return cases


def _arithmetic() -> list[Case]:
    x, y, n, p = t(3, 4), t(4, seed=1), t(5, dtype=I64), t(5, dtype=BOOL)
    return [
        _case(aten.add.Tensor, x, y, alpha=2.5),
        _case(aten.add.Tensor, x.to(BF16), y.to(BF16)),
        _case(aten.add.Tensor, p, p.flip(0)),
        _case(aten.sub.Tensor, n, n.flip(0), alpha=3),
        _case(aten.div.Tensor_mode, x, y, rounding_mode="floor"),
        _case(aten.div.Tensor_mode, -x, y, rounding_mode="trunc"),
        _case(aten.div.Tensor_mode, n - 5, n + 1, rounding_mode="floor"),
        _case(aten.div.Scalar_mode, n - 5, 3, rounding_mode="trunc"),
        _case(aten.addcmul.default, x, y, x, value=0.5),
        _case(aten.addcdiv.default, x, y, x),
        _case(aten.lerp.Scalar, x, y, 0.3),
        _case(aten.lerp.Tensor, x, y, x),
        _case(aten.pow.Tensor_Scalar, x, 2),
        _case(aten.pow.Tensor_Scalar, x, 0.5),
        _case(aten.pow.Tensor_Scalar, x, 1.7),
        _case(aten.round.decimals, x, decimals=2),
        _case(aten.clamp.default, x, 0.7, 1.2),
        _case(aten.nan_to_num.default, x / 0, 1.0, 2.0, 3.0),
        _case(aten.where.self, x > 1, x, y),
        _case(aten.where.self, p, n, torch.tensor(2.5)),
        _case(aten.masked_fill.Scalar, x, x > 1, -1.0),
        _case(aten.masked_fill.Tensor, x, y > 1, torch.tensor(2.0)),
        _case(aten.copy.default, x.to(BF16), n[:4]),
        _case(aten.copy.default, n, p),
        _case(aten.fill.Tensor, n, torch.tensor(2.5)),
        _case(aten._to_copy.default, x * 3, dtype=I32),
        _case(aten._to_copy.default, n, dtype=BOOL),
        _case(aten.logit.default, x - 0.5, 0.1),
        _case(aten.logit_backward.default, x, x * 0.6, 0.1),
        _case(aten.logit_backward.default, x, x * 0.6),
        *(_case(aten.polygamma.default, k, x) for k in range(4)),
        _case(aten.lgamma.default, t(4, dtype=F64) * 3),
        _case(aten.erf.default, t(4, dtype=F64)),
        _case(aten.erfinv.default, t(4, dtype=F64) * 0.6),
    ]


def _activations() -> list[Case]:
    g, x, y, half = t(3, 4), t(3, 4, seed=1) - 1, t(3, 4, seed=2), t(3, 2)
    return [
        _case(aten.threshold.default, x, 0.1, -3.0),
        _case(aten.threshold_backward.default, g, x, 0),
        _case(aten.leaky_relu_backward.default, g, x, 0.1, False),
        _case(aten._prelu_kernel_backward.default, g, x, y),
        _case(aten.rrelu_with_noise_backward.default, g, x, y, 0.1, 0.3, True, False),
        _case(aten.rrelu_with_noise_backward.default, g, x, y, 0.1, 0.3, False, False),
        _case(aten.hardtanh_backward.default, g, x, -0.3, 0.3),
        _case(aten.hardshrink_backward.default, g, x, 0.2),
        _case(aten.softshrink_backward.default, g, x, 0.2),
        _case(aten.hardsigmoid_backward.default, g, x * 8),
        _case(aten.hardswish_backward.default, g, x * 8),
        _case(aten.elu.default, x, 1.5, 1.1, 0.9),
        _case(aten.celu.default, x, 1.5),
        _case(aten.elu_backward.default, g, 1.5, 1.1, 0.9, False, x),
        _case(aten.elu_backward.default, g, 1.5, 1.1, 0.9, True, x),
        _case(aten.sigmoid_backward.default, g, y),
        _case(aten.tanh_backward.default, g, y),
        _case(aten.tanh_backward.default, t(4, dtype=C64), t(4, dtype=C64, seed=1)),
        _case(aten.softplus.default, x, 2.0, 1.0),
        _case(aten.softplus_backward.default, g, x, 2.0, 1.0),
        _case(aten.log_sigmoid_backward.default, g, x, (-x.abs()).exp()),
        _case(aten.gelu.default, x, approximate="tanh"),
        _case(aten.gelu.default, x.to(BF16)),
        _case(aten.gelu_backward.default, g, x),
        _case(aten.gelu_backward.default, g, x, approximate="tanh"),
        _case(aten.glu_backward.default, half, x, -1),
        _case(aten.glu_jvp.default, half, x, y, 1),
        _case(aten.glu_backward_jvp.default, aten.glu_backward(half, x, 1), half, x, t(3, 2, seed=3), y, 1),
    ]


def _lists(dtype: torch.dtype = F32) -> tuple[list[torch.Tensor], ...]:
    return tuple([t(3, 4, dtype=dtype, seed=k), t(5, dtype=dtype, seed=k + 9)] for k in range(5))


FOREACH_UNARY = (
    "abs acos asin atan ceil cos cosh erf erfc exp expm1 floor frac lgamma log log10 log1p log2 max neg reciprocal "
    "round rsqrt sigmoid sign sin sinh sqrt tan tanh trunc zero clone"
)


def _foreach() -> list[Case]:
    x, y, w, _, _ = _lists()
    cases = [
        _case(getattr(aten, f"_foreach_{name}").default, [v * 0.6 for v in x] if name in ("acos", "asin") else x)
        for name in FOREACH_UNARY.split()
    ]
    for name in ("add", "sub", "mul", "div", "maximum", "minimum", "clamp_min", "clamp_max", "pow"):
        packet = getattr(aten, f"_foreach_{name}")
        cases += [_case(packet.Scalar, x, 1.3), _case(packet.List, x, y), _case(packet.ScalarList, x, [0.5, 2.0])]
    for name in ("add", "mul", "div"):
        cases.append(_case(getattr(aten, f"_foreach_{name}").Tensor, x, torch.tensor(1.5)))
    for name in ("addcmul", "addcdiv"):
        packet = getattr(aten, f"_foreach_{name}")
        cases += [
            _case(packet.Scalar, x, y, w, 0.3),
            _case(packet.ScalarList, x, y, w, [0.3, 0.4]),
            _case(packet.Tensor, x, y, w, torch.tensor([0.3, 0.4])),
        ]
    return [
        *cases,
        _case(aten._foreach_add.List, x, y, alpha=-0.1),
        _case(aten._foreach_add.Scalar, _lists(BF16)[0], 1.3),
        _case(aten._foreach_pow.Scalar, x, 2),
        _case(aten._foreach_pow.ScalarAndTensor, 1.7, x),
        _case(aten._foreach_lerp.List, x, y, w),
        _case(aten._foreach_lerp.Scalar, x, y, 0.1),
        _case(aten._foreach_lerp.ScalarList, x, y, [0.1, 0.8]),
        *(_case(aten._foreach_norm.Scalar, x, order) for order in (2, 1, float("inf"), 0, 3)),
        _case(aten._foreach_norm.Scalar, _lists(BF16)[0], 2, F32),
        _case(aten._foreach_powsum.Scalar, x, 2),
        _case(aten._foreach_copy.default, x, _lists(BF16)[1]),
    ]


def _optimizers() -> list[Case]:
    x, g, a, b, c = _lists()
    steps = [torch.tensor(3.0), torch.tensor(3.0)]
    adam = {"beta1": 0.9, "beta2": 0.999, "weight_decay": 0.01, "eps": 1e-8, "maximize": False}
    sgd = {"weight_decay": 0.01, "momentum": 0.9, "dampening": 0.0, "nesterov": True, "maximize": False}
    grad = {"lr_decay": 0.1, "weight_decay": 0.0, "eps": 1e-8, "maximize": True}
    scaler = {"grad_scale": torch.tensor(4.0), "found_inf": torch.tensor(0.0)}
    rate = torch.tensor(1e-3)
    cases = []
    for packet in (aten._fused_adam, aten._fused_adamw):
        cases += [
            _case(packet.default, x, g, a, b, [], steps, lr=1e-3, amsgrad=False, **adam),
            _case(packet.default, x, g, a, b, c, steps, lr=1e-3, amsgrad=True, **adam, **scaler),
            _case(packet.tensor_lr, x, g, a, b, [], steps, lr=rate, amsgrad=False, **adam),
        ]
    return [
        *cases,
        _case(aten._fused_sgd.default, x, g, a, lr=0.1, is_first_step=False, **sgd, **scaler),
        _case(aten._fused_sgd.tensor_lr, x, g, a, lr=rate, is_first_step=True, **sgd),
        _case(aten._fused_adagrad.default, x, g, a, steps, lr=0.1, **grad),
        _case(aten._fused_adagrad.tensor_lr, x, g, a, steps, lr=rate, **grad),
        _case(aten._amp_foreach_non_finite_check_and_unscale.default, g, torch.tensor(0.0), torch.tensor(0.25)),
        _case(
            aten._amp_update_scale.default,
            torch.tensor(8.0),
            torch.tensor(3, dtype=I32),
            torch.tensor(0.0),
            2.0,
            0.5,
            4,
        ),
    ]


CASES: list[Case] = [*_tables(), *_arithmetic(), *_activations(), *_foreach(), *_optimizers()]
