"""The model as one verifiers episode sees it: messages in, a message out; tokens in and tokens out towards the server.

Knows verifiers' messages and its `Client` interface. Knows nothing of environments, rewards or servers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from verifiers.clients.client import Client
from verifiers.errors import ModelError, OverlongPromptError
from verifiers.types import AssistantMessage, Response, ResponseMessage, Tool, ToolCall, Usage

from rlx.envs.base import Policy, request_seed
from rlx.envs.chat import Message, Reply
from rlx.inference.protocol import Sampling
from rlx.types import Task, Turn


class EpisodeClient(Client):
    """The model as one verifiers episode sees it: messages in, a message out, and the tokens kept here in `turns`."""

    def __init__(self, policy: Policy, task: Task, member: int, attempt: int) -> None:
        super().__init__(policy.generator)
        self.policy = policy
        self.task = task
        self.member = member
        self.attempt = attempt
        self.num_requests = 0
        self.turns: dict[int, Turn] = {}  # by number of the request
        self.history: list[tuple[list[Message], Turn]] = []  # prompt and answer as messages, and their tokens

    def finished_turns(self) -> tuple[Turn, ...]:
        """The turns in the order in which they were asked for."""
        return tuple(self.turns[number] for number in sorted(self.turns))

    def setup_client(self, config: Any) -> Any:
        raise TypeError("an episode's client is made from a Policy, not from a ClientConfig")

    async def to_native_tool(self, tool: Tool) -> dict[str, Any]:
        return {"type": "function", "function": {"name": tool.name, "description": tool.description, "parameters": tool.parameters}}

    async def to_native_prompt(self, messages: Sequence[Any]) -> tuple[list[Message], dict]:
        return with_tool_names([for_template(message) for message in messages]), {}

    async def get_native_response(
        self, prompt: list[Message], model: str, sampling_args: dict[str, Any], tools: list[dict] | None = None, **_: Any
    ) -> tuple[str, Turn, Reply, list[Message]]:
        """One request. Raises OverlongPromptError when nothing of the context is left, ModelError when the request failed."""
        policy, number = self.policy, self.num_requests
        self.num_requests += 1
        ids = self._continue(prompt, tools) or policy.chat.render(prompt, tools)
        room = policy.context_length - len(ids)
        if room <= 0:
            raise OverlongPromptError(f"{len(ids)} prompt tokens, but the context is {policy.context_length}")
        sampling = {key: value for key, value in sampling_args.items() if key in Sampling.__struct_fields__}
        sampling["max_tokens"] = min(sampling_args.get("max_completion_tokens") or sampling["max_tokens"], room)
        sampling["min_tokens"] = min(sampling.get("min_tokens", 0), sampling["max_tokens"])
        sampling["stop_token_ids"] = [*policy.chat.stop_token_ids, *(sampling.get("stop_token_ids") or [])]
        sampling["seed"] = request_seed(policy.seed, self.task, self.member, self.attempt, number)
        request_id = f"{policy.label}{self.task.env}-{self.task.index}-{self.member}-{self.attempt}-{number}"
        turn = await policy.generator.generate(ids, sampling, request_id, self.task.index)
        if turn.finish_reason == "abort":
            raise ModelError("the server aborted the request")
        self.turns[number] = turn
        return request_id, turn, policy.chat.parse(turn, tools), prompt

    async def raise_from_native_response(self, response: Any) -> None:
        """An empty answer is an answer: the model chose to stop at once, and is to learn from the reward of that."""

    async def from_native_response(self, response: tuple[str, Turn, Reply, list[Message]]) -> Response:
        request_id, turn, reply, prompt = response
        calls = [ToolCall(id=call.id, name=call.name, arguments=call.arguments) for call in reply.calls] or None
        truncated = turn.finish_reason == "length"
        answer = AssistantMessage(content=reply.content, reasoning_content=reply.reasoning, tool_calls=calls)
        self.history.append(([*prompt, for_template(answer)], turn))
        num_prompt, num_new = len(turn.prompt_ids), len(turn.completion_ids)
        # Built without validation: every value is of its declared type by construction, and this is the hot path.
        return Response.model_construct(
            id=request_id,
            created=0,
            model="policy",
            usage=Usage.model_construct(
                prompt_tokens=num_prompt, reasoning_tokens=0, completion_tokens=num_new, total_tokens=num_prompt + num_new
            ),
            message=ResponseMessage.model_construct(
                role="assistant",
                content=reply.content,
                reasoning_content=reply.reasoning,
                thinking_blocks=None,
                tool_calls=calls,
                finish_reason="length" if truncated else "tool_calls" if calls else "stop",
                is_truncated=truncated,
                tokens=None,
            ),
        )

    async def close(self) -> None:
        """The generator belongs to the run."""

    def _continue(self, prompt: list[Message], tools: list[dict] | None) -> list[int] | None:
        """The prompt as an extension of an earlier turn, if it is one: its messages, then only what the environment said."""
        for messages, turn in reversed(self.history):
            new = prompt[len(messages) :]
            if new and prompt[: len(messages)] == messages and all(message["role"] != "assistant" for message in new):
                return self.policy.chat.extend(turn, new, tools)
        return None


def for_template(message: Any) -> Message:
    """A verifiers message as chat templates and renderers want it."""
    content = message.content
    if isinstance(content, list):
        content = [part if isinstance(part, dict) else part.model_dump() for part in content]
    role = "user" if message.role == "text" else message.role
    out: Message = {"role": role, "content": "" if content is None else content}
    if role == "assistant":
        if message.reasoning_content:
            out["reasoning_content"] = message.reasoning_content
        if message.tool_calls:
            out["tool_calls"] = [
                {"type": "function", "id": call.id, "function": {"name": call.name, "arguments": call.arguments}}
                for call in message.tool_calls
            ]
    elif role == "tool":
        out["tool_call_id"] = message.tool_call_id
    return out


def with_tool_names(messages: list[Message]) -> list[Message]:
    """Some formats name the function in its result; verifiers gives the call's id only."""
    names = {call["id"]: call["function"]["name"] for message in messages for call in message.get("tool_calls", ())}
    for message in messages:
        if message["role"] == "tool" and message["tool_call_id"] in names:
            message["name"] = names[message["tool_call_id"]]
    return messages
