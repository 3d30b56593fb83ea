"""Speed of single ops on "tpu" beside torch on the CPU.

    python benchmarks/op.py [--only 'linalg*,sort'] [--slower 5] [--rounds 5]

Each case runs on a small input (host cost of a hot call, the median) and on one of about a million elements (time until the
result is there, the least of all rounds, the two sides in turn). One JSON line a case, in microseconds, then a table of the
cases whose large input takes more than ``--slower`` times as long as on the CPU.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import statistics
import sys
import time
from collections.abc import Callable

import torch
from torch.nn import functional

Case = Callable[[], object]
Make = Callable[[str, int], Case]  # device, elements
M = 1 << 20
SMALL = 64


def flat(n: int, device: str, *, low: float = -2.0, high: float = 2.0) -> torch.Tensor:
    """Random numbers of ``n`` elements."""
    return torch.empty(n).uniform_(low, high).to(device)


def square(n: int, device: str) -> torch.Tensor:
    """A square matrix of about ``n`` elements."""
    side = int(n**0.5)
    return torch.rand(side, side).to(device)


def on_flat(op: Callable[..., object], tensors: int = 1, low: float = -2.0, high: float = 2.0) -> Make:
    """``op`` of flat tensors."""

    def make(device: str, n: int) -> Case:
        args = [flat(n, device, low=low, high=high) for _ in range(tensors)]
        return lambda: op(*args)

    return make


def on_square(op: Callable[..., object], tensors: int = 1) -> Make:
    """``op`` of square matrices."""

    def make(device: str, n: int) -> Case:
        args = [square(n, device) for _ in range(tensors)]
        return lambda: op(*args)

    return make


def along(name: str, dim: int) -> Make:
    """A reduction or scan of the rows or columns of a square matrix."""
    op = getattr(torch, name)
    return on_square(lambda x: op(x, dim))


def on_batch(op: Callable[..., object], side: int) -> Make:
    """A batch of well-conditioned symmetric matrices."""

    def make(device: str, n: int) -> Case:
        a = torch.rand(max(n // side**2, 1), side, side)
        a = (a @ a.mT + side * torch.eye(side)).to(device)
        return lambda: op(a)

    return make


def on_images(op: Callable[..., object]) -> Make:
    """``op`` of 2 x 16 channels of images."""

    def make(device: str, n: int) -> Case:
        side = max(int((n / 32) ** 0.5), 8)
        x = torch.rand(2, 16, side, side).to(device)
        return lambda: op(x)

    return make


def indexed(op: Callable[[torch.Tensor, torch.Tensor], object], *, rows: bool = False) -> Make:
    """``op(x, index)``: an index of each element, or of half of the rows of 64."""

    def make(device: str, n: int) -> Case:
        if rows:
            x, index = torch.rand(max(n // 64, 2), 64), torch.randint(0, max(n // 64, 2), (max(n // 128, 1),))
        else:
            x, index = torch.rand(n), torch.randint(0, n, (n,))
        x, index = x.to(device), index.to(device)
        return lambda: op(x, index)

    return make


POSITIVE = {"low": 0.1, "high": 2.0}
UNARY = "neg abs exp expm1 sin cos tan tanh sinh asinh atan sigmoid erf erfc floor round sign square relu"
UNARY_POSITIVE = "log log1p log2 sqrt rsqrt reciprocal lgamma digamma i0"
BINARY = "add sub mul div atan2 maximum fmod remainder eq lt logaddexp hypot copysign"
REDUCTIONS = "sum mean prod var amax argmax norm logsumexp all any cumsum cumprod cummax logcumsumexp"

CASES: dict[str, Make] = {
    **{name: on_flat(getattr(torch, name)) for name in UNARY.split()},
    **{name: on_flat(getattr(torch, name), **POSITIVE) for name in UNARY_POSITIVE.split()},
    **{name: on_flat(getattr(torch, name), 2) for name in BINARY.split()},
    "pow": on_flat(torch.pow, 2, **POSITIVE),
    "where": on_flat(lambda a, b: torch.where(a > 0, a, b), 2),
    "lerp": on_flat(torch.lerp, 3),
    "addcmul": on_flat(torch.addcmul, 3),
    "clamp": on_flat(lambda a: a.clamp(-1, 1)),
    "gelu": on_flat(functional.gelu),
    "silu": on_flat(functional.silu),
    "softplus": on_flat(functional.softplus),
    "special.ndtri": on_flat(torch.special.ndtri, low=0.1, high=0.9),
    "special.bessel_j0": on_flat(torch.special.bessel_j0),
    **{f"{name} dim 1": along(name, 1) for name in REDUCTIONS.split()},
    **{f"{name} dim 0": along(name, 0) for name in ("sum", "amax", "cumsum")},
    "sum": on_flat(torch.sum),
    "std": on_flat(torch.std),
    "max": on_flat(torch.max),
    "median": on_flat(torch.median),
    "median dim 1": on_square(lambda x: x.median(1)),
    "kthvalue dim 1": on_square(lambda x: x.kthvalue(7, 1)),
    "quantile": on_flat(lambda x: x[: 1 << 18].quantile(0.3)),
    "mode dim 1": on_square(lambda x: x.mode(1)),
    "sort": on_flat(torch.sort),
    "sort dim 1": on_square(lambda x: x.sort(1)),
    "argsort dim 1": on_square(lambda x: x.argsort(1)),
    "topk dim 1": on_square(lambda x: x.topk(5, 1)),
    "unique": on_flat(lambda x: (x * 100).long().unique()),
    "bincount": on_flat(lambda x: (x * 100 + 200).long().bincount(minlength=401)),
    "histc": on_flat(lambda x: x.histc(50)),
    "searchsorted": on_flat(lambda x: torch.searchsorted(torch.arange(-2.0, 2.0, 1e-3, device=x.device), x)),
    "bucketize": on_flat(lambda x: torch.bucketize(x, torch.arange(-2.0, 2.0, 0.5, device=x.device))),
    "nonzero": on_flat(lambda x: (x > 1.5).nonzero()),
    "masked_select": on_flat(lambda x: x[x > 1.5]),
    "masked_fill": on_flat(lambda x: x.masked_fill(x > 1, 0)),
    "isin": on_flat(lambda x: torch.isin((x * 100).long(), torch.arange(50, device=x.device))),
    "gather": indexed(lambda x, i: x.gather(0, i)),
    "take": indexed(torch.take),
    "index": indexed(lambda x, i: x[i]),
    "index_select rows": indexed(lambda x, i: x.index_select(0, i), rows=True),
    "index rows": indexed(lambda x, i: x[i], rows=True),
    "embedding": indexed(lambda x, i: functional.embedding(i, x), rows=True),
    "scatter": indexed(lambda x, i: x.scatter(0, i, x)),
    "scatter_add": indexed(lambda x, i: x.scatter_add(0, i, x)),
    "index_put": indexed(lambda x, i: x.index_put((i,), x)),
    "index_put accumulate": indexed(lambda x, i: x.index_put((i,), x, accumulate=True)),
    "index_add rows": indexed(lambda x, i: x.index_add(0, i, x[: len(i)]), rows=True),
    "index_copy rows": indexed(lambda x, i: x.index_copy(0, i.unique(), x[: len(i.unique())]), rows=True),
    "index_fill rows": indexed(lambda x, i: x.index_fill(0, i, 1.0), rows=True),
    "scatter_reduce amax": indexed(lambda x, i: x.scatter_reduce(0, i, x, "amax")),
    "embedding_bag": indexed(lambda x, i: functional.embedding_bag(i.view(1, -1), x), rows=True),
    "transpose copy": on_square(lambda x: x.t().contiguous()),
    "cat": on_flat(lambda a, b: torch.cat([a, b]), 2),
    "stack": on_flat(lambda a, b: torch.stack([a, b], 1), 2),
    "flip": on_square(lambda x: x.flip(0, 1)),
    "roll": on_square(lambda x: x.roll((3, 5), (0, 1))),
    "repeat": on_flat(lambda x: x.repeat(2)),
    "repeat_interleave": on_flat(lambda x: x.repeat_interleave(2)),
    "tril": on_square(torch.tril),
    "pad reflect": on_images(lambda x: functional.pad(x, (1, 1, 1, 1), mode="reflect")),
    "diag_embed": on_flat(lambda x: torch.diag_embed(x[:1024])),
    "unfold": on_images(lambda x: functional.unfold(x, 3)),
    "im2col back": on_images(lambda x: functional.fold(functional.unfold(x, 3), x.shape[2:], 3)),
    "pixel_shuffle": on_images(lambda x: functional.pixel_shuffle(x, 2)),
    "softmax": on_square(lambda x: x.softmax(1)),
    "log_softmax": on_square(lambda x: x.log_softmax(1)),
    "cross_entropy": on_square(
        lambda x: functional.cross_entropy(x, torch.zeros(len(x), dtype=torch.long, device=x.device))
    ),
    "layer_norm": on_square(lambda x: functional.layer_norm(x, x.shape[1:])),
    "batch_norm": on_images(lambda x: functional.batch_norm(x, None, None, training=True)),
    "group_norm": on_images(lambda x: functional.group_norm(x, 4)),
    "max_pool2d": on_images(lambda x: functional.max_pool2d(x, 2)),
    "max_pool2d 3": on_images(lambda x: functional.max_pool2d(x, 3, 2, 1)),
    "avg_pool2d": on_images(lambda x: functional.avg_pool2d(x, 2)),
    "adaptive_avg_pool2d": on_images(lambda x: functional.adaptive_avg_pool2d(x, 5)),
    "interpolate nearest": on_images(lambda x: functional.interpolate(x, scale_factor=2)),
    "interpolate bilinear": on_images(lambda x: functional.interpolate(x, scale_factor=2, mode="bilinear")),
    "interpolate bicubic": on_images(lambda x: functional.interpolate(x, scale_factor=2, mode="bicubic")),
    "conv2d": on_images(lambda x: functional.conv2d(x, torch.ones(16, 16, 3, 3, device=x.device), padding=1)),
    "conv2d depthwise": on_images(
        lambda x: functional.conv2d(x, torch.ones(16, 1, 3, 3, device=x.device), padding=1, groups=16)
    ),
    "conv_transpose2d": on_images(
        lambda x: functional.conv_transpose2d(x, torch.ones(16, 16, 2, 2, device=x.device), stride=2)
    ),
    "mm": on_square(torch.mm, 2),
    "mv": on_square(lambda x: x @ x[0]),
    "bmm": on_batch(lambda x: x @ x, 64),
    "baddbmm": on_batch(lambda x: torch.baddbmm(x, x, x), 64),
    "einsum": on_batch(lambda x: torch.einsum("bij,bkj->bik", x, x), 64),
    "cdist": on_square(lambda x: torch.cdist(x[:256], x[:256])),
    "linalg.cholesky": on_batch(torch.linalg.cholesky, 64),
    "linalg.qr": on_batch(torch.linalg.qr, 64),
    "linalg.inv": on_batch(torch.linalg.inv, 64),
    "linalg.solve": on_batch(lambda x: torch.linalg.solve(x, x), 64),
    "linalg.det": on_batch(torch.linalg.det, 64),
    "linalg.eigh": on_batch(lambda x: torch.linalg.eigh(x[:16]), 64),
    "linalg.svd": on_batch(lambda x: torch.linalg.svd(x[:16]), 64),
    "fft": on_square(torch.fft.fft),
    "rfft2": on_square(torch.fft.rfft2),
    "rand": on_flat(lambda x: torch.rand_like(x)),
    "randn": on_flat(lambda x: torch.randn_like(x)),
    "bernoulli": on_flat(lambda x: torch.full_like(x, 0.3).bernoulli()),
    "dropout": on_flat(lambda x: functional.dropout(x, 0.3)),
    "multinomial": on_square(lambda x: x.multinomial(8)),
    "randperm": on_flat(lambda x: torch.randperm(len(x), device=x.device)),
    "poisson": on_flat(torch.poisson, **POSITIVE),
}


def finish(device: str) -> None:
    """Wait for what runs."""
    if device == "tpu":
        torch.tpu.synchronize()


def median_us(case: Case, device: str, number: int = 60) -> float:
    """Microseconds that a hot call keeps the host."""
    times = []
    for _ in range(number):
        start = time.perf_counter()
        case()
        times.append(time.perf_counter() - start)
        finish(device)
    return statistics.median(times) * 1e6


def once_us(case: Case, device: str) -> float:
    """Microseconds until the result of one call is there."""
    start = time.perf_counter()
    case()
    finish(device)
    return (time.perf_counter() - start) * 1e6


def main() -> int:
    """Run the cases; always 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="*", help="glob patterns of case names, comma-separated")
    parser.add_argument("--slower", type=float, default=5.0)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    patterns = args.only.split(",")
    slow = []
    for name, make in CASES.items():
        if not any(fnmatch.fnmatchcase(name, p) for p in patterns):
            continue
        torch.manual_seed(0)
        small = {device: make(device, SMALL) for device in ("cpu", "tpu")}
        large = {device: make(device, M) for device in ("cpu", "tpu")}
        result: dict[str, object] = {"case": name}
        for device, case in small.items():
            case()
            large[device]()
            finish(device)
            result[f"small_{device}_us"] = round(median_us(case, device), 1)
        best = dict.fromkeys(large, float("inf"))
        for _ in range(args.rounds):
            for device, case in large.items():
                best[device] = min(best[device], once_us(case, device))
        ratio = best["tpu"] / best["cpu"]
        result |= {f"large_{device}_us": round(us, 1) for device, us in best.items()} | {"ratio": round(ratio, 2)}
        print(json.dumps(result), flush=True)
        if ratio > args.slower:
            slow.append((ratio, name))
    print(f"slower than {args.slower:g} x torch CPU at 1 M elements:")
    for ratio, name in sorted(slow, reverse=True):
        print(f"  {ratio:8.1f} x  {name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
