"""Copies of the code for queued jobs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlx.runs import provenance
from rlx.runs.provenance import snapshot_environment, take_snapshot


def make_source(folder: Path) -> Path:
    for name in ("rlx/__init__.py", "rlx/losses/grpo.py", "environments/one/rlx_one/__init__.py", "docs/a.md"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"# {name}\n")
    (folder / ".gitignore").write_text("*.pyc\n")
    return folder


@pytest.fixture(params=["checkout", "copied", "installed"])
def source(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = make_source(tmp_path / ("site-packages" if request.param == "installed" else "source"))
    if request.param == "checkout":
        for command in (["init", "-q"], ["add", "."]):
            subprocess.run(["git", "-C", str(folder), *command], check=True)
    monkeypatch.setattr(provenance, "SOURCE", folder)
    return folder


def test_a_snapshot_is_the_code_as_it_is_with_what_is_not_committed(source: Path, tmp_path: Path):
    (source / "rlx" / "losses" / "grpo.py").write_text("changed\n")
    (source / "rlx" / "losses" / "mine.py").write_text("new\n")
    (source / "environments" / "one" / "words.txt").write_text("new\n")
    (source / "rlx" / "__pycache__").mkdir()
    (source / "rlx" / "__pycache__" / "x.pyc").write_text("")
    first = take_snapshot(tmp_path / "jobs")
    assert (first / "rlx" / "losses" / "mine.py").read_text() == "new\n"
    assert (first / "rlx" / "losses" / "grpo.py").read_text() == "changed\n"
    assert (first / "environments" / "one" / "words.txt").exists() == (source.name == "source"), "data that an environment may need"
    assert not (first / "docs").exists()
    assert not list(first.rglob("*.pyc"))
    assert take_snapshot(tmp_path / "jobs") == first, "the same code is copied once"
    (source / "rlx" / "losses" / "mine.py").write_text("changed\n")
    second = take_snapshot(tmp_path / "jobs")
    assert second != first
    assert (first / "rlx" / "losses" / "mine.py").read_text() == "new\n", "queued jobs keep their copy"


def test_packages_of_a_snapshot_come_before_installed_ones(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (source / "rlx" / "where.py").write_text("print(__file__)\n")
    copy = take_snapshot(tmp_path / "jobs")
    environments = [str(copy / "environments" / "one")] if source.name == "source" else []
    monkeypatch.setenv("PYTHONPATH", "/mine")
    variables = snapshot_environment(copy)
    assert variables["PYTHONPATH"].split(":") == [str(copy), *environments, "/mine", str(Path.cwd())]
    monkeypatch.setenv("PYTHONPATH", f"/mine:{Path.cwd()}")
    assert snapshot_environment(copy) == variables, "the working directory is named once"
    found = subprocess.run(
        [sys.executable, "-m", "rlx.where"], cwd=source, env=os.environ | variables, capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == str(copy / "rlx" / "where.py"), "although the working directory has one too"


def test_a_digest_of_code_passes_over_untracked_data(source: Path):
    before = provenance.code_digest()
    assert before is not None
    for untracked in ("rlx/.grpo.py.swp", "environments/one/data.bin"):
        (source / untracked).write_text("data\n")
    assert provenance.code_digest() == before
    (source / "rlx" / "mine.py").write_text("new\n")
    assert provenance.code_digest() != before
