"""Loss masks token by token on the tokenizers of Qwen3, Llama 3.1 and SmolLM2, with their own chat templates.

The prompts are the ids that `apply_chat_template` gives; each answer is written here by hand and encoded on its own.
"""

from __future__ import annotations

import functools
import random
from typing import Any

import pytest
from chat_templates import real_template
from known_tokenizers import llama3_1, qwen3, smollm2
from test_data_masks import asks, found, random_conversation, says
from test_data_real_masks import Says, chatml, llama3, with_decoded_arguments
from test_data_real_masks import qwen3 as with_reasoning
from test_policy_chat import model_config

from rlx.data.conversations import Conversation
from rlx.data.masks import mark
from rlx.policy.chat import Chat, load_chat

pytestmark = pytest.mark.slow

FAMILIES: dict[str, tuple[str, str | None, Says, bool, bool]] = {  # -> tokenizer, TRL's copy of the template, answers, tools, reasoning
    "qwen3": ("qwen3", "qwen3", with_reasoning, True, True),
    "qwen3, reasoning kept": ("qwen3", "qwen3_training", with_reasoning, True, True),
    "qwen2_5": ("qwen3", "qwen2_5", chatml, True, False),  # Qwen3 has the words of Qwen2.5
    "llama3_1": ("llama3_1", "llama3_1", llama3, True, False),
    "smollm2": ("smollm2", None, chatml, False, False),
}
Sample = tuple[list[int], list[bool]]


@functools.cache
def made(name: str) -> Any:
    return {"qwen3": qwen3, "llama3_1": llama3_1, "smollm2": smollm2}[name]()


def known(family: str) -> Any:
    name, template, *_ = FAMILIES[family]
    tokenizer = made(name)
    if template is not None:
        tokenizer.chat_template = real_template(template)
    return tokenizer


def expected(messages: list[dict], tools: list | None, first: int, write: Says, tokenizer: Any) -> list[Sample]:
    """The samples as (ids, trained). A new one begins at a prompt that does not begin with the tokens before."""
    samples: list[Sample] = []
    for index in (i for i in range(first, len(messages)) if messages[i]["role"] == "assistant"):
        asked = with_decoded_arguments(messages[:index])
        prompt = tokenizer.apply_chat_template(asked, tools=tools, add_generation_prompt=True, return_dict=False)
        if not samples or prompt[: len(samples[-1][0])] != samples[-1][0]:
            samples.append(([], []))
        ids, trained = samples[-1]
        answer = tokenizer.encode(write(messages[index]), add_special_tokens=False)
        trained += [False] * (len(prompt) - len(ids)) + [True] * len(answer)
        ids += [*prompt[len(ids) :], *answer]
    return samples


@pytest.mark.parametrize("family", FAMILIES)
def test_random_conversations_have_the_ids_of_each_prompt_and_answer(family: str) -> None:
    _, _, write, tools, thinks = FAMILIES[family]
    tokenizer = known(family)
    chats = [Chat(tokenizer, keeps_tokens=keeps) for keeps in ((False,) if family == "qwen3" else (False, True))]
    several = turns = 0
    for seed in range(12):
        messages, offered, first = random_conversation(random.Random(seed), tools, thinks)
        wanted = expected(messages, offered, first, write, tokenizer)
        for chat in chats:
            assert found(mark(Conversation(messages=messages, first=first, tools=offered), chat)) == wanted, (seed, messages)
        several, turns = several + (len(wanted) > 1), turns + sum(message["role"] == "assistant" for message in messages)
    assert turns > 24, "several turns a conversation"
    assert (several > 0) == (family == "qwen3"), "only a template that drops reasoning gives several samples"


@pytest.mark.parametrize(
    ("family", "reasoning", "prompt", "answer"),
    [  # the ids that the models were trained with, written out
        (
            "qwen3",
            "yes",
            [151644, 872, 198, 3346, 151645, 198, 151644, 77091, 198],
            [151667, 198, 9693, 198, 151668, 271, 9707, 1879, 151645],
        ),
        ("llama3_1", None, [128006, 882, 128007, 271, 3427, 128009, 128006, 78191, 128007, 271], [9906, 1917, 128009]),
        ("smollm2", None, [1, 4093, 198, 2345, 2, 198, 1, 520, 9531, 198], [19556, 905, 2]),
    ],
)
def test_an_answer_and_what_ends_it_are_trained(family: str, reasoning: str | None, prompt: list[int], answer: list[int]) -> None:
    messages = [{"role": "system", "content": "yes"}, asks("go"), says("Hello world", reasoning)]
    ((ids, trained),) = found(mark(Conversation(messages=messages, first=0, tools=None), Chat(known(family))))
    assert ids[-len(prompt + answer) :] == prompt + answer
    assert trained == [False] * (len(ids) - len(answer)) + [True] * len(answer)


@pytest.mark.parametrize("family", ["qwen2_5", "smollm2"])
def test_an_answer_that_begins_with_line_feeds_is_behind_the_whole_prompt(family: str) -> None:
    """The tokenizer joins the line feeds of prompt and answer in the text of the conversation. The policy never samples that."""
    tokenizer, messages = known(family), [asks("go"), says("\n\nyes")]
    assert tokenizer.apply_chat_template(messages, return_dict=False) != expected(messages, None, 0, chatml, tokenizer)[0][0]
    parts = mark(Conversation(messages=messages, first=0, tools=None), Chat(tokenizer))
    assert found(parts) == expected(messages, None, 0, chatml, tokenizer)


def test_a_renderer_keeps_earlier_reasoning_in_one_sample() -> None:
    tokenizer = known("qwen3")
    messages = [asks("go"), says("2", "so it is"), asks("on"), says("3", "and so on")]
    pieces = [
        ("<|im_start|>user\ngo<|im_end|>\n<|im_start|>assistant\n", False),
        ("<think>\nso it is\n</think>\n\n2<|im_end|>", True),
        ("\n<|im_start|>user\non<|im_end|>\n<|im_start|>assistant\n", False),
        ("<think>\nand so on\n</think>\n\n3<|im_end|>", True),
    ]
    encoded = [(tokenizer.encode(text, add_special_tokens=False), trained) for text, trained in pieces]
    wanted = [token for ids, _ in encoded for token in ids], [trained for ids, trained in encoded for _ in ids]
    chat = load_chat(tokenizer, model_config(renderer="qwen3"))
    assert found(mark(Conversation(messages=messages, first=0, tools=None), chat)) == [wanted]
