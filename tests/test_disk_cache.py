"""Compiled programs on disk: a warm process compiles nothing, and no state of the folder changes a result."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import stat
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from torch_tpu import config
from torch_tpu.lowering import rules
from torch_tpu.lowering.registry import RULES
from torch_tpu.modes import stored
from torch_tpu.modes.plan import Output, Plan
from torch_tpu.runtime import disk_cache, extension

# In place, through a view, a list of results, a random number, a data-dependent size, a reshape of a storage.
PROGRAM = """
import json, torch
from torch_tpu.runtime import disk_cache, extension
torch.manual_seed(3)
a = torch.arange(12.0, device="tpu").reshape(3, 4)
a[1:3] += 1
rows = a.split_with_sizes([1, 2])
results = [a, a @ a.t(), torch.sort(a)[1], (a > 4).nonzero(), torch.rand(3, device="tpu"), rows[1].sum(0)]
counts = disk_cache.counts
print(json.dumps({
    "results": [r.tolist() for r in results],
    "stats": extension.cache_stats(),
    "hits": counts.hits,
    "stores": counts.stores,
}))
"""


def start(folder: Path, **env: str) -> subprocess.Popen[str]:
    settings = {"TORCH_TPU_CACHE": "1", "TORCH_TPU_CACHE_DIR": str(folder), "TORCH_TPU_CPU_FALLBACK": "error"}
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        env=os.environ | settings | env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> dict:
    out, err = process.communicate()
    assert process.returncode == 0, err
    return json.loads(out.splitlines()[-1]) | {"stderr": err}


def entries(folder: Path, suffix: str = "") -> list[Path]:
    return sorted(p for p in folder.rglob(f"*{suffix}") if p.is_file())


@pytest.fixture(scope="module")
def filled(tmp_path_factory) -> tuple[Path, list]:
    """A folder that two processes filled at the same time, and their results."""
    folder = tmp_path_factory.mktemp("cache")
    first, second = (finish(p) for p in [start(folder), start(folder)])
    assert first["results"] == second["results"]
    assert first["stats"]["compiled"] + second["stats"]["compiled"] > 0
    return folder, first["results"]


@pytest.fixture
def folder(tmp_path):
    """An empty folder for the cache of this process."""
    with config.CACHE.override(True), config.CACHE_DIR.override(tmp_path / "cache"):
        yield tmp_path / "cache"


@pytest.fixture(autouse=True)
def no_edits(monkeypatch):
    """Keys are made whether or not somebody edits our sources while the tests run."""
    monkeypatch.setattr(extension, "LOADED_NS", time.time_ns() + 10**12)
    stored._files_digest.cache_clear()


# ---- processes


def test_a_warm_process_compiles_nothing(filled):
    warm = finish(start(filled[0]))
    assert warm["results"] == filled[1]
    assert warm["stats"]["compiled"] == warm["stores"] == 0
    assert warm["stats"]["loaded"] >= 6
    assert warm["hits"] >= 2 * warm["stats"]["loaded"]  # a plan and a program each


def test_bad_entries_are_compiled_again_and_mended(filled, tmp_path):
    damages = [
        lambda d: d[:-7],
        lambda d: d[:60],
        lambda d: b"",
        lambda d: d[:-1] + bytes([d[-1] ^ 1]),
        lambda d: b"?" * 99,
    ]
    for i, path in enumerate(entries(filled[0], ".plan")[::2]):
        path.write_bytes(damages[i % len(damages)](path.read_bytes()))
    with config.CACHE_DIR.override(filled[0]):
        for i, path in enumerate(entries(filled[0], ".exe")):
            if i % 2:
                path.write_bytes(damages[i % len(damages)](path.read_bytes()))
            else:  # whole, but nothing that the plugin takes
                disk_cache.store(path.name, b"not an executable")
    process = finish(start(filled[0], TORCH_TPU_DEBUG="1", TORCH_TPU_DUMP_DIR=str(tmp_path)))
    assert process["results"] == filled[1]
    assert process["stats"]["loaded"] == 0
    assert process["hits"] > 0
    with config.CACHE_DIR.override(filled[0]):
        assert all(disk_cache.load(p.name) not in (None, b"not an executable") for p in entries(filled[0]))
    lines = [line for line in process["stderr"].splitlines() if line.startswith("compiled ")]
    assert len(lines) == process["stats"]["compiled"] == len(list(tmp_path.glob("*.mlir")))
    assert any(line.startswith("compiled aten.sort.default (f32[12]) -> (f32[3,4], i64[3,4]) in ") for line in lines)
    (text,) = tmp_path.glob("aten_sort_*.mlir")
    assert text.read_text().startswith("module @aten_sort")


# ---- this process


def test_nothing_is_kept_when_turned_off(folder):
    with config.CACHE.override(False):
        assert torch.full((3, 1, 5), 2.0, device="tpu").mul(3).sum().item() == 90
        assert stored.plan_name(a_call(), None) == ""
    with config.CACHE_BYTES.override(0):
        assert torch.full((3, 1, 6), 2.0, device="tpu").mul(3).sum().item() == 108
    assert not folder.exists()


def test_only_the_user_may_look_inside(folder):
    disk_cache.store("ab12.plan", b"payload")
    assert [stat.S_IMODE(p.stat().st_mode) for p in (folder, folder / "ab", folder / "ab" / "ab12.plan")] == [
        0o700,
        0o700,
        0o600,
    ]


def test_entries_of_another_user_count_only_if_trusted(folder, monkeypatch):
    disk_cache.store("ab12.plan", b"payload")
    real = os.fstat
    monkeypatch.setattr(os, "fstat", lambda fd: os.stat_result([*real(fd)[:4], os.geteuid() + 1, *real(fd)[5:10]]))
    assert disk_cache.load("ab12.plan") is None
    with config.CACHE_TRUST.override(True):
        assert disk_cache.load("ab12.plan") == b"payload"


def test_an_entry_under_another_name_is_a_miss(folder):
    disk_cache.store("ab12.plan", b"payload")
    os.rename(folder / "ab" / "ab12.plan", folder / "ab" / "ab13.plan")
    assert disk_cache.load("ab12.plan") is None
    assert disk_cache.load("ab13.plan") is None


def test_least_recently_used_entries_go_first(folder):
    for i in range(10):
        disk_cache.store(f"{i:02}.exe", bytes(1000))
        os.utime(folder / f"{i:02}" / f"{i:02}.exe", (1000 + i, 1000 + i))
    assert disk_cache.load("00.exe") is not None  # now the youngest
    with config.CACHE_BYTES.override(5000):
        disk_cache.evict()
        assert [p.name for p in entries(folder)] == ["00.exe", "07.exe", "08.exe", "09.exe"]
        before = disk_cache.counts.evictions
        disk_cache.evict()
        assert disk_cache.counts.evictions == before


def test_the_size_is_looked_at_now_and_then(folder):
    with config.CACHE_BYTES.override(20_000):
        for i in range(3 * 64):
            disk_cache.store(f"{i:03}.exe", bytes(1000))
    assert sum(p.stat().st_size for p in entries(folder)) < 20_000 + 64 * 1100


def test_an_entry_larger_than_the_limit_is_not_kept(folder):
    with config.CACHE_BYTES.override(500):
        disk_cache.store("ab12.exe", bytes(1000))
    assert not folder.exists()


def test_what_a_killed_writer_left_is_ignored_and_removed(folder):
    disk_cache.store("ab12.exe", b"payload")
    old, young = folder / "ab" / ".new-old", folder / "ab" / ".new-young"
    for path in (old, young):
        path.write_bytes(b"half an ent")
    os.utime(old, (time.time() - 7200,) * 2)
    disk_cache.evict()
    assert not old.exists()
    assert young.exists()  # its writer may be at work
    assert disk_cache.load("ab12.exe") == b"payload"


def test_files_of_others_are_neither_counted_nor_removed(folder):
    folder.mkdir()
    foreign = [folder / "letter.txt", folder / "model.exe", folder / ".newsrc"]
    for path in foreign:
        path.write_bytes(bytes(1000))
        os.utime(path, (1000, 1000))
    disk_cache.store("ab12.exe", b"payload")
    with config.CACHE_BYTES.override(100):
        disk_cache.evict()
    assert all(path.exists() for path in foreign)
    assert disk_cache.load("ab12.exe") == b"payload"


def test_an_interrupted_write_leaves_nothing(folder, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        disk_cache.store("ab12.exe", b"payload")
    assert entries(folder) == []


def test_writers_and_readers_at_once_see_whole_entries(folder):
    payloads = {bytes([i]) * 50_000 for i in range(8)}

    def work(payload: bytes) -> list[bytes | None]:
        seen = []
        for i in range(20):
            disk_cache.store(f"{i % 3}0.exe", payload)
            seen.append(disk_cache.load(f"{i % 3}0.exe"))
            disk_cache.evict()
        return seen

    with config.CACHE_BYTES.override(120_000), ThreadPoolExecutor(8) as pool:
        seen = [s for result in pool.map(work, payloads) for s in result]
    assert set(seen) <= payloads | {None}
    assert set(seen) & payloads


def test_a_folder_that_cannot_be_written_is_reported_once(tmp_path, caplog):
    (tmp_path / "file").write_text("not a folder")
    disk_cache._complain.cache_clear()
    with (
        config.CACHE.override(True),
        config.CACHE_DIR.override(tmp_path / "file" / "cache"),
        caplog.at_level(logging.WARNING, "torch_tpu"),
    ):
        assert torch.full((3, 2, 5), 2.0, device="tpu").mul(3).sum().item() == 180
    assert len(caplog.records) == 1
    assert "the disk cache keeps nothing" in caplog.text


def test_errors_of_the_call_are_not_kept(folder):
    a, b = torch.ones(3, 7, device="tpu"), torch.ones(3, 6, device="tpu")
    before = len(entries(folder))
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"size|broadcast"):
            a + b
    assert len(entries(folder)) == before


# ---- keys


def a_call(**changes) -> SimpleNamespace:
    view = (torch.float32, [2], [1], 0, False, False, False, False, None)
    fields = {
        "name": "aten.add.Tensor",
        "state": 6,
        "args": [("tensor", 0), ("operand", 0), ("value", 1)],
        "tensors": [view],
        "slots": [(torch.float32, [2])],
        "operands": [("float", 1, None, True)],
    }
    return SimpleNamespace(**(fields | changes))


assert rules  # imported for its effect: the rule table
ADD = RULES[torch.ops.aten.add.Tensor]


def test_equal_calls_have_equal_names(folder):
    assert stored.plan_name(a_call(), ADD) == stored.plan_name(a_call(), ADD) != ""


@pytest.mark.parametrize(
    "change",
    [
        {"name": "aten.sub.Tensor"},
        {"state": 7},
        {"args": [("tensor", 0), ("operand", 0), ("value", 2)]},
        {"args": [("tensor", 0), ("operand", 0), ("value", 1.0)]},
        {"args": [("tensor", 0), ("operand", 0), ("value", True)]},
        {"args": [("tensor", 0), ("operand", 0), None]},
        {"tensors": [(torch.float32, [2], [0], 0, False, False, False, False, None)]},
        {"slots": [(torch.float64, [2])]},
        {"operands": [("int", 1, None, True)]},
    ],
)
def test_every_part_of_a_call_is_in_its_name(folder, change):
    assert stored.plan_name(a_call(**change), ADD) != stored.plan_name(a_call(), ADD)


def test_values_without_a_stable_text_are_not_kept(folder):
    assert stored.plan_name(a_call(args=[("value", object())]), ADD) == ""
    assert stored.plan_name(a_call(args=[("value", torch.Generator())]), ADD) != ""


def test_a_rule_from_outside_counts_with_its_source(folder, tmp_path):
    source = tmp_path / "rules.py"
    entry = dataclasses.replace(ADD, where=f"{source}:3")

    def name(text: str, age_s: float) -> str:
        source.write_text(text)
        loaded_s = extension.LOADED_NS / 1e9
        os.utime(source, (loaded_s - age_s,) * 2)
        stored._files_digest.cache_clear()
        return stored.plan_name(a_call(), entry)

    names = {name("one", 1), name("two", 1), stored.plan_name(a_call(), ADD)}
    assert len(names) == 3
    assert "" not in names
    assert name("two", -1) == ""  # edited since it was read
    assert stored.plan_name(a_call(), dataclasses.replace(ADD, where="<stdin>:1")) == ""


def test_the_fingerprint_follows_the_build_of_the_extension(tmp_path, monkeypatch):
    fingerprint = disk_cache.build_fingerprint.__wrapped__
    file = tmp_path / "_C.so"
    monkeypatch.setattr(disk_cache._C, "__file__", str(file))

    def built(content: bytes) -> str:
        file.write_bytes(content)
        os.utime(file, (1000, 1000))
        return fingerprint()

    assert built(b"one") == built(b"one") != built(b"two")
    os.utime(file, ns=(extension.LOADED_NS,) * 2)  # replaced since it was loaded
    assert fingerprint() != fingerprint()
    file.unlink()
    assert fingerprint() != fingerprint()


@pytest.mark.parametrize("setting", [config.XLA_FLAGS, config.LIBTPU_INIT_ARGS])
def test_the_fingerprint_follows_the_compilers_variables(setting):
    fingerprint = disk_cache.build_fingerprint.__wrapped__
    before = fingerprint()
    with setting.override("--some_option=1"):
        assert fingerprint() != before
    assert fingerprint() == before


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("plugin", "/another/plugin.so"),
        ("platform_version", "other"),
        ("api_version", (0, 1)),
        ("compile_options", b"other"),
        ("kind", "other"),
    ],
)
def test_the_fingerprint_follows_the_plugin(monkeypatch, key, value):
    info = extension.device_info(0) | {key: value}
    monkeypatch.setattr(disk_cache._C, "device_info", lambda _: info)
    assert disk_cache.build_fingerprint.__wrapped__() != disk_cache.build_fingerprint()


def test_the_fingerprint_follows_the_cpu(monkeypatch):
    monkeypatch.setattr(disk_cache, "_cpu_features", lambda: "flags: none")
    assert disk_cache.build_fingerprint.__wrapped__() != disk_cache.build_fingerprint()


def test_plans_survive_the_disk(folder):
    plan = Plan(
        stablehlo='module @m {\n  "quoted"\n}\n',
        arg_slots=[0, 2],
        donated=[1],
        encodings=[1, 4],
        outputs=[
            Output(torch.bfloat16, (4, 3), sizes=(3, 4), strides=(1, 3)),
            Output(torch.int64, (), slot=2),
            Output(torch.bool, (64,), sizes=(64,), strides=(1,), count=1, count_dim=0),
        ],
        returns=[("output", 0), ("argument", 3), ("none",), ("list", [("output", 1), ("none",)])],
        resizes=[(1, (3, 4), (4, 1))],
    )
    stored.keep_plan("ab12.plan", plan)
    assert stored.find_plan("ab12.plan") == plan
    for rung in ("cpu", "composite"):
        stored.keep_plan("ab13.plan", Plan(rung=rung))
        assert stored.find_plan("ab13.plan") == Plan(rung=rung)
