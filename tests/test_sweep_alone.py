"""Sweeps started twice, at the same time or after a failure: each run has one process at a time, and completed runs stay completed."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from test_sweep import toy_plan

from rlx.checkpoints import folders
from rlx.cli import main
from rlx.cli import sweep as cli
from rlx.cli.commands import TRAIN
from rlx.config.errors import ConfigError
from rlx.config.sweeps import expand
from rlx.launch import sweep
from rlx.lock import FileLock
from rlx.runs import jobs
from rlx.runs.jobs import note_job
from rlx.runs.status import Status, read_status

pytestmark = pytest.mark.slow


@pytest.fixture
def toys(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Replaces real runs by toy runs, in a directory of their own."""
    monkeypatch.setattr("rlx.plan.make.make_plan", toy_plan)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "out"


def prepared(toys: Path, *argv: str) -> list[sweep.Element]:
    return cli.checked(expand(["-m", "seed=1,2", "max_steps=2", *argv], {}).elements, toys, TRAIN)


def is_free(found: sweep.Element) -> bool:
    lock = FileLock(found.paths.lock)
    free = lock.exclusive()
    lock.close()
    return free


def unanswered() -> dict[str, str]:
    raise RuntimeError("squeue gave no answer in 10 s")


def test_a_sweep_whose_pool_lives_is_not_started_a_second_time(toys: Path, capsys: pytest.CaptureFixture[str], monkeypatch):
    codes = []

    def pool(*args: object, **options: object) -> None:
        codes.append(main(["train", "-m", "seed=1,2", "max_steps=2", f"run.dir={toys}"]))

    monkeypatch.setattr(sweep, "run_pool", pool)
    main(["train", "-m", "seed=1,2", "max_steps=2", f"run.dir={toys}"])
    assert codes == [2]
    assert f"another process starts or runs the sweep in {toys}" in capsys.readouterr().err


def test_directories_are_held_until_their_jobs_are_noted(toys: Path, monkeypatch: pytest.MonkeyPatch):
    elements = prepared(toys)
    held = []
    monkeypatch.setattr(sweep, "submit_arrays", lambda todo, *_: held.extend(not is_free(each) for each in todo))
    cli._submit(elements, "mine", toys)
    assert held == [True, True]
    assert all(is_free(each) for each in elements)


def test_a_run_that_waited_for_its_turn_looks_at_what_has_become_of_it(toys: Path, monkeypatch: pytest.MonkeyPatch):
    (one, two) = prepared(toys)
    sweep.release(sweep.make_directories([one, two]))
    started = []
    monkeypatch.setattr(sweep, "launch", lambda paths, *_: started.append((paths.root.name, paths.metrics.read_text())) or 0)
    for each in (one, two):
        each.paths.metrics.write_text('{"step": 0, "source": "trainer"}\n')
    Status(state="completed", step=2, max_steps=2).write(one.paths)
    assert [sweep.run_element(str(each.paths.root)) for each in (one, two)] == [0, 0]
    assert started == [("seed=2", "")]


def test_a_run_that_was_stopped_after_its_last_checkpoint_does_not_stop_the_sweep(toys: Path):
    elements = prepared(toys)
    sweep.release(sweep.make_directories(elements))
    stopped = elements[0].paths
    status = Status()
    status.finish("interrupted")
    status.write(stopped)
    folders.begin(stopped, 2)
    folders.finish(stopped, 2, {}, {})
    sweep.find_states(elements)
    assert elements[0].state == "again"
    sweep.release(sweep.make_directories(elements[:1]))
    start = folders.read_start(stopped)
    assert start.step == 2 == elements[0].cfg.max_steps


def damage(element: sweep.Element) -> None:
    """Give a run one checkpoint, which is damaged."""
    element.paths.metrics.write_text('{"step": 0, "source": "trainer"}\n')
    (element.paths.checkpoint_of(1)).mkdir(parents=True)
    status = Status(max_steps=2)
    status.finish("interrupted")
    status.write(element.paths)


def test_a_run_of_the_pool_that_cannot_go_on_says_so_in_its_status(toys: Path, capsys: pytest.CaptureFixture[str]):
    (one, _) = elements = prepared(toys)
    sweep.release(sweep.make_directories(elements))
    damage(one)
    assert sweep.run_element(str(one.paths.root)) == 1
    status = read_status(one.paths)
    assert status.cause is not None
    assert (status.state, status.exit_code, status.attempt) == ("failed", 1, 0)
    assert "every checkpoint of" in status.cause.reason
    assert "every checkpoint of" in (one.paths.root / status.cause.log).read_text()
    assert "every checkpoint of" in capsys.readouterr().err


def test_a_sweep_that_is_resumed_asks_slurm_once_for_all_its_runs(toys: Path, monkeypatch: pytest.MonkeyPatch):
    elements = prepared(toys)
    sweep.release(sweep.make_directories(elements))
    for number, each in enumerate(elements):
        note_job(each.paths, f"12_{number}")
        status = Status(max_steps=2)
        status.finish("interrupted")
        status.write(each.paths)
    asked = []
    monkeypatch.setattr(jobs, "ask", lambda *command: asked.append(command) or subprocess.CompletedProcess(command, 0, "12_1|FAILED\n", ""))
    for clean in (False, True):
        for each in elements:
            each.state, each.cfg = "new", replace(each.cfg, clean=clean)
        sweep.release(sweep.make_directories(elements, sweep.find_states(elements)))
        assert len(asked) == 1
        for number, each in enumerate(elements):
            note_job(each.paths, f"12_{number}")
        asked.clear()


def test_a_silent_controller_is_an_error_in_words(toys: Path, monkeypatch: pytest.MonkeyPatch):
    elements = prepared(toys)
    sweep.release(sweep.make_directories(elements))
    monkeypatch.setattr("rlx.runs.run_dir.queue", unanswered)
    for number, each in enumerate(elements):
        note_job(each.paths, f"12_{number}")
        each.job = f"12_{number}"
    with pytest.raises(ConfigError, match=r"SLURM job 12_0, and SLURM does not tell whether that job is alive: squeue gave no answer"):
        sweep.find_states(elements)


@pytest.mark.parametrize(("state", "found"), [("failed", "again"), ("interrupted", "again"), ("completed", "again"), ("running", "alive")])
def test_a_run_with_a_final_state_is_not_asked_whether_it_lives(toys: Path, state: str, found: str):
    (first, _) = elements = prepared(toys)
    sweep.release(sweep.make_directories(elements))
    status = Status(max_steps=1, launcher={"host": "elsewhere", "pid": 1})  # on another host, and written a moment ago
    status.state = state
    status.write(first.paths)
    sweep.find_states([first])
    assert first.state == found
