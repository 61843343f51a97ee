"""Real verifiers environments in workers: the same rollouts as in this process, blocking code, another Python with another verifiers."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from policy_stand_in import OUTSIDE, SAMPLING, StandIn, load, policy_of, task_of, tiny_chat
from public_classic import judge
from served_stand_in import give, served
from test_orchestrator_run import StandInServers, config_of, reproducible
from test_orchestrator_run import play as play_run
from traces import turns_of

from rlx.config.schema import EnvConfig
from rlx.envs.boot import NEEDED
from rlx.envs.load import let_play, load_environments, wait_loaded
from rlx.envs.pool import WorkerPool
from rlx.envs.wire import Settings
from rlx.policy.spec import EndpointSpec, PolicySpec
from rlx.rollout.record import read_rollouts
from rlx.types import Rollout

pytestmark = pytest.mark.slow
VERIFIERS = "0.4.0"  # the first with v1 alone


@pytest.fixture(autouse=True)
def outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", OUTSIDE)


def pool_of(id: str, workers: int = 1, *, timeout: float = 30.0, python: str | None = None, **args: Any) -> WorkerPool:
    pool = WorkerPool("e", EnvConfig(id=id, args=args, python=python), Settings(SAMPLING, timeout, 64), workers)
    pool.wait_loaded()
    return pool


def play(envs: Sequence[Any], count: int, members: Sequence[int] = (0,)) -> list[list[Rollout]]:
    """The rollouts of the first tasks of each environment, all played together."""

    async def main() -> list[list[Rollout]]:
        stand_in = StandIn(tiny_chat(), error=0.3, delay=0.01)
        async with served(stand_in) as sampler:
            for env in envs:
                if isinstance(env, WorkerPool):
                    give(env, sampler, context_length=1000, sampling=SAMPLING)
                else:
                    env.policy = policy_of(stand_in, context_length=1000, sampling=SAMPLING)
            try:
                calls = [env.play(task_of(env, index), list(members), 0) for env in envs for index in range(count)]
                played = [rollout for group in await asyncio.wait_for(asyncio.gather(*calls), 600) for rollout in group]
                size = count * len(members)
                return [played[start : start + size] for start in range(0, len(played), size)]
            finally:
                await asyncio.gather(*(env.close() for env in envs))

    return asyncio.run(main())


def facts(rollout: Rollout) -> Any:
    """Everything of a rollout but times."""
    turns = [(t.prompt_ids.tolist(), t.completion_ids.tolist(), t.logprobs.tolist(), t.versions.tolist()) for t in turns_of(rollout)]
    return rollout.task, turns, rollout.prompt, rollout.completion, rollout.reward, rollout.rewards, rollout.metrics, rollout.status


def test_workers_play_the_same_rollouts_as_this_process() -> None:
    pool, here = pool_of("rlx_test_multi", 2), load("rlx_test_multi")
    assert list(pool.rows) == list(here.rows)
    assert pool.rows[3:7] == here.rows[3:7]
    assert pool.tools == here.tools
    there, here = play([pool, here], 24)
    assert [facts(rollout) for rollout in there] == [facts(rollout) for rollout in here]
    assert {len(turns_of(rollout)) for rollout in there} == {1, 2, 3}


@pytest.mark.long
@pytest.mark.parametrize("kind", ["tool", "mcp", "stateful", "rewrite", "judge", "beside", "group", "nested"])
def test_a_worker_plays_groups_of_every_kind_of_environment_as_this_process_does(kind: str) -> None:
    with judge("yes, it is") as endpoint:
        args = {"url": endpoint.url} if kind == "judge" else {}
        envs = [pool_of(f"rlx_test_{kind}", **args), load(f"rlx_test_{kind}", **args)]
        there, here = play(envs, 6, members=range(4))
    assert [facts(rollout) for rollout in there] == [facts(rollout) for rollout in here]
    assert {rollout.status for rollout in there} == {"ok"}


@pytest.mark.parametrize("where", [pool_of, load])
def test_a_rollout_whose_endpoint_never_answers_names_it(where: Callable[..., Any]) -> None:
    async def main() -> Rollout:
        async with await asyncio.start_server(lambda *_: asyncio.sleep(60), "127.0.0.1", 0) as silent:
            url = f"http://127.0.0.1:{silent.sockets[0].getsockname()[1]}/v1"
            let_play(env, PolicySpec(seed=0, sampling={}, endpoints=[EndpointSpec(url, "none", "m")]), None, None)
            (rollout,) = await env.play(task_of(env, 0), [0], 0)
            await env.close()
            return replace(rollout, error=str(rollout.error).replace(url, "URL"))

    env = where("rlx_test_multi", timeout=5.0)
    bad = asyncio.run(main())
    assert (bad.status, bad.error) == ("timeout", "no result after 5 s (rollout_timeout); URL has not answered")


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "where", "function"),
    [("power", "reward", "misbehave|<module>"), ("c", "env_response", "sleep_in_c"), ("c", "thread", "sleep_in_c")],
)
def test_a_rollout_that_blocks_its_worker_is_a_timeout_with_its_line(kind: str, where: str, function: str) -> None:
    pool = pool_of("rlx_test_faults", timeout=15.0, kind=kind, where=where, every=16)
    ((bad, *others),) = play([pool], 8)
    assert (bad.status, bad.stop) == ("timeout", "timeout")
    assert re.search(rf"rollout_timeout.*; at .*rlx_test_faults.py:\d+ in ({function})", bad.error or ""), bad.error
    assert [rollout.status for rollout in others] == ["ok"] * 7
    assert pool.replaced.total() == pool.replaced["timeout"] <= 2, "others may have been in threads, too"


@pytest.mark.long
def test_rewards_that_compute_for_longer_than_the_timeout_between_them_do_not_end_their_worker() -> None:
    pool = pool_of("rlx_test_faults", timeout=3.0, kind="cpu", every=1, seconds=0.3)
    (played,) = play([pool], 16)
    assert [rollout.status for rollout in played] == ["ok"] * 16
    assert (pool.replaced, pool.replayed) == ({}, 0)


def other_python(folder: Path) -> Path:
    """A Python with another verifiers than this one. Skips the test if the index does not have it."""
    uv = shutil.which("uv") or str(Path(sys.executable).parent / "uv")
    if not os.access(uv, os.X_OK):
        pytest.skip("there is no uv to make another Python with")
    environment = {**os.environ, "UV_FIND_LINKS": os.environ.get("UV_FIND_LINKS", os.environ.get("PIP_FIND_LINKS", "")), "PYTHONPATH": ""}
    python = folder / "bin" / "python"
    for command in (
        [uv, "venv", "-q", "--python", sys.executable, folder],
        [uv, "pip", "install", "-q", "--python", python, f"verifiers=={VERIFIERS}", *NEEDED],
    ):
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
        if done.returncode:
            pytest.skip(f"verifiers {VERIFIERS} cannot be installed: {done.stderr.strip()[-300:]}")
    return python


@pytest.mark.long
def test_two_verifiers_play_side_by_side_in_one_mix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = other_python(tmp_path / "python")
    show = (
        "import importlib.metadata as m; "
        "print(m.version('verifiers'), m.version('mcp'), *(one for one in m.requires('verifiers') if one.startswith('mcp')))"
    )
    asked = [
        subprocess.run([each, "-c", show], capture_output=True, text=True, check=True).stdout.split() for each in (sys.executable, python)
    ]
    assert asked[0][0].startswith("0.3")
    assert asked[1][0] == VERIFIERS
    ours, theirs = (Requirement(one[2]).specifier for one in asked)
    assert theirs.contains(asked[1][1])
    assert not ours.contains(asked[1][1]), "their requirements exclude each other"
    classic = pool_of("rlx_test_multi")
    elsewhere = pool_of("rlx_test_v1", python=str(python))
    ours, theirs = play([classic, elsewhere], 4)
    assert [rollout.status for rollout in ours] == ["ok"] * 4
    assert [rollout.status for rollout in theirs] == ["ok"] * 4, [rollout.error for rollout in theirs]
    assert all(turns_of(rollout) for rollout in [*ours, *theirs])


@pytest.mark.long
def test_a_python_that_lacks_packages_says_which(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "bare"], check=True)
    python = tmp_path / "bare" / "bin" / "python"
    with pytest.raises(RuntimeError, match=rf"has no {', '.join(NEEDED)}; install with: .*/python -m pip install {' '.join(NEEDED)}"):
        pool_of("rlx_test_multi", python=str(python))


@pytest.mark.long
def test_an_on_policy_run_is_the_same_with_any_number_of_workers(tmp_path: Path) -> None:
    written = []
    for workers in (0, 1, 2):
        config = config_of(max_steps=3, orchestrator__env_workers=workers)
        envs = load_environments(config, lambda _: None)
        wait_loaded(envs, lambda _: None)
        paths, trainer = play_run(tmp_path / str(workers), config, StandInServers(jitter=0.01), envs=envs)
        rollouts = [list(read_rollouts(paths.rollouts_of(step))) for step in range(3)]
        tokens = [sample.token_ids.tolist() for step in range(3) for sample in trainer.samples(step)]
        texts = [(one["prompt"], one["completion"], one["advantage"]) for step in rollouts for one in step]
        written.append((reproducible(paths), tokens, texts))
    assert written[0] == written[1] == written[2]
