"""Demonstrations and the supervised training on them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional

from rlx.config.schema import WarmStartConfig
from rlx.data.demonstrations import Demonstration, choose, counts_by_weight, demonstrate, last_question, to_sample
from rlx.models.tiny import build_model, build_tokenizer
from rlx.train.warm_start import warm_start

WORDS = ["abc", "hello", "word", "xyzzy"]
ROWS = [{"prompt": [{"role": "system", "content": "reverse"}, {"role": "user", "content": word}], "question": word} for word in WORDS]
ANSWERS = [word[::-1] for word in WORDS]
SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
}
SMALL = WarmStartConfig(steps=5, batch_size=8, **SHAPE)


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer(256)


def answers_of(tokenizer, demonstrations):
    return [tokenizer.decode(d.answer_ids) for d in demonstrations]


def test_a_faultless_teacher_gives_the_answers_and_the_end_of_turn(tokenizer):
    demonstrations = demonstrate("words", ROWS, ANSWERS, tokenizer, teacher_error=0.0, seed=0)
    assert answers_of(tokenizer, demonstrations) == [f"{answer}<|im_end|>" for answer in ANSWERS]
    assert tokenizer.decode(demonstrations[0].prompt_ids) == (
        "<|im_start|>system\nreverse<|im_end|>\n<|im_start|>user\nabc<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_teacher_that_always_errs_copies_the_question(tokenizer):
    demonstrations = demonstrate("words", ROWS, ANSWERS, tokenizer, teacher_error=1.0, seed=0)
    assert answers_of(tokenizer, demonstrations) == [f"{word}<|im_end|>" for word in WORDS]


def test_a_teacher_errs_as_often_as_it_should_and_the_same_way_again(tokenizer):
    rows, answers = choose(ROWS, 400, seed=0), ["right"] * 400
    first = demonstrate("words", rows, answers, tokenizer, teacher_error=0.3, seed=1)
    right = sum(text == "right<|im_end|>" for text in answers_of(tokenizer, first))
    assert 240 < right < 320
    assert demonstrate("words", rows, answers, tokenizer, teacher_error=0.3, seed=1) == first
    assert demonstrate("words", rows, answers, tokenizer, teacher_error=0.3, seed=2) != first


def test_a_row_without_a_known_answer_is_copied(tokenizer):
    (demonstration,) = demonstrate("words", ROWS[:1], [None], tokenizer, teacher_error=0.0, seed=0)
    assert answers_of(tokenizer, [demonstration]) == ["abc<|im_end|>"]


def test_the_question_is_the_last_user_message_or_the_whole_text():
    turns = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}, {"role": "user", "content": "three"}]
    assert last_question({"prompt": turns}) == "three"
    assert last_question({"prompt": [{"role": "user", "content": [{"type": "text", "text": "part"}]}]}) == "part"
    assert last_question({"prompt": "plain"}) == "plain"


def test_a_sample_trains_on_the_answer_alone():
    sample = to_sample(Demonstration(env="words", prompt_ids=(1, 5, 8), answer_ids=(9, 2)), group=7)
    assert sample.token_ids.tolist() == [1, 5, 8, 9, 2]
    assert sample.loss_mask.tolist() == [False, False, False, True, True]
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
        ids = torch.tensor([d.prompt_ids + d.answer_ids])
        with torch.no_grad():
            logits = model(input_ids=ids).logits[0]
        start = len(d.prompt_ids)
        losses.append(functional.cross_entropy(logits[start - 1 : -1], ids[0, start:], reduction="none"))
    return torch.cat(losses).mean().item()


def test_five_steps_lower_the_loss_and_repeat_exactly(tokenizer):
    demonstrations = demonstrate("words", ROWS, ANSWERS, tokenizer, teacher_error=0.0, seed=0)
    reported: list[tuple[int, float]] = []
    model = warm_start(SMALL, demonstrations, 256, lambda step, loss: reported.append((step, loss)))
    before, after = answer_loss(build_model(SMALL, 256), demonstrations), answer_loss(model, demonstrations)
    assert after < before - 0.05
    assert [step for step, _ in reported] == [1, 2, 3, 4, 5]
    assert reported[0][1] == pytest.approx(before, abs=1e-5)  # a batch of 8 holds all four twice
    again = warm_start(SMALL, demonstrations, 256, lambda step, loss: None)
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), again.state_dict().values(), strict=True))


def test_a_demonstration_beyond_the_context_is_refused_with_both_lengths():
    long = Demonstration(env="words", prompt_ids=(1,) * 60, answer_ids=(2,) * 10)
    with pytest.raises(ValueError, match=r"70 tokens, but model\.context_length=64"):
        warm_start(SMALL, [long], 64, lambda step, loss: None)
