"""Says whether an environment is worth training on with a model, from the rollouts of some of its examples. Pure.

A policy gradient needs rollouts of one example that differ in reward, so the group is the unit: `examples` [N][n] holds the n rollouts of
each of N examples. Rollouts that failed have no reward and are left out of everything but the failures, as in training.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rlx.rollout.eval_results import Outcome, means
from rlx.rollout.eval_stats import average

TOO_EASY = 0.8  # of the best reward: above it little is left to learn
FEW_DIFFER = 0.1  # share of groups whose rewards differ: below it most of the work trains nothing
MANY_FAIL = 0.1  # share of rollouts that fail, or whose reward function raises
MANY_CUT = 0.5  # share of rollouts that a length limit cuts
EQUAL = 1e-9  # rewards that differ by less are equal


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvReport:
    """What the rollouts show, and what that means."""

    playable: bool  # some rollout was run and scored
    trainable: bool
    reasons: tuple[str, ...]  # why
    notes: tuple[str, ...] = ()  # what should be looked at nevertheless
    facts: dict[str, Any] = field(default_factory=dict)  # numbers by name; shares are of all rollouts, or of all groups


def diagnose(examples: Sequence[Sequence[Outcome]], max_tokens: int) -> EnvReport:
    """The report. `examples` [N][n]: the rollouts of each example. `max_tokens`: the limit of a turn, for the note about rollouts cut."""
    outcomes = [outcome for example in examples for outcome in example]
    scored = [outcome for outcome in outcomes if outcome.is_completed]
    failures = [outcome for outcome in outcomes if outcome.status not in ("ok", "cancelled")]
    causes = Counter(outcome.stop_condition for outcome in failures)
    facts: dict[str, Any] = {
        "examples": len(examples),
        "rollouts_per_example": max(map(len, examples)),
        "failed": 1 - len(scored) / len(outcomes),
        "causes": dict(causes.most_common()),
    }
    failed = [
        f"{_share(facts['failed'])} of the rollouts failed, most by {cause}; the first: "
        f"{_message(next(one for one in failures if one.stop_condition == cause))}"
        for cause, _ in causes.most_common(1)
    ]
    if not scored:
        return EnvReport(playable=False, trainable=False, reasons=("no rollout was played to its end", *failed), facts=facts)
    rewards = [[outcome.reward for outcome in example if outcome.is_completed] for example in examples]
    groups = [group for group in rewards if len(group) > 1]
    every = [outcome.reward for outcome in scored]
    low, high = (0.0, 1.0) if min(every) >= 0 and max(every) <= 1 else (min(every), max(every))
    baseline = average([group for group in rewards if group])
    differing = sum(max(group) - min(group) > EQUAL for group in groups) / (len(groups) or 1)
    raised = [outcome for outcome in scored if outcome.metrics.get("reward_error")]
    facts |= {
        "baseline": baseline.mean,
        "baseline_low": baseline.low,
        "baseline_high": baseline.high,
        "functions": means([outcome.metrics for outcome in scored]),
        "differing": differing,
        "truncated": sum(outcome.is_truncated for outcome in scored) / len(scored),
        "tokens": sum(outcome.token_usage.output_tokens or 0 for outcome in scored) / len(scored),
        "seconds": sum(outcome.timing.get("total", 0.0) for outcome in scored) / len(scored),
    }
    against, notes = (failed, []) if facts["failed"] > MANY_FAIL else ([], failed)
    if raised:
        text = f"a reward function raised in {_share(len(raised) / len(scored))} of the rollouts, which scores 0: {_message(raised[0])}"
        (against if len(raised) / len(scored) > MANY_FAIL else notes).append(text)
    if facts["rollouts_per_example"] < 2:
        against.append("one rollout of each example shows no difference between rollouts: rollouts_per_example must be 2 or more")
    elif differing == 0 and groups:
        against.append(_why_all_equal(groups, low, high))
    elif differing < FEW_DIFFER:
        against.append(f"only in {_share(differing)} of the groups do rewards differ, so nearly all rollouts train nothing")
    if differing > 0 and (baseline.mean - low) / (high - low) > TOO_EASY:
        against.append(f"the baseline {baseline.mean:.3f} is above {_share(TOO_EASY)} of {high:g}: the model can do most of it already")
    if facts["truncated"] > MANY_CUT:
        limit = f"a length limit (sampling.max_tokens={max_tokens}, or the context)"
        notes.append(f"{limit} cuts {_share(facts['truncated'])} of the rollouts; a longer one may raise the baseline")
    good = (
        f"the baseline {baseline.mean:.3f} leaves room up to {high:g}",
        f"rewards differ in {_share(differing)} of the groups of {facts['rollouts_per_example']}",
    )
    return EnvReport(playable=True, trainable=not against, reasons=tuple(against) or good, notes=tuple(notes), facts=facts)


def _why_all_equal(groups: Sequence[Sequence[float]], low: float, high: float) -> str:
    """Why no group has rewards that differ."""
    if all(group[0] - low <= EQUAL for group in groups):
        return f"all rewards are {low:g}: too hard for this model as it is asked, or not a function of the reply"
    if all(high - group[0] <= EQUAL for group in groups):
        return f"all rewards are {high:g}: the model can do all of it already, or they are not a function of the reply"
    return "rewards never differ inside a group, only between examples, so nothing can be learned; is the reward a function of the reply?"


def _share(value: float) -> str:
    """`0.5 %`, `12 %`; never 0 % for something."""
    percent = 100 * value
    return f"{percent:.0f} %" if percent >= 1 or percent == 0 else "under 1 %"


def _message(outcome: Outcome) -> str:
    return "" if outcome.error is None else outcome.error["message"]
