"""What the local launch (launcher, submitit, supervisor) gives to toy processes, and what it removes from the directory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from toy_run import Run, starting, toy

from rlx.paths import RunPaths
from rlx.runs.jobs import job_of, note_job

pytestmark = pytest.mark.slow


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    yield from starting(tmp_path)


@pytest.mark.parametrize(("visible", "seen"), [(None, "1"), ("5,GPU-7f", "GPU-7f")])
def test_a_process_sees_its_gpus_of_those_that_the_launcher_sees(
    start: Callable[..., Run], monkeypatch: pytest.MonkeyPatch, visible: str | None, seen: str
) -> None:
    """submitit starts its jobs with an empty CUDA_VISIBLE_DEVICES."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    run = start([replace(toy("trainer", "import os\nprint(os.environ['CUDA_VISIBLE_DEVICES'])"), gpus=(1,))])
    status = run.wait()
    assert (status.state, status.cause) == ("completed", None)
    assert run.log("trainer") == f"{seen}\n"


def test_a_run_that_goes_on_here_forgets_the_job_of_its_earlier_attempt(start: Callable[..., Run], tmp_path: Path) -> None:
    paths = RunPaths(tmp_path / "run")
    paths.root.mkdir()
    note_job(paths, "12")
    run = start([toy("trainer", "print('steps')")])
    assert run.wait().state == "completed"
    assert job_of(paths) is None
