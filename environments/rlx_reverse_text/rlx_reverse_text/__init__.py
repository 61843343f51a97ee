"""Reverse a short random word: the task that a character model of under a million parameters learns in a minute.

The reward is 1.0 for the exact answer and 0.0 otherwise, so the mean reward is the accuracy.
A row is `question` ("abc") and `answer` ("cba"). There is no system prompt, so a prompt has a dozen characters.
"""

from __future__ import annotations

import difflib
import random
import string
from typing import Any

import verifiers as vf
from datasets import Dataset


class AnswerParser(vf.Parser):
    """The answer is the whole reply, without surrounding white space."""

    def parse(self, text: str) -> str:
        return text.strip()


def exact(parser: vf.Parser, completion: vf.Messages, answer: str) -> float:
    """1.0 if the reply is the answer."""
    return float(parser.parse_answer(completion) == answer)


def similarity(parser: vf.Parser, completion: vf.Messages, answer: str) -> float:
    """Longest-matching-blocks ratio of reply and answer, 0 to 1. Not part of the reward."""
    reply = (parser.parse_answer(completion) or "")[: 4 * len(answer)]  # matching takes quadratic time
    return difflib.SequenceMatcher(None, reply, answer).ratio()


def build_rows(num_examples: int, min_length: int, max_length: int, seed: int) -> list[dict[str, Any]]:
    """`num_examples` rows. Lengths and letters are uniform; the same seed gives the same rows."""
    rng = random.Random(seed)
    rows = []
    for _ in range(num_examples):
        word = "".join(rng.choices(string.ascii_lowercase, k=rng.randint(min_length, max_length)))
        rows.append({"question": word, "answer": word[::-1], "prompt": [{"role": "user", "content": word}]})
    return rows


def load_environment(
    min_length: int = 3, max_length: int = 6, num_examples: int = 8192, num_eval_examples: int = 256, seed: int = 0
) -> vf.SingleTurnEnv:
    """The environment.

    Args:
        min_length: fewest letters of a word.
        max_length: most letters of a word.
        num_examples: words to train on.
        num_eval_examples: words held out for evaluation, drawn from another seed.
        seed: seed of the words.
    """
    if not 1 <= min_length <= max_length:
        raise ValueError(f"min_length={min_length} and max_length={max_length}: lengths must satisfy 1 <= min_length <= max_length")
    parser = AnswerParser()
    rubric = vf.Rubric(funcs=[exact, similarity], weights=[1.0, 0.0], parser=parser)
    return vf.SingleTurnEnv(
        dataset=Dataset.from_list(build_rows(num_examples, min_length, max_length, seed)),
        eval_dataset=lambda: Dataset.from_list(build_rows(num_eval_examples, min_length, max_length, seed + 1_000_003)),
        parser=parser,
        rubric=rubric,
    )
