"""Whether an environment is worth training on with a model: from the rollouts of some of its examples. Pure.

    assess(examples) → Assessment     baseline reward, diversity inside groups, failures, truncation, tokens by turn, time by part
    judge(assessment) → Verdict       and what that means, each reason in a sentence

A policy gradient needs rollouts of one example that differ in reward, so the group is the unit: `examples` [N][n] holds the n rollouts of
each of N examples. Rollouts that failed have no reward and are left out of everything but the failures, as in training.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rlx.rollout.results import Outcome, means
from rlx.rollout.scores import Estimate, average

TOO_EASY = 0.8  # of the best reward: above it little is left to learn
FEW_DIFFER = 0.1  # share of groups whose rewards differ: below it most of the work trains nothing
MANY_FAIL = 0.1  # share of rollouts that fail, or whose reward function raises
MANY_CUT = 0.5  # share of rollouts that a length limit cuts
EQUAL = 1e-9  # rewards that differ by less are equal
UNIT = (0.0, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Failures:
    """Rollouts that failed for one cause."""

    cause: str  # `timeout`, `environment_error`, …
    count: int
    first: str  # the first one's chain of errors, with the line of the environment's code


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnTokens:
    """Mean tokens of one turn, over the rollouts that reach it."""

    turn: int  # from 1
    rollouts: int
    prompt: float
    sampled: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Assessment:
    """What the rollouts show. Shares are of all rollouts, or of all groups with two rollouts or more that did not fail."""

    examples: int
    rollouts: int
    per_example: int
    scored: int  # rollouts that did not fail
    failures: tuple[Failures, ...]  # the most frequent first
    baseline: Estimate | None = None  # of the mean reward, over examples; None if no rollout has a reward
    level: float | None = None  # the baseline between the lowest (0) and the highest (1) reward, see `scale`
    scale: tuple[float, float] = UNIT  # lowest and highest reward: 0 and 1 if all lie between them, otherwise those that were seen
    by_function: dict[str, float] = field(default_factory=dict)  # mean of each reward function and metric
    groups: int = 0
    differing: float = 0.0  # share of groups whose rewards differ
    spread: float = 0.0  # mean standard deviation of the rewards in a group
    equal_low: float = 0.0  # share of groups in which all have the lowest reward
    equal_high: float = 0.0  # share of groups in which all have the highest reward
    reward_errors: float = 0.0  # share of scored rollouts in which a reward function raised and scored 0
    first_reward_error: str = ""
    truncated: float = 0.0  # share of scored rollouts
    turns: tuple[TurnTokens, ...] = ()
    seconds: dict[str, float] = field(default_factory=dict)  # mean of a rollout: generation, environment, scoring

    @property
    def failed(self) -> float:
        """Share of rollouts that failed."""
        return 1 - self.scored / self.rollouts


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What an assessment means."""

    playable: bool  # some rollout was played and scored
    worth: bool
    reasons: tuple[str, ...]  # why
    notes: tuple[str, ...] = ()  # what should be looked at nevertheless


def assess(examples: Sequence[Sequence[Outcome]]) -> Assessment:
    """The facts. `examples` [N][n]: the rollouts of each example."""
    outcomes = [outcome for example in examples for outcome in example]
    scored = [outcome for outcome in outcomes if outcome.is_completed]
    counts: dict[str, Any] = {
        "examples": len(examples),
        "rollouts": len(outcomes),
        "per_example": max(map(len, examples)),
        "scored": len(scored),
        "failures": _failures(outcomes),
    }
    if not scored:
        return Assessment(**counts)
    rewards = [[outcome.reward for outcome in example if outcome.is_completed] for example in examples]
    groups = [group for group in rewards if len(group) > 1]
    every = [reward for group in rewards for reward in group]
    low, high = UNIT if UNIT[0] <= min(every) and max(every) <= UNIT[1] else (min(every), max(every))
    baseline = average([group for group in rewards if group])
    raised = [outcome for outcome in scored if outcome.metrics.get("reward_error")]
    equal = [group for group in groups if max(group) - min(group) <= EQUAL]
    count = len(groups) or 1
    return Assessment(
        **counts,
        baseline=baseline,
        level=(baseline.mean - low) / (high - low) if high > low else None,
        scale=(low, high),
        by_function=means([outcome.metrics for outcome in scored]),
        groups=len(groups),
        differing=(len(groups) - len(equal)) / count,
        spread=float(np.mean([np.std(group) for group in groups])) if groups else 0.0,
        equal_low=sum(group[0] - low <= EQUAL for group in equal) / count,
        equal_high=sum(high - group[0] <= EQUAL for group in equal) / count,
        reward_errors=len(raised) / len(scored),
        first_reward_error=_message(raised[0]) if raised else "",
        truncated=sum(outcome.is_truncated for outcome in scored) / len(scored),
        turns=_turns(scored),
        seconds=_seconds(scored),
    )


def judge(facts: Assessment, max_tokens: int | None = None) -> Verdict:
    """The verdict. `max_tokens`: the limit of a turn, for the sentence about rollouts that were cut."""
    failed = [
        f"{_share(facts.failed)} of the rollouts failed, most by {worst.cause}; the first: {worst.first}" for worst in facts.failures[:1]
    ]
    if facts.baseline is None:
        return Verdict(playable=False, worth=False, reasons=("no rollout was played to its end", *failed))
    against, notes = (failed, []) if facts.failed > MANY_FAIL else ([], failed)
    if facts.reward_errors > 0:
        text = f"a reward function raised in {_share(facts.reward_errors)} of the rollouts, which scores 0: {facts.first_reward_error}"
        (against if facts.reward_errors > MANY_FAIL else notes).append(text)
    mean, high = facts.baseline.mean, facts.scale[1]
    if facts.per_example < 2:
        against.append("one rollout of each example shows no difference between rollouts: rollouts_per_example must be 2 or more")
    elif facts.differing == 0 and facts.groups:
        against.append(_why_all_equal(facts))
    elif facts.differing < FEW_DIFFER:
        against.append(f"only in {_share(facts.differing)} of the groups do rewards differ, so nearly all rollouts train nothing")
    if facts.level is not None and facts.level > TOO_EASY and facts.differing > 0:
        against.append(f"the baseline {mean:.3f} is above {_share(TOO_EASY)} of {high:g}: the model can do most of it already")
    if facts.truncated > MANY_CUT:
        limit = f" (sampling.max_tokens={max_tokens}, or the context)" if max_tokens else ""
        notes.append(f"a length limit{limit} cuts {_share(facts.truncated)} of the rollouts; a longer one may raise the baseline")
    room = f"the baseline {mean:.3f} leaves room up to {high:g}"
    good = (room, f"rewards differ in {_share(facts.differing)} of the groups of {facts.per_example}")
    return Verdict(playable=True, worth=not against, reasons=tuple(against) or good, notes=tuple(notes))


def _why_all_equal(facts: Assessment) -> str:
    """Why no group has rewards that differ."""
    low, high = facts.scale
    if facts.equal_low == 1:
        return f"all rewards are {low:g}: too hard for this model as it is asked, or not a function of the reply"
    if facts.equal_high == 1:
        return f"all rewards are {high:g}: the model can do all of it already, or they are not a function of the reply"
    return "rewards never differ inside a group, only between examples, so nothing can be learned; is the reward a function of the reply?"


def _share(value: float) -> str:
    """`0.5 %`, `12 %`; never 0 % for something."""
    percent = 100 * value
    return f"{percent:.0f} %" if percent >= 1 or percent == 0 else "under 1 %"


def _failures(outcomes: Sequence[Outcome]) -> tuple[Failures, ...]:
    failed = [outcome for outcome in outcomes if outcome.status not in ("ok", "cancelled")]
    counts = Counter(outcome.stop_condition for outcome in failed)
    first = {outcome.stop_condition: _message(outcome) for outcome in reversed(failed)}
    return tuple(Failures(cause=cause, count=count, first=first[cause]) for cause, count in counts.most_common())


def _message(outcome: Outcome) -> str:
    return "" if outcome.error is None else outcome.error["message"]


def _turns(scored: Sequence[Outcome]) -> tuple[TurnTokens, ...]:
    longest = max(len(outcome.token_usage.turns) for outcome in scored)
    found = []
    for number in range(longest):
        reached = [outcome.token_usage.turns[number] for outcome in scored if len(outcome.token_usage.turns) > number]
        prompt, sampled = np.mean(reached, axis=0)
        found.append(TurnTokens(turn=number + 1, rollouts=len(reached), prompt=float(prompt), sampled=float(sampled)))
    return tuple(found)


def _seconds(scored: Sequence[Outcome]) -> dict[str, float]:
    """Mean seconds of a rollout by part. What is neither the policy's nor the rewards' is the environment's."""

    def mean(part: str) -> float:
        return math.fsum(outcome.timing.get(part, 0.0) for outcome in scored) / len(scored)

    total, generation, scoring = mean("total"), mean("generation"), mean("scoring")
    return {"generation": generation, "environment": max(0.0, total - generation - scoring), "scoring": scoring}
