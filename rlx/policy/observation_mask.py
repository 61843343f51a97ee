"""Which tokens of a prompt are what the environment answered: the text of its messages, without the template around it.

    … <|im_end|>\n<|im_start|>tool\n  1  8  <|im_end|>\n<|im_start|>assistant\n
                                      tool tool                                  marked: the two tokens of the tool's result "18"

Only messages that are new since the policy's previous request are marked, so no message is marked twice; the first prompt has none.
If the environment asks twice for an answer to the same messages, the first of the requests that it keeps marks them (below).
Headers, end marks and line breaks of the template are not marked: they are always the same. A token that is partly content is not
marked either. To find a message, the conversation is rendered again with another text in its place: what follows that text also follows
the message. A template that changes the text (an escape, another spacing) hides it; such a message stays unmarked, with a warning.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from rlx.arrays import Int
from rlx.policy.base import Episode, Message, PolicyError
from rlx.policy.chat import Chat
from rlx.policy.sampling_params import raw_text
from rlx.trace import Trace

log = logging.getLogger(__name__)

ROLES = ("user", "tool", "system")
"""A token of a message with the n-th role is marked with n + 1; other tokens with 0."""

PROBE = "probe-content-7351"
_WINDOW = 16  # tokens decoded together to learn the text of the last


class ObservationRecorder(Episode):
    """An `Episode` that marks its traces. Which requests belong to them is known only at the end."""

    __slots__ = ("_how", "_marked")

    def __init__(self, chat: Chat, roles: Collection[str], env: str) -> None:
        """`roles`: which to mark; none: nothing is marked."""
        super().__init__()
        self._how = chat, roles, env
        self._marked: dict[int, Int | None] = {}  # [P] marks of the prompt of each kept request, by its number

    @property
    def trace(self) -> Trace:
        return self._trace(self.said.requests(), {})

    def keep(self, request_ids: Sequence[str]) -> Trace:
        return self._trace(self.said.requests(request_ids), self._marked)  # of an episode's rollouts, one marks a message

    def _trace(self, numbers: Sequence[int], marked: dict[int, Int | None]) -> Trace:
        """The trace of these requests. `marked`: the prompts that are kept already; those of these are added.

        A message is marked in the first request that has it.
        """
        chat, roles, env = self._how
        for number in numbers if roles else ():
            if number not in marked:
                prompt, _, tools, ids = self.said.request(number)
                new = [] if raw_text(prompt) is not None else self._new(number, prompt, marked)
                marked[number] = observation_mask(chat, ids.tolist(), prompt, new, tools or None, env)
        return self.said.trace(numbers, {number: marks for number in numbers if (marks := marked.get(number)) is not None})

    def _new(self, number: int, prompt: Sequence[Message], marked: Iterable[int]) -> list[int]:
        """The messages of a prompt that are new since those of the requests in `marked`.

        A prompt that continues none of them is new from the end of the first prompt on that it continues.
        """
        known, first = ([len(one) for one in self._conversations(numbers) if prompt[: len(one)] == one] for numbers in (
            marked, (other for other in self.said.numbers() if other < number),
        ))  # fmt: skip
        begin = max(known) if known else min(first, default=len(prompt))
        return [place for place in range(begin, len(prompt)) if prompt[place]["role"] in self._how[1]]

    def _conversations(self, numbers: Iterable[int]) -> Iterator[list[Message]]:
        """The messages of requests, without and with their answers."""
        for number in numbers:
            prompt, answer, *_ = self.said.request(number)
            yield prompt
            yield [*prompt, answer]


def observation_mask(
    chat: Chat, ids: Sequence[int], prompt: Sequence[Message], wanted: Sequence[int], tools: list[dict] | None, env: str
) -> Int | None:
    """[P] marks of a prompt; None if nothing is marked. `wanted`: the places of the messages to mark."""
    if not wanted:
        return None
    text = chat.tokenizer.decode(list(ids), skip_special_tokens=False)
    ends = text_ends(chat.tokenizer, ids)
    marks = np.zeros(len(ids), dtype=np.int32)
    for place in wanted:
        message = prompt[place]
        span = None if ends is None else _span(chat, text, prompt, place, tools)
        if span is None:
            _say_hidden(env, str(message["role"]))
            continue
        assert ends is not None
        starts = np.concatenate([[0], ends[:-1]])
        inside = (starts >= span[0]) & (starts < span[1]) & (ends <= span[1])
        marks[inside] = ROLES.index(message["role"]) + 1
    return marks if marks.any() else None


def _span(chat: Chat, text: str, prompt: Sequence[Message], place: int, tools: list[dict] | None) -> tuple[int, int] | None:
    """Where the content of a message is in the prompt's text; None if the template does not show it as it is, or it is empty."""
    content = prompt[place].get("content")
    if not isinstance(content, str) or not content.strip():
        return None
    other = [message if number != place else {**message, "content": PROBE} for number, message in enumerate(prompt)]
    try:
        before, found, after = chat.show(other, tools).rpartition(PROBE)
    except PolicyError:
        return None
    del before
    if not found or not text.endswith(after):
        return None
    end = len(text) - len(after)
    return next(((end - len(one), end) for one in (content, content.strip()) if text[:end].endswith(one)), None)


def text_ends(tokenizer: Any, ids: Sequence[int]) -> Int | None:
    """[P] where the text of each token ends, in characters of the whole text. A token that only begins a character ends where it starts.

    None if the tokens' texts do not add up to the whole: then no token can be placed.
    """
    ends, length, begin, shown = np.zeros(len(ids), dtype=np.int32), 0, 0, ""
    for place in range(len(ids)):
        now = tokenizer.decode(list(ids[begin : place + 1]), skip_special_tokens=False)
        if not now.endswith("\ufffd"):
            length += len(now) - len(shown)
            shown = now
            if place + 1 - begin >= _WINDOW:
                begin = place + 1 - _WINDOW // 2
                shown = tokenizer.decode(list(ids[begin : place + 1]), skip_special_tokens=False)
        ends[place] = length
    return ends if length == len(tokenizer.decode(list(ids), skip_special_tokens=False)) else None


@functools.cache
def _say_hidden(env: str, role: str) -> None:
    log.warning(
        "envs.%s.observation_ce_weights: the chat template does not show a message of the role %s as the environment wrote it (or it has "
        "no text), so its tokens are not learned",
        env,
        role,
    )
