"""A request to a worker, from `play` to its answer."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

from rlx.envs.base import failed
from rlx.envs.wire import Played, PlayFailed, Result
from rlx.policy.base import Episode
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
    began: float = 0.0  # monotonic seconds when its worker got it
    before: float = 0.0  # seconds that its worker had computed for all rollouts then
    computed: float = 0.0  # seconds since then in which its worker computed for this request, as the pool saw it
    lost: int = 0  # workers that died with it for an unknown reason
    episodes: dict[int, Episode] = field(default_factory=dict)  # by member
    asks: set[asyncio.Task[None]] = field(default_factory=set)  # requests to the policy in flight

    def forget_asks(self) -> None:
        """Give up the requests to the policy that are in flight."""
        for ask in self.asks:
            ask.cancel()
        self.asks = set()

    def forget(self) -> None:
        """Drop everything of a play that does not count."""
        self.forget_asks()
        self.episodes = {}


def answer(playing: Playing, message: Played | PlayFailed) -> None:
    """Answer a request with what its worker says."""
    playing.forget_asks()  # of a rollout that ended without them: beyond its time, for example
    if playing.answer.done():
        return
    if isinstance(message, PlayFailed):
        playing.answer.set_exception(RuntimeError(f"{message.error}\n{message.trace}"))
    elif message.results:
        try:
            playing.answer.set_result([_rollout(playing, result) for result in message.results])
        except Exception as error:  # a defect of ours: it must reach the one who waits
            playing.answer.set_exception(error)
    else:
        fail(playing, None, "error", "environment_error", message.error or "the environment cancelled the rollout's own task")


def fail(playing: Playing, member: int | None, status: Status, stop: str, error: str) -> None:
    """Answer a request: this member failed (None: all of them), the others are cancelled."""
    playing.forget_asks()
    if playing.answer.done():
        return
    rollouts = []
    for each in playing.members:
        mine: tuple[Status, str, str] = (status, stop, error)
        if member is not None and each != member:
            mine = ("cancelled", "group_failed", "another rollout of the group failed")
        timing = {"total": time.monotonic() - playing.began}
        rollouts.append(failed(playing.task, each, playing.episodes.get(each), *mine, timing))
    playing.answer.set_result(rollouts)


def _rollout(playing: Playing, result: Result) -> Rollout:
    """A worker's result with the trace that its episode left here."""
    episode = playing.episodes.get(result.member)
    trace = Trace() if episode is None else episode.trace if result.kept is None else episode.keep(result.kept)
    error = result.error
    if error is not None and episode is not None and result.status == "timeout":
        error += episode.waits_for
    return Rollout(
        task=playing.task,
        member=result.member,
        trace=trace,
        prompt=result.prompt,
        completion=result.completion,
        reward=result.reward,
        rewards=result.rewards,
        metrics=result.metrics,
        status=result.status,  # type: ignore[arg-type]
        stop=result.stop,
        error=error,
        is_truncated=result.is_truncated,
        timing=result.timing,
        agent=result.agent,
        compared=result.compared,
        asked=result.asked,
        others=tuple(_rollout(playing, other) for other in result.others),
    )
