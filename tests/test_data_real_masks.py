"""Loss masks of known chat templates and renderers: what is trained is what each answer says, behind the prompt that the template writes.

The TRL package ships the templates. The prompts come from `apply_chat_template` itself, and the answers are written here by hand.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from itertools import groupby
from typing import Any

import pytest
from chat_templates import MARKS, real_template, small_tokenizer
from test_data_masks import random_conversation
from test_policy_chat import model_config
from traces import merge, tokens_of

from rlx.data.conversations import Conversation
from rlx.data.masks import Marked, as_turn, mark
from rlx.policy.chat import Chat, continued, load_chat
from rlx.trace import TraceBuilder

pytestmark = pytest.mark.slow

Says = Callable[[dict[str, Any]], str]


def arguments_of(message: dict[str, Any]) -> list[str]:
    return [json.dumps(json.loads(call["function"]["arguments"])) for call in message.get("tool_calls", ())]


def chatml(message: dict[str, Any]) -> str:
    calls = [f'<tool_call>\n{{"name": "add", "arguments": {given}}}\n</tool_call>' for given in arguments_of(message)]
    return "\n".join([message["content"], *calls] if message["content"] else calls) + "<|im_end|>"


def qwen3(message: dict[str, Any]) -> str:
    return f"<think>\n{message.get('reasoning_content', '')}\n</think>\n\n{chatml(message)}"


def llama3(message: dict[str, Any]) -> str:
    called = [f'{{"name": "add", "parameters": {given}}}' for given in arguments_of(message)]
    return (called[0] if called else message["content"].strip()) + "<|eot_id|>"


LLAMA = ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|python_tag|>")
FAMILIES: dict[str, tuple[Says, str, tuple[str, ...], bool, bool]] = {  # -> answers, end of sequence, special tokens, tools, reasoning
    "qwen2_5": (chatml, "<|im_end|>", (), True, False),
    "qwen3": (qwen3, "<|im_end|>", (), True, True),
    "qwen3_training": (qwen3, "<|im_end|>", (), True, True),
    "llama3_1": (llama3, "<|eot_id|>", LLAMA, True, False),
    "llama3_2": (llama3, "<|eot_id|>", LLAMA, True, False),
    "gemma3": (
        lambda message: message["content"].strip() + "<end_of_turn>",
        "<eos>",
        ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"),
        False,
        False,
    ),
    "phi3": (lambda message: message["content"] + "<|end|>", "<|endoftext|>", ("<|endoftext|>", "<|end|>", "<|user|>"), False, False),
}


def tokenizer_of(name: str, eos: str, special: tuple[str, ...]) -> Any:
    tokenizer = small_tokenizer(real_template(name))
    tokenizer.add_special_tokens({"additional_special_tokens": [*MARKS, *special], "eos_token": eos})
    if special:
        tokenizer.bos_token = special[0]
    return tokenizer


def with_decoded_arguments(messages: list[dict]) -> list[dict]:
    """The messages as these templates want them: the arguments of calls as values instead of JSON."""
    return [
        {**m, "tool_calls": [{"function": {**c["function"], "arguments": json.loads(c["function"]["arguments"])}} for c in m["tool_calls"]]}
        if "tool_calls" in m
        else m
        for m in messages
    ]


def check_marks(parts: list[Marked], messages: list[dict], tools: list | None, first: int, says: Says, tokenizer: Any) -> None:
    """Every answer from `first` on is trained once, in order, behind the template's own prompt for it, and nothing else is."""
    answers = [i for i in range(first, len(messages)) if messages[i]["role"] == "assistant"]
    decoded = with_decoded_arguments(messages)
    for part in parts:
        at = 0
        for spoken, run in groupby(part.trained):
            end = at + len(list(run))
            if spoken:
                index = answers.pop(0)
                asked = tokenizer.apply_chat_template(decoded[:index], tools=tools, add_generation_prompt=True, tokenize=False)
                assert tokenizer.decode(part.token_ids[:at]) == asked
                assert tokenizer.decode(part.token_ids[at:end]) == says(messages[index])
            at = end
    assert answers == []


@pytest.mark.parametrize("name", FAMILIES)
def test_known_templates_train_each_answer_behind_their_own_prompt(name: str) -> None:
    says, eos, special, tools, thinks = FAMILIES[name]
    tokenizer = tokenizer_of(name, eos, special)
    chat, several = Chat(tokenizer, keeps_tokens=False), 0  # orchestrator.trajectory_strategy=branching
    for seed in range(12):
        messages, offered, first = random_conversation(random.Random(seed), tools, thinks)
        parts = mark(Conversation(messages=messages, first=first, tools=offered), chat)
        check_marks(parts, messages, offered, first, says, tokenizer)
        several += len(parts) > 1
    assert (several > 0) == (name == "qwen3"), "only a template that drops reasoning gives several samples"


@pytest.mark.parametrize(("name", "renderer"), [("qwen3", "qwen3"), ("llama3_1", "llama-3")])
def test_known_renderers_train_what_their_templates_train(name: str, renderer: str) -> None:
    says, eos, special, tools, thinks = FAMILIES[name]
    tokenizer = tokenizer_of(name, eos, special or ("<|endoftext|>", "<tool_response>", "</tool_response>"))
    chat = load_chat(tokenizer, model_config(renderer=renderer), keeps_tokens=False)  # orchestrator.trajectory_strategy=branching
    for seed in range(12):
        messages, offered, first = random_conversation(random.Random(seed), tools, thinks)
        parts = mark(Conversation(messages=messages, first=first, tools=offered), chat)
        check_marks(parts, messages, offered, first, says, tokenizer)


@pytest.mark.parametrize("strategy", ["interleaved", "branching"])
@pytest.mark.parametrize(("name", "renderer"), [("qwen3", "qwen3"), ("qwen3", "default"), ("llama3_1", "llama-3"), ("qwen2_5", "default")])
def test_rows_have_the_samples_that_a_rollout_with_the_same_words_has(name: str, renderer: str, strategy: str) -> None:
    """The policy says what the row says: its prompts, kept tokens and samples are those of the row, whatever the template drops."""
    says, eos, special, tools, thinks = FAMILIES[name]
    tokenizer = tokenizer_of(name, eos, special or ("<|endoftext|>", "<tool_response>", "</tool_response>"))
    chat = load_chat(tokenizer, model_config(renderer=renderer), keeps_tokens=strategy == "interleaved")
    whole = 0
    for seed in range(12):
        messages, offered, _ = random_conversation(random.Random(seed), tools, thinks)
        said = TraceBuilder()
        turns = []
        for index, message in enumerate(messages):
            if message["role"] == "assistant":
                prompt = continued(chat, said, messages[:index], offered)
                turns.append(as_turn(prompt, chat.encode(says(message))))
                said.add(index, messages[:index], offered, message, turns[-1])
        drafts = merge(turns, "interleaved")
        parts = mark(Conversation(messages=messages, first=0, tools=offered), chat)
        assert [tokenizer.decode(part.token_ids) for part in parts] == [tokenizer.decode(draft.ids) for draft in drafts]
        assert [part.token_ids for part in parts] == [draft.ids.tolist() for draft in drafts]
        sampled = [{n for start, turn in draft.spans for n in range(start, start + len(turn.completion_ids))} for draft in drafts]
        assert [{n for n, trained in enumerate(part.trained) if trained} for part in parts] == sampled
        whole += len(parts) == 1 and len(turns) > 1 and any("reasoning_content" in message for message in messages)
    assert (whole > 3) == ((name, renderer, strategy) == ("qwen3", "qwen3", "interleaved")), "a renderer keeps all reasoning"


def test_what_a_user_says_behind_kept_reasoning_is_trained_at_its_place() -> None:
    tokenizer = tokenizer_of("qwen3", "<|im_end|>", ("<|endoftext|>", "<tool_response>", "</tool_response>"))
    chat = load_chat(tokenizer, model_config(renderer="qwen3"))
    asked = [{"role": "user", "content": text} for text in ("two", "three")]
    answers = [{"role": "assistant", "content": text, "reasoning_content": "so and so"} for text in ("2", "3")]
    messages = [asked[0], answers[0], asked[1], answers[1]]
    (part,) = mark(Conversation(messages=messages, first=0, tools=None), chat, ("assistant", "user"))
    spoken = ["".join(tokenizer.decode([token]) for token, _ in run) for on, run in groupby(
        zip(part.token_ids, part.trained, strict=True), key=lambda pair: pair[1]) if on]  # fmt: skip
    assert spoken == ["two", qwen3(answers[0]), "three", qwen3(answers[1])]


def test_what_a_later_turn_sees_of_earlier_reasoning_is_what_was_chosen() -> None:
    """`keep` shows all of it, `template` what the template shows; where the template drops nothing, both keep the sampled tokens."""
    _, eos, special, _, _ = FAMILIES["qwen3"]
    tokenizer = tokenizer_of("qwen3", eos, special or ("<|endoftext|>", "<tool_response>", "</tool_response>"))
    keeps = load_chat(tokenizer, model_config(renderer="qwen3"))
    template = load_chat(tokenizer, model_config(renderer="qwen3"), keeps_thinking=False)
    prompt: list = [{"role": "user", "content": "two and three?"}]
    answer = {"role": "assistant", "reasoning_content": "let me add", "content": "Five."}
    spelled = "<think>\nlet me add\n</think>\n\nFive.  "  # two spaces that the template would strip
    turn = as_turn(keeps.render(prompt), [*keeps.encode(spelled), keeps.stop_token_ids[0]])
    known = [*turn.prompt_ids.tolist(), *turn.completion_ids.tolist()]
    user, tool = {"role": "user", "content": "sure?"}, {"role": "tool", "tool_call_id": "a", "content": "5"}
    assert keeps.extend(*tokens_of(turn), [*prompt, answer], [user])[: len(known)] == known
    for chat in (template, keeps.plain):
        later = chat.extend(*tokens_of(turn), [*prompt, answer], [user])
        assert later == template.render([*prompt, answer, user])
        assert "let me add" not in tokenizer.decode(later)
        assert chat.extend(*tokens_of(turn), [*prompt, answer], [tool])[: len(known)] == known, "tools answer: the reasoning stays"
