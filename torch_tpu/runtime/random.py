"""Random state of the devices: a seed and an offset each, 16 bytes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from torch_tpu import _C

Device = torch.device | str | int | None


def _generator(device: Device) -> torch.Generator:
    index = device if isinstance(device, int) else None if device is None else torch.device(device).index
    generator: torch.Generator = _C.default_generator(-1 if index is None else index)
    return generator


class _Generators:
    """The default generators, made when asked for: listing them must not touch the hardware."""

    def __len__(self) -> int:
        return int(_C.expected_device_count())

    def __getitem__(self, index: int) -> torch.Generator:
        return _generator(index)

    def __iter__(self) -> Iterator[torch.Generator]:
        return (self[i] for i in range(len(self)))


default_generators = _Generators()


def manual_seed(seed: int) -> None:
    """Seed the current device."""
    _generator(None).manual_seed(int(seed))


def manual_seed_all(seed: int) -> None:
    """Seed all devices. Touches no hardware: every `torch.manual_seed` ends here."""
    _C.seed_all(torch.Generator().manual_seed(int(seed)).initial_seed())  # maps negative seeds, refuses long ones


def seed() -> None:
    """A new random seed for the current device."""
    _generator(None).seed()


def seed_all() -> None:
    """One new random seed for all devices."""
    manual_seed_all(torch.Generator().seed())


def initial_seed() -> int:
    """Seed of the current device."""
    return int(_generator(None).initial_seed())


def get_rng_state(device: Device = "tpu") -> torch.Tensor:
    """State of a device as 16 bytes on the CPU: seed, offset."""
    return _generator(device).get_state()


def get_rng_state_all() -> list[torch.Tensor]:
    """States of all devices."""
    return [g.get_state() for g in default_generators]


def set_rng_state(new_state: torch.Tensor, device: Device = "tpu") -> None:
    """Set the state of a device from `get_rng_state`. Raises RuntimeError for another size."""
    _generator(device).set_state(new_state)


def set_rng_state_all(new_states: Iterable[torch.Tensor]) -> None:
    """Set the states of all devices."""
    for generator, state in zip(default_generators, new_states, strict=True):
        generator.set_state(state)
