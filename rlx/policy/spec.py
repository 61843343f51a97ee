"""A policy as a record: what a process needs to make it. An environment plays with its own, wherever it runs."""

from __future__ import annotations

import sys
from importlib.metadata import version
from typing import Any

import msgspec

from rlx.config.chat_format import family_of
from rlx.config.schema import ModelConfig
from rlx.policy.base import Policy
from rlx.policy.chat import Chat, load_chat
from rlx.policy.teacher_prompt import Demonstrated
from rlx.policy.tokenizer import Written, described, loaded

KEYS = "name", "renderer", "chat_template_kwargs", "tool_call_parser", "reasoning_parser"  # of `model`, for `load_chat`


class ChatSpec(msgspec.Struct):
    """A `Chat`."""

    tokenizer: Written
    model: dict[str, Any]  # KEYS
    keeps_tokens: bool
    keeps_thinking: bool
    ends: list[int]
    renderers: str | None = None  # version of the package that renders; None: the template does


class EndpointSpec(msgspec.Struct):
    """An `OpenAIPolicy`, but for its seed and its sampling parameters."""

    base_url: str
    api_key: str
    model: str
    timeout: float = 600.0
    max_retries: int = 4
    names: dict[str, str | None] = {}


class PolicySpec(msgspec.Struct, kw_only=True):
    """A `TokenPolicy`; with endpoints an `OpenAIPolicy`, or, if a `chat` is to learn what they say, a `TeacherPolicy`."""

    seed: int  # the run's
    sampling: dict[str, Any] = {}  # default parameters of requests, by vLLM's names
    chat: ChatSpec | None = None
    context_length: int = 0  # limit of prompt and completion tokens together
    exact: bool = False  # do not train on tokens that a request sampled from another distribution than the policy's (`rlx.config.sampling`)
    learn: list[str] = []  # roles of the environment's messages whose tokens are marked, for cross-entropy
    demonstrated: Demonstrated | None = None  # what a teacher reads in addition; its prompts are kept in the trace
    label: str = ""  # prefix of every request id, so that two runs may share a server
    turn_timeout: float | None = None  # seconds for one answer
    deadline: float | None = None  # seconds after which an episode gets no more answers, and is scored as it is; None: no such end
    endpoints: list[EndpointSpec] = []


def spec_of(chat: Chat) -> ChatSpec:
    """What `chat_of` makes an equal chat format of. `chat` is of `load_chat`."""
    if chat.described is not None:
        return chat.described
    assert chat.made_of is not None
    model, keeps_tokens, ends, keeps_thinking = chat.made_of
    keys = {key: getattr(model, key) for key in KEYS} | {"renderer": family_of(model) or "default"}
    written, package = described(chat.tokenizer, model.trust_remote_code), "renderers" if chat.renderer is not None else None
    found = ChatSpec(written, keys, keeps_tokens, keeps_thinking, list(ends), package and version(package))
    chat.described = found
    return found


def chat_of(spec: ChatSpec) -> Chat:
    """The chat format. Raises ValueError or RuntimeError if this Python lacks something for it."""
    tokenizer, model = loaded(spec.tokenizer), ModelConfig(**spec.model)
    try:
        if spec.renderers is not None and (here := version("renderers")) != spec.renderers:
            raise RuntimeError(f"{sys.executable} has renderers {here}, and the run has {spec.renderers}: their prompts may differ")
        return load_chat(tokenizer, model, keeps_tokens=spec.keeps_tokens, ends=spec.ends, keeps_thinking=spec.keeps_thinking)
    except ImportError as error:  # PackageNotFoundError is one
        raise RuntimeError(f"the chat format of {model.name} needs the package {error.name}: install it in this Python") from error


def policy_of(spec: PolicySpec, chat: Chat | None, generator: Any) -> Policy:
    """The policy. `generator` samples for a `TokenPolicy`; the answers of a teacher belong to its `version`."""
    from rlx.policy.tokens import TokenPolicy

    if not spec.endpoints:
        assert chat is not None
        return TokenPolicy(spec, chat, generator)
    from rlx.policy.openai import OpenAIPolicy

    given: dict[str, Any] = {"seed": spec.seed, "sampling": spec.sampling}
    players = [OpenAIPolicy(**msgspec.structs.asdict(endpoint), **given) for endpoint in spec.endpoints]
    if chat is None:
        return players[0]
    from rlx.policy.teacher_policy import TeacherPolicy

    return TeacherPolicy(players, chat, lambda: int(generator.version), spec.context_length, frozenset(spec.learn))
