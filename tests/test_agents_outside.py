"""`env=gateway`: programs in other shells take sessions, play them, and post rewards."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import stat
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from policy_stand_in import InTurn, policy_of, task_of
from served_stand_in import give, served
from test_gateway import HELLO, Engine, check

from rlx.config.schema import EnvConfig
from rlx.config.schema_rollout import HarnessConfig
from rlx.envs.kinds import load_one
from rlx.envs.pool import WorkerPool
from rlx.envs.wire import Settings
from rlx.types import Rollout


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "tasks.jsonl").write_text(json.dumps({"question": "Say hello.", "level": 3}) + "\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


class Client:
    """A program in another shell."""

    def __init__(self, url: str, key: str) -> None:
        self.url, self.key = url, key

    async def post(self, path: str, body: Any = None, key: str | None = None) -> tuple[int, Any]:
        headers = {"Authorization": f"Bearer {self.key if key is None else key}"}
        async with aiohttp.ClientSession() as client, client.post(self.url + path, json=body, headers=headers) as answer:
            return answer.status, (await answer.json() if answer.status != 204 else None)


def serve(
    engine: Engine, work: Any, *, args: dict[str, Any] | None = None, timeout: float = 30.0, rollouts: int = 1, **harness: Any
) -> list[Rollout]:
    """Offer rollouts to `work(client)`, which plays them."""

    async def run() -> list[Rollout]:
        config = EnvConfig(id="rlx.envs.outside", args={"port": 0, **(args or {})}, harness=HarnessConfig(**harness))
        env: Any = load_one("e", config, Settings(timeout=timeout, sampling={"max_tokens": 50}))
        env.policy = policy_of(engine, context_length=8192)
        playing = [asyncio.create_task(env.play(task_of(env), [member], 0)) for member in range(rollouts)]
        await env._start()
        client = Client(env.gateway.url, env.key_file.read_text())
        assert stat.S_IMODE(env.key_file.stat().st_mode) == 0o600
        await work(client)
        done = [rollout for played in playing for rollout in await asyncio.wait_for(played, 20)]
        await env.close()
        assert not env.key_file.exists()
        return done

    return asyncio.run(run())


def test_a_program_takes_a_session_plays_it_and_posts_its_reward(folder: Path):
    engine = Engine("hello", "again")

    async def work(client: Client) -> None:
        _, session = await client.post("/sessions")
        assert session["task"]["question"] == "Say hello."
        assert session["task"]["level"] == 3
        for _ in range(2):
            status, _ = await client.post("/v1/chat/completions", HELLO, session["key"])
            assert status == 200
        status, said = await client.post(f"/sessions/{session['id']}/end", {"reward": 0.5, "metrics": {"steps": 2}}, session["key"])
        assert (status, said) == (200, {"answers": 2})

    (rollout,) = serve(engine, work, args={"data": "tasks.jsonl"})
    assert (rollout.status, rollout.reward, rollout.metrics["steps"]) == ("ok", 0.5, 2.0)
    check(rollout.trace, engine, branches=2)


def test_members_of_a_group_go_to_different_programs(folder: Path):
    engine = Engine("a", "b", "c")

    async def work(client: Client) -> None:
        sessions = [(await client.post("/sessions"))[1] for _ in range(3)]
        assert sorted(session["member"] for session in sessions) == [0, 1, 2]
        assert len({session["key"] for session in sessions}) == 3
        for place, session in enumerate(sessions):
            await client.post("/v1/messages", HELLO, session["key"])
            await client.post(f"/sessions/{session['id']}/end", {"reward": place}, session["key"])

    assert [rollout.reward for rollout in serve(engine, work, rollouts=3)] == [0.0, 1.0, 2.0]


def test_keys_open_what_is_theirs_and_no_more(folder: Path):
    async def work(client: Client) -> None:
        assert (await client.post("/sessions", key="guessed"))[0] == 401
        session = (await client.post("/sessions"))[1]
        other = (await client.post("/sessions"))[1]
        assert (await client.post("/sessions", key=session["key"]))[0] == 401, "a session's key takes no other session"
        assert (await client.post(f"/sessions/{other['id']}/end", {"reward": 1}, session["key"]))[0] == 401
        assert (await client.post("/v1/messages", HELLO, client.key))[0] == 401, "the run's key asks no model"
        for bad in ({}, {"reward": float("nan")}, {"reward": "much"}, [1]):
            assert (await client.post(f"/sessions/{session['id']}/end", bad, session["key"]))[0] == 400
        for one in (session, other):
            await client.post(f"/sessions/{one['id']}/end", {"error": "the tool broke"}, one["key"])

    for rollout in serve(Engine(), work, rollouts=2):
        assert (rollout.status, rollout.stop) == ("error", "program_error")
        assert "the program says: the tool broke" in (rollout.error or "")


@pytest.mark.parametrize("ends", [True, False], ids=["ended", "lost"])
def test_a_program_that_plays_nothing_or_vanishes_has_failed(folder: Path, ends: bool):
    async def work(client: Client) -> None:
        session = (await client.post("/sessions"))[1]
        if ends:
            await client.post(f"/sessions/{session['id']}/end", {"reward": 1}, session["key"])

    (rollout,) = serve(Engine(), work, timeout=0.5)
    assert (rollout.status, rollout.stop) == ("error", "program_error")
    assert ("before it had an answer" if ends else "did not end within 0.5 s") in (rollout.error or "")


def test_a_session_has_its_budget(folder: Path):
    async def work(client: Client) -> None:
        session = (await client.post("/sessions"))[1]
        assert (await client.post("/v1/messages", HELLO, session["key"]))[0] == 200
        assert (await client.post("/v1/messages", HELLO, session["key"]))[0] == 403
        await client.post(f"/sessions/{session['id']}/end", {"reward": 1}, session["key"])

    (rollout,) = serve(Engine("once"), work, max_turns=1)
    assert (rollout.status, rollout.reward) == ("ok", 1.0)


@pytest.mark.slow
def test_a_killed_gateway_loses_the_sessions_that_were_open_and_offers_their_rollouts_again(folder: Path, caplog: pytest.LogCaptureFixture):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    key = folder / "own.key"
    config = EnvConfig(id="rlx.envs.outside", args={"port": port, "key_file": str(key)})
    pool = WorkerPool("e", config, Settings(timeout=60), 1)
    pool.wait_loaded()

    async def take() -> tuple[Client, dict[str, Any]]:
        while not (key.exists() and key.read_text()):
            await asyncio.sleep(0.05)
        client = Client(f"http://127.0.0.1:{port}", key.read_text())
        _, session = await client.post("/sessions")
        assert (await client.post("/v1/messages", HELLO, session["key"]))[0] == 200
        return client, session

    async def run() -> list[Rollout]:
        async with served(InTurn("lost", "kept")) as sampler:
            give(pool, sampler, context_length=8192)
            playing = asyncio.create_task(pool.play(task_of(pool), [0], 0))
            _, lost = await take()
            key.unlink()
            os.kill(pool._workers[0].process.pid, signal.SIGKILL)
            client, session = await take()
            assert (await client.post("/v1/messages", HELLO, lost["key"]))[0] == 401, "its session is gone"
            assert (await client.post(f"/sessions/{lost['id']}/end", {"reward": 1}, lost["key"]))[0] == 401
            await client.post(f"/sessions/{session['id']}/end", {"reward": 0.5}, session["key"])
            rollouts = await asyncio.wait_for(playing, 60)
            await pool.close()
            return rollouts

    (rollout,) = asyncio.run(run())
    assert (rollout.status, rollout.reward, pool.replayed) == ("ok", 0.5, 1), rollout.error
    assert rollout.completion == [{"role": "assistant", "content": "kept"}], "nothing of the lost session is in it"
    assert "SIGKILL ended it" in caplog.text
