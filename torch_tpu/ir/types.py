"""Tensor types as the lowering sees them: a shape and an element type, nothing else."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from torch_tpu.errors import UnsupportedDtype

# torch dtype -> MLIR spelling. The only such table in the package.
ELEMENT_TYPES: dict[torch.dtype, str] = {
    torch.bool: "i1",
    torch.int8: "i8",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.uint8: "ui8",
    torch.uint16: "ui16",
    torch.uint32: "ui32",
    torch.uint64: "ui64",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.float32: "f32",
    torch.float64: "f64",
    torch.complex64: "complex<f32>",
    torch.complex128: "complex<f64>",
    torch.float8_e4m3fn: "f8E4M3FN",
    torch.float8_e4m3fnuz: "f8E4M3FNUZ",
    torch.float8_e5m2: "f8E5M2",
    torch.float8_e5m2fnuz: "f8E5M2FNUZ",
    torch.float8_e8m0fnu: "f8E8M0FNU",
}

UNSIGNED = frozenset({torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64})
# Floats too narrow to compute in: rules compute in float32 and round once at the end.
NARROW = frozenset(
    {
        torch.float16,
        torch.bfloat16,
        torch.float8_e4m3fn,
        torch.float8_e4m3fnuz,
        torch.float8_e5m2,
        torch.float8_e5m2fnuz,
        torch.float8_e8m0fnu,
    }
)


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which ATen computes a pointwise op whose result is ``dtype`` (its "opmath" type)."""
    return torch.float32 if dtype in NARROW else dtype


def element_type(dtype: torch.dtype) -> str:
    """The MLIR spelling of ``dtype``. Raises UnsupportedDtype for dtypes that StableHLO does not have."""
    name = ELEMENT_TYPES.get(dtype)
    if name is None:
        raise UnsupportedDtype(
            f'{dtype} has no StableHLO element type; supported on "tpu": '
            + ", ".join(str(d).removeprefix("torch.") for d in ELEMENT_TYPES),
            hint="convert on the CPU first, for example x.to(torch.float32).to('tpu').",
        )
    return name


@dataclass(frozen=True, slots=True)
class TensorType:
    """Static tensor type. ``str`` gives the form used in messages and dumps: ``f32[8,16]``."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, t: torch.Tensor) -> TensorType:
        return cls(tuple(t.shape), t.dtype)

    @property
    def numel(self) -> int:
        n = 1
        for d in self.shape:
            n *= d
        return n

    @property
    def mlir(self) -> str:
        dims = "".join(f"{d}x" for d in self.shape)
        return f"tensor<{dims}{element_type(self.dtype)}>"

    def __str__(self) -> str:
        return f"{element_type(self.dtype)}[{','.join(map(str, self.shape))}]"
