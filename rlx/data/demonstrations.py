"""Demonstrations for supervised training: conversations that a teacher wrote, as token ids.

`rlx.envs.answers` gets the conversations from environments. This module chooses rows and makes ids from conversations, in the form in
which the policy meets them: every prompt is rendered as it is for the policy, tools included. The functions are pure.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from rlx.types import TrainingSample

Row = Mapping[str, Any]
Message = Mapping[str, Any]


class Format(Protocol):
    """The chat format of a model: `rlx.policy.chat.Chat`."""

    @property
    def stop_token_ids(self) -> Sequence[int]:
        """The tokens that end the assistant's turn."""
        ...

    def render(self, messages: Sequence[Any], tools: Any = None) -> list[int]:
        """Ids of the prompt for the assistant's next answer."""
        ...

    def transcript(self, messages: Sequence[Any], tools: Any = None) -> list[int]:
        """Ids of the conversation as it stands, without the head of a next answer."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Demonstration:
    """One conversation, or a part of it in which each prompt extends the tokens before.

    A prompt of three tokens, the teacher's call of two, a tool result of four and the teacher's answer of two, each with its end of turn:

        token_ids  5 1 8  9 2  6 7 1 8  4 2
        spoken     - - -  x x  - - - -  x x
    """

    env: str
    token_ids: tuple[int, ...]  # [L]
    spoken: tuple[bool, ...]  # [L] the teacher wrote this token: it is trained on

    def __len__(self) -> int:
        return len(self.token_ids)


def counts_by_weight(total: int, weights: Mapping[str, float]) -> dict[str, int]:
    """Split `total` in proportion to `weights`. The rounding remainder goes to the largest fractions, ties in order of names."""
    scale = total / sum(weights.values())
    counts = {name: int(weight * scale) for name, weight in weights.items()}
    by_remainder = sorted(weights, key=lambda name: (counts[name] - weights[name] * scale, name))
    for name in by_remainder[: total - sum(counts.values())]:
        counts[name] += 1
    return counts


def choose(rows: Sequence[Row], count: int, seed: int) -> list[Row]:
    """`count` rows in random order. How often two rows appear differs by at most one."""
    state = random.Random(seed)
    chosen: list[int] = []
    while len(chosen) < count:
        chosen += state.sample(range(len(rows)), min(len(rows), count - len(chosen)))
    return [rows[i] for i in chosen]


def demonstrate(
    env: str, prompt: Sequence[Message], played: Sequence[Message], chat: Format, tools: Sequence[Mapping[str, Any]] | None = None
) -> list[Demonstration]:
    """The demonstrations of one conversation: `prompt`, then `played`, whose assistant messages are the teacher's.

    One demonstration, if every prompt extends the tokens before it; otherwise (a template that drops earlier reasoning) it is split
    where that fails. Raises ValueError if the template does not show an answer as the continuation of its prompt.
    """
    found: list[tuple[list[int], list[bool]]] = []
    messages, functions = list(prompt), list(tools) if tools else None
    for message in played:
        if message["role"] == "assistant":
            ids = chat.render(messages, functions)
            answer = _answer(ids, chat.transcript([*messages, message], functions), chat.stop_token_ids, env)
            if not found or ids[: len(found[-1][0])] != found[-1][0]:
                found.append(([], []))
            tokens, spoken = found[-1]
            spoken += [False] * (len(ids) - len(tokens)) + [True] * len(answer)
            tokens += [*ids[len(tokens) :], *answer]
        messages.append(message)
    return [Demonstration(env=env, token_ids=tuple(tokens), spoken=tuple(spoken)) for tokens, spoken in found]


def _answer(prompt: list[int], whole: list[int], stops: Sequence[int], env: str) -> list[int]:
    """The ids that the model would have sampled after `prompt`: the rest of `whole` up to the end of the turn."""
    if whole[: len(prompt)] != prompt:
        raise ValueError(f"envs.{env}: the chat template does not continue the prompt with the answer, so there is nothing to learn from")
    rest = whole[len(prompt) :]
    ends = [position for position, token in enumerate(rest) if token in stops]
    if not ends:
        raise ValueError(f"envs.{env}: the chat template does not end the assistant's turn with one of the tokens {list(stops)}")
    return rest[: ends[0] + 1]


def to_sample(demonstration: Demonstration, group: int = 0) -> TrainingSample:
    """The demonstration as a sample of one rollout. The teacher's tokens are trainable, each with advantage 1."""
    mask = np.array(demonstration.spoken, bool)
    return TrainingSample(
        group=group,
        member=0,
        env=demonstration.env,
        token_ids=np.array(demonstration.token_ids, np.int32),
        loss_mask=mask,
        inference_logprobs=np.zeros(len(mask), np.float32),
        advantages=mask.astype(np.float32),
        temperature=np.ones(len(mask), np.float32),
        versions=np.where(mask, 0, -1).astype(np.int32),
    )
