"""Eager modes, see :mod:`torch_tpu.runtime.modes`."""

from torch_tpu.runtime.modes import EagerMode, set_eager_mode

__all__ = ["EagerMode", "set_eager_mode"]
