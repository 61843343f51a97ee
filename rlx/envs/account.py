"""What the workers of a run say of themselves: metrics, and where their rollouts wait when nothing moves."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any

from rlx.envs.watch import Worker
from rlx.envs.wire import Where
from rlx.stacks import Waiting, rollout_name

PATIENCE = 1.0  # seconds that a worker has to answer
BLOCKED = 0.5  # seconds of one step after which the worker is not asked: it cannot answer


def worker_metrics(envs: Mapping[str, Any]) -> dict[str, float]:
    """The metrics of all pools of a run: sums, but the largest memory."""
    values: dict[str, float] = {"workers/replayed": 0.0}
    for env in envs.values():
        for name, value in env.report().items() if hasattr(env, "report") else ():
            values[name] = max(values.get(name, 0.0), value) if name.startswith("perf/") else values.get(name, 0.0) + value
    return values


async def waits_of(worker: Worker) -> list[Waiting]:
    """Where the rollouts of one worker wait. If one of them blocks it, this one alone, with the environment's line."""
    mark = worker.child.marks.step()
    if mark is None or time.monotonic() - mark.since < BLOCKED:
        worker.waits = asyncio.get_running_loop().create_future()
        worker.child.link.send(Where())
        try:
            answer = await asyncio.wait_for(worker.waits, PATIENCE)
        except TimeoutError:
            mark = worker.child.marks.step()
        else:
            return [Waiting(name=name, frames=tuple(frames)) for name, frames in answer.tasks]
    playing = None if mark is None else worker.playing.get(mark.play)
    if mark is None or playing is None:
        return []
    line = await worker.child.stack(mark)
    member = playing.members[0] if mark.member is None else mark.member
    return [Waiting(name=rollout_name(playing.task, member), frames=(f"{line} (it blocks {worker.child.name})",))]
