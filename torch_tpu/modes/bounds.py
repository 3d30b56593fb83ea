"""Debug mode: indices of gathers, scatters and look-ups are compared with the sizes they index, before the op runs.

Programs cannot raise: XLA clamps an index that is out of range. Here the host reads the index tensor, which only a mode
that waits for each op can afford.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._ops import OpOverload

from torch_tpu.errors import IndexOutOfRange

aten = torch.ops.aten

Args = dict[str, Any]
Check = tuple[torch.Tensor, int, int, bool, int | None]
"""Indices, the dim they go into, its size, whether negative ones count from the end, and a value that is no index."""


def _size(x: torch.Tensor, dim: int) -> int:
    return x.shape[dim] if x.dim() else 1


def _along(index: str, *, negative: bool = False) -> Callable[[Args], Iterator[Check]]:
    """``index`` goes into dim ``dim`` of ``self``."""

    def checks(a: Args) -> Iterator[Check]:
        yield a[index], a["dim"], _size(a["self"], a["dim"]), negative, None

    return checks


def _rows(index: str, table: str) -> Callable[[Args], Iterator[Check]]:
    """``index`` chooses rows of ``table``."""

    def checks(a: Args) -> Iterator[Check]:
        yield a[index], 0, a[table].shape[0], False, None

    return checks


def _flat(a: Args) -> Iterator[Check]:
    yield a["index"], 0, a["self"].numel(), True, None


def _lists(a: Args) -> Iterator[Check]:
    dim = 0
    for index in a["indices"]:
        if index is None:
            dim += 1
        elif index.dtype in (torch.bool, torch.uint8):
            dim += index.dim()
        else:
            yield index, dim, _size(a["self"], dim), True, None
            dim += 1


def _classes(a: Args) -> Iterator[Check]:
    dim = 1 if a["self"].dim() > 1 else 0
    yield a["target"], dim, a["self"].shape[dim], False, a["ignore_index"]


def _num_weights(a: Args) -> Iterator[Check]:
    yield a["indices"], 0, a["num_weights"], False, None


def _unpooled(a: Args) -> Iterator[Check]:
    size = 1
    for n in a["output_size"]:
        size *= n
    yield a["indices"], -1, size, False, None


BOUNDS: dict[OpOverload, Callable[[Args], Iterator[Check]]] = {
    aten.index.Tensor: _lists,
    aten._unsafe_index.Tensor: _lists,
    aten.index_put.default: _lists,
    aten._index_put_impl.default: _lists,
    aten._unsafe_index_put.default: _lists,
    aten.gather.default: _along("index"),
    aten.scatter.src: _along("index"),
    aten.scatter.value: _along("index"),
    aten.scatter.reduce: _along("index"),
    aten.scatter.value_reduce: _along("index"),
    aten.scatter_add.default: _along("index"),
    aten.scatter_reduce.two: _along("index"),
    aten.index_select.default: _along("index"),
    aten.index_add.default: _along("index"),
    aten.index_copy.default: _along("index"),
    aten.index_reduce.default: _along("index"),
    aten.index_fill.int_Scalar: _along("index", negative=True),
    aten.index_fill.int_Tensor: _along("index", negative=True),
    aten.take.default: _flat,
    aten.put.default: _flat,
    aten.embedding.default: _rows("indices", "weight"),
    aten._embedding_bag.default: _rows("indices", "weight"),
    aten._embedding_bag_forward_only.default: _rows("indices", "weight"),
    aten.embedding_renorm.default: _rows("indices", "self"),
    aten.embedding_dense_backward.default: _num_weights,
    aten.nll_loss_forward.default: _classes,
    aten.nll_loss2d_forward.default: _classes,
    aten.max_unpool2d.default: _unpooled,
    aten.max_unpool3d.default: _unpooled,
}
"""By the functional overload: the indices of a call."""


def check(name: str, functional: OpOverload, args: Args) -> None:
    """Look at the indices of one call of op ``name``; ``args`` by the names of its schema.

    Raises:
        IndexOutOfRange: with the first index that is out of range.
    """
    for index, dim, size, negative, ignored in BOUNDS[functional](args):
        values = index.cpu()
        wrong = (values >= size) | (values < (-size if negative else 0))
        if ignored is not None:
            wrong &= values != ignored
        if wrong.any():
            raise IndexOutOfRange(
                f"index {values[wrong][0].item()} is out of range for dim {dim} of size {size}.",
                op=name,
                hint="correct the index; outside of debug mode the result is undefined.",
            )
