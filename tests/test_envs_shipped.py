"""The environments that rlx ships."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path

import datasets
import pytest
import rlx_math
import rlx_reverse_text
import rlx_sums
from policy_stand_in import tiny_chat

ENVIRONMENTS = Path(__file__).parent.parent / "environments"


def reply(text: str) -> list[dict]:
    return [{"role": "assistant", "content": text}]


def test_reversing_rewards_the_exact_answer_only() -> None:
    parser = rlx_reverse_text.AnswerParser()
    assert rlx_reverse_text.exact(parser, reply(" cba\n"), "cba") == 1.0
    assert rlx_reverse_text.exact(parser, reply("cbaa"), "cba") == 0.0
    assert rlx_reverse_text.exact(parser, reply(""), "cba") == 0.0
    assert 0 < rlx_reverse_text.similarity(parser, reply("cb"), "cba") < 1


def test_words_have_the_asked_lengths_and_follow_from_the_seed() -> None:
    rows = rlx_reverse_text.build_rows(200, 2, 4, seed=1)
    assert {len(row["question"]) for row in rows} == {2, 3, 4}
    assert all(row["answer"] == row["question"][::-1] for row in rows)
    assert rows == rlx_reverse_text.build_rows(200, 2, 4, seed=1)
    assert rows != rlx_reverse_text.build_rows(200, 2, 4, seed=2)
    with pytest.raises(ValueError, match=r"min_length=5 and max_length=2"):
        rlx_reverse_text.load_environment(min_length=5, max_length=2)


def test_a_prompt_of_the_easy_environments_is_well_under_40_tokens_of_the_tiny_model() -> None:
    rows = rlx_reverse_text.build_rows(100, 3, 6, seed=0) + rlx_sums.build_rows(1, 100, seed=0)
    assert max(len(tiny_chat().render(row["prompt"])) for row in rows) <= 24


# sums


@pytest.mark.parametrize("level", list(rlx_sums.LEVELS))
def test_every_level_of_sums_accepts_its_own_answers(level: int) -> None:
    rows = rlx_sums.build_rows(level, 64, seed=3)
    parser = rlx_sums.AnswerParser()
    assert rows == rlx_sums.build_rows(level, 64, seed=3)
    for row in rows:
        assert str(eval(row["question"].removesuffix("="))) == row["answer"]
        assert rlx_sums.correct(parser, reply(row["answer"] + "\n"), row["answer"]) == 1.0
        assert rlx_sums.correct(parser, reply(row["answer"] + "1"), row["answer"]) == 0.0


def test_the_easiest_level_of_sums_has_two_digits() -> None:
    for row in rlx_sums.build_rows(1, 64, seed=0):
        left, plus, right, equals = row["question"].split()
        assert (len(left), plus, len(right), equals) == (1, "+", 1, "=")
    assert {len(row["question"].split()) for row in rlx_sums.build_rows(3, 64, seed=0)} == {4, 6}
    with pytest.raises(ValueError, match=r"level=9 is not one of 1: the sum"):
        rlx_sums.load_environment(level=9)


# math


@pytest.fixture(scope="module")
def checker() -> rlx_math.Checker:
    return rlx_math.Checker(timeout=1.0, workers=4)


def equal(checker: rlx_math.Checker, *pairs: tuple[str, str]) -> list[bool | None]:
    async def ask() -> list[bool | None]:
        return await asyncio.gather(*(checker.equal(*pair) for pair in pairs))

    return asyncio.run(ask())


@pytest.mark.parametrize("level", list(rlx_math.LEVELS))
def test_every_level_of_math_accepts_its_own_answers(level: int, checker: rlx_math.Checker) -> None:
    rows = rlx_math.build_rows(level, 48, seed=3)
    parser = rlx_math.AnswerParser()
    assert rows == rlx_math.build_rows(level, 48, seed=3)
    spec = rlx_math.LEVELS[level]
    assert {row["info"]["source"] for row in rows} == {*spec.gym, *(template.__name__ for template in spec.templates)}
    for row in rows:
        assert parser.parse(f"<think>\\boxed{{1}}</think>So it is $\\boxed{{{row['answer']}}}$.") == row["answer"]
        assert "final answer" not in row["question"]
    own = [(f"0 + {row['answer']}", row["answer"]) for row in rows[:8]]
    assert equal(checker, *own) == [True] * 8
    assert equal(checker, *((f"{row['answer']} + 1", row["answer"]) for row in rows[:8])) == [False] * 8


@pytest.mark.parametrize(
    ("text", "same"),
    [("1,000", "1000"), ("$7$", "7"), ("7.0", "7"), ("\\frac{1}{2}", "0.5"), ("-3.", "-3"), ("50%", "50"), ("$4", "4"), ("-1/2", "-.5")],
)
def test_numbers_are_read_in_the_forms_that_models_write(text: str, same: str) -> None:
    assert rlx_math.to_number(text) == rlx_math.to_number(same) is not None


@pytest.mark.parametrize("text", ["9^{9^9}", "9**9**9", "1/0", "seven", "", "1e999999999", "1" * 100, "1,2", "(1,234)"])
def test_what_is_no_plain_number_is_refused_at_once(text: str) -> None:
    assert rlx_math.to_number(text) is None


def test_math_verify_decides_where_numbers_do_not(checker: rlx_math.Checker) -> None:
    right = [("x(x+1)", "x^2 + x"), ("\\sqrt{12}", "2\\sqrt{3}"), ("(1, 2)", "(1,2)"), ("x = 4", "4"), ("-9-8i", "-9.0 - 8.0i")]
    wrong = [("x(x+2)", "x^2 + x"), ("(2, 1)", "(1,2)"), ("", "4"), ("}{", "4"), ("1" * 500, "4"), ("0.33", "\\frac{1}{3}")]
    assert equal(checker, *right, *wrong) == [True] * len(right) + [False] * len(wrong)


def test_a_comparison_that_would_take_for_ever_ends_and_delays_no_other(checker: rlx_math.Checker) -> None:
    equal(checker, ("2 + x", "x + 2"))  # starts the process
    began = time.monotonic()
    ended: dict[str, float] = {}

    async def ask(reply: str) -> bool | None:
        same = await checker.equal(reply, "2 + y")
        ended[reply] = time.monotonic() - began
        return same

    async def all_at_once() -> list[bool | None]:
        return await asyncio.gather(*map(ask, ["9^{9^9}", "9^{9^{9^9}}", "y + 2"]))

    assert asyncio.run(all_at_once()) == [None, None, True]
    assert ended["y + 2"] < min(ended["9^{9^9}"], ended["9^{9^{9^9}}"]) < 6


def test_a_math_process_that_dies_is_replaced(checker: rlx_math.Checker) -> None:
    equal(checker, ("1 + x", "x + 1"))
    assert checker._process is not None
    checker._process.kill()
    checker._process.wait()
    assert equal(checker, ("x + 1 + 2", "x + 3")) == [True]


def test_math_reads_a_data_set_by_its_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    answers = ["7", "So \\boxed{\\frac{1}{2}}.", "First 3.\n#### 1,234"]
    lines = [json.dumps({"q": f"question {number}", "a": answers[number % 3]}) for number in range(30)]
    (tmp_path / "own.jsonl").write_text("\n".join(lines))
    asked = {"dataset": str(tmp_path / "own.jsonl"), "question_column": "q", "answer_column": "a"}
    env = rlx_math.load_environment(**asked, num_eval_examples=6, num_examples=20)
    train, held_out = env.get_dataset(), env.get_eval_dataset()
    assert (len(train), len(held_out)) == (20, 6)
    assert set(train["answer"]) == {"7", "\\frac{1}{2}", "1234"}
    assert not set(train["question"]) & set(held_out["question"])
    assert [message["role"] for message in train[0]["prompt"]] == ["system", "user"]
    with pytest.raises(ValueError, match=r"has no column question_column=problem; its columns are q, a"):
        rlx_math.load_environment(dataset=asked["dataset"])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"level": 5}, r"level=5 is not one of 1: one step"),
        ({"check_workers": 0}, "check_workers=0"),
        ({"num_examples": 0}, "num_examples=0"),
    ],
)
def test_wrong_arguments_of_math_are_named(arguments: dict, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        rlx_math.load_environment(**arguments)


# all


@pytest.mark.parametrize("folder", sorted(path for path in ENVIRONMENTS.iterdir() if path.is_dir()), ids=lambda path: path.name)
def test_a_shipped_environment_is_a_package_of_its_own(folder: Path) -> None:
    assert (folder / "README.md").is_file()
    assert f'packages = ["{folder.name}"]' in (folder / "pyproject.toml").read_text()
    ours = (ENVIRONMENTS.parent / "pyproject.toml").read_text()
    assert f'{folder.name} = "environments/{folder.name}/{folder.name}"' in ours
    option = ENVIRONMENTS.parent / "conf" / "env" / f"{folder.name.removeprefix('rlx_')}.yaml"
    assert f"id: {folder.name.replace('_', '-')}\n" in option.read_text()
