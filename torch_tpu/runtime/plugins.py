"""Which PJRT plugin to load, decided without loading one or touching hardware."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from torch_tpu import config
from torch_tpu.errors import PluginNotFound

_GOOGLE_PCI_VENDOR = "0x1ae0"


@dataclass(frozen=True, slots=True)
class PluginSpec:
    """A plugin file and the options of its client. ``path`` is empty when there is to be no device."""

    path: str
    kind: str  # cpu, tpu, cuda, path or none

    @property
    def options(self) -> dict[str, str | int | bool | float]:
        """Options of the client. Read late: launchers may change settings after the plugin is chosen."""
        return {"cpu_device_count": config.CPU_DEVICES.value} if self.kind == "cpu" else {}

    @property
    def host_kernels(self) -> bool:
        """Whether programs may call kernels of this process, if the plugin turns out to run on the CPU."""
        return config.HOST_KERNELS.value

    @property
    def devices(self) -> int:
        """How many devices to expect before the client exists."""
        match self.kind:
            case "none":
                return 0
            case "cpu":
                return config.CPU_DEVICES.value
            case "tpu":
                return max(1, attached_tpus())
            case "cuda":
                return max(1, len(list(Path("/dev").glob("nvidia[0-9]*"))))
            case _:
                return 1


NO_PLUGIN = PluginSpec("", "none")


def _package_dirs(name: str) -> Iterator[Path]:
    try:
        spec = importlib.util.find_spec(name)
    except ModuleNotFoundError:
        return
    for place in (spec.submodule_search_locations or []) if spec is not None else []:
        yield Path(place)


def _first_file(package: str, *names: str) -> str:
    for folder in _package_dirs(package):
        for name in names:
            if (folder / name).is_file():
                return str(folder / name)
    return ""


def attached_tpus() -> int:
    """TPU chips on the PCI bus of this host."""
    found = 0
    for device in Path("/sys/bus/pci/devices").glob("*"):
        vendor, kind = device / "vendor", device / "class"
        if vendor.is_file() and vendor.read_text().strip() == _GOOGLE_PCI_VENDOR:
            found += kind.read_text().strip() == "0x120000"  # processing accelerator, not a network card
    return found


def libtpu_path() -> str:
    """The libtpu to load: TPU_LIBRARY_PATH, else the one of the package; empty if there is none."""
    given = config.TPU_LIBRARY_PATH.value
    return str(given) if given is not None else _first_file("libtpu", "libtpu.so")


def _cpu() -> PluginSpec:
    path = _first_file("xla_plugins.xla_cpu_pjrt", "xla_cpu_pjrt.so")
    return PluginSpec(path, "cpu")


def _tpu() -> PluginSpec:
    return PluginSpec(libtpu_path(), "tpu")


def _cuda() -> PluginSpec:
    for package in ("jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12"):
        if path := _first_file(package, "xla_cuda_plugin.so"):
            return PluginSpec(path, "cuda")
    return PluginSpec("", "cuda")


_BY_NAME = {"cpu": (_cpu, "xla-cpu-pjrt"), "tpu": (_tpu, "libtpu"), "cuda": (_cuda, "jax-cuda12-plugin")}


def choose() -> PluginSpec:
    """The plugin that TORCH_TPU_PLUGIN names; for ``auto`` a TPU if one is attached, else the CPU.

    On a machine where torch itself has a usable GPU, ``auto`` means no device: installing this package must not move
    programs that pick torch's accelerator to an emulated one.

    Raises:
        PluginNotFound: the plugin asked for by name is not installed, or the file does not exist.
    """
    wanted = config.PLUGIN.value
    if wanted == "none":
        return NO_PLUGIN
    if isinstance(wanted, Path):
        if not wanted.is_file():
            raise PluginNotFound(
                f"TORCH_TPU_PLUGIN={wanted}: no such file.", hint="give the path of a PJRT plugin (.so)."
            )
        return PluginSpec(str(wanted), "path")
    if wanted == "auto":
        return _auto()
    make, package = _BY_NAME[wanted]
    spec = make()
    if not spec.path:
        raise PluginNotFound(f"TORCH_TPU_PLUGIN={wanted}: its plugin is not installed.", hint=f"pip install {package}")
    return spec


def _auto() -> PluginSpec:
    if attached_tpus() and libtpu_path():
        return _tpu()
    if torch.version.cuda is not None and torch.cuda.is_available():
        return NO_PLUGIN
    cpu = _cpu()
    return cpu if cpu.path else NO_PLUGIN
