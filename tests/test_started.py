"""The commands that messages suggest: as the user started the program, and with the same copy of rlx."""

from __future__ import annotations

import subprocess
import sys

from rlx.started import SOURCE, short_name, started_as


def test_the_program_is_named_as_briefly_as_it_is_found(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    programs = {}
    for name in (".venv/bin/python", ".venv/bin/rlx", "elsewhere/python3.11"):
        programs[name] = tmp_path / name
        programs[name].parent.mkdir(parents=True, exist_ok=True)
        programs[name].write_text("#!/bin/sh\n")
        programs[name].chmod(0o755)
    python, rlx = str(programs[".venv/bin/python"]), str(programs[".venv/bin/rlx"])
    monkeypatch.setenv("PATH", "/nowhere")
    assert started_as(python, "train.py") == ".venv/bin/python train.py"
    assert started_as(python, rlx) == ".venv/bin/rlx train"
    monkeypatch.setenv("PATH", str(tmp_path / ".venv" / "bin"))
    assert started_as(python, "train.py") == "python train.py"
    assert started_as(python, "/there/rlx/cli/__main__.py") == "python -m rlx.cli train"
    assert started_as(python, rlx) == "rlx train"


def test_a_suggested_command_imports_the_rlx_that_runs(tmp_path, monkeypatch):
    """With -m, Python searches the working directory first, which may be another checkout. A script finds what lies beside it."""
    monkeypatch.setenv("PATH", "/nowhere")
    there = f"PYTHONPATH={SOURCE} {sys.executable} -P -m rlx.cli view"
    monkeypatch.chdir(SOURCE)
    assert started_as(sys.executable, "train.py", "view") == f"{short_name(sys.executable)} -m rlx.cli view"
    monkeypatch.chdir(tmp_path)
    assert started_as(sys.executable, f"{SOURCE}/train.py", "view") == there
    assert started_as(sys.executable, f"{SOURCE}/rlx/cli/__main__.py", "view") == f"{sys.executable} -m rlx.cli view"
    (tmp_path / "rlx").mkdir()
    (tmp_path / "rlx" / "__init__.py").write_text("raise SystemExit('another checkout')")
    assert started_as(sys.executable, f"{SOURCE}/rlx/cli/__main__.py", "view") == there
    done = subprocess.run(there.replace("view", "--help"), shell=True, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "another checkout" in subprocess.run([sys.executable, "-m", "rlx.cli"], capture_output=True, text=True, check=False).stderr
