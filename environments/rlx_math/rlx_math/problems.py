"""Problems in four levels, generated without any download: from reasoning-gym, and the competition style from templates here.

A problem is `(question, answer, source)`. Answers are numbers or LaTeX expressions.
"""

from __future__ import annotations

import itertools
import math
import random
import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import reasoning_gym

HELD_OUT = 4  # one in so many problems is for evaluation
GIVE_UP = 2_000  # problems in a row without a new one, after which a source has no more

Problem = tuple[str, str]
"""Question and answer."""


@dataclass(frozen=True)
class Level:
    """One level: reasoning-gym data sets by name, with their configuration, and templates of this module."""

    meaning: str
    gym: dict[str, dict[str, Any]]
    templates: tuple[Callable[[random.Random], Problem], ...] = ()


# competition style: templates of one problem each


def power_remainder(rng: random.Random) -> Problem:
    modulus, exponent = rng.choice([7, 9, 11, 13, 17, 100]), rng.randint(20, 400)
    base = rng.choice([n for n in range(2, 20) if math.gcd(n, modulus) == 1])
    return f"What is the remainder when ${base}^{{{exponent}}}$ is divided by ${modulus}$?", str(pow(base, exponent, modulus))


def roots_of_quadratic(rng: random.Random) -> Problem:
    total, product = rng.choice([n for n in range(-9, 10) if abs(n) > 1]), rng.choice([n for n in range(-12, 13) if n])
    middle, last = ("+" if total < 0 else "-"), ("+" if product > 0 else "-")
    question = (
        f"The numbers $p$ and $q$ are the roots of $x^2 {middle} {abs(total)}x {last} {abs(product)} = 0$, real or complex. "
        "Find $p^2 + q^2$."
    )
    return question, str(total * total - 2 * product)


def lattice_paths(rng: random.Random) -> Problem:
    right, up = rng.randint(3, 7), rng.randint(3, 7)
    question = (
        f"A robot walks on a grid from $(0, 0)$ to $({right}, {up})$. Each step goes one unit to the right or one unit up. How many paths "
        "are there?"
    )
    return question, str(math.comb(right + up, up))


def sum_of_multiples(rng: random.Random) -> Problem:
    (first, second), limit = rng.choice([(3, 5), (3, 7), (4, 6), (4, 10), (5, 6), (6, 9), (6, 10)]), rng.randint(50, 300)
    question = f"What is the sum of all positive integers less than ${limit}$ that are divisible by ${first}$ or by ${second}$?"
    return question, str(sum(n for n in range(limit) if n % first == 0 or n % second == 0))


def two_unknowns(rng: random.Random) -> Problem:
    apple, pear = rng.randint(2, 30), rng.randint(2, 30)
    a, b = rng.sample(range(2, 9), 2)
    question = (
        f"{a} apples and {b} pears cost {a * apple + b * pear} cents, and {b} apples and {a} pears cost {b * apple + a * pear} cents. "
        "How many cents does one apple cost?"
    )
    return question, str(apple)


def geometric_series(rng: random.Random) -> Problem:
    first, ratio = rng.randint(1, 20), rng.randint(2, 9)
    top, bottom = first * ratio, ratio - 1
    common = math.gcd(top, bottom)
    answer = str(top // bottom) if bottom == common else f"\\frac{{{top // common}}}{{{bottom // common}}}"
    return (
        f"Find the sum of the infinite series ${first} + \\frac{{{first}}}{{{ratio}}} + \\frac{{{first}}}{{{ratio**2}}} + \\cdots$.",
        answer,
    )


def two_draws(rng: random.Random) -> Problem:
    red, blue = rng.randint(2, 9), rng.randint(2, 9)
    top, bottom = 2 * red * blue, (red + blue) * (red + blue - 1)
    common = math.gcd(top, bottom)
    question = (
        f"A bag holds {red} red and {blue} blue marbles. Two are drawn at random without replacement. What is the probability that their "
        "colours differ? Give a fraction in lowest terms."
    )
    return question, f"\\frac{{{top // common}}}{{{bottom // common}}}"


def trailing_zeros(rng: random.Random) -> Problem:
    number = rng.randint(20, 600)
    return f"With how many zeros does ${number}!$ end?", str(sum(number // 5**k for k in range(1, 5)))


def number_of_divisors(rng: random.Random) -> Problem:
    powers = {prime: rng.randint(0, 3 if prime < 7 else 1) for prime in (2, 3, 5, 7, 11)}
    number = math.prod(prime**power for prime, power in powers.items())
    return f"How many positive divisors does ${number}$ have?", str(math.prod(power + 1 for power in powers.values()))


def square_root(rng: random.Random) -> Problem:
    outside, inside, other = rng.randint(2, 9), rng.choice([2, 3, 5, 6, 7]), rng.randint(2, 9)
    question = f"Simplify $\\sqrt{{{outside**2 * inside}}} + \\sqrt{{{other**2 * inside}}}$."
    return question, f"{outside + other}\\sqrt{{{inside}}}"


def product_of_polynomials(rng: random.Random) -> Problem:
    factors = [[rng.choice([n for n in range(-9, 10) if n]) for _ in range(rng.randint(2, 3))] for _ in range(2)]
    product = [0] * (len(factors[0]) + len(factors[1]) - 1)
    for (i, a), (j, b) in itertools.product(enumerate(factors[0]), enumerate(factors[1])):
        product[i + j] += a * b
    return f"Expand $({_polynomial(factors[0])})({_polynomial(factors[1])})$.", _polynomial(product)


def _polynomial(coefficients: list[int]) -> str:
    """LaTeX of a polynomial in x; the coefficients begin with the constant."""
    text = ""
    for power, value in reversed(list(enumerate(coefficients))):
        if value:
            number = str(abs(value)) if abs(value) != 1 or power == 0 else ""
            variable = "" if power == 0 else "x" if power == 1 else f"x^{power}"
            text += (" - " if value < 0 else " + ") + number + variable
    return "-" + text[3:] if text.startswith(" - ") else text.removeprefix(" + ")


COMPETITION = (
    power_remainder,
    roots_of_quadratic,
    lattice_paths,
    sum_of_multiples,
    two_unknowns,
    geometric_series,
    two_draws,
    trailing_zeros,
    number_of_divisors,
    square_root,
    product_of_polynomials,
)


def _terms(min_terms: int, max_terms: int, min_digits: int, max_digits: int) -> dict[str, int]:
    return {"min_terms": min_terms, "max_terms": max_terms, "min_digits": min_digits, "max_digits": max_digits}


LEVELS: dict[int, Level] = {
    1: Level("one step of arithmetic", {"chain_sum": _terms(2, 3, 1, 2), "products": _terms(2, 2, 1, 1)}),
    2: Level(
        "word problems and longer arithmetic",
        {"gsm_symbolic": {}, "leg_counting": {}, "chain_sum": _terms(3, 6, 2, 3), "products": _terms(2, 2, 2, 2)},
    ),
    3: Level(
        "equations, fractions, divisors, primes, complex numbers",
        {
            "simple_equations": {},
            "fraction_simplification": {},
            "gcd": {},
            "lcm": {},
            "count_primes": {"max_n": 200},
            "complex_arithmetic": {},
        },
    ),
    4: Level(
        "competition style: number theory, counting, probability, series, polynomials",
        {"dice": {}},
        COMPETITION,
    ),
}

# What reasoning-gym asks for the form of an answer. It would contradict the system prompt.
_FORM = re.compile(
    r"\s*(Give (only )?the [^.]* as your final answer\.|Give the result as your final answer\.|Do not include units\.|"
    r"Your task is to [^.]*\.\s*|\(Assume that[^)]*\)|Please respond with a reduced fraction[^.]*\[ex\., 1/60\]\.)"
)
_GUIDELINES = re.compile(r"\n(When performing calculations|In solving equations).*", re.DOTALL)


def _asked(name: str, question: str) -> str:
    """The question of a reasoning-gym entry as one asks a language model."""
    question = _FORM.sub("", _GUIDELINES.sub("", question)).strip()
    if name in ("chain_sum", "products"):
        return f"What is ${question.rsplit(': ', 1)[-1].removesuffix('=').strip(' .').replace('*', chr(92) + 'cdot')}$?"
    if name == "dice":
        return question + " Give a fraction in lowest terms."
    return question.removeprefix("Now, ").replace("**", "^")


def problems(level: int, seed: int, held_out: bool) -> Iterator[tuple[str, str, str]]:
    """Problems of a level, from its sources in turn: `(question, answer, source)`. The same seed gives the same problems.

    `held_out`: problems for evaluation, each once, until there are no more. False: endless problems to train on.
    """
    spec, rng = LEVELS[level], random.Random(seed)
    streams = [_gym(name, config, rng.randrange(2**31)) for name, config in spec.gym.items()]
    streams += [_template(template, rng.randrange(2**31)) for template in spec.templates]
    streams = [_different(stream) if held_out else (each for each in stream if not is_held_out(each[0])) for stream in streams]
    while streams:
        for stream in streams.copy():
            if (problem := next(stream, None)) is None:
                streams.remove(stream)
            else:
                yield problem


def is_held_out(question: str) -> bool:
    """Whether a problem is for evaluation. `7 + 12` and `12 + 7` are on the same side: the order of words and numbers does not count."""
    return zlib.crc32(" ".join(sorted(re.findall(r"\w+|[^\w\s]", question))).encode()) % HELD_OUT == 0


def _different(stream: Iterator[tuple[str, str, str]]) -> Iterator[tuple[str, str, str]]:
    """The held-out problems of a source, each once. Ends after `GIVE_UP` problems without a new one."""
    seen: set[str] = set()
    misses = 0
    for problem in stream:
        misses += 1
        if problem[0] not in seen and is_held_out(problem[0]):
            seen.add(problem[0])
            misses = 0
            yield problem
        if misses == GIVE_UP:
            return


def _gym(name: str, config: dict[str, Any], seed: int) -> Iterator[tuple[str, str, str]]:
    for block in itertools.count():  # a data set has a size, and the stream has none
        for entry in reasoning_gym.create_dataset(name, seed=seed + 7919 * block, size=2048, **config):
            yield _asked(name, entry["question"]), str(entry["answer"]).replace("**", "^").strip("$"), name


def _template(template: Callable[[random.Random], Problem], seed: int) -> Iterator[tuple[str, str, str]]:
    rng = random.Random(seed)
    while True:
        yield (*template(rng), template.__name__)
