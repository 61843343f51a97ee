"""Programs that run elsewhere, as an environment: `env=gateway`. They ask for a session, play it, and say what it was worth.

    POST /sessions                → {"id", "key", "base_url", "task", "member", "model"}; waits until the run wants a rollout
    …the program asks {base_url}/chat/completions, /responses or /messages with its key
    POST /sessions/ID/end {"reward": 0.5, "metrics": {}, "info": ""}, or {"error": "…"} for one that has failed

Both routes are opened by the run's own key, which `args.key_file` holds; a session's key opens that session alone. `rlx gateway` serves a
model in this way without training it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web

from rlx.agents.gateway import Gateway, Session
from rlx.config.schema import EnvConfig
from rlx.envs.function import Ended, FunctionEnvironment, Source, Tasks, after_prompt, made
from rlx.policy.base import PolicyError
from rlx.types import Task

log = logging.getLogger(__name__)

WAITING = 1e7  # seconds
NOTHING = [{"question": [{"role": "user", "content": ""}]}] * 100_000  # tasks of programs that have their own
LONGEST_WAIT = 30.0  # seconds for which a request for a session waits; then 204, and the program asks again


class ProgramFailed(PolicyError):
    """A program said that its rollout has failed, or ended it before it had an answer."""


@dataclass(slots=True, eq=False)
class Offered:
    """A rollout that waits for a program, or that one plays."""

    task: Task
    member: int
    episode: Any
    number: str = field(default_factory=lambda: secrets.token_hex(8))
    session: Session | None = None  # None: nobody has taken it
    ended: asyncio.Future[Mapping[str, Any]] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


def load_environment(
    data: str | None = None, host: str = "127.0.0.1", port: int = 8765, key_file: str = "gateway.key", **tasks: Any
) -> Source:
    """Programs elsewhere.

    Args:
        data: the tasks that programs are given, as of env=function; None: sessions without a task, for programs that bring their own.
        host: the address to listen at; 0.0.0.0 for programs on other machines.
        port: the port to listen at.
        key_file: the file that gets the key for sessions, in the folder where the run starts.
    """
    return Source(Tasks(data=data or "", **tasks), posted, NOTHING if data is None else None)


def posted(*_: Any) -> float:
    """The reward is what the program posts; its name is this function's."""
    raise AssertionError("a program scores itself")


def load(name: str, config: EnvConfig, sampling: dict[str, Any], timeout: float, concurrency: int = 1) -> OutsideEnvironment:
    """Load the rlx environment `name`. Raises ValueError with a sentence for people. `concurrency` belongs to the protocol."""
    return made(OutsideEnvironment, load_environment, name, config, sampling, timeout)


class OutsideEnvironment(FunctionEnvironment):
    """See `rlx.envs.base.Environment`."""

    failures_of: Mapping[type[BaseException], str] = {ProgramFailed: "program_error"}

    def __init__(self, name: str, source: Source, config: EnvConfig, timeout: float) -> None:
        super().__init__(name, source, config, WAITING)  # a rollout may wait for a program as long as it takes
        self.limit, self.gateway, self.key = timeout, Gateway(self._routes), secrets.token_urlsafe(24)
        self.key_file = Path(config.args.get("key_file", "gateway.key"))
        self._offered: dict[str, Offered] = {}
        self._announced = False
        self._waiting: asyncio.Queue[Offered] = asyncio.Queue()

    async def close(self) -> None:
        """Stop the gateway."""
        await super().close()
        self.key_file.unlink(missing_ok=True)
        await self.gateway.stop()

    async def _listen(self) -> None:
        args = self.config.args
        await self.gateway.start(args.get("host", "127.0.0.1"), args.get("port", 8765))
        if not self._announced:
            self._announced = True
            with open(os.open(self.key_file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
                file.write(self.key)
            place = f"{self.gateway.url}/sessions"
            log.warning("envs.%s: programs ask for sessions at %s; the key is in %s", self.name, place, self.key_file.resolve())

    def _routes(self, router: web.UrlDispatcher) -> None:
        router.add_post("/sessions", self._take)
        router.add_post("/sessions/{number}/end", self._end)

    async def _episode(self, task: Task, member: int, episode: Any, timing: dict[str, float]) -> Ended:
        await self._listen()
        offered, began = Offered(task, member, episode), time.monotonic()
        self._offered[offered.number] = offered
        self._waiting.put_nowait(offered)
        try:
            said = await offered.ended
        finally:
            del self._offered[offered.number]
            if offered.session is not None:
                await self.gateway.close(offered.session, "ended")
        timing["generation"] = time.monotonic() - began
        session = offered.session
        if said.get("error"):
            raise ProgramFailed(f"the program says: {str(said['error'])[:500]}")
        if session is None or not session.delivered:
            raise ProgramFailed("the program ended its session before it had an answer of the model")
        trace = episode.keep(session.delivered)
        if self.scores is not None:
            self.scores(trace)
        metrics = {str(name): float(value) for name, value in (said.get("metrics") or {}).items()}
        return Ended(trace, after_prompt(trace), said["reward"], "ended", metrics)

    def _may(self, request: web.Request) -> bool:
        return secrets.compare_digest(request.headers.get("Authorization", "").removeprefix("Bearer "), self.key)

    async def _take(self, request: web.Request) -> web.Response:
        """Hand a program the rollout that has waited longest."""
        if not self._may(request):
            return web.json_response({"error": "this is not the key of the run"}, status=401)
        try:
            async with asyncio.timeout(LONGEST_WAIT):
                while (offered := await self._waiting.get()).number not in self._offered:
                    pass  # its rollout is no longer wanted
        except TimeoutError:
            return web.Response(status=204)
        harness = self.config.harness
        limits = {"max_turns": harness.max_turns, "max_tokens": harness.max_tokens, "longest": self.longest}
        offered.session = self.gateway.open(offered.episode, deadline=time.monotonic() + self.limit, **limits)
        asyncio.get_running_loop().call_later(self.limit, self._expire, offered)
        task = {} if self.config.args.get("data") is None else dict(offered.task.row)
        return web.json_response(
            {
                "id": offered.number,
                "key": offered.session.key,
                "base_url": f"{request.scheme}://{request.host}/v1",
                "model": "policy",
                "member": offered.member,
                "task": task,
            }
        )

    def _expire(self, offered: Offered) -> None:
        if not offered.ended.done():
            offered.ended.set_result({"error": f"nothing: its session did not end within {self.limit:g} s (rollout_timeout)"})

    async def _end(self, request: web.Request) -> web.Response:
        """A program's verdict on its rollout."""
        offered = self._offered.get(request.match_info["number"])
        key = request.headers.get("Authorization", "").removeprefix("Bearer ")
        own = offered is not None and offered.session is not None and secrets.compare_digest(key, offered.session.key)
        if not own and not self._may(request):
            return web.json_response({"error": "this key does not open the session"}, status=401)
        if offered is None or offered.session is None or offered.ended.done():
            return web.json_response({"error": "there is no such session; it may have run out of time"}, status=404)
        try:
            said = json.loads(await request.read())
            if not said.get("error"):
                values = [said["reward"], *(said.get("metrics") or {}).values()]
                if not all(math.isfinite(float(value)) for value in values):
                    raise ValueError("rewards and metrics are finite numbers")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            return web.json_response({"error": f'send {{"reward": NUMBER}} or {{"error": TEXT}}: {error}'}, status=400)
        offered.ended.set_result(said)
        return web.json_response({"answers": len(offered.session.delivered)})
