"""The files of an evaluation, in the layout of verifiers' own, which existing viewers read.

    eval/<name>--<model>/step_20/results.jsonl     one rollout a line, by example
    eval/<name>--<model>/step_20/metadata.json     what was evaluated, and the means; written last

Call the writer in a thread.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from rlx.paths import atomic
from rlx.rollout.scores import passes
from rlx.types import Rollout

RESULTS, METADATA = "results.jsonl", "metadata.json"


def reward_of(rollout: Rollout) -> float:
    """The reward in an evaluation. A rollout that failed scores 0."""
    return rollout.reward if rollout.status == "ok" else 0.0


def write_results(folder: Path, examples: Sequence[Sequence[Rollout]], facts: Mapping[str, Any], pass_threshold: float) -> None:
    """Write both files into `folder`; each replaces an earlier one atomically.

    `examples` [N][n]: the rollouts of each example. `facts`: the metadata's other fields (`env_id`, `model`, `sampling_args`, `time`, …).
    Values that JSON cannot hold (an environment's own objects) are written as their `repr`.
    """
    encoder = msgspec.json.Encoder(enc_hook=repr)
    with atomic(folder / RESULTS) as temporary:
        temporary.write_bytes(b"".join(encoder.encode(line) + b"\n" for line in _lines(examples)))
    rollouts = [rollout for example in examples for rollout in example]
    rewards = [[reward_of(rollout) for rollout in example] for example in examples]
    numbers = [rollout.rewards | rollout.metrics for rollout in rollouts]
    estimates = passes(rewards, pass_threshold)
    metadata = {
        **facts,
        "num_examples": len(examples),
        "rollouts_per_example": len(examples[0]),
        "date": datetime.now(UTC).isoformat(),
        "avg_reward": float(np.mean(rewards)),
        "avg_metrics": {
            name: float(np.mean([one[name] for one in numbers if name in one])) for name in sorted({n for one in numbers for n in one})
        },
        "avg_error": float(np.mean([rollout.status != "ok" for rollout in rollouts])),
        "pass_at_k": {str(k): one.mean for k, one in estimates.items()},
        "pass_threshold": pass_threshold,
        "state_columns": [],
        "path_to_save": str(folder),
        "tools": None,
    }
    with atomic(folder / METADATA) as temporary:
        temporary.write_bytes(msgspec.json.format(encoder.encode(metadata), indent=2) + b"\n")


def _lines(examples: Sequence[Sequence[Rollout]]) -> Iterator[dict[str, Any]]:
    for example in examples:
        for rollout in example:
            row = rollout.task.row
            yield {
                "example_id": rollout.task.example_id,
                "rollout": rollout.member,
                "prompt": rollout.prompt,
                "completion": rollout.completion,
                "answer": row.get("answer", ""),
                "info": row.get("info", {}),
                "reward": reward_of(rollout),
                "metrics": rollout.rewards | rollout.metrics,
                "error": _error(rollout),
                "timing": rollout.timing,
                "is_completed": rollout.status == "ok",
                "is_truncated": rollout.is_truncated,
                "stop_condition": rollout.stop,
                "token_usage": {
                    "input_tokens": sum(len(turn.prompt_ids) for turn in rollout.turns),
                    "output_tokens": rollout.num_completion_tokens,
                },
            }


def _error(rollout: Rollout) -> dict[str, str] | None:
    if rollout.error is None:
        return None
    text = f"{rollout.stop}: {rollout.error}"
    return {"error": rollout.stop, "message": rollout.error, "error_chain_repr": text, "error_chain_str": text}
