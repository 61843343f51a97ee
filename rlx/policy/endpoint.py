"""What an OpenAI-compatible endpoint can do as a policy server: does it return token ids and log-probabilities, does it take tools?

`check` asks it before any work. Such an endpoint serves evaluation and synthesis. Training needs rlx's own server: another one does not say
which weights sampled a token, and reports log-probabilities that usually ignore the sampling temperature.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlx.policy.base import PolicyError
from rlx.policy.openai import OpenAIPolicy
from rlx.types import Task

log = logging.getLogger(__name__)

QUESTION = ({"role": "user", "content": "Say yes."},)
TOOL = {
    "type": "function",
    "function": {"name": "noop", "description": "Does nothing.", "parameters": {"type": "object", "properties": {}}},
}


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What an endpoint can do. Each `no_…` is the sentence that says why not; None: it can, or was not asked."""

    no_tokens: str | None  # token ids with log-probabilities
    no_tools: str | None


async def check(policy: OpenAIPolicy, *, tokens: bool = False, tools: bool = False) -> Capabilities:
    """Ask the endpoint for what is needed. Raises PolicyError with one sentence for everything that it lacks.

    `tokens`: token ids and log-probabilities are needed. `tools`: the environment offers tools. The first question is one of the policy's
    own: it fails if the endpoint is not reachable, refuses the key or does not know the model.
    """
    await _ask(policy)
    found = Capabilities(
        no_tokens=await _refusal(policy, tokens=True) if tokens else None,
        no_tools=await _refusal(policy, tokens=False, tools=[TOOL]) if tools else None,
    )
    if lacks := [why for why in (found.no_tokens, found.no_tools) if why is not None]:
        raise PolicyError("; ".join(lacks))
    return found


async def _refusal(policy: OpenAIPolicy, *, tokens: bool, tools: Sequence[Mapping[str, Any]] | None = None) -> str | None:
    """Why the endpoint cannot answer such a request; None if it can."""
    try:
        await _ask(policy.asking_for(tokens), tools)
    except PolicyError as error:
        return str(error) if tools is None else f"{policy.base_url} does not take tools: {error}"
    return None


async def _ask(policy: OpenAIPolicy, tools: Sequence[Mapping[str, Any]] | None = None) -> None:
    """One short request like those of an episode."""
    task = Task(env="check", example_id=0, index=0, row={})
    await policy.episode(task, 0, 0).respond(QUESTION, tools, {"max_tokens": 4, "min_tokens": 0})
