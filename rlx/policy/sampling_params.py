"""What a request asks for: its sampling parameters, and a prompt that is raw text.

An environment speaks OpenAI's language (`max_completion_tokens`, `extra_body`, one stop string), the servers speak vLLM's.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from rlx.inference.wire import Sampling
from rlx.policy.base import Message

log = logging.getLogger(__name__)

KNOWN = frozenset(Sampling.__struct_fields__)
PENALTIES = frozenset(
    {"repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias"}
)  # of a request; a run has no key for them


def servers_names(own: Mapping[str, Any]) -> dict[str, Any]:
    """An environment's parameters by vLLM's names. Those that are None have no effect and are left out, and so is `n=1`."""
    asked = {**(own.get("extra_body") or {}), **own}
    asked.pop("extra_body", None)
    asked = {name: value for name, value in asked.items() if value is not None}
    if asked.get("n") == 1:
        del asked["n"]
    if (limit := asked.pop("max_completion_tokens", None)) is not None:
        asked["max_tokens"] = limit
    if isinstance(asked.get("stop"), str):
        asked["stop"] = [asked["stop"]]
    if "logit_bias" in asked:
        asked["logit_bias"] = {int(token): float(bias) for token, bias in asked["logit_bias"].items()}
    return asked


def parameters_of(run: Mapping[str, Any], own: Mapping[str, Any] | None, stop_token_ids: Sequence[int], room: int) -> dict[str, Any]:
    """The parameters of a request, without its seed.

    `run`: the policy's own. `own`: the request's, which override them. `room`: tokens left in the context.
    """
    asked = servers_names(run) | servers_names(own or {})
    asked.pop("seed", None)  # the run's seeds make a request repeatable
    for name in [name for name in asked if name not in KNOWN]:
        _say_unknown(name)
        del asked[name]
    asked["max_tokens"] = min(asked.get("max_tokens") or room, room)
    asked["min_tokens"] = min(asked.get("min_tokens", 0), asked["max_tokens"])
    asked["stop_token_ids"] = [*stop_token_ids, *(asked.get("stop_token_ids") or [])]
    return asked


@functools.cache
def _say_unknown(name: str) -> None:
    log.warning("the server has no sampling parameter %r; requests are sent without it", name)


def before_stop(text: str, stops: Sequence[str], last: int | None = None) -> tuple[str, str | None]:
    """The text up to the stop string that is complete first, as OpenAI's and vLLM's answers have it, and that string; None: there is none.

    `last`: characters of the last token, if only a stop string that this token completes counts: one within the first `min_tokens` tokens
    stops no answer.
    """
    found = []
    for stop in stops:
        begin = text.find(stop, 0 if last is None else max(0, len(text) - last - len(stop) + 1))
        if begin >= 0:
            found.append((begin + len(stop), begin, stop))
    _, end, complete = min(found, default=(0, len(text), None))
    return text[:end], complete


def raw_text(messages: Sequence[Message]) -> str | None:
    """The text of a raw prompt, a single message with the role `text`; None for a conversation."""
    return messages[0]["content"] if len(messages) == 1 and messages[0]["role"] == "text" else None
