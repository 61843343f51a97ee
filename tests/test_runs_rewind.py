"""Run directories of later attempts: what is removed, what is refused, forks and replays."""

from __future__ import annotations

import errno
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from launch_configs import config
from test_checkpoint_folders import write

from rlx.checkpoints.folders import read_start, steps
from rlx.config.errors import ConfigError
from rlx.config.load import compose, load_run
from rlx.config.schema import Config, OrchestratorConfig, RunConfig
from rlx.config.schema_rollout import EvalConfig
from rlx.lock import FileLock
from rlx.metrics import MetricsWriter, read_metrics
from rlx.paths import COMPLETE, RunPaths
from rlx.plan.make import make_plan
from rlx.runs.rewind import rewind, trim_metrics
from rlx.runs.run_dir import create, sources
from rlx.runs.status import Status
from rlx.weights import tmpfs
from rlx.weights.files import versions


def settled(root: Path, **changes) -> Config:
    return replace(config("cpu"), run=RunConfig(name=root.name, dir=str(root)), **changes)


def make(cfg: Config) -> tuple[RunPaths, FileLock]:
    return create(cfg, [], make_plan(cfg, Path(str(cfg.run.dir))))


def ended(root: Path, done: int = 7, checkpoints: tuple[int, ...] = (3, 6), **changes) -> RunPaths:
    """A run that was killed after `done` steps, the orchestrator two steps ahead."""
    paths, lock = make(settled(root, **changes))
    Status(state="failed").write(paths)
    orchestrator, trainer = MetricsWriter(paths.metrics, "orchestrator"), MetricsWriter(paths.metrics, "trainer")
    for step in range(done + 2):
        orchestrator.write(step, {"reward/mean": step})
        if step >= 2:
            trainer.write(step - 2, {"loss/total": step})
    for step in range(done + 2):
        for file in (paths.rollouts_of(step), paths.recorded_of(step)):
            file.parent.mkdir(exist_ok=True)
            file.write_bytes(b"")
    for version in range(1, done + 1):
        paths.weights_of(version).mkdir(parents=True)
        (paths.weights_of(version) / COMPLETE).write_text(json.dumps({"version": version, "files": {}}))
    (paths.weights / ".step_8.writing").mkdir()
    for file in (paths.batch_of(done), paths.endpoints / "inference_0.json", paths.preempt):
        file.parent.mkdir(exist_ok=True)
        file.write_text("{}")
    for step in checkpoints:
        write(paths, step)
        paths.evaluation_of("math", "tiny", step).mkdir(parents=True)
    (paths.checkpoints / ".step_9.writing").mkdir(parents=True)
    lock.close()
    return paths


def numbers(folder: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step_").split(".")[0]) for path in folder.glob("step_*"))


def recorded_steps(paths: RunPaths) -> list[tuple[int, str]]:
    return [(record["step"], record["source"]) for record, _ in read_metrics(paths.metrics)]


@pytest.mark.parametrize(("wanted", "step"), [("latest", 6), ("3", 3)])
def test_a_run_goes_back_to_its_checkpoint_and_nothing_of_later_steps_is_left(tmp_path: Path, wanted: str, step: int) -> None:
    paths = ended(tmp_path / "run")
    before = [record for record, _ in read_metrics(paths.metrics)]
    paths.updates.write_text("".join(f'{{"version": {v}, "began": 1.0, "seconds": 0.1}}\n' for v in range(9)) + '{"vers')
    make(settled(tmp_path / "run", resume=wanted))
    assert [json.loads(line)["version"] for line in paths.updates.read_text().splitlines()] == list(range(step + 1))
    start = read_start(paths)
    assert (start.step, start.checkpoint) == (step, paths.checkpoint_of(step))
    assert [record for record, _ in read_metrics(paths.metrics)] == [record for record in before if record["step"] < step]
    assert numbers(paths.rollouts) == numbers(paths.recorded) == list(range(step))
    assert numbers(paths.weights) == list(range(1, step + 1))
    assert steps(paths) == [s for s in (3, 6) if s <= step]
    assert numbers(paths.evaluations / "math--tiny") == [s for s in (3, 6) if s < step], "the checkpoint's version is evaluated again"
    left = [
        paths.preempt.exists(),
        *paths.batches.iterdir(),
        *paths.endpoints.iterdir(),
        *paths.weights.glob(".*"),
        *paths.checkpoints.glob(".*"),
    ]
    assert left == [False]
    assert load_run(paths.root).resume is None
    assert len(json.loads(paths.provenance.read_text())["later_attempts"]) == 1


def test_what_a_user_has_moved_away_behind_a_link_stays_where_it_is(tmp_path: Path) -> None:
    paths = ended(tmp_path / "run")
    moved = []
    for place in (paths.weights_of(7), paths.evaluation_of("math", "tiny", 6), paths.checkpoint_of(6)):
        moved.append(tmp_path / f"moved_{len(moved)}")
        place.rename(moved[-1])
        place.symlink_to(moved[-1])
    make(settled(tmp_path / "run", resume="3"))
    assert all(folder.is_dir() for folder in moved)
    assert (numbers(paths.weights)[-1], steps(paths), numbers(paths.evaluations / "math--tiny")) == (3, [3], [])


def test_a_damaged_newest_checkpoint_is_set_aside_and_damaged_weights_are_removed(tmp_path: Path) -> None:
    paths = ended(tmp_path / "run")
    (paths.checkpoint_of(6) / "trainer" / "shard").write_bytes(b"damaged")
    (paths.weights_of(3) / COMPLETE).write_text('{"version": 3, "files": {"gone": {"size": 1, "xxh3": "0"}}}')
    said: list[str] = []
    start = rewind(paths, warn=said.append)
    assert start.step == 3
    assert "\n".join(said).count("skipping checkpoint step_6: ") == 1
    assert (paths.checkpoints / "damaged_step_6").is_dir()
    assert numbers(paths.weights) == [1, 2], "the trainer exports version 3 again"
    assert rewind(paths, warn=pytest.fail) == start, "a second rewind gives the same and warns of nothing"


def test_a_run_whose_checkpoints_were_all_set_aside_is_not_started_anew_unasked(tmp_path: Path) -> None:
    paths = ended(tmp_path / "run")
    for step in (3, 6):
        paths.checkpoint_of(step).rename(paths.checkpoints / f"damaged_step_{step}")
    with pytest.raises(ConfigError, match=r"every checkpoint of .* is damaged: damaged_step_3, damaged_step_6\."):
        rewind(paths)


def test_a_run_whose_checkpoints_are_all_damaged_is_not_started_anew_unasked(tmp_path: Path) -> None:
    paths = ended(tmp_path / "run")
    (paths.checkpoint_of(6) / "trainer" / "shard").write_bytes(b"damaged")
    (paths.checkpoint_of(3) / COMPLETE).unlink()
    before = sorted(str(path) for path in paths.root.rglob("*"))
    with pytest.raises(ConfigError, match=r"every checkpoint of .* is damaged: step_3, step_6\.[\s\S]*move or delete the folder"):
        make(settled(tmp_path / "run", resume="latest"))
    assert sorted(str(path) for path in paths.root.rglob("*")) == before
    make(settled(tmp_path / "run", clean=True))
    assert recorded_steps(paths) == []


def test_metrics_are_cut_at_the_first_line_that_is_no_record(tmp_path: Path) -> None:
    """As after a full disk: half a record with another source's record appended to it."""
    paths = RunPaths(tmp_path)
    writer = MetricsWriter(paths.metrics, "trainer")
    writer.write(0, {})
    with paths.metrics.open("ab") as file:
        file.write(b'{"step": 1, "sour')
    writer.write(1, {})
    writer.write(2, {})
    said: list[str] = []
    assert [step for step, _ in recorded_steps(paths)] == [0, 2], "concurrent readers skip the corrupt line"
    trim_metrics(paths, 3, said.append)
    assert recorded_steps(paths) == [(0, "trainer")]
    assert said == [f"{paths.metrics}, line 2 is corrupt: it and the 1 lines after it are removed"]


def test_a_record_that_is_not_written_whole_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer, write = MetricsWriter(tmp_path / "metrics.jsonl", "trainer"), os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:10]))
    with pytest.raises(OSError, match=r"only 10 of .* bytes of a record of step 3 could be written"):
        writer.write(3, {})


def test_without_a_checkpoint_a_run_starts_again(tmp_path: Path) -> None:
    paths = ended(tmp_path / "run", checkpoints=())
    make(settled(tmp_path / "run", resume="latest"))
    assert read_start(paths) is None
    assert recorded_steps(paths) == []
    assert numbers(paths.weights) == []
    new, _ = make(settled(tmp_path / "new", resume="latest"))
    assert load_run(new.root).resume is None


def test_a_configuration_that_learns_something_else_does_not_go_on(tmp_path: Path) -> None:
    paths = ended(tmp_path / "run")
    size = len(paths.metrics.read_bytes())
    other = OrchestratorConfig(batch_size=512, rollouts_per_example=8)
    with pytest.raises(ConfigError, match=r"orchestrator\.batch_size: 256 ≠ 512[\s\S]*--config-dir"):
        make(settled(tmp_path / "run", resume="latest", orchestrator=other))
    assert len(paths.metrics.read_bytes()) == size
    longer = settled(tmp_path / "run", resume="latest", max_steps=20)
    make(longer)
    assert load_run(paths.root).max_steps == 20


@pytest.mark.parametrize(
    ("resume", "changes", "message"),
    [
        ("5", {}, r"resume=5: .* has no checkpoint of step 5; it has those of: 3, 6"),
        ("latest", {"max_steps": 6}, r"nothing left to do: .*step_6 is the state after 6 steps, and max_steps=6"),
    ],
)
def test_what_cannot_go_on_is_refused_and_left_alone(tmp_path: Path, resume: str, changes: dict, message: str) -> None:
    paths = ended(tmp_path / "run")
    before = sorted(str(path) for path in paths.root.rglob("*"))
    with pytest.raises(ConfigError, match=message):
        make(settled(tmp_path / "run", resume=resume, **changes))
    assert sorted(str(path) for path in paths.root.rglob("*")) == before


def test_a_run_whose_last_version_has_no_evaluation_is_resumed_although_all_steps_are_done(tmp_path: Path) -> None:
    evaluating = {"max_steps": 6, "eval": EvalConfig(interval=3)}
    paths = ended(tmp_path / "run", **evaluating)
    make(settled(tmp_path / "run", resume="latest", **evaluating))[1].close()
    start = read_start(paths)
    assert start.step == 6
    with paths.metrics.open("a") as file:
        file.write(json.dumps({"step": 6, "source": "eval", "time": 0.0}) + "\n")
    with pytest.raises(ConfigError, match="nothing left to do"):
        make(settled(tmp_path / "run", resume="latest", **evaluating))


def test_a_run_that_lives_is_not_resumed(tmp_path: Path) -> None:
    paths = ended(tmp_path / "run")
    lock = FileLock(paths.lock)
    assert lock.share()
    with pytest.raises(ConfigError, match="a run is alive"):
        make(settled(tmp_path / "run", resume="latest"))
    lock.close()


@pytest.mark.parametrize("name", ["", "checkpoints/step_3"])
def test_a_fork_starts_from_a_checkpoint_of_another_run_which_stays_as_it_is(tmp_path: Path, name: str, capsys) -> None:
    source = ended(tmp_path / "run")
    before = sorted((str(path), path.stat().st_mtime_ns) for path in source.root.rglob("*"))
    paths, lock = make(settled(tmp_path / "fork", resume=str(source.root / name)))
    step = 3 if name else 6
    start = read_start(paths)
    assert (start.step, start.checkpoint) == (step, paths.checkpoint_of(step))
    assert f"{paths.root}: starting after {step} steps, from {source.checkpoint_of(step)}" in capsys.readouterr().err
    assert paths.initial_model.read_text() == source.initial_model.read_text()
    assert load_run(paths.root).resume == str(source.checkpoint_of(step)), "reproduce.sh forks it again"
    lock.close()
    assert sorted((str(path), path.stat().st_mtime_ns) for path in source.root.rglob("*")) == before
    shutil.rmtree(source.checkpoints)
    assert rewind(paths, warn=pytest.fail) == start, "the other run may delete its files: this run has its own links"


def test_a_fork_where_files_cannot_be_linked_reads_the_other_runs_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def link(*_: object, **__: object) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", link)
    source = ended(tmp_path / "step_of_my_own")
    paths, lock = make(settled(tmp_path / "fork", resume=str(source.root)))
    start = read_start(paths)
    assert start.checkpoint == source.checkpoint_of(6)
    assert list(paths.checkpoints.iterdir()) == []
    lock.close()
    assert rewind(paths, warn=pytest.fail) == start, "an attempt without its own checkpoint starts where the fork did"


@pytest.mark.parametrize(("resume", "message"), [("nowhere/else", "does not exist"), ("run/checkpoints/step_4", "no complete checkpoint")])
def test_a_fork_of_nothing_is_refused(tmp_path: Path, resume: str, message: str) -> None:
    ended(tmp_path / "run")
    with pytest.raises(ConfigError, match=message):
        make(settled(tmp_path / "fork", resume=str(tmp_path / resume)))
    assert not (tmp_path / "fork").exists()


def test_a_fork_with_a_model_of_other_sizes_is_refused_and_one_of_another_name_is_said(tmp_path: Path, capsys) -> None:
    source = ended(tmp_path / "run")
    model = load_run(source.root).model
    larger = replace(model, name="larger", hidden_size=2 * model.hidden_size, num_layers=9)
    sizes = rf"model.hidden_size: {model.hidden_size} ≠ {2 * model.hidden_size}, model.num_layers: {model.num_layers} ≠ 9\.\n  fix: "
    with pytest.raises(ConfigError, match=rf"model.name={model.name}, and model.name=larger has other sizes \(there ≠ here\): {sizes}"):
        make(settled(tmp_path / "fork", resume=str(source.root), model=larger))
    assert not (tmp_path / "fork").exists()
    make(settled(tmp_path / "fork", resume=str(source.root), model=replace(model, name="another")))[1].close()
    assert "model.name=another changes no weights" in capsys.readouterr().err


def test_a_dry_run_of_a_fork_reads_no_checkpoint_through(tmp_path: Path) -> None:
    """One of hundreds of gigabytes takes minutes; the start reads it."""
    source = ended(tmp_path / "run")
    shard = source.checkpoint_of(6) / "trainer" / "shard"
    shard.write_bytes(b"x" * shard.stat().st_size)
    fork = settled(tmp_path / "fork", resume=str(source.root))
    assert [sources(replace(fork, dry_run=dry))[0].step for dry in (True, False)] == [6, 3]
    shard.write_bytes(b"short")
    assert sources(replace(fork, dry_run=True))[0].step == 3, "sizes are compared"


def test_a_replay_needs_every_batch(tmp_path: Path) -> None:
    source = ended(tmp_path / "run")
    paths, _ = make(settled(tmp_path / "again", replay=str(source.root), max_steps=9))
    assert load_run(paths.root).replay == str(source.root)
    assert paths.initial_model.read_text() == source.initial_model.read_text()
    with pytest.raises(ConfigError, match=r"batch of step 9 was not recorded, and max_steps=10"):
        make(settled(tmp_path / "more", replay=str(source.root)))
    with pytest.raises(ConfigError, match="is no run directory"):
        make(settled(tmp_path / "more", replay=str(tmp_path)))


def test_a_replay_starts_the_trainer_alone(tmp_path: Path) -> None:
    plan = make_plan(settled(tmp_path / "again", replay="x"), tmp_path)
    assert [spec.name for spec in plan] == ["trainer"]


def test_resuming_needs_a_name_and_does_not_go_with_clean() -> None:
    with pytest.raises(ConfigError, match="does not say which run to resume"):
        compose(["resume=latest"], environ={})
    with pytest.raises(ConfigError, match="cannot be both deleted and resumed"):
        compose(["resume=4", "run.name=x", "clean=true"], environ={})
    assert compose(["resume=4", "run.name=x"], environ={}).cfg.resume == "4"


@pytest.mark.parametrize(("checkpoints", "left"), [((), []), ((3, 6), [0, 1, 2, 3, 4, 5, 6])])
def test_version_0_of_adapters_is_published_again_by_a_run_that_starts_from_its_beginning(
    tmp_path: Path, checkpoints: tuple[int, ...], left: list[int]
) -> None:
    paths = ended(tmp_path / "run", checkpoints=checkpoints)
    paths.weights_of(0).mkdir()
    (paths.weights_of(0) / COMPLETE).write_text("{}")
    rewind(paths)
    assert versions(paths.weights) == left


@pytest.mark.parametrize("how", ["resume", "clean"])
def test_what_a_killed_attempt_has_left_in_memory_is_deleted(tmp_path: Path, how: str) -> None:
    paths, shm = ended(tmp_path / "run"), tmp_path / "shm"
    shm.mkdir()
    tmpfs.make(paths.weights, shm, 0)
    for version in (5, 7):
        shutil.rmtree(paths.weights_of(version))
        paths.weights_of(version).symlink_to(tmpfs.fresh(paths.weights, f"step_{version}"))
        (paths.weights_of(version) / COMPLETE).write_text("{}")
    (paths.weights / ".step_9.writing").symlink_to(tmpfs.fresh(paths.weights, "step_9"))
    assert versions(paths.weights) == [1, 2, 3, 4, 5, 6, 7]
    if how == "resume":
        rewind(paths)
        assert versions(paths.weights) == [1, 2, 3, 4, 6]
        assert all(path.name.startswith("step_") for path in paths.weights.iterdir())
    else:
        make(settled(paths.root, clean=True))[1].close()
        assert list(paths.weights.iterdir()) == []
    assert list(shm.iterdir()) == []
