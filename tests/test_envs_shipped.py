"""The environments that rlx ships."""

from __future__ import annotations

from pathlib import Path

import pytest
import rlx_math
import rlx_reverse_text
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
    rows = rlx_reverse_text.build_rows(100, 3, 6, seed=0) + rlx_math.build_rows(1, 100, seed=0)
    assert max(len(tiny_chat().render(row["prompt"])) for row in rows) <= 24


@pytest.mark.parametrize("level", list(rlx_math.LEVELS))
def test_every_level_of_math_accepts_its_own_answers(level: int) -> None:
    rows = rlx_math.build_rows(level, 24, seed=3)
    parser = rlx_math.AnswerParser()
    assert rows == rlx_math.build_rows(level, 24, seed=3)
    assert {row["info"]["source"] for row in rows} == set(rlx_math.LEVELS[level].sources)
    for row in rows:
        assert rlx_math.correct(parser, reply(row["answer"]), row["answer"]) == 1.0
        assert rlx_math.correct(parser, reply(f"<think>1 + 1</think>So it is \\boxed{{{row['answer']}}}."), row["answer"]) == 1.0
        assert rlx_math.correct(parser, reply(row["answer"] + "1"), row["answer"]) == 0.0


def test_the_easiest_level_is_sums_of_two_digits() -> None:
    for row in rlx_math.build_rows(1, 64, seed=0):
        left, plus, right, equals = row["question"].split()
        assert (plus, equals) == ("+", "=")
        assert row["answer"] == str(int(left) + int(right))
    with pytest.raises(ValueError, match=r"level=9 is not one of 1: the sum"):
        rlx_math.load_environment(level=9)


@pytest.mark.parametrize(
    ("text", "same"), [("1,000", "1000"), ("$7$", "7"), ("7.0", "7"), ("\\frac{1}{2}", "0.5"), ("-3.", "-3"), ("50%", "50"), ("$4", "4")]
)
def test_numbers_are_read_in_the_forms_that_models_write(text: str, same: str) -> None:
    assert rlx_math.to_number(text) == rlx_math.to_number(same) is not None


@pytest.mark.parametrize("text", ["9^{9^9}", "9**9**9", "1/0", "seven", "", "1e999999999", "1" * 100])
def test_what_is_no_plain_number_is_refused_at_once(text: str) -> None:
    assert rlx_math.to_number(text) is None


@pytest.mark.parametrize("name", ["rlx_reverse_text", "rlx_math"])
def test_a_shipped_environment_is_a_package_of_its_own(name: str) -> None:
    folder = ENVIRONMENTS / name
    assert (folder / "README.md").is_file()
    assert f'packages = ["{name}"]' in (folder / "pyproject.toml").read_text()
