"""The gradients of packed rows against a plain Hugging Face loop over unpacked conversations, with masks that the test writes itself."""

from __future__ import annotations

import random

import pytest
import torch
from chat_templates import HERMES, STRIPPING, small_tokenizer
from torch.nn import functional
from transformers import Qwen3Config, Qwen3ForCausalLM

from rlx.config.schema import LossTerms
from rlx.data.packing import pack
from rlx.data.supervised import Conversations, SupervisedSource
from rlx.losses.base import Objective
from rlx.losses.sft import sft
from rlx.models.policy import PolicyModel
from rlx.policy.chat import Chat
from rlx.train.step import PolicyTrainer

TEXT = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]


class Rows(list):
    fills = False

    def where(self, index: int) -> str:
        return f"row {index}"


def conversations(state: random.Random) -> Rows:
    """Conversations of one to three turns, with thoughts."""
    rows = Rows()
    for _ in range(6):
        messages = []
        for _ in range(state.randint(1, 3)):
            messages.append({"role": "user", "content": " ".join(state.choices(TEXT, k=4))})
            messages.append({"role": "assistant", "content": state.choice(TEXT), "reasoning_content": " ".join(state.choices(TEXT, k=3))})
        rows.append({"messages": messages})
    return rows


def answers(messages: list[dict], strips: bool) -> list[tuple[str, str]]:
    """(everything before an answer, the answer) of each answer, as the templates write them."""
    found, before = [], ""
    for number, message in enumerate(messages):
        if message["role"] == "user":
            before += f"<|im_start|>user\n{message['content']}<|im_end|>\n<|im_start|>assistant\n"
            continue
        thought = f"<think>\n{message['reasoning_content']}\n</think>\n\n" if strips else ""
        found.append((before, f"{thought}{message['content']}<|im_end|>"))
        before += f"{message['content']}<|im_end|>\n"
        assert number
    return found


@pytest.mark.parametrize("strips", [False, True], ids=["one sample a row", "a sample for each answer"])
def test_gradients_are_those_of_a_plain_loop_over_unpacked_rows(strips: bool) -> None:
    tokenizer = small_tokenizer(STRIPPING if strips else HERMES)
    rows = conversations(random.Random(0))
    if not strips:
        for row in rows:
            for message in row["messages"]:
                message.pop("reasoning_content", None)
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    model = Qwen3ForCausalLM(Qwen3Config(vocab_size=len(tokenizer), head_dim=8, max_position_embeddings=512, **shape)).double()
    plain = Qwen3ForCausalLM(model.config).double()
    plain.load_state_dict(model.state_dict())

    total, count = torch.zeros((), dtype=torch.float64), 0
    for row in rows:
        for before, answer in answers(row["messages"], strips):
            prompt, said = (tokenizer.encode(text, add_special_tokens=False) for text in (before, answer))
            logits = plain(input_ids=torch.tensor([prompt + said])).logits[0]
            total = total + functional.cross_entropy(logits[len(prompt) - 1 : -1], torch.tensor(said), reduction="sum")
            count += len(said)
    (total / count).backward()

    examples = Conversations(name="rows", rows=rows, chat=Chat(tokenizer), seq_len=500, vocab_size=len(tokenizer))
    (mini_batch,) = pack(SupervisedSource([(examples, 1.0)], batch_size=6, seed=3).receive(0), rank=0, ranks=1, tokens=500).mini_batches
    trainer = PolicyTrainer(
        PolicyModel(model), Objective(sft, LossTerms(aggregate="token_mean")), torch.optim.SGD(model.parameters(), lr=1)
    )
    stats = trainer.accumulate_gradients(mini_batch)
    assert mini_batch.num_loss_tokens == count
    assert float(stats.sums["loss/total"]) == pytest.approx(float(total / count), rel=1e-6)
    for (name, mine), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-5, atol=1e-7, msg=name)
