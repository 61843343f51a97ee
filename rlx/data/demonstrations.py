"""Demonstrations for supervised training from environments' rows: the answers of a noisy teacher.

The input is rows as environments give them (`prompt`: messages or `str`), their right answers, and a tokenizer. The functions are pure:
the same seed gives the same demonstrations.
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
    """One prompt and the teacher's answer, which ends with the end-of-turn token."""

    env: str
    prompt_ids: tuple[int, ...]  # [P] ChatML, including the head of the assistant's turn
    answer_ids: tuple[int, ...]  # [C] the last one is the tokenizer's eos

    def __len__(self) -> int:
        """Number of tokens in prompt and answer."""
        return len(self.prompt_ids) + len(self.answer_ids)


def last_question(row: Row) -> str:
    """The text that a copying teacher repeats: the last user message, or the whole prompt if it is a `str`."""
    prompt = row["prompt"]
    if isinstance(prompt, str):
        return prompt
    questions = [message for message in prompt if message["role"] == "user"] or prompt
    content = questions[-1]["content"]
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


def counts_by_weight(total: int, weights: Mapping[str, float]) -> dict[str, int]:
    """Split `total` in proportion to `weights`. The rounding remainder goes to the largest fractions, ties in order of names."""
    scale = total / sum(weights.values())
    counts = {name: int(weight * scale) for name, weight in weights.items()}
    by_remainder = sorted(weights, key=lambda name: (counts[name] - weights[name] * scale, name))
    for name in by_remainder[: total - sum(counts.values())]:
        counts[name] += 1
    return counts


def choose(rows: Sequence[Row], count: int, seed: int) -> list[Row]:
    """`count` rows in random order. How often two rows appear differs by at most one."""
    state = random.Random(seed)
    chosen: list[int] = []
    while len(chosen) < count:
        chosen += state.sample(range(len(rows)), min(len(rows), count - len(chosen)))
    return [rows[i] for i in chosen]


def demonstrate(
    env: str, rows: Sequence[Row], answers: Sequence[str | None], tokenizer: Any, *, teacher_error: float, seed: int
) -> list[Demonstration]:
    """One demonstration per row: the right answer, or with probability `teacher_error` a copy of the question.

    Rows without a known answer (None) always get a copy. Order and length are those of `rows`.
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
    """The demonstration as a sample of one rollout. Its answer tokens are trainable, each with advantage 1."""
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
        temperature=np.ones(len(mask), np.float32),
        versions=np.where(mask, 0, -1).astype(np.int32),
    )
