"""Traces: one tree of messages whose cuts hold every sampled token once, in memory that is linear in the tokens."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
from traces import turns_of

from rlx import codec
from rlx.rollout.record import nodes_of
from rlx.rollout.rejection_sampling import transcripts_of
from rlx.rollout.samples import samples_of
from rlx.trace import Node, Trace, TraceBuilder, Turn
from rlx.types import Group, Rollout, Task

TASK = Task(env="e", example_id=0, index=0, row={})


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def answer(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def turn(prompt: list[int], said: list[int], versions: list[int] | None = None) -> Turn:
    return Turn(
        prompt_ids=np.array(prompt, np.int32),
        completion_ids=np.array(said, np.int32),
        logprobs=-np.array(said, np.float32),
        versions=np.array(versions or [0] * len(said), np.int32),
        temperature=1.0,
        finish_reason="stop",
    )


def rollout(trace: Trace) -> Rollout:
    return Rollout(
        task=TASK, member=0, trace=trace, prompt=[], completion=[], reward=1.0, rewards={}, metrics={}, status="ok", stop="",
    )  # fmt: skip


def trained(trace: Trace, strategy: str = "interleaved") -> list[list[int]]:
    """The tokens that each sample trains."""
    group = Group(id=0, task=TASK, rollouts=(rollout(trace),), advantages=np.ones(1, np.float32))
    found = samples_of(group, strategy=strategy)
    for sample in found:
        np.testing.assert_array_equal(sample.inference_logprobs[sample.loss_mask], -sample.token_ids[sample.loss_mask].astype(np.float32))
    return [sample.token_ids[sample.loss_mask].tolist() for sample in found]


def test_answers_that_continue_each_other_are_one_sample_and_a_second_continuation_is_another():
    said = TraceBuilder()
    said.add(0, [user("a")], None, answer("b"), turn([1, 2], [3]))
    said.add(1, [user("a"), answer("b"), user("c")], None, answer("d"), turn([1, 2, 3, 4], [5]))
    said.add(2, [user("a"), answer("b"), user("x")], None, answer("y"), turn([1, 2, 3, 6], [7, 8]))
    trace = said.trace()
    assert [node.message["content"] for node in trace.nodes] == ["a", "b", "c", "d", "x", "y"]
    assert [node.parent for node in trace.nodes] == [-1, 0, 1, 2, 1, 4]
    assert trained(trace) == [[3, 5], [7, 8]]
    assert trained(trace, "branching") == [[3], [5], [7, 8]]
    assert [one.prompt_ids.tolist() for one in turns_of(trace)] == [[1, 2], [1, 2, 3, 4], [1, 2, 3, 6]]


def test_an_answer_that_is_not_kept_is_context():
    said = TraceBuilder()
    for number in range(3):
        prompt = list(range(1, 3 * number + 3))
        said.add(
            number,
            [user(str(n)) for n in range(2 * number + 1)],
            None,
            answer("x"),
            turn(prompt, [len(prompt) + 1]),
            request_id=str(number),
        )
    assert trained(said.trace()) == [[3, 6, 9]]
    kept = said.trace(said.requests(["0", "2"]))
    assert trained(kept) == [[3, 9]]
    assert trained(said.trace(said.requests(["2"]))) == [[9]]
    assert kept.ids(len(kept.nodes) - 1).tolist() == list(range(1, 10))


def test_versions_of_an_update_in_flight_are_spans():
    said = TraceBuilder()
    said.add(0, [user("a")], None, answer("b"), turn([1], [2, 3, 4, 5], [7, 7, 8, 8]))
    trace = said.trace()
    _, node = nodes_of(trace)
    assert node["versions"] == [[7, 0, 2], [8, 2, 4]]
    assert (node["parent"], node["trained"], node["token_ids"], node["logprobs"]) == (0, 4, [1, 2, 3, 4, 5], [-2, -3, -4, -5])
    assert turns_of(trace)[0].versions.tolist() == [7, 7, 8, 8]
    assert trace.versions == [7, 8]


def test_a_trace_from_outside_with_tokens_at_every_message_is_trained_exactly_once():
    ids = lambda *values: np.array(values, np.int32)  # noqa: E731
    sampled = lambda *values: {"sampled": True, "logprobs": -np.array(values, np.float32), "versions": ids(1), "ends": ids(len(values))}  # noqa: E731
    trace = Trace(
        (
            Node(parent=-1, message={"role": "system", "content": "s"}, token_ids=ids(1, 2)),
            Node(parent=0, message=user("a"), token_ids=ids(3)),
            Node(parent=1, message=answer("b"), token_ids=ids(4, 5), **sampled(5)),
            Node(parent=2, message={"role": "tool", "content": "t"}, token_ids=ids(6)),
            Node(parent=3, message=answer("c"), token_ids=ids(7, 8), **sampled(8)),
            Node(parent=0, message=user("x"), token_ids=ids(9)),
            Node(parent=5, message=answer("y"), token_ids=ids(10), **sampled(10)),
        )
    )
    assert trained(trace) == [[5, 8], [10]]
    assert trace.sizes() == [(4, 1), (7, 1), (3, 1)]


@pytest.mark.parametrize("seed", range(20))
def test_of_any_order_of_requests_each_sampled_token_is_trained_once_behind_its_prompt(seed: int):
    rng, token = random.Random(seed), iter(range(1, 10_000))
    said, ends, asked = TraceBuilder(), [], {}
    for number in range(12):
        messages, ids = ([], []) if not ends or rng.random() < 0.3 else rng.choice(ends)
        if rng.random() < 0.2:
            ids = ids[:-1]  # a template that drops the end
        messages, ids = [*messages, user(str(number))], [*ids, next(token)]
        new = [next(token) for _ in range(rng.randint(1, 3))]
        said.add(number, messages, None, answer(str(new)), turn(ids, new))
        ends.append(([*messages, answer(str(new))], [*ids, *new]))
        asked |= dict.fromkeys(new, ids)
    group = Group(id=0, task=TASK, rollouts=(rollout(said.trace()),), advantages=np.ones(1, np.float32))
    seen: list[int] = []
    for sample in samples_of(group, strategy="interleaved"):
        whole = sample.token_ids.tolist()
        for place in np.flatnonzero(sample.loss_mask):
            seen.append(whole[place])
            prompt = asked[whole[place]]
            assert whole[: len(prompt)] == prompt
    assert sorted(seen) == sorted(asked)


def test_a_history_that_is_written_anew_in_every_turn_shares_its_messages():
    said, messages = TraceBuilder(), []
    for number in range(100):
        messages = [*map(dict, messages), user(f"{number}")]
        prompt = [number, *range(number)]  # no prompt begins with another's tokens
        said.add(number, messages, None, answer(str(number)), turn(prompt, [1000 + number]))
        messages = [*messages, answer(str(number))]
    trace = said.trace()
    assert len(trace.nodes) < 301
    assert len(trained(trace)) == 100
    for number, index in enumerate(trace.answers):
        assert [one["content"] for one in trace.conversation(index)][-2:] == [str(number)] * 2
        assert len(trace.path(index)) == 2 * number + 2
        assert all(trace.nodes[place].parent < place for place in trace.path(index))


def test_parallel_requests_of_one_prompt_stand_in_their_order_whichever_is_answered_first():
    for order in ((0, 1), (1, 0)):
        said = TraceBuilder()
        for number in order:
            said.add(number, [user("a")], None, answer(str(number)), turn([1, 2], [10 + number]))
        trace = said.trace()
        assert [(node.message["content"], node.parent) for node in trace.nodes] == [("a", -1), ("0", 0), ("1", 0)]


def test_a_raw_prompt_whose_tokens_continue_an_answer_is_kept_as_it_was_asked():
    said = TraceBuilder()
    said.add(0, [{"role": "text", "content": "abc"}], None, answer("de"), turn([1, 2, 3], [4, 5]))
    said.add(1, [{"role": "text", "content": "abcdef"}], None, answer("g"), turn([1, 2, 3, 4, 5, 6], [7]))
    assert trained(said.trace()) == [[4, 5, 7]]
    assert [(one.prompt, one.completion) for one in transcripts_of(said.trace())] == [("abc", "de"), ("abcdef", "g")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    SCHEMA: ClassVar[str] = "tests.KeptTrace/1"
    trace: Trace


def test_a_hundred_turns_and_a_hundred_thousand_tokens_take_less_than_a_mebibyte():
    rng = np.random.default_rng(0)
    said, ids, messages = TraceBuilder(), np.empty(0, np.int32), []
    for number in range(100):
        ids = np.concatenate([ids, rng.integers(0, 150_000, 600, dtype=np.int32)])
        messages = [*map(dict, messages), user(f"{number}")]  # as an environment's requests come: each message anew
        new = rng.integers(0, 150_000, 400, dtype=np.int32)
        zeros = np.zeros(len(new), np.int32)
        one = Turn(
            prompt_ids=ids, completion_ids=new, logprobs=rng.standard_normal(len(new), dtype=np.float32), versions=zeros, temperature=1.0,
            finish_reason="stop",
        )  # fmt: skip
        said.add(number, messages, None, answer(str(number)), one)
        messages, ids = [*messages, answer(str(number))], np.concatenate([ids, new])
    trace = said.trace()
    assert len(trace.nodes) == 200
    assert sum(node.token_ids.nbytes + node.logprobs.nbytes + node.versions.nbytes + node.ends.nbytes for node in trace.nodes) < 2**20
    packed = codec.encode(Kept(trace=trace))
    assert len(packed) < 2**20
    assert codec.decode(packed, Kept).trace.ids(199).tolist() == ids.tolist()
