"""Ops that are written in other ops, and the CTC loss: values and gradients against the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

ISIN = torch.tensor([0.0, 1.0, 2.0, float("nan")])


def to_device(x: Any) -> Any:
    return torch.utils._pytree.tree_map_only(torch.Tensor, lambda t: t.to("tpu"), x)


def compare(got: Any, want: Any) -> None:
    for g, w in zip(torch.utils._pytree.tree_leaves(got), torch.utils._pytree.tree_leaves(want), strict=True):
        assert g.device.type == "tpu"
        torch.testing.assert_close(g.cpu(), w, equal_nan=True)


@pytest.mark.parametrize("test", [ISIN[:0], ISIN, torch.arange(24.0) - 2, torch.arange(24)])
@pytest.mark.parametrize("invert", [False, True])
def test_isin(test: torch.Tensor, invert: bool) -> None:
    x = torch.tensor([[0.0, -1.0, 5.5], [float("nan"), 2.0, 40.0]])
    compare(torch.isin(x.tpu(), test.tpu(), invert=invert), torch.isin(x, test, invert=invert))
    compare(torch.isin(x.tpu(), 2.0, invert=invert), torch.isin(x, 2.0, invert=invert))


@pytest.mark.parametrize("reduce", ["sum", "mean", "max", "min", "prod"])
@pytest.mark.parametrize("initial", [None, 1.5])
@pytest.mark.parametrize("how", ["lengths", "offsets"])
def test_segment_reduce(reduce: str, initial: float | None, how: str) -> None:
    data = torch.randn(10, 3)
    data[3, 1] = data[6, 0] = data[7, 0] = 0  # one zero in a product, and two
    data[8, 2] = data[9, 2]
    given = {how: torch.tensor([2, 3, 0, 5] if how == "lengths" else [0, 2, 5, 5, 10])}
    x, y = data.clone().requires_grad_(), data.tpu().requires_grad_()
    want = torch.segment_reduce(x, reduce, initial=initial, **given)
    got = torch.segment_reduce(y, reduce, initial=initial, **to_device(given))
    compare(got, want)
    for out in (want, got):
        out[[0, 1, 3]].sum().backward()  # an empty segment's mean is NaN
    compare(y.grad, x.grad)


@pytest.mark.parametrize("density", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
def test_histograms(density: bool, weighted: bool) -> None:
    x = torch.randn(40, 2)
    weight = torch.rand(40) if weighted else None
    edges = (torch.tensor([-1.0, -0.2, 0.5, 2.0]), torch.tensor([-2.0, 0.0, 1.0]))
    kwargs = {"weight": weight, "density": density}
    on = to_device(kwargs)
    column = x[:, 0].contiguous()
    for bins in ((5,), (edges[0],)):
        compare(torch.histogram(column.tpu(), *to_device(bins), **on), torch.histogram(column, *bins, **kwargs))
    limits = torch.histogram(column.tpu(), 4, range=(-1.0, 1.0), **on)
    compare(limits, torch.histogram(column, 4, range=(-1.0, 1.0), **kwargs))
    for bins in ([3, 4], edges):
        compare(torch.histogramdd(x.tpu(), to_device(bins), **on), torch.histogramdd(x, bins, **kwargs))


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("zero_infinity", [False, True])
def test_ctc_loss(flat: bool, zero_infinity: bool) -> None:
    """Ragged inputs, an empty target, repeated labels, and a target that is longer than its input allows."""
    log_probs = torch.randn(20, 4, 6).log_softmax(2)
    targets = torch.randint(1, 6, (13,)) if flat else torch.randint(1, 3, (4, 7))
    lengths = ((20, 15, 9, 3), (5, 4, 4, 0) if flat else (7, 3, 2, 5))
    x, y = log_probs.clone().requires_grad_(), log_probs.tpu().requires_grad_()
    kwargs = {"zero_infinity": zero_infinity, "reduction": "none"}
    want = torch.nn.functional.ctc_loss(x, targets, *lengths, **kwargs)
    got = torch.nn.functional.ctc_loss(y, targets.tpu(), *lengths, **kwargs)
    torch.testing.assert_close(got.cpu(), want)
    for out in (want, got):
        out.sum().backward()
    # A gradient is a difference of two probabilities, each the exponential of a sum of 20 logarithms.
    torch.testing.assert_close(y.grad.cpu(), x.grad, rtol=1e-4, atol=1e-5, equal_nan=True)


def test_bincount_reads_its_size() -> None:
    x = torch.tensor([1, 4, 4, 2])
    compare(torch.bincount(x.tpu()), torch.bincount(x))
    compare(torch.bincount(x.tpu(), minlength=9), torch.bincount(x, minlength=9))
    weights = torch.rand(4)
    compare(torch.bincount(x.tpu(), weights.tpu()), torch.bincount(x, weights))
    compare(torch.bincount(x[:0].tpu()), torch.bincount(x[:0]))
    with pytest.raises(RuntimeError, match="1-d non-negative integral"):
        torch.bincount(torch.tensor([1, -1]).tpu())


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_randperm_out(dtype: torch.dtype) -> None:
    out = torch.empty(0, dtype=dtype, device="tpu")
    torch.randperm(9, out=out)
    assert sorted(out.tolist()) == list(range(9))


def test_batch_norm_keeps_no_statistics_in_eval_mode() -> None:
    x, mean, var = torch.randn(3, 2), torch.zeros(2), torch.ones(2)
    args = (None, None, mean, var, False, 0.1, 1e-5)
    for op in (torch.native_batch_norm, torch._native_batch_norm_legit):
        compare(op(x.tpu(), *to_device(args)), op(x, *args))


def test_host_ops_are_no_fallback() -> None:
    x = torch.randn(4, 4)
    compare(torch.linalg.eigvals(x.tpu()).abs().sort().values, torch.linalg.eigvals(x).abs().sort().values)
    values, vectors = torch.linalg.eig(x.tpu())
    compare((vectors @ values.diag() @ vectors.inverse()).real, x)
    factors = torch.linalg.ldl_factor((x + x.T).tpu())
    compare((x + x.T).tpu() @ torch.linalg.ldl_solve(*factors, x.tpu()), x)
    compare(torch.linalg.lstsq(x[:, :2].tpu(), x.tpu()).solution, torch.linalg.lstsq(x[:, :2], x).solution)


def test_kernels_that_are_composite_here() -> None:
    x, y = torch.randn(4, 3), torch.randn(2)
    compare(torch.as_strided_scatter(x.tpu(), y.tpu(), (2,), (3,), 1), torch.as_strided_scatter(x, y, (2,), (3,), 1))
    base, src = torch.arange(20.0), torch.full((2,), -1.0)
    for view in (lambda t: t[5:], lambda t: t[:5], lambda t: t.view(4, 5).t()[1:]):
        for offset in (None, 0, 8):  # of the storage, whatever the view shows of it
            got, want = (view(t) for t in (base.tpu(), base))
            compare(
                got.as_strided_scatter(src.tpu(), (2,), (1,), offset), want.as_strided_scatter(src, (2,), (1,), offset)
            )
    out = torch.empty(0).tpu()
    torch.ops.aten.as_strided_scatter.out(base.tpu()[5:], src.tpu(), (2,), (1,), 6, out=out)
    compare(out, base[5:].as_strided_scatter(src, (2,), (1,), 6))
    compare(torch.linalg.pinv(x.tpu()), torch.linalg.pinv(x))
    weight = torch.randn(2, 3, 3)
    compare(torch.nn.functional.bilinear(x.tpu(), x.tpu(), weight.tpu()), torch.nn.functional.bilinear(x, x, weight))
