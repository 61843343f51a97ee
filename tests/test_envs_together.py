"""Episodes that run at the same time in one process."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from typing import Any

import pytest

from rlx.envs.marks import PLAYING, SPENT, Marks, marked_tasks
from rlx.envs.together import abandon, run_for

pytestmark = pytest.mark.slow


def test_time_in_which_others_compute_does_not_count_as_a_rollouts_own() -> None:
    fd = Marks.create()
    marks = Marks(fd)
    os.close(fd)

    async def reward(number: int) -> str:
        await asyncio.sleep(0.01)
        end = time.monotonic() + 0.06
        while time.monotonic() < end:
            pass
        return "scored"

    async def hangs(number: int) -> str:
        await asyncio.sleep(3600)
        return "never"

    async def episode(number: int, work: Callable[[int], Any]) -> bool:
        PLAYING.set((number, 1))
        playing = await run_for(0.3, work(number))
        if not (done := playing.done()):
            await abandon(playing)
        asyncio.get_running_loop().call_soon(SPENT.end, number)
        late.append(asyncio.create_task(reward(number)))  # it computes after its rollout has ended
        return done

    async def main() -> list[bool]:
        asyncio.get_running_loop().set_task_factory(marked_tasks(marks))
        calls = []
        for number in range(10):
            PLAYING.set((number, 1))
            SPENT.begin(number)
            calls.append(asyncio.ensure_future(episode(number, hangs if number == 3 else reward)))
        done = await asyncio.gather(*calls)
        await asyncio.gather(*late)
        return done

    late: list[asyncio.Task[str]] = []
    assert asyncio.run(main()) == [number != 3 for number in range(10)], "each reward takes 0.06 s of its 0.3 s; one never ends"
    assert SPENT.own == {}, "of rollouts that have ended nothing is kept"
    marks.close()
