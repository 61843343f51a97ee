"""Evaluated rollouts in the form of verifiers' own `traces.jsonl`, which its viewers and `replay` read: one episode a line.

The nodes have the messages and who wrote them, and each answer's numbers of tokens; the tokens themselves are left out. The reward is one,
with its functions among the metrics, because their weights belong to the environment.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlx.trace import START, Trace

TRACES = "traces.jsonl"


def nodes_in(trace: Trace) -> list[dict[str, Any]]:
    """The messages of a trace by verifiers' names."""
    return [
        {
            "parent": None if node.parent == START else node.parent,
            "message": message_of(node.message),
            "sampled": node.sampled,
        }
        for node in trace.nodes
    ]


def message_of(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message as verifiers' v1 writes it: calls are flat, and a raw text prompt is the user's."""
    kept = {name: value for name, value in message.items() if value is not None}
    if kept.get("role") == "text":
        kept["role"] = "user"
    if calls := kept.get("tool_calls"):
        kept["tool_calls"] = [_call(call) for call in calls] if isinstance(calls, list) else calls
    return kept


def _call(call: Any) -> Any:
    """A call of an environment's own prompt may lack anything."""
    if not isinstance(call, Mapping) or not isinstance(call.get("function"), Mapping):
        return call
    return {"id": call.get("id") or "", **call["function"]}


def episode_of(outcome: Any, facts: Mapping[str, Any]) -> dict[str, Any]:
    """One line. `outcome`: an `rlx.rollout.results.Outcome`. `facts`: of the evaluation's metadata."""
    data = {"idx": outcome.place, "id": str(outcome.example_id), "prompt": _prompt(outcome.prompt)}
    data |= {name: value for name, value in (("answer", outcome.answer), ("info", outcome.info)) if value not in (None, "", {})}
    task = {"type": "Task", "data": data}
    errors = [] if outcome.error is None else [{"type": outcome.stop, "message": outcome.error}]
    answers = [place for place, node in enumerate(outcome.nodes) if node["sampled"]]
    sizes: Sequence[Any] = outcome.turns or [None] * len(answers)
    late = outcome.status == "timeout"
    trace = {
        "task": task,
        "agent": {"config": {"model": facts.get("model")}, "name": "agent", "trainable": True},
        "nodes": outcome.nodes,
        "calls": [
            {"node": place, **({"usage": {"prompt_tokens": size[0], "completion_tokens": size[1]}} if size else {})}
            for place, size in zip(answers, sizes, strict=False)
        ],
        "rewards": {} if outcome.failed else {"reward": {"score": outcome.reward, "weight": 1.0}},
        "metrics": outcome.rewards | outcome.metrics,
        "info": {"rollout": outcome.rollout, "policy_version": facts.get("policy_version")},
        "is_completed": not outcome.failed,
        "ok": not outcome.failed,
        "stop_condition": outcome.stop,
        "is_timeout": late,
        "errors": errors,
    }
    return {
        "env": {"id": facts.get("env_id", ""), "name": facts.get("name")},
        "task": task,
        "group": {"id": str(outcome.place)},
        "ok": not outcome.failed,
        "is_timeout": late,
        "errors": errors,
        "traces": [trace],
    }


def _prompt(prompt: Any) -> Any:
    return [message_of(one) for one in prompt] if isinstance(prompt, list) else prompt
