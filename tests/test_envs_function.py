"""`env=function`: rows of a file, and a function that scores the answers."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from policy_stand_in import InTurn, policy_of, task_of

from rlx.cli import main
from rlx.config.schema import EnvConfig
from rlx.envs.demonstrations import conversations
from rlx.envs.kinds import load_one
from rlx.envs.wire import Settings
from rlx.types import Rollout

FUNCTION = "rlx.envs.function"

REWARDS = """
import asyncio, time
def exact(completion, row):
    return completion == row["answer"]
async def slow(completion, row):
    await asyncio.sleep(0.01)
    return 0.5
def raises(completion, row):
    raise KeyError("no such unit")
def nothing(completion, row):
    return None
def hangs(completion, row):
    time.sleep(30)
def without_row(completion):
    return len(completion) / 4
def of_trl(completions, **columns):
    return [1.0]
def of_verl(data_source, solution_str, ground_truth):
    return 1.0
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a module of rewards and a file of rows, from where a run starts."""
    rows = [{"question": word, "solution": word[::-1], "level": n} for n, word in enumerate(("abc", "defg", "xyz"))]
    (tmp_path / "words.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "held_out.jsonl").write_text(json.dumps({"question": "qr", "solution": "rq"}) + "\n")
    (tmp_path / "own_rewards.py").write_text(REWARDS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "own_rewards", raising=False)
    return tmp_path


def load(reward: str = "own_rewards.exact", timeout: float = 30.0, keys: dict[str, Any] | None = None, **args: Any) -> Any:
    given = {"data": "words.jsonl", "reward": reward, "answer": "solution", **args}
    return load_one("e", EnvConfig(id=FUNCTION, args=given, **(keys or {})), Settings(timeout=timeout))


def play(env: Any, *texts: str) -> list[Rollout]:
    env.policy = policy_of(InTurn(*texts), context_length=8192)
    return asyncio.run(env.play(task_of(env), range(len(texts)), 0))


def test_each_answer_is_scored_by_the_function_with_its_row(folder: Path):
    env = load(system="Write it backwards.")
    assert [row["prompt"][-1]["content"] for row in env.rows] == ["abc", "defg", "xyz"]
    right, wrong = play(env, "cba", "abc")
    assert [right.reward, wrong.reward] == [1.0, 0.0]
    assert right.prompt == [{"role": "system", "content": "Write it backwards."}, {"role": "user", "content": "abc"}]
    assert right.completion == [{"role": "assistant", "content": "cba"}]
    assert right.rewards == {"exact": 1.0}
    assert right.trace.num_sampled == 4, "three letters and the end of the turn"
    assert [rollout.reward for rollout in play(load("own_rewards.slow"), "x")] == [0.5]
    assert [rollout.reward for rollout in play(load("own_rewards.without_row"), "x")] == [0.25]


@pytest.mark.parametrize(
    ("reward", "stop", "said"),
    [
        ("raises", "reward_raised", "no such unit"),
        ("nothing", "reward_raised", "returned None"),
        ("hangs", "timeout", "no result after 1 s"),
    ],
)
def test_what_is_no_reward_is_an_error_of_the_rollout(folder: Path, reward: str, stop: str, said: str):
    (rollout,) = play(load(f"own_rewards.{reward}", timeout=1.0), "cba")
    assert rollout.status != "ok"
    assert rollout.stop == stop
    assert said in (rollout.error or "")


@pytest.mark.parametrize(
    ("reward", "said"),
    [
        ("raises", "fails for the answer 'a made-up answer': KeyError: no key 'no such unit'; at .*own_rewards.py:"),
        ("nothing", "returned None for the answer 'a made-up answer'; a reward is a finite number"),
        ("of_trl", r"returned \[1.0\] for the answer"),
        ("exact", None),
    ],
)
def test_a_made_up_answer_is_scored_before_anything_starts(folder: Path, reward: str, said: str | None):
    env = load(f"own_rewards.{reward}")
    with pytest.raises(ValueError, match=said) if said else nullcontext():
        env.rehearse()


def test_a_reward_that_raises_may_count_as_zero(folder: Path):
    (rollout,) = play(load("own_rewards.raises", keys={"on_reward_error": "zero"}), "cba")
    assert (rollout.status, rollout.reward, rollout.metrics["reward_error"]) == ("ok", 0.0, 1.0)


def test_rows_for_evaluation_are_those_that_the_arguments_name(folder: Path, caplog: pytest.LogCaptureFixture):
    assert [row["answer"] for row in load(keys={"split": "eval"}, eval_data="held_out.jsonl").rows] == ["rq"]
    assert len(load(keys={"split": "eval"}).rows) == 3
    assert "those of training are evaluated" in caplog.text
    assert len(load(split="train[:2]").rows) == 2


def test_a_model_without_training_learns_the_answers_of_the_rows_first(folder: Path):
    env = load()
    said = conversations(env, env.rows[:2], 0.0, 0)
    assert [one.played for one in said] == [[{"role": "assistant", "content": text}] for text in ("cba", "gfed")]


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ({"reward": "own_rewards.exakt"}, "own_rewards has no function or class exakt"),
        ({"reward": "nobodys.exact"}, "nobodys cannot be imported"),
        ({"reward": "exact"}, "cannot be imported"),
        ({"reward": "own_rewards.of_verl"}, "with a completion and its row, and own_rewards.of_verl(data_source, "),
        ({"promt": "query"}, "unexpected keyword argument 'promt'"),
        ({"data": "lost.jsonl"}, "lost.jsonl does not exist"),
        ({"prompt": "query"}, "has no column 'query' (args.prompt); it has question, solution, level"),
        ({"answer": "target"}, "has no column 'target' (args.answer)"),
    ],
)
def test_a_wrong_argument_is_a_sentence(folder: Path, args: dict[str, str], said: str):
    with pytest.raises(ValueError, match=r"^envs\.e: ") as caught:
        load(**args)
    assert said in str(caught.value)


def test_a_prompt_of_messages_has_the_form_that_templates_read(folder: Path):
    """Arrow gives a message the keys of all others, with None; parts of content are one text; a call's arguments are JSON."""
    from datasets import Dataset

    call = {"id": "c0", "function": {"name": "add", "arguments": {"a": 1}}}
    shots = [{"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "tool_call_id": "c0", "content": "1"}]
    asked = [[{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], [{"type": "image_url", "url": "c"}]]
    first, other = (
        [*shots, {"role": "user", "content": "go"}],
        [{"role": "assistant", "tool_calls": [{"function": {"arguments": {"b": 2}}}]}],
    )
    Dataset.from_list([{"question": first, "solution": "x"}, {"question": other, "solution": "y"}]).to_parquet("words.parquet")
    (folder / "parts.jsonl").write_text("".join(json.dumps({"question": [{"role": "user", "content": c}]}) + "\n" for c in asked))
    written = {"id": "c0", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    assert load(data="words.parquet").rows[0]["prompt"] == [
        {"role": "assistant", "content": "", "tool_calls": [written]},
        {"role": "tool", "tool_call_id": "c0", "content": "1"},
        {"role": "user", "content": "go"},
    ]
    env = load(data="parts.jsonl", answer=None)
    assert env.rows[0]["prompt"] == [{"role": "user", "content": "a\nb"}]
    with pytest.raises(ValueError, match=r"line 2\) cannot be a prompt: a message has content of type 'image_url'"):
        env.rows[1]


def test_a_missing_argument_is_refused_before_anything_starts(folder: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["train", "env=function", "env.args.data=words.jsonl", "dry_run=true"]) == 2
    assert "missing 1 required positional argument: 'reward'" in " ".join(capsys.readouterr().err.split())


def test_rollouts_do_not_wait_for_each_others_functions(folder: Path):
    (folder / "own_rewards.py").write_text("import time\ndef half(completion, row):\n    time.sleep(0.5)\n    return 1\n")
    env = load("own_rewards.half")
    env.policy = policy_of(InTurn(*["x"] * 4), context_length=8192)
    began = time.monotonic()
    assert len(asyncio.run(env.play(task_of(env), range(4), 0))) == 4
    assert time.monotonic() - began < 1.9


@pytest.mark.parametrize(("source", "reward"), [("import functools, operator\nhalf = functools.partial(lambda a, b, c: 0.5, 1)", 0.5), (
    "class Judge:\n    async def __call__(self, completion, row):\n        return 0.25\nhalf = Judge()", 0.25
)])  # fmt: skip
def test_a_reward_may_be_any_callable(folder: Path, source: str, reward: float):
    (folder / "own_rewards.py").write_text(source)
    (rollout,) = play(load("own_rewards.half"), "x")
    assert (rollout.status, rollout.reward) == ("ok", reward)


def test_a_reward_that_exits_is_one_that_raises(folder: Path):
    (folder / "own_rewards.py").write_text("def leave(completion, row):\n    exit(3)\n")
    (rollout,) = play(load("own_rewards.leave"), "x")
    assert (rollout.status, rollout.stop) == ("error", "reward_raised")
