"""Several coroutines of one event loop: until all are done, until the first fails, or for a time."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any, TypeVar

T = TypeVar("T")


async def gather_with_timeout(seconds: float | None, *parts: Coroutine[Any, Any, None]) -> None:
    """Run coroutines concurrently, and cancel what still runs after `seconds`. None: run all to their end. Raises their first error."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await asyncio.gather(*parts)


async def first_failure(*parts: Coroutine[Any, Any, None], forever: Sequence[Coroutine[Any, Any, None]] = ()) -> None:
    """Run all coroutines; return when `parts` are done, or raise the first exception of any. Cancels what still runs."""
    needed = {asyncio.ensure_future(part) for part in parts}
    tasks = needed | {asyncio.ensure_future(part) for part in forever}
    try:
        while needed:
            done, _ = await asyncio.wait(needed | {task for task in tasks if not task.done()}, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
            needed -= done
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def all_of(calls: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Results of all calls, run concurrently. The first error cancels the rest and is raised."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
