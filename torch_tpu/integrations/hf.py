"""Hugging Face libraries: one call, before they are used.

    import torch_tpu.integrations.hf

    torch_tpu.integrations.hf.enable()

transformers, diffusers, datasets and sentence-transformers need nothing. The others ask for it because

- accelerate (and with it ``transformers.Trainer`` and trl) knows a list of devices without "tpu" and takes the CPU;
- accelerate knows a list of compiler backends without "tpu", so ``torch_compile_backend="tpu"`` is refused;
- safetensors refuses the device string "tpu", so ``load_file(f, device="tpu")`` and
  ``PeftModel.from_pretrained(..., torch_device="tpu")`` fail; it takes the accelerator's index.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["enable"]

_DEVICE = "ACCELERATE_TORCH_DEVICE"


@functools.cache
def enable() -> None:
    """Make installed Hugging Face libraries use "tpu". Later calls do nothing.

    Sets ``ACCELERATE_TORCH_DEVICE`` to ``tpu:0`` unless it is set: each process trains on its first device.

    Raises:
        RuntimeError: an ``Accelerator``, ``TrainingArguments`` or ``Trainer`` was made before, and took another device.
    """
    if importlib.util.find_spec("accelerate") is not None:
        _accelerate()
    if importlib.util.find_spec("safetensors") is not None:
        _safetensors()


def _accelerate() -> None:
    from accelerate.state import PartialState
    from accelerate.utils import DynamoBackend

    os.environ.setdefault(_DEVICE, "tpu:0")
    chosen = PartialState._shared_state.get("device")
    if chosen is not None and chosen.type != torch.device(os.environ[_DEVICE]).type:
        raise RuntimeError(
            f"accelerate has already chosen the device {chosen}.\n"
            "  Fix: call torch_tpu.integrations.hf.enable() before the first Accelerator or TrainingArguments."
        )
    if "TPU" not in DynamoBackend.__members__:
        member = str.__new__(DynamoBackend, "TPU")
        member._name_ = member._value_ = "TPU"
        DynamoBackend._member_map_["TPU"] = DynamoBackend._value2member_map_["TPU"] = member
        DynamoBackend._member_names_.append("TPU")


def _safetensors() -> None:
    import safetensors
    import safetensors.torch

    opened = _with_index(safetensors.safe_open)
    for module in (safetensors, safetensors.torch):
        vars(module)["safe_open"] = opened


def _with_index(safe_open: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(safe_open, updated=())
    def opened(filename: Any, framework: str, device: Any = "cpu", **options: Any) -> Any:
        if isinstance(device, (str, torch.device)) and torch.device(device).type == "tpu":
            device = torch.device(device).index or 0
        return safe_open(filename, framework=framework, device=device, **options)

    return opened
