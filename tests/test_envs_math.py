"""The mathematics environment: problems, and the comparison of answers within limits."""

from __future__ import annotations

import asyncio
import json
import signal
import threading
import time
from pathlib import Path

import datasets
import pytest
import rlx_math
from policy_stand_in import load, play_texts

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def checker() -> rlx_math.Checker:
    return rlx_math.Checker(timeout=30.0, workers=4)


def equal(checker: rlx_math.Checker, *pairs: tuple[str, str]) -> list[bool | None]:
    async def ask() -> list[bool | None]:
        return await asyncio.gather(*(checker.equal(*pair) for pair in pairs))

    return asyncio.run(ask())


async def test_requests_that_fill_the_pipe_to_a_busy_process_do_not_block_the_event_loop() -> None:
    checker = rlx_math.Checker(timeout=30.0, workers=1)

    await checker.equal("1 + x", "x + 1")  # the process has started
    assert checker._process is not None
    process = checker._process
    process.send_signal(signal.SIGSTOP)  # it reads nothing
    blocked = threading.Timer(60, process.send_signal, (signal.SIGCONT,))
    blocked.start()
    many = [asyncio.ensure_future(checker.equal(f"z + {number}", "1" * 40_000)) for number in range(4)]
    await asyncio.sleep(0)  # each has been asked for: 160 KB
    assert not any(one.done() for one in many)
    assert not blocked.finished.is_set(), "the event loop waited until the process went on"
    blocked.cancel()
    process.send_signal(signal.SIGCONT)
    assert await asyncio.gather(*many) == [False] * 4


@pytest.mark.parametrize("level", list(rlx_math.LEVELS))
def test_every_level_of_math_accepts_its_own_answers(level: int, checker: rlx_math.Checker) -> None:
    rows = rlx_math.build_rows(level, 26, seed=3)
    parser = rlx_math.AnswerParser()
    assert rows == rlx_math.build_rows(level, 26, seed=3)
    spec = rlx_math.LEVELS[level]
    assert {row["info"]["source"] for row in rows} == {*spec.gym, *(template.__name__ for template in spec.templates)}
    for row in rows:
        assert parser.parse(f"<think>\\boxed{{1}}</think>So it is $\\boxed{{{row['answer']}}}$.") == row["answer"]
        assert "final answer" not in row["question"]
    own = [(f"0 + {row['answer']}", row["answer"]) for row in rows[:4]]
    assert equal(checker, *own) == [True] * 4
    assert equal(checker, *((f"{row['answer']} + 1", row["answer"]) for row in rows[:4])) == [False] * 4


@pytest.mark.parametrize(
    ("text", "answer", "boxed_answer"), [("7", "7", ""), ("<think>8</think> It is \\boxed{7}.", "7", "7"), ("\\boxed{7}", "7", "7")]
)
def test_a_short_reply_without_a_box_is_no_answer_where_a_box_is_required(text: str, answer: str, boxed_answer: str) -> None:
    assert rlx_math.AnswerParser().parse(text) == answer
    assert rlx_math.AnswerParser(require_box=True).parse(text) == boxed_answer


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


async def test_a_comparison_that_would_take_for_ever_ends_and_delays_no_other() -> None:
    checker = rlx_math.Checker(timeout=1.0, workers=4)
    await checker.equal("2 + x", "x + 2")  # starts the process
    began = time.monotonic()
    ended: dict[str, float] = {}

    async def ask(reply: str) -> bool | None:
        same = await checker.equal(reply, "2 + y")
        ended[reply] = time.monotonic() - began
        return same

    assert await asyncio.gather(*map(ask, ["9^{9^9}", "9^{9^{9^9}}", "y + 2"])) == [None, None, True]
    assert ended["y + 2"] < min(ended["9^{9^9}"], ended["9^{9^{9^9}}"])


def test_a_math_process_that_dies_is_replaced(checker: rlx_math.Checker) -> None:
    equal(checker, ("1 + x", "x + 1"))
    checker._process.kill()
    checker._process.wait()
    assert equal(checker, ("x + 1 + 2", "x + 3")) == [True]


def test_a_comparison_whose_process_dies_is_made_again_and_one_that_is_never_made_is_not_remembered() -> None:
    checker = rlx_math.Checker(timeout=30.0, workers=1)

    async def killed(times: int) -> bool | None:
        asked = asyncio.ensure_future(checker.equal("x + 2 + 2", "x + 4"))
        for _ in range(times):
            await asyncio.sleep(0)
            process = checker._process
            process.kill()
            while not asked.done() and checker._process is process:
                await asyncio.sleep(0.01)
        return await asked

    assert asyncio.run(killed(2)) is None
    assert asyncio.run(killed(1)) is True


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
    with pytest.raises(
        ValueError, match=r"has no column named problem or question or prompt, and question_column is not set; its columns are q, a"
    ):
        rlx_math.load_environment(dataset=asked["dataset"])
    env = rlx_math.load_environment(**asked, num_eval_examples=6, shots=2)
    train = env.get_dataset()
    asks = [message["content"] for message in train[0]["prompt"] if message["role"] == "user"]
    assert asks[-1] == train[0]["question"]
    assert not set(asks[:2]) & ({*train["question"]} | {*env.get_eval_dataset()["question"]}), "what is shown is neither trained nor asked"
    with pytest.raises(ValueError, match="has 24 rows to train on; shots=24 leaves none"):
        rlx_math.load_environment(**asked, num_eval_examples=6, shots=24)


def test_a_benchmark_of_math_has_nothing_to_train_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    file = tmp_path / "own.jsonl"
    file.write_text("\n".join(json.dumps({"problem": f"question {n}", "answer": "7"}) for n in range(30)))
    env = rlx_math.load_environment(dataset=str(file), split=None, eval_split="test", num_eval_examples=500)
    assert (env.dataset, len(env.get_eval_dataset())) == (None, 30)
    with pytest.raises(ValueError, match="split=train and eval_split=test are the same rows"):
        rlx_math.load_environment(dataset=str(file), eval_split="test")
    with pytest.raises(ValueError, match="split=None leaves nothing to train on"):
        rlx_math.load_environment(dataset=str(file), split=None)


def test_math_holds_out_questions_that_a_data_set_repeats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "own.jsonl").write_text("\n".join(json.dumps({"problem": f"question {n % 15}", "answer": "7"}) for n in range(30)))
    env = rlx_math.load_environment(dataset=str(tmp_path / "own.jsonl"), num_eval_examples=6)
    assert len(env.get_dataset()) > 0
    assert not set(env.get_dataset()["question"]) & set(env.get_eval_dataset()["question"])


@pytest.mark.parametrize("level", [None, *rlx_math.LEVELS])
def test_math_is_evaluated_on_problems_that_it_neither_trains_on_nor_shows(level: int | None) -> None:
    for seed in (0, 5):
        env = rlx_math.load_environment(level=level, seed=seed, num_examples=1024, num_eval_examples=128, shots=2)
        held_out = env.get_eval_dataset()
        asked = set(held_out["question"])
        assert len(asked) == len(held_out) == 128, "none twice"
        shown = {message["content"] for message in held_out[0]["prompt"][:-1]}
        assert not asked & ({*env.get_dataset()["question"]} | shown)
        reordered = {tuple(sorted(question.split())) for question in asked}
        assert not reordered & {tuple(sorted(question.split())) for question in env.get_dataset()["question"]}, "in another order neither"
        trained = [row["question"] for row in rlx_math.build_rows(level, 1024, seed)]
        assert list(env.get_dataset()["question"]) == trained, "what is trained on follows from the seed alone"


def test_a_problem_of_math_is_on_the_same_side_for_every_seed() -> None:
    asked = {row["question"] for row in rlx_math.build_rows(1, 10_000, rlx_math.EVAL_SEED, held_out=True)}
    assert len([question for question in asked if "cdot" in question]) == 25, "a quarter of the 100 products of two digits"
    for seed in range(4):
        assert not asked & {row["question"] for row in rlx_math.build_rows(1, 2_000, seed)}


@pytest.mark.parametrize("level", [None, *rlx_math.LEVELS])
def test_what_math_shows_as_solved_is_right_by_its_own_rules(level: int | None) -> None:
    env = rlx_math.load_environment(level=level, shots=5, num_examples=2)
    shown = rlx_math.build_rows(level, 5, rlx_math.SHOTS_SEED)
    system, *said, question = env.get_dataset()[0]["prompt"]
    assert (system["role"], question["content"]) == ("system", env.get_dataset()[0]["question"])
    assert [message["content"] for message in said[::2]] == [row["question"] for row in shown]
    assert [env.parser.parse(message["content"]) for message in said[1::2]] == [row["answer"] for row in shown]


def test_math_scores_a_reply_as_it_is_played() -> None:
    env = load("rlx-math", level=1, num_examples=4)
    answer = env.rows[0]["answer"]
    rollout = play_texts(env, f"So it is $\\boxed{{{answer}}}$.")
    assert (rollout.reward, rollout.metrics["boxed"], rollout.metrics["check_timed_out"]) == (1.0, 1.0, 0.0)
    rollout = play_texts(env, "I do not know.\nSorry.")
    assert (rollout.reward, rollout.metrics["boxed"], rollout.metrics["check_timed_out"]) == (0.0, 0.0, 0.0)
