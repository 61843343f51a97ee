"""Demonstrations and the supervised training on them."""

from __future__ import annotations

import json
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch.nn import functional

from rlx.config.checks import check
from rlx.config.load import compose
from rlx.config.schema import WarmStartConfig
from rlx.config.validate import Origins
from rlx.config.warm_start import supervised
from rlx.data.conversations import Conversation
from rlx.data.demonstrations import choose, counts_by_weight
from rlx.data.masks import Marked, mark, to_sample
from rlx.data.packing import pack
from rlx.models import tiny
from rlx.models.tiny import build_model, build_tokenizer
from rlx.parallel.mesh import one_process
from rlx.paths import RunPaths
from rlx.policy.chat import Chat
from rlx.policy.source import source_of
from rlx.trace import Turn
from rlx.train.build import build

WORDS = ["abc", "hello", "word", "xyzzy"]
ROWS = [{"prompt": [{"role": "system", "content": "reverse"}, {"role": "user", "content": word}], "question": word} for word in WORDS]
ANSWERS = [word[::-1] for word in WORDS]
SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
}
SMALL = WarmStartConfig(steps=5, batch_size=8, **SHAPE)


def turn_of(prompt, completion):
    zeros = np.zeros(len(completion), np.float32)
    return Turn(
        prompt_ids=np.array(prompt),
        completion_ids=completion,
        logprobs=zeros,
        versions=zeros.astype(int),
        temperature=1.0,
        finish_reason="stop",
    )


@pytest.fixture(scope="module")
def chat():
    return Chat(build_tokenizer(256))


def demonstrate(prompt, played, chat, tools=None):
    return mark(Conversation(messages=[*prompt, *played], first=len(prompt), tools=tools), chat)


def shown(chat, demonstration):
    """The demonstration as text, with `[` and `]` around what is trained."""
    text, inside = "", False
    for token, spoken in zip(demonstration.token_ids, demonstration.trained, strict=True):
        if spoken != inside:
            text, inside = text + ("[" if spoken else "]"), spoken
        text += chat.tokenizer.decode([token])
    return text + "]" * inside


def demonstrations_of(chat):
    return [
        demonstration
        for row, answer in zip(ROWS, ANSWERS, strict=True)
        for demonstration in demonstrate(row["prompt"], [{"role": "assistant", "content": answer}], chat)
    ]


def test_the_answer_and_the_end_of_turn_are_trained(chat):
    demonstrations = demonstrations_of(chat)
    assert len(demonstrations) == 4
    assert shown(chat, demonstrations[0]) == (
        "<|im_start|>system\nreverse<|im_end|>\n<|im_start|>user\nabc<|im_end|>\n<|im_start|>assistant\n[cba<|im_end|>]"
    )


ADD = {"type": "function", "function": {"name": "add", "parameters": {"properties": {"x": {}, "y": {}}}}}
PLAYED = [
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "a", "type": "function", "function": {"name": "add", "arguments": '{"x": 2, "y": 3}'}}],
    },
    {"role": "tool", "tool_call_id": "a", "content": "5"},
    {"role": "assistant", "content": "It is 5."},
]


def test_tools_stand_in_the_prompt_and_all_turns_of_the_teacher_are_trained_in_one_sample(chat):
    (demonstration,) = demonstrate([{"role": "user", "content": "2+3"}], PLAYED, chat, [ADD])
    assert shown(chat, demonstration) == (
        "<|im_start|>system\ntools: add(x, y)<|im_end|>\n<|im_start|>user\n2+3<|im_end|>\n<|im_start|>assistant\n"
        '[<tool_call>\n{"name": "add", "arguments": {"x": 2, "y": 3}}\n</tool_call><|im_end|>]\n'
        "<|im_start|>tool\n5<|im_end|>\n<|im_start|>assistant\n[It is 5.<|im_end|>]"
    )


def test_the_call_of_a_demonstration_is_one_that_the_policy_reads(chat):
    (demonstration,) = demonstrate([{"role": "user", "content": "2+3"}], PLAYED, chat, [ADD])
    start = demonstration.trained.index(True)
    length = demonstration.trained[start:].index(False)
    said = np.array(demonstration.token_ids[start : start + length])
    parsed = chat.parse(turn_of(demonstration.token_ids[:start], said), [ADD])
    assert [(call.name, json.loads(call.arguments)) for call in parsed.calls] == [("add", {"x": 2, "y": 3})]


class Stripping:
    """A format whose later prompts drop the first token of earlier answers, as some templates drop reasoning. Tokens are characters."""

    stop_token_ids = (ord("."),)
    closing = 0

    def marks_in(self, text):
        return []

    def text(self, ids):
        return "".join(map(chr, ids))

    def encode(self, text):
        return list(map(ord, text))

    def transcript(self, messages, tools=None):
        last = max((i for i, m in enumerate(messages) if m["role"] == "assistant"), default=-1)
        earlier = [m["content"][1:] if m["role"] == "assistant" and i < last else m["content"] for i, m in enumerate(messages)]
        return [ord(c) for c in "".join(f"{text}." for text in earlier)]

    def render(self, messages, tools=None):
        return [ord(c) for m in messages for c in f"{m['content'][m['role'] == 'assistant' :]}."]

    def extend(self, asked, answer, before, new, tools=None):
        return self.render([*before, *new])


def test_a_template_that_drops_earlier_reasoning_gives_a_demonstration_for_each_turn():
    played = [{"role": "assistant", "content": "?a"}, {"role": "user", "content": "q"}, {"role": "assistant", "content": "?b"}]
    texts = [
        ("".join(map(chr, d.token_ids)), "".join("x" if s else "-" for s in d.trained))
        for d in demonstrate([{"role": "user", "content": "p"}], played, Stripping())
    ]
    assert texts == [("p.?a.", "--xxx"), ("p.a.q.?b.", "------xxx")]


def test_a_sample_trains_on_the_teachers_tokens_alone():
    spoken = [False, False, False, True, True]
    sample = to_sample(Marked(token_ids=[1, 5, 8, 9, 2], trained=spoken), env="words", group=7)
    assert sample.token_ids.tolist() == [1, 5, 8, 9, 2]
    assert sample.loss_mask.tolist() == spoken
    assert sample.advantages.tolist() == [0, 0, 0, 1, 1]
    assert sample.group == 7
    assert sample.token_ids.dtype == np.int32


def test_examples_are_shared_out_by_weight_without_a_rest():
    assert counts_by_weight(10, {"a": 1.0, "b": 2.0}) == {"a": 3, "b": 7}
    assert counts_by_weight(4096, {"a": 1.0, "b": 1.0, "c": 1.0}) == {"a": 1366, "b": 1365, "c": 1365}
    assert counts_by_weight(5, {"a": 1.0, "b": 0.0}) == {"a": 5, "b": 0}


def test_rows_are_chosen_evenly_whether_there_are_too_many_or_too_few():
    rows = [{"id": i} for i in range(10)]
    assert len({row["id"] for row in choose(rows, 6, seed=0)}) == 6
    many = [row["id"] for row in choose(rows, 25, seed=0)]
    assert {many.count(i) for i in range(10)} == {2, 3}


def answer_loss(model, demonstrations):
    """Mean cross-entropy over answer tokens, one demonstration at a time."""
    losses = []
    for d in demonstrations:
        ids = torch.tensor([d.token_ids])
        with torch.no_grad():
            logits = model(input_ids=ids).logits[0]
        start = d.trained.index(True)
        losses.append(functional.cross_entropy(logits[start - 1 : -1], ids[0, start:], reduction="none"))
    return torch.cat(losses).mean().item()


@pytest.fixture
def trained(tmp_path, chat):
    """A function that runs the warm start's configuration as the trainer role does: (model, records of the steps)."""

    def train(rows, *more):
        shape = [f"model.warm_start.{name}={value}" for name, value in {"steps": 5, "batch_size": 8, **SHAPE}.items()]
        data = tmp_path / "rows.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        config = compose(["hardware=cpu", *shape, *more], {}).cfg
        cfg = supervised(config, data, tmp_path / "sft", 1)
        assert check(cfg, Origins()) == []
        tiny.save(build_model(config.model.warm_start, config.model.context_length), chat.tokenizer, tmp_path / "initial")
        trainer = build(cfg, str(tmp_path / "initial"), one_process(torch.device("cpu")), lambda phase: nullcontext())
        source = source_of(cfg, RunPaths(tmp_path / "sft"), trainer.mesh, str(tmp_path / "initial"))
        records = []
        for step in range(cfg.max_steps):
            batch = pack(source.receive(step, lambda: None), rank=0, ranks=1, tokens=cfg.micro_batch_tokens)
            records.append(trainer.train_batch(batch) | source.report(step))
        trainer.model.hf.set_attn_implementation("sdpa")  # the packed attention works only on the trainer's rows
        return trainer.model.hf, records

    return train


def test_five_steps_lower_the_loss_and_repeat_exactly(chat, trained):
    rows = [{"prompt": row["prompt"], "completion": answer} for row, answer in zip(ROWS, ANSWERS, strict=True)]
    demonstrations = demonstrations_of(chat)
    model, records = trained(rows)
    before, after = answer_loss(build_model(SMALL, 256), demonstrations), answer_loss(model, demonstrations)
    assert after < before - 0.05
    assert records[0]["loss/nll"] == pytest.approx(before, abs=1e-5)  # a batch of 8 holds all four twice
    rates = [record["optim/lr"] for record in records]
    assert rates == pytest.approx([3e-3 * step / 5 for step in range(1, 6)]), "the warm-up of twenty steps is cut to five"
    again, _ = trained(rows)
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), again.state_dict().values(), strict=True))


def test_a_demonstration_beyond_the_context_is_left_out_and_counted(trained):
    rows = [{"prompt": "a", "completion": "b" * 60}, *({"prompt": word, "completion": word} for word in WORDS)]
    _, records = trained(rows, "model.context_length=64", "seq_len=64")
    assert sum(record["data/overlong"] for record in records) == 8  # 40 places for five rows
    assert max(record["batch/tokens"] for record in records) < 8 * 64
