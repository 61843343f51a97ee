"""One request to an environment's worker, and its answer: what the worker says, or that it failed."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field, replace

from rlx.envs.base import failed
from rlx.envs.wire import Failed, Played
from rlx.trace import Trace
from rlx.types import Rollout, Status, Task


@dataclass(slots=True, eq=False)
class Playing:
    """One request, from `play` to its answer."""

    number: int
    task: Task
    members: tuple[int, ...]
    attempt: int
    answer: asyncio.Future[list[Rollout]]
    crowd: int = 0  # it may be what ended its worker, so at most so many of such play together; 0: nothing is known against it
    began: float = field(default_factory=time.monotonic)  # monotonic seconds
    sampled: Trace | None = None  # of a member whose rewards compute, if that is kept


def answer(playing: Playing, message: Played | Failed) -> None:
    """Answer a request with what its worker says."""
    if playing.answer.done():
        return
    if isinstance(message, Failed):
        playing.answer.set_exception(RuntimeError(f"{message.error}\n{message.trace}"))
    elif message.rollouts:
        own = [[replace(rollout, task=playing.task) for rollout in runs] for runs in message.rollouts]
        playing.answer.set_result([replace(first, others=tuple(others)) if others else first for first, *others in own])
    else:
        fail(playing, "environment", message.error)


def fail(playing: Playing, cause: str, error: str) -> None:
    """Answer a request. Of several members the first has failed, and the others are cancelled: nobody knows which it was."""
    stop = {"timeout": "timeout", "environment": "environment_error"}.get(cause, f"worker_{cause}")
    status: Status = "timeout" if cause == "timeout" else "error"
    timing = {"total": time.monotonic() - playing.began}
    first, *others = playing.members
    rollouts = [failed(playing.task, first, None, status, stop, error, timing)]
    for other in others:
        rollouts.append(failed(playing.task, other, None, "cancelled", "group_failed", "another rollout of the group failed", timing))
    if playing.sampled is not None:
        rollouts = [replace(rollouts[0], trace=playing.sampled)]
    playing.answer.set_result(rollouts)
