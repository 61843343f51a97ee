"""The prompts of self-distillation's teacher: the policy's own, with the demonstration in the first user message and nowhere else."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from policy_stand_in import SAMPLING, StandIn, load, policy_of, tiny_chat
from test_orchestrator_run import StandInServers, StandInTrainer, config_of, metrics
from test_policy_teacher_client import StandIn as TeacherStandIn
from test_policy_teacher_client import served
from traces import turns_of

from rlx.concurrent import first_failure
from rlx.envs.base import sampling_of
from rlx.envs.load import give_policy
from rlx.heartbeat import Heartbeat
from rlx.inference.endpoints import Endpoint
from rlx.paths import RunPaths
from rlx.policy.base import PolicyError
from rlx.policy.teacher_prompt import Demonstrated
from rlx.roles.orchestrator import Orchestrator
from rlx.rollout.teacher_logprobs import TeacherLogprobs
from rlx.types import Task

HOW = Demonstrated("info.solution", "{prompt} as in {demonstration}")
ROW = {"prompt": "", "info": {"solution": "a {prompt} b"}}


def episode_of(how: Demonstrated = HOW, row: dict[str, Any] = ROW) -> tuple[Any, StandIn]:
    generator = StandIn(tiny_chat(), error=0.0)
    policy = policy_of(generator, context_length=400, sampling=SAMPLING, demonstrated=how)
    return policy.episode(Task(env="e", example_id=0, index=0, row=row), 0, 0), generator


def test_the_teacher_reads_the_demonstration_and_the_policy_does_not():
    episode, generator = episode_of()
    prompt = [{"role": "system", "content": "be good"}, {"role": "user", "content": "abc"}]
    asyncio.run(episode.respond(prompt))
    (turn,) = turns_of(episode.trace)
    chat = tiny_chat()
    assert turn.prompt_ids.tolist() == generator.requests[0]["prompt_ids"] == chat.render(prompt)
    assert turn.teacher_prompt_ids.tolist() == chat.render([prompt[0], {"role": "user", "content": "abc as in a {prompt} b"}])


def test_what_follows_the_first_answer_follows_it_for_the_teacher_token_for_token():
    episode, _ = episode_of()
    first = [{"role": "user", "content": "abc"}]

    async def both() -> None:
        reply = await episode.respond(first)
        await episode.respond([*first, reply.message, {"role": "user", "content": "again"}])

    asyncio.run(both())
    one, two = turns_of(episode.trace)
    assert two.teacher_prompt_ids.tolist() == [*one.teacher_prompt_ids.tolist(), *two.prompt_ids.tolist()[len(one.prompt_ids) :]]
    assert two.prompt_ids.tolist()[: len(one.prompt_ids)] == one.prompt_ids.tolist()


def test_messages_are_a_demonstration_by_what_the_assistant_says():
    said = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "yes"}, {"role": "assistant", "content": "no"}]
    assert Demonstrated("answer", "{prompt}|{demonstration}").text("q", {"answer": said}) == "q|yes\nno"
    assert Demonstrated("answer", "{prompt}|{demonstration}").text("q", {"answer": 7}) == "q|7"


@pytest.mark.parametrize(("row", "text"), [
    ({"answer": "x"}, r"no column info\.solution \(teacher\.demonstration\); it has answer"),
    ({"info": {"solution": ""}}, r"in the column info\.solution \(teacher\.demonstration\) is no text: ''"),
    ({"info": {"solution": None}}, "is no text: None"),
])  # fmt: skip
def test_a_row_without_a_demonstration_is_named(row: dict[str, Any], text: str):
    episode, generator = episode_of(row=row)
    with pytest.raises(PolicyError, match=text):
        asyncio.run(episode.respond([{"role": "user", "content": "abc"}]))
    assert not generator.requests, "nothing is sampled for it"
    with pytest.raises(PolicyError, match="this conversation has none"):
        HOW.messages([{"role": "system", "content": "x"}], ROW)


def test_a_column_that_the_rows_do_not_have_is_refused_before_the_first_rollout():
    loss = {"_target_": "rlx.losses.aipo.sdft", "aggregate": "token_mean"}
    config = config_of(loss=loss, teacher__demonstration="nothing")
    envs: Any = {"e": SimpleNamespace(rows=[{"question": "abc", "answer": "cba"}])}
    text = r"envs\.e: in its first example, .* no column nothing \(teacher\.demonstration\); it has question, answer\. Name a column"
    with pytest.raises(ValueError, match=text):
        give_policy(envs, config, tiny_chat(), StandInServers())
    config.teacher.demonstration = "answer"
    give_policy(envs, config, tiny_chat(), StandInServers())
    assert envs["e"].policy.spec.demonstrated.column == "answer"


def test_a_run_of_self_distillation_sends_the_trainer_the_teachers_numbers_for_every_sampled_token(tmp_path: Path):
    loss = {"_target_": "rlx.losses.aipo.sdft", "aggregate": "token_mean"}
    config = config_of(loss=loss, teacher__demonstration="answer", teacher__template="{prompt} is {demonstration}")
    config.advantage = {"_target_": "rlx.advantages.group.none"}
    env = config.envs["e"]
    envs: Any = {"e": load(env.id, timeout=60.0, sampling=sampling_of(config, env), name="e", **env.args)}
    paths, servers, teacher = RunPaths(tmp_path), StandInServers(), TeacherStandIn()
    teacher.version = 99
    give_policy(envs, config, tiny_chat(), servers)

    trainer = StandInTrainer(paths, config)

    async def main() -> None:
        async with served(teacher) as url:
            own = [Endpoint(url, "key")]
            async with TeacherLogprobs.of(config, tiny_chat().tokenizer, lambda _: None, lambda: own, lambda: servers.version) as teaching:
                everything: Any = servers
                run = Orchestrator(config, paths, envs, everything, everything, Heartbeat(paths, "orchestrator"), None, teaching).run()
                await asyncio.wait_for(first_failure(run, trainer.run()), 120)

    asyncio.run(main())
    tokenizer = tiny_chat().tokenizer
    asked = [tokenizer.decode(ids) for body in teacher.asked for ids in body["prompt"] if isinstance(ids, list)]
    assert len(asked) == 4 * 8
    answers = {row["question"]: row["answer"] for row in envs["e"].rows}
    for text in asked:
        said = text.partition("<|im_start|>user\n")[2].partition("<|im_end|>")[0]
        assert answers[said.partition(" is ")[0]] == said.partition(" is ")[2]
    values = metrics(paths)
    assert [(line["teacher/unscored"], line["teacher/unscored_tokens"]) for line in values] == [(0, 0)] * 4
    for step in range(4):
        for sample in trainer.samples(step):
            assert np.allclose(sample.teacher_logprobs, np.where(sample.loss_mask, -sample.token_ids / 10, np.nan), equal_nan=True)


@pytest.mark.parametrize(("rule", "deadline"), [("drop", None), ("score", 90.0)])
def test_a_rollout_that_is_to_be_scored_late_gets_its_deadline_before_the_timeout(rule: str, deadline: float | None):
    config = config_of(orchestrator__rollout_timeout=100.0)
    config.envs["e"].on_timeout, config.envs["e"].turn_timeout = rule, 7.0
    envs: Any = {"e": SimpleNamespace(rows=[])}
    give_policy(envs, config, tiny_chat(), StandInServers())
    assert (envs["e"].policy.spec.deadline, envs["e"].policy.spec.turn_timeout) == (deadline, 7.0)
