"""Batches of supervised training."""

from __future__ import annotations

import dataclasses
import json
import threading
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from test_codec_records import same
from test_data_source import on_two_ranks
from trainer_examples import Samples, make_samples

from rlx.config.load import compose
from rlx.config.roots import SFT
from rlx.config.schema import WarmStartConfig
from rlx.data.packing import pack
from rlx.data.supervised import Conversations, Prepared, SupervisedSource, shares, shuffled_batches
from rlx.models import tiny
from rlx.parallel.mesh import one_process
from rlx.paths import RunPaths
from rlx.policy.source import chat_of, source_of
from rlx.types import StepBatch, TrainingSample


def samples_of(count: int, env: str = "a") -> list:
    return [dataclasses.replace(sample, group=0, env=env) for sample in (make_samples() * 9)[:count]]


def batches_of(count: int = 16, **keys: Any) -> SupervisedSource:
    return SupervisedSource([(Samples("a", samples_of(count)), 1.0)], **{"batch_size": 6, "seed": 1, **keys})


def test_batches_visit_every_example_before_any_again() -> None:
    batches = shuffled_batches(10, 4, seed=0)
    visited = [i for _ in range(5) for i in next(batches)]
    assert sorted(visited[:10]) == sorted(visited[10:]) == list(range(10))
    assert visited[:10] != visited[10:]
    assert list(islice(shuffled_batches(3, 2, seed=0, shuffle=False), 3)) == [[0, 1], [2, 0], [1, 2]]


def test_a_supervised_source_gives_the_same_batch_for_a_step_in_any_order() -> None:
    source = batches_of()
    in_order = [source.receive(step) for step in range(5)]
    for step in (4, 1, 3, 0):
        assert same(source.receive(step), in_order[step])
    assert same(batches_of().receive(3), in_order[3])
    assert not same(batches_of(seed=2).receive(3), in_order[3])
    ready, order = samples_of(16), shuffled_batches(16, 6, seed=1)
    for batch in in_order:
        (mini_batch,) = batch.mini_batches
        assert [s.group for s in mini_batch] == list(range(6)), "every example is its own group, even if it comes twice"
        assert same([s.token_ids for s in mini_batch], [ready[i].token_ids for i in next(order)])


def test_sets_share_the_places_by_weight_at_every_moment() -> None:
    for weights in ([1.0, 2.0], [0.5, 0.3, 0.2], [1.0, 1.0]):
        drawn = list(islice(shares(weights), 1000))
        for end in (10, 57, 1000):
            counts = Counter(drawn[:end])
            assert all(abs(counts[i] - end * weight / sum(weights)) < 1 for i, weight in enumerate(weights))
    sets = [(Samples(name, samples_of(16, name)), weight) for name, weight in (("a", 3.0), ("b", 1.0))]
    source = SupervisedSource(sets, batch_size=6, seed=0)
    envs = [sample.env for step in range(4) for sample in source.receive(step).mini_batches[0]]
    assert Counter(envs) == {"a": 18, "b": 6}
    reports = [source.report(step) for step in range(4)]
    assert sum(report["data/b/rows"] for report in reports) == 6
    assert reports[3]["data/epoch"] == 24 / 32


class Words:
    """A chat format of one token per character. An answer ends with a full stop."""

    stop_token_ids, closing = (ord("."),), 0

    def render(self, messages: list, tools: Any = None) -> list[int]:
        return [ord(c) for message in messages for c in message["content"] + "."]

    transcript = render

    def extend(self, asked: Any, answer: Any, before: list, new: list, tools: Any = None) -> list[int]:
        return self.render([*before, *new])

    def marks_in(self, text: str) -> list[str]:
        return []

    def text(self, ids: Any) -> str:
        return "".join(map(chr, ids))

    def encode(self, text: str) -> list[int]:
        return list(map(ord, text))


class Rows(list):
    fills = False

    def where(self, index: int) -> str:
        return f"row {index} of words"


def examples(**keys: Any) -> Conversations:
    rows = Rows({"prompt": "go", "completion": said} for said in ("yes", "a longer answer", "no. no"))
    return Conversations(name="words", rows=rows, chat=Words(), **{"seq_len": 8, "vocab_size": 256, **keys})


def test_what_is_longer_than_seq_len_is_dropped_or_cut_and_counted() -> None:
    counts: Counter[str] = Counter()
    assert examples().samples(1, counts) == []
    (cut,) = examples(truncate=True).samples(1, counts)
    assert (bytes(cut.token_ids.tolist()), cut.loss_mask.tolist()) == (b"go.a lon", [False] * 3 + [True] * 5)
    assert counts == {"data/overlong": 1, "data/truncated": 1}


def test_a_first_token_without_a_prompt_is_not_trained_and_the_row_can_be_packed() -> None:
    asks, says = {"role": "user", "content": "go"}, {"role": "assistant", "content": "yes"}
    rows = dataclasses.replace(examples(roles={"user", "assistant"}), rows=Rows([{"messages": [asks, says]}, {"messages": [says]}]))
    (asked,), (said,) = (rows.samples(index, Counter()) for index in (0, 1))
    assert (bytes(asked.token_ids.tolist()), asked.loss_mask.tolist()) == (b"go.yes.", [False, True, False, *[True] * 4])
    assert (bytes(said.token_ids.tolist()), said.loss_mask.tolist()) == (b"yes.", [False, True, True, True])
    pack(StepBatch(step=0, mini_batches=((asked, said),)), rank=0, ranks=1, tokens=16)


def test_a_row_whose_only_trainable_token_is_the_first_is_refused_with_its_place() -> None:
    letters = Rows([{"messages": [{"role": "user", "content": "a"}]}])
    one = dataclasses.replace(examples(roles={"user"}), rows=letters)
    with pytest.raises(ValueError, match="row 0 of words cannot be trained on: it has nothing to train"):
        one.samples(0, Counter())
    counts = Counter[str]()
    assert dataclasses.replace(one, skip_refused=True).samples(0, counts) == []
    assert counts == {"data/refused": 1}


def test_a_refused_row_is_an_error_with_its_place_or_counted() -> None:
    with pytest.raises(ValueError, match=r"(?s)row 2 of words cannot be trained on: an answer contains '\.'.*data\.on_bad_row=skip"):
        examples().samples(2, Counter())
    source = SupervisedSource([(examples(skip_refused=True), 1.0)], batch_size=3, seed=0)
    assert len(source.receive(0).mini_batches[0]) == 1
    report = source.report(0)
    assert (report["data/refused"], report["data/overlong"], report["batch/loss_tokens"]) == (1, 1, 4)
    nothing = SupervisedSource([(examples(skip_refused=True, roles={"tool"}), 1.0)], batch_size=3, seed=0)
    with pytest.raises(ValueError, match="none of the last 3 rows, a whole pass, can be trained on"):
        nothing.receive(0)


def test_a_batch_whose_rows_are_all_left_out_trains_nothing_and_the_run_goes_on() -> None:
    source = SupervisedSource([(examples(skip_refused=True), 1.0)], batch_size=1, seed=0)  # one of three rows can be trained on
    batches = [source.receive(step) for step in range(9)]
    packed = [pack(batch, rank=0, ranks=1, tokens=64) for batch in batches]
    assert sum(one.mini_batches[0].num_loss_tokens > 0 for one in packed) == 3
    assert [source.report(step)["batch/samples"] for step in range(9)].count(0) == 6
    assert not any(one.sampled for one in packed), "the metrics keep their names"


def test_a_token_that_the_model_does_not_know_is_named() -> None:
    with pytest.raises(ValueError, match=r"row 0 of words has the token 121 \('y'\), but the model's embedding has 120 rows"):
        examples(vocab_size=120).samples(0, Counter())


def test_one_rank_makes_the_batches_of_all_in_a_thread_and_keeps_one_ahead() -> None:
    made: list[int] = []
    ticked = threading.Event()

    class Slow(SupervisedSource):
        def receive(self, step: int, tick: Any = None) -> Any:
            assert step or ticked.wait(120), "the heartbeat goes on while a batch is made"
            made.append(step)
            return super().receive(step)

    def slow() -> SupervisedSource:
        return Slow([(Samples("a", samples_of(16)), 1.0)], batch_size=6, seed=1)

    alone = Prepared(slow, one_process("cpu"))
    assert same(alone.receive(0, ticked.set), batches_of().receive(0))
    assert same(alone.receive(1), batches_of().receive(1))
    assert alone.report(0)["batch/samples"] == 6
    assert made[:2] == [0, 1]
    found = on_two_ranks(lambda rank: Prepared(slow if rank.first else pytest.fail, rank).receive(2))  # type: ignore[arg-type]
    assert all(same(one, batches_of().receive(2)) for one in found)


def test_a_row_that_cannot_be_used_ends_the_run_of_prepared_batches_too() -> None:
    source = Prepared(lambda: SupervisedSource([(examples(), 1.0)], batch_size=3, seed=0), one_process("cpu"))
    with pytest.raises(ValueError, match="row 2 of words cannot be trained on"):
        source.receive(0)


@pytest.mark.parametrize(("strategy", "keeps"), [("interleaved", True), ("branching", False)])
def test_rows_are_shown_by_the_chat_format_that_rollouts_have(tmp_path: Path, strategy: str, keeps: bool) -> None:
    tiny.save(tiny.build_model(WarmStartConfig(hidden_size=32, num_hidden_layers=1), 64), tiny.build_tokenizer(64), tmp_path)
    line = ["hardware=cpu", "data=fake", "model=tiny_trained", f"model.name={tmp_path}", f"orchestrator.trajectory_strategy={strategy}"]
    for more in ([], ["model.template_drops_thinking=true", "model.renderer=default"]):  # which says only why interleaving may not help
        assert chat_of(compose([*line, *more], {}, SFT).cfg, str(tmp_path)).keeps_tokens is keeps


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    tiny.save(tiny.build_model(WarmStartConfig(hidden_size=32, num_hidden_layers=1), 128), tiny.build_tokenizer(128), folder)
    return folder


def write(path: Path, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def first_batch(model: Path, *keys: str) -> tuple[list[TrainingSample], dict[str, float]]:
    """The samples of step 0 and its report."""
    cfg = compose([*keys, "model=tiny_trained", f"model.name={model}", "hardware=cpu", "seq_len=96"], {}, SFT).cfg
    paths = RunPaths(model.parent / "run")
    paths.root.mkdir()
    source = source_of(cfg, paths, one_process("cpu"), str(model))
    (samples,) = source.receive(0, lambda: None).mini_batches
    return list(samples), source.report(0)


def test_several_data_sets_share_a_batch_by_their_configured_weights(tmp_path: Path, model: Path) -> None:
    sets = [f"+data.sets.{name}.name={write(tmp_path / f'{name}.jsonl', [{'prompt': name, 'completion': name}] * 8)}" for name in "ab"]
    samples, report = first_batch(model, *sets, "+data.sets.a.weight=3", "+data.sets.b.weight=1", "data.batch_size=12")
    assert Counter(sample.env for sample in samples) == {"a": 9, "b": 3}
    assert (report["data/a/rows"], report["data/b/rows"]) == (9, 3)


@pytest.mark.parametrize(
    ("keys", "trained"),
    [
        ((), ["dcba<|im_end|>", "hgfe<|im_end|>"]),
        (("data.loss_mask.user=true",), ["abcd", "dcba<|im_end|>", "efgh", "hgfe<|im_end|>"]),
        (("data.loss_mask.system=true", "data.loss_mask.assistant=false"), ["reverse it"]),
    ],
)
def test_the_configured_roles_are_trained_and_no_others(tmp_path: Path, model: Path, keys: tuple[str, ...], trained: list[str]) -> None:
    said = [("system", "reverse it"), ("user", "abcd"), ("assistant", "dcba"), ("user", "efgh"), ("assistant", "hgfe")]
    name = write(tmp_path / "rows.jsonl", [{"messages": [{"role": role, "content": content} for role, content in said]}])
    (sample,), _ = first_batch(model, f"data.name={name}", "data.batch_size=1", *keys)
    tokenizer, found, before = tiny.build_tokenizer(128), [], False
    for token, on in zip(sample.token_ids.tolist(), sample.loss_mask.tolist(), strict=True):
        if on:
            found += [] if before else [""]
            found[-1] += tokenizer.decode([token])
        before = on
    assert found == trained
