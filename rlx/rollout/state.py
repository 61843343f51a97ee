"""What the orchestrator was going to do next, as records: its part of a checkpoint.

Taken when a step's batch has been handed out. Nothing in a state changes later, and what it holds are references: it costs little.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from rlx.plain import CodecError, to_json
from rlx.types import Rollout, Task


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceState:
    """Where the sequence of tasks is (`rlx.rollout.tasks`); all by environment."""

    envs: tuple[str, ...]  # in the order by which indices are numbered
    credit: dict[str, float]  # of the weighted round-robin
    used: dict[str, int]  # tasks given so far
    sizes: dict[str, int]  # examples


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayedGroup:
    """A group that was played and not handed out. The row of its example is in `task`; its rollouts' tasks have an empty one."""

    task: Task
    rollouts: tuple[Rollout, ...]  # G
    version: int = 0  # oldest of its tokens
    chain: int = 0  # groups of its environment that failed in a row just before it
    rule: str | None = None  # the filter that left it out; None: it waits to be trained on


@dataclass(frozen=True, slots=True, kw_only=True)
class BegunGroup:
    """A group that was being played. It is played again, from its start."""

    task: Task
    chain: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OwedGroup:
    """An environment that gets one group more, for one that failed or was left out."""

    env: str
    chain: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """What happened to rollouts since the run began."""

    finished: int
    tokens: int
    failed: dict[str, int]  # by cause
    dropped: dict[str, int]  # by cause
    failures: tuple[Rollout, ...]  # not yet written to a step's file


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectorState:
    """What a collector does next, between two batches."""

    taken: int  # batches handed out
    tasks: SequenceState
    counts: Counts
    finished: tuple[PlayedGroup, ...]  # in the order in which they had begun
    filtered: tuple[PlayedGroup, ...]
    missing: int  # groups that the next batch does without
    begun: tuple[BegunGroup, ...]
    owed: tuple[OwedGroup, ...]
    finished_groups: dict[str, int]  # by environment
    durations: tuple[float, ...]  # seconds of the groups that finished last


@dataclass(frozen=True, slots=True, kw_only=True)
class OrchestratorState:
    """The orchestrator's part of a checkpoint."""

    SCHEMA: ClassVar[str] = "rlx.OrchestratorState/1"

    collector: CollectorState
    advantage: Any = None  # of one that remembers: its `state_dict()`


def played_group(rollouts: Sequence[Rollout], *, version: int = 0, chain: int = 0, rule: str | None = None) -> PlayedGroup:
    """The group as it is kept. What the environment gave to be read and cannot be kept is kept as its text."""
    task = rollouts[0].task
    bare = replace(task, row={})
    kept = tuple(
        replace(rollout, task=bare, prompt=readable(rollout.prompt), completion=readable(rollout.completion)) for rollout in rollouts
    )
    return PlayedGroup(task=task, rollouts=kept, version=version, chain=chain, rule=rule)


def readable(value: Any) -> Any:
    """A value that is only read by people, with its `repr` in the places of objects that a file cannot hold."""
    try:
        to_json(value)
    except CodecError:
        if isinstance(value, dict):
            return {str(key): readable(item) for key, item in value.items()}
        return [readable(item) for item in value] if isinstance(value, (list, tuple)) else repr(value)
    return value
