"""Which tokens of a prompt are what the environment answered: the text of its messages, without the template around it.

    … <|im_end|>\n<|im_start|>tool\n  1  8  <|im_end|>\n<|im_start|>assistant\n
                                      tool tool                                  marked: the two tokens of the tool's result "18"

Only messages that are new since the policy's previous request are marked, so no message is marked twice; the first prompt has none.
If the environment asks twice for an answer to the same messages, the first of the requests that it keeps marks them (`LearnedTurns`).
Headers, end marks and line breaks of the template are not marked: they are always the same. A token that is partly content is not
marked either. To find a message, the conversation is rendered again with another text in its place: what follows that text also follows
the message. A template that changes the text (an escape, another spacing) hides it; such a message stays unmarked, with a warning.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from rlx.arrays import Int
from rlx.policy.base import KnownTurns, Message, PolicyError
from rlx.types import Turn

log = logging.getLogger(__name__)

ROLES = ("user", "tool", "system")
"""A token of a message with the n-th role is marked with n + 1; other tokens with 0."""

PROBE = "probe-content-7351"
_WINDOW = 16  # tokens decoded together to learn the text of the last


class Format(Protocol):
    """`rlx.policy.chat.Chat`."""

    tokenizer: Any

    def show(self, messages: list[Message], tools: list[dict] | None = None, answer: bool = True) -> str:
        """The conversation as text."""
        ...


@dataclass(frozen=True, slots=True)
class Asked:
    """A trained request of an episode that learns."""

    prompt: list[Message]
    tools: list[dict] | None
    places: list[int]  # messages of the prompt that were marked when it was asked
    answer: Message | None = None  # None: not yet

    @property
    def said(self) -> list[list[Message]]:
        """The conversation, without and with its answer."""
        return [self.prompt] if self.answer is None else [self.prompt, [*self.prompt, self.answer]]


class LearnedTurns(KnownTurns):
    """`KnownTurns` with marks in the prompts. Which requests belong to the trajectory is known only after the episode.

    A prompt is marked when it is asked. It is marked anew when it is kept, if the request that had marked its messages is not.
    """

    __slots__ = ("_asked", "_how", "_kept")

    def __init__(self, chat: Format, roles: Collection[str], env: str) -> None:
        """`roles`: which to mark; none: nothing is marked."""
        super().__init__()
        self._how = chat, roles, env
        self._asked: dict[int, Asked] = {}  # by the number of the request
        self._kept: dict[int, Turn] = {}  # what `keep` has returned

    def asks(self, number: int, ids: Sequence[int], prompt: list[Message], tools: list[dict] | None) -> Int | None:
        """[P] marks of the prompt of a new request. Call it before sampling: of two requests with one prompt, the first marks it."""
        places = self._places(prompt, [said for asked in self._asked.values() for said in asked.said], ())
        self._asked[number] = Asked(prompt, tools, places)
        return self._marks(ids, self._asked[number])

    def failed(self, number: int) -> None:
        """A request has no answer: whoever asks again marks its messages."""
        self._asked.pop(number, None)

    def says(self, number: int, answer: Message) -> None:
        """A request has this answer."""
        self._asked[number] = replace(self._asked[number], answer=answer)

    @property
    def turns(self) -> tuple[Turn, ...]:
        return tuple(self._marked(sorted(self._turns), {}).values())

    def keep(self, request_ids: Sequence[str]) -> tuple[Turn, ...]:
        numbers = self._among(request_ids)
        self._kept = self._marked(numbers, self._kept)  # an episode of several rollouts marks a message in one of them
        return tuple(self._kept[number] for number in numbers)

    def _marked(self, numbers: Sequence[int], kept: Mapping[int, Turn]) -> dict[int, Turn]:
        """The turns of these requests, after those that are kept already. Each message is marked in the first of them that has it."""
        found = dict(kept)
        said = [each for number in kept if number in self._asked for each in self._asked[number].said]
        for number in numbers:
            turn, asked = self._turns[number][1], self._asked.get(number)
            if asked is not None and number not in found:
                before = [each for other, one in self._asked.items() if other < number for each in one.said]
                places = self._places(asked.prompt, said, before)
                if places != asked.places:
                    turn = replace(turn, answered=self._marks(turn.prompt_ids.tolist(), replace(asked, places=places)))
                said += asked.said
            found.setdefault(number, turn)
        return found

    def _places(self, prompt: Sequence[Message], said: Iterable[Sequence[Message]], before: Iterable[Sequence[Message]]) -> list[int]:
        """The messages of a prompt that are new. `said`: conversations whose messages are marked; a prompt that continues none of them
        is new from the end of the first prompt on, among those `before`.
        """
        known = [len(messages) for messages in said if prompt[: len(messages)] == messages]
        first = [len(messages) for messages in before if prompt[: len(messages)] == messages]
        begin = max(known) if known else min(first, default=len(prompt))
        return [place for place in range(begin, len(prompt)) if prompt[place]["role"] in self._how[1]]

    def _marks(self, ids: Sequence[int], asked: Asked) -> Int | None:
        chat, _, env = self._how
        return answered(chat, ids, asked.prompt, asked.places, asked.tools, env)


def answered(
    chat: Format, ids: Sequence[int], prompt: Sequence[Message], wanted: Sequence[int], tools: list[dict] | None, env: str
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


def _span(chat: Format, text: str, prompt: Sequence[Message], place: int, tools: list[dict] | None) -> tuple[int, int] | None:
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
        "envs.%s.learn: the chat template does not show a message of the role %s as the environment wrote it (or it has no text), "
        "so its tokens are not learned",
        env,
        role,
    )
