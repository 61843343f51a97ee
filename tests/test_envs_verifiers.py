"""Classic verifiers environments, rlx's own and others, played by a stand-in policy."""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import re
import signal
from typing import Any
from unittest import mock

import msgspec
import numpy as np
import pytest
from policy_stand_in import SAMPLING, StandIn, load, policy_of, task_of, tiny_chat
from traces import Turn, turns_of

from rlx.config.schema import EnvConfig
from rlx.envs.kinds import load_one
from rlx.envs.verifiers_v0 import Player
from rlx.envs.wire import Settings
from rlx.policy.base import request_seed
from rlx.types import Rollout


def play(env: Any, generator: Any, index: int = 0, member: int = 0, context_length: int = 256) -> Rollout:
    env.policy = policy_of(generator, context_length=context_length)
    (rollout,) = asyncio.run(env.play(task_of(env, index), [member], 0))
    return rollout


def play_many(env: Any, generator: Any, count: int) -> list[Rollout]:
    async def main() -> list[Rollout]:
        env.policy = policy_of(generator)
        played = await asyncio.gather(*(env.play(task_of(env, index), [0], 0) for index in range(count)))
        return [rollout for (rollout,) in played]

    return asyncio.run(main())


class Scripted(StandIn):
    """Answers each request with the next of the given texts. `tokens` overrides the ids."""

    def __init__(self, *texts: str, tokens: list[int] | None = None) -> None:
        super().__init__(tiny_chat(), error=0.0)
        self.texts = list(texts)
        self.tokens = tokens

    async def generate(self, prompt_ids: Any, sampling: dict, request_id: str, affinity: int) -> Turn:
        self.answer = lambda _: self.texts.pop(0) if self.texts else ""
        turn = await super().generate(prompt_ids, sampling, request_id, affinity)
        if self.tokens is None:
            return turn
        ids = np.array(self.tokens, dtype=np.int32)
        zeros = np.zeros(len(ids), dtype=np.int32)
        return Turn(
            prompt_ids=turn.prompt_ids,
            completion_ids=ids,
            logprobs=-ids.astype(np.float32),
            versions=zeros,
            temperature=turn.temperature,
            finish_reason="stop",
        )


def test_single_turn_gives_tokens_logprobs_versions_and_reward() -> None:
    env = load("rlx_reverse_text", num_examples=16)
    stand_in = StandIn(tiny_chat(), error=0.0)
    stand_in.version = 7
    rollout = play(env, stand_in)
    row = env.rows[0]
    (turn,) = turns_of(rollout)
    assert (rollout.status, rollout.reward) == ("ok", 1.0)
    assert rollout.rewards == {"exact": 1.0}
    assert rollout.metrics["similarity"] == 1.0
    assert rollout.prompt == row["prompt"]
    assert rollout.completion == [{"role": "assistant", "content": row["answer"]}]
    assert tiny_chat().tokenizer.decode(turn.prompt_ids) == f"<|im_start|>user\n{row['question']}<|im_end|>\n<|im_start|>assistant\n"
    assert tiny_chat().tokenizer.decode(turn.completion_ids) == f"{row['answer']}<|im_end|>"
    assert len(turn.logprobs) == len(turn.versions) == len(turn.completion_ids)
    assert set(turn.versions.tolist()) == {7}


@pytest.mark.parametrize("keys", [{"agents_per_group": "all"}, {"agents": ["a", "b"]}])
def test_agents_of_a_classic_environment_are_refused(keys: dict[str, Any]) -> None:
    from rlx.envs.verifiers_v0 import load_environment

    with pytest.raises(ValueError, match="rlx_reverse_text is a classic environment, which has no agents"):
        load_environment("e", EnvConfig(id="rlx_reverse_text", **keys), SAMPLING, 30.0)


def test_only_the_first_examples_are_used() -> None:
    from rlx.envs.verifiers_v0 import load_environment

    def rows(num_tasks: int | None) -> list[Any]:
        config = EnvConfig(id="rlx_reverse_text", args={"num_examples": 16}, num_tasks=num_tasks)
        return list(load_environment("e", config, SAMPLING, 30.0).rows)

    assert rows(3) == rows(None)[:3]
    assert len(rows(100)) == 16


def test_an_answer_that_ends_at_once_is_a_sample_with_reward_0() -> None:
    env = load("rlx_reverse_text", num_examples=4)
    rollout = play(env, Scripted(""))
    assert (rollout.status, rollout.reward) == ("ok", 0.0)
    assert turns_of(rollout)[0].completion_ids.tolist() == tiny_chat().stop_token_ids


def test_members_and_turns_get_different_seeds_and_repeat_in_a_second_run() -> None:
    env = load("rlx_reverse_text", num_examples=4)
    seeds = []
    for _ in range(2):
        stand_in = StandIn(tiny_chat())
        for member in range(4):
            play(env, stand_in, member=member)
        seeds.append([request["sampling"]["seed"] for request in stand_in.requests])
    assert seeds[0] == seeds[1]
    assert len(set(seeds[0])) == 4
    task = task_of(env)
    assert seeds[0][2] == request_seed(0, task, 2, 0, 0)
    others = [(1, 2, 0, 0), (0, 3, 0, 0), (0, 2, 1, 0), (0, 2, 0, 1)]
    assert all(request_seed(seed, task, *rest) != seeds[0][2] for seed, *rest in others)
    assert all(0 <= seed < 2**63 for seed in seeds[0])


def test_sampling_parameters_of_the_environment_are_merged_under_those_of_the_run(caplog: pytest.LogCaptureFixture) -> None:
    env = load("rlx_reverse_text", num_examples=4)
    env.env.sampling_args = {"n": 1, "extra_body": {"min_p": 0.2, "repetition_penalty": 1.5}, "temperature": 0.1, "top_k": 5}
    env = type(env)("e", env.env, {"max_tokens": 5, "temperature": 1.0, "min_tokens": 0}, 30.0)
    assert "'temperature': 0.1" in caplog.text
    assert "'top_k'" not in caplog.text  # the run's sampling has none here
    stand_in = StandIn(tiny_chat())
    play(env, stand_in)
    sampling = stand_in.requests[0]["sampling"]
    assert sampling["temperature"] == 1.0
    assert sampling["max_tokens"] == 5
    assert (sampling["top_k"], sampling["min_p"]) == (5, 0.2)
    assert not {"n", "extra_body", "repetition_penalty"} & sampling.keys()
    assert sampling["stop_token_ids"] == tiny_chat().stop_token_ids


def test_no_more_tokens_are_asked_for_than_the_context_holds() -> None:
    env = load("rlx_reverse_text", num_examples=4)
    stand_in = StandIn(tiny_chat(), error=0.0)
    length = len(tiny_chat().render(env.rows[0]["prompt"]))
    rollout = play(env, stand_in, context_length=length + 2)
    assert stand_in.requests[0]["sampling"]["max_tokens"] == 2
    assert rollout.is_truncated
    assert rollout.trace.num_sampled == 2
    overlong = play(env, stand_in, context_length=length)
    assert (overlong.status, overlong.stop) == ("error", "prompt_too_long")
    assert "seq_len" in (overlong.error or "")


def test_a_multi_turn_episode_keeps_every_turn_and_its_prompt_extends_the_last() -> None:
    env = load("rlx_test_multi", max_turns=3)
    answer = env.rows[0]["answer"]
    rollout = play(env, Scripted("no", "nono", answer))
    assert rollout.stop == "answered"
    assert rollout.reward == pytest.approx(1 / 3)
    assert len(turns_of(rollout)) == 3
    for before, after in zip(turns_of(rollout), turns_of(rollout)[1:], strict=False):
        known = [*before.prompt_ids, *before.completion_ids]
        assert after.prompt_ids[: len(known)].tolist() == known
    assert [message["role"] for message in rollout.completion] == ["assistant", "user", "assistant", "user", "assistant"]


def test_tools_are_offered_called_and_answered() -> None:
    env = load("rlx_test_tool")
    row = env.rows[0]
    call = '<tool_call>\n{"name": "reverse", "arguments": {"text": "WORD"}}\n</tool_call>'.replace("WORD", row["question"])
    stand_in = Scripted(call, row["answer"])
    rollout = play(env, stand_in)
    assert rollout.status == "ok"
    assert rollout.rewards == {"right": 1.0, "used_tool": 1.0}
    assert rollout.reward == pytest.approx(1.1)
    assert rollout.metrics["reverse_calls"] == 1.0
    assert "reverse(text)" in tiny_chat().tokenizer.decode(stand_in.requests[0]["prompt_ids"])
    first, second = turns_of(rollout)
    known = [*first.prompt_ids, *first.completion_ids]
    assert second.prompt_ids[: len(known)].tolist() == known
    assert rollout.completion[1] == {"role": "tool", "content": row["answer"], "tool_call_id": "call00000"}


def test_half_of_a_surrogate_pair_of_the_tool_or_of_the_model_is_a_question_mark() -> None:
    env = load("rlx_test_tool")
    call = '<tool_call>\n{"name": "reverse", "arguments": {"text": "\\ud83d"}}\n</tool_call>'
    env.env.tool_map["reverse"] = lambda text: json.loads('"half \\ud83d"')
    rollout = play(env, Scripted(call, "done"))
    assert rollout.status == "ok", rollout.error
    assert rollout.completion[1]["content"] == "half ?"
    assert rollout.completion[0]["tool_calls"][0]["function"]["arguments"] == '{"text": "?"}'
    assert msgspec.json.decode(msgspec.json.encode(rollout.completion)) == rollout.completion
    episode = policy_of(Scripted(call)).episode(task_of(env), 0, 0)
    reply = asyncio.run(episode.respond([{"role": "user", "content": "x"}], env.tools))
    assert reply.calls[0].arguments == '{"text": "?"}', "the answer can be sent to a worker"


class ByMember:
    """Each member of a group answers with its own text. The request of member `fail` fails."""

    def __init__(self, *texts: str, fail: int | None = None) -> None:
        self.members, self.fail = [Scripted(text) for text in texts], fail

    async def generate(self, prompt_ids: Any, sampling: dict, request_id: str, affinity: int) -> Turn:
        member = int(request_id.split("-")[-3])
        if member == self.fail:
            raise ConnectionResetError("the server went away")
        return await self.members[member].generate(prompt_ids, sampling, request_id, affinity)


def play_whole(env: Any, generator: Any) -> list[Rollout]:
    env.policy = policy_of(generator)
    return asyncio.run(env.play(task_of(env), range(4), 0))


def test_rewards_that_compare_a_group_come_with_the_group() -> None:
    env = load("rlx_test_group")
    assert env.scores_groups
    scored = play_whole(env, ByMember("aaa", "a", "aa", "b"))
    assert [rollout.member for rollout in scored] == [0, 1, 2, 3]
    assert [rollout.reward for rollout in scored] == [0.0, 1.0, 0.0, 1.0]


def test_a_member_that_fails_leaves_its_group_without_rewards() -> None:
    played = play_whole(load("rlx_test_group"), ByMember("aaa", "a", "aa", "b", fail=2))
    assert [(rollout.status, rollout.stop) for rollout in played if rollout.member != 2] == [("cancelled", "group_failed")] * 3
    assert (played[2].status, played[2].stop) == ("error", "model_error")


@pytest.mark.parametrize(("error", "said"), [
    (ValueError("cannot compare"), "ValueError: cannot compare"),
    (asyncio.CancelledError(), "RuntimeError: the environment cancelled the rollout's own task"),
])  # fmt: skip
def test_a_group_whose_scoring_raises_fails_as_a_whole(error: BaseException, said: str) -> None:
    env = load("rlx_test_group")

    async def broken(states: Any) -> None:
        raise error

    env.env.rubric.score_group = broken
    played = play_whole(env, ByMember("aaa", "a", "aa", "b"))
    assert [(rollout.status, rollout.error.partition("; at ")[0]) for rollout in played] == [("error", said)] * 4


@pytest.mark.parametrize(("rule", "status", "stop"), [("fail", "error", "reward_raised"), ("zero", "ok", "max_turns_reached")])
def test_a_rollout_whose_reward_raised_fails_unless_its_environment_says_that_it_scores_0(rule: str, status: str, stop: str) -> None:
    env = load("rlx_test_trouble", kind="sometimes_raising", on_reward_error=rule)
    right, wrong = play(env, Scripted(env.rows[0]["answer"])), play(env, Scripted("wrong"))
    assert (right.status, right.reward, right.metrics["reward_error"], right.error) == ("ok", 1.0, 0.0, None)
    assert (wrong.status, wrong.stop, wrong.reward, wrong.metrics["reward_error"]) == (status, stop, 0.0, 1.0)
    assert "sometimes_raising raised KeyError" in (wrong.error or "")


UNUSUAL = [("completion", "a text", "AttributeError"), ("metrics", {"ratio": "high"}, "ValueError")]


@pytest.mark.parametrize(("key", "value", "said"), UNUSUAL)
def test_an_unusual_state_costs_its_rollout_and_not_the_run(monkeypatch: pytest.MonkeyPatch, key: str, value: Any, said: str) -> None:
    env = load("rlx_reverse_text", num_examples=4)

    async def unusual(state: Any) -> None:
        state.update({"reward": 1.0, key: value})

    monkeypatch.setattr(env.env.rubric, "score_rollout", unusual)
    rollout = play(env, Scripted("x"))
    assert (rollout.status, rollout.stop, said in (rollout.error or "")) == ("error", "environment_error", True)


def test_a_metric_that_is_not_finite_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    env = load("rlx_reverse_text", num_examples=4)
    score = env.env.rubric.score_rollout

    async def with_ratio(state: Any) -> None:
        await score(state)
        state["metrics"] = {**(state["metrics"] or {}), "ratio": float("nan"), "seen": 2}

    monkeypatch.setattr(env.env.rubric, "score_rollout", with_ratio)
    rollout = play(env, Scripted("x"))
    assert (rollout.status, rollout.metrics.get("seen"), rollout.metrics.get("ratio")) == ("ok", 2.0, None)


def test_a_reward_that_raised_leaves_the_group_that_rewards_compare_without_rewards() -> None:
    env = load("rlx_test_group")

    def sometimes(completion: Any) -> float:
        return {"a": 1.0}[completion[-1]["content"]]

    env.env.rubric.add_reward_func(sometimes)
    env.players = {id(env.env): Player.of("e", env.env, env.env, SAMPLING)}
    played = play_whole(env, ByMember("a", "a", "b", "a"))
    assert [rollout.stop for rollout in played] == ["group_failed", "group_failed", "reward_raised", "group_failed"]
    assert [rollout.status for rollout in played] == ["cancelled", "cancelled", "error", "cancelled"]


@pytest.mark.parametrize(
    ("kind", "status", "stop"),
    [
        ("vf_error", "error", "sandbox_error"),
        ("error", "error", "environment_error"),
        ("cancelled", "error", "environment_error"),
        ("not_a_number", "error", "reward_not_finite"),
        ("slow", "timeout", "timeout"),
        ("sleepy", "timeout", "timeout"),
    ],
)
def test_what_goes_wrong_in_an_environment_becomes_a_status_with_its_cause(kind: str, status: str, stop: str) -> None:
    waits = r"rollout_timeout\); at .*rlx_test_trouble.py:\d+ in "
    for seconds in (0.3, 3.0, 30.0) if status == "timeout" else (60.0,):
        rollout = play(load("rlx_test_trouble", kind=kind, timeout=seconds), StandIn(tiny_chat()))
        assert (rollout.status, rollout.stop) == (status, stop)
        assert rollout.error
        if re.search(waits, rollout.error):  # a slow machine may need longer until it waits there
            break
    assert (re.search(waits, rollout.error) is not None) is (status == "timeout"), "it says where the rollout waits"


def test_a_request_that_fails_is_an_error_that_names_its_cause() -> None:
    class Broken:
        async def generate(self, *_: Any) -> Turn:
            raise ConnectionResetError("the server went away")

    rollout = play(load("rlx_reverse_text", num_examples=4), Broken())
    assert (rollout.status, rollout.stop) == ("error", "model_error")
    assert rollout.error.startswith("ModelError ← ConnectionResetError: the server went away; at ")  # and the line of this file


async def test_an_episode_that_ignores_its_cancellation_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlx.envs.local.CLEANUP_GRACE", 0.2)
    env = load("rlx_test_trouble", kind="sleepy", deaf=True, timeout=0.2)

    env.policy = policy_of(StandIn(tiny_chat()))
    (rollout,) = await env.play(task_of(env), [0], 0)  # not for the hour that the environment sleeps
    assert rollout.status == "timeout"


def test_loading_leaves_signal_handlers_and_log_handlers_as_they_were() -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    load_one("e", EnvConfig(id="rlx_reverse_text", args={"num_examples": 4}), Settings())
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
    assert logging.getLogger("verifiers").handlers == []
    assert logging.getLogger("verifiers").propagate


def test_concurrent_episodes_do_not_mix_their_tokens() -> None:
    env = load("rlx_reverse_text", num_examples=32)
    for index, rollout in enumerate(play_many(env, StandIn(tiny_chat(), error=0.0, delay=0.01), 32)):
        text = tiny_chat().tokenizer.decode(turns_of(rollout)[0].completion_ids)
        assert text == env.rows[index]["answer"] + "<|im_end|>"
        assert rollout.reward == 1.0


def test_the_signatures_of_hooks_and_rewards_are_read_once_however_many_episodes_call_them() -> None:
    env = load("rlx_reverse_text", num_examples=4)
    play(env, StandIn(tiny_chat(), error=0.0))
    with mock.patch.object(inspect.Signature, "from_callable") as read:
        rollout = play(env, StandIn(tiny_chat(), error=0.0), index=1)
    assert (rollout.status, rollout.reward, read.call_count) == ("ok", 1.0, 0)


def test_a_reward_may_be_an_object_without_a_hash() -> None:
    class Half(list):
        __name__ = "half"

        def __call__(self, completion: Any) -> float:
            return 0.5

    env = load("rlx_reverse_text", num_examples=4)
    env.env.rubric.rubrics[0].add_reward_func(Half())
    assert play(env, StandIn(tiny_chat(), error=0.0)).reward == 1.5
