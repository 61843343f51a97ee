"""A small HTTP server that follows the protocol of the policy servers and fails on demand, and a way to play a scene with some."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import numpy as np
from aiohttp import web
from run_servers import Servers

from rlx.inference.endpoints import Endpoint
from rlx.inference.protocol import Answer, Asked, Completion, GenerateRequest, PolicyState
from rlx.inference.server.holder import Holder


class Clock:
    """Stands for `time` in a module whose limits a test lets pass instead of waiting for them."""

    def __init__(self) -> None:
        self.passed = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self.passed


class Stand:
    """A server that answers every prompt with its reverse, as the version that it was updated to."""

    def __init__(self, delay: float = 0.0) -> None:
        self.delay = delay
        self.version = 0
        self.requests: list[GenerateRequest] = []
        self.served: list[int] = []  # version of each answer
        self.in_flight = self.updating = self.aborted = self.messages = self.loads = self.claims = 0
        self.refuse: str | None = None
        self.gone = 0  # this many of the next updates: the trainer does not have the version
        self.updates: list[dict[str, Any]] = []  # the bodies of all
        self.fails = 0  # this many of the next requests and updates get a status of 500
        self.key = "key"
        self.refused = 0  # requests with another key
        self.waiting = 0  # requests in its queue
        self.hangs = False  # `/policy` and `/devices` are not answered
        self.stuck = False  # it answers, but loads nothing: its engine hangs
        self.holds = False  # it ends no request
        self.identity = "a"  # of version 0
        self.start = "1"  # which start of the server this is
        self.asking = False  # it waits for the trainer
        self.now = 0.0  # seconds, for the holder
        self.holder = Holder(lambda: self.now)
        self.transports: list[asyncio.Transport] = []
        self.runner: web.AppRunner | None = None
        # It holds the port while the server is away, so that nobody else gets it. It does not listen: connections are refused.
        self.place = socket.socket()
        self.place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.place.bind(("127.0.0.1", 0))
        self.port = self.place.getsockname()[1]

    def __del__(self) -> None:
        self.place.close()

    async def __aenter__(self) -> Stand:
        application = web.Application(middlewares=[self.authorized])
        application.router.add_get("/generate", self.connection)
        application.router.add_post("/update_weights", self.update)
        application.router.add_post("/reload_weights", self.reload)
        application.router.add_get("/policy", self.policy)
        application.router.add_get("/devices", self.devices)
        application.router.add_post("/claim", self.claim)
        self.runner = web.AppRunner(application, handler_cancellation=True, shutdown_timeout=0)
        await self.runner.setup()
        site = web.TCPSite(self.runner, "127.0.0.1", self.port)
        await site.start()
        return self

    async def __aexit__(self, *exception: object) -> None:
        assert self.runner is not None
        for transport in self.transports:
            transport.abort()  # like a killed process
        self.transports.clear()
        await self.runner.cleanup()

    @property
    def endpoint(self) -> Endpoint:
        return Endpoint(f"http://127.0.0.1:{self.port}", "key")

    @web.middleware
    async def authorized(self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> web.StreamResponse:
        if request.headers["Authorization"] == f"Bearer {self.key}":
            return await handler(request)
        self.refused += 1
        return web.json_response({"error": "wrong key"}, status=403 if request.path == "/generate" else 401)

    async def connection(self, request: web.Request) -> web.StreamResponse:
        connection = web.WebSocketResponse(max_msg_size=0)
        await connection.prepare(request)
        assert request.transport is not None
        self.transports.append(request.transport)
        tasks: dict[int, asyncio.Task[None]] = {}
        try:
            with self.holder.connection(request.query.get("run", "")):
                async for message in connection:
                    self.messages += 1
                    asked = msgspec.msgpack.decode(message.data, type=Asked)
                    for number, one in asked.requests:
                        tasks[number] = asyncio.ensure_future(self.generate(connection, number, one))
                    for number in asked.given_up:
                        tasks[number].cancel()
        finally:
            for task in tasks.values():
                task.cancel()
        return connection

    async def generate(self, connection: web.WebSocketResponse, number: int, asked: GenerateRequest) -> None:
        if asked.version > self.version:
            await connection.send_bytes(msgspec.msgpack.encode([Answer(number, 409, error="stale")]))
            return
        self.requests.append(asked)
        if self.fails:
            self.fails -= 1
            await connection.send_bytes(msgspec.msgpack.encode([Answer(number, 500, error="out of luck")]))
            return
        self.in_flight += 1
        try:
            await asyncio.sleep(self.delay)
            while self.holds:
                await asyncio.sleep(0.01)
        except asyncio.CancelledError:
            self.aborted += 1
            raise
        finally:
            self.in_flight -= 1
        ids = np.frombuffer(asked.prompt_ids, np.int32)[::-1]
        self.served.append(self.version)
        completion = Completion(
            ids.tobytes(),
            (-ids / 7).astype(np.float32).tobytes(),
            asked.sampling.temperature,
            [(self.version, 1), (self.version + 1, len(ids) - 1)],
            "stop",
        )
        await connection.send_bytes(msgspec.msgpack.encode([Answer(number, 200, completion)]))

    async def update(self, request: web.Request) -> web.Response:
        asked = await request.json()
        self.updating += 1
        await asyncio.sleep(self.delay)
        self.updates.append(asked)
        while self.stuck:
            await asyncio.sleep(0.01)
        self.updating -= 1
        if self.gone:
            self.gone -= 1
            return web.json_response({"error": "the trainer has another version"}, status=410)
        if self.refuse:
            return web.json_response({"error": self.refuse}, status=422)
        if self.fails:
            self.fails -= 1
            return web.Response(status=502, text="bad gateway")
        assert asked["weight_dir"]
        if why := self.holder.claim(asked["run"]):
            return web.json_response({"error": why}, status=409)
        self.version = asked["version"]
        self.loads += 1
        return await self.policy(request)

    async def reload(self, request: web.Request) -> web.Response:
        if why := self.holder.claim((await request.json())["run"]):
            return web.json_response({"error": why}, status=409)
        self.version = 0
        return await self.policy(request)

    async def claim(self, request: web.Request) -> web.Response:
        self.claims += 1
        asked = await request.json()
        if why := self.holder.claim(asked.get("run", ""), keep=asked.get("keep", True)):
            return web.json_response({"error": why}, status=409)
        return await self.policy(request)

    async def devices(self, request: web.Request) -> web.Response:
        if self.hangs:
            await asyncio.sleep(3600)
        return web.Response(status=404)  # as a server of an older rlx

    async def policy(self, request: web.Request) -> web.Response:
        if self.hangs:
            await asyncio.sleep(3600)
        state = PolicyState(
            self.version,
            "model",
            64,
            running=self.in_flight,
            waiting=self.waiting,
            kv_cache_usage=0.25,
            preemptions=3,
            asking=self.asking,
            identity=self.identity,
            start=self.start,
        )
        return web.Response(body=msgspec.json.encode(state))


async def until(condition: Callable[[], object]) -> None:
    """Return when the condition holds."""
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)


def play(scene: Callable[..., Awaitable[None]], *stands: Stand, **options: Any) -> None:
    """Run a scene with running servers and a client of all of them."""

    async def whole() -> None:
        for stand in stands:
            await stand.__aenter__()
        try:
            async with Servers([stand.endpoint for stand in stands], **({"request_timeout": 60} | options)) as client:
                await scene(client, *stands)
        finally:
            for stand in stands:
                await stand.__aexit__()

    asyncio.run(whole())
