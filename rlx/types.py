"""The records that travel between the parts of rlx: frozen dataclasses of numbers, lists and numpy arrays.

The data flow:

    Task → Rollout with its Trace → Group with advantages → TrainingSample → StepBatch      in the orchestrator, which sends the StepBatch
    StepBatch → MicroBatch rows → MiniBatch → RankBatch                               in each trainer rank

Shapes: P prompt tokens, C completion tokens, L tokens of one sample, T tokens of one packed row,
S packed samples (attention segments), R rollouts in a micro-batch, G rollouts in a group.

One worked case: an episode of two turns with a tool's reply in between. The weights are updated before the second turn:

    Turn 1            prompt_ids [11 12 13], completion_ids [21 22], versions [4 4]
    Turn 2            prompt_ids [11 12 13 21 22 31 32], completion_ids [41], versions [5]         31 32 is the tool's reply
    TrainingSample    token_ids   11 12 13 21 22 31 32 41        one sample: the second prompt extends the first turn token for token
                      loss_mask    ·  ·  ·  T  T  ·  ·  T        tokens that the policy sampled
                      versions    -1 -1 -1  4  4 -1 -1  5
    MicroBatch        token_ids   11 12 13 21 22 31 32 41 | 51 52 61             packed with another rollout, prompt 51 52, answer 61
                      labels      12 13 21 22 31 32 41  0 | 52 61  0             shifted: position t predicts labels[t]
                      loss_mask    ·  ·  T  T  ·  ·  T  · |  ·  T  ·             shifted with the labels
                      versions    -1 -1  4  4 -1 -1  5 -1 | -1  4 -1
                      rollout_ids  0  0  0  0  0  0  0  0 |  1  1  1             rollout_lengths [3 1]
                      cu_seqlens  [0 8 11]
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from rlx.arrays import Bool, Float, Int, Long
from rlx.trace import Trace

Status = Literal["ok", "error", "timeout", "cancelled"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One example of one environment. Each member of a group rolls it out once."""

    env: str  # the environment's name in the run (key of the `envs` section)
    example_id: int  # the example's id in its environment's data set
    index: int  # its number in the run; follows from the environment and the example's place in its order (`rlx.rollout.task_sampler`)
    row: dict[str, Any]  # the data set's row, as verifiers needs it (prompt, answer, info, …)
    place: int = -1  # of the row in the data set, from 0; -1: it is not known


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """One scored episode. `trace` is empty if the rollout failed before the policy answered."""

    task: Task
    member: int  # index of this rollout inside its group, 0 … G-1
    trace: Trace  # what was said, with the tokens: what is trained
    prompt: Any  # messages or `str`, as the environment gave it, for people to read
    completion: Any  # messages or `str`, as the environment gave it, for people to read
    reward: float
    rewards: dict[str, float]  # reward functions by name, unweighted
    metrics: dict[str, float]  # the environment's own metrics
    status: Status
    stop: str  # the environment's stop condition, or the failure's cause
    error: str | None = None
    is_truncated: bool = False  # cut by a length limit
    timing: dict[str, Any] = field(default_factory=dict)
    """Seconds: total; of it generation (waiting for the policy) and scoring. Unix times: began, requests [(began, seconds)]."""
    agent: str | None = None  # which of the environment's agents it trains, if several train; None: there is one
    siblings: tuple[Any, ...] = ()  # rollouts: the episode's further trained runs (`agents_per_group`), until the group is made of all
    episode_index: int | None = None  # which of the group's episodes it is a run of; None: that of its member
    baseline_key: str | None = None  # rollouts of a group with equal marks are compared: the same agent in the same task; None: all are
    task_key: str | None = None  # the same mark where all rollouts of the group are compared, although their tasks may differ
    arrival: int = -1  # number of rollouts of the run that finished before this one; -1: it failed


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The rollouts of one task, scored together."""

    id: int  # equals task.index
    task: Task
    rollouts: tuple[Rollout, ...]  # G
    advantages: Float  # [G]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSample:
    """A token sequence to train on. A rollout gives one sample, or several if its turns do not share a prefix.

    The optional streams are per-token numbers for objectives that read them. `STREAMS` defines their meanings and their defaults for None.
    A token may belong to several losses: a sampled one to its objective's own loss and to the KL term, any token but a sample's first to
    cross-entropy. Continuing the worked case above, with cross-entropy on the tool's reply, at half weight:

        loss_mask    ·  ·  ·  T  T  ·  ·  T
        ce_weights   0  0  0  0  0 .5 .5  0
    """

    group: int
    member: int  # index of the rollout in its group
    env: str
    token_ids: Int  # [L]
    loss_mask: Bool  # [L] True where the policy sampled the token
    inference_logprobs: Float  # [L] 0 where loss_mask is False
    advantages: Float  # [L] 0 where loss_mask is False
    temperature: Float  # [L] of the request that sampled the token; 1 where loss_mask is False
    versions: Int  # [L] policy version of each sampled token; -1 where loss_mask is False, and for tokens that no policy sampled
    policy_weights: Float | None = None  # [L]
    ce_weights: Float | None = None  # [L]
    ref_kl_weights: Float | None = None  # [L]
    teacher_logprobs: Float | None = None  # [L]
    adapter: int = 0  # in a shared trainer the slot of its run, whose adapter it trains (`rlx.models.slots`); otherwise 0


STREAMS = {
    "policy_weights": 1.0,  # factor of the objective's own loss on a sampled token; 0: the token does not belong to it
    "ce_weights": 0.0,  # factor of cross-entropy on the token, sampled or not; 0: it does not belong to it
    "ref_kl_weights": 1.0,  # factor of a sampled token in the KL term, and in the own loss of an objective that distils; 0: in neither
    "teacher_logprobs": float("nan"),  # log-probability of the token under a teacher; NaN: not scored
}
"""The optional per-token streams of a sample, each with its value for tokens of samples without the stream."""


def check_streams(given: Iterable[str], used: Collection[str]) -> None:
    """Raise ValueError for a stream of a batch that its objective would ignore silently. `used`: the streams that the objective reads."""
    for name in given:
        if name not in used:
            uses = ", ".join(sorted(used)) or "none"
            raise ValueError(
                f"the batch has the stream `{name}`, but this objective consumes {uses}; leave the stream out, or use another loss"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBatch:
    """Everything the trainer needs for one step, from policy version `step` to version `step + 1`. The orchestrator sends and records it.

    It does not depend on ranks or rows: every rank packs it for itself (`rlx.data.packing`).
    """

    SCHEMA: ClassVar[str] = "rlx.StepBatch/3"

    step: int
    mini_batches: tuple[tuple[TrainingSample, ...], ...]  # the samples of each optimizer step, whole groups in their order


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Samples packed end to end into one row, with labels already shifted: position t predicts `labels[t]`.

    `loss_mask`, `inference_logp`, `advantages`, `temperature`, `versions` and the streams at t belong to `labels[t]`. A loss sees these
    fields at the scored positions, by the same names (`rlx.losses.tokens.TokenBatch`).
    All samples of one rollout are in the same micro-batch, unless they exceed a row and their objective looks at single tokens
    (`tokens_elsewhere`). Every row of a mini-batch, on every rank, has the same streams.
    """

    token_ids: Int  # [T]
    labels: Int  # [T] the next token of the same sample; 0 at a sample's last position
    loss_mask: Bool  # [T]
    inference_logp: Float  # [T]
    advantages: Float  # [T]
    temperature: Float  # [T] 1 where loss_mask is False
    versions: Int  # [T] -1 where loss_mask is False
    rollout_ids: Long  # [T] index of the rollout in this micro-batch, 0 … R-1, non-decreasing
    rollout_lengths: Int  # [R] trainable tokens of each rollout here
    tokens_elsewhere: Long  # [R] trainable tokens of each rollout in other micro-batches; 0 unless it was split
    group_lengths: Long  # [R] trainable tokens of each rollout's group, in the whole mini-batch
    cu_seqlens: Int  # [S+1] boundaries of the samples, from 0 to T
    adapters: Int  # [S] slot of each sample in a shared trainer; otherwise 0
    objectives: Long  # [R] number of each rollout's objective; 0 in a run with one objective
    policy_weights: Float | None = None  # [T], like the next three; None: no sample of the mini-batch has the stream
    ce_weights: Float | None = None
    ref_kl_weights: Float | None = None
    teacher_logp: Float | None = None
    samples: tuple[TrainingSample, ...] = ()  # [S] what is packed here; empty: nothing to train

    @property
    def scored(self) -> Bool:
        """[T] where a loss reads the log-probability of `labels[t]`: sampled tokens, and those of cross-entropy."""
        return self.loss_mask if self.ce_weights is None else self.loss_mask | (self.ce_weights != 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Count:
    """Tokens of one loss in the global batch: over all ranks and micro-batches of an optimizer step."""

    tokens: int  # N_tok
    sequences: int  # N_seq: rollouts with at least one such token
    groups: int  # groups with at least one


NOTHING = Count(tokens=0, sequences=0, groups=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class LossCounts:
    """The numbers that losses are divided by. Each kind of loss has its own, so that none dilutes another."""

    all: Count  # sampled tokens that belong to their objective's own loss
    own: dict[str, Count]  # the same by kind of objective: `policy`, `ce`, `ref_kl`. One objective alone may be named `policy`
    kl: Count  # sampled tokens in the KL term
    ce_tokens: int = 0  # tokens of cross-entropy

    def of(self, kind: str) -> Count:
        """The count of the own losses of one kind of objective."""
        return self.own.get(kind, self.all if len(self.own) <= 1 else NOTHING)


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleLosses:
    """Which losses an environment's samples have, for counting."""

    number: int  # of its objective
    kind: str  # of its objective: `policy`, `ce`, `ref_kl`
    has_kl: bool  # a KL term
    has_ce: bool  # cross-entropy on tokens with `ce_weights`
    splits: bool = False  # the samples of a rollout may be in different micro-batches


@dataclass(frozen=True, slots=True, kw_only=True)
class MiniBatch:
    """One rank's rows of one optimizer step, and the global batch's counts. Every rank has the same number of rows."""

    micro_batches: tuple[MicroBatch, ...]
    counts: LossCounts

    @property
    def num_loss_tokens(self) -> int:
        """N_tok: trainable tokens of objectives' own losses, over all ranks and micro-batches."""
        return self.counts.all.tokens

    @property
    def num_sequences(self) -> int:
        """N_seq: rollouts with at least one such token."""
        return self.counts.all.sequences

    @property
    def num_groups(self) -> int:
        """Groups with at least one such token."""
        return self.counts.all.groups

    @property
    def num_trained_tokens(self) -> int:
        """N_tok; if objectives' own losses have no token, as when a teacher plays, those of cross-entropy."""
        return self.counts.all.tokens or self.counts.ce_tokens

    @property
    def trains(self) -> bool:
        """Whether a token of any rank belongs to a loss."""
        return bool(self.counts.all.tokens or self.counts.kl.tokens or self.counts.ce_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankBatch:
    """One rank's part of a step. It exists only in the trainer."""

    step: int
    mini_batches: tuple[MiniBatch, ...]
    num_tokens: int  # tokens of all trained samples, over all ranks
    streams: frozenset[str] = frozenset()  # the optional streams that its samples have
    sampled: bool = True  # a policy version sampled trained tokens; False: supervised data, which has no versions
    imbalance: float = 1.0  # cost of the costliest row of every turn, over the ranks' mean; 1: no rank waits for another
    attention_imbalance: float = 1.0  # the same of Σ n² over the samples of each row


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightVersion:
    """A policy version that servers can load: `WeightVersion(version=13, kind="files", where="/run/weights/step_13")`."""

    version: int
    kind: Literal["initial", "files", "adapter", "memory"]  # `initial`: the model that the servers started with
    where: str  # the folder; of an adapter: in PEFT's format, for the model that the servers started with


@dataclass(frozen=True, slots=True, kw_only=True)
class InitialModel:
    """The model with which a trainer began: version 0, which nobody sends."""

    identity: str  # `weights.files.identity`, as servers report theirs
    where: str  # the folder
    host: str
    longest: int | None = None  # the longest context of a server that computes as the trainer does (`rlx.models.load.longest_served`)
