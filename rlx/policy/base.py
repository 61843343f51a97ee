"""The policy as environments see it: messages (and tools) in, a message out, with a `Turn` where its tokens are known.

    episode = policy.episode(task, member, attempt)
    reply = await episode.respond(messages, tools, sampling)
    episode.turns

Implementations: our own servers, which speak tokens (`rlx.policy.tokens`), and any OpenAI-compatible endpoint (`rlx.policy.openai`).
Knows neither vLLM nor verifiers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rlx.types import Task, Turn

Message = dict[str, Any]
"""`role`, `content`, and as needed `reasoning_content`, `tool_calls`, `tool_call_id`, `name`; calls as chat templates want them."""


class PolicyError(RuntimeError):
    """The policy could not answer a request."""


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
    truncated: bool = False  # cut by a limit on its length
    request_id: str = ""
    num_prompt_tokens: int = 0
    num_tokens: int = 0  # sampled
    turn: Turn | None = None  # its tokens, where they are known

    @property
    def message(self) -> Message:
        """The answer as a message of the conversation that goes on."""
        message: Message = {"role": "assistant", "content": self.content}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.calls:
            message["tool_calls"] = [
                {"type": "function", "id": call.id, "function": {"name": call.name, "arguments": call.arguments}} for call in self.calls
            ]
        return message


class Episode(Protocol):
    """The policy in one rollout."""

    @property
    def turns(self) -> tuple[Turn, ...]:
        """What is to be trained on: the requests so far whose tokens are known, in the order in which they were made."""
        ...

    @property
    def replies(self) -> Sequence[Message]:
        """The answers so far, in the order in which they came."""
        ...

    async def respond(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        sampling: Mapping[str, Any] | None = None,
        *,
        trained: bool = True,
    ) -> Reply:
        """The policy's answer to a conversation.

        `tools`: functions in OpenAI's form. `sampling`: parameters of this request by vLLM's names, in place of the policy's own.
        `trained`: False for a request beside the trajectory (a judge, a user simulator): it is answered, and is no turn.
        Raises PromptTooLong, PolicyError, or what the policy's servers raise.
        """
        ...


class Policy(Protocol):
    """The model of one environment."""

    @property
    def context_length(self) -> int:
        """Most tokens of prompt and completion together; 0: not known."""
        ...

    def episode(self, task: Task, member: int, attempt: int) -> Episode:
        """The policy in one attempt at one rollout. Equal arguments sample the same tokens, where the policy can promise that."""
        ...


def request_seed(seed: int, task: Task, member: int, attempt: int, turn: int) -> int:
    """The sampling seed of one request, 0 … 2^63 - 1: a hash of run seed, environment, example, task, member, attempt and turn.

    The same in every process and Python version. A second visit of an example (another `task.index`) samples anew.
    """
    key = f"{seed}|{task.env}|{task.example_id}|{task.index}|{member}|{attempt}|{turn}"
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "little") >> 1
