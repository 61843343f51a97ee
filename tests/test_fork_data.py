"""Where the data of a fork begin: where the other run was if they are its own, else at their beginning."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from test_data_rows import write
from test_data_supervised import samples_of
from test_orchestrator_run import StandInServers, config_of, play
from test_rollout_tasks import draw, envs
from test_runs_rewind import ended, make, settled
from trainer_examples import Samples

from rlx.checkpoints.folders import Start, being_written, write_start
from rlx.checkpoints.forked import write_forked
from rlx.config.load import compose
from rlx.config.roots import SFT
from rlx.config.schema import CkptConfig, Config, SftRoot
from rlx.data.supervised import SupervisedSource
from rlx.heartbeat import Heartbeat
from rlx.paths import RunPaths
from rlx.policy.source import keep_digests
from rlx.roles.orchestrator import Orchestrator
from rlx.rollout import tasks
from rlx.rollout.tasks import TaskSequence, other_examples, started_over
from rlx.runs.rewind import source_of
from rlx.runs.run import Run


def sft(rows: str, *overrides: str) -> SftRoot:
    return compose([f"data.name={rows}", "model=tiny", *overrides], {}, SFT).cfg


def fork(paths: RunPaths, name: str, step: int, before: Any) -> RunPaths:
    """A directory of a fork from the checkpoint of `step`."""
    forked = RunPaths(paths.root.parent / name)
    forked.root.mkdir()
    write_forked(forked, source_of(Start(step=step, checkpoint=paths.checkpoint_of(step))), step, before)
    return forked


@pytest.fixture
def trained(tmp_path: Path) -> tuple[SftRoot, RunPaths]:
    """A run of `rlx sft` that has begun."""
    cfg, paths = sft(write(tmp_path / "a.jsonl", [{"n": 1}, {"n": 2}])), RunPaths(tmp_path / "first")
    paths.root.mkdir()
    assert keep_digests(cfg, paths) == 0
    return cfg, paths


def test_supervised_data_go_on_in_a_fork_with_the_same_rows(trained: tuple[SftRoot, RunPaths], tmp_path: Path) -> None:
    cfg, paths = trained
    forked = fork(paths, "same", 40, cfg)
    elsewhere = shutil.copy(tmp_path / "a.jsonl", tmp_path / "moved.jsonl")
    assert keep_digests(sft(elsewhere, "optim.lr=1e-4"), forked) == 0
    assert "shift" not in json.loads(forked.data.read_text())
    first_of_all = fork(paths, "unshuffled", 40, sft(elsewhere, "data.shuffle=false"))
    assert keep_digests(sft(elsewhere, "data.shuffle=false", "seed=5"), first_of_all) == 0, "the seed orders nothing"


@pytest.mark.parametrize(
    ("change", "why"),
    [("rows", "other rows"), ("seed", "seed: 0 → 7"), ("shuffle", "data.shuffle: true → false")],
    ids=["rows", "seed", "order"],
)
def test_other_supervised_data_begin_at_their_beginning(
    trained: tuple[SftRoot, RunPaths], tmp_path: Path, caplog: pytest.LogCaptureFixture, change: str, why: str
) -> None:
    cfg, paths = trained
    other = {
        "rows": lambda: sft(write(tmp_path / "b.jsonl", [{"n": 1}, {"n": 3}])),
        "seed": lambda: replace(cfg, seed=7),
        "shuffle": lambda: replace(cfg, data=replace(cfg.data, shuffle=False)),
    }[change]()
    forked = fork(paths, "other", 40, cfg)
    first = -40 * cfg.data.batch_size  # at step 40 the data begin
    assert keep_digests(other, forked) == first
    assert f"{why}: the data of this run begin at their first row, and not where {paths.root} was after 40 steps" in caplog.text
    assert list(Run(forked.root).data or ()) == ["data.name"]
    shutil.rmtree(paths.root)
    assert keep_digests(other, forked) == first, "a later attempt, after the other run was deleted"
    again = fork(forked, "again", 60, other)
    assert keep_digests(other, again) == first, "a fork of the fork goes on in these data"


def source(batch_size: int = 6, shift: int = 0) -> SupervisedSource:
    sets = [(Samples(name, samples_of(size)), weight) for name, size, weight in (("a", 16, 3.0), ("b", 5, 1.0))]
    return SupervisedSource(sets, batch_size=batch_size, seed=1, shift=shift)


def tokens(source: SupervisedSource, step: int) -> list[list[int]]:
    return [sample.token_ids.tolist() for sample in source.receive(step).mini_batches[0]]


def test_forks_with_other_batch_sizes_have_the_rows_that_would_have_come_next(
    trained: tuple[SftRoot, RunPaths], caplog: pytest.LogCaptureFixture
) -> None:
    cfg, paths = trained
    before, sizes, begin, shift = cfg, [cfg.data.batch_size, 3, 7, 2], 0, 0
    rows, seen = [row for step in range(30) for row in tokens(source(sizes[0]), step)], []
    for number, size in enumerate(sizes):
        cfg = replace(cfg, data=replace(cfg.data, batch_size=size))
        if number:
            paths = fork(paths, f"fork_{number}", begin, before)
            shift = keep_digests(cfg, paths)
            assert keep_digests(cfg, paths) == shift, "a later attempt"
        before, data = cfg, source(size, shift)
        seen += [row for step in range(begin, begin + 4) for row in tokens(data, step)]
        begin += 4
    assert seen == rows[: len(seen)]
    assert data.report(begin - 1)["data/epoch"] == len(seen) / 21
    assert not caplog.messages


def test_a_fork_of_a_fork_that_has_not_trained_yet_goes_on_where_that_would(trained: tuple[SftRoot, RunPaths]) -> None:
    cfg, paths = trained
    half = replace(cfg, data=replace(cfg.data, batch_size=cfg.data.batch_size // 2))
    waiting = fork(paths, "waiting", 40, cfg)
    assert keep_digests(half, fork(waiting, "second", 40, half)) == 40 * (cfg.data.batch_size - half.data.batch_size)


def test_a_fork_with_other_weights_of_the_data_sets_begins_at_their_beginning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def mixed(*weights: float) -> SftRoot:
        names = [write(tmp_path / f"{number}.jsonl", [{"n": number}]) for number in range(len(weights))]
        sets = [f"+data.sets.s{number}.{key}" for number, name in enumerate(names) for key in (f"name={name}", f"weight={weights[number]}")]
        return compose([*sets, "model=tiny"], {}, SFT).cfg

    paths = RunPaths(tmp_path / "first")
    paths.root.mkdir()
    assert keep_digests(mixed(1, 3), paths) == 0
    assert keep_digests(mixed(2, 6), fork(paths, "alike", 40, mixed(1, 3))) == 0, "the same mixture"
    assert not caplog.messages
    other = mixed(3, 1)
    assert keep_digests(other, fork(paths, "other", 40, mixed(1, 3))) == -40 * other.data.batch_size
    assert "weights of data.sets: [1.0,3.0] → [3.0,1.0]: the data of this run begin at their first row" in caplog.text
    assert keep_digests(mixed(1, 3, 1), fork(paths, "more", 40, mixed(1, 3))) < 0
    assert "other rows: the data of this run begin" in caplog.text


def test_the_step_at_which_the_data_begin_has_the_first_rows() -> None:
    here, there = source(shift=-40 * 6), source()
    assert [tokens(here, step) for step in (40, 42, 41)] == [tokens(there, step) for step in (0, 2, 1)]
    here.receive(41)
    there.receive(1)
    assert here.report(41)["data/epoch"] == there.report(1)["data/epoch"]


def examples(*numbers: int) -> Any:
    return SimpleNamespace(rows=[{"example_id": number} for number in numbers])


def config(*overrides: str) -> Config:
    return compose(["env=[sums,reverse_text]", "dry_run=true", *overrides], {}).cfg


@pytest.mark.parametrize("change", ["nothing", "rows", "seed", "a later checkpoint"])
def test_environments_with_other_examples_begin_at_their_beginning(tmp_path: Path, change: str) -> None:
    first, both = RunPaths(tmp_path / "first"), {"sums": examples(*range(9)), "reverse_text": examples(*range(8))}
    first.root.mkdir()
    tasks.keep_digests(first, both)
    before = TaskSequence(both, {"sums": 1, "reverse_text": 1}, seed=0)
    draw(before, 7)
    forked = fork(first, "fork", 40, config())
    cfg = config("seed=3") if change == "seed" else config()
    if change in ("rows", "a later checkpoint"):
        both["sums"] = examples(*range(20, 29))
    tasks.keep_digests(forked, both)
    others = other_examples(cfg, forked, 50 if change == "a later checkpoint" else 40)
    expected = {"rows": {"sums": "other examples"}, "seed": dict.fromkeys(both, "seed: 0 → 3")}
    assert others == expected.get(change, {})
    after = TaskSequence(both, {"sums": 1, "reverse_text": 1}, seed=cfg.seed)
    after.restore(started_over(before.state(), others))
    used = {name: 0 if name in others else count for name, count in before.state().used.items()}
    assert after.state().used == used
    assert (after.carried(before.next("sums"), started_over(before.state(), others)) is None) == ("sums" in others), "in flight, or played"


def test_a_run_that_goes_on_with_other_examples_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first, both = RunPaths(tmp_path / "first"), {"sums": examples(*range(9)), "reverse_text": examples(*range(8))}
    first.root.mkdir()

    def said(paths: RunPaths, begin: int) -> list[str]:
        caplog.clear()
        both["sums"] = examples(*range(begin, begin + 9))
        tasks.keep_digests(paths, both, trained=tasks.goes_on(paths))
        return [record.getMessage() for record in caplog.records]

    assert not said(first, 0)
    assert not said(first, 1), "without a checkpoint it starts from step 0"
    write_start(first, Start(step=40, checkpoint=first.checkpoint_of(40)))
    assert not said(first, 1)
    (line,) = said(first, 2)
    assert re.search(r"envs.sums has other examples .*: 9 examples \(xxh3 \w+\) → 9 examples \(xxh3 \w+\)\. Training goes on", line)
    assert not said(first, 2), "once"
    forked = fork(first, "fork", 40, config())
    for begin in (3, 4):  # the fork begins at their first example, also if its first attempt ended before it had a checkpoint of its own
        write_start(forked, Start(step=40, checkpoint=first.checkpoint_of(40)))
        assert not said(forked, begin)
    write_start(forked, Start(step=50, checkpoint=forked.checkpoint_of(50)))
    assert len(said(forked, 5)) == 1


@pytest.mark.slow
@pytest.mark.parametrize("same", [True, False])
def test_the_orchestrator_of_a_fork_begins_with_other_examples(tmp_path: Path, caplog: pytest.LogCaptureFixture, same: bool) -> None:
    cfg = config_of(max_steps=2, ckpt=CkptConfig(interval=2))
    envs: dict[str, Any] = {}
    paths, _ = play(tmp_path / "first", cfg, envs=envs)
    (written,) = being_written(paths)
    checkpoint = written[1].rename(paths.checkpoint_of(2))
    tasks.keep_digests(paths, envs)
    forked = fork(paths, "fork", 2, cfg)
    write_start(forked, Start(step=2, checkpoint=checkpoint))
    if not same:
        envs["e"].rows = [row | {"answer": "other"} for row in envs["e"].rows]
    tasks.keep_digests(forked, envs)

    async def began() -> dict[str, int]:
        servers: Any = StandInServers()
        orchestrator = Orchestrator(replace(cfg, max_steps=4), forked, envs, servers, servers, Heartbeat(forked, "orchestrator"))
        return orchestrator.collector.tasks.state().used

    used = asyncio.run(began())
    assert (used["e"] > 0) == same
    assert (f"envs.e begins at its first example, not where {checkpoint} was: other examples" in caplog.text) != same


def test_a_fork_of_a_run_that_recorded_no_digests_goes_on_by_the_number_of_examples(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path / "fork")
    paths.root.mkdir()
    tasks.keep_digests(paths, envs(sums=5))
    assert other_examples(config(), paths, 40) == {}
    forked = fork(RunPaths(tmp_path / "older"), "other", 40, None)
    assert other_examples(config(), forked, 40) == {}


def test_a_new_fork_says_that_its_data_are_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = ended(tmp_path / "run")
    make(settled(tmp_path / "fork", resume=str(source.root)))[1].close()
    assert "with the same configuration" in capsys.readouterr().err
    assert json.loads((tmp_path / "fork" / "forked.json").read_text()) == {
        "source": str(source.root),
        "step": 6,
        "seed": 0,
        "shuffle": True,
        "batch_size": None,
        "weights": [],
        "data": None,
    }
    cfg = settled(tmp_path / "other", resume=str(source.root), seed=1)
    name = next(iter(cfg.envs))
    make(replace(cfg, envs={name: replace(cfg.envs[name], args={"length": 5})}))[1].close()
    said = capsys.readouterr().err
    assert f"{tmp_path / 'other'}: starts from step 6 of {source.root}, with " in said
    assert "seed: 0 → 1" in said
    assert f"envs.{name}.args.length: absent → 5" in said
