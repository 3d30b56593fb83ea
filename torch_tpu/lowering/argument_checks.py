"""Checks of arguments that ATen's kernels make and its meta kernels do not.

Without them a wrong argument would compute something, or come back as a complaint of the compiler. `check` runs at a miss,
before the meta kernel, with meta tensors for tensors; the messages name what was wanted and what came.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch._ops import OpOverload

aten = torch.ops.aten
Args = Mapping[str, Any]


def _require(condition: bool, message: str, error: type[Exception] = RuntimeError) -> None:
    if not condition:
        raise error(message)


def _convolution(a: Args) -> None:
    x, weight, groups = a["input"], a["weight"], a["groups"]
    spatial = x.dim() - 2
    _require(all(p >= 0 for p in a["padding"]), f"negative padding is not supported: {list(a['padding'])}")
    _require(all(s > 0 for s in a["stride"]), f"non-positive stride is not supported: {list(a['stride'])}")
    _require(all(d > 0 for d in a["dilation"]), f"dilation should be greater than zero: {list(a['dilation'])}")
    _require(weight.dim() > 2, f"weight should have at least three dimensions, but it has {weight.dim()}")
    _require(groups > 0, f"groups has to be positive: {groups}")
    _require(
        weight.dim() == spatial + 2,
        f"Expected {weight.dim()}-dimensional input for {weight.dim()}-dimensional weight {list(weight.shape)}, but got "
        f"{x.dim()}-dimensional input {list(x.shape)}",
    )
    _require(
        weight.shape[0] >= groups,
        f"Given groups={groups}, expected weight to be at least {groups} at dimension 0, but it is {list(weight.shape)}",
    )


_MAX_CATEGORIES = 1 << 24  # ATen's limit: what float32 counts exactly


def _multinomial(a: Args) -> None:
    weights, n = a["self"], a["num_samples"]
    _require(
        weights.dtype.is_floating_point,
        f"multinomial only supports floating-point dtypes for input, got: {weights.dtype}",
    )
    _require(0 < weights.dim() <= 2, f"prob_dist must be 1 or 2 dim, but it has {weights.dim()}")
    _require(n > 0, f"cannot sample n_sample <= 0 samples: {n}")
    categories = weights.shape[-1]
    _require(
        a["replacement"] or n <= categories,
        f"cannot sample n_sample > prob_dist.size(-1) samples without replacement: {n} of {categories}",
    )
    _require(categories <= _MAX_CATEGORIES, f"number of categories cannot exceed 2^24, but there are {categories}")


def _multinomial_out(a: Args) -> None:
    _multinomial(a)
    _require(a["out"].dtype == torch.int64, f"multinomial expects Long tensor out, got: {a['out'].dtype}")


def _bucketize(a: Args) -> None:
    dim = a["boundaries"].dim()
    _require(dim == 1, f"boundaries tensor must be 1 dimension, but got dim({dim})")


def _embedding(a: Args) -> None:
    _require(a["weight"].dim() == 2, f"'weight' must be 2-D, got {a['weight'].dim()}-D")


def _masked_scatter(a: Args) -> None:
    _require(
        a["mask"].dtype == torch.bool,
        f"masked_scatter_ only supports boolean masks, but got mask with dtype {a['mask'].dtype}",
    )


def _extreme(a: Args) -> None:
    self = a["self"]
    dims = a["dim"] if isinstance(a["dim"], (list, tuple)) else [] if a["dim"] is None else [a["dim"]]
    for dim in dims if self.dim() else ():
        _require(
            not -self.dim() <= dim < self.dim() or self.shape[dim] != 0,
            f"Expected reduction dim {dim} to have non-zero size.",
            IndexError,
        )


def _amax(a: Args) -> None:
    _extreme(a)
    if "out" in a:
        _require(
            a["out"].dtype == a["self"].dtype,
            f"Expected the dtype for input and out to match, but got {_name(a['self'])} for input's dtype and "
            f"{_name(a['out'])} for out's dtype.",
        )


def _aminmax(a: Args) -> None:
    self, dim = a["self"], a["dim"]
    _require(
        dim is not None or self.numel() != 0,
        "cannot compute aminmax over an empty dimension as the operation has no identity.",
    )
    _extreme(a)
    for name in ("min", "max"):
        if name in a:
            want, got = _name(self).lower(), _name(a[name]).lower()
            _require(got == want, f"Expected out tensor to have dtype {want}, but got {got} instead")


def _cat(a: Args) -> None:
    tensors = [t for t in a["tensors"] if t.shape != (0,)]  # those were let through before shapes had to match
    for i, t in enumerate(a["tensors"]):
        _require(t.dim() > 0, f"zero-dimensional tensor (at position {i}) cannot be concatenated")
    for t in tensors:
        _require(
            t.dim() == tensors[0].dim(),
            f"Tensors must have same number of dimensions: got {tensors[0].dim()} and {t.dim()}",
        )


_PART = (torch.float16, torch.float32, torch.float64)


def _complex(a: Args) -> None:
    first, second = a["real"], a["imag"]
    _require(
        first.dtype in _PART and second.dtype in _PART,
        f"Expected both inputs to be Half, Float or Double tensors but got {_name(first)} and {_name(second)}",
    )
    _require(
        first.dtype == second.dtype,
        f"Expected object of scalar type {_name(first)} but got scalar type {_name(second)} for second argument",
    )
    if "out" in a:
        want = f"Complex{_name(first)}"
        _require(
            _name(a["out"]) == want,
            f"Expected object of scalar type {want} but got scalar type {_name(a['out'])} for argument 'out'",
        )


_NAMES = {
    torch.float16: "Half", torch.float32: "Float", torch.float64: "Double", torch.int32: "Int", torch.int64: "Long",
    torch.complex32: "ComplexHalf", torch.complex64: "ComplexFloat", torch.complex128: "ComplexDouble",
}  # fmt: skip


def _name(t: torch.Tensor) -> str:
    return _NAMES.get(t.dtype, str(t.dtype))


def _histogramdd(a: Args) -> None:
    bins, n = a["bins"], a["self"].shape[-1]
    _require(
        len(bins) == n,
        f"histogramdd: The size of bins must be equal to the innermost dimension of the input. {len(bins)} against {n}",
    )


CHECKS: dict[OpOverload, Callable[[Args], None]] = {
    aten.convolution.default: _convolution,
    aten.multinomial.default: _multinomial,
    aten.multinomial.out: _multinomial_out,
    aten.bucketize.Tensor: _bucketize,
    aten.embedding.default: _embedding,
    aten.masked_scatter.default: _masked_scatter,
    aten.masked_scatter_.default: _masked_scatter,
    aten.amax.default: _amax,
    aten.amax.out: _amax,
    aten.amin.default: _amax,
    aten.amin.out: _amax,
    aten.aminmax.default: _aminmax,
    aten.aminmax.out: _aminmax,
    aten.cat.default: _cat,
    aten.cat.out: _cat,
    aten.complex.default: _complex,
    aten.complex.out: _complex,
    aten._histogramdd_bin_edges.default: _histogramdd,
    aten._histogramdd_from_bin_cts.default: _histogramdd,
}


def check(op: OpOverload, arguments: Callable[[], Args]) -> None:
    """Raise what ATen's kernel of ``op`` raises for these arguments: their names and values, tensors on meta."""
    if (found := CHECKS.get(op)) is not None:
        found(arguments())
