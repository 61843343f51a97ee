"""Which rollouts become training data: `rlx.rollout.rejection_sampling`, checked case by case and against naive rules at random."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from dataclasses import replace

import pytest

from rlx.config.schema_synthesize import SelectionConfig
from rlx.rollout.eval_results import Outcome, Usage
from rlx.rollout.rejection_sampling import (
    CAUSES,
    DUPLICATE,
    EMPTY,
    FAILED,
    FEW,
    TRUNCATED,
    Candidate,
    Transcript,
    content_hash,
    select,
)

QUESTION = [{"role": "user", "content": "2+2?"}]


def candidate(index: int = 0, member: int = 0, reward: float = 1.0, text: str | None = None, *, failed: bool = False, **facts) -> Candidate:
    """`transcripts`, and fields of the rollout."""
    answer = {"role": "assistant", "content": f"answer {index}-{member}" if text is None else text}
    said = facts.pop("transcripts", (Transcript(prompt=QUESTION, completion=[answer]),))
    fields = {
        "env": "sums",
        "example_id": index,
        "version": 0,
        "weights": None,
        "versions": [],
        "prompt": "",
        "completion": "",
        "answer": "",
        "info": {},
        "rewards": {},
        "metrics": {},
        "error": None,
        "timing": {},
        "status": "ok",
        "is_truncated": False,
        "stop_condition": "stop",
        "token_usage": Usage(),
    }
    return Candidate(Outcome(**{**fields, **facts}, place=index, rollout=member, reward=reward, is_completed=not failed), said)


def call(arguments: str, call_id: str = "a") -> list[dict]:
    calls = [{"type": "function", "id": call_id, "function": {"name": "add", "arguments": arguments}}]
    return [
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "tool_call_id": call_id, "content": "4"},
        {"role": "assistant", "content": "It is 4."},
    ]


def members(candidates: list[Candidate]) -> list[tuple[int, int]]:
    return [(c.rollout.place, c.rollout.rollout) for c in candidates]


def random_rollouts(state: random.Random) -> list[Candidate]:
    """Rollouts of two environments with few different texts and rewards, so that every rule has work."""
    return [
        candidate(
            index,
            member,
            state.choice([0.0, 0.25, 0.5, 1.0]),
            state.choice(["a", "b", " a", "c\n"]),
            env=env,
            failed=state.random() < 0.1,
            is_truncated=state.random() < 0.1,
        )
        for env in ("sums", "words")
        for index in range(state.randint(1, 4))
        for member in range(state.randint(1, 6))
    ]


def test_each_rule_drops_and_counts_its_own():
    rollouts = [
        candidate(member=0, failed=True, reward=0),
        candidate(member=1, is_truncated=True),
        candidate(member=2, transcripts=()),
        candidate(member=3, reward=0.4),
        candidate(member=4, reward=2.0),
        candidate(member=5, text="same"),
        candidate(member=6, text="same"),
        candidate(member=7),
    ]
    keys = SelectionConfig(min_reward=0.5, max_reward=1.0, per_example=1)
    kept, dropped = select(rollouts, keys, 0)
    assert members(kept) == [(0, 5)]
    assert dropped == dict.fromkeys(CAUSES[:-1], 1)


def test_a_cut_answer_is_dropped_although_the_environment_does_not_call_the_rollout_truncated():
    cut = Transcript(prompt=QUESTION, completion=[{"role": "assistant", "content": "It i"}], truncated=True)
    assert select([candidate(transcripts=(cut,))], SelectionConfig(), 0)[1] == {TRUNCATED: 1}
    assert select([candidate(transcripts=(cut,))], SelectionConfig(drop_truncated=False), 0)[1] == {}


def test_failed_rollouts_are_kept_on_request_with_what_they_said():
    silent = candidate(1, failed=True, reward=0, transcripts=())
    found = select([candidate(failed=True, reward=0), silent], SelectionConfig(drop_failed=False), 0)
    assert members(found[0]) == [(0, 0)]
    assert found[1] == {EMPTY: 1}


def test_a_rollout_with_an_answer_that_says_nothing_is_left_out() -> None:
    think = [{"role": "assistant", "content": "", "reasoning_content": "so"}]
    later = [*call('{"a": 1}'), {"role": "assistant", "content": " \n"}]
    texts = [Transcript(prompt=QUESTION, completion=each) for each in (think, later, " ", "4")]
    found = select(
        [candidate(0, 0, text=" "), *(candidate(0, n, transcripts=(text,)) for n, text in enumerate(texts, 1))], SelectionConfig(), 0
    )
    assert [one.rollout.rollout for one in found[0]] == [1, 4]
    assert found[1] == {EMPTY: 3}
    assert select([candidate(failed=True)], SelectionConfig(), 0)[1] == {FAILED: 1}


def test_what_another_rule_drops_makes_no_duplicate():
    lonely = [candidate(0, 0, text="same"), candidate(1, 0, text="same"), candidate(1, 1, text="other")]
    found = select(lonely, SelectionConfig(duplicates="all", per_example=2, exactly=True), 0)
    assert members(found[0]) == [(1, 0), (1, 1)], "example 0 has too few"


def test_duplicates_of_other_examples_are_dropped_only_on_request():
    rollouts = [candidate(0, text="x"), candidate(1, text="x")]
    assert members(select(rollouts, SelectionConfig(duplicates="example"), 0)[0]) == [(0, 0), (1, 0)]
    found = select(rollouts, SelectionConfig(duplicates="all"), 0)
    assert members(found[0]) == [(0, 0)]
    assert found[1] == {DUPLICATE: 1}


def test_the_same_answer_to_another_question_is_no_duplicate():
    other = Transcript(prompt=[{"role": "user", "content": "1+3?"}], completion=[{"role": "assistant", "content": "4"}])
    rollouts = [candidate(0, text="4"), candidate(1, transcripts=(other,))]
    assert len(select(rollouts, SelectionConfig(duplicates="all"), 0)[0]) == 2


@pytest.mark.parametrize(
    ("one", "other", "equal"),
    [
        (call('{"x": 2, "y": 2}', "a"), call('{"y":2,"x":2}', "b"), True),  # order, white space and ids of calls say nothing
        (call('{"x": 2, "y": 2}'), call('{"x": 2, "y": 3}'), False),
        ([{"role": "assistant", "content": "é  é"}], [{"role": "assistant", "content": "é\ne\u0301\n"}], True),
        ([{"role": "assistant", "content": "Paris"}], [{"role": "assistant", "content": "paris"}], False),
        ([{"role": "assistant", "content": "4"}], [{"role": "assistant", "content": "4", "reasoning_content": "2+2"}], False),
    ],
)
def test_what_says_the_same(one: list[dict], other: list[dict], equal: bool):
    sayings = [content_hash([Transcript(prompt=QUESTION, completion=said)]) for said in (one, other)]
    assert (sayings[0] == sayings[1]) is equal


def test_other_tools_are_another_saying():
    said = Transcript(prompt=QUESTION, completion=[{"role": "assistant", "content": "4"}])
    tool = {"type": "function", "function": {"name": "add"}}
    assert content_hash([said]) != content_hash([replace(said, tools=(tool,))])


@pytest.mark.parametrize("seed", range(40))
def test_the_choice_follows_the_keys_whatever_the_order_of_finishing(seed: int):
    state = random.Random(seed)
    rollouts = random_rollouts(state)
    keys = SelectionConfig(
        drop_failed=state.random() < 0.7,
        drop_truncated=state.random() < 0.7,
        min_reward=state.choice([None, 0.25, 0.5]),
        max_reward=state.choice([None, 0.5]),
        prefer=state.choice(["first", "best", "random"]),
        duplicates=state.choice(["example", "all", "keep"]),
        per_example=state.choice([None, 1, 2, 3]),
        exactly=state.random() < 0.5,
    )
    found = select(rollouts, keys, seed)
    assert select(state.sample(rollouts, len(rollouts)), keys, seed) == found
    assert len(found[0]) + sum(found[1].values()) == len(rollouts)
    assert found[0] == sorted(found[0], key=lambda c: c.rollout.key)
    for one in found[0]:
        assert not (not one.rollout.is_completed and keys.drop_failed)
        assert not (one.rollout.is_truncated and keys.drop_truncated)
        assert (keys.min_reward or 0) <= one.rollout.reward <= (1 if keys.max_reward is None else keys.max_reward)

    kept_of, all_of = defaultdict(list), defaultdict(list)
    for one in found[0]:
        kept_of[one.rollout.key[:2]].append(one)
    for one in rollouts:
        all_of[one.rollout.key[:2]].append(one)
    texts = {key: [one.transcripts[0].completion[0]["content"].strip() for one in kept] for key, kept in kept_of.items()}
    if keys.duplicates != "keep":
        assert all(len(set(said)) == len(said) for said in texts.values())
    if keys.duplicates == "all":  # all have the same question
        assert max(Counter(text for said in texts.values() for text in said).values(), default=0) <= 1
    for key, kept in kept_of.items():
        if keys.per_example is not None:
            assert len(kept) <= keys.per_example
            assert len(kept) == keys.per_example or not keys.exactly
        if keys.prefer == "best" and keys.duplicates == "keep" and keys.max_reward is None:
            played = [one.rollout for one in all_of[key]]
            fine = [o for o in played if (o.is_completed or not keys.drop_failed) and not (o.is_truncated and keys.drop_truncated)]
            best = sorted((o.reward for o in fine), reverse=True)[: len(kept)]
            assert sorted((o.rollout.reward for o in kept), reverse=True) == best
    if not keys.exactly:
        assert FEW not in found[1]


def test_random_preference_follows_from_the_seed():
    rollouts = [candidate(index, member) for index in range(20) for member in range(8)]
    keys = SelectionConfig(prefer="random", per_example=1)
    one, again, other = (members(select(rollouts, keys, seed)[0]) for seed in (1, 1, 2))
    assert one == again != other
    assert len({member for _, member in one}) > 3
