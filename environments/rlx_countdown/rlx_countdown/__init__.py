"""Countdown: combine given numbers with + - * / to reach a target.

The model reasons and writes one expression in `<answer></answer>`. The reward is 1.0 if it uses each given number exactly once and has the
target as its value, else 0.0. A row is `question`, `answer` (one of the solutions) and `info` (`numbers`, `target`).

A quarter of all problems, the same for every seed, is held out for evaluation. It is not trained on, not even in another
order of the numbers.
"""

from __future__ import annotations

import ast
import operator
import random
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

import verifiers as vf
from datasets import Dataset

SYSTEM_PROMPT = (
    "Find an expression with the value that is asked for. Use each number exactly once, and only + - * / and brackets. Think step by step, "
    "then write the expression alone between <answer> and </answer>."
)
EVAL_SEED = 1_000_003  # added to the seed for the evaluation problems
OTHERS_SEED = 3_000_017  # and for the problems that take the places of held-out ones
HELD_OUT = 4  # one in so many problems
GIVE_UP = 10_000  # draws in a row without a new problem, after which there are no more
LONGEST = 200  # characters of an expression
OPERATORS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
SIGNS = {"\\times": "*", "\\cdot": "*", "\\div": "/", "×": "*", "·": "*", "÷": "/", "−": "-", "[": "(", "]": ")"}


def evaluate(text: str) -> tuple[Fraction, Counter[int]] | None:
    """The value of an expression and the numbers in it; None if it is not one, or divides by 0. A closing `= 12` is ignored."""
    text = text.strip().strip("$")
    for sign, plain in SIGNS.items():
        text = text.replace(sign, plain)
    text = re.sub(r"=\s*-?\d+\s*$", "", text)
    if len(text) > LONGEST:
        return None
    used: Counter[int] = Counter()
    try:
        return _value(ast.parse(text.strip(), mode="eval").body, used), used
    except (SyntaxError, ValueError, ZeroDivisionError, MemoryError, RecursionError):
        return None


def _value(node: ast.expr, used: Counter[int]) -> Fraction:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        used[node.value] += 1
        return Fraction(node.value)
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](_value(node.left, used), _value(node.right, used))
    raise ValueError("neither a number nor one of the four operations")


def build_rows(num_examples: int, min_numbers: int, max_numbers: int, largest: int, max_target: int, seed: int) -> list[dict[str, Any]]:
    """`num_examples` rows to train on. The same arguments give the same rows.

    Another problem takes the place of one that is held out, so the rows around it do not depend on what is held out.
    """
    arguments = (min_numbers, max_numbers, largest, max_target)
    drawn, others = _problems(*arguments, seed), _problems(*arguments, seed + OTHERS_SEED)
    rows = []
    for _ in range(num_examples):
        row = next(drawn)
        while is_held_out(row):
            row = next(others)
        rows.append(row)
    return rows


def build_eval_rows(
    num_examples: int, min_numbers: int, max_numbers: int, largest: int, max_target: int, seed: int
) -> list[dict[str, Any]]:
    """At most `num_examples` different held-out rows, in an order that follows from the seed."""
    found: dict[str, dict[str, Any]] = {}
    misses = 0
    for row in _problems(min_numbers, max_numbers, largest, max_target, seed):
        if len(found) == num_examples or misses == GIVE_UP:
            break
        misses = misses + 1 if row["question"] in found or not is_held_out(row) else 0
        if misses == 0:
            found[row["question"]] = row
    return list(found.values())


def is_held_out(row: dict[str, Any]) -> bool:
    """Whether a problem is for evaluation. It depends on its target and on its numbers in any order."""
    asked = f"{' '.join(map(str, sorted(row['info']['numbers'])))} = {row['info']['target']}"
    return zlib.crc32(asked.encode()) % HELD_OUT == 0


def _problems(min_numbers: int, max_numbers: int, largest: int, max_target: int, seed: int) -> Iterator[dict[str, Any]]:
    """Endless solvable rows: each is made from its solution."""
    rng = random.Random(seed)
    while True:
        numbers = [rng.randint(1, largest) for _ in range(rng.randint(min_numbers, max_numbers))]
        solution = _solution(list(numbers), max_target, rng)
        if solution is None:
            continue
        value, text = solution
        asked = ", ".join(map(str, numbers))
        yield {"question": f"Numbers: {asked}. Target: {value}.", "answer": text, "info": {"numbers": numbers, "target": value}}


def _solution(numbers: list[int], max_target: int, rng: random.Random) -> tuple[int, str] | None:
    """Combine random pairs until one value is left, with whole numbers above 0 only. None if that value is no possible target."""
    parts = [(number, str(number)) for number in numbers]
    while len(parts) > 1:
        (a, left), (b, right) = parts.pop(rng.randrange(len(parts))), parts.pop(rng.randrange(len(parts)))
        values = {"+": a + b, "*": a * b} | ({"-": a - b} if a > b else {}) | ({"/": a // b} if b > 1 and a % b == 0 else {})
        sign = rng.choice(list(values))
        parts.append((values[sign], f"({left} {sign} {right})"))
    ((value, text),) = parts
    return (value, text.removeprefix("(").removesuffix(")")) if value <= max_target and value not in numbers else None


class AnswerParser(vf.Parser):
    """The answer is the content of the last `<answer></answer>` after `</think>`."""

    def parse(self, text: str) -> str:
        found = re.findall(r"<answer>((?:(?!<answer>).)*?)</answer>", text.rpartition("</think>")[2], re.DOTALL)
        return found[-1].strip() if found else ""


def solved(parser: vf.Parser, completion: vf.Messages, info: dict[str, Any]) -> float:
    """1.0 if the expression uses each number once and has the target as its value."""
    found = evaluate(parser.parse_answer(completion) or "")
    return float(found is not None and found[0] == info["target"] and found[1] == Counter(info["numbers"]))


def is_expression(parser: vf.Parser, completion: vf.Messages) -> float:
    """1.0 if the answer is an expression at all. Not part of the reward."""
    return float(evaluate(parser.parse_answer(completion) or "") is not None)


def uses_numbers(parser: vf.Parser, completion: vf.Messages, info: dict[str, Any]) -> float:
    """1.0 if the expression uses each given number exactly once and no other. Not part of the reward."""
    found = evaluate(parser.parse_answer(completion) or "")
    return float(found is not None and found[1] == Counter(info["numbers"]))


def load_environment(
    min_numbers: int = 3,
    max_numbers: int = 4,
    largest: int = 25,
    max_target: int = 100,
    num_examples: int = 4096,
    num_eval_examples: int = 256,
    seed: int = 0,
    system_prompt: str | None = SYSTEM_PROMPT,
) -> vf.SingleTurnEnv:
    """The environment.

    Args:
        min_numbers: fewest given numbers.
        max_numbers: most given numbers.
        largest: largest given number.
        max_target: largest target.
        num_examples: problems to train on.
        num_eval_examples: most problems for evaluation, none of which is trained on.
        seed: seed of the problems.
        system_prompt: None asks the bare question.
    """
    if not 2 <= min_numbers <= max_numbers <= 8:
        raise ValueError(f"min_numbers={min_numbers} and max_numbers={max_numbers} must satisfy 2 <= min_numbers <= max_numbers <= 8")
    if largest < 2 or max_target < 10:
        raise ValueError(f"largest={largest} must be at least 2, and max_target={max_target} at least 10")
    parser = AnswerParser()
    arguments = (min_numbers, max_numbers, largest, max_target)
    return vf.SingleTurnEnv(
        dataset=Dataset.from_list(build_rows(num_examples, *arguments, seed)),
        eval_dataset=lambda: Dataset.from_list(build_eval_rows(num_eval_examples, *arguments, seed + EVAL_SEED)),
        system_prompt=system_prompt,
        parser=parser,
        rubric=vf.Rubric(funcs=[solved, is_expression, uses_numbers], weights=[1.0, 0.0, 0.0], parser=parser),
    )
