"""Decides which groups are in flight and which of them make the next batch.

Batch m may start when the servers have version m - max_async_level, so its tokens are at most max_async_level versions older than the
policy that they train. The first groups to finish make the batch. A full batch still waits for groups that would be too old for the next
one: dropping them would drop the long rollouts (with a heavy tail and one version of slack, half of the longest). The collector does not
wait for a group that takes `MAX_DURATION_RATIO` times as long as any recent group. It drops that group, counts it and replaces it by
another example of its environment. It replaces groups with fewer than `min_group` scored rollouts, and those that a filter dropped, in the
same way. The run stops when too many rollouts of an environment fail (`rlx.rollout.failures.ErrorRate`).

At max_async_level 0 a batch does not depend on the order in which groups finish. It needs a fixed number of groups of every environment,
and each group that fails or is filtered is replaced by one of its own environment. The same examples are played in any order of outcomes.

The collector sees policy versions as numbers; servers and files are handled elsewhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rlx.config.schema import Config
from rlx.envs.base import Environment
from rlx.envs.errors import FailureLog
from rlx.rollout.failures import ErrorRate, RolloutsFailed
from rlx.rollout.groups import GroupFailed, episodes, play_group
from rlx.rollout.state import CollectorState, PlayedGroup, RolloutCounters, without_rows
from rlx.rollout.task_sampler import TaskSampler, interleave_envs
from rlx.types import Rollout, Task

log = logging.getLogger(__name__)

MAX_DURATION_RATIO = 3.0  # a batch waits for an expiring group up to this many times the longest duration of the recent groups,
AT_ONCE = 8  # rollouts begun in one turn of the event loop; beginning a thousand at once would block it for 0.2 s
MIN_WAIT_SECONDS = 1.0  # and at least this many seconds


@dataclass(slots=True)
class Pending:
    """A group that is being played or waits to be taken."""

    task: Task
    number: int  # how many groups began before this one
    version: int  # lower bound of its tokens' versions: while it is played, the servers' version at its begin; then its oldest token's
    left: int  # members still being played
    began: float  # monotonic seconds
    rollouts: list[Rollout] = field(default_factory=list)  # by member; empty until the group is finished


class Collector:
    """Keeps rollouts in flight and returns complete batches of groups."""

    def __init__(
        self,
        config: Config,
        envs: Mapping[str, Environment],
        filter_reason: Callable[[Sequence[Rollout]], str | None] = lambda _: None,
        outage_seconds: Callable[[], float] = lambda: 0.0,
        on_group: Callable[[Sequence[Rollout]], None] = lambda _: None,
        digests: Mapping[str, Any] | None = None,
    ) -> None:
        """`filter_reason`: returns the filter rule that a finished group breaks, or None. Filtered groups of an environment are replaced
        until their number is `difficulty_filter.max_rounds` times the environment's groups in a batch; after that the batch stays smaller.

        `outage_seconds`: see `play_with_outage_retry`. `on_group`: called with each finished group that no filter drops, for work on it
        that need not wait for the batch. `digests`: of the examples. Raises ValueError for data that does not suit the run.
        """
        self.config, self.filter_reason, self.outage_seconds, self.on_group = config, filter_reason, outage_seconds, on_group
        self.envs = {name: envs[name] for name in config.envs}  # without those that are only evaluated
        weights, curricula = ({name: getattr(env, key) for name, env in config.envs.items()} for key in ("weight", "curriculum"))
        self.tasks = tasks = TaskSampler(self.envs, weights, config.seed, config.orchestrator.buffer, curricula, digests)
        self.sizes = {name: config.group_size(name) for name in config.envs}  # rollouts of a group
        self.num_groups, self.max_concurrent = config.num_groups, config.concurrency
        self.errors = ErrorRate(config.orchestrator.max_error_rate)
        rounds = config.orchestrator.difficulty_filter.max_rounds
        self.max_filtered = {env: math.ceil(rounds * self.num_groups * tasks.share(env) - 1e-9) for env in tasks.envs}  # of one batch
        self.oversampling = math.ceil((config.orchestrator.oversampling_factor - 1) * self.num_groups)
        self.version = 0
        self.num_batches = 0  # batches handed out
        self.filtered: list[tuple[str, list[Rollout]]] = []  # rule and rollouts of each group filtered from the latest batch
        self.tally, self._log = RolloutCounters(), FailureLog(log)
        self.waited_for_weights = 0.0  # seconds since the run began in which nothing was in flight because new weights were missing
        self._playing: dict[int, tuple[Pending, asyncio.Task]] = {}
        self._finished: dict[int, Pending] = {}
        self._filtered: list[tuple[str, list[Rollout]]] = []  # rule and rollouts of each group filtered since the latest batch
        self._missing = 0  # groups that the next batch lacks: filtered and not replaced
        self._begun = 0  # groups
        self._cancelled: set[asyncio.Task] = set()
        self._replacements: deque[str] = deque()  # environment of each group to be replaced
        self._requeued: deque[Task] = deque()  # tasks of the groups that were in flight when the checkpoint was written
        self._durations: deque[float] = deque(maxlen=4 * self.num_groups)  # seconds of the groups that finished most recently
        self._changed = asyncio.Event()
        self._broken: Exception | None = None
        self._closed = False
        self._advancing = False  # more groups begin in the next turn of the event loop

    def set_version(self, version: int) -> None:
        """The servers have this policy version now."""
        self.version = version
        self._advance()

    def set_max_concurrent(self, limit: int) -> None:
        """At most this many rollouts in flight from now on. More groups start at once; those in flight go on."""
        more, self.max_concurrent = limit > self.max_concurrent, limit
        if more:
            self._advance()

    async def collect(self) -> list[list[Rollout]]:
        """The next batch: `num_groups` groups of rollouts, environments evenly mixed; fewer if too many were filtered.

        Raises RolloutsFailed when an environment fails too often, or an error of our own code in a group.
        """
        self._advance()
        while not self._complete or self._patience() > 0:
            if self._broken is not None:
                raise self._broken
            idle, began = not self._playing, time.monotonic()
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._patience() if self._complete else None):  # `wait_for` of Python 3.11 loses cancellations
                    await self._changed.wait()
            if idle:
                self.waited_for_weights += time.monotonic() - began
        expiring_first = sorted(self._finished.values(), key=lambda pending: (pending.version, pending.number))
        tasks = interleave_envs([pending.task for pending in expiring_first[: self.num_groups]])
        batch = [self._finished.pop(task.index).rollouts for task in tasks]
        self.num_batches += 1
        self.filtered, self._filtered = sorted(self._filtered, key=lambda left_out: left_out[1][0].task.index), []
        self._missing = 0
        self.tasks.played([*batch, *(rollouts for _, rollouts in self.filtered)])  # before the groups of the next batch are chosen
        self._advance()
        return batch

    async def close(self) -> None:
        """Cancel all groups in flight and start no more."""
        self._closed = True
        for _, playing in self._playing.values():
            playing.cancel()
        await asyncio.gather(*(playing for _, playing in self._playing.values()), *self._cancelled, return_exceptions=True)

    def state(self) -> CollectorState:
        """The state between two batches. It has no rollouts of unfinished groups."""
        finished = sorted(self._finished.values(), key=lambda pending: pending.number)
        begun = [*(pending.task for pending, _ in self._playing.values()), *self._requeued]
        return CollectorState(
            num_batches=self.num_batches,
            tasks=self.tasks.state(),
            tally=replace(
                self.tally,
                failed=Counter(self.tally.failed),
                dropped=Counter(self.tally.dropped),
                failures=list(without_rows(self.tally.failures)),
            ),
            finished=tuple(PlayedGroup(rollouts=without_rows(one.rollouts), version=one.version) for one in finished),
            filtered=tuple(PlayedGroup(rollouts=without_rows(rollouts), rule=rule) for rule, rollouts in self._filtered),
            missing=self._missing,
            in_flight=tuple(replace(task, row={}) for task in begun),
            replacements=tuple(self._replacements),
            durations=tuple(self._durations),
        )

    def restore(self, state: CollectorState) -> None:
        """Continue from another collector's state. Call it before anything is played.

        Groups that were in flight are played again from their start. Groups that do not fit this run (its environments, their data,
        its group sizes) are ignored.
        """
        self.num_batches = state.num_batches
        self.tasks.restore(state.tasks)
        self._missing = state.missing if set(state.tasks.envs) <= set(self.envs) else 0

        def remapped(rollouts: Sequence[Rollout]) -> list[Rollout]:
            """Rollouts of one task with their index in this run; empty if there is no such task here."""
            task = self.tasks.remap_task(rollouts[0].task, state.tasks)
            return [] if task is None else [replace(one, task=task) for one in rollouts]

        failures = [found for one in state.tally.failures for found in remapped([one])]
        self.tally = replace(state.tally, failed=Counter(state.tally.failed), dropped=Counter(state.tally.dropped), failures=failures)
        for group in (*state.finished, *state.filtered):
            rollouts = remapped(group.rollouts)
            size = self.sizes[rollouts[0].task.env] if rollouts else 0
            if not min(self.config.orchestrator.min_group, size) <= episodes(rollouts) <= size or not rollouts:
                continue
            if group.rule is not None:
                self._filtered.append((group.rule, rollouts))
            else:
                task = rollouts[0].task
                self._finished[task.index] = Pending(task, self._begun, group.version, 0, time.monotonic(), rollouts)
                self._begun += 1
        again = [self.tasks.remap_task(task, state.tasks) for task in state.in_flight]
        self._requeued.extend(task for task in again if task is not None)
        self._replacements.extend(env for env in state.replacements if env in self.tasks.envs)
        self._durations.extend(state.durations)

    @property
    def _complete(self) -> bool:
        """Whether the next batch has all its groups or cannot get more."""
        finished = len(self._finished)
        return finished >= self.num_groups or finished + self._missing >= self.num_groups + self.oversampling

    @property
    def in_flight(self) -> int:
        """Rollouts being played now."""
        return sum(pending.left for pending, _ in self._playing.values())

    def waiting(self) -> list[tuple[Task, int, float]]:
        """Task, members still being played and seconds of each group in flight."""
        now = time.monotonic()
        return [(pending.task, pending.left, now - pending.began) for pending, _ in list(self._playing.values())]

    @property
    def phase(self) -> str:
        """What the collector waits for, in words."""
        if not self._playing and len(self._finished) < self.num_groups:
            wanted = self.num_batches - self.config.max_async_level
            return f"waiting for weights {wanted}" if wanted >= 0 else "waiting to begin the first rollouts"
        if self._complete:
            return "waiting for the last long rollouts" if self._patience() > 0 else "batch complete"
        wanted = round(self.num_groups * sum(self.tasks.share(env) * self.sizes[env] for env in self.tasks.envs))
        pending = [*self._finished.values(), *(pending for pending, _ in self._playing.values())]
        played = sum(self.sizes[group.task.env] for group in pending) - self.in_flight
        return f"rollouts {min(played, wanted)}/{wanted}"

    def _patience(self) -> float:
        """Seconds that a complete batch may still wait for groups that would be too old for the next one; 0 if there are none."""
        longest = max(MAX_DURATION_RATIO * max(self._durations, default=0.0), MIN_WAIT_SECONDS)
        expiring = self._expiring()
        return max(0.0, max(pending.began for pending in expiring) + longest - time.monotonic()) if expiring else 0.0

    def _expiring(self) -> list[Pending]:
        """Groups being played that would be too old for the next batch."""
        return [pending for pending, _ in self._playing.values() if pending.version <= self.num_batches - self.config.max_async_level]

    def _advance(self) -> None:
        """Drop groups that are too old, start groups that may start, and wake `collect`."""
        oldest = self.num_batches - self.config.max_async_level
        for index in [index for index, pending in self._finished.items() if pending.version < oldest]:
            self._replace(self._finished.pop(index), "off_policy")
        for index in [index for index, (pending, _) in self._playing.items() if pending.version < oldest]:
            pending, playing = self._playing.pop(index)
            playing.cancel()
            self._cancelled.add(playing)
            playing.add_done_callback(self._cancelled.discard)
            self._replace(pending, "off_policy")
        batches = min(self.config.max_steps, self.version + self.config.max_async_level + 1)
        largest, begun = max(self.sizes.values()), 0
        allowed = self.num_groups * batches + (self.oversampling if self.num_batches < batches else 0)
        while (
            not self._advancing
            and self._broken is None
            and not self._closed
            and self.num_groups * self.num_batches + len(self._playing) + len(self._finished) + self._missing < allowed
        ):
            if self._playing and self.in_flight + largest > self.max_concurrent:
                break
            if begun >= AT_ONCE:
                self._advancing = True
                asyncio.get_running_loop().call_later(0.0, self._go_on)  # not call_soon: timers and sockets have their turn in between
                break
            task = (
                self._requeued.popleft()
                if self._requeued
                else self.tasks.next(self._replacements.popleft() if self._replacements else None)
            )
            begun += self.sizes[task.env]
            pending = Pending(task, self._begun, self.version, self.sizes[task.env], time.monotonic())
            self._begun += 1
            self._playing[task.index] = (pending, asyncio.create_task(self._play(pending)))
        self._changed.set()

    def _go_on(self) -> None:
        self._advancing = False
        self._advance()

    def _replace(self, pending: Pending, cause: str) -> None:
        self.tally.dropped[cause] += self.sizes[pending.task.env]
        self._replacements.append(pending.task.env)

    async def _play(self, pending: Pending) -> None:
        """Play one group. If it was dropped meanwhile, its result is ignored."""
        task = pending.task

        def member_ended(rollouts: Sequence[Rollout]) -> None:
            pending.left -= 1
            try:
                in_flight = lambda: sum(one.left for one, _ in self._playing.values() if one.task.env == task.env)  # noqa: E731
                self.errors.add(task.env, rollouts, in_flight)
            except RolloutsFailed as error:
                self._broken = error
            self._advance()

        failure: GroupFailed | None = None
        rule: str | None = None
        try:
            pending.rollouts = await play_group(
                self.envs[task.env],
                task,
                self.sizes[task.env],
                self.config.orchestrator.max_retries,
                self.tally,
                member_ended,
                min_group=self.config.orchestrator.min_group,
                on_timeout=self.config.envs[task.env].on_timeout,
                away=self.outage_seconds,
                failures=self._log,
            )
            rule = self.filter_reason(pending.rollouts)
            if rule is None:
                self.on_group(pending.rollouts)
        except GroupFailed as failed:
            failure = failed
        except Exception as error:  # a bug of ours, not of the environment: end the run with the traceback
            self._broken = error
            self._changed.set()  # `collect` raises it
        if self._playing.pop(task.index, None) is None:
            return
        if failure is not None:
            self._replace(pending, "timeout" if failure.rollout.status == "timeout" else "error")
        elif self._broken is None:
            began = pending.version
            pending.version = min((version for rollout in pending.rollouts for version in rollout.trace.versions), default=began)
            if pending.version < began:
                self._broken = RuntimeError(
                    f"a group has a token of version {pending.version}, although all servers had version {began} before the group began"
                )
            if rule is None:
                self._finished[task.index] = pending
            else:
                self._filtered.append((rule, pending.rollouts))
                if sum(rollouts[0].task.env == task.env for _, rollouts in self._filtered) < self.max_filtered[task.env]:
                    self._replacements.append(task.env)
                else:
                    self._missing += 1
            self._durations.append(time.monotonic() - pending.began)
        self._advance()
