"""What a miss hands to C++: a program and how to call it. Mirrors csrc/cache/program.h."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

# csrc/cache/program.h, Encoding.
SKIP, F32, F64, I32, I64 = range(5)


@dataclass(slots=True)
class Output:
    """One result of the program: a new tensor (``slot`` -1), or the next buffer of storage ``slot``."""

    dtype: torch.dtype
    dims: tuple[int, ...]
    slot: int = -1
    sizes: tuple[int, ...] = ()
    strides: tuple[int, ...] = ()
    count: int = -1  # output that holds the true size of dim `count_dim`
    count_dim: int = 0


@dataclass(slots=True)
class Plan:
    """``rung`` is program, composite (PyTorch's composite kernel) or cpu."""

    rung: str = "program"
    stablehlo: str = ""
    serialized: bytes = b""
    store_key: str = ""
    compile_options: bytes = b""  # as PJRT takes them; empty: the runtime's
    arg_slots: list[int] = field(default_factory=list)
    donated: list[int] = field(default_factory=list)
    consumed: list[int] = field(default_factory=list)
    encodings: list[int] = field(default_factory=list)
    outputs: list[Output] = field(default_factory=list)
    returns: list[tuple[Any, ...]] = field(default_factory=list)
    resizes: list[tuple[int, tuple[int, ...], tuple[int, ...]]] = field(default_factory=list)
    counters: int = -1  # how far the generator advances; -1: by the elements of the first output, rounded up to 4
