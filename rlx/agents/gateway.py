"""A server for programs that know only a base URL and a key: each request is answered by the policy and stands in a rollout's trace.

    gateway = Gateway(); await gateway.start()
    session = gateway.open(episode)            one rollout: session.key opens it and nothing else
    …the program asks {gateway.url}/v1/chat/completions, /v1/responses or /v1/messages (or {gateway.url}/s/KEY/v1/… without a key)
    await gateway.close(session)
    trace = episode.keep(session.delivered)    the answers that the program has received

A program sends its whole history each time. Where that repeats what was sampled, it stands for the sampled tokens; where the program
writes it otherwise, the request begins a branch of the trace.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import math
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from rlx.agents.dialects import CHAT, DIALECTS, MESSAGES, Dialect, Refused, Request, as_object
from rlx.config.schema_rollout import HarnessConfig
from rlx.policy.base import Episode, Message, NotShown, PromptTooLong, Reply

log = logging.getLogger(__name__)

UNTRAINED = "untrained"  # the model's name in requests that are answered, but do not belong to the rollout
PARALLEL = 16  # requests of one session that are answered at the same time; others wait
MAX_REQUEST_BYTES = 64 * 2**20  # bytes of a request
QUIET = 15.0  # seconds without an answer after which a stream begins, so that no client gives up; until then errors keep their status


@dataclass(slots=True, eq=False)
class Session:
    """One rollout: what a program may ask, and what it was answered."""

    episode: Episode
    limits: HarnessConfig = field(default_factory=HarnessConfig)  # of which `max_turns` and `max_tokens` bound it
    longest: int | None = None  # sampled tokens of one answer
    deadline: float = math.inf  # of the monotonic clock
    key: str = field(default_factory=lambda: secrets.token_urlsafe(24))
    delivered: list[str] = field(default_factory=list)  # request ids of answers that the program has received and that count
    turns: int = 0
    tokens: int = 0
    stop: str = ""  # why it answers no more
    ended: asyncio.Event = field(default_factory=asyncio.Event)  # it answers no more
    failure: Exception | None = None  # of the last request, if the policy could not answer it
    # What stood before each answer, the answer, and what a program repeats of it; by the reply's request id.
    _answers: dict[str, tuple[list[Message], Message, Any]] = field(default_factory=dict)
    _asked: list[tuple[str, asyncio.Task[Reply]]] = field(default_factory=list)  # requests with what identifies a second try of them
    _room: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(PARALLEL))

    def ask(self, request: Request, identity: str, again: bool) -> asyncio.Task[Reply]:
        """The answer to a request. `again`: the client says that it has sent it before; an answer that it never read is then its own."""
        for own, task in reversed(self._asked):
            if again and own == identity and not (task.done() and (task.cancelled() or task.exception())):
                return task
        task = asyncio.create_task(self.answer(request))
        task.add_done_callback(lambda task: task.cancelled() or task.exception())  # whoever asked may have hung up
        self._asked.append((identity, task))
        return task

    async def answer(self, request: Request) -> Reply:
        """The policy's answer. Raises Refused if there is none."""
        async with self._room:
            counts = request.model != UNTRAINED
            self._check(counts)
            left = None if self.limits.max_tokens is None else self.limits.max_tokens - self.tokens
            bounds = [bound for bound in (request.sampling.get("max_tokens"), self.longest, left) if bound is not None]
            sampling = {**request.sampling, **({"max_tokens": min(bounds)} if bounds else {})}
            if request.previous and request.previous not in self._answers:
                raise Refused(f"previous_response_id: there is no answer {request.previous}")
            before, last, _ = self._answers.get(request.previous, ([], None, None))
            told = [*before, *([last] if last else [])]
            for message in request.messages:
                told.append(self._as_sampled(message, told))
            if told and told[-1]["role"] == "assistant":
                raise Refused("the last message is the model's own, and an answer that continues it cannot be sampled")
            self.turns += counts  # those in flight count
            try:
                reply = await self.episode.respond([*request.system, *told], request.tools or None, sampling, trained=counts)
            except BaseException as error:
                self.turns -= counts
                self.failure = error if isinstance(error, Exception) else self.failure
                raise
            self.failure = None
            self.tokens += reply.num_tokens
            message = reply.message
            self._answers[reply.request_id] = told, message, _shown(message)
            return reply

    def _check(self, counts: bool) -> None:
        """Raise Refused if the session answers no more. `counts`: the request belongs to the rollout."""
        over = {
            "timeout": time.monotonic() >= self.deadline,
            "max_turns": counts and self.turns >= (self.limits.max_turns or math.inf),
            "max_tokens": self.tokens >= (self.limits.max_tokens or math.inf),
        }
        self.stop = self.stop or next((why for why, is_over in over.items() if is_over), "")
        if self.stop:
            self.ended.set()
            raise Refused(f"this session has ended: {self.stop}", 403)

    def _as_sampled(self, message: Message, before: list[Message]) -> Message:
        """A message of the history: the answer that it repeats, as it was sampled, or itself. `before`: what stands before it.

        Many programs drop the reasoning, which they cannot show. Of several answers with the same words, it is the one to this history.
        """
        if message["role"] != "assistant":
            return message
        reasoning, shown = message.get("reasoning_content"), _shown(message)
        known = [(told, own) for told, own, repeated in self._answers.values() if repeated == shown]
        known = [(told, own) for told, own in known if reasoning in (None, own.get("reasoning_content"))]
        if any(own != known[0][1] for _, own in known):
            known = [(told, own) for told, own in known if told == before]
        return known[0][1] if known else message

    async def close(self, why: str) -> None:
        """Answer no more, and give up what is being answered."""
        self.stop = self.stop or why
        self.ended.set()
        tasks = [task for _, task in self._asked]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _shown(message: Message) -> tuple[str, list[Any]]:
    """What a program repeats of an answer, whatever JSON it writes."""
    calls = [(call["id"], call["function"]) for call in message.get("tool_calls") or ()]
    return str(message["content"]).strip(), [(own, function["name"], as_object(function["arguments"])) for own, function in calls]


class Gateway:
    """The server. Belongs to one event loop."""

    def __init__(self, routes: Callable[[web.UrlDispatcher], None] = lambda router: None) -> None:
        """`routes`: adds routes of its owner's."""
        self.sessions: dict[str, Session] = {}
        self.url, self.port = "", 0
        app = web.Application(client_max_size=MAX_REQUEST_BYTES, middlewares=[_errors])
        for prefix in ("/v1", "/s/{key}/v1", "/s/{key}"):
            for dialect in DIALECTS:
                app.router.add_post(prefix + dialect.route, self._reading(dialect, self._answer))
                if dialect.counts:
                    app.router.add_post(prefix + dialect.counts, self._reading(dialect, self._count))
            app.router.add_get(prefix + "/models", self._models)
            app.router.add_get(prefix + "/models/{model}", self._models)
        routes(app.router)
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=1.0)

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> None:
        """Listen. Raises OSError."""
        await self._runner.setup()
        await web.TCPSite(self._runner, host, port).start()
        self.port = self._runner.addresses[0][1]
        self.url = f"http://{'127.0.0.1' if host in ('0.0.0.0', '::') else host}:{self.port}"

    def open(self, episode: Episode, *limits: Any, **more: Any) -> Session:
        """A session of a rollout, with these fields."""
        session = Session(episode, *limits, **more)
        self.sessions[session.key] = session
        return session

    async def close(self, session: Session, why: str = "closed") -> None:
        """End a session. Its key opens nothing from now on."""
        self.sessions.pop(session.key, None)
        await session.close(why)

    async def stop(self) -> None:
        """Close all."""
        for session in list(self.sessions.values()):
            await self.close(session)
        await self._runner.cleanup()

    # routes

    def _session(self, request: web.Request) -> Session:
        bearer = request.headers.get("Authorization", "").removeprefix("Bearer ")
        session = self.sessions.get(request.match_info.get("key") or request.headers.get("x-api-key") or bearer)
        if session is None:
            raise Refused("this key opens no session, or its session has ended", 401)
        return session

    async def _models(self, request: web.Request) -> web.Response:
        self._session(request)
        name = request.match_info.get("model", "policy")
        one = {"id": name, "object": "model", "type": "model", "display_name": name, "created": 0, "owned_by": "rlx"}
        return web.json_response(one if "model" in request.match_info else {"object": "list", "data": [one], "has_more": False})

    def _reading(self, dialect: Dialect, work: Callable[..., Any]) -> Any:
        """A handler of requests in a language. `work` gets the session and what was asked."""

        async def handle(request: web.Request) -> web.StreamResponse:
            session, body = self._session(request), await request.read()
            try:
                asked = dialect.read(json.loads(body))
            except Refused:
                raise
            except Exception as error:  # whatever a program can send
                raise Refused(f"the request cannot be read: {error!r:.1000}") from error
            return await work(request, session, dialect, asked)

        return handle

    async def _count(self, request: web.Request, session: Session, dialect: Dialect, asked: Request) -> web.Response:
        count = getattr(session.episode, "count", None)
        if count is None:
            raise Refused("the number of tokens is not known: the policy is an endpoint", 404)
        tokens = count([*asked.system, *asked.messages], asked.tools or None)
        return web.json_response({"input_tokens": tokens, **({} if dialect is MESSAGES else {"object": "response.input_tokens"})})

    async def _answer(self, request: web.Request, session: Session, dialect: Dialect, asked: Request) -> web.StreamResponse:
        own = request.headers.get("Idempotency-Key", "")
        identity = own or hashlib.blake2b(request.path.encode() + await request.read(), digest_size=16).hexdigest()
        task = session.ask(asked, identity, bool(own) or request.headers.get("x-stainless-retry-count", "0") not in ("", "0"))
        stream: web.StreamResponse | None = None
        while not (await asyncio.wait({task}, timeout=QUIET))[0]:  # if the program hangs up, the answer goes on for a second try
            if asked.stream:
                stream = stream or await _begun(request)
                await stream.write(dialect.ping)
        if (error := _error_of(task)) is not None:
            if stream is None:
                raise error
            await stream.write(f"event: error\ndata: {json.dumps(dialect.error(error))}\n\n".encode())
            return stream
        reply = task.result()
        body = dialect.answer(reply, asked)
        response: web.StreamResponse = web.json_response(body)
        if asked.stream:
            response = stream or await _begun(request)
            await response.write(b"".join(dialect.events(body, asked.usage)))
        else:
            await response.prepare(request)
        await response.write_eof()
        if asked.model != UNTRAINED and reply.request_id not in session.delivered:
            session.delivered.append(reply.request_id)
        return response


def _error_of(task: asyncio.Task[Reply]) -> Refused | None:
    """Why a request has no answer, for its program."""
    error = Refused("this session has ended", 403) if task.cancelled() else task.exception()
    if error is None or isinstance(error, Refused):
        return error
    if isinstance(error, PromptTooLong):
        return Refused(f"prompt is too long: maximum context length: {error}", code="context_length_exceeded")
    log.warning("a program's request failed: %s", f"{error!r:.1000}")
    return Refused(f"{error!r:.1000}", 400 if isinstance(error, NotShown) else 502)  # the same request would fail again


async def _begun(request: web.Request) -> web.StreamResponse:
    stream = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await stream.prepare(request)
    return stream


@web.middleware
async def _errors(request: web.Request, handler: Any) -> web.StreamResponse:
    """Errors in the form of the service that the program believes to ask."""
    try:
        return await handler(request)
    except Refused as error:
        dialect, headers = MESSAGES if "/messages" in request.path else CHAT, {"x-should-retry": "false"} if error.status < 500 else {}
        return web.json_response(dialect.error(error), status=error.status, headers=headers)
    except ConnectionResetError:  # the program has hung up
        return web.Response()
