"""Known chat templates, tokenizers and renderers, read where packages ship them: what they lose; all that is sampled is trained once.

vLLM ships plain ChatML, mistral_common writes Mistral's templates. The TRL package ships most others. The tokenizers of SmolLM2, Qwen3 and
Llama 3.1 are made of what packages of the extra `dev` ship (`known_tokenizers`).
`RLX_CHAT_TEMPLATES` and `RLX_TOKENIZERS` name folders with them (`chat_templates`); without these, that part is left out.
"""

from __future__ import annotations

import functools
import importlib.util
import random
from pathlib import Path
from typing import Any

import pytest
from chat_templates import SMOLLM2, real_template, real_tokenizers, small_tokenizer
from known_tokenizers import llama3_1, qwen3, smollm2
from test_policy_chat import ADD, check_exactly_once, converse, model_config
from traces import merge
from transformers import AutoTokenizer

from rlx.policy.chat import Chat, load_chat
from rlx.policy.templates import problems

SHIPPED = Path(__file__).resolve().parent.parent / "rlx/config/chat_templates/chatml_tools.jinja"
pytestmark = [pytest.mark.slow, pytest.mark.long]

SERVED = {  # template of the TRL package -> tool parser, reasoning parser, whether a thinking model gives one sample
    "qwen2_5": ("hermes", "none", None),
    "qwen3": ("hermes", "qwen3", False),
    "qwen3_training": ("hermes", "qwen3", True),
    "qwen3_instruct_2507": ("hermes", "none", None),
    "qwen3_5_think": ("qwen3_coder", "qwen3", False),
    "nemotron_3_nano": ("qwen3_coder", "qwen3", False),
    "llama3_1": ("llama3_json", "none", None),
    "llama3_2": ("llama3_json", "none", None),
    "lfm2_v2": ("pythonic", "none", None),
}
REFUSED = {
    "deepseek_r1_distill": "it ignores tools",
    "phi3_5": "it loses the tool's result",
    "qwen2_5_vl": "it loses the model's own tool call",
    "gemma3": "it cannot show a conversation with a tool call",
    "glm4moe": "no parser reads the calls that it writes",
    "gptoss": "no parser reads the calls that it writes",
}
RENDERERS = {"qwen3": "qwen3", "llama3_1": "llama-3"}  # template, which names the tokenizer -> renderer
OWN = {"qwen3": qwen3, "qwen3_instruct_2507": qwen3, "qwen2_5": qwen3, "llama3_1": llama3_1}  # Qwen2.5 has the words of Qwen3


def samples_and_turns(chat: Chat, parser: str, thinks: bool) -> tuple[int, int]:
    samples = turns = 0
    for seed in range(20):
        _, replies = converse(chat, random.Random(seed), parser, thinks=thinks)
        drafts = merge([reply.turn for reply in replies], "interleaved")
        check_exactly_once(replies, drafts)
        samples, turns = samples + len(drafts), turns + len(replies)
    return samples, turns


@pytest.mark.parametrize("name", SERVED)
def test_templates_for_tools_are_served(name: str) -> None:
    chat = Chat(small_tokenizer(real_template(name)))
    tools, reasoning, one = SERVED[name]
    assert list(problems(chat, [ADD])) == []
    assert (chat.tool_parser, chat.reasoning_parser) == (tools, reasoning)
    assert samples_and_turns(chat, tools, thinks=False)[0] == 20 or name in ("nemotron_3_nano", "qwen3_5_think")
    if one is not None:
        assert (samples_and_turns(chat, tools, thinks=True)[0] == 20) is one


@pytest.mark.parametrize("name", REFUSED)
def test_templates_that_lose_something_are_refused(name: str) -> None:
    assert any(REFUSED[name] in text for text in problems(Chat(small_tokenizer(real_template(name))), [ADD]))


def test_plain_chatml_is_refused() -> None:
    folder = Path(str(importlib.util.find_spec("vllm").origin)).parent  # type: ignore[union-attr]
    template = (folder / "transformers_utils" / "chat_templates" / "template_chatml.jinja").read_text()
    assert len(list(problems(Chat(small_tokenizer(template)), [ADD]))) == 2


@pytest.mark.parametrize("version", ["v3", "v7", "v11", "v13"])
def test_mistrals_templates_are_served(version: str) -> None:
    from mistral_common.integrations.chat_templates.chat_templates import generate_chat_template
    from mistral_common.tokens.tokenizers.base import TokenizerVersion

    spm = version in ("v3", "v7")
    template = generate_chat_template(spm, TokenizerVersion(version), False, False, False, None, False, True, None, None, None)
    tokenizer = small_tokenizer(template)
    tokenizer.bos_token = "<|im_start|>"
    chat = Chat(tokenizer)
    assert list(problems(chat, [ADD])) == []
    assert chat.tool_parser == "mistral"
    call = {"type": "function", "id": "call00201", "function": {"name": "add", "arguments": "{}"}}
    chat.show([{"role": "user", "content": "q"}, {"role": "assistant", "content": "", "tool_calls": [call]}], [ADD])  # it accepts our ids


def test_smollm2_is_refused_with_tools_by_its_own_template_and_served_by_the_one_that_we_ship() -> None:
    tokenizer = smollm2()
    said = [{"role": "user", "content": "add two  and three"}, {"role": "assistant", "content": "5 "}, {"role": "user", "content": "sure?"}]
    own = tokenizer.apply_chat_template(said, tokenize=False, add_generation_prompt=True)
    assert own == small_tokenizer(SMOLLM2).apply_chat_template(said, tokenize=False, add_generation_prompt=True), (
        "other tests use an imitation"
    )
    assert any("it ignores tools" in text for text in problems(Chat(tokenizer), [ADD]))
    tokenizer.chat_template = SHIPPED.read_text()
    chat = Chat(tokenizer)
    assert list(problems(chat, [ADD])) == []
    assert chat.tool_parser == "pythonic"
    assert samples_and_turns(chat, "pythonic", thinks=False) == (20, 80)


@functools.cache
def known(name: str) -> Any:
    """The real tokenizer of a template of `OWN`."""
    tokenizer = OWN[name]()
    tokenizer.chat_template = real_template(name)
    return tokenizer


def test_known_tokenizers_have_the_ids_that_their_models_were_trained_with() -> None:
    for name, words, special in (
        ("qwen3", [9707, 1879, 220, 17, 15, 17, 19], {"<|im_end|>": 151645, "<tool_call>": 151657, "</think>": 151668}),
        ("llama3_1", [9906, 1917, 220, 2366, 19], {"<|begin_of_text|>": 128000, "<|eot_id|>": 128009, "<|python_tag|>": 128010}),
    ):
        tokenizer = known(name)
        assert tokenizer("Hello world 2024", add_special_tokens=False).input_ids == words
        assert {text: tokenizer.convert_tokens_to_ids(text) for text in special} == special
        assert tokenizer.decode(tokenizer("a  b\n\n ünï 日本 <x>", add_special_tokens=False).input_ids) == "a  b\n\n ünï 日本 <x>"


@pytest.mark.parametrize("name", OWN)
def test_tools_and_thinking_on_real_tokenizers_with_their_own_templates(name: str) -> None:
    chat = Chat(known(name))
    tools, reasoning, one = SERVED[name]
    assert list(problems(chat, [ADD])) == []
    assert (chat.tool_parser, chat.reasoning_parser) == (tools, reasoning)
    assert samples_and_turns(chat, tools, thinks=False)[0] == 20
    if one is not None:
        assert (samples_and_turns(chat, tools, thinks=True)[0] == 20) is one


@pytest.mark.parametrize("name", RENDERERS)
def test_renderers_keep_what_was_sampled_on_real_tokenizers(name: str) -> None:
    tokenizer = known(name)
    chat = load_chat(tokenizer, model_config(renderer=RENDERERS[name]))
    samples, turns = samples_and_turns(chat, "llama3_json" if name == "llama3_1" else "hermes", thinks=name == "qwen3")
    assert turns == 80
    assert samples <= 24


def test_a_renderer_that_does_not_show_tools_is_refused_as_a_template_is() -> None:
    if "deepseek_v3" not in real_tokenizers():
        pytest.skip("RLX_TOKENIZERS is not set")
    chat = load_chat(AutoTokenizer.from_pretrained(real_tokenizers()["deepseek_v3"]), model_config(renderer="deepseek-v3"))
    assert any("it ignores tools" in text for text in problems(chat, [ADD]))
