"""The orchestrator's steps beside a teacher over HTTP that is overloaded, slow, away for a while, or gone for good."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from policy_stand_in import load, tiny_chat
from test_orchestrator_run import StandInServers, StandInTrainer, config_of, metrics
from test_policy_teacher_client import StandIn, expected, served, status

from rlx.aio import first_failure
from rlx.envs.load import give_policy
from rlx.heartbeat import Heartbeat
from rlx.paths import RunPaths
from rlx.policy import teacher_client
from rlx.policy.teacher_client import TeacherClient, TeacherError
from rlx.roles.orchestrator import Orchestrator
from rlx.rollout.teacher_logprobs import TeacherLogprobs

STEPS = 3
Answer = Callable[[int], Awaitable[web.Response | None]]


def run(root: Path, first: Answer, unscored: str = "fail", **keys: Any) -> tuple[RunPaths, StandInTrainer, StandIn]:
    """A run of a few steps whose teacher answers what `first` says, or scores."""
    config, paths, teacher = config_of(max_steps=STEPS, ckpt__interval=None), RunPaths(root), StandIn(first)
    envs: dict[str, Any] = {"e": load("rlx_reverse_text", sampling={"max_tokens": 12, "temperature": 1.0}, num_examples=64)}
    servers: Any = StandInServers()
    give_policy(envs, config, tiny_chat(), servers)
    trainer = StandInTrainer(paths, config)

    async def main() -> None:
        async with served(teacher) as url, TeacherClient([url], **{"model": "big", "batch_size": 3, "max_concurrent": 2, **keys}) as one:
            teaching = TeacherLogprobs({"e": one}, unscored)
            orchestrator = Orchestrator(config, paths, envs, servers, servers, Heartbeat(paths, "orchestrator"), teaching=teaching)
            await asyncio.wait_for(first_failure(orchestrator.run(), trainer.run()), 120)

    asyncio.run(main())
    return paths, trainer, teacher


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(teacher_client, "FIRST_WAIT", 0.01)


def test_an_overloaded_slow_or_absent_teacher_is_borne_and_every_sample_gets_its_scores(tmp_path: Path) -> None:
    numbers = itertools.count(1)  # of the stand-in two requests at once may have one number

    async def troubled(_: int) -> web.Response | None:
        number = next(numbers)
        if number == 4:
            await asyncio.sleep(3600)  # longer than `timeout`
        return {1: status(429, "later", **{"Retry-After": "0.1"}), 2: status(503), 6: status(502, "bad gateway")}.get(number)

    paths, trainer, teacher = run(tmp_path, troubled, timeout=0.6, deadline=60.0)
    for step in range(STEPS):
        samples = trainer.samples(step)
        assert len(samples) == 8
        for sample in samples:
            wanted = np.where(sample.loss_mask, expected(sample.token_ids), np.nan)
            assert sample.teacher_logprobs == pytest.approx(wanted.astype(np.float32), nan_ok=True)
    records = metrics(paths)
    assert sum(record["teacher/retries"] for record in records) == 4
    assert all(record["teacher/unscored"] == 0 for record in records)
    assert max(len(body["prompt"]) for body in teacher.asked) == 3
    assert teacher.most <= 2


async def dies(number: int) -> web.Response | None:
    """It scores the first step, and then nothing."""
    return status(503, "out of memory") if number > 4 else None


def test_a_teacher_that_dies_ends_the_run_after_its_deadline_with_its_words(tmp_path: Path) -> None:
    said = r"did not score \d of 8 samples of step \d in 0\.5 s \(teacher\.deadline\)\. The trouble: http.*\(503\): out of memory"
    with pytest.raises(TeacherError, match=said):
        run(tmp_path, dies, deadline=0.5)


def test_a_run_goes_on_without_what_a_dead_teacher_did_not_score_if_it_is_told_so(tmp_path: Path) -> None:
    paths, trainer, _ = run(tmp_path, dies, "drop", deadline=0.5)
    unscored = [int(record["teacher/unscored"]) for record in metrics(paths)]
    assert unscored[-1] == 8
    assert [8 - len(trainer.samples(step)) for step in range(STEPS)] == unscored
