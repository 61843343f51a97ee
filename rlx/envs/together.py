"""Episodes that run at the same time, and their end. Needs nothing but the standard library: adapters of any verifiers use it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

T = TypeVar("T")

MOST_WAITING = 9.0  # times its limit that an episode may wait for the event loop; then its own time is over as well
CLEANUP_GRACE = 5.0  # seconds for a cancelled episode to clean up; after that it is abandoned


class Late:
    """Seconds so far in which whatever was ready waited for its turn in the event loop, because other code computed."""

    seconds = 0.0


async def together(calls: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Results of all calls, run concurrently. If it is cancelled, it waits until all of them have cleaned up."""
    if len(calls) == 1:
        return [await calls[0]]  # most requests are for one member and need no extra task
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


async def run_for(seconds: float, work: Coroutine[Any, Any, T], name: str | None = None) -> asyncio.Task[T]:
    """Run an episode, or its scoring, for at most `seconds` as the task `name`, and return the task.

    If it is not done, the caller must `abandon` it. In a worker, time in which the event loop computes does not count (`Late`): rewards
    that compute wait for each other.
    """
    playing = asyncio.create_task(work, name=name)
    began, before, left = time.monotonic(), Late.seconds, seconds
    try:
        while left > 0 and not playing.done():
            await asyncio.wait({playing}, timeout=left)
            left = began + seconds + min(Late.seconds - before, MOST_WAITING * seconds) - time.monotonic()
    except asyncio.CancelledError:
        await abandon(playing)
        raise
    return playing


def raised_by(task: asyncio.Task) -> BaseException | None:
    """What an episode, or its scoring, ended with. One that cancelled its own task (as cancel scopes of libraries can) has failed, too."""
    return RuntimeError("the environment cancelled the rollout's own task") if task.cancelled() else task.exception()


async def abandon(task: asyncio.Task) -> None:
    """Cancel a task and let it clean up for at most CLEANUP_GRACE seconds."""
    task.cancel()
    await asyncio.wait({task}, timeout=CLEANUP_GRACE)
    if task.done() and not task.cancelled():
        task.exception()  # retrieve it; otherwise asyncio logs a warning later
