"""The public set of v1 environments: each is played as stock verifiers plays it, or is refused by one sentence."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import os
import sys
from typing import Any

import pytest
from policy_stand_in import SAMPLING, policy_of, task_of, tiny_chat
from public_classic import check_tokens, judge
from public_environments import CASES, KUHN, LOCAL, Answers, Case, check_as_stock, folder, local_data, on_path, one_of, played, stock
from public_installed import installed
from sandboxes import NEEDS_BWRAP
from traces import merge, same, turns_of

from rlx.config.schema import EnvConfig
from rlx.envs.kinds import kind_of
from rlx.types import Rollout

REFUSED = {
    "bash_interception": "BashInterceptionTask.rewritten of bash_interception runs commands, and sandbox=bwrap: bwrap is not there",
    "code_golf": "CodeGolfTask.evaluate of code_golf runs commands, and sandbox=bwrap",
    "color_codeword": "parts of the type image_url, but rlx trains on text alone",
    "deepwiki": "this machine does not reach its tool server at https://mcp.deepwiki.com/mcp",
    "grayscale_interception": "parts of the type image_url, but rlx trains on text alone",
    "gsm8k": "GSM8KTask.correct, GSM8KTask.setup of gsm8k runs commands, and sandbox=bwrap",
    "nemo_gym_weather": "nemo",
    "web_search_interception": "needs a container runtime",
    "wordle": "textarena requires nltk and textarena. Install with",
}


def load(name: str, args: dict[str, Any], agents: list[str]) -> Any:
    from rlx.envs.verifiers_v1 import load_environment

    return load_environment("e", EnvConfig(id=name, args=args, agents=agents, num_tasks=3), dict(SAMPLING), 120.0)


@pytest.fixture(autouse=True)
def quiet(monkeypatch, caplog):
    monkeypatch.delenv("PRIME_API_KEY", raising=False)
    caplog.set_level(logging.WARNING)
    local_data(monkeypatch)


@pytest.mark.slow
def test_a_game_of_two_agents_is_played_like_stock_verifiers_plays_it(monkeypatch):
    on_path(KUHN.name, monkeypatch)
    assert kind_of(KUHN.name) == "v1"
    env = load(KUHN.name, KUHN.args, [KUHN.agent])
    task, answers = task_of(env), Answers(KUHN.model)
    (rollout,) = asyncio.run(played(env, answers, task, [0]))
    assert rollout.status == "ok", rollout.error
    messages = [*rollout.prompt, *rollout.completion]
    said = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    for number, turn in zip(said, turns_of(rollout), strict=True):  # every token that the trained agent sampled, once
        assert sum(same(turn, one) for one in answers.turns) == 1
        assert turn.prompt_ids.tolist()[-4:] == tiny_chat().render(messages[:number])[-4:]
    check_tokens(rollout, [one for one in answers.turns if "Kuhn poker as Player 1" in tiny_chat().tokenizer.decode(one.prompt_ids)])
    check_as_stock(rollout, asyncio.run(stock(KUHN, env.rows[0], Answers(KUHN.model), task)))
    assert rollout.metrics["player0/reward"] == -rollout.reward


def keeps_notes(prompt: str) -> str:
    """A model that asks the tool, saves the result in its notes, and answers from its notes."""
    last = prompt.rpartition("<|im_start|>user")[2]
    if "Notes:" in last:
        return "<answer>first programmer</answer>"
    answered = "<|im_start|>tool" in last
    name, arguments = ("summarize", {"notes": "a programmer"}) if answered else ("facts_lookup", {"name": "Ada Lovelace"})
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@pytest.mark.slow
@pytest.mark.long
def test_another_harness_a_program_that_rewrites_its_context_plays_like_in_stock_verifiers(monkeypatch):
    """uv makes the program's own Python from a package index."""
    on_path("glossary", monkeypatch)
    both = f"{installed(folder() / 'glossary')}{os.pathsep}{installed(folder() / 'compact')}"
    monkeypatch.syspath_prepend(str(installed(folder() / "compact")))
    monkeypatch.setenv("PYTHONPATH", both)
    case = Case("glossary", keeps_notes, {"agent": {"harness": {"id": "compact"}, "runtime": {"type": "subprocess"}}})
    env = load(case.name, case.args, [case.agent])
    task, answers = task_of(env), Answers(case.model)
    (rollout,) = asyncio.run(played(env, answers, task, [0]))
    assert rollout.status == "ok", rollout.error
    assert [len(turn.completion_ids) > 0 for turn in turns_of(rollout)] == [True] * 3
    assert len(merge(turns_of(rollout), "interleaved")) == 3, "other tools, and then the notes, begin new samples"
    check_tokens(rollout, answers.turns)
    check_as_stock(rollout, asyncio.run(stock(case, env.rows[0], Answers(case.model), task)))


@pytest.mark.slow
@pytest.mark.parametrize(("verdict", "reward"), [("BLOCK", 1.0), ("ALLOW", 0.0)])
def test_a_judge_that_a_task_asks_decides_the_reward_like_in_stock_verifiers(verdict, reward, monkeypatch):
    on_path("interception", monkeypatch)
    with judge(verdict) as endpoint:
        args = {"taskset": {"task": {"judge": {"base_url": endpoint.url}}}}
        case = Case("interception", one_of("I say JUDGE_BLOCK"), args)
        env = load(case.name, case.args, [case.agent])
        task, answers = task_of(env, 1), Answers(case.model)
        (rollout,) = asyncio.run(played(env, answers, task, [0]))
        asked = len(endpoint.asked)
        assert rollout.status == "ok", rollout.error
        check_as_stock(rollout, asyncio.run(stock(case, env.rows[1], Answers(case.model), task)))
    assert (rollout.reward, asked, len(endpoint.asked)) == (reward, 1, 2)
    assert "Candidate:\nI say JUDGE_BLOCK" in endpoint.asked[0]["messages"][-1]["content"]
    check_tokens(rollout, answers.turns)  # the judge's request is none of the policy's


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED)
def test_an_environment_that_cannot_run_here_says_so_before_a_run(name, monkeypatch):
    on_path(name, monkeypatch)
    monkeypatch.setattr("rlx.agents.images.problem_of", lambda kind: f"{kind} is not there")
    for module in ("chromadb", "nemo_gym", "openenv", "nltk", "textarena"):
        monkeypatch.setitem(sys.modules, module, None)  # as where it is not installed
    with pytest.raises((ValueError, ImportError, RuntimeError)) as caught:
        load(name, {}, []).rehearse()
    assert REFUSED[name] in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.slow
@NEEDS_BWRAP
@pytest.mark.parametrize("name", ["gsm8k", "code_golf"])
def test_commands_of_a_task_run_in_a_box_as_they_do_on_this_machine(name, monkeypatch):
    on_path(name, monkeypatch)
    (case,) = (one for one in CASES if one.name == name)
    found = []
    for args in (case.args, {key: value for key, value in case.args.items() if value is not LOCAL}):
        env = load(name, args, [case.agent])
        (rollout,) = asyncio.run(played(env, Answers(case.model), task_of(env), [0]))
        assert rollout.status == "ok", rollout.error
        found.append((rollout.reward, rollout.rewards, rollout.completion))
    assert found[0] == found[1]


@pytest.mark.slow
def test_a_rollouts_own_tools_are_called_in_this_process(monkeypatch):
    from verifiers.v1.mcp import launch

    def started(*_: Any, **__: Any) -> Any:
        raise AssertionError("a process of its own for the tools of a rollout")

    monkeypatch.setattr(launch, "serve", started)
    on_path("scratchpad", monkeypatch)
    (case,) = (one for one in CASES if one.name == "scratchpad")
    env = load(case.name, case.args, [case.agent])
    (rollout,) = asyncio.run(played(env, Answers(case.model), task_of(env), [0]))
    assert (rollout.status, rollout.reward) == ("ok", 1.0), rollout.error


@pytest.mark.slow
def test_a_package_without_a_taskset_is_no_environment(monkeypatch):
    on_path("compact", monkeypatch)
    with pytest.raises(ValueError, match=r"the module compact .* is no verifiers environment"):
        kind_of("compact")


@pytest.mark.slow
def test_each_proposed_problem_has_its_own_group_of_solvers_and_the_proposers_are_compared_by_what_solvers_made_of_them(monkeypatch):
    from rlx.advantages.group import group_mean
    from rlx.advantages.mix import AdvantageMix
    from rlx.envs.verifiers_v1 import load_environment
    from rlx.rollout.batch import make_groups, scores_of
    from rlx.rollout.groups import RolloutCounters, comparison_groups, play_group

    on_path("proposer_solver", monkeypatch)
    asked = itertools.count()

    def says(prompt: str) -> str:
        number = next(asked)
        if "word problem" in prompt:
            return f'{{"problem": "What is 3 + 4, for the {number}th time?", "answer": 7}}'
        return "7" if number % 3 else "8"

    config = EnvConfig(id="proposer_solver", args={"n": 4}, agents_per_group="all", num_tasks=3)
    env = load_environment("e", config, dict(SAMPLING), 120.0)
    env.policy = policy_of(Answers(says), context_length=8000, sampling={**SAMPLING, "max_tokens": 400})

    async def group() -> list[Rollout]:
        try:
            return await play_group(env, task_of(env), 3, 0, RolloutCounters())
        finally:
            await env.close()

    rollouts = asyncio.run(group())
    (made,) = make_groups([rollouts], scores_of([rollouts]), AdvantageMix([group_mean], {}))
    parts = [[rollouts[place] for place in places] for places in comparison_groups(rollouts)]
    assert sorted(map(len, parts)) == [3, 4, 4, 4]
    for places, part in zip(comparison_groups(rollouts), parts, strict=True):
        assert len({(one.agent, one.baseline_key) for one in part}) == 1
        assert len({one.episode_index for one in part}) == (3 if part[0].agent == "proposer" else 1)
        rewards = [one.reward for one in part]
        assert made.advantages[places].tolist() == pytest.approx([reward - sum(rewards) / len(rewards) for reward in rewards])
    solved = {part[0].episode_index: sum(one.reward for one in part) / 4 for part in parts if len(part) == 4}
    (proposers,) = (part for part in parts if part[0].agent == "proposer")
    assert {one.episode_index: one.reward for one in proposers} == {episode: 4 * p * (1 - p) for episode, p in solved.items()}


@pytest.mark.slow
@pytest.mark.parametrize("same", [True, False])
def test_a_group_whose_solvers_solve_different_problems_says_so(monkeypatch, caplog, same):
    from rlx.rollout.groups import RolloutCounters, play_group

    on_path("proposer_solver", monkeypatch)
    asked = itertools.count()

    def says(prompt: str) -> str:
        number = 0 if same else next(asked)
        return f'{{"problem": "What is 3 + 4, for the {number}th time?", "answer": 7}}' if "word problem" in prompt else "7"

    env = load("proposer_solver", {"n": 2}, ["solver"])
    env.policy = policy_of(Answers(says), context_length=8000, sampling={**SAMPLING, "max_tokens": 400})

    async def group() -> list[Rollout]:
        try:
            return await play_group(env, task_of(env), 2, 0, RolloutCounters())  # every member alone, as a run plays them
        finally:
            await env.close()

    rollouts = asyncio.run(group())
    assert [(rollout.status, rollout.baseline_key, rollout.task_key) for rollout in rollouts] == [("ok", None, None)] * 2
    assert [rollout.metrics.get("tasks_differ") for rollout in rollouts] == ([0.0, 0.0] if same else [1.0, 1.0])
    assert ("episodes of one row gave an agent different tasks" in caplog.text) is not same
