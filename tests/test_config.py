from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from torch_tpu import config


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No variable is set and nothing was read yet; what the test reads is forgotten afterwards."""
    for name in config.SETTINGS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(config, "_warned", set())
    for setting in config.SETTINGS.values():
        setting.forget()
    yield
    for setting in config.SETTINGS.values():
        setting.forget()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("TORCH_TPU_PLUGIN", "auto"),
        ("TPU_LIBRARY_PATH", None),
        ("TORCH_TPU_CPU_DEVICES", 1),
        ("TORCH_TPU_CPU_FALLBACK", "warn"),
        ("TORCH_TPU_DEBUG", 0),
        ("TORCH_TPU_DUMP_DIR", None),
        ("TORCH_TPU_CACHE", True),
        ("TORCH_TPU_CACHE_BYTES", 4 * 1024**3),
        ("TORCH_TPU_CACHE_TRUST", False),
        ("TORCH_TPU_MAX_PROGRAMS", 4000),
    ],
)
def test_default(name: str, value: object) -> None:
    assert config.SETTINGS[name].value == value


def test_every_setting_has_help_and_a_default_to_show() -> None:
    for setting in config.SETTINGS.values():
        assert setting.help.endswith(".")
        assert setting.shown_default


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("TORCH_TPU_PLUGIN", "none", "none"),
        ("TORCH_TPU_PLUGIN", "/opt/plugin.so", Path("/opt/plugin.so")),
        ("TORCH_TPU_PLUGIN", "/opt/plugin", Path("/opt/plugin")),
        ("TORCH_TPU_PLUGIN", "plugin.so", Path.cwd() / "plugin.so"),
        ("TPU_LIBRARY_PATH", "/lib/libtpu.so", Path("/lib/libtpu.so")),
        ("TORCH_TPU_CPU_DEVICES", "8", 8),
        ("TORCH_TPU_CPU_FALLBACK", "error", "error"),
        ("TORCH_TPU_DEBUG", "5", 5),
        ("TORCH_TPU_DUMP_DIR", "/tmp/dump", Path("/tmp/dump")),
        ("TORCH_TPU_CACHE", "0", False),
        ("TORCH_TPU_CACHE_DIR", "~/c", Path.home() / "c"),
        ("TORCH_TPU_CACHE_BYTES", "0", 0),
        ("TORCH_TPU_CACHE_TRUST", "1", True),
        ("TORCH_TPU_MAX_PROGRAMS", "17", 17),
    ],
)
def test_value(monkeypatch: pytest.MonkeyPatch, name: str, text: str, value: object) -> None:
    monkeypatch.setenv(name, text)
    assert config.SETTINGS[name].value == value
    assert config.SETTINGS[name].is_set


@pytest.mark.parametrize(
    ("name", "text", "wanted"),
    [
        ("TORCH_TPU_PLUGIN", "gpu", "auto, cpu, tpu, cuda, none or the path"),
        ("TORCH_TPU_CPU_DEVICES", "0", "from 1 to 64"),
        ("TORCH_TPU_CPU_DEVICES", "two", "from 1 to 64"),
        ("TORCH_TPU_CPU_FALLBACK", "1", "warn, error or silent"),
        ("TORCH_TPU_DEBUG", "6", "from 0 to 5"),
        ("TORCH_TPU_DEBUG", "-1", "from 0 to 5"),
        ("TORCH_TPU_CACHE", "yes", "0 or 1"),
        ("TORCH_TPU_CACHE_BYTES", "4GiB", "at least 0"),
        ("TORCH_TPU_CACHE_TRUST", "true", "0 or 1"),
        ("TORCH_TPU_MAX_PROGRAMS", "0", "at least 1"),
    ],
)
def test_bad_value_names_the_variable_the_value_and_what_was_wanted(
    monkeypatch: pytest.MonkeyPatch, name: str, text: str, wanted: str
) -> None:
    monkeypatch.setenv(name, text)
    with pytest.raises(ValueError, match="want") as caught:
        _ = config.SETTINGS[name].value
    message = str(caught.value)
    assert f"{name}={text!r}" in message
    assert wanted in message
    monkeypatch.delenv(name)
    _ = config.SETTINGS[name].value  # a failure is not remembered


def test_read_at_first_use_and_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_TPU_DEBUG", "3")  # after import: launchers do this
    assert config.DEBUG.value == 3
    monkeypatch.setenv("TORCH_TPU_DEBUG", "4")
    assert config.DEBUG.value == 3
    config.DEBUG.forget()
    assert config.DEBUG.value == 4


def test_none_is_remembered_too(monkeypatch: pytest.MonkeyPatch) -> None:
    assert config.DUMP_DIR.value is None
    monkeypatch.setenv("TORCH_TPU_DUMP_DIR", "/tmp/late")
    assert config.DUMP_DIR.value is None


def test_empty_is_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_TPU_DEBUG", "")
    assert config.DEBUG.value == 0
    assert not config.DEBUG.is_set


def test_cache_dir_follows_xdg(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/data/cache")
    assert config.CACHE_DIR.value == Path("/data/cache/torch_tpu")


@pytest.mark.parametrize("xdg", [None, "relative"])
def test_cache_dir_without_xdg(monkeypatch: pytest.MonkeyPatch, xdg: str | None) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    if xdg is None:
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    else:
        monkeypatch.setenv("XDG_CACHE_HOME", xdg)
    assert config.CACHE_DIR.value == Path("/home/someone/.cache/torch_tpu")


def test_cache_dir_without_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr("os.path.expanduser", lambda text: text)
    assert config.CACHE_DIR.value.name.startswith("torch_tpu-")


def test_override(monkeypatch: pytest.MonkeyPatch) -> None:
    with config.CPU_FALLBACK.override("error"):
        assert config.CPU_FALLBACK.value == "error"
    monkeypatch.setenv("TORCH_TPU_CPU_FALLBACK", "silent")
    assert config.CPU_FALLBACK.value == "silent"  # the block did not count as the first read


def test_unknown_names_are_warned_of_once(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("TORCH_TPU_DEBG", "TORCH_TPU_XYZZY_QUUX", "TORCH_TPU_DEBUG", "PATH")
    monkeypatch.setattr("os.environ", dict.fromkeys(names, "1"))
    with (
        pytest.warns(UserWarning, match="QUUX is set"),
        pytest.warns(UserWarning, match="did you mean TORCH_TPU_DEBUG"),
    ):
        found = config.unknown()
    assert found == {"TORCH_TPU_DEBG": "TORCH_TPU_DEBUG", "TORCH_TPU_XYZZY_QUUX": ""}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert config.unknown() == found


def test_declared_twice() -> None:
    with pytest.raises(TypeError, match="declared twice"):
        config.Setting(name="TORCH_TPU_DEBUG", default=int, shown_default="0", parse=int, help="")
