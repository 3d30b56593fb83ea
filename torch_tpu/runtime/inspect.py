"""Look at every op of a block: for values that are not finite, and for results that differ from the CPU's."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only


class NonFiniteError(FloatingPointError):
    """An op made NaN or inf of finite inputs."""


class AccuracyError(AssertionError):
    """An op gave other values on the device than on the CPU."""


def _ours(tree: Any) -> list[torch.Tensor]:
    return [t for t in tree_leaves(tree) if isinstance(t, torch.Tensor) and t.device.type == "tpu"]


def _finite(tensors: list[torch.Tensor]) -> bool:
    return all(bool(t.isfinite().all()) for t in tensors if t.is_floating_point() or t.is_complex())


def _written(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    schema = func._schema.arguments
    given = dict(zip((a.name for a in schema), args, strict=False)) | kwargs
    return _ours([given.get(a.name) for a in schema if a.alias_info is not None and a.alias_info.is_write])


class _DetectNonFinite(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        made = {id(t) for t in _written(func, args, kwargs)}
        clean = _finite([t for t in _ours((args, kwargs)) if id(t) not in made])
        result = func(*args, **kwargs)
        uninitialised = "empty" in func._schema.name
        if clean and not uninitialised and not _finite([*_ours(result), *_written(func, args, kwargs)]):
            raise NonFiniteError(f"[{func}] gave NaN or inf although its inputs are finite.")
        return result


class _CheckAccuracy(TorchDispatchMode):
    def __init__(self, rtol: float | None, atol: float | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        if rtol is not None or atol is not None:
            rtol, atol = rtol or 0.0, atol or 0.0
        self.rtol, self.atol = rtol, atol

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not _ours((args, kwargs)) or torch.Tag.nondeterministic_seeded in func.tags or func.is_view:
            return func(*args, **kwargs)
        on_cpu = tree_map_only(torch.Tensor, lambda t: t.detach().cpu(), (args, kwargs))
        result = func(*args, **kwargs)
        expected = func(*on_cpu[0], **on_cpu[1])
        pairs = zip(tree_leaves(result), tree_leaves(expected), strict=True)
        for number, (a, e) in enumerate((a, e) for a, e in pairs if isinstance(a, torch.Tensor)):
            try:
                torch.testing.assert_close(
                    a.detach().cpu(), e, equal_nan=True, check_stride=False, rtol=self.rtol, atol=self.atol
                )
            except AssertionError as why:
                raise AccuracyError(
                    f"[{func}] result {number} differs from the CPU's.\n{why}\non the device: {a}\non the CPU: {e}"
                ) from None
        return result


@contextlib.contextmanager
def detect_nonfinite() -> Iterator[None]:
    """Raise at the first op of the block, in this thread, that makes NaN or inf of finite inputs.

    Reads each result on the host: slow.

    Raises:
        NonFiniteError: a ``FloatingPointError`` that names the op.
    """
    with _DetectNonFinite():  # type: ignore[no-untyped-call]
        yield


@contextlib.contextmanager
def check_accuracy(*, rtol: float | None = None, atol: float | None = None) -> Iterator[None]:
    """Run each op of the block also on the CPU, and raise at the first that differs. Random ops are left out.

    Args:
        rtol: relative tolerance; with ``atol`` also None, that of ``torch.testing.assert_close`` for the dtype.
        atol: absolute tolerance.

    Raises:
        AccuracyError: an ``AssertionError`` with the op and both values.
    """
    with _CheckAccuracy(rtol, atol):
        yield
