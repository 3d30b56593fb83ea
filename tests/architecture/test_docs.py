"""The docs say what the code says: every error, every setting, every program and every link."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from torch_tpu import config, errors

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md")])


def python_codes() -> set[str]:
    return {c.code for c in vars(errors).values() if isinstance(c, type) and issubclass(c, errors.TpuError)}


def cpp_codes() -> set[str]:
    text = (ROOT / "csrc" / "util" / "check.h").read_text(encoding="utf-8")
    body = re.search(r"enum class ErrorCode \{(.*?)\};", text, re.DOTALL)
    assert body is not None
    return {f"TPU-{name}" for name in re.findall(r"\bE\d{3}\b", body[1])}


def test_every_error_code_is_explained_and_none_is_left_over():
    explained = re.findall(r"^## (TPU-E\d{3})\b", (DOCS / "errors.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert explained == sorted(python_codes() | cpp_codes())


def test_every_error_has_cause_and_cure():
    sections = re.split(r"^## ", (DOCS / "errors.md").read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    short = [s.splitlines()[0] for s in sections if "**Cause.**" not in s or "**Cure.**" not in s]
    assert not short


def test_settings_page_is_up_to_date():
    made = subprocess.run(
        [sys.executable, ROOT / "tools" / "gen_docs.py", "env"], capture_output=True, text=True, check=True
    ).stdout
    assert all(f"`{name}`" in made for name in config.SETTINGS)
    assert (DOCS / "env.md").read_text(encoding="utf-8") == made, "run `make docs`"


def test_page_of_ops_is_up_to_date():
    made = subprocess.run(
        [sys.executable, ROOT / "tools" / "gen_docs.py", "ops"], capture_output=True, text=True, check=True
    ).stdout
    assert (DOCS / "ops.md").read_text(encoding="utf-8") == made, "run `make docs`"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    targets = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
    missing = [t for t in targets if "://" not in t and not (page.parent / t).exists()]
    assert not missing


@pytest.mark.parametrize("page", sorted((DOCS / "adr").glob("*.md")), ids=lambda p: p.name)
def test_decision_records_are_short_and_complete(page):
    text = page.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 40
    assert re.findall(r"^## (.*)$", text, re.MULTILINE) == [
        "Context",
        "Options",
        "Choice",
        "What would change our mind",
    ]


def test_the_readme_program_runs():
    programs = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    assert programs
    result = subprocess.run([sys.executable, "-c", programs[0]], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert "Warning: " not in result.stderr  # Python's; what the plugin logs is in capitals
    assert "tensor(" in result.stdout
