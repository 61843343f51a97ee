"""The files of an evaluation, in the layout of verifiers' own, which existing viewers read.

    eval/<name>--<model>/step_20/results.jsonl     one rollout a line, by example
    eval/<name>--<model>/step_20/traces.jsonl      the same as episodes of verifiers' v1 (`rlx.rollout.episodes`)
    eval/<name>--<model>/step_20/metadata.json     what was evaluated, and the means; written last

Call the writer in a thread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from rlx.envs.base import finite
from rlx.paths import atomic
from rlx.rollout.episodes import TRACES, episode_of, nodes_in
from rlx.rollout.scores import FAILED, passes
from rlx.types import Rollout, Status

RESULTS, METADATA = "results.jsonl", "metadata.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What is kept of a rollout in an evaluation: everything but its tokens. One line of `results.jsonl`."""

    example_id: int
    place: int  # of the example in the data set
    rollout: int  # its number among the rollouts of the example
    prompt: Any
    completion: Any
    answer: Any
    info: Any
    reward: float  # 0 if it failed
    rewards: dict[str, float]
    metrics: dict[str, float]
    status: Status
    stop: str
    error: str | None
    is_truncated: bool
    timing: dict[str, float]  # seconds: total, generation (waiting for the policy), scoring
    num_prompt_tokens: int | None  # over all turns; None: no turn with known tokens, as at an endpoint
    num_tokens: int | None  # sampled, over all turns; None likewise
    turns: list[tuple[int, int]] = field(default_factory=list)  # of each turn: prompt tokens, sampled tokens
    nodes: list[dict[str, Any]] = field(default_factory=list)  # its messages as a tree (`rlx.rollout.episodes`)

    @property
    def failed(self) -> bool:
        """Whether it has no reward of its own."""
        return self.status != "ok"


def outcome_of(rollout: Rollout) -> Outcome:
    """The outcome of a rollout."""
    row, sizes = rollout.task.row, rollout.trace.sizes()
    return Outcome(
        example_id=rollout.task.example_id,
        place=rollout.task.index,
        rollout=rollout.member,
        prompt=rollout.prompt,
        completion=rollout.completion,
        answer=row.get("answer", ""),
        info=row.get("info", {}),
        reward=rollout.reward if rollout.status == "ok" else 0.0,
        rewards=finite(rollout.rewards),
        metrics=finite(rollout.metrics),
        status=rollout.status,
        stop=rollout.stop,
        error=rollout.error,
        is_truncated=rollout.is_truncated,
        timing=rollout.timing,
        num_prompt_tokens=sum(prompt for prompt, _ in sizes) if sizes else None,
        num_tokens=rollout.trace.num_sampled if sizes else None,
        turns=sizes,
        nodes=nodes_in(rollout.trace),
    )


def attempts(examples: Sequence[Sequence[Outcome]]) -> list[list[float]]:
    """[N][n] rewards for `passes`: a rollout that failed scores 0 in a mean, and passes nothing, not even a threshold of 0."""
    return [[FAILED if outcome.failed else outcome.reward for outcome in example] for example in examples]


def write_results(folder: Path, examples: Sequence[Sequence[Outcome]], facts: Mapping[str, Any], pass_threshold: float) -> None:
    """Write the files into `folder`; each replaces an earlier one atomically.

    `examples` [N][n]: the rollouts of each example. `facts`: the metadata's other fields (`env_id`, `model`, `sampling_args`, `time`, …).
    Values that JSON cannot hold (an environment's own objects) are written as their `repr`.
    """
    encoder = msgspec.json.Encoder(enc_hook=repr)
    outcomes = [outcome for example in examples for outcome in example]
    with atomic(folder / RESULTS) as temporary:
        temporary.write_bytes(b"".join(encoder.encode(_line(outcome)) + b"\n" for outcome in outcomes))
    with atomic(folder / TRACES) as temporary, temporary.open("wb") as file:
        file.writelines(encoder.encode(episode_of(outcome, facts)) + b"\n" for outcome in outcomes)
    rewards = [[outcome.reward for outcome in example] for example in examples]
    numbers = [outcome.rewards | outcome.metrics for outcome in outcomes]
    estimates = passes(attempts(examples), pass_threshold)
    metadata = {
        **facts,
        "num_examples": len(examples),
        "rollouts_per_example": len(examples[0]),
        "date": datetime.now(UTC).isoformat(),
        "avg_reward": float(np.mean(rewards)),
        "avg_metrics": {
            name: float(np.mean([one[name] for one in numbers if name in one])) for name in sorted({n for one in numbers for n in one})
        },
        "avg_error": float(np.mean([outcome.failed for outcome in outcomes])),
        "pass_at_k": {str(k): one.mean for k, one in estimates.items()},
        "pass_threshold": pass_threshold,
        "state_columns": [],
        "path_to_save": str(folder),
        "tools": None,
    }
    with atomic(folder / METADATA) as temporary:
        temporary.write_bytes(msgspec.json.format(encoder.encode(metadata), indent=2) + b"\n")


def read_results(file: Path) -> list[list[Outcome]]:
    """The rollouts of each example [N][n] in a `results.jsonl` of rlx.

    Rewards by function and metrics are together in `metrics`; `place` is not in the file and means nothing.
    """
    examples: dict[int, list[Outcome]] = {}
    for line in file.read_bytes().splitlines():
        found = msgspec.json.decode(line)
        usage, error = found["token_usage"], found["error"]
        failed = not found["is_completed"]
        outcome = Outcome(
            example_id=found["example_id"],
            place=len(examples),
            rollout=found["rollout"],
            prompt=found["prompt"],
            completion=found["completion"],
            answer=found["answer"],
            info=found["info"],
            reward=found["reward"],
            rewards={},
            metrics=found["metrics"],
            status=_status(found["stop_condition"]) if failed else "ok",
            stop=found["stop_condition"],
            error=error["message"] if error is not None else None,
            is_truncated=found["is_truncated"],
            timing=found["timing"],
            num_prompt_tokens=usage["input_tokens"],
            num_tokens=usage["output_tokens"],
            turns=[(prompt, sampled) for prompt, sampled in usage.get("turns", ())],
        )
        examples.setdefault(outcome.example_id, []).append(outcome)
    return list(examples.values())


def _status(stop: str) -> Status:
    return "cancelled" if stop == "group_failed" else "timeout" if "timeout" in stop else "error"


def _line(outcome: Outcome) -> dict[str, Any]:
    """The outcome by verifiers' names."""
    error = None
    if outcome.error is not None:
        text = f"{outcome.stop}: {outcome.error}"
        error = {"error": outcome.stop, "message": outcome.error, "error_chain_repr": text, "error_chain_str": text}
    return {
        "example_id": outcome.example_id,
        "rollout": outcome.rollout,
        "prompt": outcome.prompt,
        "completion": outcome.completion,
        "answer": outcome.answer,
        "info": outcome.info,
        "reward": outcome.reward,
        "metrics": outcome.rewards | outcome.metrics,
        "error": error,
        "timing": outcome.timing,
        "is_completed": not outcome.failed,
        "is_truncated": outcome.is_truncated,
        "stop_condition": outcome.stop,
        "token_usage": {"input_tokens": outcome.num_prompt_tokens, "output_tokens": outcome.num_tokens, "turns": outcome.turns},
    }
