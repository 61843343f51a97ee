"""The policy on servers that exchange token ids: every answer stands in a trace, and later prompts keep its tokens.

messages → prompt ids (an earlier turn's, extended, if that is provably right) → room left → seed → sample → parse → Reply
"""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import time
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from rlx.config.sampling import biases
from rlx.policy.base import Call, Message, PolicyError, PromptTooLong, Reply, request_seed
from rlx.policy.chat import Chat, continued
from rlx.policy.observation_mask import ObservationRecorder
from rlx.policy.sampling_params import before_stop, parameters_of, raw_text
from rlx.policy.spec import PolicySpec
from rlx.policy.teacher_prompt import Demonstrated
from rlx.trace import Trace, Turn
from rlx.types import Task

log = logging.getLogger(__name__)


class Generator(Protocol):
    """Samples tokens: `rlx.inference.sampler.Sampler`, or a stand-in."""

    async def generate(self, prompt_ids: Sequence[int], sampling: dict[str, Any], request_id: str, affinity: int) -> Turn:
        """Sample one completion of `prompt_ids` [P]. `sampling` has vLLM's names. Requests of equal `affinity` go to one server."""
        ...


@dataclass(frozen=True, slots=True)
class TokenPolicy:
    """See `rlx.policy.base.Policy`."""

    spec: PolicySpec
    chat: Chat  # messages to tokens and back
    generator: Generator

    @property
    def context_length(self) -> int:
        return self.spec.context_length

    def episode(self, task: Task, member: int, attempt: int) -> TokenEpisode:
        return TokenEpisode(self, task, member, attempt)


class TokenEpisode(ObservationRecorder):
    """See `rlx.policy.base.Episode`."""

    __slots__ = ("_began", "_biased", "_call_ids", "_num_requests", "attempt", "member", "policy", "task")

    def __init__(self, policy: TokenPolicy, task: Task, member: int, attempt: int) -> None:
        super().__init__(policy.chat, policy.spec.learn, task.env)
        self.policy = policy
        self.task, self.member, self.attempt = task, member, attempt
        self._num_requests = 0
        self._began = time.monotonic()
        self.scored_late = policy.spec.deadline is not None
        self._biased: dict[str, list[str]] = {}  # what each request that cannot be trained asked for, by its id
        self._call_ids: set[str] = set()

    async def respond(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        sampling: Mapping[str, Any] | None = None,
        *,
        trained: bool = True,
    ) -> Reply:
        """One request. Raises PromptTooLong if the prompt fills the context, PolicyError, or an error of the generator."""
        if self.timed_out:  # a program that asks again
            raise self._late()
        policy, spec, number, prompt = self.policy, self.policy.spec, self._num_requests, list(messages)
        functions = [dict(tool) for tool in tools] if tools else None
        self._num_requests += 1
        raw = raw_text(prompt)
        if raw is None:
            ids = continued(policy.chat, self.said, prompt, functions)
        elif functions:
            raise PolicyError("a raw text prompt cannot offer tools; use a conversation")
        else:
            ids = policy.chat.raw(raw)
        room = spec.context_length - len(ids)
        if room <= 0:
            raise PromptTooLong(f"{len(ids)} prompt tokens, but the context is {spec.context_length}")
        parameters = parameters_of(spec.sampling, sampling, policy.chat.stop_token_ids, room)
        parameters["seed"] = request_seed(spec.seed, self.task, self.member, self.attempt, number)
        request_id = f"{spec.label}{self.task.env}-{self.task.index}-{self.member}-{self.attempt}-{number}"
        shown = None
        if spec.demonstrated is not None and trained:  # before sampling: a row without a demonstration costs no request
            shown = np.asarray(self._shown(ids, prompt, functions, raw, spec.demonstrated), dtype=np.int32)
        request = policy.generator.generate(ids, parameters, request_id, self.task.index)
        began = time.time()
        turn = await (request if spec.turn_timeout is None and spec.deadline is None else self._in_time(request))
        self.times.append((began, time.time() - began))
        if turn.finish_reason == "abort":
            raise PolicyError("the server aborted the request")
        if shown is not None:
            turn = replace(turn, teacher_prompt_ids=shown)
        if raw is None:
            said = policy.chat.parse(turn, functions)
        else:
            said = Reply(policy.chat.tokenizer.decode(turn.completion_ids, skip_special_tokens=True))
        content, stop = said.content, None
        if turn.finish_reason == "stop" and turn.completion_ids[-1] not in parameters["stop_token_ids"]:
            last = None
            if parameters["min_tokens"] > 0:
                sampled = turn.completion_ids
                whole, but_one = (policy.chat.tokenizer.decode(part, skip_special_tokens=True) for part in (sampled, sampled[:-1]))
                last = len(whole) - len(but_one)
            content, stop = before_stop(content, parameters.get("stop", ()), last)
        reply = Reply(
            content,
            said.reasoning,
            self._with_ids(said.calls, number),
            truncated=turn.finish_reason == "length",
            stop=stop,
            request_id=request_id,
            num_prompt_tokens=len(turn.prompt_ids),
            num_tokens=len(turn.completion_ids),
            turn=turn,
        )
        message, biased = reply.message, biases(parameters) if spec.exact and trained else []
        if biased:
            self._biased[request_id] = biased
        named = request_id if trained else ""
        whole = content == said.content  # a later prompt does not have a stop string that was cut off
        self.said.add(number, prompt, functions, message, turn, request_id=named, counts=trained and not biased, continues=whole)
        return reply

    async def _in_time(self, request: Coroutine[Any, Any, Turn]) -> Turn:
        """The turn. A deadline that passes ends the episode: as a full context does if it is to be scored, otherwise with an error."""
        spec = self.policy.spec
        seconds, late = spec.turn_timeout or math.inf, f"no answer after {spec.turn_timeout or 0:g} s (turn_timeout)"
        if spec.deadline is not None and (left := self._began + spec.deadline - time.monotonic()) < seconds:
            seconds, late = left, f"no more answers after {spec.deadline:g} s (90 % of rollout_timeout)"
        try:
            async with asyncio.timeout(seconds) as bound:
                return await request
        except TimeoutError:
            if not bound.expired():
                raise
            self.timed_out = late
            raise self._late() from None

    def _late(self) -> PolicyError | PromptTooLong:
        return (PromptTooLong if self.scored_late else PolicyError)(self.timed_out)

    def count(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None) -> int:
        """How many tokens the prompt of a request has."""
        return len(self.policy.chat.render(list(messages), [dict(tool) for tool in tools] if tools else None))

    def keep(self, request_ids: Sequence[str]) -> Trace:
        """See `rlx.policy.base.Episode.keep`. Warns of those that cannot be trained; requests beside the trajectory may ask anything."""
        for request_id in request_ids:
            for name in self._biased.get(request_id, ()):
                _say_biased(self.task.env, name)
        return super().keep(request_ids)

    def _with_ids(self, calls: Sequence[Call], number: int) -> tuple[Call, ...]:
        """The calls of request `number`, each with an id that no other call of the episode has. Ids that the model wrote stay."""
        named = []
        for index, call in enumerate(calls):
            # Nine letters and digits, because Mistral's templates refuse anything else.
            own = f"call{number:03d}{index:02d}" if number < 1000 and index < 100 else f"call_{number}_{index}"
            named.append(replace(call, id=own if not call.id or call.id in self._call_ids else call.id))
            self._call_ids.add(named[-1].id)
        return tuple(named)

    def _shown(self, ids: list[int], prompt: list[Message], tools: list[dict] | None, raw: str | None, how: Demonstrated) -> list[int]:
        """The prompt's ids with the demonstration. What extends an earlier prompt also extends its shown ids, token for token."""
        if (known := self.said.teacher_prompt(ids)) is not None:
            return known.tolist()
        if raw is not None:
            return self.policy.chat.raw(how.text(raw, self.task.row))
        return self.policy.chat.render(how.messages(prompt, self.task.row), tools)


@functools.cache
def _say_biased(env: str, name: str) -> None:
    what = "such tokens come from another distribution than the one that the trainer scores, so they are not trained"
    log.warning("envs.%s asks for %s: %s. Ask without it, or accept the bias with sampling.allow_biased_ratio=true.", env, name, what)
