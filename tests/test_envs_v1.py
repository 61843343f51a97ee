"""Tasksets of verifiers' v1: which agent trains, what is kept of each, what ends a rollout."""

from __future__ import annotations

import asyncio
import json
import math
import sys
import zlib
from typing import Any

import pytest
from inference_server import CONTEXT, EXACT, Run
from policy_stand_in import OUTSIDE, SAMPLING, StandIn, policy_of, task_of, tiny_chat
from run_servers import Servers
from served_stand_in import give, served
from traces import same, turns_of

from rlx.config.schema import EnvConfig
from rlx.trace import Turn
from rlx.types import Rollout

pytestmark = pytest.mark.slow

sys.path.insert(0, OUTSIDE) if OUTSIDE not in sys.path else None


def load(id: str = "rlx_test_v1", timeout: float = 30.0, agents: tuple[str, ...] = (), num_tasks: int | None = 40, **args: Any) -> Any:
    how = args.pop("agents_per_group", "one")
    return loaded(EnvConfig(id=id, args=args, agents=list(agents), agents_per_group=how, num_tasks=num_tasks), timeout)


def loaded(config: EnvConfig, timeout: float = 30.0) -> Any:
    from rlx.envs.verifiers_v1 import load_environment

    return load_environment("e", config, dict(SAMPLING), timeout)


class Recorder(StandIn):
    """Answers with a function of the whole prompt's text, and keeps every turn."""

    def __init__(self, answer: Any = None) -> None:
        super().__init__(tiny_chat(), error=0.0)
        self.of_prompt = answer or (lambda prompt: f"say {zlib.crc32(prompt.encode()) % 1000}")
        self.turns: list[Turn] = []

    async def generate(self, prompt_ids: Any, sampling: dict, request_id: str, affinity: int) -> Turn:
        one = StandIn(self.chat, lambda _: self.of_prompt(self.chat.tokenizer.decode(prompt_ids)), error=0.0)
        one.version = self.version
        turn = await one.generate(prompt_ids, sampling, request_id, affinity)
        self.turns.append(turn)
        return turn


def play(env: Any, generator: Any, index: int = 0, members: tuple[int, ...] = (0,), context_length: int = 2000) -> list[Rollout]:
    async def main() -> list[Rollout]:
        env.policy = policy_of(generator, context_length=context_length, sampling=SAMPLING)
        try:
            return await env.play(task_of(env, index), list(members), 0)
        finally:
            await env.close()

    return asyncio.run(main())


def text_of(turn: Turn) -> str:
    return tiny_chat().tokenizer.decode(turn.prompt_ids)


def index_of(env: Any, agent: str) -> int:
    return next(index for index in range(100) if env.trained_agent(task_of(env, index)) == agent)


def test_each_group_trains_one_agent_with_its_own_reward():
    env = load()
    assert env.agents == ("left", "right")  # the host is frozen by the environment
    assert len(env.rows) == 40
    assert json.dumps(env.rows[0])  # rows cross to other processes and into checkpoints
    seen = {}
    for agent in env.agents:
        env = load()
        generator = Recorder()
        (rollout,) = play(env, generator, index_of(env, agent))
        assert (rollout.status, rollout.stop) == ("ok", "user_closed")
        assert rollout.agent == agent
        seen[agent] = rollout
        asked = len(turns_of(rollout))
        assert asked == {"left": 2, "right": 1}[agent]
        assert len(generator.turns) == 4  # host, left, right, left: all are answered
        kept = [turn for turn in generator.turns if any(same(turn, one) for one in turns_of(rollout))]
        assert len(kept) == asked
        assert all("HOST" not in text_of(turn) for turn in kept)
        assert rollout.reward == rollout.rewards["digits"] + 10 * rollout.rewards["lead"]
        assert rollout.metrics["length"] == len(rollout.completion[-1]["content"])
        assert {"left/reward", "right/reward", "host/reward"} <= rollout.metrics.keys()
    assert {turn.temperature for turn in turns_of(seen["left"])} == {1.0}
    assert {turn.temperature for turn in turns_of(seen["right"])} == {0.5}  # the agent's own


def test_which_agent_trains_follows_from_the_task_and_can_be_chosen():
    env = load()
    chosen = [env.trained_agent(task_of(env, index)) for index in range(64)]
    assert chosen == [env.trained_agent(task_of(env, index)) for index in range(64)]
    for stride in (1, 2, 3):  # with several environments, an environment has every n-th index
        assert {chosen[start : start + 8 * stride : stride].count("left") for start in range(24)} <= {3, 4, 5}
    assert load(agents=("right",)).agents == ("right",)
    with pytest.raises(ValueError, match=r"envs.e.agents=\['host'\]; the agents that can train are left, right"):
        load(agents=("host",))


def test_members_of_a_group_train_different_runs_of_the_same_agent():
    env = load(twice=True, agents=("left",))
    first, second, third = play(env, Recorder(), members=(0, 1, 2))
    assert [len(turns_of(one)) for one in (first, second, third)] == [1, 2, 1]


def test_every_sampled_token_of_the_trained_agent_is_kept_once_with_its_context():
    env = load(agents=("left",))
    generator = Recorder()
    generator.version = 3
    (rollout,) = play(env, generator)
    messages = [*rollout.prompt, *rollout.completion]
    said = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    assert len(said) == len(turns_of(rollout)) == 2
    for number, turn in zip(said, turns_of(rollout), strict=True):
        assert turn.prompt_ids.tolist() == tiny_chat().render(messages[:number])
        assert tiny_chat().parse(turn).content == messages[number]["content"]
        assert set(turn.versions.tolist()) == {3}
        assert len(turn.logprobs) == len(turn.completion_ids)
        assert sum(same(turn, one) for one in generator.turns) == 1


def test_an_answer_that_arrives_after_the_trace_was_stopped_is_not_trained(monkeypatch: pytest.MonkeyPatch):
    """Two requests at once: the first answer stops the trace, so verifiers discards the second."""
    from rlx.envs import verifiers_v1_client as client

    async def both(self: Any, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, *more: Any, **others: Any) -> Any:
        async def ask(text: str) -> int:
            request = {"model": ctx.model, "messages": [{"role": "user", "content": text}]}
            status = (await self._post(self.server._handler_for(client.CHAT), secret, request))[0]
            stopped.set()
            return status

        answered.append(await asyncio.gather(ask("now"), ask("later")))
        return client.ProgramResult(0, "", "")

    class Late(Recorder):
        async def generate(self, prompt_ids: Any, sampling: dict, request_id: str, affinity: int) -> Turn:
            if "later" in self.chat.tokenizer.decode(prompt_ids):
                await stopped.wait()
            return await super().generate(prompt_ids, sampling, request_id, affinity)

    answered: list[list[int]] = []
    stopped = asyncio.Event()
    monkeypatch.setattr(client.ChatLoop, "launch", both)
    (rollout,) = play(load(agents=("left",)), Late(lambda prompt: "STOP 1" if "now" in prompt else "5"))
    assert answered[-1] == [400, 400], "the stop refuses both"
    assert (rollout.status, rollout.stop) == ("ok", "said_stop")
    assert ["now" in text_of(turn) for turn in turns_of(rollout)] == [True], "the answer that stopped the trace, alone"


def test_two_runs_are_equal():
    def once() -> list:
        env = load(twice=True)
        rollouts = [one for index in range(4) for one in play(load(twice=True), Recorder(), index, (0, 1))]
        return [(one.reward, one.metrics, [turn.completion_ids.tolist() for turn in turns_of(one)], len(env.rows)) for one in rollouts]

    assert once() == once()


@pytest.mark.parametrize(
    ("says", "status", "stop", "error"),
    [
        ("RAISE", "error", "reward_raised", "TaskError: task GameTask scoring: KeyError: 'no digits'; at "),
        ("NAN", "error", "reward_not_finite", "the reward is nan"),
        ("SLEEP", "timeout", "timeout", "no result after 0.5 s (rollout_timeout)"),
        ("CANCEL", "error", "environment_error", "RuntimeError: the environment cancelled the rollout's own task"),
        ("STOP", "ok", "said_stop", None),
        ("BLOCK", "ok", "user_closed", None),
    ],
)
def test_what_ends_a_rollout(says: str, status: str, stop: str, error: str | None):
    env = load(agents=("left",), timeout=0.5 if says == "SLEEP" else 60.0)
    (rollout,) = play(env, Recorder(lambda prompt: "host" if "HOST" in prompt else says))
    assert (rollout.status, rollout.stop) == (status, stop)
    assert (rollout.error or "").startswith(error or "") if error else rollout.error is None
    if says == "RAISE":
        assert "rlx_test_v1.py:" in (rollout.error or "")
        assert (rollout.error or "").endswith("in digits")
    if says == "BLOCK":  # the environment replaced what the policy sampled; the policy learns from it, and the next prompt has the rest
        assert rollout.completion[0]["content"] == "blocked"
        assert [tiny_chat().parse(turn).content for turn in turns_of(rollout)] == ["BLOCK", "BLOCK"]
        assert "blocked" in text_of(turns_of(rollout)[1])


@pytest.mark.parametrize(("rule", "status", "stop"), [("fail", "error", "reward_raised"), ("zero", "ok", "agent_completed")])
def test_the_rule_for_a_reward_that_raised_is_that_of_classic_environments(rule: str, status: str, stop: str):
    env = loaded(EnvConfig(id="rlx_test_v1", args={"id": "single-agent"}, num_tasks=1, on_reward_error=rule))
    (rollout,) = play(env, Recorder(lambda prompt: "RAISE"))
    assert (rollout.status, rollout.stop, rollout.reward, rollout.metrics["reward_error"]) == (status, stop, 0.0, 1.0)
    assert len(turns_of(rollout)) == 1
    assert "KeyError: 'no digits'; at " in (rollout.error or "")


def test_a_metric_that_is_not_finite_is_left_out():
    (rollout,) = play(load(agents=("left",)), Recorder(lambda prompt: "host" if "HOST" in prompt else "INFINITE"))
    assert rollout.status == "ok"
    assert "length" not in rollout.metrics
    assert all(map(math.isfinite, rollout.metrics.values()))


def test_a_reward_that_raised_cannot_score_0_where_agents_are_judged_together():
    with pytest.raises(ValueError, match=r"envs\.e\.on_reward_error=zero cannot be met"):
        loaded(EnvConfig(id="rlx_test_v1", num_tasks=1, on_reward_error="zero"))


def test_prompts_and_answers_that_fill_the_context():
    env = load(agents=("left",))
    (rollout,) = play(env, Recorder(), context_length=8)
    assert (rollout.status, rollout.stop) == ("error", "prompt_too_long")
    assert rollout.error == "the prompt fills the context of 8 tokens; raise seq_len"
    env = load(agents=("left",))
    long = Recorder(lambda prompt: "x" * 300)
    (rollout,) = play(env, long, context_length=400)
    assert rollout.status == "ok"
    assert rollout.is_truncated


def test_a_rollout_is_truncated_if_any_of_its_answers_was_cut_and_not_because_it_had_all_its_turns():
    """As of classic environments. verifiers looks at the last answer, and counts `max_turns`."""
    long_at_first = Recorder(lambda prompt: "x" * 30 if "xxxx" not in prompt else "ok")
    (rollout,) = play(load(agents=("left",), left={"sampling": {"max_tokens": 8}}), long_at_first)
    assert [turn.finish_reason for turn in turns_of(rollout)] == ["length", "stop"]
    assert rollout.is_truncated
    (rollout,) = play(load(agents=("left",), left={"max_turns": 1}), Recorder())
    assert (rollout.stop, len(turns_of(rollout)), rollout.is_truncated) == ("max_turns", 1, False)


def test_a_server_that_fails_is_the_cause_that_is_said():
    class Broken(Recorder):
        async def generate(self, *args: Any) -> Turn:
            raise ConnectionResetError("the server is gone")

    (rollout,) = play(load(), Broken())
    assert (rollout.status, rollout.stop) == ("error", "model_error")
    assert "the server is gone" in (rollout.error or "")


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (
            {"left": {"harness": {"id": "bash"}}},
            "envs.e: the program bash of rlx_test_v1 runs commands, and sandbox=bwrap: bwrap is not there",
        ),
        ({"left": {"harness": {"id": "codex"}, "runtime": {"type": "subprocess"}}}, "envs.e: Harness 'codex' needs a container runtime"),
        ({"left": {"model": "other"}}, "envs.e: args.left.model=other, but the run's servers have only the policy"),
        ({"left": {"rounds": 2}}, "envs.e.args: 1 validation error for GameConfig left.rounds Extra inputs are not permitted"),
    ],
)
def test_what_cannot_run_here_is_said_when_it_is_loaded(args: dict, sentence: str, monkeypatch):
    monkeypatch.setattr("rlx.agents.images.problem_of", lambda kind: f"{kind} is not there")
    with pytest.raises(ValueError, match=r"^envs.e") as caught:
        load(**args)
    assert sentence in str(caught.value)


def test_an_image_that_no_request_showed_is_recorded_and_one_that_is_shown_is_refused():
    from verifiers.v1.types import ToolMessage

    from rlx.envs.messages import for_template, recorded

    message = ToolMessage(tool_call_id="a", content=[{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}])
    with pytest.raises(ValueError, match="parts of the type image_url"):
        for_template(message)
    assert (recorded(message)["role"], recorded(message)["content"][0]["type"]) == ("tool", "image_url")


def test_a_whole_episode_trains_every_run_of_every_agent_each_with_its_own_tokens_and_reward():
    env, generator = load(twice=True, agents_per_group="all"), Recorder()
    rollouts = [one for played in play(env, generator, members=(0, 1)) for one in (played, *played.siblings)]
    assert sorted(one.agent for one in rollouts) == ["left"] * 4 + ["right"] * 2  # not the host, who never trains
    assert all(one.status == "ok" for one in rollouts)
    kept = [turn for one in rollouts for turn in turns_of(one)]
    assert len(kept) == len({id(turn) for turn in kept}) == 2 * 4, "each sampled token of an agent that trains, once"
    marks = {agent: {one.baseline_key for one in rollouts if one.agent == agent} for agent in ("left", "right")}
    assert [len(marks[agent]) for agent in ("left", "right")] == [1, 1]  # both episodes, the same task
    assert not marks["left"] & marks["right"]
    assert {one.baseline_key for one in play(load(agents_per_group="all"), Recorder(), index=1)}.isdisjoint(marks["left"] | marks["right"])


def test_another_environment_of_verifiers_around_the_taskset_is_chosen_by_its_id():
    assert loaded(EnvConfig(id="rlx_test_v1", args={"id": "single-agent"}, num_tasks=1)).agents == ("agent",)


def test_a_worker_gives_the_runs_of_a_whole_episode_as_this_process_does(monkeypatch):
    from rlx.envs.pool import WorkerPool
    from rlx.envs.wire import Settings
    from rlx.rollout.groups import RolloutCounters, play_group

    monkeypatch.setenv("PYTHONPATH", OUTSIDE)
    config = EnvConfig(id="rlx_test_v1", args={"twice": True}, agents_per_group="all", num_tasks=4)
    pool = WorkerPool("e", config, Settings(SAMPLING, 120.0, 8), 1)
    pool.wait_loaded()
    assert list(pool.agents) == ["left", "right"]
    found = []
    for env in (load(twice=True, agents_per_group="all", num_tasks=4), pool):

        async def group(env: Any = env) -> list[Rollout]:
            async with served(recorder := Recorder()) as sampler:
                if isinstance(env, WorkerPool):
                    give(env, sampler, context_length=2000, sampling=SAMPLING)
                else:
                    env.policy = policy_of(recorder, context_length=2000, sampling=SAMPLING)
                try:
                    return await play_group(env, task_of(env), 2, 0, RolloutCounters())
                finally:
                    await env.close()

        rollouts = asyncio.run(group())
        found.append(
            [(one.agent, one.baseline_key, one.reward, [turn.completion_ids.tolist() for turn in turns_of(one)]) for one in rollouts]
        )
    assert found[0] == found[1]
    assert len(found[0]) == 6


def test_a_request_that_may_call_no_tool_is_shown_none_and_a_choice_that_cannot_be_forced_is_said_once(caplog: pytest.LogCaptureFixture):
    from rlx.agents import dialects
    from rlx.envs import verifiers_v1_client as v1
    from rlx.policy import sampling_params
    from rlx.policy.base import Reply

    dialects._say_once.cache_clear()
    sampling_params._say_unknown.cache_clear()
    seen = []

    class Episode:
        async def respond(self, messages, tools, sampling, *, trained=True):
            sampling_params.parameters_of({}, sampling, (), 100)
            seen.append(tools)
            return Reply("fine")

    tools = [{"type": "function", "function": {"name": "bet", "parameters": {"type": "object", "properties": {}}}}]
    client = v1.PolicyClient(Episode())
    for more in ({}, {"tool_choice": "auto", "n": 1}, {"tool_choice": "none"}, *[{"tool_choice": "required"}] * 2):
        body = {"model": "policy", "messages": [{"role": "user", "content": "go"}], "tools": tools, **more}
        asyncio.run(client.get_response(v1.CHAT, body, None))
    assert seen == [tools, tools, None, tools, tools]
    (said,) = [record.getMessage() for record in caplog.records]
    assert 'tool_choice="required"' in said


def test_two_agents_are_trained_at_their_own_temperatures(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(sys, "path", [OUTSIDE, *sys.path])
    from rlx.envs.verifiers_v1 import load_environment

    env = load_environment("e", EnvConfig(id="rlx_test_v1", num_tasks=8), dict(SAMPLING), 120.0)
    run = Run(tmp_path, tied=True)
    run.start()

    async def play() -> list[Rollout]:
        async with Servers(run.ready(), request_timeout=120) as client:
            await client.fleet.wait_ready(300)
            env.policy = policy_of(client, context_length=CONTEXT, sampling={**SAMPLING, "max_tokens": 12})
            try:
                groups = await asyncio.gather(*(env.play(task_of(env, index), [0, 1, 2], 0) for index in range(4)))
            finally:
                await env.close()
            return [rollout for group in groups for rollout in group]

    try:
        rollouts = asyncio.run(play())
    finally:
        run.stop()
    assert {rollout.status for rollout in rollouts} == {"ok"}
    by_agent = {agent: [one for one in rollouts if env.trained_agent(one.task) == agent] for agent in env.agents}
    assert all(by_agent.values())
    for agent, temperature in {"left": 1.0, "right": 0.5}.items():
        turns = [turn for rollout in by_agent[agent] for turn in turns_of(rollout)]
        assert {turn.temperature for turn in turns} == {temperature}
        assert run.worst(turns, temperature) < EXACT
