"""An environment whose code is the bottleneck gets more workers."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from policy_stand_in import task_of
from test_envs_workers import play, pool_of  # noqa: F401  (a fixture)

from rlx.envs.pool import WorkerPool

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("trouble", ["", "first"])
def test_an_environment_whose_rollouts_wait_gets_another_worker_and_goes_on_without_one_that_cannot_load(
    pool_of: Any,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    trouble: str,
) -> None:
    monkeypatch.setattr("rlx.envs.pool.PATIENCE", 0.3)
    pids = set()

    async def until_it_has_grown(pool: WorkerPool) -> None:
        for begin in range(0, 4000, 16):
            played = await asyncio.gather(*(pool.play(task_of(pool, index), [0], 0) for index in range(begin, begin + 16)))
            pids.update(one.rewards["pid"] for (one,) in played)
            assert all(one.status == "ok" for (one,) in played)
            if len(pids) == 2 or pool._most == 1:
                return

    only = {"trouble": "first", "bad": [str(tmp_path / "once")]} if trouble else {}
    pool = pool_of(1, most=2, busy=0.1, **only)
    play(pool, [], meanwhile=until_it_has_grown)
    assert (len(pids), pool._most) == ((1, 1) if trouble else (2, 2))
    assert pool.replaced == {}
