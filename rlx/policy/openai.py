"""The policy at any OpenAI-compatible endpoint: messages in, a message out. Its tokens are not known.

It serves evaluation, data synthesis and teachers. Training needs rlx's own servers: an endpoint does not say which weights sampled
a token, and reports log-probabilities that usually ignore the sampling temperature. The `openai` package retries a request if the server is
overloaded or fails, with growing waits.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

from rlx.json_values import utf8
from rlx.policy.base import Call, Episode, Message, PolicyError, PromptTooLong, Reply, request_seed
from rlx.policy.sampling_params import raw_text
from rlx.types import Task

NEUTRAL = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "min_tokens": 0, "stop_token_ids": []}  # what these values ask for is what OpenAI does
OWN = ("max_tokens", "max_completion_tokens", "temperature", "top_p", "seed", "stop", "presence_penalty", "frequency_penalty", "logit_bias")
CUT = ("length", "model_length", "max_tokens")  # finish reasons of an answer that a length limit cut
BROKEN = ("content_filter", "error", "abort")  # of one that something else cut
WITH_OWN_DEFAULTS = ("vllm", "sglang")  # how these servers sign their list of models
LIST_TIMEOUT = 20.0  # seconds for that list
FINAL = (401, 402)  # a wrong key, no credit: no request will ever be answered
NO_CREDIT = ("insufficient_quota", "billing_hard_limit_reached")  # OpenAI's codes, with status 429
REFUSES = "the endpoint refuses every request"  # begins the error of such a request
SEEDS = 2**31  # many endpoints take 32-bit seeds only
SECRET = 8  # characters from which a key is a secret, and no placeholder such as `none`
TOO_LONG = ("context_length_exceeded", "context length", "context window", "maximum context")  # in endpoints' error messages
QUESTION = ({"role": "user", "content": "Say yes."},)
TOOL = {
    "type": "function",
    "function": {"name": "noop", "description": "Does nothing.", "parameters": {"type": "object", "properties": {}}},
}


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
        names: Mapping[str, str | None] | None = None,
    ) -> None:
        """`base_url`: the URL before `/chat/completions`, as in `https://api.openai.com/v1`. `model`: its name there.

        `sampling`: default parameters of requests, by vLLM's names. `timeout`: seconds for one attempt at a request.
        `max_retries`: further attempts if the endpoint does not answer, is overloaded (429) or fails (5xx).
        `names`: the endpoint's names for parameters; None leaves one out (`client.parameters`).
        """
        from openai import AsyncOpenAI  # takes a second

        self.base_url, self.model, self.seed = base_url, model, seed
        self.sampling = dict(sampling or {})
        self.context_length = context_length
        self.timeout, self.max_retries = timeout, max_retries
        self.names = dict(names or {})
        self.served_model: str | None = None  # the endpoint's name for what answered last, as `gpt-4.1-mini-2025-04-14`
        self._own_defaults: bool | None = None
        self._secret, self._listing = api_key, asyncio.Lock()
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

        async with self._listing:
            if self._own_defaults is None:
                signed = set()
                try:
                    models = await self.client.with_options(max_retries=0, timeout=LIST_TIMEOUT).models.list()
                    signed = {getattr(model, "owned_by", None) for model in getattr(models, "data", None) or ()}
                except (openai.APIError, ValueError) as error:  # it has no such list
                    if isinstance(error, openai.APIConnectionError) and not isinstance(error, openai.APITimeoutError):
                        return False  # the request itself will say so, or succeed later
                self._own_defaults = not signed.isdisjoint(WITH_OWN_DEFAULTS)
        return self._own_defaults

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
        policy, number, raw = self.policy, self._num_requests, raw_text(messages)
        self._num_requests += 1
        asked = {**policy.sampling, **{name: value for name, value in (sampling or {}).items() if value is not None}}
        asked["seed"] = request_seed(policy.seed, self.task, self.member, self.attempt, number) % SEEDS
        self._in_flight += 1
        began = time.time()
        try:
            parameters = parameters_of(asked, policy.names, send_neutral=await policy.has_own_defaults())
            if tools:
                parameters["tools"] = [dict(tool) for tool in tools]
            if raw is None:
                messages_there = [for_endpoint(message) for message in messages]
                answer = await self._ask(policy.client.chat.completions, parameters | {"messages": messages_there})
            else:
                answer = await self._ask(policy.client.completions, parameters | {"prompt": raw})
        finally:
            self._in_flight -= 1
        self.times.append((began, time.time() - began))
        reply = reply_of(answer, policy.base_url, is_text=raw is not None)
        if trained:
            how = "length" if reply.truncated else "stop"
            self.said.add(number, messages, tools, reply.message, None, request_id=reply.request_id, finish_reason=how)
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
            if error.status_code in FINAL or error.code in NO_CREDIT:
                raise PolicyError(f"{REFUSES}: {text}") from error
            if error.status_code in (400, 413, 422) and any(words in f"{error} {error.code}".lower() for words in TOO_LONG):
                raise PromptTooLong(text) from error
            raise PolicyError(text if error.status_code < 500 else f"{text}; {tried}") from error
        except openai.APITimeoutError as error:
            raise PolicyError(f"{policy.base_url} did not answer in {policy.timeout:g} s, {tried}") from error
        except openai.APIConnectionError as error:
            raise PolicyError(f"{policy.base_url} cannot be reached, {tried}: {error.__cause__ or error}") from error
        except openai.APIError as error:
            raise PolicyError(f"{policy.base_url}: {error.message}") from error
        policy.served_model = getattr(answer, "model", None) or policy.served_model
        return answer


def parameters_of(sampling: Mapping[str, Any], names: Mapping[str, str | None], *, send_neutral: bool = False) -> dict[str, Any]:
    """The arguments of a request for sampling parameters by vLLM's names. `names`: the endpoint's names for them; None: left out.

    `send_neutral`: also those that ask for what OpenAI does by default. Some endpoints refuse to hear them; vLLM and SGLang would otherwise
    take the value from the model's `generation_config.json`.
    """
    if send_neutral:  # no key of rlx's own configuration, so it would be missing
        sampling = {"repetition_penalty": 1.0, **sampling}
    said = {name: value for name, value in sampling.items() if send_neutral or name not in NEUTRAL or value != NEUTRAL[name]}
    if "max_completion_tokens" in said:
        said.pop("max_tokens", None)
    said |= said.pop("extra_body", {})
    renamed = {new: value for name, value in said.items() if (new := names.get(name, name)) is not None}
    own = {name: renamed.pop(name) for name in OWN if name in renamed}
    return own | ({"extra_body": renamed} if renamed else {})  # names that the `openai` package does not know


def for_endpoint(message: Message) -> Message:
    """A message with OpenAI's keys only: no reasoning, and no name in a tool result."""
    return {key: value for key, value in message.items() if key != "reasoning_content" and (key != "name" or message["role"] != "tool")}


def reply_of(answer: Any, base_url: str, *, is_text: bool) -> Reply:
    """A chat completion, or a completion of raw text, as a reply. Raises PolicyError if the answer is not one, or not a whole one."""
    choices = getattr(answer, "choices", None)
    message = getattr(choices[0], "text" if is_text else "message", None) if choices else None
    if not choices or message is None:
        raise PolicyError(f"{base_url} gave an answer that is not a {'' if is_text else 'chat '}completion: {str(answer)[:200]}")
    reason, usage = choices[0].finish_reason, answer.usage
    if reason in BROKEN:
        raise PolicyError(f"{base_url} broke an answer off: finish_reason={reason}")
    return Reply(
        content=utf8(message if is_text else message.content or ""),
        reasoning=utf8(getattr(message, "reasoning_content", None) or getattr(message, "reasoning", None)),
        calls=() if is_text else tuple(_call(call, number, base_url) for number, call in enumerate(message.tool_calls or ())),
        truncated=reason in CUT,
        request_id=answer.id or "",
        num_prompt_tokens=getattr(usage, "prompt_tokens", None) or 0,
        num_tokens=getattr(usage, "completion_tokens", None) or 0,
    )


def _call(call: Any, number: int, base_url: str) -> Call:
    """A tool call of a message. Some endpoints leave out its type or its id, or give the arguments as an object."""
    function = getattr(call, "function", None)
    if (getattr(call, "type", None) or "function") != "function" or not getattr(function, "name", None):
        raise PolicyError(f"{base_url} gave a tool call that calls no function: {str(call)[:200]}")
    arguments = getattr(function, "arguments", None)
    text = arguments if isinstance(arguments, str) else json.dumps(arguments or {})
    return Call(str(getattr(call, "id", None) or f"call_{number}"), utf8(function.name), utf8(text))  # type: ignore[union-attr]
