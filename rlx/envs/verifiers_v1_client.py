"""Connects the agents of a v1 episode to a policy's episode, in this process.

verifiers' agents play through a program (the *harness*) that asks an interception server over HTTP; the server keeps the trace, its
limits, stop conditions and rewrites, and asks a client. Here the chat loop (`null`, verifiers' harness without tools of its own) runs in
this process and calls the server's handler directly: no subprocess, no installation, no HTTP. The server's client is the policy's episode.
Both versions that have v1 work: 0.3 and 0.4.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import inspect
import json
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import verifiers.v1 as vf
from multidict import CIMultiDict
from pydantic import PrivateAttr
from verifiers.v1 import errors
from verifiers.v1.clients.client import Client, RelayReply
from verifiers.v1.configs.client import TrainClientConfig
from verifiers.v1.dialects import DIALECTS
from verifiers.v1.dialects.chat import ChatDialect, message_to_wire
from verifiers.v1.harnesses.null.harness import NullHarness
from verifiers.v1.interception.server import InterceptionServer
from verifiers.v1.runtimes import ProgramResult
from verifiers.v1.types import AssistantMessage, Response, Usage

from rlx.agents import dialects
from rlx.agents.dialects import Dialect, Refused, Request, offered
from rlx.agents.gateway import UNTRAINED
from rlx.envs.errors import in_one_line
from rlx.envs.local import waiting_for
from rlx.envs.messages import for_template
from rlx.envs.verifiers_v1_tools import LOCAL, SERVERS, in_openai_form
from rlx.policy.base import Episode, Message, PromptTooLong, Reply

try:  # 0.4
    from verifiers.v1.harnesses.utils import mcp as tool_client
except ImportError:
    from verifiers.v1.harnesses.null import program as tool_client

LANGUAGES: dict[str, Dialect] = {
    "ChatDialect": dialects.CHAT,
    "AnthropicDialect": dialects.MESSAGES,
    "ResponsesDialect": dialects.RESPONSES,
}
CHAT: ChatDialect = next(dialect for dialect in DIALECTS if isinstance(dialect, ChatDialect))
TOO_LONG: Any = getattr(errors, "OverlongPromptError", errors.ProviderError)  # 0.3 ends the rollout; 0.4 leaves it to the harness
LIST_TOOLS_TIMEOUT = 60.0  # seconds


class PolicyClient(Client):
    """A policy's episode with verifiers' v1 `Client` interface. One for each episode."""

    def __init__(self, episode: Episode, longest: int | None = None) -> None:
        """`longest`: sampled tokens of an answer to a program that is not verifiers' own chat."""
        self.episode, self.longest = episode, longest
        self.requests: dict[str, list[str]] = {}  # ids of the requests whose answers each trace has, by the trace's id
        self.failures: dict[str, Exception] = {}  # the last error of the policy in each trace
        self.timing: dict[str, Any] = {"generation": 0.0}  # seconds spent waiting for answers; of requests at the same time, each counts
        self.too_long: set[str] = set()  # traces that ended with a prompt that fills the context

    async def get_response(
        self,
        dialect: Any,
        body: dict,
        sampling: Any,
        session_id: str | None = None,
        turn: Any = None,
        headers: Mapping[str, str] | None = None,
    ) -> Response:
        """One request. `body` is the whole request: its own sampling parameters are honoured. Raises ProviderError."""
        language = LANGUAGES[type(dialect).__name__]
        trace = session_id or ""
        prompt = dialect.parse_request(body).messages if turn is None else turn.prompt
        if language is dialects.CHAT:
            settings = dialect.parse_sampling(body).model_dump(exclude_none=True)
            settings = {**(settings.pop("extra_body", None) or {}), **settings}
            for name in ("parallel_tool_calls", "logprobs", "top_logprobs", "tool_choice"):  # they do not change what is sampled here
                settings.pop(name, None)
            tools = list(offered(body.get("tools") or (), body.get("tool_choice")))
            asked = Request(messages=[], tools=tools, sampling=settings, model=str(body.get("model", "")))
        else:
            try:
                asked = language.read(body)
            except Refused as error:
                raise errors.ProviderError(str(error), status_code=error.status) from error
            bound = [each for each in (asked.sampling.get("max_tokens"), self.longest) if each is not None]
            settings = {**asked.sampling, **({"max_tokens": min(bound)} if bound else {})}
        began, counts = time.monotonic(), body.get("model") != UNTRAINED
        try:
            reply = await self.episode.respond([for_template(message) for message in prompt], asked.tools or None, settings, trained=counts)
        except PromptTooLong as error:
            self.too_long.add(trace)
            raise TOO_LONG(f"maximum context length: {error}", status_code=400) from error
        except Exception as error:
            self.failures[trace] = error
            raise errors.ProviderError(in_one_line(error), status_code=502) from error
        finally:
            self.timing["generation"] += time.monotonic() - began
        if counts:
            _when_committed(turn, lambda: self.requests.setdefault(trace, []).append(reply.request_id))
        response = response_of(reply)
        response.raw = language.answer(reply, asked)
        return response

    async def relay(self, dialect: Any, body: dict, session_id: str | None = None, headers: Any = None) -> RelayReply:
        """An answer as a stream; 0.3 asks for it."""
        response = await self.get_response(dialect, body, None, session_id)

        async def chunks() -> AsyncIterator[bytes]:
            for event in dialect.stream_events(response.raw):
                yield event

        async def close() -> None:
            """Nothing to close."""

        return RelayReply("text/event-stream", chunks(), close)

    async def relay_aux(self, dialect: Any, route: str, body: dict, headers: Any = None) -> dict:
        """How many tokens a request has, for programs that ask."""
        asked = LANGUAGES[type(dialect).__name__].read(body)
        return {"input_tokens": self.episode.count([*asked.system, *asked.messages], asked.tools or None)}  # type: ignore[attr-defined]

    async def close(self) -> None:
        """Nothing to close: the policy belongs to the run."""


class PolicyEndpoint(TrainClientConfig):
    """The "endpoint" that verifiers hands to its agents: it holds the episode's client."""

    base_url: str = "http://policy"
    api_key_var: str = "RLX_POLICY_HAS_NO_KEY"
    _client: PolicyClient = PrivateAttr()


def _when_committed(turn: Any, note: Callable[[], None]) -> None:
    """Call `note` when the answer of a `PendingTurn` enters the trace; at once for `None`.

    The server discards an answer that arrives after the trace was stopped or concluded, for example that of a parallel request. The
    program never sees it, and nothing scores it.
    """
    if turn is None:
        note()
        return
    commit = turn.commit

    def noting(*args: Any, **kwargs: Any) -> Any:
        node = commit(*args, **kwargs)
        note()
        return node

    object.__setattr__(turn, "commit", noting)  # it is a frozen dataclass, made for this one request


def install() -> None:
    """Let verifiers answer programs in the streams of their languages, and leave the name of a request that is not to be trained."""
    for theirs in DIALECTS:
        kind, language = type(theirs), LANGUAGES[type(theirs).__name__]
        kind.stream_events = lambda self, raw, language=language: list(language.events(raw, True))
        if not hasattr(kind.apply_overrides, "__wrapped__"):
            kind.apply_overrides = _keeping_untrained(kind.apply_overrides)


def _keeping_untrained(overrides: Any) -> Any:
    """verifiers' `apply_overrides`, which writes the policy's name into each request, but for one that is not to be trained."""

    @functools.wraps(overrides)
    def kept(self: Any, body: dict, *more: Any) -> dict:
        made = overrides(self, body, *more)
        return {**made, "model": UNTRAINED} if body.get("model") == UNTRAINED else made

    return kept


def give_clients(server: InterceptionServer) -> None:
    """Make `server` ask the episode's policy for agents without an endpoint of their own."""
    SERVERS.append(server)
    stock = server._client
    server._client = lambda config: config._client if isinstance(config, PolicyEndpoint) else stock(config)


class ChatLoop(NullHarness):
    """verifiers' chat loop in this process: it asks the model, calls the tools that it names, and ends with an answer without calls."""

    def __init__(self, config: Any, server: InterceptionServer) -> None:
        super().__init__(config)
        self.server = server

    async def setup(self, runtime: Any) -> None:
        """Nothing to install. The tool servers of the rollout may stay in this process."""
        runtime.loop_is_here = True

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
        tool_interception_url: str | None = None,
    ) -> ProgramResult:
        """Play until the model answers without tool calls. A refused request (a limit, a stop condition, an error) ends it."""
        system, prompt = self.resolve_prompt(data)
        messages: list[Message] = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            messages += [{"role": "user", "content": prompt}] if prompt else []
        else:
            messages += [message_to_wire(message) for message in prompt or []]
        async with connected(mcp_urls, self.config.tool_timeout) as (tools, dispatch, servers):
            while True:
                request = {"model": ctx.model, "messages": messages, **({"tools": tools} if tools else {})}
                status, answer = await self._post(self.server._handler_for(CHAT), secret, request)
                if status != 200:
                    over = isinstance(ctx.client, PolicyEndpoint) and trace.id in ctx.client._client.too_long
                    return ProgramResult(0 if over else 1, "", str(answer.get("error", answer)))
                said = {name: value for name, value in answer["choices"][0]["message"].items() if value is not None}
                messages.append(said)
                if not said.get("tool_calls"):
                    return ProgramResult(0, "", "")
                for call in said["tool_calls"]:
                    messages.append(await self._called(call, dispatch, servers, secret, tool_interception_url is not None))

    async def _called(self, call: dict, dispatch: dict, servers: dict, secret: str, gated: bool) -> Message:
        """The result of a tool call, as a message. Errors of the model's call are results, too."""
        name, text = call["function"]["name"], call["function"]["arguments"]
        try:
            arguments, wrong = json.loads(text or "{}"), ""
        except json.JSONDecodeError as error:
            arguments, wrong = text, f"error: invalid JSON in tool arguments ({error}); resend the call with valid JSON"
        result = {"role": "tool", "tool_call_id": call["id"], "name": name}
        if gated:  # 0.4: the task may forbid the call
            asked = {"tool_call_id": call["id"], "name": name, "arguments": arguments}
            status, verdict = await self._post(self.server.handle_tool, secret, asked)
            if status != 200 or verdict["action"] == "stop":
                raise RuntimeError(str(verdict.get("error") or verdict.get("reason")))
            if verdict["action"] == "deny":
                return verdict["message"]
        if wrong:
            return {**result, "content": wrong}
        if not isinstance(arguments, dict):
            kind = type(arguments).__name__
            return {**result, "content": f"error: tool arguments must be a JSON object, got {kind}; resend as an object"}
        if name not in dispatch:
            return {**result, "content": f"error: unknown tool {name!r}"}
        server, raw = dispatch[name]
        with waiting_for(f"the tool {name}"):
            if server in LOCAL:
                said = await servers[server].call_tool(raw, arguments)
                return {**result, "content": tool_client.mcp_content_to_chat_content(said.content)}
            asking = tool_client.call_mcp(servers, dispatch, name, arguments)
            return {**result, "content": await answered(f"the tool server {server} to {raw}", asking)}

    async def _post(self, handler: Any, secret: str, body: dict) -> tuple[int, dict]:
        """(HTTP status, JSON) of a handler's answer. It gets a task of its own: the server cancels its handlers when a rollout ends."""
        response = await asyncio.create_task(handler(LocalRequest(secret, body)))
        return response.status, json.loads(response.body)


class LocalRequest(dict):
    """As much of `aiohttp.web.Request` as the interception server's handlers read."""

    def __init__(self, secret: str, body: dict) -> None:
        super().__init__()
        self.path = CHAT.routes[0]
        self.headers = CIMultiDict({"Authorization": f"Bearer {secret}"})
        self._read_bytes: bytes | None = json.dumps(body).encode()

    async def read(self) -> bytes:
        """The request's body."""
        assert self._read_bytes is not None
        return self._read_bytes


@asynccontextmanager
async def connected(urls: dict[str, str], timeout: float) -> AsyncIterator[tuple[list[dict], dict, dict]]:
    """(functions in OpenAI's form, tool name → (server, its own name), servers) of MCP servers, through verifiers' own client."""
    async with AsyncExitStack() as stack:
        tools, dispatch, servers = [], {}, {}
        near = {name: url for name, url in urls.items() if url in LOCAL}
        for name, url in near.items():
            servers[url] = await stack.enter_async_context(LOCAL[url]())
            for tool in (await servers[url].list_tools()).tools:
                function = in_openai_form(name, tool)
                tools.append(function)
                dispatch[function["function"]["name"]] = url, tool.name
        if far := {name: url for name, url in urls.items() if name not in near}:
            config = {"mcpServers": {name: {"url": url, "timeout": timeout} for name, url in far.items()}}
            more = (stack,) if "stack" in inspect.signature(tool_client.connect_mcp).parameters else ()
            places = ", ".join(f"{name} at {url}" for name, url in far.items())
            found = await answered(f"the tool servers: {places}", tool_client.connect_mcp(config, *more), LIST_TOOLS_TIMEOUT)
            tools, dispatch, servers = [*tools, *found[0]], {**dispatch, **found[1]}, {**servers, **found[2]}
        yield tools, dispatch, servers


async def answered(who: str, asking: Coroutine[Any, Any, Any], timeout: float | None = None) -> Any:
    """What tool servers answer. Raises RuntimeError that names them. Where none is reached, mcp cancels the task that asks."""
    task = asyncio.create_task(asking)
    try:
        await asyncio.wait({task}, timeout=timeout)
    finally:
        late = task.cancel()
    if late:
        raise RuntimeError(f"no answer within {timeout:g} s from {who}")
    error = asyncio.CancelledError("it is not reached") if task.cancelled() else task.exception()
    if error is not None:
        raise RuntimeError(f"no answer from {who}: {in_one_line(error)}") from error
    return task.result()


def response_of(reply: Reply) -> Response:
    """The policy's answer as verifiers' record."""
    message = AssistantMessage(
        content=reply.content or None,
        reasoning_content=reply.reasoning,
        tool_calls=[vf.ToolCall(id=call.id, name=call.name, arguments=call.arguments) for call in reply.calls] or None,
    )
    finish: Any = "length" if reply.truncated else "tool_calls" if reply.calls else "stop"
    usage = Usage(prompt_tokens=reply.num_prompt_tokens, completion_tokens=reply.num_tokens)
    return Response(id=reply.request_id, created=0, model="policy", message=message, finish_reason=finish, usage=usage)


def mark_of(trace: vf.Trace) -> str:
    """Equal for the runs of one agent in one task, whichever episode they are in."""
    said = json.dumps(trace.task.data.model_dump(mode="json"), sort_keys=True, default=repr)
    return f"{trace.agent.name}-{hashlib.blake2b(said.encode(), digest_size=6).hexdigest()}"
