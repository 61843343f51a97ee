"""Loss masks, token by token, against texts that these tests write themselves, for several families of chat templates."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from chat_templates import CLOSING, HERMES, LLAMA, OPENING, PLAIN, RETAINING, SMOLLM2, STRIPPING, TEXT, small_tokenizer
from test_policy_chat import ADD, chat_of

from rlx.data.conversations import Conversation, RowError
from rlx.data.masks import Marked, mark
from rlx.data.supervised import Conversations
from rlx.policy.chat import Chat
from rlx.types import TrainingSample

pytestmark = pytest.mark.slow

Parts = list[tuple[str, str | None]]
"""A conversation as pieces of text, each with the role that said it; None: the template's own."""


def asks(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def says(content: str, reasoning: str | None = None, calls: int = 0) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        arguments = [json.dumps({"x": i, "y": "five"}) for i in range(calls)]
        message["tool_calls"] = [{"type": "function", "function": {"name": "add", "arguments": text}} for text in arguments]
    return message


# What the templates write, by hand: the frame of each message, and inside what its role says.


def chatml(message: dict, said: str) -> Parts:
    return [(f"<|im_start|>{message['role']}\n", None), (said, message["role"]), ("<|im_end|>", message["role"]), ("\n", None)]


def hermes_says(message: dict, thinks: bool) -> str:
    thought = f"<think>\n{message['reasoning_content'].strip()}\n</think>\n\n" if thinks and message.get("reasoning_content") else ""
    calls = [json.loads(call["function"]["arguments"]) for call in message.get("tool_calls", [])]
    written = "".join(f'\n<tool_call>\n{{"name": "add", "arguments": {json.dumps(call)}}}\n</tool_call>' for call in calls)
    return thought + message["content"].strip() + written


def hermes(messages: list[dict], tools: list | None, thinks: Callable[[int], bool]) -> Parts:
    parts: Parts = []
    if tools:
        parts += [(f"<|im_start|>system\n<tools>{''.join(map(json.dumps, tools))}</tools><|im_end|>\n", None)]
    for index, message in enumerate(messages):
        if message["role"] == "tool":
            parts += [("<|im_start|>user\n<tool_response>", None), (message["content"], "tool"), ("</tool_response><|im_end|>\n", None)]
        elif message["role"] == "assistant":
            parts += chatml(message, hermes_says(message, thinks(index)))
        else:
            parts += chatml(message, message["content"])
    return parts


def last_question(messages: list[dict]) -> int:
    return max((i for i, message in enumerate(messages) if message["role"] == "user"), default=-1)


def llama(messages: list[dict], tools: list | None) -> Parts:
    parts: Parts = []
    if tools:
        parts += [(f"<|head|>system<|/head|>\n\n{''.join(map(json.dumps, tools))}<|eot_id|>", None)]
    for message in messages:
        said = message["content"].strip()
        if message.get("tool_calls"):
            said = f'{{"name": "add", "parameters": {json.dumps(json.loads(message["tool_calls"][0]["function"]["arguments"]))}}}'
        parts += [(f"<|head|>{message['role']}<|/head|>\n\n", None), (said, message["role"]), ("<|eot_id|>", message["role"])]
    return parts


def smollm2(messages: list[dict], tools: list | None) -> Parts:
    default = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
    given = [] if messages[0]["role"] == "system" else [(f"<|im_start|>system\n{default}<|im_end|>\n", None)]
    return [*given, *(part for message in messages for part in chatml(message, message["content"]))]


FAMILIES: dict[str, tuple[str, str, Callable[[list[dict], list | None], Parts], bool, bool]] = {
    # template, end of turn, what it writes, whether it has tools, whether it shows reasoning
    "chatml": (PLAIN, "<|im_end|>", lambda m, t: [p for x in m for p in chatml(x, x["content"])], False, False),
    "smollm2": (SMOLLM2, "<|im_end|>", smollm2, False, False),
    "hermes": (HERMES, "<|im_end|>", lambda m, t: hermes(m, t, lambda i: False), True, False),
    "qwen3, thinking kept": (RETAINING, "<|im_end|>", lambda m, t: hermes(m, t, lambda i: True), True, True),
    "qwen3, thinking stripped": (STRIPPING, "<|im_end|>", lambda m, t: hermes(m, t, lambda i, q=None: i > last_question(m)), True, True),
    "llama3": (LLAMA, "<|eot_id|>", llama, True, False),
}


def expected(messages: list[dict], tools: list | None, first: int, writes: Any, tokenizer: Any, roles: set[str]) -> list[tuple]:
    """The samples as (ids, trained), from the written texts alone.

    A new sample begins at an answer whose prompt does not begin with the text before. The tokens are those of the whole text; one is
    trained if all of its characters are said by a trained role.
    """
    samples: list[list[tuple[str, bool]]] = []  # pieces of text, each with whether it is trained
    done = first
    last = max((i for i in range(first, len(messages)) if messages[i]["role"] in roles), default=-1)
    for index in range(first, last + 1):
        answer = messages[index]["role"] == "assistant"
        if not answer and index != last:
            continue
        shown = writes(messages[: index + 1], tools)
        spoken = [i for i, (_, role) in enumerate(shown) if role is not None]
        owners, number = {}, -1
        for i in spoken:  # pieces of one message follow each other: what it says, and the end of its turn
            number += i - 1 not in owners
            owners[i] = number
        here = [(text, role in roles and first <= done <= owners.get(i, -1) and (role == "assistant" or text not in ENDS))
                for i, (text, role) in enumerate(shown)]  # fmt: skip
        here = [(text, trained and bool(text)) for text, trained in here]
        if answer:
            here = here[: spoken[-1] + 1]
        before = "".join(text for text, _ in samples[-1]) if samples else None
        whole = "".join(text for text, _ in here)
        head = "".join(text for text, _ in here[: -2 if answer else None])
        if before is not None and head.startswith(before):
            earlier = spans(samples[-1])
            here = [(c, t or (at < len(earlier) and earlier[at])) for at, (c, t) in enumerate(characters(here))]
            samples[-1] = here
        else:
            samples.append(here)
        done = index + 1
        assert whole
    return [tokens_of(sample, tokenizer) for sample in samples]


ENDS = ("<|im_end|>", "<|eot_id|>")


def characters(pieces: list[tuple[str, bool]]) -> list[tuple[str, bool]]:
    return [(c, trained) for text, trained in pieces for c in text]


def spans(pieces: list[tuple[str, bool]]) -> list[bool]:
    return [trained for _, trained in characters(pieces)]


def tokens_of(pieces: list[tuple[str, bool]], tokenizer: Any) -> tuple[list[int], list[bool]]:
    text, trained = "".join(text for text, _ in pieces), spans(pieces)
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    return encoded["input_ids"], [all(trained[a:b]) for a, b in encoded["offset_mapping"]]


def random_conversation(state: random.Random, tools: bool, thinks: bool) -> tuple[list[dict], list | None, int]:
    """Messages, tools, and the index of the first message to train."""

    def text() -> str:
        return "".join(state.choices([*TEXT.split(), " ", "\n", ".", "é", "<", "42", "{}"], k=state.randint(1, 9))).strip() or "yes"

    messages: list[dict] = [{"role": "system", "content": text()}] if state.random() < 0.3 else []
    offered = [ADD] if tools and state.random() < 0.7 else None
    for _ in range(state.randint(1, 4)):
        messages.append(asks(text()))
        for _ in range(state.choice([0, 0, 1, 2]) if offered else 0):
            messages.append(says("", text() if thinks and state.random() < 0.7 else None, calls=1))
            messages.append({"role": "tool", "name": "add", "content": text()})
        messages.append(says(text(), text() if thinks and state.random() < 0.7 else None))
    if state.random() < 0.2:
        messages.append(asks(text()))
    return messages, offered, state.choice([0, 0, 1, len(messages) // 2])


def found(parts: list[Marked]) -> list[tuple[list[int], list[bool]]]:
    return [(part.token_ids, part.trained) for part in parts]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "roles", [{"assistant"}, {"assistant", "user"}, {"assistant", "tool", "system"}], ids=lambda s: ",".join(sorted(s))
)
def test_random_conversations_are_marked_as_the_texts_say(family: str, roles: set[str]) -> None:
    template, end, writes, tools, thinks = FAMILIES[family]
    tokenizer = small_tokenizer(template, end)
    stripped = family == "qwen3, thinking stripped"
    chats = [Chat(tokenizer, keeps_tokens=keeps) for keeps in (False, True)]
    several = 0
    for seed in range(25):
        messages, offered, first = random_conversation(random.Random(seed), tools, thinks)
        wanted = expected(messages, offered, first, writes, tokenizer, roles)
        # `keeps_tokens` keeps an empty thought, which a template would strip: see test_data_real_masks.py.
        for chat in chats[:1] if stripped else chats:
            parts = mark(Conversation(messages=messages, first=first, tools=offered), chat, roles)
            assert found(parts) == wanted, (seed, messages)
        several += len(parts) > 1
    assert (several > 0) == (family == "qwen3, thinking stripped"), "only a template that drops reasoning gives several samples"


def test_every_answer_is_trained_once_after_the_prompt_that_the_policy_gets() -> None:
    chat = Chat(small_tokenizer(STRIPPING))
    messages = [asks("two"), says("2", "one and one"), asks("three"), says("3", "two and one")]
    parts = mark(Conversation(messages=messages, first=0, tools=None), chat)
    trained = [chat.text([token for token, spoken in zip(p.token_ids, p.trained, strict=True) if spoken]) for p in parts]
    assert trained == [f"<think>\n{thought}\n</think>\n\n{n}<|im_end|>" for n, thought in ((2, "one and one"), (3, "two and one"))]
    second = chat.text(parts[1].token_ids)
    assert "one and one" not in second
    assert second.startswith(chat.text(chat.render(messages[:3])))


def test_an_answer_that_the_tokenizer_joins_to_its_prompt_is_encoded_on_its_own() -> None:
    chat = Chat(small_tokenizer(PLAIN))
    merged = chat.tokenizer.encode("\n\n", add_special_tokens=False)
    if len(merged) > 1:
        chat.tokenizer.add_tokens(["\n\n"])
    (part,) = mark(Conversation(messages=[asks("go"), says("\nyes")], first=0, tools=None), chat)
    prompt = chat.render([asks("go")])
    assert part.token_ids[: len(prompt)] == prompt
    assert chat.text(part.token_ids[len(prompt) :]) == "\nyes<|im_end|>"
    assert part.trained == [False] * len(prompt) + [True] * (len(part) - len(prompt))


def test_a_template_that_ends_the_conversation_trains_only_the_end_of_the_turn() -> None:
    chat = Chat(small_tokenizer(CLOSING, "<|eot_id|>"))
    (part,) = mark(Conversation(messages=[asks("go"), says("yes")], first=0, tools=None), chat)
    assert chat.text(part.token_ids).endswith("yes<|im_end|>")


@pytest.mark.parametrize(
    ("template", "messages", "reason"),
    [
        (OPENING, [asks("go"), says("yes")], "does not show an answer as the continuation of its prompt"),
        (PLAIN, [asks("go"), says("a<|im_end|>b")], "a message of role assistant spells <|im_end|>"),
        (PLAIN, [asks("hi<|im_end|>"), says("yes")], "role user spells <|im_end|>.*already rendered"),
        (HERMES, [asks("go"), says("yes", "because")], "does not show the `reasoning_content` of an answer: 'because'"),
        (HERMES, [asks("go"), says("It is 4", "4")], "does not show the `reasoning_content` of an answer: '4'"),
        (HERMES, [asks("go"), says("4", "then 4")], "does not show the `reasoning_content` of an answer: 'then 4'"),
        (LLAMA, [asks("go"), says("I call add", None, 1)], "does not show the `content` of an answer beside a tool call: 'I call add'"),
        (LLAMA, [asks("go"), says("", None, 2)], "one call at once"),
        (PLAIN, [asks("go"), says("", None, 1), says("five")], "not show a tool call of an answer: the call of add has the name 'add'"),
        (PLAIN, [asks("go"), says("I add five to 0", None, 1)], "does not show a tool call"),
        (HERMES.replace("for call in message.tool_calls", "for call in message.tool_calls[:1]"), [asks("go"), says("", None, 2)], "'add'"),
        (PLAIN, [asks("go"), says("")], "an answer says nothing"),
        ("{{ messages[0].content }}", [asks("go"), says("yes")], "continuation of its prompt|does not end the assistant's turn"),
    ],
)
def test_what_cannot_be_marked_exactly_is_refused(template: str, messages: list[dict], reason: str) -> None:
    chat = Chat(small_tokenizer(template, "<|eot_id|>" if template == LLAMA else "<|im_end|>"))
    with pytest.raises(RowError, match=reason.replace("|im_end|", r"\|im_end\|")):
        mark(Conversation(messages=messages, first=0, tools=[ADD] if template == LLAMA else None), chat)


def test_a_row_that_spells_a_mark_may_be_escaped_by_key() -> None:
    chat = chat_of("hermes")

    def samples(text: str, **keys: Any) -> list[TrainingSample]:
        row = {"prompt": f"say {text}", "completion": f"{text}."}
        rows: Any = type("Rows", (list,), {"fills": False, "where": lambda self, index: f"row {index}"})([row])
        return Conversations(name="a", rows=rows, chat=chat, seq_len=256, vocab_size=1 << 20, **keys).samples(0, Counter())

    with pytest.raises(ValueError, match=r"data\.control_tokens=escape"):
        samples("a<|im_end|>b")
    (escaped,), (plain,) = samples("a<|im_end|>b", escapes=True), samples("ab")
    end = chat.stop_token_ids[0]
    assert list(escaped.token_ids).count(end) == list(plain.token_ids).count(end)
    assert "im_end" in chat.text(escaped.token_ids[escaped.loss_mask].tolist()).replace("<|im_end|>", "")


def test_marks_in_a_call_or_in_a_tool_are_refused_too() -> None:
    chat, call = Chat(small_tokenizer(HERMES)), says("", None, 1)
    call["tool_calls"][0]["function"]["arguments"] = json.dumps({"a": "<|im_end|>"})
    with pytest.raises(RowError, match=r"role assistant spells <\|im_end\|>"):
        mark(Conversation(messages=[asks("go"), call], first=0, tools=[ADD]), chat)
    tool = {**ADD, "function": {**ADD["function"], "description": "ends <|im_end|>"}}
    with pytest.raises(RowError, match=r"the tool add spells <\|im_end\|>"):
        mark(Conversation(messages=[asks("go"), says("yes")], first=0, tools=[tool]), chat)


def test_calls_without_listed_tools_are_trained_if_the_template_shows_them() -> None:
    message = says("I call add", None, 1)
    values = {"a": 'say "é" <b>\n', "b": [1, 2.5, True, None, {"c": "it's \\"}], "d": ""}
    message["tool_calls"][0]["function"]["arguments"] = json.dumps(values)
    chat = Chat(small_tokenizer(HERMES))
    (part,) = mark(Conversation(messages=[asks("go"), message], first=0, tools=None), chat)
    assert "it's" in chat.text([token for token, spoken in zip(part.token_ids, part.trained, strict=True) if spoken])


def test_tools_that_a_template_does_not_show_are_refused() -> None:
    with pytest.raises(RowError, match="it ignores tools"):
        mark(Conversation(messages=[asks("go"), says("yes")], first=0, tools=[ADD]), Chat(small_tokenizer(PLAIN)))
