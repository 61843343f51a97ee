"""The interface of a policy for environments: messages (and tools) in, a message out; what was said is a trace.

    episode = policy.episode(task, member, attempt)
    reply = await episode.respond(messages, tools, sampling)
    episode.trace

Implementations: our own servers, which exchange token ids (`rlx.policy.tokens`), and any OpenAI-compatible endpoint
(`rlx.policy.openai`).
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rlx.trace import Trace, TraceBuilder, Turn
from rlx.types import Task

Message = dict[str, Any]
"""`role`, `content`, and if needed `reasoning_content`, `tool_calls`, `tool_call_id`, `name`; tool calls in the form of chat templates.

A prompt of one message with the role `text` is raw text: it gets no chat template."""


class PolicyError(RuntimeError):
    """The policy could not answer a request."""


class NotShown(PolicyError):
    """The chat format cannot show these messages or tools, however often it is asked."""


class PromptTooLong(PolicyError):
    """The messages leave no room in the context for a new token."""


@dataclass(frozen=True, slots=True)
class Call:
    """A tool call of the model."""

    id: str
    name: str
    arguments: str  # JSON


@dataclass(frozen=True, slots=True)
class Reply:
    """One answer of the policy."""

    content: str
    reasoning: str | None = None
    calls: tuple[Call, ...] = ()
    truncated: bool = False  # cut by a length limit
    stop: str | None = None  # the stop string that ended it, which `content` does not have, if one did and it is known
    request_id: str = ""
    num_prompt_tokens: int = 0
    num_tokens: int = 0  # sampled
    turn: Turn | None = None  # its tokens; None if they are not known

    @property
    def message(self) -> Message:
        """The answer as a message for the rest of the conversation."""
        message: Message = {"role": "assistant", "content": self.content}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.calls:
            message["tool_calls"] = [
                {"type": "function", "id": call.id, "function": {"name": call.name, "arguments": call.arguments}} for call in self.calls
            ]
        return message


class Episode(ABC):
    """The policy in one rollout."""

    __slots__ = ("said", "scored_late", "timed_out", "times")

    def __init__(self) -> None:
        self.timed_out = ""  # why the policy answers no more: a deadline has passed
        self.scored_late = False  # whether the environment scores what there is then (`on_timeout=score`)
        self.times: list[tuple[float, float]] = []  # (Unix time, seconds) of each answered request
        self.said = TraceBuilder()

    @property
    def trace(self) -> Trace:
        """What was said so far.

        Without requests made with `trained=False`, and those whose own sampling parameters the trainer cannot account for.
        """
        return self.said.trace()

    def keep(self, request_ids: Sequence[str]) -> Trace:
        """The part of `trace` whose answers have their `Reply.request_id` among `request_ids`: what is trained.

        An environment's adapter calls it after the episode, when it knows which requests belong to the trajectory. Ids of other requests
        are ignored.
        """
        return self.said.trace(self.said.requests(request_ids))

    @property
    def waits_for(self) -> str:
        """`; URL has not answered`, of an endpoint that is not the run's own; empty if no request to one is in flight."""
        return ""

    @abstractmethod
    async def respond(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        sampling: Mapping[str, Any] | None = None,
        *,
        trained: bool = True,
    ) -> Reply:
        """The policy's answer to a conversation.

        `tools`: functions in OpenAI's form. `sampling`: parameters of this request by vLLM's names; they override the policy's own.
        `trained`: False for a request outside the trajectory (a judge, a user simulator). It is answered, but is not in `trace`.
        Raises PromptTooLong, PolicyError, or an error of the policy's servers.
        """


class Policy(Protocol):
    """The model of one environment."""

    @property
    def context_length(self) -> int:
        """The limit of prompt and completion tokens together; 0: not known."""
        ...

    def episode(self, task: Task, member: int, attempt: int) -> Episode:
        """The policy in one attempt at one rollout. Equal arguments sample the same tokens, if the policy can guarantee that."""
        ...


def request_seed(seed: int, task: Task, member: int, attempt: int, turn: int) -> int:
    """The sampling seed of one request, 0 … 2^63 - 1: a hash of run seed, environment, example, task, member, attempt and turn.

    It is the same in every process and Python version. A second visit of an example (another `task.index`) gets another seed.
    """
    key = f"{seed}|{task.env}|{task.example_id}|{task.index}|{member}|{attempt}|{turn}"
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "little") >> 1
