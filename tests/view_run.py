"""A small run directory with rollouts, recorded batches, evaluations and a tokenizer, written by rlx's own writers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from traces import trace_of

from rlx.paths import RunPaths
from rlx.rollout.eval_results import outcome_of, write_results
from rlx.rollout.record import record_batch, write_rollouts
from rlx.rollout.samples import samples_of
from rlx.trace import Trace, Turn
from rlx.types import Group, Rollout, StepBatch, Task

WORDS = ["<user>", "<bot>", "<tool>", "one", "plus", "two", "is", "three", "four", "call", "[31mred"]


def write_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit

    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token=WORDS[0]))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    folder.mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer.json"))


def turn(prompt: list[str], said: list[str], version: int) -> Turn:
    ids = lambda words: np.array([WORDS.index(word) for word in words], dtype=np.int32)  # noqa: E731
    return Turn(
        prompt_ids=ids(prompt),
        completion_ids=ids(said),
        logprobs=np.linspace(-0.01, -6.0, len(said)).astype(np.float32),
        versions=np.full(len(said), version, dtype=np.int32),
        temperature=0.7,
        finish_reason="stop",
    )


def rollout(task: Task, member: int, step: int, **changes: Any) -> Rollout:
    """Two turns with a tool's reply between; the weights are updated before the second."""
    first, said = ["<user>", "one", "plus", "two", "<bot>"], ["call"]
    second = [*first, *said, "<tool>", "three", "<bot>"]
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}
    made = Rollout(
        task=task,
        member=member,
        trace=trace_of(turn(first, said, max(0, step - 1)), turn(second, ["is", "three" if member else "four"], step)),
        prompt=[{"role": "user", "content": "one plus two"}],
        completion=[
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": "three", "tool_call_id": "c1"},
            {"role": "assistant", "content": f"is {'three' if member else 'four'}"},
        ],
        reward=float(member),
        rewards={"correct": float(member), "short": 0.5},
        metrics={"calls": 1.0},
        status="ok",
        stop="done",
        timing={"total": 0.5 + step},
        arrival=member,
    )
    return replace(made, **changes)


def write_step(paths: RunPaths, step: int) -> None:
    """Two groups of two, one failure, and a group that a filter dropped. Example 7 comes at every step, the others once."""
    groups = []
    for number, (env, example) in enumerate((("sums", 7), ("words", 100 + step))):
        task = Task(env=env, example_id=example, index=10 * step + number, row={"answer": "three"})
        rollouts = tuple(rollout(task, member, step) for member in (0, 1))
        groups.append(Group(id=task.index, task=task, rollouts=rollouts, advantages=np.array([-1, 1], dtype=np.float32)))
    lost = Task(env="sums", example_id=900 + step, index=-1, row={})
    failed = rollout(
        lost, 0, step, trace=Trace(), completion=[], status="timeout", stop="timeout", error="took\x1b[31m too long", reward=0.0
    )
    dull = Task(env="words", example_id=500 + step, index=10 * step + 5, row={})
    dropped = [rollout(dull, member, step, reward=0.0) for member in (0, 1)]
    write_rollouts(paths.rollouts_of(step), groups, [failed], [("equal_rewards", dropped)])
    samples = tuple(sample for group in groups for sample in samples_of(group, strategy="interleaved"))
    record_batch(paths.recorded_of(step), StepBatch(step=step, mini_batches=(samples,)))


def write_run(root: Path, steps: int = 3) -> RunPaths:
    """`steps` steps of 7 rollouts, and evaluations of versions 0 and 2 with 4 each."""
    paths = RunPaths(root)
    root.mkdir(parents=True)
    paths.config.touch()
    for step in range(steps):
        write_step(paths, step)
    for version in (0, 2):
        tasks = [Task(env="sums", example_id=example, index=example, row={"answer": "three"}) for example in (0, 1)]
        examples = [[outcome_of(rollout(task, member, version), env="sums") for member in (0, 1)] for task in tasks]
        write_results(paths.evaluation_of("sums", "org/model", version), examples, {"env_id": "sums", "model": "org/model"}, 0.5)
    write_tokenizer(paths.weights_of(2))
    return paths
