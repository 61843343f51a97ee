"""What sbatch is told: a job's name, and which variables of the shell it does not get. Without SLURM."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rlx.cli import main

pytestmark = pytest.mark.usefixtures("known_environments")


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stand-ins of SLURM's commands. sbatch writes its variables into the file that is returned, and refuses the job."""
    seen = tmp_path / "seen"
    for name in ("sbatch", "srun", "squeue", "scontrol"):
        file = tmp_path / "bin" / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(f"#!/bin/sh\nenv | grep ^SBATCH_ >{seen}\necho no >&2\nexit 1\n")
        file.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    return seen


def test_a_job_has_the_name_that_the_dry_run_shows(commands: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = ["train", "launcher=slurm", "hardware=cpu", "run.name=mine", f"run.dir={tmp_path / 'seventh'}"]
    assert main([*line, "dry_run=true"]) == 0
    assert "#SBATCH --job-name=mine\n" in capsys.readouterr().out
    assert main(line) == 1
    assert "#SBATCH --job-name=mine\n" in (tmp_path / "seventh" / "sbatch.sh").read_text()


def test_no_variable_of_the_shell_wins_over_what_the_script_says(commands: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lose = {"PARTITION": "debug", "JOB_NAME": "shell", "MEM_PER_CPU": "1G", "EXCLUSIVE": "user", "REQUEUE": "1", "COMMENT": "theirs"}
    for name, value in {**lose, "ACCOUNT": "the-sites", "DEBUG": "1"}.items():
        monkeypatch.setenv(f"SBATCH_{name}", value)
    line = [
        "train",
        "launcher=slurm",
        "hardware=cpu",
        "slurm.partition=gpu",
        "slurm.options={comment: mine}",
        f"run.dir={tmp_path / 'run'}",
    ]
    assert main(line) == 1
    assert sorted(commands.read_text().split()) == ["SBATCH_ACCOUNT=the-sites", "SBATCH_DEBUG=1"]
    assert os.environ["SBATCH_PARTITION"] == "debug", "for what this shell starts next"
