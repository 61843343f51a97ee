"""Programs that run elsewhere, as an environment: `env=gateway`. They ask for a session, play it, and say what it was worth.

    POST /sessions                → {"id", "key", "base_url", "task", "member", "model"}; waits until the run wants a rollout
    …the program asks {base_url}/chat/completions, /responses or /messages with its key
    POST /sessions/ID/end {"reward": 0.5, "metrics": {}, "info": ""}, or {"error": "…"} for one that has failed

Both routes are opened by the run's own key, which `args.key_file` holds; a session's key opens that session alone. `rlx gateway` serves a
model in this way without training it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web

from rlx.agents.dialects import Refused
from rlx.agents.gateway import Gateway, Session
from rlx.config.schema import EnvConfig
from rlx.envs.function import FULL, Ended, FunctionEnvironment, RowSource, Tasks, after_prompt
from rlx.policy.base import PolicyError, PromptTooLong
from rlx.types import Task

log = logging.getLogger(__name__)

WAITING = 1e7  # seconds
NOTHING = [{"question": [{"role": "user", "content": ""}]}] * 100_000  # tasks of programs that have their own
LONGEST_WAIT = 30.0  # seconds for which a request for a session waits; then 204, and the program asks again


class ProgramFailed(PolicyError):
    """A program said that its rollout has failed, or ended it before it had an answer."""


class PostedReward(msgspec.Struct):
    """What a program says of its rollout when it has ended."""

    reward: float | None = None
    metrics: dict[str, float] = {}
    error: str | None = None  # why it has failed


@dataclass(slots=True, eq=False)
class Offered:
    """A rollout that waits for a program, or that one plays."""

    task: Task
    member: int
    session: Session  # nobody has its key before it is taken
    verdict: asyncio.Future[PostedReward] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


def load_environment(
    data: str | None = None, host: str = "127.0.0.1", port: int = 8765, key_file: str = "gateway.key", **tasks: Any
) -> RowSource:
    """Programs elsewhere.

    Args:
        data: the tasks that programs are given, as of env=function; None: sessions without a task, for programs that bring their own.
        host: the address to listen at; 0.0.0.0 for programs on other machines.
        port: the port to listen at.
        key_file: the file that gets the key for sessions, in the folder where the run starts.
    """
    return RowSource(Tasks(data=data or "", **tasks), posted, NOTHING if data is None else None)


def posted(*_: Any) -> float:
    """The reward is what the program posts; its name is this function's."""
    raise AssertionError("a program scores itself")


class OutsideEnvironment(FunctionEnvironment):
    """See `rlx.envs.base.Environment`."""

    failures_of: Mapping[type[BaseException], str] = {ProgramFailed: "program_error"}

    def __init__(self, name: str, source: RowSource, config: EnvConfig, timeout: float) -> None:
        super().__init__(name, source, config, WAITING)  # a rollout may wait for a program as long as it takes
        self.limit, self.gateway, self.key = timeout, Gateway(self._routes), secrets.token_urlsafe(24)
        self.key_file = Path(config.args.get("key_file", "gateway.key"))
        self._offered: dict[str, Offered] = {}
        self._waiting: asyncio.Queue[str] = asyncio.Queue()

    def rehearse(self) -> None:
        """Nothing: programs post their rewards."""

    async def close(self) -> None:
        """Stop the gateway."""
        await super().close()
        self.key_file.unlink(missing_ok=True)
        await self.gateway.stop()

    async def _serve(self) -> None:
        args = self.config.args
        await self.gateway.start(args.get("host", "127.0.0.1"), args.get("port", 8765))
        with open(os.open(self.key_file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
            file.write(self.key)
        place = f"{self.gateway.url}/sessions"
        log.warning("envs.%s: programs ask for sessions at %s; the key is in %s", self.name, place, self.key_file.resolve())

    def _routes(self, router: web.UrlDispatcher) -> None:
        router.add_post("/sessions", self._take)
        router.add_post("/sessions/{number}/end", self._end)

    async def _episode(self, task: Task, member: int, episode: Any, timing: dict[str, Any]) -> Ended:
        number, began = secrets.token_hex(8), time.monotonic()
        session = self.gateway.open(episode, self.config.harness, self.longest)
        offered = self._offered[number] = Offered(task, member, session)
        self._waiting.put_nowait(number)
        try:
            verdict = await offered.verdict
        finally:
            del self._offered[number]
            await self.gateway.close(session, "ended")
        timing["generation"] = time.monotonic() - began
        if verdict.error:
            raise ProgramFailed(f"the program says: {verdict.error[:500]}")
        if not session.delivered:
            raise ProgramFailed("the program ended its session before it had an answer of the model")
        trace = episode.keep(session.delivered)
        if self.scores is not None:
            self.scores(trace)
        stop = FULL if isinstance(session.failure, PromptTooLong) else "ended"
        return Ended(trace, after_prompt(trace), verdict.reward, stop, verdict.metrics)

    def _check(self, request: web.Request, *keys: str) -> None:
        """Raise Refused if a request has none of the keys."""
        own = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if not any(secrets.compare_digest(own.encode(), key.encode()) for key in keys):
            raise Refused("this key does not open it", 401)

    async def _take(self, request: web.Request) -> web.Response:
        """Hand a program the rollout that has waited longest."""
        self._check(request, self.key)
        try:
            async with asyncio.timeout(LONGEST_WAIT):
                while (number := await self._waiting.get()) not in self._offered:
                    pass  # its rollout is no longer wanted
        except TimeoutError:
            return web.Response(status=204)
        offered = self._offered[number]
        offered.session.deadline = time.monotonic() + self.limit
        asyncio.get_running_loop().call_later(self.limit, self._expire, offered)
        about = {"id": number, "key": offered.session.key, "base_url": f"{request.scheme}://{request.host}/v1", "model": "policy"}
        task = {} if self.config.args.get("data") is None else dict(offered.task.row)
        return web.json_response({**about, "member": offered.member, "task": task})

    def _expire(self, offered: Offered) -> None:
        if not offered.verdict.done():
            offered.verdict.set_result(PostedReward(error=f"nothing: its session did not end within {self.limit:g} s (rollout_timeout)"))

    async def _end(self, request: web.Request) -> web.Response:
        """A program's verdict on its rollout."""
        offered = self._offered.get(request.match_info["number"])
        self._check(request, self.key, *([] if offered is None else [offered.session.key]))
        if offered is None or offered.verdict.done():
            raise Refused("there is no such session; it may have run out of time", 404)
        try:
            verdict = msgspec.json.decode(await request.read(), type=PostedReward)
        except msgspec.MsgspecError as error:
            raise Refused(f'send {{"reward": NUMBER}} or {{"error": TEXT}}: {error}') from error
        if verdict.reward is None and not verdict.error:
            raise Refused('send {"reward": NUMBER} or {"error": TEXT}')
        offered.verdict.set_result(verdict)
        return web.json_response({"answers": len(offered.session.delivered)})


ENVIRONMENT = OutsideEnvironment
