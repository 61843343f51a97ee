"""The policy at any OpenAI-compatible endpoint: messages in, a message out. Its tokens are known if the endpoint returns them.

It serves evaluation, data synthesis, judges and teachers, not training (`rlx.policy.endpoint` says why). The `openai` package retries a
request if the server is overloaded or fails, with growing waits.
"""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from rlx.plain import utf8
from rlx.policy.asked import raw_text
from rlx.policy.base import Call, KnownTurns, Message, PolicyError, PromptTooLong, Reply, request_seed
from rlx.types import Task, Turn

log = logging.getLogger(__name__)

UNKNOWN_VERSION = -1  # the endpoint does not say which weights it serves
HOW = "vLLM returns both for the request's `return_token_ids` and `logprobs`"
NEUTRAL = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "min_tokens": 0, "stop_token_ids": []}  # these values change nothing and are not sent
OWN = ("max_tokens", "max_completion_tokens", "temperature", "top_p", "seed", "stop", "presence_penalty", "frequency_penalty", "logit_bias")
EXTRA = ("top_k", "min_p", "min_tokens", "stop_token_ids", "repetition_penalty")  # parameters of vLLM and SGLang that OpenAI does not have
REFUSED = (401, 402)  # a wrong key, no credit: no request will ever be answered
FORBIDDEN = 403  # the key may not do this; but some endpoints refuse a single moderated prompt so
MANY_FORBIDDEN = 16  # this many 403 in a row are not about single prompts
SEEDS = 2**31  # many endpoints take 32-bit seeds only
SECRET = 8  # characters from which a key is a secret, and no placeholder such as `none`
NO_CREDIT = ("insufficient_quota", "billing_hard_limit_reached")  # OpenAI's codes, with status 429
TOO_LONG = ("context_length_exceeded", "context length", "context window", "maximum context")  # in endpoints' error messages


@dataclass(slots=True)
class Standing:
    """What the answers so far say about the endpoint as a whole."""

    refusal: str | None = None  # why it will answer no request at all
    answered: bool = False  # whether it has answered a request
    forbidden: int = 0  # answers 403 since the last request that it answered
    models: set[str] = field(default_factory=set)  # the endpoint's names for what answered, as `gpt-4.1-mini-2025-04-14`

    def succeed(self, model: str | None) -> None:
        self.answered, self.forbidden = True, 0
        if model:
            self.models.add(model)

    def forbid(self) -> bool:
        """Count an answer 403. Returns whether it concerns every request."""
        self.forbidden += 1
        return not self.answered or self.forbidden >= MANY_FORBIDDEN


class OpenAIPolicy:
    """See `rlx.policy.base.Policy`. Belongs to one event loop."""

    def __init__(
        self,
        base_url: str,
        api_key: str,
        model: str,
        *,
        seed: int = 0,
        sampling: Mapping[str, Any] | None = None,
        context_length: int = 0,
        timeout: float = 600.0,
        max_retries: int = 4,
        tokens: bool = False,
        names: Mapping[str, str | None] | None = None,
    ) -> None:
        """`base_url`: the URL before `/chat/completions`, as in `https://api.openai.com/v1`. `model`: its name there.

        `sampling`: default parameters of requests, by vLLM's names. `timeout`: seconds for one attempt at a request.
        `max_retries`: further attempts if the endpoint does not answer, is overloaded (429) or fails (5xx).
        `names`: the endpoint's names for parameters; None leaves one out (`client.parameters`).
        `tokens`: ask for token ids and log-probabilities, so that every answer has a `Turn`. An endpoint that does not return them fails
        every request; `rlx.policy.endpoint.check` finds out before.
        """
        from openai import AsyncOpenAI  # takes a second

        self.base_url, self.model, self.seed = base_url, model, seed
        self.sampling = dict(sampling or {})
        self.context_length = context_length
        self.timeout, self.max_retries, self.tokens = timeout, max_retries, tokens
        self.names = dict(names or {})
        self.standing = Standing()
        self._secret = api_key
        self.client = AsyncOpenAI(base_url=base_url, api_key=api_key, timeout=timeout, max_retries=max_retries)

    @property
    def refused(self) -> str | None:
        """Why the endpoint will answer no request at all (a wrong key, no credit); None as far as is known."""
        return self.standing.refusal

    def episode(self, task: Task, member: int, attempt: int) -> OpenAIEpisode:
        return OpenAIEpisode(self, task, member, attempt)

    def asking_for(self, tokens: bool) -> OpenAIPolicy:
        """This policy with another value of `tokens`, on the same connections. A refusal of that policy says nothing about this one."""
        other = copy.copy(self)
        other.tokens, other.standing = tokens, Standing()
        return other

    async def close(self) -> None:
        """Close the connections."""
        await self.client.close()


class OpenAIEpisode(KnownTurns):
    """See `rlx.policy.base.Episode`."""

    def __init__(self, policy: OpenAIPolicy, task: Task, member: int, attempt: int) -> None:
        super().__init__()
        self.policy = policy
        self.task, self.member, self.attempt = task, member, attempt
        self._num_requests = 0
        self._in_flight = 0  # requests

    @property
    def waits_for(self) -> str:
        return f"; {self.policy.base_url} has not answered" if self._in_flight else ""

    async def respond(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        sampling: Mapping[str, Any] | None = None,
        *,
        trained: bool = True,
    ) -> Reply:
        """One request. Raises PromptTooLong if the endpoint reports that, PolicyError for every other failure."""
        number = self._num_requests
        self._num_requests += 1
        self._in_flight += 1
        try:
            return await self._respond(number, messages, tools, sampling, trained)
        finally:
            self._in_flight -= 1

    async def _respond(
        self,
        number: int,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        sampling: Mapping[str, Any] | None,
        trained: bool,
    ) -> Reply:
        policy = self.policy
        asked = {**policy.sampling, **{name: value for name, value in (sampling or {}).items() if value is not None}}
        asked["seed"] = request_seed(policy.seed, self.task, self.member, self.attempt, number) % SEEDS
        parameters = renamed(parameters_of(asked), policy.names)
        if tools:
            parameters["tools"] = [dict(tool) for tool in tools]
        raw = raw_text(messages)
        if policy.tokens:
            parameters |= {"logprobs": True, "extra_body": {**parameters.get("extra_body", {}), "return_token_ids": True}}
        if raw is None:
            answer = await self._ask(policy.client.chat.completions, parameters | {"messages": [for_endpoint(m) for m in messages]})
            reply = reply_of(answer, policy.base_url)
        elif policy.tokens:
            raise PolicyError("an endpoint whose tokens are known answers conversations only, not raw text prompts")
        else:
            answer = await self._ask(policy.client.completions, parameters | {"prompt": raw})
            reply = text_reply_of(answer, policy.base_url)
        if policy.tokens:
            reply = replace(reply, turn=turn_of(answer, policy.base_url))
        if trained:
            self.replies.append(reply.message)
            if reply.turn is not None:
                self._turns[number] = (reply.request_id, reply.turn)
        return reply

    async def _ask(self, completions: Any, parameters: dict[str, Any]) -> Any:
        """The endpoint's answer, after its retries. `completions`: one of the two routes, for conversations or for raw text."""
        import openai

        policy = self.policy
        tried = f"tried {policy.max_retries + 1} times"
        try:
            answer = await completions.create(model=policy.model, **parameters)
        except openai.APIStatusError as error:
            text = f"{policy.base_url} ({error.status_code}): {error.message}"
            if len(policy._secret) >= SECRET:
                text = text.replace(policy._secret, "<secret>")
            final = error.status_code in REFUSED or error.code in NO_CREDIT
            if final or (error.status_code == FORBIDDEN and policy.standing.forbid()):
                policy.standing.refusal = f"the endpoint refuses every request: {text}"
                raise PolicyError(policy.standing.refusal) from error
            if error.status_code in (400, 413, 422) and any(words in f"{error} {error.code}".lower() for words in TOO_LONG):
                raise PromptTooLong(text) from error
            if error.status_code in (400, 422) and (named := [name for name in parameters if name in OWN and name in error.message]):
                text += (
                    f". Should the endpoint not take {named[0]}: client.parameters={{{named[0]}: null}} leaves it out, a name renames it"
                )
            raise PolicyError(text if error.status_code < 500 else f"{text}; {tried}") from error
        except openai.APITimeoutError as error:
            raise PolicyError(f"{policy.base_url} did not answer in {policy.timeout:g} s, {tried}") from error
        except openai.APIConnectionError as error:
            raise PolicyError(f"{policy.base_url} cannot be reached, {tried}: {error.__cause__ or error}") from error
        except openai.APIError as error:
            raise PolicyError(f"{policy.base_url}: {error.message}") from error
        policy.standing.succeed(getattr(answer, "model", None))
        return answer


def parameters_of(sampling: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a chat completion request for sampling parameters by vLLM's names."""
    said = {name: value for name, value in sampling.items() if name not in NEUTRAL or value != NEUTRAL[name]}
    for name in said.keys() - {*OWN, *EXTRA}:
        _say_unknown(name)
    if "max_completion_tokens" in said:
        said.pop("max_tokens", None)
    parameters = {name: said[name] for name in OWN if name in said}
    if extra := {name: said[name] for name in EXTRA if name in said}:
        parameters["extra_body"] = extra
    return parameters


def renamed(parameters: Mapping[str, Any], names: Mapping[str, str | None]) -> dict[str, Any]:
    """The arguments of a request with the endpoint's names for them, and without those that it does not take."""
    extra = {new: value for name, value in parameters.get("extra_body", {}).items() if (new := names.get(name, name)) is not None}
    own = {new: value for name, value in parameters.items() if name != "extra_body" and (new := names.get(name, name)) is not None}
    extra |= {name: own.pop(name) for name in own.keys() - {*OWN}}  # names that the `openai` package does not know
    return own | ({"extra_body": extra} if extra else {})


def for_endpoint(message: Message) -> Message:
    """A message with OpenAI's keys only: no reasoning, and no name in a tool result."""
    return {key: value for key, value in message.items() if key != "reasoning_content" and (key != "name" or message["role"] != "tool")}


def reply_of(answer: Any, base_url: str) -> Reply:
    """A chat completion as a reply. Raises PolicyError if the answer is not a chat completion."""
    choices = getattr(answer, "choices", None)
    if not choices or choices[0].message is None:
        raise PolicyError(f"{base_url} gave an answer that is not a chat completion: {str(answer)[:200]}")
    choice, usage = choices[0], answer.usage
    message = choice.message
    calls = [call for call in message.tool_calls or () if call.type == "function" and call.function.name]
    return Reply(
        content=utf8(message.content or ""),
        reasoning=utf8(getattr(message, "reasoning_content", None) or getattr(message, "reasoning", None)),
        calls=tuple(Call(call.id, utf8(call.function.name), utf8(call.function.arguments)) for call in calls),
        truncated=choice.finish_reason == "length",
        request_id=answer.id or "",
        num_prompt_tokens=usage.prompt_tokens if usage else 0,
        num_tokens=usage.completion_tokens if usage else 0,
    )


def turn_of(answer: Any, base_url: str) -> Turn:
    """The tokens of a chat completion. Raises PolicyError if the endpoint left out token ids or log-probabilities."""
    choice = answer.choices[0]
    prompt: Any
    completion: Any
    prompt, completion = getattr(answer, "prompt_token_ids", None), getattr(choice, "token_ids", None)
    missing = [name for name, ids in (("prompt_token_ids", prompt), ("token_ids", completion)) if ids is None]
    if missing:
        raise PolicyError(f"{base_url} returns no token ids: its answer has no {' and no '.join(missing)}. {HOW}")
    content = choice.logprobs.content if choice.logprobs is not None else None
    if content is None:
        raise PolicyError(f"{base_url} returns no log-probabilities: its answer has no logprobs. {HOW}")
    if len(content) != len(completion):
        raise PolicyError(f"{base_url} returns {len(completion)} token ids, but {len(content)} log-probabilities")
    return Turn(
        prompt_ids=np.asarray(prompt, dtype=np.int32),
        completion_ids=np.asarray(completion, dtype=np.int32),
        logprobs=np.asarray([token.logprob for token in content], dtype=np.float32),
        versions=np.full(len(completion), UNKNOWN_VERSION, dtype=np.int32),
        temperature=1.0,  # what most servers report, whatever the temperature was
        finish_reason=choice.finish_reason or "stop",
    )


def text_reply_of(answer: Any, base_url: str) -> Reply:
    """A completion of raw text as a reply. Raises PolicyError if the answer is not a completion."""
    choices = getattr(answer, "choices", None)
    if not choices or not isinstance(getattr(choices[0], "text", None), str):
        raise PolicyError(f"{base_url} gave an answer that is not a completion: {str(answer)[:200]}")
    usage = answer.usage
    return Reply(
        content=utf8(choices[0].text),
        truncated=choices[0].finish_reason == "length",
        request_id=answer.id or "",
        num_prompt_tokens=usage.prompt_tokens if usage else 0,
        num_tokens=usage.completion_tokens if usage else 0,
    )


@functools.cache
def _say_unknown(name: str) -> None:
    log.warning("an OpenAI-compatible endpoint has no sampling parameter %r; requests are sent without it", name)
