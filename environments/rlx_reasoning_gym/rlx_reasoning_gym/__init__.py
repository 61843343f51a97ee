"""Any data sets of reasoning-gym by name, alone or mixed.

The model reasons and puts its answer in `<answer></answer>`; the last one counts. The reward is the data set's own score of it, 0 to 1.
An answer that the data set's own code fails at is wrong. Some of that code evaluates answers, as Python or by sympy; it sees only those of
a harmless form.
A row is `question`, `answer` (the answer that the generator stored) and `info` (`source`: the data set; `index`: the entry in it;
`held_out`: whether it is for evaluation). Entries are generated again when they are scored, so rows stay small.
"""

from __future__ import annotations

import ast
import random
import re
import signal
import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from types import FrameType
from typing import Any

import reasoning_gym
import verifiers as vf
from datasets import Dataset
from reasoning_gym.factory import DATASETS

SYSTEM_PROMPT = "Think step by step. Then write the final answer between <answer> and </answer>, in the form that the question asks for."
DEFAULT = ("chain_sum", "gsm_symbolic", "leg_counting", "letter_counting", "number_sequence", "spell_backward")
EVAL_SEED = 1_000_003  # added to the seed for the evaluation entries
LOOKED_AT = 4  # entries of a data set for each evaluation example, among which those are looked for that are not trained on
TRIED = 6  # entries of each data set whose stored answer is scored when the environment is loaded
LITERALS = {"binary_matrix", "n_queens", "spiral_matrix", "string_insertion"}  # data sets that pass an answer to Python's `eval`
NUMBERS = {"countdown", "puzzle24"}  # that pass it to sympy, which evaluates it: `9**9**9**9` would take for ever
FORMULAS = {"intermediate_integration", "polynomial_multiplication", "simple_integration"}  # likewise, with variables and functions
FUNCTIONS = {"sin", "cos", "tan", "sec", "csc", "cot", "asin", "acos", "atan", "sinh", "cosh", "tanh", "exp", "log", "ln", "sqrt", "pi"}
LONGEST = 400  # characters of an answer that is evaluated
LIMIT = 10.0  # seconds of computing for the score of a formula, for which sympy may take for ever
WRONG = "no"  # what no data set may pay for, if it is not the answer


class AnswerParser(vf.Parser):
    """The answer is the content of the last `<answer></answer>` after `</think>`."""

    def parse(self, text: str) -> str:
        found = re.findall(r"<answer>((?:(?!<answer>).)*?)</answer>", text.rpartition("</think>")[2], re.DOTALL)
        return found[-1].strip() if found else ""


def is_harmless(name: str, answer: str) -> bool:
    """Whether a data set's own code may evaluate an answer: it has the form that the question asks for, and no huge number comes of it."""
    if name == "coin_flip":  # makes a fraction of it
        return re.search(r"e[+-]?[\d_]{4,}", answer, re.IGNORECASE) is None
    if name not in LITERALS | NUMBERS | FORMULAS:
        return True
    if len(answer) > LONGEST:
        return False
    try:
        tree = ast.parse(answer.strip().replace("^", "**") if name not in LITERALS else answer.strip(), mode="eval").body
        if name in LITERALS:
            return (isinstance(tree, ast.Name) and tree.id.isupper()) or ast.literal_eval(tree) is not None
        return re.search(r"[^\w\s+\-*/^().]|_|\d{13}|\d[eE][+-]?\d{2}", answer) is None and all(_may(node, name) for node in ast.walk(tree))
    except SyntaxError:
        return name in LITERALS  # such as `1 2 3`, which `eval` refuses
    except (ValueError, TypeError, MemoryError, RecursionError):
        return False


def _may(node: ast.AST, name: str) -> bool:
    """Whether a part of a formula may be evaluated. Powers have a small exponent and are not raised again; no name is sympy's own."""
    if isinstance(node, ast.Attribute):
        return False
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id in FUNCTIONS and len(node.args) == 1 and name in FORMULAS
    if isinstance(node, ast.Name):
        return name in FORMULAS and (node.id in FUNCTIONS or (len(node.id) == 1 and node.id != "N"))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
        exponent = list(ast.walk(node.right))
        constants = [part.value for part in exponent if isinstance(part, ast.Constant)]
        raised = any(isinstance(part, ast.Pow) for side in (node.left, node.right) for part in ast.walk(side))
        large = len(constants) > 2 or any(not isinstance(value, int | float) or value > 99 for value in constants)
        return name in FORMULAS and not raised and not large and not any(isinstance(part, ast.Mult) for part in exponent)
    return True


class TooLong(BaseException):
    """A score took longer than LIMIT. Not an Exception, which sympy and the data sets would catch."""


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raise TooLong if this block takes more seconds of the process's computing, also if it catches that. In the main thread alone."""
    late = []

    def end(number: int, frame: FrameType | None) -> None:
        late.append(number)
        raise TooLong

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGVTALRM, end)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds, 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
        signal.signal(signal.SIGVTALRM, before)
    if late:
        raise TooLong


class Sources:
    """The generators of the named data sets, for training and for evaluation."""

    def __init__(self, names: Sequence[str], config: dict[str, Any], sizes: tuple[int, int], seed: int) -> None:
        """Raises ValueError for an unknown name or configuration, and for a data set that does not tell right answers from wrong ones."""
        self.names = tuple(names)
        self._sets: dict[tuple[str, bool], Any] = {}
        for name in names:
            for held_out, size in ((False, max(sizes[0], TRIED)), (True, LOOKED_AT * sizes[1])):
                own = random.Random(f"{seed} {name} {held_out}").randrange(2**31)  # with `seed` itself, seeds side by side share entries
                try:
                    self._sets[name, held_out] = reasoning_gym.create_dataset(name, seed=own, size=size, **config.get(name, {}))
                except (AssertionError, TypeError, ValueError) as error:
                    raise ValueError(f"config={{{name}: {config.get(name, {})}}}: {error}") from error
            refused = self._refused(name, TRIED)
            if refused:
                raise ValueError(f"names: {name} cannot be trained on, because {refused}. Leave it out of names")
        self.entry = lru_cache(maxsize=1024)(self._entry)

    def _refused(self, name: str, count: int) -> str:
        """Why the first `count` entries show that answers are not scored by what they say, in words; empty if they do not show that.

        A stored answer must score 1.0. What is no answer must never do so, and the answer of one entry not at all others.
        """
        entries = [self._entry(name, False, index) for index in range(count)]
        for index, entry in enumerate(entries):
            if entry["answer"] is None:
                return f"it does not accept its own answers: entry {index} has no answer"
            if (score := self._score(name, False, str(entry["answer"]), entry)) < 1:
                return f"it does not accept its own answers: entry {index} scores {score:g} for {str(entry['answer'])[:60]!r}"
        answers = [str(entry["answer"]) for entry in entries]
        for wrong in (WRONG, *(answers if name not in FORMULAS else ())):  # sympy takes seconds for formulas that differ
            others = [entry for entry, answer in zip(entries, answers, strict=True) if answer.lower() != wrong.lower()]
            paid = (self.score(name, False, wrong, entry) >= 1 for entry in others)
            if any(paid) if wrong == WRONG else len(others) > 1 and all(paid):
                return f"it accepts wrong answers: {wrong[:60]!r} scores 1 where the answer is another"
        return ""

    def _entry(self, name: str, held_out: bool, index: int) -> dict[str, Any]:
        return self._sets[name, held_out][index]

    def entries(self, name: str, held_out: bool) -> Iterator[dict[str, Any]]:
        """The entries of a data set, in their order."""
        return (self.entry(name, held_out, index) for index in range(len(self._sets[name, held_out])))

    def score(self, name: str, held_out: bool, answer: str, entry: dict[str, Any]) -> float:
        """The data set's score of an answer, 0 to 1; 0 for one that its code fails at or must not evaluate. May raise TooLong."""
        if name == "gsm_symbolic":  # it would read `1,234` as 1
            answer = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", answer)
        source = entry.get("metadata", {}).get("source_dataset", name)  # of `composite` the one that the entry is from
        right = str(entry["answer"])
        if answer != right and (
            not is_harmless(source, answer) or (re.search(r"\bnan\b", answer, re.I) and not re.search("nan", right, re.I))
        ):
            return 0.0
        try:
            if source not in NUMBERS | FORMULAS:
                return self._score(name, held_out, answer, entry)
            with limited(LIMIT):
                return self._score(name, held_out, answer, entry)
        except Exception:  # of any kind: some data sets do not expect other forms than their own
            return 0.0

    def _score(self, name: str, held_out: bool, answer: str, entry: dict[str, Any]) -> float:
        return float(self._sets[name, held_out].score_answer(answer=answer, entry=entry))


def build_rows(
    sources: Sources, weights: dict[str, float], num_examples: int, seed: int, without: Collection[str] | None = None
) -> list[dict[str, Any]]:
    """`num_examples` rows; the share of each data set follows its weight. The same arguments give the same rows.

    `without`: questions of the rows to train on. The rows are then for evaluation: none of them has such a question, and none occurs twice.
    There are fewer rows if a data set has too few questions. None: rows to train on.
    """
    rng, held_out = random.Random(seed), without is not None
    shares = [weights.get(name, 1.0) for name in sources.names]
    entries = {name: enumerate(sources.entries(name, held_out)) for name in sources.names}
    rows, seen = [], set(without or ())
    for name in rng.choices(sources.names, shares, k=num_examples):
        index, entry = next(((i, one) for i, one in entries[name] if not held_out or one["question"] not in seen), (0, None))
        if entry is None:
            continue
        seen.add(entry["question"])
        info = {"source": name, "index": index, "held_out": held_out}
        rows.append({"question": entry["question"], "answer": str(entry["answer"]), "info": info})
    if not rows:
        raise ValueError(
            f"names={list(sources.names)}: training has every question that was found for evaluation; lower num_examples, or "
            "let config give more questions"
        )
    return rows


def check_arguments(names: Sequence[str], config: dict[str, Any], weights: dict[str, float]) -> None:
    """Raise ValueError for names that reasoning-gym does not have, and for configurations and weights of names that are not used."""
    if not names:
        raise ValueError("names is empty; give at least one data set of reasoning-gym, such as names=[chain_sum]")
    if unknown := [name for name in names if name not in DATASETS]:
        raise ValueError(f"names: reasoning-gym has no {', '.join(unknown)}. It has {', '.join(sorted(DATASETS))}")
    if len(set(names)) < len(names):
        raise ValueError(f"names={list(names)} names a data set twice; give it a weight: weights={{NAME: 2}}")
    for argument, given in (("config", config), ("weights", weights)):
        if stray := [name for name in given if name not in names]:
            raise ValueError(f"{argument} is for {', '.join(stray)}, but names={list(names)}")
    if min((weights.get(name, 1.0) for name in names), default=1.0) <= 0:
        raise ValueError(f"weights={weights}: a weight must be above 0; leave a data set out of names instead")


def load_environment(
    names: list[str] | None = None,
    config: dict | None = None,
    weights: dict | None = None,
    num_examples: int = 4096,
    num_eval_examples: int = 256,
    seed: int = 0,
    system_prompt: str | None = SYSTEM_PROMPT,
) -> vf.SingleTurnEnv:
    """The environment.

    Args:
        names: data sets of reasoning-gym; None: `DEFAULT`.
        config: settings of data sets by name, such as `{chain_sum: {max_terms: 3}}`.
        weights: share of data sets by name, relative to the others; 1 where none is given.
        num_examples: entries to train on.
        num_eval_examples: most entries for evaluation, drawn from another seed. No question of them is trained on.
        seed: seed of the entries.
        system_prompt: None asks the bare question.
    """
    names, config, weights = list(DEFAULT if names is None else names), config or {}, weights or {}
    check_arguments(names, config, weights)
    if num_examples < 1 or num_eval_examples < 1:
        raise ValueError(f"num_examples={num_examples} and num_eval_examples={num_eval_examples} must be at least 1")
    sources = Sources(names, config, (num_examples, num_eval_examples), seed)
    rows = build_rows(sources, weights, num_examples, seed)
    parser = AnswerParser()

    def score(parser: vf.Parser, completion: vf.Messages, info: dict[str, Any], state: vf.State) -> float:
        """The data set's own score of the answer, 0 to 1."""
        state["score_timed_out"] = False
        answer = parser.parse_answer(completion)
        if not answer:
            return 0.0
        name, held_out = info["source"], bool(info["held_out"])
        try:
            return sources.score(name, held_out, answer.strip(), sources.entry(name, held_out, info["index"]))
        except TooLong:
            state["score_timed_out"] = True
            return 0.0

    def answered(parser: vf.Parser, completion: vf.Messages) -> float:
        """1.0 if the reply has an answer in tags. Not part of the reward."""
        return float(bool(parser.parse_answer(completion)))

    def score_timed_out(state: vf.State) -> float:
        """1.0 if the score reached its limit; it is 0 then. Not part of the reward."""
        return float(state["score_timed_out"])

    return vf.SingleTurnEnv(
        dataset=Dataset.from_list(rows),
        eval_dataset=lambda: Dataset.from_list(
            build_rows(sources, weights, num_eval_examples, seed + EVAL_SEED, without={row["question"] for row in rows})
        ),
        system_prompt=system_prompt,
        parser=parser,
        rubric=vf.Rubric(funcs=[score, answered, score_timed_out], weights=[1.0, 0.0, 0.0], parser=parser),
    )
