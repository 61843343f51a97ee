"""The orchestrator's part of a checkpoint, as records.

The state is taken after a step's batch has left the collector. It holds references, which never
change later, and is linear in the messages that wait.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from rlx.arrays import Int
from rlx.plain import from_json, to_json
from rlx.types import Rollout, Task


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolState:
    """The position in the examples of one environment (`rlx.rollout.pools`)."""

    pools: Int  # [examples] the pool of each; empty without pools
    places: list[int]  # by pool: where its next example is searched
    credit: list[float]  # by pool: of the weighted round-robin


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceState:
    """The position in the sequence of tasks (`rlx.rollout.tasks`), by environment."""

    envs: tuple[str, ...]  # in the order that numbers the tasks' indices
    credit: dict[str, float]  # of the weighted round-robin
    used: dict[str, int]  # tasks returned so far
    sizes: dict[str, int]  # number of examples
    pools: tuple[PoolState, ...]  # in the order of `envs`


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayedGroup:
    """A group that was played but is not in a batch yet. `task` holds the row of its example; its rollouts' tasks have an empty row."""

    task: Task
    rollouts: tuple[Rollout, ...]  # min_group … G
    version: int = 0  # oldest version of its tokens
    rule: str | None = None  # the filter rule that dropped it; None: it waits for a batch


@dataclass(slots=True, kw_only=True)
class Tally:
    """Outcomes of all rollouts since the run began."""

    finished: int = 0  # rollouts that were played and scored
    tokens: int = 0  # sampled tokens of finished rollouts
    failed: dict[str, int] = field(default_factory=Counter)  # rollouts that failed, by cause
    dropped: dict[str, int] = field(default_factory=Counter)  # rollouts of groups that were dropped, by cause
    failures: list[Rollout] = field(default_factory=list)  # the failed rollouts that are not yet in a step's file

    def add_failure(self, rollout: Rollout) -> None:
        """Count a failed rollout and keep it for the step's file."""
        self.failed[rollout.stop] += 1
        self.failures.append(rollout)

    def stored(self, as_stored: Callable[[Task], Task]) -> Tally:
        """A copy for a checkpoint, with `packed` tasks; or from one, with `unpacked` tasks."""
        failures = [replace(one, task=as_stored(one.task)) for one in self.failures]
        return replace(self, failed=Counter(self.failed), dropped=Counter(self.dropped), failures=failures)


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectorState:
    """A collector between two batches."""

    taken: int  # batches returned
    tasks: SequenceState
    tally: Tally
    finished: tuple[PlayedGroup, ...]  # in the order in which they began
    filtered: tuple[PlayedGroup, ...]
    missing: int  # groups that the next batch lacks: filtered and not replaced
    begun: tuple[Task, ...]  # of the groups that were in flight; they are played again from their start
    owed: tuple[str, ...]  # environments that get one more group, in place of one that failed or was filtered
    durations: tuple[float, ...]  # seconds of the groups that finished most recently


@dataclass(frozen=True, slots=True, kw_only=True)
class OrchestratorState:
    """The orchestrator's part of a checkpoint."""

    SCHEMA: ClassVar[str] = "rlx.OrchestratorState/5"

    collector: CollectorState
    advantage: Any = None  # `state_dict()` of an advantage that keeps state; else None


def played_group(rollouts: Sequence[Rollout], *, version: int = 0, rule: str | None = None) -> PlayedGroup:
    """The group as a checkpoint record."""
    task = rollouts[0].task
    kept = tuple(replace(rollout, task=replace(task, row={})) for rollout in rollouts)
    return PlayedGroup(task=packed(task), rollouts=kept, version=version, rule=rule)


def packed(task: Task) -> Task:
    """The task as a checkpoint holds it: its environment gets back the row that it gave. Raises CodecError if that cannot be."""
    return replace(task, row=to_json(task.row))


def unpacked(task: Task) -> Task:
    """The task behind a `packed` one."""
    return replace(task, row=from_json(task.row))
