"""Versions on their way to servers and evaluations beside training."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
from pathlib import Path
from typing import Any

import pytest
from server_stand_in import Stand

from rlx.checkpoints.folders import Start, begin, write_start
from rlx.config.schema import Config, PlayRoot, SftRoot
from rlx.heartbeat import Heartbeat
from rlx.inference.wire import InferenceError, WeightsGone
from rlx.paths import COMPLETE, RunPaths
from rlx.roles import evaluator
from rlx.roles.evaluator import SftEvaluator
from rlx.rollout import policy_backend
from rlx.rollout import updates as rollout_updates
from rlx.rollout.policy_backend import check_model, connect_servers
from rlx.types import WeightVersion
from rlx.weights import files
from rlx.weights.subscribe import Subscriber


def write_offer(paths: RunPaths, version: int) -> None:
    """The trainer has this version in its memory."""
    paths.offer.write_text(json.dumps({"version": version, "token": os.environ.get("RLX_RUN_TOKEN", "")}))


WeightUpdates: Any = rollout_updates.WeightUpdates  # the servers and the evaluations are stand-ins


class Stops:
    """Evaluates some versions."""

    def __init__(self, *stops: int) -> None:
        self.stops = stops

    def next_stop(self, version: int, newest: int) -> int:
        return next((stop for stop in self.stops if version < stop < newest), newest)

    async def leave(self, stop: int) -> None:
        pass

    async def finish(self) -> None:
        pass


class Servers:
    """Take what the trainer offers at that moment, and files."""

    def __init__(self, paths: RunPaths) -> None:
        self.paths, self.told, self.trainer_has = paths, [], 0

    async def update(self, weights: WeightVersion, timeout: float) -> None:
        self.told.append((weights.version, weights.kind))
        if weights.kind == "memory" and weights.version != self.trainer_has:
            write_offer(self.paths, self.trainer_has)
            raise WeightsGone(f"the trainer has {self.trainer_has}")


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    paths = RunPaths(tmp_path)
    paths.endpoints.mkdir()
    return paths


def test_a_version_that_the_trainer_left_behind_is_skipped(paths: RunPaths) -> None:
    servers = Servers(paths)
    servers.trainer_has = 2
    reached: list[int] = []
    updates = WeightUpdates(paths, servers, 5.0, 2, reached.append, Stops())
    write_offer(paths, 1)
    asyncio.run(updates.follow())
    assert servers.told == [(1, "memory"), (2, "memory")]
    assert reached == [2]


def test_a_version_that_appears_while_another_is_left_is_asked_about_as_well(paths: RunPaths) -> None:
    class Noting(Stops):
        left: tuple[int, ...] = ()

        async def leave(self, stop: int) -> None:
            self.left += (stop,)
            write_offer(paths, 2)

    servers, stops = Servers(paths), Noting()
    servers.trainer_has = 2
    write_offer(paths, 1)
    asyncio.run(WeightUpdates(paths, servers, 5.0, 2, lambda version: None, stops).follow())
    assert stops.left == (1, 2), "version 2 may be one that an evaluation waits for"
    assert servers.told == [(2, "memory")]


async def test_a_version_to_evaluate_is_waited_for_and_read_from_its_files(paths: RunPaths) -> None:
    servers = Servers(paths)
    servers.trainer_has = 3
    updates = WeightUpdates(paths, servers, 5.0, 3, lambda version: None, Stops(2))
    write_offer(paths, 3)

    following = asyncio.ensure_future(updates.follow())
    await asyncio.sleep(0.1)
    assert servers.told == []
    paths.weights_of(2).mkdir(parents=True)
    (paths.weights_of(2) / COMPLETE).write_text("{}")
    await following
    assert servers.told == [(2, "files"), (3, "memory")]


def test_a_trainer_that_never_has_what_it_offers_is_an_error_in_bounded_time(paths: RunPaths) -> None:
    class Never(Servers):
        async def update(self, weights: WeightVersion, timeout: float) -> None:
            raise WeightsGone("no way there")

    write_offer(paths, 1)
    with pytest.raises(WeightsGone, match="no way there"):
        asyncio.run(WeightUpdates(paths, Never(paths), 0.3, 1, lambda version: None, Stops()).follow())


def test_over_files_a_version_that_was_deleted_is_named(paths: RunPaths) -> None:
    paths.weights_of(3).mkdir(parents=True)
    (paths.weights_of(3) / COMPLETE).write_text("{}")
    with pytest.raises(FileNotFoundError, match=r"step_2/COMPLETE is missing: the servers need version 2"):
        asyncio.run(WeightUpdates(paths, Servers(paths), 5.0, 3, lambda version: None, Stops(2)).follow())


def ends(paths: RunPaths) -> None:
    """What the trainer does with its last version."""
    paths.weights_of(2).mkdir(parents=True)
    (paths.weights_of(2) / COMPLETE).write_text("{}")
    paths.offer.unlink()


def test_a_last_version_that_goes_from_memory_to_files_during_a_look_is_seen(paths: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    paths.weights_of(1).mkdir(parents=True)
    (paths.weights_of(1) / COMPLETE).write_text("{}")
    write_offer(paths, 2)
    look = files.latest_version

    def look_and_end(paths: RunPaths) -> int | None:
        found = look(paths)
        ends(paths)
        return found

    monkeypatch.setattr(files, "latest_version", look_and_end)
    newest = Subscriber(paths).latest()
    assert newest.version == 2


def test_a_version_in_memory_that_is_gone_when_the_trainer_ends_is_skipped(paths: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    write_offer(paths, 1)
    look, looks = Subscriber.latest, itertools.count(1)

    def look_and_end(published: Subscriber) -> WeightVersion | None:
        found = look(published)
        if next(looks) == 2:  # the last look before the servers are told
            ends(paths)
        return found

    monkeypatch.setattr(Subscriber, "latest", look_and_end)
    servers = Servers(paths)
    asyncio.run(WeightUpdates(paths, servers, 5.0, 2, lambda version: None, Stops()).follow())
    assert servers.told == [(2, "files")]


def test_updates_that_miss_the_trainer_go_on_as_long_as_it_gets_on(paths: RunPaths) -> None:
    class Late(Servers):
        """Waits longer than the limit for the trainer, which then has the next version; takes the fifth."""

        async def update(self, weights: WeightVersion, timeout: float) -> None:
            await asyncio.sleep(2 * timeout)
            if weights.version < 5:
                write_offer(self.paths, weights.version + 1)
                raise WeightsGone("too late")

    write_offer(paths, 1)
    reached: list[int] = []
    asyncio.run(WeightUpdates(paths, Late(paths), 0.05, 5, reached.append, Stops()).follow())
    assert reached == [5]


def test_servers_of_another_model_are_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "a")
    a, cached = str(tmp_path / "a"), "/cache/hub/models--some--name/snapshots/1f"
    check_model(a, [str(tmp_path / "link"), a], None)
    check_model("some/name", [cached], None)
    check_model(str(tmp_path / "weights" / "step_2"), [a], str(tmp_path / "weights"))
    assert not caplog.records
    for wanted, served in ((a, str(tmp_path / "b")), ("some/other", cached)):
        with pytest.raises(InferenceError, match=f"have the model {served}, and this run is to play {wanted}.\n  fix: "):
            check_model(wanted, [served], None)
    check_model("some/name", ["/elsewhere/name"], None)
    assert "have the model /elsewhere/name; whether that is some/name is not known" in caplog.text


@pytest.mark.parametrize("root", [Config, SftRoot])
def test_no_run_trains_on_servers_of_another_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, root: type[PlayRoot]) -> None:
    monkeypatch.setattr(policy_backend, "give_policy", lambda *_: None)
    paths, config = RunPaths(tmp_path), root(max_steps=1, seq_len=8)
    nobody: Any = None

    async def connect(wanted: str) -> None:
        paths.initial_model.write_text(f"{wanted}\n")
        async with Stand() as stand:
            config.inference.base_url, config.inference.api_key = [stand.endpoint.url], "key"
            async with connect_servers(config, paths, {}, nobody, lambda _: None):
                pass

    asyncio.run(connect("model"))
    with pytest.raises(InferenceError, match=r"have the model model, and this run is to play some/other\."):
        asyncio.run(connect("some/other"))


class Noted:
    """Stands in for the evaluations, all of whose versions are due."""

    def __init__(self, *_: Any, oldest: int, **__: Any) -> None:
        self.oldest = oldest
        self.now: int | None = None
        self.recorded: list[int] = []

    def begin(self, version: int) -> None:
        self.now = version

    async def leave(self, stop: int | None = None) -> None:
        assert stop is None, "nothing of supervised training waits for an evaluation"
        if self.now is not None:
            self.recorded.append(self.now)
        self.now = None

    def next_stop(self, version: int, newest: int) -> int:
        return version + 1


def beside_of(root: Path, monkeypatch: pytest.MonkeyPatch, **keys: Any) -> SftEvaluator:
    monkeypatch.setattr(evaluator, "Evaluations", Noted)
    paths, nothing = RunPaths(root), None
    return SftEvaluator(SftRoot(max_steps=2, seq_len=8, **keys), paths, {}, nothing, nothing, Heartbeat(paths, "evaluator"))  # type: ignore[arg-type]


def test_a_record_is_written_as_soon_as_its_evaluation_has_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    role = beside_of(tmp_path, monkeypatch)
    seen: list[list[int]] = []

    async def reach(version: int) -> None:  # the trainer takes long for it
        seen.append(list(role.evaluations.recorded))  # type: ignore[attr-defined]
        role.updates.version = version
        role.evaluations.begin(version)

    monkeypatch.setattr(role.updates, "reach", reach)
    asyncio.run(role._work())
    assert seen == [[0], [0, 1]]
    assert role.evaluations.recorded == [0, 1, 2]  # type: ignore[attr-defined]


def test_the_weights_of_a_checkpoint_that_is_still_being_written_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    role = beside_of(tmp_path, monkeypatch)
    assert role.config.versions_kept == 1
    role.updates.version = 2  # the last
    for version in (1, 2):
        role.paths.weights_of(version).mkdir(parents=True)
        (role.paths.weights_of(version) / COMPLETE).write_text('{"files": {}}')
    begin(role.paths, 1)
    asyncio.run(role._work())
    assert role.updates.published.on_disk(1)


@pytest.mark.parametrize(("resume", "oldest"), [(None, 0), ("latest", 0), ("3", 0), ("/runs/a/checkpoints/step_4", 4)])
def test_a_fork_does_not_look_for_evaluations_of_versions_that_the_other_run_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, resume: str | None, oldest: int
) -> None:
    paths = RunPaths(tmp_path)
    paths.root.mkdir(exist_ok=True)
    write_start(paths, Start(step=6, checkpoint=paths.checkpoint_of(6)))  # the fork's own, or the other run's that it has adopted
    assert beside_of(tmp_path, monkeypatch, resume=resume).evaluations.oldest == oldest  # type: ignore[attr-defined]
