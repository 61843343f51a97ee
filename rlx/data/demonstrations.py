"""Demonstrations for supervised training from environments' rows: what a noisy teacher would have answered.

Knows rows as environments give them (`prompt`: messages or text), their right answers as texts, and a tokenizer; pure, and
the same for the same seed. Knows nothing of environments, torch or training.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlx.types import TrainingSample

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Demonstration:
    """One prompt and what the teacher said, ended by the end-of-turn token."""

    env: str
    prompt_ids: tuple[int, ...]  # [P] ChatML, up to and with the head of the assistant's turn
    answer_ids: tuple[int, ...]  # [C] the last one is the tokenizer's eos

    def __len__(self) -> int:
        """Tokens of prompt and answer."""
        return len(self.prompt_ids) + len(self.answer_ids)


def last_question(row: Row) -> str:
    """The text that a copying teacher repeats: the last user message, or a text prompt whole."""
    prompt = row["prompt"]
    if isinstance(prompt, str):
        return prompt
    questions = [message for message in prompt if message["role"] == "user"] or prompt
    content = questions[-1]["content"]
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


def counts_by_weight(total: int, weights: Mapping[str, float]) -> dict[str, int]:
    """Split `total` in the proportion of `weights`; what rounding leaves goes to the largest remainders, in order of names."""
    scale = total / sum(weights.values())
    counts = {name: int(weight * scale) for name, weight in weights.items()}
    by_remainder = sorted(weights, key=lambda name: (counts[name] - weights[name] * scale, name))
    for name in by_remainder[: total - sum(counts.values())]:
        counts[name] += 1
    return counts


def choose(rows: Sequence[Row], count: int, seed: int) -> list[Row]:
    """`count` rows in random order, none oftener than another by more than one."""
    state = random.Random(seed)
    chosen: list[int] = []
    while len(chosen) < count:
        chosen += state.sample(range(len(rows)), min(len(rows), count - len(chosen)))
    return [rows[i] for i in chosen]


def demonstrate(
    env: str, rows: Sequence[Row], answers: Sequence[str | None], tokenizer: Any, *, teacher_error: float, seed: int
) -> list[Demonstration]:
    """One demonstration a row: the right answer, or with probability `teacher_error` the question copied.

    Rows without a known answer (None) are always copied. Order and length are those of `rows`.
    """
    state = random.Random(f"{seed}/{env}")
    demonstrations = []
    for row, answer in zip(rows, answers, strict=True):
        errs = state.random() < teacher_error
        text = last_question(row) if errs or answer is None else answer
        prompt = row["prompt"]
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        prompt_ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        answer_ids = [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]
        demonstrations.append(Demonstration(env=env, prompt_ids=tuple(prompt_ids), answer_ids=tuple(answer_ids)))
    return demonstrations


def to_sample(demonstration: Demonstration, group: int = 0) -> TrainingSample:
    """The demonstration as a sample of one rollout: answer tokens are trained on, each with advantage 1."""
    num_prompt, num_answer = len(demonstration.prompt_ids), len(demonstration.answer_ids)
    mask = np.arange(num_prompt + num_answer) >= num_prompt
    return TrainingSample(
        group=group,
        member=0,
        env=demonstration.env,
        token_ids=np.array(demonstration.prompt_ids + demonstration.answer_ids, np.int32),
        loss_mask=mask,
        inference_logprobs=np.zeros(len(mask), np.float32),
        advantages=mask.astype(np.float32),
        temperature=1.0,
        versions=np.where(mask, 0, -1).astype(np.int32),
    )
