"""The policy at any OpenAI-compatible endpoint: messages in, a message out. Its tokens are known if the endpoint returns them.

It serves evaluation, data synthesis, judges and teachers. Training needs rlx's own servers: an endpoint does not say which weights sampled
a token, and reports log-probabilities that usually ignore the sampling temperature. The `openai` package retries a request if the server is
overloaded or fails, with growing waits.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from rlx.plain import utf8
from rlx.policy.base import Call, Episode, Message, PolicyError, PromptTooLong, Reply, request_seed
from rlx.policy.sampling_params import raw_text
from rlx.trace import Turn
from rlx.types import Task

UNKNOWN_VERSION = -1  # the endpoint does not say which weights it serves
NEUTRAL = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "min_tokens": 0, "stop_token_ids": []}  # what these values ask for is what OpenAI does
OWN = ("max_tokens", "max_completion_tokens", "temperature", "top_p", "seed", "stop", "presence_penalty", "frequency_penalty", "logit_bias")
CUT = ("length", "model_length", "max_tokens")  # finish reasons of an answer that a length limit cut
BROKEN = ("content_filter", "error", "abort")  # of one that something else cut
OUTPUT = ("output tokens", "completion", "max_tokens")  # in endpoints' messages that prompt and answer together are too long
WITH_OWN_DEFAULTS = ("vllm", "sglang")  # how these servers sign their list of models
LOOK = 20.0  # seconds for that list
LEAST_ROOM = 16  # new tokens; a prompt that leaves less room fills the context
REFUSED = (401, 402)  # a wrong key, no credit: no request will ever be answered
FORBIDDEN = 403  # the key may not do this; but some endpoints refuse a single moderated prompt so
SEEDS = 2**31  # many endpoints take 32-bit seeds only
SECRET = 8  # characters from which a key is a secret, and no placeholder such as `none`
NO_CREDIT = ("insufficient_quota", "billing_hard_limit_reached")  # OpenAI's codes, with status 429
TOO_LONG = ("context_length_exceeded", "context length", "context window", "maximum context")  # in endpoints' error messages
QUESTION = ({"role": "user", "content": "Say yes."},)
TOOL = {
    "type": "function",
    "function": {"name": "noop", "description": "Does nothing.", "parameters": {"type": "object", "properties": {}}},
}


@dataclass(slots=True)
class Standing:
    """What the answers so far say about the endpoint as a whole."""

    refusal: str | None = None  # why it will answer no request at all
    answered: bool = False  # whether it has answered a request
    models: set[str] = field(default_factory=set)  # the endpoint's names for what answered, as `gpt-4.1-mini-2025-04-14`
    own_defaults: bool | None = None  # whether it takes what a request leaves out from the model's generation_config.json; None: not known
    looking: asyncio.Lock = field(default_factory=asyncio.Lock)  # held by the request that finds it out

    def hear(self, models: Collection[str], refusal: str | None) -> None:
        """What the answers to another process say."""
        self.models |= set(models)
        self.refusal = self.refusal or refusal


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
        every request; `check` finds out before.
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

    def episode(self, task: Task, member: int, attempt: int) -> OpenAIEpisode:
        return OpenAIEpisode(self, task, member, attempt)

    async def check(self, *, tools: bool) -> None:
        """Ask one short question like those of an episode. Raises PolicyError if the endpoint does not answer it as it will have to.

        `tools`: the environment offers tools.
        """
        task = Task(env="check", example_id=0, index=0, row={})
        await self.episode(task, 0, 0).respond(QUESTION, [TOOL] if tools else None, {"max_tokens": 4, "min_tokens": 0})

    async def has_own_defaults(self) -> bool:
        """Whether the endpoint takes what a request leaves out from the model's `generation_config.json`. Its list of models says so."""
        import openai

        async with self.standing.looking:
            if self.standing.own_defaults is None:
                try:
                    models = await self.client.with_options(max_retries=0, timeout=LOOK).models.list()
                except openai.APITimeoutError:
                    self.standing.own_defaults = False
                except openai.APIConnectionError:
                    return False  # the request itself will say so, or succeed later
                except (openai.APIError, ValueError):  # it has no such list
                    self.standing.own_defaults = False
                else:
                    signed = {getattr(model, "owned_by", None) for model in getattr(models, "data", None) or ()}
                    self.standing.own_defaults = not signed.isdisjoint(WITH_OWN_DEFAULTS)
        return self.standing.own_defaults

    async def close(self) -> None:
        """Close the connections."""
        await self.client.close()


class OpenAIEpisode(Episode):
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
        began = time.time()
        try:
            reply = await self._respond(number, messages, tools, sampling, trained)
        finally:
            self._in_flight -= 1
        self.times.append((began, time.time() - began))
        return reply

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
        parameters = parameters_of(asked, policy.names, all_said=await policy.has_own_defaults())
        if tools:
            parameters["tools"] = [dict(tool) for tool in tools]
        raw = raw_text(messages)
        if policy.tokens:
            parameters |= {"logprobs": True, "extra_body": {**parameters.get("extra_body", {}), "return_token_ids": True}}
        if raw is None:
            answer = await self._fitting(policy.client.chat.completions, parameters | {"messages": [for_endpoint(m) for m in messages]})
            reply = reply_of(answer, policy.base_url)
        elif policy.tokens:
            raise PolicyError("an endpoint whose tokens are known answers conversations only, not raw text prompts")
        else:
            answer = await self._fitting(policy.client.completions, parameters | {"prompt": raw})
            reply = text_reply_of(answer, policy.base_url)
        if policy.tokens:
            reply = replace(reply, turn=turn_of(answer, policy.base_url))
        if trained:
            self.replies.append(reply.message)
            how = "length" if reply.truncated else "stop"
            self.said.add(number, messages, tools, reply.message, reply.turn, request_id=reply.request_id, finish_reason=how)
        return reply

    async def _fitting(self, completions: Any, parameters: dict[str, Any]) -> Any:
        """The endpoint's answer to this request, with fewer new tokens if the context has no room for as many.

        vLLM, OpenAI and others refuse such a request; rlx's own servers give the answer what is left.
        """
        while True:
            try:
                return await self._ask(completions, parameters)
            except PromptTooLong as error:
                name = next((name for name in ("max_completion_tokens", "max_tokens") if name in parameters), None)
                half = parameters[name] // 2 if name is not None else 0
                if name is None or half < LEAST_ROOM or not any(words in str(error) for words in OUTPUT):
                    raise
                parameters = parameters | {name: half}

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
            if final or (error.status_code == FORBIDDEN and not policy.standing.answered):
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
        policy.standing.answered = True
        policy.standing.models |= {name for name in (getattr(answer, "model", None),) if name}
        return answer


def parameters_of(sampling: Mapping[str, Any], names: Mapping[str, str | None], *, all_said: bool = False) -> dict[str, Any]:
    """The arguments of a request for sampling parameters by vLLM's names. `names`: the endpoint's names for them; None: left out.

    `all_said`: also those that ask for what OpenAI does by default. Some endpoints refuse to hear them; vLLM and SGLang would otherwise
    take the value from the model's `generation_config.json`.
    """
    if all_said:  # no key of rlx's own configuration, so it would be missing
        sampling = {"repetition_penalty": 1.0, **sampling}
    said = {name: value for name, value in sampling.items() if all_said or name not in NEUTRAL or value != NEUTRAL[name]}
    if "max_completion_tokens" in said:
        said.pop("max_tokens", None)
    said |= said.pop("extra_body", {})
    renamed = {new: value for name, value in said.items() if (new := names.get(name, name)) is not None}
    own = {name: renamed.pop(name) for name in OWN if name in renamed}
    return own | ({"extra_body": renamed} if renamed else {})  # names that the `openai` package does not know


def for_endpoint(message: Message) -> Message:
    """A message with OpenAI's keys only: no reasoning, and no name in a tool result."""
    return {key: value for key, value in message.items() if key != "reasoning_content" and (key != "name" or message["role"] != "tool")}


def reply_of(answer: Any, base_url: str) -> Reply:
    """A chat completion as a reply. Raises PolicyError if the answer is not a chat completion, or not a whole one."""
    choices = getattr(answer, "choices", None)
    if not choices or choices[0].message is None:
        raise PolicyError(f"{base_url} gave an answer that is not a chat completion: {str(answer)[:200]}")
    message = choices[0].message
    return Reply(
        content=utf8(message.content or ""),
        reasoning=utf8(getattr(message, "reasoning_content", None) or getattr(message, "reasoning", None)),
        calls=tuple(_call(call, number, base_url) for number, call in enumerate(message.tool_calls or ())),
        **_ended(answer, base_url),
    )


def _call(call: Any, number: int, base_url: str) -> Call:
    """A tool call of a message. Some endpoints leave out its type or its id, or give the arguments as an object."""
    function = getattr(call, "function", None)
    if (getattr(call, "type", None) or "function") != "function" or not getattr(function, "name", None):
        raise PolicyError(f"{base_url} gave a tool call that calls no function: {str(call)[:200]}")
    arguments = getattr(function, "arguments", None)
    text = arguments if isinstance(arguments, str) else json.dumps(arguments or {})
    return Call(str(getattr(call, "id", None) or f"call_{number}"), utf8(function.name), utf8(text))  # type: ignore[union-attr]


def _ended(answer: Any, base_url: str) -> dict[str, Any]:
    """How an answer ended, and its size, as fields of a reply. Raises PolicyError if something else than a length limit cut it."""
    reason, usage = answer.choices[0].finish_reason, answer.usage
    if reason in BROKEN:
        raise PolicyError(f"{base_url} broke an answer off: finish_reason={reason}")
    return {
        "truncated": reason in CUT,
        "request_id": answer.id or "",
        "num_prompt_tokens": getattr(usage, "prompt_tokens", None) or 0,
        "num_tokens": getattr(usage, "completion_tokens", None) or 0,
    }


def turn_of(answer: Any, base_url: str) -> Turn:
    """The tokens of a chat completion. Raises PolicyError if the endpoint left out token ids or log-probabilities."""
    choice = answer.choices[0]
    prompt: Any = getattr(answer, "prompt_token_ids", None)
    completion: Any = getattr(choice, "token_ids", None)
    content = choice.logprobs.content if choice.logprobs is not None else None
    if prompt is None or completion is None or content is None or len(content) != len(completion):
        raise PolicyError(
            f"{base_url} does not return token ids with log-probabilities (client.tokens); vLLM does, for `return_token_ids` and `logprobs`"
        )
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
    return Reply(content=utf8(choices[0].text), **_ended(answer, base_url))
