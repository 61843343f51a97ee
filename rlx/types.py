"""The records that travel between the rooms of rlx, as frozen dataclasses of numbers, lists and numpy arrays.

Read this file to know what flows: ``Task -> Rollout -> Group -> TrainingSample -> MicroBatch -> StepBatch``.
It knows nothing of torch, vLLM, verifiers or files; the bytes are in ``rlx.wire``.

Shapes: P prompt tokens, C completion tokens, L tokens of one sample, T tokens of one packed row,
S packed samples (attention segments), R rollouts in a micro-batch, G rollouts in a group.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Int = NDArray[np.int32]
Float = NDArray[np.float32]
Bool = NDArray[np.bool_]

Status = Literal["ok", "error", "timeout", "cancelled"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One example of one environment, to be rolled out once per member of a group."""

    env: str  # the environment's name in the run (key of the `envs` section)
    example_id: int  # the example's id in its environment's data set
    index: int  # its number in the run; follows from its environment and its place in that environment's order (`rlx.rollout.tasks`)
    row: dict[str, Any]  # the data set's row, as verifiers wants it (prompt, answer, info, …)


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One request to the policy: tokens in, tokens out, each new token with its version."""

    prompt_ids: Int  # [P]
    completion_ids: Int  # [C]
    logprobs: Float  # [C] log-probability of each sampled token under the policy that sampled it, at the sampling temperature
    versions: Int  # [C] policy version that sampled each token
    finish_reason: str  # "stop", "length" or "abort"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """One scored episode. `turns` is empty when the rollout failed before the policy answered."""

    task: Task
    member: int  # index of this rollout inside its group, 0 … G-1
    turns: tuple[Turn, ...]
    prompt: Any  # messages or text, as the environment gave it (for people to read)
    completion: Any  # messages or text, likewise
    reward: float
    rewards: dict[str, float]  # reward functions by name, unweighted
    metrics: dict[str, float]  # the environment's own metrics
    status: Status
    stop: str  # the environment's stop condition, or the failure's cause
    error: str | None = None
    is_truncated: bool = False  # cut by a length limit
    timing: dict[str, float] = field(default_factory=dict)  # seconds
    arrival: int = -1  # how many rollouts of the run had been finished before this one; -1: it failed

    @property
    def num_completion_tokens(self) -> int:
        """Sampled tokens over all turns."""
        return sum(len(turn.completion_ids) for turn in self.turns)

    @property
    def longest_turn(self) -> int:
        """Sampled tokens of the longest turn: what `sampling.max_tokens` bounds."""
        return max((len(turn.completion_ids) for turn in self.turns), default=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The rollouts of one task, scored together."""

    id: int  # equals task.index
    task: Task
    rollouts: tuple[Rollout, ...]  # G
    advantages: Float  # [G]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSample:
    """A token sequence to train on. A rollout gives one sample, or several when its turns do not share a prefix."""

    group: int
    rollout: int  # member of the group
    env: str
    token_ids: Int  # [L]
    loss_mask: Bool  # [L] True where the policy sampled the token
    inference_logprobs: Float  # [L] 0 where loss_mask is False
    advantages: Float  # [L] 0 where loss_mask is False
    temperature: float
    versions: Int  # [L] policy version of each sampled token, -1 where loss_mask is False


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Samples packed end to end into one row, with labels already shifted: position t predicts `labels[t]`.

    `loss_mask`, `inference_logprobs`, `advantages` and `versions` at t belong to `labels[t]`.
    All samples of one rollout are in the same micro-batch.
    """

    token_ids: Int  # [T]
    labels: Int  # [T] the next token of the same sample; 0 at a sample's last position
    position_ids: Int  # [T] restart at 0 with every sample
    loss_mask: Bool  # [T]
    inference_logprobs: Float  # [T]
    advantages: Float  # [T]
    temperature: Float  # [T]
    versions: Int  # [T] -1 where loss_mask is False
    rollout_ids: Int  # [T] index of the rollout in this micro-batch, 0 … R-1, non-decreasing
    rollout_lengths: Int  # [R] trainable tokens of each rollout
    cu_seqlens: Int  # [S+1] boundaries of the samples, from 0 to T


@dataclass(frozen=True, slots=True, kw_only=True)
class MiniBatch:
    """The samples of one optimizer step, split over ranks. Every rank has the same number of micro-batches."""

    micro_batches: tuple[tuple[MicroBatch, ...], ...]  # [rank][m]
    num_loss_tokens: int  # N_tok: trainable tokens over all ranks and micro-batches
    num_sequences: int  # N_seq: rollouts with at least one trainable token, over all ranks and micro-batches


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBatch:
    """Everything the trainer needs for one step: from policy version `step` to version `step + 1`."""

    step: int
    mini_batches: tuple[MiniBatch, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightVersion:
    """A policy version that can be taken up: `WeightVersion(version=13, kind="files", where="/run/weights/step_13")`."""

    version: int
    kind: Literal["files", "adapter", "memory"]
    where: str  # for files: the folder


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSpec:
    """One process of the plan. The supervisor starts it, watches it and stops it."""

    role: str  # "prepare", "inference", "orchestrator", "trainer"
    replica: int
    node: int  # index of the host in the allocation
    gpus: tuple[int, ...]  # device indices on that host; empty on CPU
    ports: dict[str, int] = field(default_factory=dict)  # purpose -> port; 0 means: bound free by the process itself
    env: dict[str, str] = field(default_factory=dict)  # added to the environment
    argv: tuple[str, ...] = ()  # the command
    service: bool = False  # True: serves until it is stopped; leaving early is a failure

    @property
    def name(self) -> str:
        """`inference_0`, `trainer`, `trainer_1`; also the name of its log file."""
        return f"{self.role}_{self.replica}" if self.service or self.replica else self.role
