"""Sums and differences in three levels: the task in which a character model of under a million parameters learns to calculate.

The reward is 1.0 for a right answer and 0.0 otherwise, so the mean reward is the accuracy.
A row is `question` ("3 + 4 =") and `answer` ("7"). There is no system prompt, so a prompt has a dozen characters.
With `words=true` a language model is asked ("What is 3 + 4? End with the number."), and the last number of its reply is the answer.

A quarter of all problems, the same for every seed, is held out for evaluation: neither trained on nor shown, not even in another order.
"""

from __future__ import annotations

import random
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import verifiers as vf
from datasets import Dataset

EVAL_SEED = 1_000_003  # added to the seed for the evaluation problems
SHOTS_SEED = 2_000_003  # and for the solved problems of `shots`
OTHERS_SEED = 3_000_017  # and for the problems that take the places of held-out ones
HELD_OUT = 4  # one in so many problems
GIVE_UP = 10_000  # draws in a row without a new problem, after which a level has no more


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
    """`num_examples` rows of a level to train on. The same seed gives the same rows. `words`: the question is a sentence.

    Another problem takes the place of one that is held out, so the rows around it do not depend on what is held out.
    """
    drawn, others = _expressions(LEVELS[level], seed), _expressions(LEVELS[level], seed + OTHERS_SEED)
    rows = []
    for _ in range(num_examples):
        expression = next(drawn)
        while is_held_out(expression):
            expression = next(others)
        rows.append(_row(expression, words))
    return rows


def build_eval_rows(level: int, num_examples: int, seed: int, words: bool = False) -> list[dict[str, Any]]:
    """At most `num_examples` different held-out rows of a level, in an order that follows from the seed. Level 1 has 24."""
    found: dict[str, None] = {}
    misses = 0
    for expression in _expressions(LEVELS[level], seed):
        if len(found) == num_examples or misses == GIVE_UP:
            break
        misses = misses + 1 if expression in found or not is_held_out(expression) else 0
        if misses == 0:
            found[expression] = None
    return [_row(expression, words) for expression in found]


def is_held_out(expression: str) -> bool:
    """Whether a problem is for evaluation. It depends on the terms alone: `3 + 4 - 9` and `4 - 9 + 3` are on the same side."""
    terms = sorted(f"+ {expression}".replace("+ ", "+").replace("- ", "-").split())
    return zlib.crc32(" ".join(terms).encode()) % HELD_OUT == 0


def _expressions(spec: Level, seed: int) -> Iterator[str]:
    """Endless expressions of a level: `3 + 4`."""
    rng = random.Random(seed)
    smallest = 0 if spec.digits == 1 else 10 ** (spec.digits - 1)
    while True:
        text = str(rng.randint(smallest, 10**spec.digits - 1))
        for _ in range(rng.randint(*spec.terms) - 1):
            text += f" {rng.choice(spec.operators)} {rng.randint(smallest, 10**spec.digits - 1)}"
        yield text


def _row(expression: str, words: bool) -> dict[str, Any]:
    first, *rest = expression.split()
    value = int(first) + sum(int(f"{operator}{term}") for operator, term in zip(rest[::2], rest[1::2], strict=True))
    return {"question": f"What is {expression}? End with the number." if words else f"{expression} =", "answer": str(value)}


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
        plain = re.sub(r"\{,\}|,?\\[,!]", ",", text.replace("\N{MINUS SIGN}", "-"))  # as LaTeX separates thousands
        numbers = re.findall(r"-?\d+(?:,\d{3})*(?:\.\d+)?", plain)
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


class SumsInWords(vf.SingleTurnEnv):
    """The environment with `words`. Its teacher calculates step by step, which small models need for more than one operation."""

    def demonstration(self, row: dict[str, Any], errs: bool, random: random.Random) -> list[dict[str, Any]]:
        """Every step, as in the solved problems of `shots`. A teacher that errs is off by one or by ten in the last result."""
        said = solved(row, words=True)[-1]
        if errs:
            calculated, _, result = said["content"].removesuffix(".").rpartition(" ")
            said["content"] = f"{calculated} {int(result) + random.choice((-10, -1, 1, 10))}."
        return [said]


def load_environment(
    level: int = 1, num_examples: int = 4096, num_eval_examples: int = 256, seed: int = 0, words: bool = False, shots: int = 0
) -> vf.SingleTurnEnv:
    """The environment.

    Args:
        level: 1 (sums of one-digit numbers) to 3 (two digits); see `LEVELS`.
        num_examples: problems to train on.
        num_eval_examples: most problems for evaluation, none of which is trained on. Level 1 has 24.
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
    return (SumsInWords if words else vf.SingleTurnEnv)(
        dataset=Dataset.from_list(build_rows(level, num_examples, seed, words)),
        eval_dataset=lambda: Dataset.from_list(build_eval_rows(level, num_eval_examples, seed + EVAL_SEED, words)),
        few_shot=shown or None,
        parser=parser,
        rubric=rubric,
    )
