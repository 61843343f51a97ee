"""Which rollouts become training data: `rlx.rollout.selection`, checked case by case and against naive rules on random rollouts."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from dataclasses import replace

import pytest

from rlx.config.schema_synthesize import SelectionConfig
from rlx.policy.transcript import Transcript
from rlx.rollout.selection import CAUSES, DUPLICATE, FAILED, FEW, SILENT, TRUNCATED, Candidate, saying, select

QUESTION = [{"role": "user", "content": "2+2?"}]


def candidate(index: int = 0, member: int = 0, reward: float = 1.0, text: str | None = None, **facts) -> Candidate:
    answer = {"role": "assistant", "content": f"answer {index}-{member}" if text is None else text}
    said = Transcript(prompt=QUESTION, completion=[answer])
    return Candidate(
        **{"env": "sums", "failed": False, "truncated": False, "transcripts": (said,), **facts}, index=index, member=member, reward=reward
    )


def call(arguments: str, call_id: str = "a") -> list[dict]:
    calls = [{"type": "function", "id": call_id, "function": {"name": "add", "arguments": arguments}}]
    return [
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "tool_call_id": call_id, "content": "4"},
        {"role": "assistant", "content": "It is 4."},
    ]


def members(candidates: list[Candidate]) -> list[tuple[int, int]]:
    return [(c.index, c.member) for c in candidates]


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
            truncated=state.random() < 0.1,
        )
        for env in ("sums", "words")
        for index in range(state.randint(1, 4))
        for member in range(state.randint(1, 6))
    ]


def test_each_rule_drops_and_counts_its_own():
    rollouts = [
        candidate(member=0, failed=True, reward=0),
        candidate(member=1, truncated=True),
        candidate(member=2, transcripts=()),
        candidate(member=3, reward=0.4),
        candidate(member=4, reward=2.0),
        candidate(member=5, text="same"),
        candidate(member=6, text="same"),
        candidate(member=7),
    ]
    keys = SelectionConfig(min_reward=0.5, max_reward=1.0, per_example=1)
    found = select(rollouts, keys, 0)
    assert members(found.kept) == [(0, 5)]
    assert found.dropped == dict.fromkeys(CAUSES[:-1], 1)


def test_a_cut_answer_is_dropped_although_the_environment_does_not_call_the_rollout_truncated():
    cut = Transcript(prompt=QUESTION, completion=[{"role": "assistant", "content": "It i"}], truncated=True)
    assert select([candidate(transcripts=(cut,))], SelectionConfig(), 0).dropped == {TRUNCATED: 1}
    assert select([candidate(transcripts=(cut,))], SelectionConfig(drop_truncated=False), 0).dropped == {}


def test_failed_rollouts_are_kept_on_request_with_what_they_said():
    silent = candidate(1, failed=True, reward=0, transcripts=())
    found = select([candidate(failed=True, reward=0), silent], SelectionConfig(drop_failed=False), 0)
    assert members(found.kept) == [(0, 0)]
    assert found.dropped == {SILENT: 1}


def test_a_rollout_with_an_answer_that_says_nothing_is_left_out() -> None:
    think = [{"role": "assistant", "content": "", "reasoning_content": "so"}]
    later = [*call('{"a": 1}'), {"role": "assistant", "content": " \n"}]
    texts = [Transcript(prompt=QUESTION, completion=each) for each in (think, later, " ", "4")]
    found = select(
        [candidate(0, 0, text=" "), *(candidate(0, n, transcripts=(text,)) for n, text in enumerate(texts, 1))], SelectionConfig(), 0
    )
    assert [one.member for one in found.kept] == [1, 4]
    assert found.dropped == {SILENT: 3}
    assert select([candidate(failed=True)], SelectionConfig(), 0).dropped == {FAILED: 1}


def test_what_another_rule_drops_makes_no_duplicate():
    lonely = [candidate(0, 0, text="same"), candidate(1, 0, text="same"), candidate(1, 1, text="other")]
    found = select(lonely, SelectionConfig(duplicates="all", per_example=2, exactly=True), 0)
    assert members(found.kept) == [(1, 0), (1, 1)], "example 0 has too few"


def test_duplicates_of_other_examples_are_dropped_only_on_request():
    rollouts = [candidate(0, text="x"), candidate(1, text="x")]
    assert members(select(rollouts, SelectionConfig(duplicates="example"), 0).kept) == [(0, 0), (1, 0)]
    found = select(rollouts, SelectionConfig(duplicates="all"), 0)
    assert members(found.kept) == [(0, 0)]
    assert found.dropped == {DUPLICATE: 1}


def test_the_same_answer_to_another_question_is_no_duplicate():
    other = Transcript(prompt=[{"role": "user", "content": "1+3?"}], completion=[{"role": "assistant", "content": "4"}])
    rollouts = [candidate(0, text="4"), candidate(1, transcripts=(other,))]
    assert len(select(rollouts, SelectionConfig(duplicates="all"), 0).kept) == 2


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
    sayings = [saying(candidate(transcripts=(Transcript(prompt=QUESTION, completion=said),))) for said in (one, other)]
    assert (sayings[0] == sayings[1]) is equal


def test_other_tools_are_another_saying():
    said = Transcript(prompt=QUESTION, completion=[{"role": "assistant", "content": "4"}])
    tool = {"type": "function", "function": {"name": "add"}}
    assert saying(candidate(transcripts=(said,))) != saying(candidate(transcripts=(replace(said, tools=(tool,)),)))


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
    assert len(found.kept) + sum(found.dropped.values()) == len(rollouts)
    assert found.kept == sorted(found.kept, key=lambda c: (c.env, c.index, c.member))
    for one in found.kept:
        assert not (one.failed and keys.drop_failed)
        assert not (one.truncated and keys.drop_truncated)
        assert (keys.min_reward or 0) <= one.reward <= (1 if keys.max_reward is None else keys.max_reward)

    kept_of, all_of = defaultdict(list), defaultdict(list)
    for one in found.kept:
        kept_of[one.env, one.index].append(one)
    for one in rollouts:
        all_of[one.env, one.index].append(one)
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
            fine = [o for o in all_of[key] if not (o.failed and keys.drop_failed) and not (o.truncated and keys.drop_truncated)]
            best = sorted((o.reward for o in fine), reverse=True)[: len(kept)]
            assert sorted((o.reward for o in kept), reverse=True) == best
    if not keys.exactly:
        assert FEW not in found.dropped


def test_random_preference_follows_from_the_seed():
    rollouts = [candidate(index, member) for index in range(20) for member in range(8)]
    keys = SelectionConfig(prefer="random", per_example=1)
    one, again, other = (members(select(rollouts, keys, seed).kept) for seed in (1, 1, 2))
    assert one == again != other
    assert len({member for _, member in one}) > 3
