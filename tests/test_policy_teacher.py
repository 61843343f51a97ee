"""Teachers in the policy's place, and what they read."""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from chat_templates import CLOSING, HERMES, LLAMA, OPENING, PLAIN, RETAINING, small_tokenizer
from policy_stand_in import SAMPLING, StandIn, load, policy_of, tiny_chat
from test_orchestrator_run import StandInServers, StandInTrainer, config_of, metrics
from test_policy_teacher_client import StandIn as TeacherStandIn
from test_policy_teacher_client import served
from traces import plain, trace_of, turns_of

from rlx.aio import first_failure
from rlx.config.load import compose
from rlx.envs.base import sampling_of
from rlx.envs.load import give_policy
from rlx.heartbeat import Heartbeat
from rlx.inference.endpoints import Endpoint
from rlx.paths import RunPaths
from rlx.policy.base import Call, Message, PolicyError, PromptTooLong, Reply
from rlx.policy.chat import Chat
from rlx.policy.teacher_policy import TeacherEpisode, TeacherPolicy
from rlx.policy.teacher_prompt import Demonstrated
from rlx.roles.orchestrator import Orchestrator
from rlx.rollout.samples import samples_of
from rlx.rollout.teacher_logprobs import TeacherLogprobs
from rlx.trace import Turn
from rlx.types import Group, Rollout, Task

TASK = Task(env="e", example_id=0, index=0, row={})
USER: Message = {"role": "user", "content": "abc"}


class Says:
    """An endpoint's episode with given answers."""

    def __init__(self, *replies: Reply) -> None:
        self.left = list(replies)

    async def respond(self, messages: Any, tools: Any = None, sampling: Any = None, *, trained: bool = True) -> Reply:
        return self.left.pop(0)


def episode_of(chat: Chat, *replies: Reply, context: int = 200, learn: frozenset[str] = frozenset()) -> TeacherEpisode:
    policy: Any = TeacherPolicy([SimpleNamespace()], chat, lambda: 7, context, learn=learn)  # type: ignore[arg-type]
    inner: Any = Says(*replies)
    return TeacherEpisode(policy, inner)


def rollout_of(*turns: Turn) -> Rollout:
    return Rollout(
        task=TASK, member=0, trace=trace_of(*turns), prompt="", completion="", reward=1.0, rewards={}, metrics={}, status="ok", stop="stop"
    )


@pytest.mark.parametrize("chat", [tiny_chat(), Chat(small_tokenizer(PLAIN)), Chat(small_tokenizer(HERMES))])
async def test_the_answer_is_what_the_policy_would_have_to_write(chat: Chat):
    episode = episode_of(chat, Reply("cba", request_id="r1"), Reply("long", truncated=True, request_id="r2"))

    first = await episode.respond([USER])
    await episode.respond([USER, first.message, USER])
    one, two = turns_of(episode.trace)
    assert one.prompt_ids.tolist() == chat.render([USER])
    assert chat.tokenizer.decode(one.completion_ids, skip_special_tokens=True) == "cba"
    assert int(one.completion_ids[-1]) in chat.stop_token_ids, "the policy must learn to end"
    assert chat.tokenizer.decode(two.completion_ids, skip_special_tokens=False) == "long", "a cut answer has no end to learn"
    assert set(one.versions.tolist()) == {7}
    assert plain(turns_of(episode.keep(["r2"]))) == plain([two])


@pytest.mark.parametrize("strategy", ["interleaved", "branching"])
async def test_what_the_environment_answers_a_teacher_is_learned_too_if_the_environment_says_so(strategy: str) -> None:
    chat, asked = Chat(small_tokenizer(PLAIN)), {"role": "user", "content": "dog"}
    replies = Reply("cba", request_id="r1"), Reply("god", request_id="r2"), Reply("dgo", request_id="r3")
    episode = episode_of(chat, *replies, learn=frozenset({"user"}))

    first = await episode.respond([USER])
    for _ in range(2):  # the same question twice
        await episode.respond([USER, first.message, asked])
    group = Group(id=0, task=TASK, rollouts=(rollout_of(*turns_of(episode.trace)),), advantages=np.ones(1, np.float32))
    samples = samples_of(group, strategy=strategy, taught=True, learn={"user": 0.25})
    learned: dict[float, str] = {}
    for sample in samples:
        for weight in set(sample.ce_weights.tolist()) - {0.0}:
            ids = sample.token_ids[sample.ce_weights == weight]
            learned[weight] = learned.get(weight, "") + chat.tokenizer.decode(ids, skip_special_tokens=True)
    assert {weight: text.split() for weight, text in learned.items()} == {1.0: ["cbagoddgo"], 0.25: ["dog"]}, (
        "the first prompt is not learned"
    )


def test_all_addresses_of_a_teacher_answer_and_the_next_attempt_asks_another_one():
    keys = [
        "envs.reverse_text.sampled_by=teacher",
        "envs.reverse_text.observation_ce_weights.user=1",
        "loss=sft",
        "loss.ce_coef=1",
        "teacher.model=m",
    ]
    cfg = compose(["hardware=cpu", *keys, "teacher.base_url=[http://a:1,http://b:1/v1]", "teacher.timeout=300"], {}).cfg
    env: Any = SimpleNamespace(rows=[], policy=None)
    give_policy({"reverse_text": env}, cfg, tiny_chat(), SimpleNamespace(version=3))  # type: ignore[arg-type]
    policy = env.policy
    assert policy.learn == {"user"}
    assert [(one.timeout, one.max_retries) for one in policy.endpoints] == [(300, 1)] * 2

    def at(env: str, index: int, member: int, attempt: int) -> str:
        episode = policy.episode(Task(env=env, example_id=0, index=index, row={}), member, attempt)
        return str(episode.inner.policy.base_url)

    for env, first in (("a", 0), ("b", 1)):  # the environments of a mix have every second index
        share = sum(at(env, index, 0, 0) == "http://a:1/v1" for index in range(first, 400, 2)) / 200
        assert 0.4 < share < 0.6, "each environment is spread"
    for index in range(20):
        assert len({at("a", index, member, 0) for member in range(4)}) == 1, "a group stays together"
        assert {at("a", index, 0, attempt) for attempt in (0, 1)} == {"http://a:1/v1", "http://b:1/v1"}


def learned(template: str, reply: Reply, eos: str = "<|im_end|>") -> str:
    """What the policy learns of one answer, as text."""
    chat = Chat(small_tokenizer(template, eos))
    episode = episode_of(chat, reply)
    asyncio.run(episode.respond([USER]))
    return chat.text(turns_of(episode.trace)[0].completion_ids.tolist())


def test_a_template_that_closes_the_conversation_gives_one_end_mark_and_a_cut_answer_none():
    assert learned(CLOSING, Reply("yes"), eos="<|eot_id|>") == "yes<|im_end|>"
    assert learned(CLOSING, Reply("yes", truncated=True), eos="<|eot_id|>") == "yes"


def test_an_answer_that_is_cut_in_its_reasoning_does_not_teach_the_end_of_the_reasoning():
    thinking = Reply("", reasoning="two and", truncated=True)
    assert learned(RETAINING, thinking) == "<think>\ntwo and"
    assert learned(RETAINING, replace(thinking, content="fi")) == "<think>\ntwo and\n</think>\n\nfi"


@pytest.mark.parametrize(
    ("template", "reply", "said"),
    [
        (HERMES, Reply("yes<|im_end|>no"), "spells <|im_end|>, which would begin or end a turn"),
        (HERMES, Reply("five", reasoning="two and three"), "does not show the `reasoning_content`"),
        (LLAMA, Reply("I add", calls=(Call("c", "add", "{}"),)), "does not show the `content` of an answer beside a tool call"),
        (HERMES, Reply("", calls=(Call("c", "add", "{}"),), truncated=True), "a length limit cut an answer with a tool call"),
        (HERMES, Reply(""), "says nothing"),
    ],
)
def test_an_answer_that_the_policys_template_shows_otherwise_is_refused(template: str, reply: Reply, said: str):
    with pytest.raises(PolicyError, match=re.escape(said)):
        learned(template, reply, eos="<|eot_id|>" if template == LLAMA else "<|im_end|>")


def test_a_request_beside_the_trajectory_is_not_learned():
    episode = episode_of(tiny_chat(), Reply("a verdict"))
    asyncio.run(episode.respond([USER], trained=False))
    assert turns_of(episode.trace) == ()


def test_what_cannot_be_tokenized_as_the_policys_is_refused():
    with pytest.raises(PromptTooLong):
        asyncio.run(episode_of(tiny_chat(), Reply("x" * 60), context=30).respond([USER]))
    with pytest.raises(PolicyError, match="raw text"):
        asyncio.run(episode_of(tiny_chat(), Reply("x")).respond([{"role": "text", "content": "abc"}]))
    with pytest.raises(PolicyError, match="does not show an answer as the continuation of its prompt"):
        asyncio.run(episode_of(Chat(small_tokenizer(OPENING)), Reply("x")).respond([USER]))


def test_a_teachers_tokens_are_for_cross_entropy_alone():
    turn = Turn(
        prompt_ids=np.array([1, 2], np.int32),
        completion_ids=np.array([3, 4], np.int32),
        logprobs=np.zeros(2, np.float32),
        versions=np.full(2, 7, np.int32),
        temperature=1.0,
        finish_reason="stop",
    )
    group = Group(id=0, task=TASK, rollouts=(rollout_of(turn),), advantages=np.ones(1, np.float32))
    (sample,) = samples_of(group, strategy="interleaved", taught=True)
    assert not sample.loss_mask.any()
    assert not sample.advantages.any()
    assert sample.versions.tolist() == [-1] * 4
    assert sample.ce_weights.tolist() == [0, 0, 1, 1]


HOW = Demonstrated("info.solution", "{prompt} as in {demonstration}")
ROW = {"prompt": "", "info": {"solution": "a {prompt} b"}}


def episode_with(how: Demonstrated = HOW, row: dict[str, Any] = ROW) -> tuple[Any, StandIn]:
    generator = StandIn(tiny_chat(), error=0.0)
    policy = policy_of(generator, context_length=400, sampling=SAMPLING, demonstrated=how)
    return policy.episode(Task(env="e", example_id=0, index=0, row=row), 0, 0), generator


def test_the_teacher_reads_the_demonstration_and_the_policy_does_not():
    episode, generator = episode_with()
    prompt = [{"role": "system", "content": "be good"}, {"role": "user", "content": "abc"}]
    asyncio.run(episode.respond(prompt))
    (turn,) = turns_of(episode.trace)
    chat = tiny_chat()
    assert turn.prompt_ids.tolist() == generator.requests[0]["prompt_ids"] == chat.render(prompt)
    assert turn.teacher_prompt_ids.tolist() == chat.render([prompt[0], {"role": "user", "content": "abc as in a {prompt} b"}])


async def test_what_follows_the_first_answer_follows_it_for_the_teacher_token_for_token():
    episode, _ = episode_with()
    first = [{"role": "user", "content": "abc"}]

    reply = await episode.respond(first)
    await episode.respond([*first, reply.message, {"role": "user", "content": "again"}])
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
    episode, generator = episode_with(row=row)
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


async def test_a_run_of_self_distillation_sends_the_trainer_the_teachers_numbers_for_every_sampled_token(tmp_path: Path):
    loss = {"_target_": "rlx.losses.aipo.sdft", "aggregate": "token_mean"}
    config = config_of(loss=loss, teacher__demonstration="answer", teacher__template="{prompt} is {demonstration}")
    config.advantage = {"_target_": "rlx.advantages.group.none"}
    env = config.envs["e"]
    envs: Any = {"e": load(env.id, timeout=60.0, sampling=sampling_of(config, env), name="e", **env.args)}
    paths, servers, teacher = RunPaths(tmp_path), StandInServers(), TeacherStandIn()
    teacher.version = 99
    give_policy(envs, config, tiny_chat(), servers)

    trainer = StandInTrainer(paths, config)

    async with served(teacher) as url:
        own = [Endpoint(url, "key")]
        async with TeacherLogprobs.of(config, tiny_chat().tokenizer, lambda _: None, lambda: own, lambda: servers.version) as teaching:
            everything: Any = servers
            run = Orchestrator(config, paths, envs, everything, everything, Heartbeat(paths, "orchestrator"), None, teaching).run()
            await asyncio.wait_for(first_failure(run, trainer.run()), 120)
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
