"""Translates between verifiers' messages and those of a policy: a verifiers `Client` around a `rlx.policy.base.Episode`."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

import verifiers as vf
from verifiers.clients.client import Client
from verifiers.clients.openai_chat_completions_client import content_to_text
from verifiers.errors import OverlongPromptError
from verifiers.types import Response, ResponseMessage, Tool, ToolCall, Usage
from verifiers.utils.message_utils import normalize_messages

from rlx.envs.messages import for_template
from rlx.policy.base import Episode, Message, PromptTooLong, Reply


class EpisodeClient(Client):
    """A policy's episode with verifiers' `Client` interface."""

    def __init__(self, episode: Episode, raw: bool = False) -> None:
        """`raw`: every prompt is raw text (an environment with `message_type="completion"`)."""
        super().__init__(episode)
        self.episode, self.raw = episode, raw
        self.answered: list[str] = []  # the id of each answer
        self.timing: dict[str, Any] = {"generation": 0.0, "scoring": 0.0}  # seconds; of requests at the same time, each counts

    def setup_client(self, config: Any) -> Any:
        raise TypeError("EpisodeClient is made from an Episode, not from a ClientConfig")

    async def to_native_tool(self, tool: Tool) -> dict[str, Any]:
        return function_of(tool)

    async def to_native_prompt(self, messages: Sequence[Any]) -> tuple[list[Message], dict]:
        if isinstance(messages, str) or any(isinstance(message, dict) for message in messages):
            messages = normalize_messages(messages)  # verifiers' loop has done it; a request of the environment's own may hold dicts
        if self.raw or messages[0].role == "text":  # joined as verifiers' client of completion endpoints does it
            return [{"role": "text", "content": "\n\n".join(content_to_text(message.content) for message in messages)}], {}
        native = [for_template(message) for message in messages]
        for message in native:
            if message["role"] == "text":  # plain text inside a conversation
                message["role"] = "user"
        return with_tool_names(native), {}

    async def get_native_response(
        self, prompt: list[Message], model: str, sampling_args: dict[str, Any], tools: list[dict] | None = None, **_: Any
    ) -> Reply:
        """One request. Raises OverlongPromptError when the prompt fills the context; verifiers wraps other errors in ModelError."""
        began = time.monotonic()
        try:
            return await self.episode.respond(prompt, tools, sampling_args)
        except PromptTooLong as error:
            raise OverlongPromptError(str(error)) from error
        finally:
            self.timing["generation"] += time.monotonic() - began

    async def raise_from_native_response(self, response: Any) -> None:
        """Accept empty answers: the model chose to stop at once and learns from the reward."""

    async def from_native_response(self, response: Reply) -> Response:
        reply = response
        self.answered.append(reply.request_id)
        calls = [ToolCall(id=call.id, name=call.name, arguments=call.arguments) for call in reply.calls] or None
        # This is the hot path, so validation is skipped; every value already has its declared type.
        return Response.model_construct(
            id=reply.request_id,
            created=0,
            model="policy",
            usage=Usage.model_construct(
                prompt_tokens=reply.num_prompt_tokens,
                reasoning_tokens=0,
                completion_tokens=reply.num_tokens,
                total_tokens=reply.num_prompt_tokens + reply.num_tokens,
            ),
            message=ResponseMessage.model_construct(
                role="assistant",
                content=reply.content,
                reasoning_content=reply.reasoning,
                thinking_blocks=None,
                tool_calls=calls,
                finish_reason="length" if reply.truncated else "tool_calls" if calls else "stop",
                is_truncated=reply.truncated,
                tokens=None,
            ),
        )

    async def close(self) -> None:
        """Nothing to close: the policy belongs to the run."""


def functions_of(env: vf.Environment, tool_defs: Any) -> list[dict[str, Any]]:
    """Definitions of tools, as an environment or a row has them, as functions in OpenAI's form."""
    return [function_of(tool) for tool in env._normalize_tool_defs(tool_defs) or []]


def function_of(tool: Tool) -> dict[str, Any]:
    """A tool as a function in OpenAI's form."""
    parameters = _without_filled(tool.parameters)
    return {"type": "function", "function": {"name": tool.name, "description": tool.description, "parameters": parameters}}


def _without_filled(schema: Any) -> Any:
    """A schema without the nulls that Arrow puts into a row's tools for what only other rows' tools have, such as their parameters."""
    if isinstance(schema, Mapping):
        return {name: _without_filled(value) for name, value in schema.items() if value is not None or name in ("default", "const")}
    return [_without_filled(value) for value in schema] if isinstance(schema, list) else schema


def info_of(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """The column `info` of a row; data sets may hold it as JSON."""
    info = row.get("info") or {}
    return json.loads(info) if isinstance(info, str) else info


def with_tool_names(messages: list[Message]) -> list[Message]:
    """Add the function's name to each tool result. Some chat formats need it; verifiers gives only the call's id."""
    names = {call["id"]: call["function"]["name"] for message in messages for call in message.get("tool_calls", ())}
    for message in messages:
        if message["role"] == "tool" and message["tool_call_id"] in names:
            message["name"] = names[message["tool_call_id"]]
    return messages
