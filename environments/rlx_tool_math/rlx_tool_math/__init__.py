"""Arithmetic with a calculator as a tool: the model writes a call, reads the result, and answers.

The reward is 1.0 if the number in the last message is the answer, else 0.0. A row is `question` and `answer` (a whole number).
Level 1 is one bare expression, short enough for a character model: copy it into a call, and the result into the answer.

A quarter of all problems, the same for every seed, is held out for evaluation: neither trained on nor shown, not even in another order.
"""

from __future__ import annotations

import ast
import json
import operator
import random
import re
import zlib
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

import verifiers as vf
from datasets import Dataset

SYSTEM_PROMPT = "Use the tool to calculate. Then give the final answer as a number inside \\boxed{}."
LEVELS = {
    1: "one operation on two numbers of one digit, asked as a bare expression",
    2: "two to four operations on numbers of two to four digits",
    3: "word problems of two or three steps with large numbers",
}
EVAL_SEED = 1_000_003  # added to the seed for the evaluation problems
SHOTS_SEED = 2_000_003  # and for the solved problems of `shots`
OTHERS_SEED = 3_000_017  # and for the problems that take the places of held-out ones
HELD_OUT = 4  # one in so many problems
GIVE_UP = 10_000  # draws in a row without a new problem, after which a level has no more
OPERATORS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
LONGEST = 200  # characters of an expression


def calc(x: str) -> str:
    """Calculate an arithmetic expression.

    Args:
        x: the expression, with numbers, + - * / and brackets, such as "12*(3+4)".
    """
    x = str(x)  # models send numbers, too
    if len(x) > LONGEST:
        return f"error: the expression has {len(x)} characters, the limit is {LONGEST}"
    try:
        value = _value(ast.parse(x.strip(), mode="eval").body)
        return str(value) if value.denominator == 1 else str(float(value))
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return "error: not an expression of numbers, + - * / and brackets"
    except ZeroDivisionError:
        return "error: division by zero"
    except OverflowError:
        return "error: the value is too large"


def _value(node: ast.expr) -> Fraction:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return Fraction(str(node.value))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](_value(node.left), _value(node.right))
    raise ValueError("no arithmetic")


# problems: question, and the expression that answers it


def _expression(rng: random.Random) -> tuple[str, str]:
    left, right = rng.randint(1, 9), rng.randint(1, 9)
    text = f"{left}{rng.choice('+-*')}{right}"
    return f"{text}=", text


def _long_expression(rng: random.Random) -> tuple[str, str]:
    text = str(rng.randint(10, 9999))
    for _ in range(rng.randint(2, 4)):
        text = f"{f'({text})' if rng.random() < 0.3 else text} {rng.choice('+-*')} {rng.randint(10, 9999 if rng.random() < 0.5 else 99)}"
    return f"What is {text}?", text


def _shop(rng: random.Random) -> tuple[str, str]:
    a, b, price, other = rng.randint(12, 480), rng.randint(12, 480), rng.randint(3, 97), rng.randint(3, 97)
    text = f"A shop sells {a} lamps for {price} dollars each and {b} chairs for {other} dollars each. How many dollars does it take in?"
    return text, f"{a}*{price} + {b}*{other}"


def _journey(rng: random.Random) -> tuple[str, str]:
    speed, hours, more, back = rng.randint(31, 139), rng.randint(3, 19), rng.randint(40, 900), rng.randint(20, 90)
    text = (
        f"A train travels {hours} hours at {speed} km an hour, then {more} km further, and then {back} km back. "
        "How many km from its start, along the line, does it stop?"
    )
    return text, f"{hours}*{speed} + {more} - {back}"


def _boxes(rng: random.Random) -> tuple[str, str]:
    boxes, each, broken, per = rng.randint(12, 320), rng.randint(6, 48), rng.randint(2, 60), rng.randint(3, 29)
    text = f"A farm fills {boxes} boxes with {each} eggs each. {broken} break. The rest sells at {per} cents each. How many cents is that?"
    return text, f"({boxes}*{each} - {broken})*{per}"


def _years(rng: random.Random) -> tuple[str, str]:
    start, monthly, years, spent = rng.randint(100, 9000), rng.randint(11, 480), rng.randint(2, 30), rng.randint(10, 900)
    text = (
        f"Mia has {start} dollars. She saves {monthly} dollars every month for {years} years, and spends {spent} dollars. "
        "How many dollars has she now?"
    )
    return text, f"{start} + {monthly}*12*{years} - {spent}"


WORD_PROBLEMS = (_shop, _journey, _boxes, _years)


def build_rows(level: int, num_examples: int, seed: int) -> list[dict[str, Any]]:
    """`num_examples` rows of a level to train on. The same seed gives the same rows.

    Another problem takes the place of one that is held out, so the rows around it do not depend on what is held out.
    """
    drawn, others = _problems(level, seed), _problems(level, seed + OTHERS_SEED)
    rows = []
    for _ in range(num_examples):
        question, expression = next(drawn)
        while is_held_out(expression):
            question, expression = next(others)
        rows.append(_row(question, expression))
    return rows


def build_eval_rows(level: int, num_examples: int, seed: int) -> list[dict[str, Any]]:
    """At most `num_examples` different held-out rows of a level, in an order that follows from the seed. Level 1 has 63."""
    found: dict[str, str] = {}
    misses = 0
    for question, expression in _problems(level, seed):
        if len(found) == num_examples or misses == GIVE_UP:
            break
        misses = misses + 1 if question in found or not is_held_out(expression) else 0
        if misses == 0:
            found[question] = expression
    return [_row(question, expression) for question, expression in found.items()]


def is_held_out(expression: str) -> bool:
    """Whether a problem is for evaluation. It depends on numbers and signs alone: `7*8` and `8*7` are on the same side."""
    parts = sorted(re.findall(r"\d+|[^\d\s]", expression))
    return zlib.crc32(" ".join(parts).encode()) % HELD_OUT == 0


def _problems(level: int, seed: int) -> Iterator[tuple[str, str]]:
    """Endless questions of a level, each with the expression that answers it."""
    rng = random.Random(seed)
    while True:
        make = {1: _expression, 2: _long_expression}.get(level) or rng.choice(WORD_PROBLEMS)
        yield make(rng)


def _row(question: str, expression: str) -> dict[str, Any]:
    return {"question": question, "answer": calc(expression), "info": {"expression": expression}}


_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def last_number(text: str) -> Fraction | None:
    """The number in the last `\\boxed{}` of a text, or its last number; None if there is none."""
    said = vf.extract_boxed_answer(text.rpartition("</think>")[2])
    found = _NUMBER.findall(re.sub(r"\{,\}|,?\\[,!]", ",", said.replace("\N{MINUS SIGN}", "-")))  # as LaTeX separates thousands
    return Fraction(found[-1].replace(",", "")) if found and len(found[-1]) <= 64 else None


def solution(expression: str, number: int, boxed: bool) -> list[dict[str, Any]]:
    """The messages after a question: a call of the calculator, its result, and the answer. `number`: of the call in its conversation."""
    result, name = calc(expression), f"shot{number:05d}"
    call = {"id": name, "type": "function", "function": {"name": "calc", "arguments": json.dumps({"x": expression})}}
    return [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": name, "content": result},
        {"role": "assistant", "content": f"\\boxed{{{result}}}" if boxed else result},
    ]


def solved_problems(level: int, shots: int, seed: int) -> list[dict[str, Any]]:
    """`shots` problems of a level with their solutions, as a conversation."""
    rows = build_rows(level, shots, seed)
    return [
        message
        for number, row in enumerate(rows)
        for message in ({"role": "user", "content": row["question"]}, *solution(row["info"]["expression"], number, level > 1))
    ]


class ToolMath(vf.ToolEnv):
    """The environment, with a teacher for the warm start."""

    def demonstration(self, row: dict[str, Any], errs: bool, random: random.Random) -> list[dict[str, Any]]:
        """A call of the calculator and its result as the answer. A teacher that errs guesses the answer, wrongly, without a call."""
        boxed = self.system_prompt is not None
        if not errs:
            return solution(row["info"]["expression"], 0, boxed)
        guess = random.choice([number for number in range(1, 82) if str(number) != row["answer"]])
        return [{"role": "assistant", "content": f"\\boxed{{{guess}}}" if boxed else str(guess)}]


def load_environment(
    level: int = 3, max_turns: int = 5, num_examples: int = 4096, num_eval_examples: int = 256, seed: int = 0, shots: int = 0
) -> vf.MultiTurnEnv:
    """The environment.

    Args:
        level: 1 (one operation) to 3 (word problems); see `LEVELS`. Level 1 has no system prompt.
        max_turns: most messages of the model; all but the last call the tool.
        num_examples: problems to train on.
        num_eval_examples: most problems for evaluation, none of which is trained on. Level 1 has 63.
        seed: seed of the problems.
        shots: solved problems, with their calls, that the prompt shows before the question: for small models, which copy the form.
    """
    if shots < 0:
        raise ValueError(f"shots={shots} must be at least 0")
    if level not in LEVELS:
        raise ValueError(f"level={level} is not one of " + "; ".join(f"{number}: {meaning}" for number, meaning in LEVELS.items()))
    if max_turns < 2:
        raise ValueError(f"max_turns={max_turns} must be at least 2: a call and an answer")

    def correct(completion: vf.Messages, answer: str) -> float:
        """1.0 if the last message is the model's and its number is the answer."""
        last = completion[-1] if completion else None
        if last is None or last.role != "assistant" or last.tool_calls:
            return 0.0
        return float(last_number(str(last.content or "")) == Fraction(answer))

    def called_before_answering(completion: vf.Messages) -> float:
        """1.0 if a call returned a number. Not part of the reward."""
        return float(any(message.role == "tool" and not str(message.content).startswith("error") for message in completion))

    return ToolMath(
        tools=[calc],
        error_formatter=lambda error: f"error: {error}",  # of an unknown tool, and of arguments that it does not have
        max_turns=max_turns,
        dataset=Dataset.from_list(build_rows(level, num_examples, seed)),
        eval_dataset=lambda: Dataset.from_list(build_eval_rows(level, num_eval_examples, seed + EVAL_SEED)),
        system_prompt=None if level == 1 else SYSTEM_PROMPT,
        few_shot=solved_problems(level, shots, seed + SHOTS_SEED) or None,
        rubric=vf.Rubric(funcs=[correct, called_before_answering], weights=[1.0, 0.0]),
    )
