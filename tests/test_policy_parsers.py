"""Tool calls and reasoning in answers: what each format reads, and what stays text."""

from __future__ import annotations

import json
import random
import time

import pytest

from rlx.config.schema import ModelConfig
from rlx.policy.parsers import TOOL_PARSERS, read_reasoning

ADD = {"function": {"name": "add", "parameters": {"properties": {"x": {"type": "integer"}, "y": {"type": "string"}}}}}
HERMES = '<tool_call>\n{"name": "add", "arguments": {"x": 2}}\n</tool_call>'
CODER = "<tool_call>\n<function=add>\n<parameter=x>\n2\n</parameter>\n<parameter=y>\n3\n</parameter>\n</function>\n</tool_call>"
READ = {
    "hermes": {
        f"Let me see.\n{HERMES}": ("Let me see.\n", [("add", {"x": 2})]),
        f"{HERMES}\n{HERMES}": ("", [("add", {"x": 2})] * 2),
        HERMES.removesuffix("\n</tool_call>"): ("", [("add", {"x": 2})]),
        '<tool_call>{ "arguments": {"x": 2}, "name": "add"}</tool_call> ': ("", [("add", {"x": 2})]),
        '<tool_call>{"name": "now", "arguments": {}}</tool_call>': ("", [("now", {})]),
    },
    "qwen3_coder": {
        f"Now.{CODER}": ("Now.", [("add", {"x": 2, "y": "3"})]),
        "<tool_call><function=now></function></tool_call>": ("", [("now", {})]),
    },
    "llama3_json": {
        '{"name": "add", "parameters": {"x": 2}}': ("", [("add", {"x": 2})]),
        '<|python_tag|>{"name": "add", "parameters": {"x": {"z": 1}}}; {"name": "add", "arguments": {}}': (
            "",
            [("add", {"x": {"z": 1}}), ("add", {})],
        ),
    },
    "pythonic": {
        "[add(x=2, y='3'), now()]": ("", [("add", {"x": 2, "y": "3"}), ("now", {})]),
        "<|tool_call_start|>[math.add(x=-2)]<|tool_call_end|>": ("", [("math.add", {"x": -2})]),
        "Let me see. <|tool_call_start|>[add(x=2)]<|tool_call_end|>Checking…": ("Let me see.\nChecking…", [("add", {"x": 2})]),
        "<|tool_call_start|>[add(x=2)]<|tool_call_end|>[add(x=2)]<|tool_call_end|> Soon.": ("Soon.", [("add", {"x": 2})]),
        "Now. <|tool_call_start|>[add(x=2)]": ("Now.", [("add", {"x": 2})]),
    },
    "mistral": {
        'Now.[TOOL_CALLS] [{"name": "add", "arguments": {"x": 2}, "id": "123456789"}]': ("Now.", [("add", {"x": 2})]),
        '[TOOL_CALLS] [{"name": "now"}]': ("", [("now", {})]),
        '[TOOL_CALLS]add[ARGS]{"x": 2}[TOOL_CALLS]now[ARGS]{}': ("", [("add", {"x": 2}), ("now", {})]),
        '[TOOL_CALLS]add{"x": {"z": "}"}}': ("", [("add", {"x": {"z": "}"}})]),
    },
}
TEXT = {
    "hermes": [
        "no call",
        "<tool_call>{</tool_call>",
        f"{HERMES}<tool_call>add</tool_call>",
        '<tool_call>{"name": 7}</tool_call>',
        '<tool_call>{"name": "now"}</tool_call>',
    ],
    "qwen3_coder": ["no call", "<tool_call>add</tool_call>", "<tool_call><function=add><parameter=x>2</function></tool_call>"],
    "llama3_json": [
        "no call",
        '{"name": "Paris"}',
        '{"name": "Paris", "country": "France"}',
        "a set {x}",
        '{"x": 5}',
        '{"name": "add", "parameters": [1]}',
        '{"name": "add", "parameters": {',
    ],
    "pythonic": [
        *("no call", "[1, 2]", "[add(x=y)]", "[add(2)]", "[add(**x)]", "[]", "add(x=2)", "So: [add(x=2)]"),
        *("[add(x=...)]", "[add(x={1, 2})]", "[add(x=b'2')]", "[add(x=2j)]", "[add(x={(1, 2): 3})]", "[add(x={[1]: 2})]"),
        *("<|tool_call_start|>add<|tool_call_end|> Soon.", "Soon. <|tool_call_start|>"),
    ],
    "mistral": [
        "no call",
        "[TOOL_CALLS]",
        "[TOOL_CALLS] [1]",
        "[TOOL_CALLS] [",
        '[TOOL_CALLS]add[ARGS]{"x": ',
    ],
}


def test_every_parser_that_the_key_names_exists() -> None:
    keys = {field.name: field.metadata for field in ModelConfig.__dataclass_fields__.values()}
    assert set(keys["tool_call_parser"]["choices"]) == {"auto", "none", *TOOL_PARSERS}
    assert set(READ) == set(TEXT) == set(TOOL_PARSERS)


@pytest.mark.parametrize("name", TOOL_PARSERS)
def test_calls_are_read(name: str) -> None:
    for text, (before, calls) in READ[name].items():
        read = TOOL_PARSERS[name](text, [ADD])
        assert read is not None, text
        assert (read[0], [(call, json.loads(arguments)) for call, arguments, _ in read[1]]) == (before, calls)


def test_ids_that_mistral_writes_stay_if_its_templates_accept_them() -> None:
    listed = '[TOOL_CALLS] [{"name": "add", "arguments": {}, "id": "a1b2c3d4e"}, {"name": "add", "arguments": {}, "id": "short"}]'
    one_by_one = "[TOOL_CALLS]add[CALL_ID]a1b2c3d4e[ARGS]{}[TOOL_CALLS]add[CALL_ID]short[ARGS]{}"
    for text in (listed, one_by_one):
        read = TOOL_PARSERS["mistral"](text, [ADD])
        assert read == ("", [("add", "{}", "a1b2c3d4e"), ("add", "{}", "")])


@pytest.mark.parametrize("name", TOOL_PARSERS)
def test_what_cannot_be_read_stays_text(name: str) -> None:
    for text in TEXT[name]:
        assert TOOL_PARSERS[name](text, [ADD]) is None, text


@pytest.mark.parametrize("name", TOOL_PARSERS)
def test_no_answer_raises_or_takes_long(name: str) -> None:
    state, parts = (
        random.Random(name),
        ["<tool_call>", "</tool_call>", "{", "}", "[", "]", "(", '"', "[TOOL_CALLS]", "<function=", "a", ":"],
    )
    texts = ["".join(state.choices([*parts, '"name": "add"', "<parameter=x>"], k=30)) for _ in range(300)]
    texts += [part * 20_000 for part in parts] + ['{"name": "add", "arguments": ' + "[" * 20_000, "[" + "f(" * 20_000]
    began = time.process_time()
    for text in texts:
        TOOL_PARSERS[name](text, [ADD])
    assert time.process_time() - began < 10


@pytest.mark.parametrize(
    ("text", "parser", "tail", "reasoning", "content"),
    [
        ("<think>\nsum\n</think>\n\nFive.", "qwen3", "assistant\n", "\nsum\n", "\n\nFive."),
        ("\n<think>sum", "qwen3", "assistant\n", "sum", ""),
        ("sum</think>Five.", "qwen3", "assistant\n<think>\n", "sum", "Five."),
        ("sum", "qwen3", "<think>\n", "sum", ""),
        ("Five.", "qwen3", "<think>\n\n</think>\n\n", None, "Five."),
        ("Five <think>.", "qwen3", "", None, "Five <think>."),
        ("sum</think>Five.", "deepseek_r1", "assistant\n", "sum", "Five."),
        ("<think>sum</think>Five.</think>", "deepseek_r1", "", "sum", "Five.</think>"),
        ("<think>sum</think>Five.", "none", "", None, "<think>sum</think>Five."),
    ],
)
def test_reasoning_is_told_from_the_answer(text: str, parser: str, tail: str, reasoning: str | None, content: str) -> None:
    assert read_reasoning(text, parser, tail) == (reasoning, content)
