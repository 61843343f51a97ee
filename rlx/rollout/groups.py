"""Playing the rollouts of one task, and what happened to rollouts since the run began.

A member that fails is played again, with other sampling seeds, up to `max_retries` times. A member that ran out of time is not:
its group has waited long enough and is given up. Knows nothing of batches and policy versions (`rlx.rollout.collector`).
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from rlx.envs.base import Environment, Policy
from rlx.rollout.state import Counts, readable
from rlx.types import Rollout, Task

log = logging.getLogger(__name__)

LARGEST = (2 - 2**-23) * 2.0**127  # of float32, in which advantages go to the trainer


class GroupFailed(Exception):
    """A group was given up because of one of its rollouts."""

    def __init__(self, rollout: Rollout) -> None:
        super().__init__(f"{rollout.task.env}, example {rollout.task.example_id}: {rollout.stop}: {rollout.error}")
        self.rollout = rollout


@dataclass
class Tally:
    """Counts over the whole run."""

    finished: int = 0  # rollouts that were played and scored
    tokens: int = 0  # sampled tokens of finished rollouts
    failed: Counter[str] = field(default_factory=Counter)  # rollouts that failed, by cause
    dropped: Counter[str] = field(default_factory=Counter)  # rollouts of groups that were given up, by cause
    failures: list[Rollout] = field(default_factory=list)  # the failed rollouts since somebody took this list

    @classmethod
    def of(cls, counts: Counts) -> Tally:
        """Go on counting from what a checkpoint holds."""
        return cls(counts.finished, counts.tokens, Counter(counts.failed), Counter(counts.dropped), list(counts.failures))

    def counts(self) -> Counts:
        """What a checkpoint holds."""
        return Counts(
            finished=self.finished,
            tokens=self.tokens,
            failed=dict(self.failed),
            dropped=dict(self.dropped),
            failures=tuple(replace(one, prompt=readable(one.prompt), completion=readable(one.completion)) for one in self.failures),
        )

    def add_failure(self, rollout: Rollout) -> None:
        """Count a failed rollout and keep it for the step's file."""
        self.failed[rollout.stop] += 1
        self.failures.append(rollout)
        log.warning("rollout failed: %s example %s: %s: %s", rollout.task.env, rollout.task.example_id, rollout.stop, rollout.error)


async def play_group(
    env: Environment,
    task: Task,
    size: int,
    policy: Policy,
    max_retries: int,
    tally: Tally,
    on_end: Callable[[], None] = lambda: None,
    to_the_end: bool = False,
) -> list[Rollout]:
    """The scored rollouts of `task`, by member; `on_end` is called whenever one of them has ended.

    When one of them fails, the others are cancelled. With `to_the_end` they are played on, so that what is counted, and as what, does not
    depend on which of them was the first to end.
    Raises GroupFailed; cancelled or failed, it leaves nothing running.
    """
    members = [asyncio.create_task(_play_member(env, task, member, policy, max_retries, tally)) for member in range(size)]
    for member in members:
        member.add_done_callback(lambda _: on_end())
    try:
        if to_the_end:
            await asyncio.wait(members)
        rollouts = await asyncio.gather(*members)
        if env.scores_groups:
            rollouts = [refuse_infinite(rollout) for rollout in await env.score_group(rollouts)]
            failed = [rollout for rollout in rollouts if rollout.status != "ok"]
            for rollout in failed:
                tally.add_failure(rollout)
            if failed:
                raise GroupFailed(failed[0])
        return list(rollouts)
    except BaseException:
        for member in members:
            member.cancel()
        await asyncio.gather(*members, return_exceptions=True)
        env.forget(task)
        raise


def refuse_infinite(rollout: Rollout) -> Rollout:
    """The rollout, as a failed one when its reward is NaN or infinite as a float32: one such number would spoil the whole batch."""
    if rollout.status != "ok" or abs(rollout.reward) <= LARGEST:  # false for NaN
        return rollout
    error = f"the reward of rollout {rollout.member} of group {rollout.task.index} is {rollout.reward}; rewards must be finite in float32"
    return replace(rollout, status="error", stop="reward_not_finite", error=error)


async def _play_member(env: Environment, task: Task, member: int, policy: Policy, max_retries: int, tally: Tally) -> Rollout:
    for attempt in range(max_retries + 1):
        rollout = refuse_infinite(await env.rollout(task, member, attempt, policy))
        if rollout.status == "ok":
            rollout = replace(rollout, arrival=tally.finished)
            tally.finished += 1
            tally.tokens += rollout.num_completion_tokens
            return rollout
        tally.add_failure(rollout)
        if rollout.status == "timeout":
            break
    raise GroupFailed(rollout)
