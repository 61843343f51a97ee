"""Rollouts as rows: files, filters, order, and the plain commands that print them."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import zstandard
from test_rollout_runner import outcome
from traces import turns_of
from view_run import rollout, write_run, write_step

from rlx.cli import main
from rlx.config.errors import ConfigError
from rlx.paths import RunPaths
from rlx.rollout.eval_results import outcome_of, write_results
from rlx.runs.rollouts import RolloutRow, Rollouts, same_example
from rlx.runs.selection import select, sort
from rlx.runs.tokens import texts_of, tokens_of
from rlx.trace import TraceBuilder
from rlx.types import Task


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> RunPaths:
    return write_run(tmp_path_factory.mktemp("runs") / "mine")


@pytest.fixture
def rows(paths: RunPaths) -> list[RolloutRow]:
    return Rollouts(paths.root).whole()


@pytest.mark.parametrize("damage", ["cut", "empty", "no rollout"])
def test_a_damaged_file_hides_no_other(damage: str, paths: RunPaths, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    mine = RunPaths(tmp_path / "mine")
    mine.rollouts.mkdir(parents=True)
    content = paths.rollouts_of(0).read_bytes()
    mine.rollouts_of(0).write_bytes(content)
    lines = {"no rollout": b'{"reward": 1}\n'}
    cut = {"cut": content[: len(content) // 2], "empty": b""}
    mine.rollouts_of(1).write_bytes(cut[damage] if damage in cut else zstandard.compress(lines[damage]))
    rollouts = Rollouts(mine.root)
    assert len(rollouts.whole()) == 7
    (problem,) = rollouts.problems
    assert "step_000001.jsonl.zst cannot be read" in problem
    assert not rollouts.look(), "the damaged file is read again only after a change"
    mine.rollouts_of(1).write_bytes(content)
    assert rollouts.look()
    assert len(rollouts.whole()) == 14
    assert not rollouts.problems
    mine.rollouts_of(1).write_bytes(content[: len(content) // 2])
    for command in (["view", str(mine.root)], ["show", str(mine.root), "filter=step=0"]):
        assert main(command) == 0
        assert "not shown: " in capsys.readouterr().out
    assert main(["show", str(mine.root)]) == 2
    assert "ends within its compressed data" in capsys.readouterr().err


def test_show_prints_different_examples_before_members_of_one_group(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    line = {"metrics": {}, "rewards": {}, "num_tokens": 3, "reward": 1.0, "status": "ok"}
    (tmp_path / "results.jsonl").write_text(
        "".join(json.dumps({**line, "example_id": n, "member": m}) + "\n" for n in range(3) for m in (0, 1))
    )
    for options, examples in ((), [0, 1, 2]), (("count=5",), [0, 1, 2, 0, 1]), (("sort=example",), [0, 0, 1]):
        assert main(["show", str(tmp_path), *options]) == 0
        assert [int(n) for n in re.findall(r"example (\d)", capsys.readouterr().out)] == examples


def test_odd_shapes_are_shown_as_they_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    line = {"example_id": 1, "metrics": [1, 2], "rewards": [3], "timing": "long", "completion": 4.5, "prompt": {"role": "user"}}
    (tmp_path / "results.jsonl").write_text(json.dumps(line) + "\n" + json.dumps({**line, "num_tokens": 3, "seconds": "many"}) + "\n")
    assert main(["show", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "metrics: [1, 2]" in shown
    assert "4.5" in shown
    assert "many" in shown


@pytest.mark.parametrize(
    ("condition", "count"),
    [
        ("", 29),
        ("set=train", 21),
        ("set=eval", 8),
        ("set=train env=sums", 9),
        ("env=sums,words", 29),
        ("env~WORD", 12),
        ("error", 3),
        ("set=train !error reward>=1", 6),
        ("reward=0..0.5 trained", 6),
        ("step=1..2 trained", 8),
        ("step=0,2 trained", 8),
        ("step!=0 trained", 8),
        ("rule=equal_rewards", 6),
        ("advantage<0", 6),
        ("truncated", 0),
        ("stop!=done", 3),
        ("version=2 trained", 4),
        ("tokens>3", 0),
        ("turns=2 trained", 12),
    ],
)
def test_a_filter_keeps_what_meets_all_its_conditions(rows: list[RolloutRow], condition: str, count: int):
    assert len(select(rows, condition)) == count


@pytest.mark.parametrize("condition", ["rewrad<1", "reward<x", "env", "env<3", "error=1", "reward~1"])
def test_a_condition_that_cannot_be_meant_is_refused(rows: list[RolloutRow], condition: str):
    with pytest.raises(ConfigError, match=f"'{condition}' is no condition. numbers: step"):
        select(rows, condition)


def test_equal_rows_keep_their_order_and_rows_without_a_value_come_last(rows: list[RolloutRow]):
    found = sort(select(rows, "set=train"), "reward", descending=True)
    assert [row.reward for row in found] == sorted((row.reward for row in found), reverse=True)
    best = [row for row in found if row.reward == 1]
    assert best == [row for row in rows if row in best]
    ordered = sort(found, "advantage")
    assert {row.advantage for row in ordered[-9:]} == {None}
    assert None not in {row.advantage for row in ordered[:-9]}
    with pytest.raises(ConfigError, match="is no column"):
        sort(rows, "rewrad")


def test_an_example_is_found_again_at_other_steps_of_the_same_kind(rows: list[RolloutRow]):
    (row,) = select(rows, "set=train example=7 step=1 member=1")
    assert [(one.step, one.member) for one in same_example(rows, row)] == [(s, m) for s in range(3) for m in (0, 1)]
    (row,) = select(rows, "set=eval example=1 step=0 member=1")
    found = same_example(rows, row)
    assert [(one.step, one.example) for one in found] == [(0, 1), (0, 1), (2, 1), (2, 1)]
    record = found[-1].record()
    assert (record["env"], record["step"], record["num_tokens"], record["stop"], record["error"]) == ("sums", 2, 3, "done", None)


def test_a_run_that_goes_on_is_read_on(tmp_path: Path):
    paths = write_run(tmp_path / "mine", steps=1)
    rollouts = Rollouts(paths.root)
    assert len(rollouts.whole()) == 15
    assert not rollouts.look()
    write_step(paths, 1)
    assert rollouts.look()
    rows = rollouts.whole()
    assert len(rows) == 22
    paths.rollouts_of(1).unlink()  # the run returned to an earlier checkpoint
    (row, *_) = select(rows, "set=train step=1")
    with pytest.raises(ConfigError, match="has changed since it was listed"):
        row.record()
    assert rollouts.look()
    assert len(rollouts.whole()) == 15


def test_tokens_come_with_their_numbers_and_texts(paths: RunPaths):
    (tokens,) = tokens_of(paths.root, step=2, group=20, member=1)
    sample = tokens.sample
    texts = texts_of(paths.root, sample.token_ids.tolist())
    assert "".join(texts).split() == ["<user>", "one", "plus", "two", "<bot>", "call", "<tool>", "three", "<bot>", "is", "three"]
    assert sample.loss_mask.nonzero()[0].tolist() == [5, 9, 10]
    assert sample.versions[sample.loss_mask].tolist() == [1, 2, 2]
    assert sample.inference_logprobs[sample.loss_mask] == pytest.approx([-0.01, -0.01, -6.0])
    with pytest.raises(match="was not trained on"):
        tokens_of(paths.root, step=2, group=25, member=0)
    with pytest.raises(match=r"step_000009.* does not exist"):
        tokens_of(paths.root, step=9, group=0, member=0)
    assert texts_of(paths.root / "elsewhere", [3, 4]) == ["⟨3⟩", "⟨4⟩"]


def test_bytes_that_begin_no_character_do_not_end_the_text_of_a_tokenizer_that_falls_back_to_bytes(tmp_path: Path):
    """As Llama 2, Mistral and Gemma have it: a policy may well sample the first byte of a character and then a word."""
    from tokenizers import Tokenizer, decoders, models

    words = ["<0x41>", "<0xC3>", "<0xA9>", "▁a", "b"]
    tokenizer = Tokenizer(models.BPE(vocab={word: number for number, word in enumerate(words)}, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    folder = RunPaths(tmp_path).weights_of(1)
    folder.mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    assert texts_of(tmp_path, [0, 1, 3, 4]) == ["A", "", " a", "b"]
    assert "".join(texts_of(tmp_path, [3, 1, 2, 4])) == " aéb"


def test_a_run_of_a_sweep_is_shown_by_its_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    paths = write_run(tmp_path / "loss=grpo,seed=1", steps=1)
    assert main(["show", str(paths.root), "count=1"]) == 0
    assert "assistant: is four" in capsys.readouterr().out
    assert main(["show", "filter=reward<0"]) == 2, "the run is missing"


def test_every_rollout_of_a_synthesis_is_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    paths = RunPaths(tmp_path)
    paths.config.touch()
    task = Task(env="sums", example_id=7, index=3, row={})
    records = []
    for member, stop in ((0, "max_turns_reached"), (1, "boom")):
        played = rollout(task, member, 0, stop=stop, status="error" if member else "ok")
        said = TraceBuilder()
        said.add(0, [{"role": "user", "content": "3+4?"}], None, {"role": "assistant", "content": "seven"}, turns_of(played)[0])
        shown = replace(played, trace=said.trace(), completion=[{"role": "assistant", "content": "seven"}])
        records.append(msgspec.json.encode(outcome_of(shown, env="sums")))
    paths.finished.parent.mkdir()
    paths.finished.write_bytes(b"\n".join([*records, b""]))
    assert main(["view", str(tmp_path), "filter=set=synthesis"]) == 0
    assert "2 rollouts" in (out := capsys.readouterr().out)
    assert "1 failed" in out
    assert main(["show", str(tmp_path), "filter=!error"]) == 0
    assert capsys.readouterr().out.splitlines()[0] == "sums, example 7   reward 0.000   1 tokens, max_turns_reached"
    assert main(["show", str(tmp_path), "filter=error"]) == 0
    assert "assistant: seven" in capsys.readouterr().out


def test_results_of_verifiers_own_commands_are_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    folder = tmp_path / "evals" / "gsm8k--gpt" / "1a2b"
    folder.mkdir(parents=True)
    lines = [{"example_id": n, "prompt": "1+1", "completion": "2", "reward": 1.0, "task": "default"} for n in range(3)]
    (folder / "results.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    assert main(["view", str(tmp_path), "filter=example>0"]) == 0
    out = capsys.readouterr().out
    assert "2 of 3 rollouts   reward 1.000   0 failed" in out
    assert "gsm8k" in out
    assert main(["show", str(folder), "count=1"]) == 0
    assert capsys.readouterr().out == "gsm8k, example 0   reward 1.000   no stop condition\n  1+1\n  2\n"


def test_numbers_that_json_does_not_have_and_blank_lines_hide_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Python's json writes NaN and Infinity."""
    nan, file = float("nan"), tmp_path / "results.jsonl"
    lines = [{"example_id": n, "prompt": "1+1", "completion": f"said {n}", "reward": 1.0} for n in range(4)]
    lines[1] |= {"metrics": {"kl": nan}, "info": {"most": -float("inf")}}
    lines[2]["reward"] = nan
    texts = [json.dumps(line) + "\n" for line in lines]
    file.write_text("\n" + "".join(texts[:2]) + "  \n\n" + "".join(texts[2:]) + "\n")
    rows = Rollouts(tmp_path).whole()
    assert [row.record()["completion"] for row in rows] == [f"said {n}" for n in range(4)]
    assert [row.reward for row in rows] == [1.0, 1.0, None, 1.0]
    assert main(["view", str(tmp_path)]) == 0
    assert main(["show", str(tmp_path), "filter=example=1"]) == 0
    out = capsys.readouterr().out
    assert ": 4 rollouts" in out
    assert "metrics: kl nan" in out
    file.write_text("\n" + texts[0] + texts[0].replace("1.0", "NaM"))
    with pytest.raises(ConfigError, match="line 3 is no rollout: "):
        Rollouts(tmp_path).whole()


def test_a_rollout_without_an_answer_hides_no_other_and_what_is_not_known_meets_no_condition(tmp_path: Path):
    """Results of evaluations have no version, and no tokens where an endpoint returns none."""
    run = RunPaths(tmp_path)
    folder = run.evaluation_of("math", "m", 3)
    answers = [
        outcome(0, 0),
        outcome(0, 1, turns=[], status="error", stop="prompt_too_long", error="too long"),
        outcome(1, 0),
        outcome(1, 1),
    ]
    write_results(folder, [answers[:2], answers[2:]], {"env_id": "math", "model": "m"}, 0.5)
    found = Rollouts(run.root).whole()
    assert len(found) == 4
    assert [len(select(found, condition)) for condition in ("tokens<9", "tokens!=9", "version<5", "member<9", "error")] == [3, 3, 0, 4, 1]
    assert sort(found, "tokens")[-1] == found[1]


def test_without_a_terminal_the_commands_print_plain_text(paths: RunPaths, capsys: pytest.CaptureFixture[str]):
    assert main(["view", str(paths.root), "filter=set=train reward>0.5", "sort=-step", "count=2"]) == 0
    head, names, *rows, more = capsys.readouterr().out.splitlines()
    assert head.endswith("6 of 29 rollouts   reward 1.000   3 tokens   0 failed")
    assert names.split() == ["step", "set", "env", "example", "reward", "advantage", "tokens", "turns", "version", "stop", "error"]
    assert [row.split() for row in rows] == [
        ["2", "train", "sums", "7", "1.000", "+1.000", "3", "2", "1-2", "done"],
        ["2", "train", "words", "102", "1.000", "+1.000", "3", "2", "1-2", "done"],
    ]
    assert more.startswith("… 4 more")
    assert main(["show", str(paths.root), "filter=error step=1"]) == 0
    out = capsys.readouterr().out
    assert "error: took␛[31m too long" in out  # no escape sequence of a text reaches the terminal
    assert main(["show", str(paths.root), "count=1"]) == 0
    assert 'assistant (call): add({"a": 1, "b": 2})\n  tool: three\n  assistant: is four' in capsys.readouterr().out
    for wrong in (["filter=rewrad<1"], ["sort=rewrad"], ["colour=red"], ["count=x"], ["plain=maybe"]):
        assert main(["view", str(paths.root), *wrong]) == 2
