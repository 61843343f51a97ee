"""Episodes that run at the same time in one process."""

from __future__ import annotations

import asyncio
import socket
import time
from types import SimpleNamespace
from typing import Any

import pytest

from rlx.envs.local import Late, abandon, run_for
from rlx.envs.worker import Heart, new_loop

pytestmark = pytest.mark.slow


def test_time_in_which_others_compute_does_not_count_as_a_rollouts_own() -> None:
    async def reward() -> str:
        await asyncio.sleep(0.01)
        end = time.monotonic() + 0.06
        while time.monotonic() < end:
            pass
        return "scored"

    async def hangs() -> str:
        await asyncio.sleep(3600)
        return "never"

    async def episode(work: Any) -> bool:
        playing = await run_for(0.3, work)
        if not (done := playing.done()):
            await abandon(playing)
        return done

    async def main() -> list[bool]:
        return await asyncio.gather(*(episode(hangs() if number == 3 else reward()) for number in range(10)))

    loop, (ours, theirs) = new_loop(), socket.socketpair(type=socket.SOCK_DGRAM)
    Heart(ours, loop, SimpleNamespace(sampler=None)).start()  # type: ignore[arg-type]
    found = loop.run_until_complete(main())
    assert found == [number != 3 for number in range(10)], "each reward takes 0.06 s of its 0.3 s; one never ends"
    assert Late.seconds > 0.2
    theirs.close()
