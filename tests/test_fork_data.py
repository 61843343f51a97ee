"""Where the data of a fork begin: where the other run was if they are its own, else at their beginning."""

from __future__ import annotations

import asyncio
import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from test_data_rows import write
from test_data_supervised import samples_of
from test_orchestrator_run import StandInServers, config_of, play
from test_rollout_task_sampler import draw
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
from rlx.rollout.task_sampler import TaskSampler
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


def config(*overrides: str) -> Config:
    return compose(["env=[sums,reverse_text]", "dry_run=true", *overrides], {}).cfg


def test_an_environment_with_other_examples_starts_over_and_the_others_go_on(caplog: pytest.LogCaptureFixture) -> None:
    both: Any = {name: SimpleNamespace(rows=[{"example_id": n} for n in range(9)]) for name in ("sums", "reverse_text")}
    before, after = (TaskSampler(both, {"sums": 1, "reverse_text": 1}, 0, digests={"sums": which}) for which in "ab")
    draw(before, 7)
    in_flight = [before.next(env) for env in ("sums", "reverse_text")]
    after.restore(before.state())
    assert after.state().used == {"sums": 0, "reverse_text": before.state().used["reverse_text"]}
    assert "envs.sums starts over: its examples are not those of the checkpoint (a, now b)" in caplog.text
    assert [after.remap_task(replace(task, row={}), before.state()) for task in in_flight] == [None, in_flight[1]]


@pytest.mark.slow
@pytest.mark.parametrize("same", [True, False])
def test_the_orchestrator_of_a_fork_begins_with_other_examples(tmp_path: Path, caplog: pytest.LogCaptureFixture, same: bool) -> None:
    cfg = config_of(max_steps=2, ckpt=CkptConfig(interval=2))
    envs: dict[str, Any] = {}
    paths, _ = play(tmp_path / "first", cfg, envs=envs, digests={"e": "first"})
    (written,) = being_written(paths)
    checkpoint = written[1].rename(paths.checkpoint_of(2))
    forked = fork(paths, "fork", 2, cfg)
    write_start(forked, Start(step=2, checkpoint=checkpoint))
    digests = {"e": "first" if same else "other"}

    async def began() -> dict[str, int]:
        servers: Any = StandInServers()
        orchestrator = Orchestrator(
            replace(cfg, max_steps=4), forked, envs, servers, servers, Heartbeat(forked, "orchestrator"), digests=digests
        )
        return orchestrator.collector.tasks.state().used

    used = asyncio.run(began())
    assert (used["e"] > 0) == same
    assert ("envs.e starts over: its examples are not those of the checkpoint" in caplog.text) != same


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
