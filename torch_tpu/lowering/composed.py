"""Ops written in other ops: what PyTorch gives no decomposition for, or one whose sizes depend on data.

`decompose` traces these down to rules. Where PyTorch has no meta kernel, the same function is registered as one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._ops import OpOverload

aten = torch.ops.aten

Tensor = torch.Tensor

_FEW = 10  # test elements up to which comparing with each beats a sort


# ---- isin


def _isin(elements: Tensor, test: Tensor, *, assume_unique: bool = False, invert: bool = False) -> Tensor:
    dtype = torch.result_type(elements, test)
    x, test = elements.to(dtype), test.to(dtype).reshape(-1)
    n = test.numel()
    if not n:
        found = torch.zeros_like(x, dtype=torch.bool)
    elif n <= _FEW:
        found = (x.unsqueeze(-1) == test).any(-1)
    else:
        ordered = test.sort().values
        place = torch.searchsorted(ordered, x.reshape(-1)).clamp(max=n - 1)
        found = (ordered.index_select(0, place) == x.reshape(-1)).reshape(x.shape)
    return found.logical_not() if invert else found


def _isin_scalar(elements: Tensor, test_element: Any, *, assume_unique: bool = False, invert: bool = False) -> Tensor:
    return elements.ne(test_element) if invert else elements.eq(test_element)


def _scalar_isin(element: Any, test_elements: Tensor, *, assume_unique: bool = False, invert: bool = False) -> Tensor:
    found = test_elements.eq(element).any()
    return found.logical_not() if invert else found


# ---- segment_reduce

_EMPTY = {"sum": 0.0, "mean": 0.0, "prod": 1.0, "max": -math.inf, "min": math.inf}
_COMBINE = {"sum": "sum", "mean": "sum", "prod": "prod", "max": "amax", "min": "amin"}


def _segments(data: Tensor, lengths: Tensor | None, offsets: Tensor | None, axis: int) -> tuple[Tensor, Tensor]:
    """The segment of each element, in the shape of ``data`` (one past the last: none), and the lengths."""
    if lengths is None:
        assert offsets is not None
        start, end = offsets[..., :-1], offsets[..., 1:]
        lengths = end - start
    else:
        end = lengths.cumsum(-1)
        start = end - lengths
    n = data.shape[axis]
    place = torch.arange(n, device=data.device, dtype=end.dtype).expand(*end.shape[:-1], n).contiguous()
    number = torch.searchsorted(end.contiguous(), place, right=True)
    if end.shape[-1]:
        number = number.masked_fill(place < start[..., :1], end.shape[-1])
    tail = data.shape[axis + 1 :]
    return number.reshape(*number.shape, *(1 for _ in tail)).expand(data.shape), lengths


def _like_segments(lengths: Tensor, rank: int) -> Tensor:
    return lengths.reshape(*lengths.shape, *(1 for _ in range(rank - lengths.dim())))


def _scattered(size: int, number: Tensor, values: Tensor, axis: int, reduce: str, initial: float) -> Tensor:
    """``values`` combined by segment, from ``initial`` on."""
    shape = [*values.shape[:axis], size + 1, *values.shape[axis + 1 :]]
    out = values.new_full(shape, initial).scatter_reduce(axis, number, values, reduce, include_self=True)
    return out.narrow(axis, 0, size)


def _segment_reduce(
    data: Tensor,
    reduce: str,
    *,
    lengths: Tensor | None = None,
    indices: Tensor | None = None,
    offsets: Tensor | None = None,
    axis: int = 0,
    unsafe: bool = False,
    initial: float | None = None,
) -> Tensor:
    number, lengths = _segments(data, lengths, offsets, axis)
    count = _like_segments(lengths, data.dim())
    first = _EMPTY[reduce] if initial is None else initial
    out = _scattered(lengths.shape[-1], number, data, axis, _COMBINE[reduce], first)
    if reduce != "mean":
        return out
    if initial is None:
        return (out / count).masked_fill(count == 0, math.nan)
    return torch.where(count == 0, out, out / count)


def _segment_reduce_backward(
    grad: Tensor,
    output: Tensor,
    data: Tensor,
    reduce: str,
    *,
    lengths: Tensor | None = None,
    offsets: Tensor | None = None,
    axis: int = 0,
    initial: float | None = None,
) -> Tensor:
    number, lengths = _segments(data, lengths, offsets, axis)
    size = lengths.shape[-1]
    if not size:
        return torch.zeros_like(data)
    inside, at = number < size, number.clamp(max=size - 1)

    def of(x: Tensor) -> Tensor:
        return x.expand(output.shape).gather(axis, at)

    g = of(grad)
    if reduce == "mean":
        g = g / of(_like_segments(lengths, data.dim()))
    elif reduce in ("max", "min"):
        best = (data == of(output)) | of(output.isnan())
        ties = _scattered(size, number, best.to(data.dtype), axis, "sum", 0.0)
        g = (g / of(ties)).masked_fill(best.logical_not(), 0)
    elif reduce == "prod":
        zero = data == 0
        zeros = of(_scattered(size, number, zero.to(data.dtype), axis, "sum", 0.0))
        first = 1.0 if initial is None else initial
        rest = of(_scattered(size, number, data.masked_fill(zero, 1), axis, "prod", first))
        alone = rest.masked_fill((zero & (zeros == 1)).logical_not(), 0)
        g = g * torch.where(zeros == 0, rest / data, alone)
    return g.masked_fill(inside.logical_not(), 0)


# ---- histograms in any number of dims


def _even_edges(column: Tensor, bins: int, limits: Sequence[float] | None) -> Tensor:
    """Edges of ``bins`` equal bins, of the range of the data by default; computed from both ends, as linspace does."""
    if limits is not None:
        low, high = (torch.full((), v, dtype=column.dtype, device=column.device) for v in limits)
    elif column.numel():
        low, high = column.amin(), column.amax()
    else:
        low = torch.zeros((), dtype=column.dtype, device=column.device)
        high = low + 1
    flat = low == high
    low, high = torch.where(flat, low - 0.5, low), torch.where(flat, high + 0.5, high)
    step = (high - low) / bins
    at = torch.arange(bins + 1, device=column.device).to(column.dtype)
    return torch.where(at < (bins + 1) // 2, low + step * at, high - step * (bins - at))


def _counted(x: Tensor, edges: Sequence[Tensor], weight: Tensor | None, density: bool) -> Tensor:
    """Histogram of the rows of ``x`` [m, n] over the bins between ``edges``."""
    sizes = [e.shape[0] - 1 for e in edges]
    place = torch.zeros(x.shape[0], dtype=torch.int64, device=x.device)
    inside = torch.ones(x.shape[0], dtype=torch.bool, device=x.device)
    for d, (edge, size) in enumerate(zip(edges, sizes, strict=True)):
        column = x.select(1, d).contiguous()
        inside = inside & (column >= edge[0]) & (column <= edge[-1])
        found = torch.searchsorted(edge.contiguous(), column, right=True) - 1
        place = place * size + found.clamp(0, size - 1)
    amount = torch.ones_like(place, dtype=x.dtype) if weight is None else weight.reshape(-1)
    amount = amount.masked_fill(inside.logical_not(), 0)
    total = torch.zeros(math.prod(sizes), dtype=x.dtype, device=x.device)
    out = total.scatter_add(0, place.masked_fill(inside.logical_not(), 0), amount).reshape(sizes)
    if not density:
        return out
    out = out / out.sum()
    for d, edge in enumerate(edges):
        width = (edge[1:] - edge[:-1]).reshape([-1 if i == d else 1 for i in range(len(edges))])
        out = out / width
    return out


def _columns(self: Tensor) -> Tensor:
    return self.reshape(-1, self.shape[-1])


def _edges_of_dims(self: Tensor, bins: Sequence[int], limits: Sequence[float] | None) -> list[Tensor]:
    x = _columns(self)
    pairs = [None if limits is None else limits[2 * d : 2 * d + 2] for d in range(len(bins))]
    return [_even_edges(x.select(1, d), n, pairs[d]) for d, n in enumerate(bins)]


def _histogram(
    self: Tensor,
    bins: int = 100,
    *,
    range: Sequence[float] | None = None,
    weight: Tensor | None = None,
    density: bool = False,
) -> tuple[Tensor, Tensor]:
    edges = _even_edges(self.reshape(-1), bins, range)
    return _counted(self.reshape(-1, 1), [edges], weight, density), edges


def _histogram_bins(
    self: Tensor, bins: Tensor, *, weight: Tensor | None = None, density: bool = False
) -> tuple[Tensor, Tensor]:
    return _counted(self.reshape(-1, 1), [bins], weight, density), bins.clone()


def _histogramdd_edges(
    self: Tensor,
    bins: Sequence[int],
    *,
    range: Sequence[float] | None = None,
    weight: Tensor | None = None,
    density: bool = False,
) -> list[Tensor]:
    return _edges_of_dims(self, bins, range)


def _histogramdd(
    self: Tensor,
    bins: Sequence[int],
    *,
    range: Sequence[float] | None = None,
    weight: Tensor | None = None,
    density: bool = False,
) -> Tensor:
    return _counted(_columns(self), _edges_of_dims(self, bins, range), weight, density)


def _histogramdd_bins(
    self: Tensor, bins: Sequence[Tensor], *, weight: Tensor | None = None, density: bool = False
) -> Tensor:
    return _counted(_columns(self), bins, weight, density)


# ---- jagged tensors: a batch of sequences behind each other, their ends in `offsets`


def _one_level(offsets: Sequence[Tensor]) -> Tensor:
    if len(offsets) != 1:
        raise NotImplementedError(f"jagged tensors of {len(offsets)} levels; only one is supported on tpu")
    return offsets[0]


def _jagged_to_padded(
    values: Tensor, offsets: Sequence[Tensor], max_lengths: Sequence[int], padding_value: float = 0.0
) -> Tensor:
    ends = _one_level(offsets)
    start, end = ends[:-1].unsqueeze(1), ends[1:].unsqueeze(1)
    source = start + torch.arange(max_lengths[0], device=values.device, dtype=ends.dtype)
    inside = (source < end).reshape(*source.shape, *(1 for _ in values.shape[1:]))
    if not values.shape[0]:
        return values.new_full((*source.shape, *values.shape[1:]), padding_value)
    return values[source.clamp(max=values.shape[0] - 1)].masked_fill(~inside, padding_value)


def _padded_to_jagged(dense: Tensor, offsets: Sequence[Tensor], total_L: int | None = None) -> Tensor:
    ends = _one_level(offsets)
    total = dense.shape[0] * dense.shape[1] if total_L is None else total_L
    place = torch.arange(total, device=dense.device, dtype=ends.dtype)
    row = torch.searchsorted(ends[1:].contiguous(), place, right=True).clamp(max=dense.shape[0] - 1)
    column = (place - ends[row]).clamp(max=dense.shape[1] - 1)  # longer sequences were cut
    return dense[row, column]


COMPOSED: dict[OpOverload, Callable[..., Any]] = {
    aten.isin.Tensor_Tensor: _isin,
    aten.isin.Tensor_Scalar: _isin_scalar,
    aten.isin.Scalar_Tensor: _scalar_isin,
    aten.segment_reduce.default: _segment_reduce,
    aten._segment_reduce_backward.default: _segment_reduce_backward,
    aten._jagged_to_padded_dense_forward.default: _jagged_to_padded,
    aten._padded_dense_to_jagged_forward.default: _padded_to_jagged,
    aten.histogram.bin_ct: _histogram,
    aten.histogram.bins_tensor: _histogram_bins,
    aten._histogramdd_bin_edges.default: _histogramdd_edges,
    aten._histogramdd_from_bin_cts.default: _histogramdd,
    aten._histogramdd_from_bin_tensors.default: _histogramdd_bins,
}
