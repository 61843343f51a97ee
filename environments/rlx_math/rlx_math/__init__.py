"""Mathematics for language models: generated problems in four levels, or any data set with questions and answers.

The model reasons and puts its answer in `\\boxed{}`. The reward is 1.0 for a right answer and 0.0 otherwise, so the mean reward is the
accuracy. A row is `question`, `answer` (a number or a LaTeX expression) and `info` (`source`).

A quarter of the generated problems, the same for every seed, is held out for evaluation: neither trained on nor shown, not even with their
numbers in another order.

    reply → last \\boxed{} → equal text or number? → math-verify in a process of its own, at most `check_timeout` seconds
"""

from __future__ import annotations

import itertools
import logging
import random
import re
from pathlib import Path
from typing import Any

import verifiers as vf
from datasets import Dataset, get_dataset_config_names, get_dataset_default_config_name, load_dataset

from rlx_math.checker import LONGEST, Checker, to_number
from rlx_math.problems import LEVELS, problems

log = logging.getLogger(__name__)

MIXED = (2, 3, 4)  # without a `level`; one step of arithmetic is for small models
SYSTEM_PROMPT = "Solve the problem step by step. Write the final answer inside \\boxed{}."
EVAL_SEED = 1_000_003  # added to the seed for the evaluation problems
SHOTS_SEED = 2_000_003  # and for the solved problems of `shots`
QUESTIONS = ("problem", "question", "prompt")  # usual names of columns, in this order
ANSWERS = ("answer", "solution")
NUMBERS = ("chain_sum", "products")  # sources whose answer is a number and nothing else
FORMATS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}


class AnswerParser(vf.Parser):
    """The answer is the content of the last `\\boxed{}` after `</think>`. Without a box it is the reply, if that is one short line.

    With `require_box` a reply without a box has no answer.
    """

    def __init__(self, require_box: bool = False) -> None:
        super().__init__()
        self.require_box = require_box

    def parse(self, text: str) -> str:
        text = text.rpartition("</think>")[2].strip()
        answer = vf.extract_boxed_answer(text).strip()
        if answer != text:
            return answer
        return text if not self.require_box and "\n" not in text and len(text) <= 40 else ""


def has_the_form(reply: str, answer: str, source: str) -> bool:
    """Whether a reply to a generated problem is an answer, and not the problem or a part of it: math-verify would find that equal.

    What follows the last `=` counts. It is a plain number (of arithmetic one that is not divided), or has no more numbers than the answer.
    """
    said = re.sub(r"(?<=\d)(?:,|\\,|\{,\})(?=\d{3})", "", reply.strip().rstrip("= ").rpartition("=")[2]).strip()
    if squeezed(said) == squeezed(answer):
        return True
    if source == "product_of_polynomials":
        return "(" not in said and "[" not in said
    if source == "fraction_simplification" and count_numbers(said) == 2:
        return re.findall(r"\d+", said) == re.findall(r"\d+", answer)
    if source not in NUMBERS and to_number(said) is not None:
        return True
    if source == "square_root" and re.search(r".[-+*]|\\cdot|\\times", said):
        return False
    return count_numbers(said) <= max(count_numbers(answer), 2 if source == "complex_arithmetic" else 1)


def count_numbers(text: str) -> int:
    return len(re.findall(r"\d+(?:\.\d+)?|\.\d+", text))


def squeezed(text: str) -> str:
    """A text without what does not count: spaces, `$` and the words that size brackets."""
    return re.sub(r"\\left|\\right|[\s$]", "", text).rstrip(".")


def build_rows(level: int | None, num_examples: int, seed: int, held_out: bool = False) -> list[dict[str, Any]]:
    """`num_examples` rows of a level, or of the levels of `MIXED` in turn. The same seed gives the same rows.

    `held_out`: only problems that are for evaluation, and none twice. A level that has fewer of them gives fewer rows. False: only the
    others, which may occur several times.
    """
    streams = [problems(number, seed + number, held_out) for number in ([level] if level else MIXED)]
    turns = itertools.chain.from_iterable(itertools.zip_longest(*streams))
    found = ({"question": question, "answer": answer, "info": {"source": source}} for question, answer, source in filter(None, turns))
    return list(itertools.islice(found, num_examples))


def solved(row: dict[str, Any]) -> list[dict[str, str]]:
    """A problem and its solution as a conversation. The solution of an expression repeats it; others have no steps."""
    expression = re.fullmatch(r"What is \$(.*)\$\?", row["question"])
    steps = f"${expression[1]} = {row['answer']}$. " if expression else ""
    solution = f"{steps}The answer is \\boxed{{{row['answer']}}}."
    return [{"role": "user", "content": row["question"]}, {"role": "assistant", "content": solution}]


def read_rows(dataset: str, subset: str | None, split: str, question_column: str | None, answer_column: str | None) -> list[dict[str, Any]]:
    """The rows of a hub data set or of a local file, in their order. Raises ValueError for a column that is not there.

    A column that is None is the first usual one (`QUESTIONS`, `ANSWERS`). A subset that is None is the data set's default or `main`.
    """
    if (kind := FORMATS.get(Path(dataset).suffix)) and Path(dataset).is_file():
        found = load_dataset(kind, data_files={split: dataset}, split=split)
    else:
        found = load_dataset(dataset, subset if subset is not None else main_of(dataset), split=split)
    columns = []
    for argument, column, usual in (("question_column", question_column, QUESTIONS), ("answer_column", answer_column, ANSWERS)):
        wanted = usual if column is None else (column,)
        there = next((name for name in wanted if name in found.column_names), None)
        if there is None:
            what = f"{argument}={column}" if column is not None else f"named {' or '.join(usual)}, and {argument} is not set"
            raise ValueError(f"{dataset} has no column {what}; its columns are {', '.join(found.column_names)}")
        columns.append(there)
    question, answer = columns
    rows = [
        {"question": str(row[question]), "answer": final_answer(str(row[answer])), "info": {"source": dataset}}
        for row in found.select_columns(list({question, answer}))
    ]
    short = [row for row in rows if 0 < len(row["answer"]) <= LONGEST]
    if not short:
        raise ValueError(f"{dataset}, split {split}: no row has an answer in column {answer} of at most {LONGEST} characters")
    if long := sum(len(row["answer"]) > LONGEST for row in rows):
        log.warning(
            "%s, split %s: %d of %d rows are left out. Their answers in column %s have more than %d characters, as solutions without a "
            "box or `####` do, and no reply could be right", dataset, split, long, len(rows), answer, LONGEST,
        )  # fmt: skip
    return short


def main_of(dataset: str) -> str | None:
    """The subset `main` of a hub data set that has several and no default, such as gsm8k; otherwise None."""
    subsets = get_dataset_config_names(dataset)
    return "main" if len(subsets) > 1 and "main" in subsets and get_dataset_default_config_name(dataset) is None else None


def final_answer(text: str) -> str:
    """The answer in a solution: what the last `\\boxed{}` holds, or what follows `####`, or the whole text."""
    if "\\boxed" in text:
        bare = re.search(r"\\boxed\s+([^\s{$]+?)[.$\s]*$", text)  # TeX takes one sign without braces
        return bare[1] if bare else vf.extract_boxed_answer(text).strip()
    return re.sub(r"(?<=\d),(?=\d{3})", "", text.rpartition("####")[2].strip()) if "####" in text else text.strip()


def check_arguments(
    level: int | None, check_timeout: float, check_workers: int, num_examples: int, num_eval_examples: int, shots: int
) -> None:
    """Raise ValueError for an argument out of range."""
    if level is not None and level not in LEVELS:
        known = "; ".join(f"{number}: {spec.meaning}" for number, spec in LEVELS.items())
        raise ValueError(f"level={level} is not one of {known}. None (null) mixes levels {', '.join(map(str, MIXED))}")
    if check_timeout <= 0 or check_workers < 1:
        raise ValueError(f"check_timeout={check_timeout} must be above 0, and check_workers={check_workers} at least 1")
    if shots < 0:
        raise ValueError(f"shots={shots} must be at least 0")
    if num_examples < 1 or num_eval_examples < 1:
        raise ValueError(f"num_examples={num_examples} and num_eval_examples={num_eval_examples} must be at least 1")


def load_environment(
    level: int | None = None,
    dataset: str | None = None,
    subset: str | None = None,
    split: str | None = "train",
    eval_split: str | None = None,
    question_column: str | None = None,
    answer_column: str | None = None,
    num_examples: int = 4096,
    num_eval_examples: int = 256,
    seed: int = 0,
    system_prompt: str | None = SYSTEM_PROMPT,
    shots: int = 0,
    box_reward: float = 0.0,
    require_box: bool = False,
    check_timeout: float = 3.0,
    check_workers: int = 4,
) -> vf.SingleTurnEnv:
    """The environment.

    Args:
        level: 1 (one step of arithmetic) to 4 (competition style), see `LEVELS`; None mixes 2 to 4. Without effect on a `dataset`.
        dataset: a hub data set (`owner/name`) or a local .jsonl, .json, .parquet or .csv file; None generates problems.
        subset: configuration of the hub data set; None: its default, or `main`.
        split: its split to train on; None: nothing, for a benchmark, whose problems no run should train on.
        eval_split: its split for evaluation; None holds out `num_eval_examples` rows of `split`.
        question_column: column of the problem; None: the first of `problem`, `question` and `prompt`.
        answer_column: column of the answer or of a solution that has it in `\\boxed{}` or after `####`; None: `answer`, else `solution`.
        num_examples: most problems to train on.
        num_eval_examples: most problems for evaluation. None of them is trained on or shown.
        seed: seed of the problems, or of the order of a data set.
        system_prompt: None asks the bare question.
        shots: solved problems that the prompt shows before the question: for small models, which copy the form of the answer. Those of a
            `dataset` are its first ones, and are not trained on.
        box_reward: weight of `boxed` in the reward, for small models that do not write boxes yet.
        require_box: a reply without a box is wrong. Otherwise one short line is taken as the answer, and a small model that is trained may
            drop the box.
        check_timeout: seconds of CPU that math-verify may take for one answer. After that the answer is wrong.
        check_workers: most processes of math-verify.
    """
    check_arguments(level, check_timeout, check_workers, num_examples, num_eval_examples, shots)
    held_out: list[dict[str, Any]] | None = None
    if dataset is None:
        train = build_rows(level, num_examples, seed)
        shown = build_rows(level, shots, seed + SHOTS_SEED)
    else:
        if split is None and (eval_split is None or shots):
            raise ValueError("split=None leaves nothing to train on: it needs eval_split, and shots=0, which are problems to train on")
        if split is not None and eval_split is not None and Path(dataset).is_file():
            raise ValueError(
                f"{dataset} is one file, so split={split} and eval_split={eval_split} are the same rows: set one of them to null"
            )
        train = [] if split is None else read_rows(dataset, subset, split, question_column, answer_column)
        random.Random(seed).shuffle(train)
        if eval_split is not None:
            held_out = read_rows(dataset, subset, eval_split, question_column, answer_column)
            random.Random(seed).shuffle(held_out)  # a file may be sorted by subject
            held_out = held_out[:num_eval_examples]
        else:
            if len(train) < 2:
                raise ValueError(f"{dataset}, split {split}, has {len(train)} row; training and evaluation need one each")
            held_out = train[: min(num_eval_examples, len(train) // 2)]
            asked = {row["question"] for row in held_out}
            train = [row for row in train if row["question"] not in asked]  # a data set may have a question twice
        if split is not None and len(train) <= shots:
            raise ValueError(f"{dataset}, split {split}, has {len(train)} rows to train on; shots={shots} leaves none")
        shown, train = train[:shots], train[shots : shots + num_examples]
    checker, parser = Checker(check_timeout, check_workers), AnswerParser(require_box)

    def eval_rows() -> list[dict[str, Any]]:
        return held_out or build_rows(level, num_eval_examples, seed + EVAL_SEED, held_out=True)

    async def correct(parser: vf.Parser, completion: vf.Messages, answer: str, info: dict[str, Any], state: vf.State) -> float:
        """1.0 if the answer is right."""
        reply = parser.parse_answer(completion) or ""
        state["check_timed_out"] = False
        if len(reply) > LONGEST:
            return 0.0
        if dataset is None and not has_the_form(reply, answer, info["source"]):
            return 0.0
        same = await checker.equal(reply, answer)
        state["check_timed_out"] = same is None
        return float(bool(same))

    def boxed(completion: vf.Messages) -> float:
        """1.0 if the reply has a box. Part of the reward with `box_reward` only."""
        return float("\\boxed{" in str(completion[-1]["content"]) if completion else False)

    def check_timed_out(state: vf.State) -> float:
        """1.0 if math-verify did not finish within its limits. Not part of the reward."""
        return float(state["check_timed_out"])

    return vf.SingleTurnEnv(
        dataset=Dataset.from_list(train) if train else None,
        eval_dataset=lambda: Dataset.from_list(eval_rows()),
        system_prompt=system_prompt,
        few_shot=[message for row in shown for message in solved(row)] or None,
        parser=parser,
        rubric=vf.Rubric(funcs=[correct, boxed, check_timed_out], weights=[1.0, box_reward, 0.0], parser=parser),
    )


__all__ = ["LEVELS", "AnswerParser", "Checker", "build_rows", "load_environment", "to_number"]
