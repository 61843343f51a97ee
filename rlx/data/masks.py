"""Turns a conversation into token ids with an exact loss mask, in the form in which the policy meets it.

What the assistant says is trained as the policy would have sampled it:

    prompt  = the messages before it, rendered for an answer         ChatML:  …<|im_start|>assistant\\n
    answer  = what the rendered conversation has after this prompt, up to the token that ends the turn      Hello.<|im_end|>

A later prompt is made as in a rollout (`Chat.extend`): it keeps an answer's tokens where the policy's prompt would. A conversation is one
sample if every prompt extends the tokens before it. Templates that drop the reasoning of earlier turns give prompts that do not; there a
new sample begins, and each answer is trained once, after the prompt that the policy would get. What cannot be marked exactly is refused
(`RowError`), never guessed. Other roles are trained by their content alone, without the template's frame.

    user   2+3          token_ids  5 1 8  9 2  6 7 1 8  4 2        a prompt of 3 tokens, a call of 2, a tool's result of 4, an answer of 2
    …                   trained    - - -  x x  - - - -  x x
"""

from __future__ import annotations

import html
import json
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from rlx.data.conversations import Conversation, Message, RowError
from rlx.trace import Turn
from rlx.types import TrainingSample

ASSISTANT = ("assistant",)
PROBES = ("Qx7", "Zk4")  # contents without a common first or last token, to see where a template puts a message's content
THOUGHT = re.compile(r"</?think>")


class Format(Protocol):
    """The chat format of a model: `rlx.policy.chat.Chat`. Its methods raise an error of the template's for messages it cannot show."""

    @property
    def stop_token_ids(self) -> Sequence[int]:
        """The tokens that end the assistant's turn."""
        ...

    @property
    def closing(self) -> int:
        """How many of these tokens follow that of the last answer, to end the whole conversation."""
        ...

    def render(self, messages: Sequence[Any], tools: Any = None) -> list[int]:
        """Ids of the prompt for the assistant's next answer."""
        ...

    def transcript(self, messages: Sequence[Any], tools: Any = None) -> list[int]:
        """Ids of the conversation as it stands, without the head of a next answer."""
        ...

    def extend(self, asked: Any, answer: Any, before: Sequence[Any], new: Sequence[Any], tools: Any = None) -> list[int]:
        """Ids of the prompt after an answer and the messages `new`.

        `asked` [P], `answer` [C]: its prompt and its tokens. `before`: the messages up to the answer, and the answer.
        """
        ...

    def marks_in(self, text: str) -> list[str]:
        """The special tokens that the text spells."""
        ...

    def inert(self, value: Any) -> Any:
        """A message or a tool whose texts spell none."""
        ...

    def text(self, ids: Sequence[int]) -> str:
        """The ids as text, special tokens included."""
        ...

    def encode(self, text: str) -> list[int]:
        """The text as ids, without tokens that begin or end a sequence."""
        ...


@dataclass(slots=True)
class Marked:
    """A conversation, or the part of it that is one sample."""

    token_ids: list[int] = field(default_factory=list)  # [L]
    trained: list[bool] = field(default_factory=list)  # [L]

    def __len__(self) -> int:
        return len(self.token_ids)

    def extend(self, ids: Sequence[int], trained: bool) -> None:
        self.token_ids += ids
        self.trained += [trained] * len(ids)


def mark(conversation: Conversation, chat: Format, roles: Collection[str] = ASSISTANT) -> list[Marked]:
    """The samples of a conversation; the roles in `roles` are trained. Empty if it has no message to train.

    The first token of a sample is never trained, also where a message begins without a prompt or a frame before it.
    Raises RowError if the template cannot show the conversation, shows an answer otherwise than as the continuation of its prompt, or
    leaves out what an answer says.
    """
    messages, tools = conversation.messages, conversation.tools
    found: list[Marked] = []
    sampled: Turn | None = None  # the last answer that is trained, behind its prompt
    done = conversation.first  # messages before this index are trained already, or never
    trained = [i for i in range(done, len(messages)) if messages[i]["role"] in roles]
    if not trained:
        return []
    for said in (*messages, *(tools or ())):
        check_marks(said, chat)
    for index in range(done, trained[-1] + 1):
        if messages[index]["role"] != "assistant":
            continue
        others = [i for i in trained if done <= i < index]
        if "assistant" in roles or others:
            shown = _shown(chat.render, messages[:index], tools)
            prompt = shown if sampled is None else _after(sampled, shown, messages[:done], messages[done:index], tools, chat)
            _continue(found, prompt)
            for other in others:
                _train_content(found[-1], messages[:index], other, tools, chat.render, shown)
        if "assistant" in roles:
            answer = answer_after(shown, messages[: index + 1], tools, chat)
            found[-1].extend(answer, True)
            sampled = as_turn(prompt, answer)
        done = index + 1
    if rest := [i for i in trained if i >= done]:  # behind the last answer
        whole = _shown(chat.transcript, messages[: trained[-1] + 1], tools)
        _continue(found, whole)
        for other in rest:
            _train_content(found[-1], messages[: trained[-1] + 1], other, tools, chat.transcript, whole)
    for sample in found:
        sample.trained[:1] = [False] * len(sample.trained[:1])  # nothing predicts a first token, so no loss reads it
    return found


def check_marks(said: Message, chat: Format) -> None:
    """Raise RowError if a message, or a tool, spells a mark of the chat template."""
    if spelled := chat.marks_in(json.dumps(said, ensure_ascii=False, default=str)):
        what = f"a message of role {said['role']}" if "role" in said else f"the tool {said['function']['name']}"
        raise RowError(f"{what} spells {spelled[0]}, which would begin or end a turn: is it already rendered?")


def _shown(show: Any, messages: list[Message], tools: Any) -> list[int]:
    try:
        return show(messages, tools)
    except Exception as error:  # a template is a program of the model's makers and may raise anything
        raise RowError(f"{type(error).__name__}: {error}") from error


def _after(sampled: Turn, shown: list[int], before: list[Message], new: list[Message], tools: Any, chat: Format) -> list[int]:
    """The prompt that the policy would get after its answer `sampled` and the messages `new`. `shown`: what the template alone writes."""
    so_far = [*sampled.prompt_ids.tolist(), *sampled.completion_ids.tolist()]
    if not new or shown[: len(so_far)] == so_far:
        return shown
    return _shown(lambda messages, tools: chat.extend(sampled.prompt_ids, sampled.completion_ids, before, messages, tools), new, tools)


def as_turn(prompt: Sequence[int], answer: Sequence[int]) -> Turn:
    """A turn that no policy of ours sampled."""
    return Turn(
        prompt_ids=np.asarray(prompt, np.int32),
        completion_ids=np.asarray(answer, np.int32),
        logprobs=np.zeros(len(answer), np.float32),
        versions=np.full(len(answer), -1, np.int32),
        temperature=1.0,
        finish_reason="stop",
    )


def _continue(found: list[Marked], ids: list[int]) -> None:
    """Extend the last sample to `ids`, or begin a new one if `ids` do not begin with it."""
    if not found or ids[: len(found[-1])] != found[-1].token_ids:
        found.append(Marked())
    found[-1].extend(ids[len(found[-1]) :], False)


def answer_after(prompt: list[int], messages: list[Message], tools: Any, chat: Format, *, cut: bool = False) -> list[int]:
    """The ids that the policy would have sampled after `prompt` to say the last of `messages`, with the token that ends the turn.

    `cut`: a length limit cut the message, so the ids end with the text that was said. Raises RowError, as `mark` does.
    """
    whole = _shown(chat.transcript, messages, tools)
    rest = whole[len(prompt) :] if whole[: len(prompt)] == prompt else _spelled_after(prompt, whole, chat)
    stops = frozenset(chat.stop_token_ids)
    ends = [position for position, token in enumerate(rest) if token in stops]
    if len(ends) <= chat.closing:
        names = ", ".join(repr(chat.text([stop])) for stop in chat.stop_token_ids)
        raise RowError(f"the chat template does not end the assistant's turn with one of the tokens {names}")
    if len(ends) > chat.closing + 1:
        raise RowError(f"an answer contains {chat.text([rest[ends[0]]])!r}, which ends a turn; remove it from the text")
    answer = rest[: ends[0] + 1]
    _check_complete(messages[-1], chat.text(answer), chat)
    return _until_cut(answer, messages[-1], chat) if cut else answer


def _until_cut(answer: list[int], message: Message, chat: Format) -> list[int]:
    """`answer` without what the template writes behind the last text of a cut message: the end of a reasoning, line feeds, the end mark."""
    if message.get("tool_calls"):
        raise RowError("a length limit cut an answer with a tool call, and the chat template would complete the call")
    shown, said = chat.text(answer), (message["content"].strip() or (message.get("reasoning_content") or "").strip())
    behind = shown.rfind(said)
    if behind < 0:
        raise RowError(f"the tokens of an answer that a length limit cut cannot be told from the chat template's own: {said[:60]!r}")
    behind += len(said)
    return answer[: bisect_right(range(len(answer) + 1), behind, key=lambda count: len(chat.text(answer[:count]))) - 1]


def _spelled_after(prompt: list[int], whole: list[int], chat: Format) -> list[int]:
    """The ids after `prompt` whose text is that of `whole`.

    The tokenizer may join the end of a prompt and the beginning of an answer (two line feeds) to one token. The policy never samples
    that: its prompt is complete. So the answer is encoded on its own.
    """
    before, shown = chat.text(prompt), chat.text(whole)
    if shown.startswith(before):
        ids = chat.encode(shown[len(before) :])
        if chat.text([*prompt, *ids]) == shown:
            return ids
    raise RowError(
        "the chat template does not show an answer as the continuation of its prompt (it may open a reasoning in the prompt that the "
        "conversation does not show); use a template that does, model.chat_template=FILE"
    )


def _check_complete(message: Message, answer: str, chat: Format) -> None:
    """Raise RowError unless the answer shows the message's text, reasoning and calls: some templates leave out one, without a word."""
    if not any((message.get(key) or "").strip() for key in ("content", "reasoning_content")) and not message.get("tool_calls"):
        raise RowError("an answer says nothing: it has no content, no reasoning and no tool calls, so only the end of the turn is trained")
    parts = [(key, piece.strip()) for key in ("content", "reasoning_content") for piece in THOUGHT.split(message.get(key) or "")]

    def shows(said: str, pieces: list[str]) -> bool:
        return answer.count(said) >= sum(piece.count(said) for piece in pieces)  # the reasoning "4" is not the 4 of "It is 4"

    for key, said in sorted(parts, key=lambda part: -len(part[1])):  # what is left out is missing in a shorter part's count, too
        if not said or shows(said, [piece for _, piece in parts]):
            continue
        # A tokenizer may not have every character, so the text is also compared as it comes out of the tokenizer.
        spelled = [chat.text(chat.encode(piece)).strip() for _, piece in parts if piece]
        if not shows(chat.text(chat.encode(said)).strip(), spelled):
            with_calls = " beside a tool call" if message.get("tool_calls") else ""
            raise RowError(f"the chat template does not show the `{key}` of an answer{with_calls}: {said[:60]!r}")
    _check_calls(message, answer, chat)


def _check_calls(message: Message, answer: str, chat: Format) -> None:
    """Raise RowError unless the answer shows each call's name and the values of its arguments, besides what its text says."""
    text = "\n".join(message.get(key) or "" for key in ("content", "reasoning_content"))
    needed: Counter[str] = Counter()  # how often the calls so far have a piece
    for call in message.get("tool_calls") or ():
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        for what, value in [("name", name), *(("argument", value) for value in _values(_arguments(arguments, answer)))]:
            needed[str(value)] += 1
            if not any(answer.count(one) >= text.count(one) + needed[str(value)] for one in _spellings(value, chat)):
                raise RowError(
                    f"the chat template does not show a tool call of an answer: the call of {name} has the {what} {str(value)[:60]!r}, the "
                    f"rendered answer is {answer[:200]!r}. Use a template that shows calls, model.chat_template=FILE"
                )


def _arguments(text: str, answer: str) -> Any:
    """The arguments of a call, decoded; as they stand if the answer shows them so, or if they are not JSON."""
    try:
        return text if text in answer else json.loads(text)
    except ValueError:
        return text


def _values(value: Any) -> Iterator[Any]:
    """The strings and numbers in `value`, at any depth. Templates may leave out None."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list):
        for inner in value:
            yield from _values(inner)
    elif value is not None:
        yield value


def _spellings(value: Any, chat: Format) -> set[str]:
    """How a template may write a value: as it is, as JSON, as JSON in JSON, as Python, as XML."""
    if not isinstance(value, str):
        return {json.dumps(value), str(value)}
    said = value.strip()
    found = {said, html.escape(said), html.escape(said, quote=False), repr(said)[1:-1]}
    for ascii_only in (True, False):
        once = json.dumps(said, ensure_ascii=ascii_only)[1:-1]
        unsafe = once
        for mark in "<>&'":  # Jinja's `tojson`
            unsafe = unsafe.replace(mark, f"\\u{ord(mark):04x}")
        found |= {once, unsafe, json.dumps(once, ensure_ascii=ascii_only)[1:-1]}
    return found | {chat.text(chat.encode(one)).strip() for one in found}


def _train_content(sample: Marked, messages: list[Message], index: int, tools: Any, show: Any, ids: list[int]) -> None:
    """Mark the content of `messages[index]` in the sample's tokens so far. `ids`: what the template alone writes for them.

    The sample may have earlier answers otherwise, so places count from its end. Two other contents show where the template puts it: what
    both have in common before and behind is the frame.
    """
    if not messages[index]["content"].strip():
        return
    one, two = ([*messages[:index], {**messages[index], "content": text}, *messages[index + 1 :]] for text in PROBES)
    one_ids, two_ids = _shown(show, one, tools), _shown(show, two, tools)
    start, behind = _common(one_ids, two_ids), _common(one_ids[::-1], two_ids[::-1])
    end = len(ids) - behind
    if ids[:start] != one_ids[:start] or ids[end:] != one_ids[len(one_ids) - behind :] or start >= end:
        raise RowError(f"the tokens of a message of role {messages[index]['role']} cannot be told from the chat template's own")
    moved = len(sample) - len(ids)
    if sample.token_ids[start + moved :] != ids[start:]:
        raise RowError(
            f"a message of role {messages[index]['role']} has other tokens behind the answers that the policy would have sampled"
        )
    sample.trained[start + moved : end + moved] = [True] * (end - start)


def _common(one: Sequence[int], two: Sequence[int]) -> int:
    """How many tokens two lists have in common at the beginning."""
    return next((i for i, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), min(len(one), len(two)))


def to_sample(marked: Marked, *, env: str, group: int = 0, member: int = 0) -> TrainingSample:
    """The sample for the trainer. No policy sampled its tokens: they have no version, and no log-probabilities."""
    mask = np.array(marked.trained, bool)
    return TrainingSample(
        group=group,
        member=member,
        env=env,
        token_ids=np.array(marked.token_ids, np.int32),
        loss_mask=mask,
        inference_logprobs=np.zeros(len(mask), np.float32),
        advantages=mask.astype(np.float32),
        temperature=np.ones(len(mask), np.float32),
        versions=np.full(len(mask), -1, np.int32),
    )
