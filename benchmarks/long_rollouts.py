"""The record of a long rollout: memory, size in a checkpoint, CPU to keep each answer and to cut training samples.

    python benchmarks/long_rollouts.py [--turns 1 3 100] [--tokens 1000]

`--tokens`: of each turn, 0.4 of them sampled. It runs in checkouts before the trace, too (there each turn kept its whole prompt), so that
both stand side by side; the texts of the messages belong to the trace, and there to another field that is not measured. No server, no
environment: what is measured is the record alone.
"""

from __future__ import annotations

import argparse
import time
import tracemalloc
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from rlx import codec
from rlx.rollout.samples import samples_of
from rlx.types import Group, Rollout, Task

try:
    from rlx.trace import TraceBuilder, Turn
except ImportError:  # before the trace
    import rlx.types

    TraceBuilder, Turn = None, getattr(rlx.types, "Turn")  # type: ignore[assignment, misc]  # noqa: B009

TASK = Task(env="e", example_id=0, index=0, row={})


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    SCHEMA: ClassVar[str] = "benchmark.Kept/1"
    rollout: Rollout


def record_of(turns: int, tokens: int) -> tuple[Any, float]:
    """What a rollout keeps, and the CPU seconds to keep it. Every request brings its messages anew, as from an environment's process."""
    rng, said = np.random.default_rng(0), TraceBuilder() if TraceBuilder is not None else []
    ids, texts, spent = np.empty(0, np.int32), [], 0.0
    own = int(0.4 * tokens)
    for number in range(turns):
        ids = np.concatenate([ids, rng.integers(0, 150_000, tokens - own, dtype=np.int32)])
        texts.append(("user", f"{number} " + "x" * 4 * (tokens - own)))
        messages = [{"role": role, "content": "".join(text)} for role, text in texts]
        new = rng.integers(0, 150_000, own, dtype=np.int32)
        logprobs, versions = rng.standard_normal(own, dtype=np.float32), np.zeros(own, np.int32)
        turn = Turn(prompt_ids=ids, completion_ids=new, logprobs=logprobs, versions=versions, temperature=1.0, finish_reason="stop")
        texts.append(("assistant", f"{number} " + "y" * 4 * own))
        began = time.process_time()
        if TraceBuilder is None:
            said.append(turn)
        else:
            said.add(number, messages, None, {"role": "assistant", "content": texts[-1][1]}, turn)
        spent += time.process_time() - began
        ids = np.concatenate([ids, new])
    return (tuple(said) if TraceBuilder is None else said.trace()), spent


def measure(turns: int, tokens: int) -> dict[str, float]:
    record_of(1, 8)  # what is imported or cached at a first use
    spent = min(record_of(turns, tokens)[1] for _ in range(3))
    tracemalloc.start()
    record, _ = record_of(turns, tokens)
    held = tracemalloc.get_traced_memory()[0] / 2**20
    tracemalloc.stop()
    what: Any = {"turns" if TraceBuilder is None else "trace": record}
    rollout = Rollout(
        task=TASK, member=0, prompt=[], completion=[], reward=1.0, rewards={}, metrics={}, status="ok", stop="", **what,
    )  # fmt: skip
    packed = len(codec.encode(Kept(rollout=rollout))) / 2**20
    began = time.process_time()
    for _ in range(10):
        samples = samples_of(Group(id=0, task=TASK, rollouts=(rollout,), advantages=np.ones(1, np.float32)), strategy="interleaved")
    assert sum(int(sample.loss_mask.sum()) for sample in samples) == turns * int(0.4 * tokens)
    return {
        "MiB held": held,
        "MiB in a checkpoint": packed,
        "ms a turn": 1e3 * spent / turns,
        "ms to samples": 100 * (time.process_time() - began),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, nargs="+", default=[1, 3, 100])
    parser.add_argument("--tokens", type=int, default=1000)
    given = parser.parse_args()
    for turns in given.turns:
        found = measure(turns, given.tokens)
        print(f"{turns} turns, {turns * given.tokens:,} tokens: " + ", ".join(f"{name} {value:.3f}" for name, value in found.items()))


if __name__ == "__main__":
    main()
