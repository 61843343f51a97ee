"""The files of a step: its rollouts, for people and tools, and its batch, for a replay.

`rollouts/step_000012.jsonl.zst` has one rollout a line. It has the groups that were trained on. With `advantage: null` it also has the
rollouts that failed since the step before and the groups that a filter dropped; for these `left_out` names the rule.
`recorded/step_000012.batch.zst` has the same bytes that the trainer received. `StepRecorder` writes both in a thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import zstandard

from rlx import codec
from rlx.config.schema import OrchestratorConfig
from rlx.paths import RunPaths, atomic
from rlx.rollout.failures import Failures
from rlx.rollout.lines import decoded, lines_of
from rlx.trace import START, Trace
from rlx.tracking import Tracker
from rlx.types import Group, Rollout, StepBatch

LeftOut = Sequence[tuple[str, Sequence[Rollout]]]  # rule and rollouts of every group that a filter dropped


class StepRecorder:
    """Writes the rollouts and the batch of each step to the disk and to the tracker."""

    def __init__(self, paths: RunPaths, config: OrchestratorConfig, tracker: Tracker | None) -> None:
        self.paths, self.config, self.tracker = paths, config, tracker
        self.failures = Failures()
        self.saved = -1  # the last step whose files are complete
        self._saving: asyncio.Future[None] | None = None

    async def begin(self, groups: Sequence[Group], failures: Sequence[Rollout], left_out: LeftOut, batch: StepBatch) -> None:
        """Wait until the step before is written, then start to write this step. Raises the error of the step before."""
        await self.wait()
        self._saving = asyncio.ensure_future(asyncio.to_thread(self._save, groups, failures, left_out, batch))

    async def wait(self) -> int:
        """Wait for the write in progress. Returns the last step whose files are complete. Raises the error of the write."""
        if self._saving is not None:
            await asyncio.shield(self._saving)  # a checkpoint needs the files even if the work on the step is cancelled
        return self.saved

    def _save(self, groups: Sequence[Group], failures: Sequence[Rollout], left_out: LeftOut, batch: StepBatch) -> None:
        step = batch.step
        if self.config.save_batches:
            record_batch(self.paths.recorded_of(step), batch)
        if self.config.save_rollouts:
            write_rollouts(self.paths.rollouts_of(step), groups, failures, left_out, tokens=self.config.record_tokens)
        self.failures.add(rollout for group in groups for rollout in group.rollouts)
        self.failures.add(rollout for _, rollouts in left_out for rollout in rollouts)
        self.failures.add(failures)
        self.failures.write(self.paths.failures)
        self.saved = step
        if self.tracker is not None and self.tracker.wants_rollouts(step):
            self.tracker.rollouts(step, list(records(groups)))


def write_rollouts(
    path: Path, groups: Sequence[Group], failures: Sequence[Rollout] = (), left_out: LeftOut = (), *, tokens: bool = False
) -> None:
    """Write the file atomically. Values that JSON cannot hold (an environment's own objects) are written as their `repr`.

    `tokens`: with the traces (`orchestrator.record_tokens`).
    """
    encoder = msgspec.json.Encoder(enc_hook=repr)
    lines = [encoder.encode(record) + b"\n" for record in records(groups, failures, left_out, tokens=tokens)]
    with atomic(path) as temporary:
        temporary.write_bytes(zstandard.ZstdCompressor(level=3).compress(b"".join(lines)))


def record_batch(path: Path, batch: StepBatch) -> None:
    """Write the trainer's batch atomically, for `rlx.data.source.RecordedSource`."""
    compressor = zstandard.ZstdCompressor(level=3, write_checksum=True)
    with atomic(path) as temporary:
        temporary.write_bytes(compressor.compress(codec.encode(batch)))


def read_rollouts(path: Path) -> Iterator[dict[str, Any]]:
    """The records of one file. Raises ValueError if it is not one of rlx."""
    yield from map(decoded, lines_of(path))


def records(
    groups: Sequence[Group], failures: Sequence[Rollout] = (), left_out: LeftOut = (), *, tokens: bool = False
) -> Iterator[dict[str, Any]]:
    """One plain record for each rollout. `tokens`: with its trace."""
    for group in groups:
        for rollout, advantage in zip(group.rollouts, group.advantages, strict=True):
            yield _record(rollout, float(advantage), tokens)
    for rule, rollouts in left_out:
        for rollout in rollouts:
            yield _record(rollout, None, tokens) | {"left_out": rule}
    for rollout in failures:
        yield _record(rollout, None, tokens)


def _record(rollout: Rollout, advantage: float | None, tokens: bool) -> dict[str, Any]:
    task = rollout.task
    return {
        "env": task.env,
        "example_id": task.example_id,
        "group": task.index,
        "member": rollout.member,
        "agent": rollout.agent,  # that it trains; null: there is one
        "compared": rollout.baseline_key,  # its reward is compared with those of its group that have the same mark; null: with all
        "prompt": rollout.prompt,
        "completion": rollout.completion,
        "answer": task.row.get("answer"),
        "reward": rollout.reward,
        "rewards": rollout.rewards,
        "metrics": rollout.metrics,
        "advantage": advantage,
        "left_out": None,
        "arrival": rollout.arrival,  # place in the order in which the run's rollouts finished
        "versions": rollout.trace.versions,  # every policy version that sampled one of its tokens
        "num_tokens": rollout.trace.num_sampled,
        "num_turns": len(rollout.trace.sizes()),
        "status": rollout.status,
        "stop": rollout.stop,
        "truncated": rollout.is_truncated,
        "error": rollout.error,
        "seconds": rollout.timing.get("total"),
        "began": rollout.timing.get("began"),  # Unix time
        "requests": rollout.timing.get("requests", []),  # to the policy: [Unix time, seconds]
        **({"trace": nodes_of(rollout.trace)} if tokens else {}),
    }


def nodes_of(trace: Trace) -> list[dict[str, Any]]:
    """The nodes of a trace as plain values. `trained` counts the sampled tokens, the last of `token_ids`; `versions`: [v, start, end]."""
    return [
        {
            "parent": None if node.parent == START else node.parent,
            "message": node.message,
            "token_ids": node.token_ids.tolist(),
            "trained": len(node.logprobs),
            "logprobs": node.logprobs.tolist(),
            "versions": [[int(v), int(begin), int(end)] for v, begin, end in zip(node.versions, [0, *node.ends], node.ends, strict=False)],
        }
        for node in trace.nodes
    ]
