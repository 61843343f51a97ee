"""The tiny model's tokenizer, chat template and folder."""

from __future__ import annotations

import random

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlx.config.schema import WarmStartConfig
from rlx.models.tiny import CHARACTERS, END, PAD, ROLES, START, UNKNOWN, VOCABULARY, build_model, build_tokenizer, save
from rlx.policy.chat import Chat
from rlx.policy.parsers import TOOL_PARSERS

SMALL = WarmStartConfig(
    hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=16
)


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer(256)


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tokenizer):
    path = tmp_path_factory.mktemp("tiny")
    save(build_model(SMALL, 256), tokenizer, path)
    return path


@pytest.mark.parametrize(
    "text",
    ["", " ", "  a  b ", "a\n\n b\t", "user", "system\n", "superuser tool assistant", "don't , do . it !", f"{START}user\nuser\nhi{END}\n"],
)
def test_decoding_gives_the_encoded_text_back(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_decoding_gives_random_printable_text_back(tokenizer):
    state = random.Random(0)
    for _ in range(200):
        text = "".join(state.choices(CHARACTERS, k=state.randint(1, 40)))
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_marks_have_their_ids_and_roles_in_the_tokenizer(tokenizer):
    assert (tokenizer.eos_token, tokenizer.pad_token, tokenizer.unk_token) == (END, PAD, UNKNOWN)
    assert tokenizer.convert_tokens_to_ids([PAD, START, END, UNKNOWN]) == [0, 1, 2, 3] == tokenizer.encode(PAD + START + END + UNKNOWN)
    assert set(tokenizer.all_special_tokens) == {PAD, START, END, UNKNOWN}
    assert len(tokenizer) == tokenizer.vocab_size == len(VOCABULARY) == 105
    assert tokenizer.encode("é") == [3]


def test_a_role_is_one_token_at_the_head_of_a_message_and_letters_elsewhere(tokenizer):
    messages = [{"role": role, "content": "tool\nuser\n"} for role in ROLES]
    ids = tokenizer.apply_chat_template(messages, return_dict=False)
    heads = [ids[i + 1] for i, token in enumerate(ids) if token == tokenizer.convert_tokens_to_ids(START)]
    assert heads == tokenizer.convert_tokens_to_ids(list(ROLES))
    assert len(ids) == 4 * (len("<role\ntool\nuser\n>\n"[5:]) + 2)
    assert tokenizer.encode("user") == tokenizer.convert_tokens_to_ids(list("user"))


def test_the_template_renders_chatml_and_the_head_of_the_answer(tokenizer):
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": [{"type": "text", "text": "1 + 2"}]}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == f"{START}system\nbe brief{END}\n{START}user\n1 + 2{END}\n{START}assistant\n"


@pytest.mark.parametrize(
    ("form", "said"),
    [
        ("hermes", '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "x"}}\n</tool_call>'),
        ("pythonic", '[add(a=1, b="x")]'),
    ],
)
def test_the_template_renders_tools_calls_and_results_and_the_parser_reads_the_call(form, said):
    function = {"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {"a": {}, "b": {}}}}
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": "x"}}}
    messages = [
        {"role": "user", "content": "1 + 2"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "3", "tool_call_id": "1"},
    ]
    tokenizer = build_tokenizer(256, form)
    assert (Chat(tokenizer).tool_parser, TOOL_PARSERS[form](said, [])) == (form, ("", [("add", '{"a": 1, "b": "x"}', "")]))
    text = tokenizer.apply_chat_template(messages, tools=[{"type": "function", "function": function}], tokenize=False)
    assert text == (f"{START}system\ntools: add(a, b){END}\n{START}user\n1 + 2{END}\n{START}assistant\n{said}{END}\n{START}tool\n3{END}\n")


def test_a_later_prompt_extends_an_earlier_one(tokenizer):
    first = [{"role": "user", "content": " a "}]
    later = [*first, {"role": "assistant", "content": " b\n"}, {"role": "user", "content": "c"}]
    render = lambda messages: tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)  # noqa: E731
    sampled = [*render(first), *tokenizer.encode(" b\n"), tokenizer.eos_token_id]
    assert render(later)[: len(sampled)] == sampled


def test_a_saved_folder_loads_by_the_auto_classes(folder, tokenizer):
    loaded = AutoTokenizer.from_pretrained(folder)
    messages = [{"role": "user", "content": "user\nhi  there"}]
    assert loaded.apply_chat_template(messages, return_dict=False) == tokenizer.apply_chat_template(messages, return_dict=False)
    assert loaded.decode(loaded.encode("a  , b")) == "a  , b"
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.float32
    assert model.config.model_type == "qwen3"
    assert model.config.tie_word_embeddings
    assert model.generation_config.eos_token_id == loaded.eos_token_id == 2
    torch.testing.assert_close(model.state_dict(), build_model(SMALL, 256).state_dict())


def test_the_default_model_has_the_size_its_preset_names():
    assert sum(p.numel() for p in build_model(WarmStartConfig(), 256).parameters()) == 801280


def test_weights_follow_their_own_seed_and_leave_the_global_one_alone():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first, again, other = (
        build_model(WarmStartConfig(**{**vars(SMALL), "seed": seed}), 64).model.embed_tokens.weight for seed in (1, 1, 2)
    )
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
