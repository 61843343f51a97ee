"""The policy inside a worker: every request goes to the orchestrator, which has the tokens, as messages."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from rlx.envs.marks import PLAYING
from rlx.envs.wire import Answer, Ask, Link, Refusal
from rlx.plain import utf8
from rlx.policy.base import Call, Message, PolicyError, PromptTooLong, Reply
from rlx.trace import Trace
from rlx.types import Task


class RemotePolicy:
    """See `rlx.policy.base.Policy`. It may only be used in a rollout's context (`PLAYING`)."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.context_length = 0
        self._asked: dict[int, asyncio.Future[Answer]] = {}
        self._numbers = 0
        self._episodes: dict[int, dict[int, RemoteEpisode]] = {}  # by request and member

    def episode(self, task: Task, member: int, attempt: int) -> RemoteEpisode:
        """The policy in one rollout. Later code in this context is marked as this member's."""
        play, _ = PLAYING.get()
        PLAYING.set((play, member + 1))
        episode = self._episodes.setdefault(play, {})[member] = RemoteEpisode(self, play, member)
        return episode

    def finish(self, play: int) -> Mapping[int, RemoteEpisode]:
        """The episodes of a request that has ended, by member."""
        return self._episodes.pop(play, {})

    async def ask(self, play: int, member: int, messages: Sequence[Message], tools: Any, sampling: Any, trained: bool) -> Answer:
        """The orchestrator's answer. Raises PromptTooLong, or an error with the type name and text of the orchestrator's."""
        number = self._numbers = self._numbers + 1
        future = self._asked[number] = asyncio.get_running_loop().create_future()
        self.link.send(
            Ask(
                number,
                play,
                member,
                list(messages),
                [dict(tool) for tool in tools] if tools else None,
                dict(sampling) if sampling is not None else None,
                trained,
            )
        )
        try:
            return await future
        finally:
            self._asked.pop(number, None)

    def answered(self, answer: Answer | Refusal) -> None:
        """Hand the orchestrator's answer to the request that waits for it. A request that was cancelled waits no more."""
        future = self._asked.get(answer.number)
        if future is None or future.done():
            return
        if isinstance(answer, Answer):
            future.set_result(answer)
        else:
            future.set_exception(_error(answer))


class RemoteEpisode:
    """See `rlx.policy.base.Episode`. Its tokens stay in the orchestrator, so its traces are empty."""

    __slots__ = ("kept", "member", "play", "policy", "replies")
    trace = Trace()
    waits_for = ""  # the orchestrator knows it (`rlx.envs.playing`)

    def __init__(self, policy: RemotePolicy, play: int, member: int) -> None:
        self.policy, self.play, self.member = policy, play, member
        self.replies: list[Message] = []
        self.kept: list[list[str]] = []

    async def respond(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        sampling: Mapping[str, Any] | None = None,
        *,
        trained: bool = True,
    ) -> Reply:
        """See `rlx.policy.base.Episode.respond`."""
        said = await self.policy.ask(self.play, self.member, messages, tools, sampling, trained)
        reply = Reply(
            said.content,
            said.reasoning,
            tuple(Call(*call) for call in said.calls),
            truncated=said.truncated,
            request_id=said.request_id,
            num_prompt_tokens=said.num_prompt_tokens,
            num_tokens=said.num_tokens,
        )
        if trained:
            self.replies.append(reply.message)
        return reply

    def keep(self, request_ids: Sequence[str]) -> Trace:
        """Remember the requests of the episode's next rollout. They travel with it, and the orchestrator picks them from its trace."""
        self.kept.append(list(request_ids))
        return self.trace


def answer_of(number: int, reply: Reply) -> Answer:
    """A reply of the policy, for the worker: without its tokens."""
    return Answer(
        number,
        reply.content,
        reply.reasoning,
        [(call.id, call.name, call.arguments) for call in reply.calls],
        reply.truncated,
        reply.request_id,
        reply.num_prompt_tokens,
        reply.num_tokens,
    )


def refusal(number: int, error: BaseException) -> Refusal:
    """An error of the policy, for the worker."""
    chain: list[tuple[str, str]] = []
    cause: BaseException | None = error
    while cause is not None and len(chain) < 5:
        chain.append((type(cause).__name__, utf8(str(cause))))
        cause = cause.__cause__
    return Refusal(number, isinstance(error, PromptTooLong), chain)


def _error(refused: Refusal) -> Exception:
    """The error behind a refusal, with its causes: messages then name them as in one process."""
    (name, text), *causes = refused.chain
    base = PromptTooLong if refused.too_long else PolicyError
    error: Exception = base(text) if name == base.__name__ else type(name, (base,), {})(text)
    outer: BaseException = error
    for name, text in causes:
        outer.__cause__ = cause = type(name, (Exception,), {})(text)
        outer = cause
    return error
