"""Reverse a short random word: the task that a character model of under a million parameters learns in a minute.

The reward is 1.0 for the exact answer and 0.0 otherwise, so the mean reward is the accuracy.
A row is `question` ("abc") and `answer` ("cba"). There is no system prompt, so a prompt has a dozen characters.

A quarter of all words, the same for every seed, is held out for evaluation and not trained on.
"""

from __future__ import annotations

import difflib
import random
import string
import zlib
from collections.abc import Iterator
from typing import Any

import verifiers as vf
from datasets import Dataset

EVAL_SEED = 1_000_003  # added to the seed for the evaluation words
OTHERS_SEED = 3_000_017  # and for the words that take the places of held-out ones
HELD_OUT = 4  # one in so many words
GIVE_UP = 10_000  # draws in a row without a new word, after which there are no more


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
    """`num_examples` rows to train on. Lengths and letters are uniform; the same seed gives the same rows.

    Another word takes the place of one that is held out, so the rows around it do not depend on what is held out.
    """
    drawn, others = _words(min_length, max_length, seed), _words(min_length, max_length, seed + OTHERS_SEED)
    rows = []
    for _ in range(num_examples):
        word = next(drawn)
        while is_held_out(word):
            word = next(others)
        rows.append(_row(word))
    return rows


def build_eval_rows(num_examples: int, min_length: int, max_length: int, seed: int) -> list[dict[str, Any]]:
    """At most `num_examples` rows of different held-out words, in an order that follows from the seed."""
    found: dict[str, None] = {}
    misses = 0
    for word in _words(min_length, max_length, seed):
        if len(found) == num_examples or misses == GIVE_UP:
            break
        misses = misses + 1 if word in found or not is_held_out(word) else 0
        if misses == 0:
            found[word] = None
    return [_row(word) for word in found]


def is_held_out(word: str) -> bool:
    """Whether a word is for evaluation."""
    return zlib.crc32(word.encode()) % HELD_OUT == 0


def _words(min_length: int, max_length: int, seed: int) -> Iterator[str]:
    """Endless words."""
    rng = random.Random(seed)
    while True:
        yield "".join(rng.choices(string.ascii_lowercase, k=rng.randint(min_length, max_length)))


def _row(word: str) -> dict[str, Any]:
    return {"question": word, "answer": word[::-1], "prompt": [{"role": "user", "content": word}]}


def load_environment(
    min_length: int = 3, max_length: int = 6, num_examples: int = 8192, num_eval_examples: int = 256, seed: int = 0
) -> vf.SingleTurnEnv:
    """The environment.

    Args:
        min_length: fewest letters of a word.
        max_length: most letters of a word.
        num_examples: words to train on.
        num_eval_examples: most words for evaluation, none of which is trained on.
        seed: seed of the words.
    """
    if not 1 <= min_length <= max_length:
        raise ValueError(f"min_length={min_length} and max_length={max_length}: lengths must satisfy 1 <= min_length <= max_length")
    parser = AnswerParser()
    rubric = vf.Rubric(funcs=[exact, similarity], weights=[1.0, 0.0], parser=parser)
    return vf.SingleTurnEnv(
        dataset=Dataset.from_list(build_rows(num_examples, min_length, max_length, seed)),
        eval_dataset=lambda: Dataset.from_list(build_eval_rows(num_eval_examples, min_length, max_length, seed + EVAL_SEED)),
        parser=parser,
        rubric=rubric,
    )
