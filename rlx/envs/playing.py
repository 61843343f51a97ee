"""A request to a worker, from `play` to its answer."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, replace

from rlx.envs.base import failed
from rlx.envs.wire import Played, PlayFailed
from rlx.types import Rollout, Status, Task


@dataclass(slots=True, eq=False)
class Playing:
    """One request, from `play` to its answer."""

    number: int
    task: Task
    members: tuple[int, ...]
    attempt: int
    answer: asyncio.Future[list[Rollout]]
    began: float = 0.0  # monotonic seconds when its worker got it
    before: float = 0.0  # seconds that its worker had computed for all rollouts then
    computed: float = 0.0  # seconds since then in which its worker computed for this request, as the pool saw it
    lost: int = 0  # workers that died with it for an unknown reason


def answer(playing: Playing, message: Played | PlayFailed) -> None:
    """Answer a request with what its worker says."""
    if playing.answer.done():
        return
    if isinstance(message, PlayFailed):
        playing.answer.set_exception(RuntimeError(f"{message.error}\n{message.trace}"))
    elif message.rollouts:
        own = [[replace(rollout, task=playing.task) for rollout in runs] for runs in message.rollouts]
        playing.answer.set_result([replace(first, others=tuple(others)) if others else first for first, *others in own])
    else:
        fail(playing, None, "error", "environment_error", message.error or "the environment cancelled the rollout's own task")


def fail(playing: Playing, member: int | None, status: Status, stop: str, error: str) -> None:
    """Answer a request: this member failed (None: all of them), the others are cancelled."""
    if playing.answer.done():
        return
    rollouts = []
    for each in playing.members:
        mine: tuple[Status, str, str] = (status, stop, error)
        if member is not None and each != member:
            mine = ("cancelled", "group_failed", "another rollout of the group failed")
        timing = {"total": time.monotonic() - playing.began}
        rollouts.append(failed(playing.task, each, None, *mine, timing))
    playing.answer.set_result(rollouts)
