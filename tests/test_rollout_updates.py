"""Which version the servers are told to take, and from where, when the trainer offers versions from memory."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
from pathlib import Path
from typing import Any

import pytest

from rlx.inference.wire import WeightsGone
from rlx.paths import COMPLETE, RunPaths
from rlx.rollout import updates as rollout_updates
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


def test_a_version_to_evaluate_is_waited_for_and_read_from_its_files(paths: RunPaths) -> None:
    servers = Servers(paths)
    servers.trainer_has = 3
    updates = WeightUpdates(paths, servers, 5.0, 3, lambda version: None, Stops(2))
    write_offer(paths, 3)

    async def scene() -> None:
        following = asyncio.ensure_future(updates.follow())
        await asyncio.sleep(0.1)
        assert servers.told == []
        paths.weights_of(2).mkdir(parents=True)
        (paths.weights_of(2) / COMPLETE).write_text("{}")
        await following

    asyncio.run(scene())
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
    assert newest is not None
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
