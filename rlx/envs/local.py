"""What the environments of this process have in common: one episode for each member, its time limit, and what becomes of one that fails."""

from __future__ import annotations

import asyncio
import logging
import time
import traceback
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, TypeVar

from rlx.envs.base import failed, filled
from rlx.envs.errors import FailureLog, in_one_line
from rlx.policy.base import Episode, Policy, PromptTooLong
from rlx.stack_dump import awaits, own_line, rollout_name
from rlx.trace import Trace
from rlx.types import Rollout, Task

log = logging.getLogger("rlx.envs")

T = TypeVar("T")

MOST_WAITING = 9.0  # times its limit that an episode may wait for the event loop; then its own time is over as well
CLEANUP_GRACE = 5.0  # seconds for a cancelled episode to clean up; after that it is abandoned


WAITED_FOR: ContextVar[list[str]] = ContextVar("waited_for")
"""Of this rollout: what its environment has asked, beside the policy, and has no answer from."""


class Late:
    """Seconds so far in which whatever was ready waited for its turn in the event loop, because other code computed."""

    seconds = 0.0


class LocalEnvironment:
    """See `rlx.envs.base.Environment`. An implementation plays one rollout, or has a `play` of its own."""

    _rollout: Callable[[Task, int, int], Coroutine[Any, Any, Rollout]]  # of a task, its member and its attempt
    _starting: asyncio.Task[None] | None = None  # of what all rollouts share
    rows: Sequence[dict[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()
    agents: Sequence[str] = ()
    scores_groups = False

    def __init__(self, name: str, timeout: float, on_reward_error: str, sources: Path | None) -> None:
        """`timeout`: seconds for an episode. `on_reward_error`: the rule of `with_raised_reward`. `sources`: the environment's own code."""
        self.name, self.timeout, self.on_reward_error, self.sources = name, timeout, on_reward_error, sources
        self.policy: Policy | None = None
        self.scores: Callable[[Trace], None] | None = None  # called before rewards compute, with what is trained if it has any
        self.failures = FailureLog(log)

    def rehearse(self) -> None:
        """Try, before a run, what its first rollout would do without a policy. Raises what that raises."""

    async def play(self, task: Task, members: Sequence[int], attempt: int) -> list[Rollout]:
        """See `rlx.envs.base.Environment`. An episode may take `timeout` seconds."""
        await self._start()
        return await together([self._rollout(task, member, attempt) for member in members])

    async def _start(self) -> None:
        """Start what all rollouts share, once."""
        self._starting = self._starting or asyncio.create_task(self._serve())
        await asyncio.shield(self._starting)

    async def _serve(self) -> None:
        """Start what all rollouts share."""

    async def close(self) -> None:
        """Release what the environment holds."""
        self._starting = None

    def demonstration(self, row: Mapping[str, Any], errs: bool, random: Any) -> Any:
        """What the environment's own teacher says in a row (`rlx.envs.demonstrations`); None: nothing."""
        return None

    def answer_of(self, row: Mapping[str, Any]) -> str | None:
        """The right answer as the model is to write it; None if it is not known."""
        task = row.get("task")
        answer = (task if isinstance(task, Mapping) else row).get("answer")
        return answer if isinstance(answer, str) and answer else None

    def tools_of(self, row: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The functions that are offered in a row, in OpenAI's form."""
        return [dict(tool) for tool in self.tools]

    def is_raw(self, row: Mapping[str, Any]) -> bool:
        """Whether the policy is asked with raw text, which has no chat format."""
        return False

    def _episode_of(self, task: Task, member: int, attempt: int) -> Episode:
        assert self.policy is not None, "the environment has no policy; set it before the first play"
        return self.policy.episode(task, member, attempt)

    async def _timed(self, work: Coroutine[Any, Any, Any], task: Task, member: int, episode: Episode, timing: dict[str, Any]) -> Any:
        """What an episode returned; the failed rollout if it raised, or did not end in time. `timing` gets all but its parts."""
        began, asked = time.monotonic(), list[str]()
        WAITED_FOR.set(asked)
        playing = await run_for(self.timeout, work, rollout_name(task, member))
        timing["total"] = time.monotonic() - began
        timing |= {"began": time.time() - timing["total"], "requests": list(episode.times), "cut_short": float(bool(episode.timed_out))}
        if not playing.done():
            where = waits_at(playing, self.sources) + episode.waits_for + "".join(f"; {who} has not answered" for who in asked)
            await abandon(playing)
            text = f"no result after {self.timeout:g} s (rollout_timeout){where}"
            return failed(task, member, episode, "timeout", "timeout", text, timing)
        raised = raised_by(playing)
        if raised is None and (not episode.timed_out or episode.scored_late):
            return playing.result()
        if raised is None:  # an environment or a program that went on after the policy's error
            return failed(task, member, episode, "timeout", "timeout", episode.timed_out, timing)
        if isinstance(raised, PromptTooLong):
            return failed(task, member, episode, "error", "prompt_too_long", filled(self.policy), timing)
        text = self._noted(f"example {task.example_id}", raised)
        return failed(task, member, episode, "error", self._cause_of(raised), text, timing)

    def _cause_of(self, error: BaseException) -> str:
        """The `stop` of a rollout whose episode raised."""
        return "environment_error"

    def _noted(self, what: str, error: BaseException) -> str:
        """The error in one line. The log gets its traceback, once for all errors of its kind."""
        text = in_one_line(error, self.sources)
        self.failures.note(self.name, what, text, "".join(traceback.format_exception(error)).rstrip())
        return text


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


@contextmanager
def waiting_for(who: str) -> Iterator[None]:
    """Name `who` as what a rollout waits for, should its time end within."""
    asked = WAITED_FOR.get([])
    asked.append(who)
    try:
        yield
    finally:
        asked.remove(who)


def raised_by(task: asyncio.Task) -> BaseException | None:
    """What an episode, or its scoring, ended with. One that cancelled its own task (as cancel scopes of libraries can) has failed, too."""
    return RuntimeError("the environment cancelled the rollout's own task") if task.cancelled() else task.exception()


async def abandon(task: asyncio.Task) -> None:
    """Cancel a task and let it clean up for at most CLEANUP_GRACE seconds."""
    task.cancel()
    await asyncio.wait({task}, timeout=CLEANUP_GRACE)
    if task.done() and not task.cancelled():
        task.exception()  # retrieve it; otherwise asyncio logs a warning later


def waits_at(task: asyncio.Task[Any], sources: Path | None) -> str:
    """`; at FILE:LINE in FUNCTION`, where a rollout's task waits in the environment's code; empty if it waits elsewhere."""
    where = own_line(awaits(task), sources)
    return f"; at {where}" if sources is not None and where.startswith((f"{sources}:", f"{sources}/")) else ""
