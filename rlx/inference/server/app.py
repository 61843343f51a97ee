"""The server's HTTP application (ASGI): our own routes, which are cheap, and vLLM's `/v1/…`.

`/generate` (a WebSocket), `/update_weights`, `/reload_weights`, `/claim`, `/policy`, `/devices` and `/health` are answered here, without
a framework. Every other path goes to vLLM's own application. That one is built on its first request, because it takes seconds and a run
never needs it.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import msgspec
import uvicorn
from vllm.v1.engine.exceptions import EngineDeadError

from rlx.inference.protocol import Answer, Asked, Claim, Device, Failure, GenerateRequest, UpdateRequest
from rlx.inference.server.engine import BadRequest, BadWeights, Broken, InFlight, PolicyEngine, RequestFailed
from rlx.inference.server.holder import Holder
from rlx.paths import COMPLETE
from rlx.weights.mailbox import Gone
from rlx.weights.subscribe import version_at

log = logging.getLogger(__name__)
Send = Callable[[dict[str, Any]], Awaitable[None]]
Receive = Callable[[], Awaitable[dict[str, Any]]]

JSON = b"application/json"
WRONG_KEY = "the header `Authorization: Bearer KEY` is missing or wrong; the key is in the run's endpoints/"
ASKED_FOR = (
    'Send {"weight_dir": FOLDER}, a folder of weights that rlx wrote. The weight transfer of vLLM (`update_info`) is not offered: here the '
    "run's trainer sends weights (weight_broadcast.type)"
)

_asked = msgspec.msgpack.Decoder(Asked)
_update_request = msgspec.json.Decoder(UpdateRequest)
_claim = msgspec.json.Decoder(Claim)
_encode = msgspec.msgpack.Encoder().encode


class PolicyApp:
    """An ASGI application over one engine."""

    def __init__(
        self,
        engine: PolicyEngine,
        api_key: str,
        vllm_args: dict[str, Any],
        chat_template: str | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> None:
        """`chat_template`: a file; vLLM's own routes use it instead of the model's template. `chat_template_kwargs`: its arguments."""
        self.engine = engine
        self._holder = Holder()
        self._authorization = f"Bearer {api_key}".encode()
        self._vllm_args = {**vllm_args, "chat_template": chat_template, "default_chat_template_kwargs": chat_template_kwargs or None}
        self._vllm: asyncio.Task[Any] | None = None
        self._routes = {
            ("GET", "/health"): self._health,
            ("GET", "/policy"): self._policy,
            ("GET", "/devices"): self._devices,
            ("POST", "/update_weights"): self._update_weights,
            ("POST", "/reload_weights"): self._reload_weights,
            ("POST", "/claim"): self._claim,
        }
        self._paths = {path for _, path in self._routes}

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        path = scope["path"]
        if scope["type"] != "http":
            assert scope["type"] == "websocket"  # the server runs with lifespan="off"
            await receive()
            if path == "/generate" and self._authorized(scope["headers"]):
                await send({"type": "websocket.accept"})
                (run, *_) = parse_qs(scope["query_string"].decode()).get("run", [""])
                with self._holder.connection(run):
                    await Session(self.engine, send).run(receive)
            else:
                await send({"type": "websocket.close", "code": 1008})  # closed before it was accepted, so the client gets status 403
            return
        if path != "/health" and not self._authorized(scope["headers"]):
            await _fail(send, 401, WRONG_KEY)
            return
        handler = self._routes.get((scope["method"], path))
        if handler is not None:
            await handler(receive, send)
        elif path in self._paths:
            await _fail(send, 405, f"{scope['method']} {path} is not a route")
        else:
            await self._forward(scope, receive, send)

    def _authorized(self, headers: list[tuple[bytes, bytes]]) -> bool:
        return any(name == b"authorization" and hmac.compare_digest(value, self._authorization) for name, value in headers)

    # -- our routes

    async def _health(self, receive: Receive, send: Send) -> None:
        if self.engine.llm.errored or self.engine.broken.done():
            await _fail(send, 503, "the engine is dead")
        else:
            await _reply(send, 200, b"{}", JSON)

    async def _policy(self, receive: Receive, send: Send) -> None:
        await _reply(send, 200, msgspec.json.encode(self.engine.state()), JSON)

    async def _devices(self, receive: Receive, send: Send) -> None:
        found: list[tuple[str, float, float]] = await self.engine.core.collective_rpc_async("describe_device", None, ())
        await _reply(send, 200, msgspec.json.encode([Device(*each) for each in found]), JSON)

    async def _update_weights(self, receive: Receive, send: Send) -> None:
        try:
            request = _update_request.decode(await _body(receive))
        except msgspec.MsgspecError as error:
            await _fail(send, 400, f"{error}. {ASKED_FOR}")
            return
        await self._change(send, request.run, lambda: self._load(request))

    async def _load(self, request: UpdateRequest) -> None:
        where, in_flight = request.weight_dir, InFlight(request.drain_tokens, request.keep_kv)
        version = request.version if request.version is not None else await asyncio.to_thread(version_in, Path(where))
        if request.kind == "memory":
            await self.engine.take_weights(where, version, in_flight, request.together, request.timeout)
        else:
            kind = request.kind or (await asyncio.to_thread(version_at, Path(where), version)).kind
            await self.engine.update_weights(Path(where), version, kind, in_flight)

    async def _reload_weights(self, receive: Receive, send: Send) -> None:
        try:
            request = _claim.decode(await _body(receive) or b"{}")
        except msgspec.MsgspecError as error:
            await _fail(send, 400, str(error))
            return
        await self._change(send, request.run, self.engine.reload_weights)

    async def _claim(self, receive: Receive, send: Send) -> None:
        try:
            request = _claim.decode(await _body(receive))
        except msgspec.MsgspecError as error:
            await _fail(send, 400, str(error))
            return
        if why := self._holder.claim(request.run, keep=request.keep):
            await _fail(send, 409, why, self.engine.version)
        else:
            await self._policy(receive, send)

    async def _change(self, send: Send, run: str, change: Callable[[], Awaitable[None]]) -> None:
        """Change the weights for a run, if they are not another run's."""
        if why := self._holder.claim(run):
            await _fail(send, 409, why, self.engine.version)
            return
        try:
            await change()
        except BadWeights as error:
            await _fail(send, 422, str(error), self.engine.version)
        except Gone as error:
            await _fail(send, 410, str(error), self.engine.version)
        except Broken as error:
            await _fail(send, 500, f"{error}; the server ends", self.engine.version)
        else:
            await _reply(send, 200, msgspec.json.encode(self.engine.state()), JSON)

    # -- vLLM's routes

    async def _forward(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        if self._vllm is None:
            self._vllm = asyncio.ensure_future(self._build_vllm())
        building = self._vllm
        try:
            application = await asyncio.shield(building)
        except Exception as error:
            if self._vllm is building:  # let the next request retry
                self._vllm = None
                log.exception("vLLM's own routes could not be built")
            await _fail(send, 500, f"vLLM's own routes could not be built: {type(error).__name__}: {error}")
            return
        await application(scope, receive, send)

    async def _build_vllm(self) -> Any:
        """vLLM's application on our engine, as `vllm serve` builds it."""
        log.info("building vLLM's own routes")
        build_app, init_app_state, args = await asyncio.to_thread(self._import_vllm)
        tasks = await self.engine.llm.get_supported_tasks()
        application = build_app(args, tasks, self.engine.llm.model_config)
        await init_app_state(self.engine.llm, application.state, args, tasks)
        return application

    def _import_vllm(self) -> tuple[Any, Any, Any]:
        from vllm.entrypoints.launchers.api_server.app_state import init_app_state
        from vllm.entrypoints.launchers.app import build_app
        from vllm.entrypoints.launchers.cli_args import make_arg_parser
        from vllm.utils.argparse_utils import FlexibleArgumentParser

        args = make_arg_parser(FlexibleArgumentParser()).parse_args([])
        for name in (
            "model",
            "served_model_name",
            "trust_remote_code",
            "disable_log_stats",
            "chat_template",
            "default_chat_template_kwargs",
        ):
            setattr(args, name, self._vllm_args[name])
        return build_app, init_app_state, args


class Session:
    """The server's end of one client's connection. Answers that are ready in one turn of the event loop leave in one message."""

    def __init__(self, engine: PolicyEngine, send: Send) -> None:
        self.engine = engine
        self.send = send
        self._open: dict[int, asyncio.Task[None]] = {}
        self._answers: list[Answer] = []
        self._ready = asyncio.Event()

    async def run(self, receive: Receive) -> None:
        """Serve until the client disconnects. Then abort its open requests."""
        sending = asyncio.ensure_future(self._send())
        try:
            while (message := await receive())["type"] != "websocket.disconnect":
                try:
                    asked = _asked.decode(message.get("bytes") or b"")
                except msgspec.MsgspecError as error:
                    await self.send({"type": "websocket.close", "code": 1007, "reason": str(error)[:100]})
                    return
                for number, request in asked.requests:
                    self._open[number] = asyncio.ensure_future(self._generate(number, request))
                for number in asked.given_up:
                    if number in self._open:
                        self._open.pop(number).cancel()
        finally:
            sending.cancel()
            for task in self._open.values():
                task.cancel()

    async def _generate(self, number: int, request: GenerateRequest) -> None:
        engine = self.engine
        try:
            if request.version > engine.version:
                text = f"the request needs version {request.version}, but this server has {engine.version}; call /update_weights first"
                answer = Answer(number, 409, error=text)
            else:
                answer = Answer(number, 200, await engine.generate(request))
        except BadRequest as error:
            answer = Answer(number, 413 if error.kind == "context" else 400, error=str(error))
        except RequestFailed as error:
            answer = Answer(number, 500, error=str(error))
        except EngineDeadError:
            answer = Answer(number, 503, error="the engine died while it served this request")
        except Exception as error:  # without an answer the client would wait until its time is over, and not know why
            log.exception("request %s failed", request.request_id)
            answer = Answer(number, 500, error=f"{type(error).__name__}: {error}")
        self._open.pop(number, None)
        self._answers.append(answer)
        self._ready.set()

    async def _send(self) -> None:
        while True:
            await self._ready.wait()
            self._ready.clear()
            answers, self._answers = self._answers, []
            await self.send({"type": "websocket.send", "bytes": _encode(answers)})


async def _body(receive: Receive) -> bytes:
    message = await receive()
    body = message.get("body", b"")
    while message.get("more_body"):
        message = await receive()
        body += message.get("body", b"")
    return body


async def _reply(send: Send, status: int, body: bytes, kind: bytes) -> None:
    headers = [(b"content-type", kind), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def _fail(send: Send, status: int, message: str, version: int | None = None) -> None:
    await _reply(send, status, msgspec.json.encode(Failure(message, version)), JSON)


class Server(uvicorn.Server):
    """Uvicorn without its own signal handlers, because the role handles signals."""

    def __init__(self, app: PolicyApp) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http="httptools",
                ws="websockets-sansio",
                ws_max_size=2**31 - 1,
                ws_ping_interval=None,  # a peer with a busy event loop is not dead
                ws_per_message_deflate=False,
                lifespan="off",
                access_log=False,
                log_config=None,
                server_header=False,
                date_header=False,
                proxy_headers=False,
                timeout_keep_alive=3600,
                timeout_graceful_shutdown=1,
            )
        )

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def version_in(folder: Path) -> int:
    """The version that a folder's manifest names. Raises BadWeights if there is none."""
    try:
        return int(json.loads((folder / COMPLETE).read_text())["version"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadWeights(f"{folder / COMPLETE} names no version ({type(error).__name__}: {error}); send `version` too") from error
