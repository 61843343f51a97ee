"""Plays the rollouts of one task and counts the outcomes of all rollouts since the run began.

A member that fails is played again with other sampling seeds, up to `max_retries` times; after a timeout there is no retry. What then has
no score costs itself, not its group: the survivors are the group, if they are at least `min_group`. Where rewards compare the members, the
whole group is played again, and fails as a whole. A timeout while no server took requests does not count: the member is played again under
the same attempt number, so with the same seeds.
Batches and policy versions belong to `rlx.rollout.collector`.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from rlx.envs.base import Environment
from rlx.envs.errors import FailureLog
from rlx.rollout.state import RolloutCounters
from rlx.types import Rollout, Task

log = logging.getLogger(__name__)

TIMED_OUT = "timed_out"  # metric: 1 if the rollout ran out of time and counts with the reward 0 (`envs.NAME.on_timeout`)
DIFFER = "tasks_differ"  # metric: 1 if the rollout is compared with others of its group that had another task
MAX_FLOAT32 = (2 - 2**-23) * 2.0**127  # largest float32; advantages go to the trainer in float32


def comparison_groups(rollouts: Sequence[Rollout]) -> list[list[int]]:
    """The parts of a group whose rewards are compared with each other, as places in it, in the order of their first rollouts."""
    parts: dict[str | None, list[int]] = {}
    for place, rollout in enumerate(rollouts):
        parts.setdefault(rollout.baseline_key, []).append(place)
    return list(parts.values())


def episodes(rollouts: Sequence[Rollout]) -> int:
    """How many members of a group these rollouts are of: an episode may give several."""
    return len({one.member if one.episode_index is None else one.episode_index for one in rollouts})


class GroupFailed(Exception):
    """Fewer than `min_group` rollouts of a group have a score, so the group is dropped. `rollout`: the first one without."""

    def __init__(self, rollout: Rollout) -> None:
        super().__init__(f"{rollout.task.env}, example {rollout.task.example_id}: {rollout.stop}: {rollout.error}")
        self.rollout = rollout


async def play_with_outage_retry(
    env: Environment, task: Task, members: Sequence[int], attempt: int, away: Callable[[], float] = lambda: 0.0
) -> list[Rollout]:
    """`env.play`, repeated if a rollout timed out and no server took requests for some of its time.

    `away`: seconds so far in which no server took requests (`Sampler.away`).
    """
    while True:
        before = away()
        rollouts = await env.play(task, members, attempt)
        if away() == before or not any(rollout.status == "timeout" or rollout.timing.get("cut_short") for rollout in rollouts):
            return rollouts
        log.info("%s, example %d: played again, because no server took requests meanwhile", task.env, task.example_id)


async def play_with_retries(
    env: Environment,
    task: Task,
    members: Sequence[int],
    max_retries: int,
    judge: Callable[[Rollout, bool], Rollout],
    on_failure: Callable[[Rollout], None] = lambda _: None,
    away: Callable[[], float] = lambda: 0.0,
) -> list[Rollout]:
    """Play these members until each has succeeded, timed out or failed too often: the rollouts of its last attempt, in their order.

    `judge`: what a rollout counts as; told whether rewards compare it with its group's. `on_failure`: called with each attempt's failures.
    """
    done: dict[int, list[Rollout]] = {}
    left = list(members)
    for attempt in range(max_retries + 1):
        answered = await play_with_outage_retry(env, task, left, attempt, away)
        played = [one for rollout in answered for one in (replace(rollout, siblings=()), *rollout.siblings)]
        compares = any(rollout.status == "cancelled" for rollout in played)
        rollouts = [judge(rollout, compares) for rollout in played]
        done |= {own[0].member: own for own in _by_member(rollouts)}
        failed = [rollout for rollout in rollouts if rollout.status in ("error", "timeout")]
        for rollout in failed:
            on_failure(rollout)
        if not failed or any(rollout.status == "timeout" for rollout in failed):
            break
        if not all(rollout.status == "ok" for rollout in played) and not compares:
            # Some failed, and the others have rewards all the same: these do not compare the group. A group of environments
            # (`EnvGroup`) whose other members do compare asks for whole groups, too.
            left = sorted({rollout.member for rollout in failed})
    return [rollout for member in members for rollout in done[member]]


async def play_group(
    env: Environment,
    task: Task,
    size: int,
    max_retries: int,
    tally: RolloutCounters,
    on_end: Callable[[Sequence[Rollout]], None] = lambda _: None,
    *,
    min_group: int = 2,
    on_timeout: str = "drop",
    away: Callable[[], float] = lambda: 0.0,
    failures: FailureLog | None = None,
) -> list[Rollout]:
    """The scored rollouts of `task`, by member: at most `size` of them, or more if several runs of an episode are trained.

    `on_end` is called with the last attempt's rollouts of each member when it has ended; one that failed for good has its `status`.
    `min_group`: members that must have a score. `on_timeout`: see `settled`. `away`: see `play_with_outage_retry`. `failures`: where they
    are logged.

    Where rewards compare the group, one request plays the whole group. Otherwise each member has its own request.
    Raises GroupFailed. No task is left running after a failure or a cancellation.
    """
    parts = [range(size)] if env.scores_groups else [range(member, member + 1) for member in range(size)]

    def judge(rollout: Rollout, compares: bool) -> Rollout:
        # No reward of 0 can stand in where rewards compare a group: it would change the others'.
        return checked(rollout if compares else settled(rollout, on_timeout))

    def failed(rollout: Rollout) -> None:
        tally.add_failure(rollout)
        if failures is not None:
            failures.note(task.env, f"a rollout of example {task.example_id}", f"{rollout.stop}: {rollout.error}")

    async def play(members: Sequence[int]) -> list[Rollout]:
        ended: list[Rollout] = []
        try:
            ended = await play_with_retries(env, task, members, max_retries, judge, failed, away)
            if not env.scores_groups or all(rollout.status == "ok" for rollout in ended):
                ended = [_count(rollout, tally) if rollout.status == "ok" else rollout for rollout in ended]
            return ended
        finally:
            for member in members:
                on_end([rollout for rollout in ended if rollout.member == member])

    members = [asyncio.create_task(play(part)) for part in parts]
    try:
        played = [rollouts for ended in await asyncio.gather(*members) for rollouts in _by_member(ended)]
        scored = [rollouts for rollouts in played if all(rollout.status == "ok" for rollout in rollouts)]
        whole = [rollout for rollouts in scored for rollout in rollouts]
        if len(scored) < (size if env.scores_groups else min(min_group, size)):
            raise GroupFailed(next(one for rollouts in played for one in rollouts if one.status not in ("ok", "cancelled")))
        if len(whole) == len(scored):
            return _with_all(whole)
        return [replace(rollout, member=member, episode_index=rollout.member) for member, rollout in enumerate(whole)]
    except BaseException:
        for member in members:
            member.cancel()
        await asyncio.gather(*members, return_exceptions=True)
        raise


def _with_all(rollouts: list[Rollout]) -> list[Rollout]:
    """A whole group. If all of its rewards are compared although its episodes had different tasks (`Rollout.task_key`), that is said."""
    if not any(rollout.task_key for rollout in rollouts):
        return rollouts
    differ = len({rollout.task_key for rollout in rollouts} - {None}) > 1
    if differ:
        _say_different(rollouts[0].task.env)
    return [replace(rollout, task_key=None, metrics={**rollout.metrics, DIFFER: float(differ)}) for rollout in rollouts]


@functools.cache
def _say_different(env: str) -> None:
    key = f"envs.{env}.agents_per_group"
    log.warning(
        "%s: episodes of one row gave an agent different tasks. %s=one compares their rewards all the same, =all does not", env, key
    )


def _by_member(rollouts: Sequence[Rollout]) -> list[list[Rollout]]:
    found: dict[int, list[Rollout]] = {}
    for rollout in rollouts:
        found.setdefault(rollout.member, []).append(rollout)
    return list(found.values())


def _count(rollout: Rollout, tally: RolloutCounters) -> Rollout:
    rollout = replace(rollout, arrival=tally.finished)
    tally.finished += 1
    tally.tokens += rollout.trace.num_sampled
    return rollout


def settled(rollout: Rollout, on_timeout: str) -> Rollout:
    """A rollout that ran out of time, under the rule of `envs.NAME.on_timeout`: with `zero`, what was sampled of it has the reward 0."""
    if on_timeout != "zero" or rollout.status != "timeout" or not rollout.trace.has_tokens:
        return rollout
    return replace(rollout, status="ok", reward=0.0, is_truncated=True, metrics={**rollout.metrics, TIMED_OUT: 1.0})


def checked(rollout: Rollout) -> Rollout:
    """The rollout, marked as failed if one of its numbers would spoil the whole batch.

    These numbers are a reward that is NaN or infinite in float32, and a log-probability that is not finite. A rollout without a turn is
    marked, too: nothing of it can be trained.
    """
    if rollout.status != "ok":
        return rollout
    which = f"rollout {rollout.member} of group {rollout.task.index}"
    if not abs(rollout.reward) <= MAX_FLOAT32:  # also for NaN
        error = f"the reward of {which} is {rollout.reward}; rewards must be finite in float32"
        return replace(rollout, status="error", stop="reward_not_finite", error=error)
    if not rollout.trace.has_tokens:
        what = "no request of its trajectory can be trained; a warning in the log says which sampling parameters it asked for"
        return replace(rollout, status="error", stop="no_turns", error=what)
    for number, node in enumerate(rollout.trace.nodes[index] for index in rollout.trace.answers):
        if not math.isfinite(node.logprobs.sum(dtype=np.float64)):  # faster than testing each
            place = int(np.argmin(np.isfinite(node.logprobs)))
            token = f"sampled token {int(node.token_ids[place - len(node.logprobs)])}, number {place} of turn {number} of {which},"
            error = f"{token} has the log-probability {node.logprobs[place]} according to the inference server"
            return replace(rollout, status="error", stop="logprob_not_finite", error=error)
    return rollout
