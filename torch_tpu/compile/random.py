"""Random numbers in graphs: the same as those of the eager ops.

A program draws once; each random node of it starts where the one before ended (lowering/driver.py, Draws). So a random
node must run once a step, in the order of the program: factories are traced as the ops that eager runs for them, and
what a random node gave is kept for the backward, never computed again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import GraphModule
from torch.utils.checkpoint import CheckpointPolicy

from torch_tpu.lowering.registry import RULES

aten = torch.ops.aten


def _empty(size: Any, dtype: Any, layout: Any, device: Any, pin_memory: Any) -> torch.Tensor:
    return aten.empty.memory_format(size, dtype=dtype, layout=layout, device=device, pin_memory=pin_memory)  # type: ignore[no-any-return]


def _factory(fill: OpOverload, *fixed: Any) -> Callable[..., torch.Tensor]:
    def make(
        size: Any, *, dtype: Any = None, layout: Any = None, device: Any = None, pin_memory: Any = None
    ) -> torch.Tensor:
        return fill(_empty(size, dtype, layout, device, pin_memory), *fixed)  # type: ignore[no-any-return]

    return make


def _like(fill: OpOverload, *fixed: Any) -> Callable[..., torch.Tensor]:
    def make(x: torch.Tensor, **options: Any) -> torch.Tensor:
        return fill(aten.empty_like.default(x, **options), *fixed)  # type: ignore[no-any-return]

    return make


def _randint(high: int, size: Any, **options: Any) -> torch.Tensor:
    return _randint_low(0, high, size, **options)


def _randint_low(
    low: int, high: int, size: Any, *, dtype: Any = torch.int64, layout: Any = None, device: Any = None,
    pin_memory: Any = None,
) -> torch.Tensor:  # fmt: skip
    empty = _empty(size, dtype, layout, device, pin_memory)
    return getattr(aten.random, "from")(empty, low, high)  # type: ignore[no-any-return]


def _randint_like(x: torch.Tensor, high: int, **options: Any) -> torch.Tensor:
    return getattr(aten.random, "from")(aten.empty_like.default(x, **options), 0, high)  # type: ignore[no-any-return]


def _randint_like_low(x: torch.Tensor, low: int, high: int, **options: Any) -> torch.Tensor:
    return getattr(aten.random, "from")(aten.empty_like.default(x, **options), low, high)  # type: ignore[no-any-return]


DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {
    aten.rand.default: _factory(aten.uniform.default),
    aten.randn.default: _factory(aten.normal_functional.default),
    aten.rand_like.default: _like(aten.uniform.default),
    aten.randn_like.default: _like(aten.normal_functional.default),
    aten.randint.default: _randint,
    aten.randint.low: _randint_low,
    aten.randint_like.default: _randint_like,
    aten.randint_like.low_dtype: _randint_like_low,
}
"""As the composite kernels of these ops do it: an empty tensor, filled."""


def is_random(target: Any) -> bool:
    """Whether a node with this target draws."""
    return isinstance(target, OpOverload) and target in RULES and RULES[target].rng


def keep_random_results(joint: GraphModule) -> None:
    """Mark random nodes of a joint graph so that the partitioner saves what they gave."""
    for node in joint.graph.nodes:
        if is_random(node.target):
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
            for user in node.users:
                if getattr(user.target, "__name__", "") == "getitem":
                    user.meta["recompute"] = CheckpointPolicy.MUST_SAVE
