"""The rollouts of an evaluation as records, and its files, in the layout of verifiers' own, which existing viewers read.

    eval/<name>--<model>/step_20/results.jsonl     one rollout a line, by example
    eval/<name>--<model>/step_20/traces.jsonl      the same as episodes of verifiers' v1, for its viewers and `replay`
    eval/<name>--<model>/step_20/metadata.json     what was evaluated, and the means; written last

Call the writer in a thread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from rlx.envs.base import finite
from rlx.paths import atomic
from rlx.rollout.eval_stats import FAILED, passes
from rlx.trace import START
from rlx.types import Rollout, Status

RESULTS, TRACES, METADATA = "results.jsonl", "traces.jsonl", "metadata.json"


class Usage(msgspec.Struct):
    """Tokens of a rollout; None, and no turns, if no turn has known tokens, as at an endpoint."""

    input_tokens: int | None = None
    output_tokens: int | None = None  # sampled
    turns: list[tuple[int, int]] = []  # of each turn: prompt tokens, sampled tokens


class Outcome(msgspec.Struct, kw_only=True):
    """A finished rollout of `rlx eval` or `rlx synthesize` without its tokens: one line of `results.jsonl`, by verifiers' names."""

    env: str  # the caller's name of the environment
    example_id: int
    place: int  # of the example in the data set
    rollout: int  # its number among the rollouts of the example
    version: int  # of the policy that was asked for
    weights: str | None  # digest of the weights; None: not known
    versions: list[int]  # the policy versions that sampled its tokens
    prompt: Any
    completion: Any
    answer: Any
    info: Any
    reward: float  # 0 if it failed
    rewards: dict[str, float]
    metrics: dict[str, float]  # with the rewards
    error: dict[str, str] | None
    timing: dict[str, float]  # seconds: total, generation (waiting for the policy), scoring
    status: Status
    is_completed: bool  # whether it has a reward of its own
    is_truncated: bool
    stop_condition: str
    token_usage: Usage
    nodes: list[dict[str, Any]] | msgspec.UnsetType = msgspec.UNSET  # its trace without tokens; `results.jsonl` leaves it out

    @property
    def key(self) -> tuple[str, int, int]:
        """Which rollout it is: environment, place of the example, number."""
        return self.env, self.place, self.rollout


def outcome_of(rollout: Rollout, *, env: str, version: int = 0, weights: str | None = None) -> Outcome:
    """The record of a rollout."""
    row, nodes, sizes, ok = rollout.task.row, rollout.trace.nodes, rollout.trace.sizes(), rollout.status == "ok"
    error = None
    if rollout.error is not None:
        text = f"{rollout.stop}: {rollout.error}"
        error = {"error": rollout.stop, "message": rollout.error, "error_chain_repr": text, "error_chain_str": text}
    return Outcome(
        env=env,
        example_id=rollout.task.example_id,
        place=rollout.task.index,
        rollout=rollout.member,
        version=version,
        weights=weights,
        versions=rollout.trace.versions,
        prompt=rollout.prompt,
        completion=rollout.completion,
        answer=row.get("answer", ""),
        info=row.get("info", {}),
        reward=rollout.reward if ok else 0.0,
        rewards=finite(rollout.rewards),
        metrics=finite({**rollout.rewards, **rollout.metrics}),
        error=error,
        timing={name: value for name, value in rollout.timing.items() if name not in ("requests", "cut_short")},
        status=rollout.status,
        is_completed=ok,
        is_truncated=rollout.is_truncated,
        stop_condition=rollout.stop,
        token_usage=Usage(sum(prompt for prompt, _ in sizes), rollout.trace.num_sampled, sizes) if sizes else Usage(),
        nodes=[{field: getattr(node, field) for field in ("parent", "message", "sampled", "tools", "finish_reason")} for node in nodes],
    )


def attempts(examples: Sequence[Sequence[Outcome]]) -> list[list[float]]:
    """[N][n] rewards for `passes`: a rollout that failed scores 0 in a mean, and passes nothing, not even a threshold of 0."""
    return [[outcome.reward if outcome.is_completed else FAILED for outcome in example] for example in examples]


def write_results(folder: Path, examples: Sequence[Sequence[Outcome]], facts: Mapping[str, Any], pass_threshold: float) -> None:
    """Write the files into `folder`; each replaces an earlier one atomically.

    `examples` [N][n]: the rollouts of each example. `facts`: the metadata's other fields (`env_id`, `model`, `sampling_args`, `time`, …).
    Values that JSON cannot hold (an environment's own objects) are written as their `repr`.
    """
    encoder = msgspec.json.Encoder(enc_hook=repr)
    outcomes = [outcome for example in examples for outcome in example]
    with atomic(folder / TRACES) as temporary, temporary.open("wb") as file:
        file.writelines(encoder.encode(episode_of(outcome, facts)) + b"\n" for outcome in outcomes)
    with atomic(folder / RESULTS) as temporary, temporary.open("wb") as file:
        file.writelines(encoder.encode(msgspec.structs.replace(outcome, nodes=msgspec.UNSET)) + b"\n" for outcome in outcomes)
    estimates = passes(attempts(examples), pass_threshold)
    metadata = {
        **facts,
        "num_examples": len(examples),
        "rollouts_per_example": len(examples[0]),
        "date": datetime.now(UTC).isoformat(),
        "avg_reward": float(np.mean([outcome.reward for outcome in outcomes])),
        "avg_metrics": means([outcome.metrics for outcome in outcomes]),
        "avg_error": float(np.mean([not outcome.is_completed for outcome in outcomes])),
        "pass_at_k": {str(k): one.mean for k, one in estimates.items()},
        "pass_threshold": pass_threshold,
        "state_columns": [],
        "path_to_save": str(folder),
        "tools": None,
    }
    with atomic(folder / METADATA) as temporary:
        temporary.write_bytes(msgspec.json.format(encoder.encode(metadata), indent=2) + b"\n")


def read_results(file: Path) -> list[list[Outcome]]:
    """The rollouts of each example [N][n] in a `results.jsonl` of rlx."""
    decoder, examples = msgspec.json.Decoder(Outcome), dict[int, list[Outcome]]()
    for line in file.read_bytes().splitlines():
        outcome = decoder.decode(line)
        examples.setdefault(outcome.place, []).append(outcome)
    return list(examples.values())


def means(values: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Mean of every name over the records that have it."""
    names = sorted({name for one in values for name in one})
    return {name: float(np.mean([one[name] for one in values if name in one])) for name in names}


def message_of(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message as verifiers' v1 writes it: calls are flat, and a raw text prompt is the user's."""
    kept = {name: value for name, value in message.items() if value is not None}
    if kept.get("role") == "text":
        kept["role"] = "user"
    if isinstance(calls := kept.get("tool_calls"), list):
        kept["tool_calls"] = [_call(call) for call in calls]
    return kept


def _call(call: Any) -> Any:
    """A call of an environment's own prompt may lack anything."""
    if not isinstance(call, Mapping) or not isinstance(call.get("function"), Mapping):
        return call
    return {"id": call.get("id") or "", **call["function"]}


def episode_of(outcome: Outcome, facts: Mapping[str, Any]) -> dict[str, Any]:
    """One line of `traces.jsonl`. `facts`: of the evaluation's metadata.

    The nodes have the messages and who wrote them, and each answer's numbers of tokens; the tokens themselves are left out. The reward is
    one, with its functions among the metrics, because their weights belong to the environment.
    """
    prompt = [message_of(one) for one in outcome.prompt] if isinstance(outcome.prompt, list) else outcome.prompt
    data = {"idx": outcome.place, "id": str(outcome.example_id), "prompt": prompt}
    data |= {name: value for name, value in (("answer", outcome.answer), ("info", outcome.info)) if value not in (None, "", {})}
    nodes = [
        {"parent": None if node["parent"] == START else node["parent"], "message": message_of(node["message"]), "sampled": node["sampled"]}
        for node in outcome.nodes or []
    ]
    answers = [place for place, node in enumerate(nodes) if node["sampled"]]
    sizes: Sequence[Any] = outcome.token_usage.turns or [None] * len(answers)
    errors = [] if outcome.error is None else [{"type": outcome.stop_condition, "message": outcome.error["message"]}]
    both = {"task": {"type": "Task", "data": data}, "ok": outcome.is_completed, "is_timeout": outcome.status == "timeout", "errors": errors}
    trace = {
        **both,
        "agent": {"config": {"model": facts.get("model")}, "name": "agent", "trainable": True},
        "nodes": nodes,
        "calls": [
            {"node": place, **({"usage": {"prompt_tokens": size[0], "completion_tokens": size[1]}} if size else {})}
            for place, size in zip(answers, sizes, strict=False)
        ],
        "rewards": {"reward": {"score": outcome.reward, "weight": 1.0}} if outcome.is_completed else {},
        "metrics": outcome.metrics,
        "info": {"rollout": outcome.rollout, "policy_version": facts.get("policy_version")},
        "is_completed": outcome.is_completed,
        "stop_condition": outcome.stop_condition,
    }
    env = {"id": facts.get("env_id", ""), "name": facts.get("name")}
    return {"env": env, "group": {"id": str(outcome.place)}, **both, "traces": [trace]}
