"""Two servers that get versions one after the other (`weight_broadcast.in_turn`), on real vLLM on CPU, with requests in flight on both."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from inference_server import EXACT, Run, prompts, running, under_load
from run_servers import Servers

from rlx.inference.fleet import Fleet
from rlx.inference.telling import Manner
from rlx.types import Turn

pytestmark = [pytest.mark.slow, pytest.mark.long]

LANES = 16


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Run]]:
    """Their models are the same, version by version."""
    runs = [Run(tmp_path_factory.mktemp("run"), tied=True) for _ in range(2)]
    for run in runs:
        run.start()
    yield runs
    for run in runs:
        run.stop()


def test_updates_in_turn_leave_a_server_that_generates_and_every_token_is_of_the_version_that_it_claims(
    runs: list[Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    for version in (1, 2, 3):
        runs[0].version(version)
    began: list[tuple[str, int]] = []
    during: dict[tuple[str, int], int] = {}  # requests that the other server had when one was done
    load, loading = Fleet._load, 0

    async def watched(fleet: Fleet, server: Any, weights: Any, together: int = 1) -> None:
        nonlocal loading
        assert together == 1
        assert loading == 0, "one at a time"
        key = (server.endpoint.name, weights.version)
        before = await fleet.states()
        versions = sorted(state.version for state in before)
        assert versions in ([weights.version - 1] * 2, [weights.version - 1, weights.version]), versions
        began.append(key)
        loading += 1
        await load(fleet, server, weights, together)
        loading -= 1
        after = await fleet.states()
        during[key] = sum(state.running for state, old in zip(after, before, strict=True) if state.version == old.version)

    monkeypatch.setattr(Fleet, "_load", watched)

    async def conversation() -> list[Turn]:
        endpoints = [endpoint for run in runs for endpoint in run.ready()]
        async with Servers(endpoints, request_timeout=120, manner=Manner(in_turn=True)) as client:
            await client.fleet.wait_ready(300)

            async def change() -> None:
                for version in (1, 2, 3):
                    await running(client, LANES // 2)
                    await asyncio.sleep(0.3)
                    await client.update(runs[0].version(version), version)
                    states = await client.fleet.states()
                    assert [state.version for state in states] == [version] * 2
                    assert [state.attested for state in states] == [1.0] * 2

            return await under_load(client, prompts(LANES, seed=6), change)  # a request that fails, fails the test

    turns = asyncio.run(conversation())
    assert len(began) == 6
    assert [version for _, version in began] == [1, 1, 2, 2, 3, 3]
    assert all(during.values()), "the other server works on requests meanwhile"
    assert {version for turn in turns for version in turn.versions.tolist()} == {0, 1, 2, 3}
    assert len([turn for turn in turns if len(set(turn.versions.tolist())) > 1]) >= LANES // 2, "they went on through updates"
    assert runs[0].worst(turns, 1.0) < EXACT
