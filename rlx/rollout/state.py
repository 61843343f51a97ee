"""The orchestrator's part of a checkpoint, as records.

The state is taken after a step's batch has left the collector. It holds references, which never
change later, and is linear in the messages that wait.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from rlx.arrays import Int
from rlx.types import Rollout, Task


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolState:
    """The position in the examples of one environment (`rlx.rollout.example_sampler`)."""

    pools: Int  # [examples] the pool of each; empty without pools
    places: list[int]  # by pool: where its next example is searched
    credit: list[float]  # by pool: of the weighted round-robin


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerState:
    """The position in the sequence of tasks (`rlx.rollout.task_sampler`), by environment."""

    envs: tuple[str, ...]  # in the order that numbers the tasks' indices
    credit: dict[str, float]  # of the weighted round-robin
    used: dict[str, int]  # tasks returned so far
    digests: dict[str, Any]  # of the examples
    pools: tuple[PoolState, ...]  # in the order of `envs`


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayedGroup:
    """A group that was played but is not in a batch yet. Its tasks have an empty row."""

    rollouts: tuple[Rollout, ...]  # min_group … G
    version: int = 0  # oldest version of its tokens
    rule: str | None = None  # the filter rule that dropped it; None: it waits for a batch


@dataclass(slots=True, kw_only=True)
class RolloutCounters:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectorState:
    """A collector between two batches."""

    num_batches: int  # batches returned
    tasks: SamplerState
    tally: RolloutCounters
    finished: tuple[PlayedGroup, ...]  # in the order in which they began
    filtered: tuple[PlayedGroup, ...]
    missing: int  # groups that the next batch lacks: filtered and not replaced
    in_flight: tuple[Task, ...]  # of the groups that were in flight; they are played again from their start
    replacements: tuple[str, ...]  # environments that get one more group, in place of one that failed or was filtered
    durations: tuple[float, ...]  # seconds of the groups that finished most recently


@dataclass(frozen=True, slots=True, kw_only=True)
class OrchestratorState:
    """The orchestrator's part of a checkpoint."""

    SCHEMA: ClassVar[str] = "rlx.OrchestratorState/7"

    collector: CollectorState
    advantage: Any = None  # `state_dict()` of an advantage that keeps state; else None


def without_rows(rollouts: Sequence[Rollout]) -> tuple[Rollout, ...]:
    """The rollouts as a checkpoint holds them: an environment has its rows."""
    return tuple(replace(rollout, task=replace(rollout.task, row={})) for rollout in rollouts)
