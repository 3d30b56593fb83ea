"""Every error this package raises on purpose, each with a code that docs/errors.md explains.

Imports nothing of ours. Errors that C++ raises carry codes too: csrc/util/check.h.
"""

from __future__ import annotations

import torch


class TpuError(RuntimeError):
    """Base of every error this package raises on purpose."""

    code = "TPU-E000"

    def __init__(self, message: str, *, op: str = "", hint: str = "") -> None:
        self.op, self.hint = op, hint
        head = f"[{op}] " if op else ""
        tail = f"\n  Fix: {hint}" if hint else ""
        super().__init__(f"{head}{message}{tail}\n  ({self.code}, see docs/errors.md)")


class LoweringMissing(TpuError, NotImplementedError):
    """No lowering rule, no decomposition, no composite kernel, and the CPU fallback is an error."""

    code = "TPU-E101"


class LoweringMismatch(TpuError):
    """A rule returned a type that is not the one the meta kernel promised. A bug in the rule."""

    code = "TPU-E102"


class UnsupportedDtype(TpuError, TypeError):
    """A dtype that no StableHLO program can hold."""

    code = "TPU-E103"


class CompileFailed(TpuError):
    """The compiler of the plugin refused a program."""

    code = "TPU-E104"


class CompileOptionUnknown(TpuError, ValueError):
    """`torch.compile` was given a mode or an option that the backend does not have."""

    code = "TPU-E105"


class IndexOutOfRange(TpuError, IndexError):
    """An index tensor holds an index that its tensor does not have. Raised in debug mode only."""

    code = "TPU-E106"


class ExportUnsupported(TpuError, NotImplementedError):
    """A model that cannot be saved as a program: dynamic sizes, or inputs that are no tensors."""

    code = "TPU-E111"


class ProgramFileInvalid(TpuError, ValueError):
    """A saved program that is damaged, incomplete, or of a newer format."""

    code = "TPU-E112"


class InputMismatch(TpuError, ValueError):
    """A saved program was called with other inputs than it takes."""

    code = "TPU-E211"


class PluginNotFound(TpuError):
    """The PJRT plugin that was asked for is not there, or cannot be loaded."""

    code = "TPU-E301"


class PluginTooOld(TpuError, NotImplementedError):
    """The PJRT plugin lacks a function that is needed."""

    code = "TPU-E302"


class UsedAfterFork(TpuError):
    """The device was used in a process forked from one that had used it."""

    code = "TPU-E303"


class OutOfMemory(TpuError, torch.OutOfMemoryError):
    """The device has no room for a buffer."""

    code = "TPU-E304"


class ExtraMissing(TpuError, ImportError):
    """A package of an optional extra is not installed."""

    code = "TPU-E305"
