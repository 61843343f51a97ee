"""What was said to a policy and by it: a policy that keeps transcripts of its episodes, as messages.

    env.policy = TranscribedPolicy(env.policy)
    await env.play(task, members, attempt)
    env.policy.take(task, member)           the transcripts of that rollout

The messages are those of the requests, not those that an environment shows after the episode: an environment may rewrite its history
between two turns, and a model learns a wrong thing from a prompt that it never saw. `transcripts_of` joins the requests that extend each
other, as `rlx.rollout.samples` joins tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlx.policy.asked import raw_text
from rlx.policy.base import Episode, Message, Policy, Reply
from rlx.types import Task, Turn


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """One request and its answer."""

    messages: tuple[Message, ...]  # the whole prompt
    tools: tuple[Mapping[str, Any], ...]  # that it offered
    reply: Reply


@dataclass(frozen=True, slots=True, kw_only=True)
class Transcript:
    """One conversation: what the policy was told, and what it answered.

    Every assistant message of `completion` is an answer of this rollout; no message of `prompt` is.

    Two turns with a tool's reply between them, in a prompt that shows an example:

        prompt      user "2+2?" · assistant "4" · user "3+4?"                 the environment's; its "4" is no answer of the policy
        completion  assistant call add(3, 4) · tool "7" · assistant "7"       the policy's two answers, and what came between
    """

    prompt: Any  # messages, or a `str` for a raw text prompt
    completion: Any  # messages, or a `str` after a raw text prompt
    tools: tuple[Mapping[str, Any], ...] = ()  # functions in OpenAI's form
    truncated: bool = False  # a length limit cut one of the answers


class TranscribedPolicy:
    """A policy that keeps what is said in its episodes. See `rlx.policy.base.Policy`."""

    def __init__(self, policy: Policy) -> None:
        """`policy` answers the requests."""
        self.policy = policy
        self._episodes: dict[tuple[int, int], TranscribedEpisode] = {}  # by (task.index, member): the newest attempt

    @property
    def context_length(self) -> int:
        return self.policy.context_length

    def episode(self, task: Task, member: int, attempt: int) -> TranscribedEpisode:
        episode = TranscribedEpisode(self.policy.episode(task, member, attempt))
        self._episodes[task.index, member] = episode
        return episode

    def take(self, task: Task, member: int) -> list[Transcript]:
        """The transcripts of the newest attempt at a rollout that has ended. They are then forgotten.

        Empty if the policy was never asked.
        """
        episode = self._episodes.pop((task.index, member), None)
        return [] if episode is None else transcripts_of(episode.kept)


class TranscribedEpisode:
    """See `rlx.policy.base.Episode`."""

    def __init__(self, episode: Episode) -> None:
        self.episode = episode
        self._exchanges: dict[int, Exchange] = {}  # by the number of the request; without those made with trained=False
        self._num_requests = 0
        self._trajectory: set[str] | None = None  # ids of the requests that the environment keeps; None: it has not said

    @property
    def turns(self) -> tuple[Turn, ...]:
        return self.episode.turns

    @property
    def replies(self) -> Sequence[Message]:
        return self.episode.replies

    @property
    def waits_for(self) -> str:
        return self.episode.waits_for

    def keep(self, request_ids: Sequence[str]) -> tuple[Turn, ...]:
        self._trajectory = set(request_ids)
        return self.episode.keep(request_ids)

    @property
    def kept(self) -> list[Exchange]:
        """The exchanges of the trajectory, in the order of the requests; before `keep`: all."""
        exchanges = [exchange for _, exchange in sorted(self._exchanges.items(), key=lambda item: item[0])]
        return [one for one in exchanges if self._trajectory is None or one.reply.request_id in self._trajectory]

    async def respond(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        sampling: Mapping[str, Any] | None = None,
        *,
        trained: bool = True,
    ) -> Reply:
        number = self._num_requests
        self._num_requests += 1
        reply = await self.episode.respond(messages, tools, sampling, trained=trained)
        if trained:
            self._exchanges[number] = Exchange(messages=tuple(map(dict, messages)), tools=tuple(tools or ()), reply=reply)
        return reply


def transcripts_of(exchanges: Sequence[Exchange]) -> list[Transcript]:
    """The transcripts of an episode, in the order of their first answers. Every answer is in exactly one `completion`.

    An exchange continues the longest earlier transcript whose messages begin its prompt, if it offers the same tools and what is new in
    its prompt has no assistant message. Otherwise (a history that was rewritten, another agent, an answer that the environment put into
    the policy's mouth) it begins a transcript of its own, in which earlier answers are context.
    """
    drafts: list[tuple[Exchange, list[Message], list[Message], list[bool]]] = []  # first exchange, completion, all messages, truncated
    for exchange in exchanges:
        answer, asked = exchange.reply.message, list(exchange.messages)
        fits = [draft for draft in drafts if _extends(exchange, draft[0], draft[2])]
        if fits:
            _, completion, whole, cut = max(fits, key=lambda draft: len(draft[2]))
            new = asked[len(whole) :]
            completion += [*new, answer]
            whole += [*new, answer]
            cut.append(exchange.reply.truncated)
        else:
            drafts.append((exchange, [answer], [*asked, answer], [exchange.reply.truncated]))
    return [_transcript(first, completion, any(cut)) for first, completion, _, cut in drafts]


def _extends(exchange: Exchange, first: Exchange, whole: Sequence[Message]) -> bool:
    """Whether the exchange continues the transcript that `first` began and whose messages are `whole`."""
    asked = exchange.messages
    new = asked[len(whole) :]
    return (
        bool(new)
        and list(asked[: len(whole)]) == whole
        and exchange.tools == first.tools
        and all(message["role"] != "assistant" for message in new)
    )


def _transcript(first: Exchange, completion: list[Message], truncated: bool) -> Transcript:
    raw = raw_text(first.messages)
    if raw is not None:
        (answer,) = completion  # a raw text prompt continues nothing
        return Transcript(prompt=raw, completion=answer["content"], truncated=truncated)
    return Transcript(prompt=list(first.messages), completion=completion, tools=first.tools, truncated=truncated)
