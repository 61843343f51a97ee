"""A teacher in the policy's place: an OpenAI-compatible endpoint answers, and its text is tokenized as the policy writes it.

The turns have no log-probabilities and belong to no policy version (they carry the current one, so that they are never too old), so only
cross-entropy may train on them: `rlx.config.checks.objective` refuses everything else.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from zlib import crc32

import numpy as np

from rlx.data.conversations import RowError
from rlx.data.masks import answer_after, as_turn, check_marks
from rlx.policy.base import Message, PolicyError, PromptTooLong, Reply
from rlx.policy.chat import Chat, continued
from rlx.policy.observation_mask import ObservationRecorder
from rlx.policy.openai import OpenAIEpisode, OpenAIPolicy
from rlx.policy.sampling_params import raw_text
from rlx.trace import Turn
from rlx.types import Task


@dataclass(frozen=True, slots=True)
class TeacherPolicy:
    """See `rlx.policy.base.Policy`.

    The groups are spread over the endpoints. One endpoint answers a whole group, whose members share a prompt, and the next one answers
    the next attempt at a rollout that failed.
    """

    endpoints: Sequence[OpenAIPolicy]  # the same model at every address
    chat: Chat  # of the policy that learns
    version: Callable[[], int]  # the version that its servers have
    context_length: int  # of the policy that learns
    learn: frozenset[str] = frozenset()  # roles of the environment's messages that the policy learns, too

    def episode(self, task: Task, member: int, attempt: int) -> TeacherEpisode:
        first = crc32(f"{task.env} {task.index}".encode())  # indices alone have a pattern: the environments of a mix take turns
        endpoint = self.endpoints[(first + attempt) % len(self.endpoints)]
        return TeacherEpisode(self, endpoint.episode(task, member, attempt), task.env)


class TeacherEpisode(ObservationRecorder):
    """See `rlx.policy.base.Episode`."""

    __slots__ = ("inner", "num_answers", "policy")

    def __init__(self, policy: TeacherPolicy, inner: OpenAIEpisode, env: str = "") -> None:
        super().__init__(policy.chat, policy.learn, env)
        self.policy, self.inner = policy, inner
        self.num_answers = 0

    @property
    def waits_for(self) -> str:
        return self.inner.waits_for

    async def respond(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        sampling: Mapping[str, Any] | None = None,
        *,
        trained: bool = True,
    ) -> Reply:
        """The teacher's answer. Raises PromptTooLong if the policy's context cannot hold it, PolicyError if its template cannot show it."""
        began = time.time()
        reply = await self.inner.respond(messages, tools, sampling, trained=trained)
        self.times.append((began, time.time() - began))
        if not trained:
            return reply
        functions = [dict(tool) for tool in tools] if tools else None
        turn = self._turn(list(messages), reply, functions)
        self.said.add(self.num_answers, list(messages), functions, reply.message, turn, request_id=reply.request_id)
        self.num_answers += 1
        return replace(reply, turn=turn)

    def _turn(self, messages: list[Message], reply: Reply, tools: list[dict] | None) -> Turn:
        """The answer in the policy's tokens, marked as a row of `rlx sft` is; without an end mark if a length limit cut the answer."""
        chat = self.policy.chat
        if raw_text(messages) is not None:
            raise PolicyError("a teacher plays conversations only, not raw text prompts")
        prompt = continued(chat, self.said, messages, tools)
        try:
            check_marks(reply.message, chat)
            answer = answer_after(chat.render(messages, tools), [*messages, reply.message], tools, chat, cut=reply.truncated)
        except RowError as error:
            raise PolicyError(f"the policy cannot learn the teacher's answer: {error}") from error
        if not answer or len(prompt) + len(answer) > self.policy.context_length:
            raise PromptTooLong(
                f"{len(prompt)} + {len(answer)} tokens of the teacher's answer; the context is {self.policy.context_length}"
            )
        versions = np.full(len(answer), self.policy.version(), dtype=np.int32)
        how = "length" if reply.truncated else "stop"
        return replace(as_turn(prompt, answer), versions=versions, finish_reason=how)
