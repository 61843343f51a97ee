"""Sums and differences in three levels: the task in which a character model of under a million parameters learns to calculate.

The reward is 1.0 for a right answer and 0.0 otherwise, so the mean reward is the accuracy.
A row is `question` ("3 + 4 =") and `answer` ("7"). There is no system prompt, so a prompt has a dozen characters.
With `words=true` a language model is asked ("What is 3 + 4? End with the number."), and the last number of its reply is the answer.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from typing import Any

import verifiers as vf
from datasets import Dataset

SHOTS_SEED = 2_000_003  # added to the seed for the solved problems of `shots`


@dataclass(frozen=True)
class Level:
    """The expressions of one level. Numbers of terms and digits are uniform in their ranges, both ends included."""

    meaning: str
    operators: str
    terms: tuple[int, int]
    digits: int


LEVELS: dict[int, Level] = {
    1: Level("the sum of two one-digit numbers", "+", (2, 2), 1),
    2: Level("sums and differences of two or three numbers of one digit", "+-", (2, 3), 1),
    3: Level("sums and differences of two or three numbers of two digits", "+-", (2, 3), 2),
}


def build_rows(level: int, num_examples: int, seed: int, words: bool = False) -> list[dict[str, Any]]:
    """`num_examples` rows of a level. The same seed gives the same rows. `words`: the question is a sentence."""
    spec = LEVELS[level]
    rng = random.Random(seed)
    smallest = 0 if spec.digits == 1 else 10 ** (spec.digits - 1)
    rows = []
    for _ in range(num_examples):
        value = rng.randint(smallest, 10**spec.digits - 1)
        text = str(value)
        for _ in range(rng.randint(*spec.terms) - 1):
            operator, term = rng.choice(spec.operators), rng.randint(smallest, 10**spec.digits - 1)
            value += term if operator == "+" else -term
            text += f" {operator} {term}"
        question = f"What is {text}? End with the number." if words else f"{text} ="
        rows.append({"question": question, "answer": str(value)})
    return rows


def steps(expression: str) -> str:
    """The calculation of an expression from left to right: `3 + 4 - 9` → `3 + 4 = 7. 7 - 9 = -2.`"""
    value, *rest = expression.split()
    said = []
    for operator, term in zip(rest[::2], rest[1::2], strict=True):
        result = int(value) + (int(term) if operator == "+" else -int(term))
        said.append(f"{value} {operator} {term} = {result}.")
        value = str(result)
    return " ".join(said)


def solved(row: dict[str, Any], words: bool) -> list[dict[str, str]]:
    """A problem and its solution as a conversation; with `words` the solution has every step."""
    expression = row["question"].removeprefix("What is ").partition("?")[0]
    said = steps(expression) if words else row["answer"]
    return [{"role": "user", "content": row["question"]}, {"role": "assistant", "content": said}]


class AnswerParser(vf.Parser):
    """The answer is the whole reply, without surrounding white space."""

    def parse(self, text: str) -> str:
        return text.strip()


class LastNumberParser(vf.Parser):
    """The answer is the last whole number of the reply; a reply without one is its own answer. `7.0` and `1,234` are numbers, too."""

    def parse(self, text: str) -> str:
        numbers = re.findall(r"-?\d+(?:,\d{3})*(?:\.\d+)?", text)
        if not numbers:
            return text.strip()
        whole, _, fraction = numbers[-1].replace(",", "").partition(".")
        return whole if not fraction.strip("0") else f"{whole}.{fraction}"


def correct(parser: vf.Parser, completion: vf.Messages, answer: str) -> float:
    """1.0 if the reply is the answer."""
    return float(parser.parse_answer(completion) == answer)


def is_number(parser: vf.Parser, completion: vf.Messages) -> float:
    """1.0 if the reply is a whole number. Not part of the reward."""
    return float(re.fullmatch(r"-?\d+", parser.parse_answer(completion) or "") is not None)


def load_environment(
    level: int = 1, num_examples: int = 4096, num_eval_examples: int = 256, seed: int = 0, words: bool = False, shots: int = 0
) -> vf.SingleTurnEnv:
    """The environment.

    Args:
        level: 1 (sums of one-digit numbers) to 3 (two digits); see `LEVELS`.
        num_examples: problems to train on.
        num_eval_examples: problems for evaluation, drawn from another seed. Easy levels have so few problems that most occur in both.
        seed: seed of the problems.
        words: ask in a sentence, and take the last number of the reply as the answer.
        shots: solved problems that the prompt shows before the question, with `words` step by step: for small models, which copy the form.
    """
    if shots < 0:
        raise ValueError(f"shots={shots} must be at least 0")
    if level not in LEVELS:
        known = "; ".join(f"{number}: {spec.meaning}" for number, spec in LEVELS.items())
        raise ValueError(f"level={level} is not one of {known}")
    parser = LastNumberParser() if words else AnswerParser()
    rubric = vf.Rubric(funcs=[correct, is_number], weights=[1.0, 0.0], parser=parser)
    shown = [message for row in build_rows(level, shots, seed + SHOTS_SEED, words) for message in solved(row, words)]
    return vf.SingleTurnEnv(
        dataset=Dataset.from_list(build_rows(level, num_examples, seed, words)),
        eval_dataset=lambda: Dataset.from_list(build_rows(level, num_eval_examples, seed + 1_000_003, words)),
        few_shot=shown or None,
        parser=parser,
        rubric=rubric,
    )
