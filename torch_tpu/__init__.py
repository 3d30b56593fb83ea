"""PyTorch on XLA devices: ``import torch`` and the device ``"tpu"`` is there.

Importing this package is not needed; it registers the device if autoload was turned off.
"""

from importlib.metadata import version as _version

import torch as _torch  # noqa: F401  (first: its autoload imports this package again)

from torch_tpu._loader import load as _load

__version__ = _version("torch_tpu")
__all__ = ["__version__"]

_load()
