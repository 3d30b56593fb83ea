"""What hardware there is, see :mod:`torch_tpu.runtime.device`."""

from torch_tpu.runtime import device

__all__ = ["get_tpu_device_count", "get_tpu_device_name"]


def get_tpu_device_name() -> str:
    """The kind of the first device, as its plugin calls it: ``"TPU v6e"``."""
    return device.get_device_name(0)


def get_tpu_device_count() -> int:
    """How many devices this process has."""
    return device.device_count()
