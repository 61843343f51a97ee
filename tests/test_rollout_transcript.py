"""Rollouts as conversations: transcripts, rows for supervised training, synthesized data."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from policy_stand_in import SAMPLING, InTurn, StandIn, load, policy_of, task_of, tiny_chat
from test_rollout_filters import candidate as made
from test_rollout_runner import outcome
from traces import turns_of

from rlx.config.load import compose
from rlx.config.roots import SYNTHESIZE
from rlx.paths import RunPaths
from rlx.policy.base import Reply
from rlx.rollout.eval_results import Outcome
from rlx.rollout.rejection_sampling import Candidate, Transcript, transcripts_of
from rlx.rollout.sft_export import COLUMNS, NothingKept, export, rows_of, to_json
from rlx.trace import Trace, TraceBuilder
from rlx.types import Rollout

CALL = '<tool_call>\n{"name": "reverse", "arguments": {"text": "WORD"}}\n</tool_call>'


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


Exchange = tuple[list[dict[str, Any]], Reply, tuple]


def exchange(messages: list[dict[str, Any]], answer: str, tools: tuple = (), truncated: bool = False) -> Exchange:
    return messages, Reply(answer, truncated=truncated), tools


def said(*exchanges: Exchange) -> Trace:
    builder = TraceBuilder()
    for number, (messages, reply, tools) in enumerate(exchanges):
        builder.add(number, messages, tools, reply.message, None, finish_reason="length" if reply.truncated else "stop")
    return builder.trace()


def play(env: Any, *texts: str) -> tuple[Rollout, list[Transcript]]:
    env.policy = policy_of(InTurn(*texts) if texts else StandIn(tiny_chat(), error=0.5), context_length=8192)
    (rollout,) = asyncio.run(env.play(task_of(env), [0], 0))
    return rollout, transcripts_of(rollout.trace)


def check_as_asked(rollout: Rollout, transcripts: list[Transcript]) -> None:
    """Each answer stands in one completion, and the messages before it are the prompt whose tokens the policy got."""
    chat = tiny_chat()
    asked = []
    for one in transcripts:
        for place, message in enumerate(one.completion):
            if message["role"] == "assistant":
                before = [*one.prompt, *one.completion[:place]]
                asked.append((chat.render(before, list(one.tools) or None), message["content"]))
    turns = [(turn.prompt_ids.tolist(), chat.parse(turn, None).content) for turn in turns_of(rollout)]
    assert sorted(ids for ids, _ in asked) == sorted(ids for ids, _ in turns)


def test_tool_calls_and_results():
    env = load("rlx_test_tool")
    word = env.rows[0]["question"]
    rollout, (one,) = play(env, CALL.replace("WORD", word), word[::-1])
    call, result, answer = one.completion
    assert call["tool_calls"][0]["function"]["name"] == "reverse"
    assert (result["role"], result["content"], result["tool_call_id"]) == ("tool", word[::-1], call["tool_calls"][0]["id"])
    assert answer == assistant(word[::-1])
    assert [tool["function"]["name"] for tool in one.tools] == ["reverse"]
    check_as_asked(rollout, [one])


def test_a_rewritten_history_gives_transcripts_of_what_was_asked():
    rollout, transcripts = play(load("rlx_test_rewrite"), "ab", "cd", "ef")
    assert [[message["content"] for message in one.completion] for one in transcripts] == [["ab"], ["cd"], ["ef"]]
    assert transcripts[1].prompt[-2:] == [assistant("AB"), user("again")], "the capitals are the environment's: context, never an answer"
    check_as_asked(rollout, transcripts)


def test_what_is_asked_beside_the_trajectory_is_no_transcript():
    rollout, transcripts = play(load("rlx_test_beside"))
    assert len(transcripts) == len(turns_of(rollout)) == 1
    check_as_asked(rollout, transcripts)


def test_a_raw_text_prompt_stays_text():
    messages = [{"role": "text", "content": "once upon"}]
    assert transcripts_of(said(exchange(messages, " a time"))) == [Transcript(prompt="once upon", completion=" a time")]


def test_examples_in_the_prompt_are_context():
    shown = [user("2+2?"), assistant("4"), user("3+4?")]
    (one,) = transcripts_of(said(exchange(shown, "7")))
    assert (one.prompt, one.completion) == (shown, [assistant("7")])


@pytest.mark.parametrize(
    ("second", "tools"),
    [
        ([user("a"), assistant("B"), user("c")], ()),  # the answer was changed
        ([user("a"), assistant("b"), user("c")], ({"type": "function", "function": {"name": "add"}},)),  # other tools
        ([user("a"), assistant("b"), user("c"), assistant("d"), user("e")], ()),  # the environment said something as the assistant
        ([user("a")], ()),  # asked again
    ],
)
def test_a_prompt_that_does_not_continue_an_answer_begins_a_transcript(second: list, tools: tuple):
    first, other = transcripts_of(said(exchange([user("a")], "b"), exchange(second, "x", tools)))
    assert first == Transcript(prompt=[user("a")], completion=[assistant("b")])
    assert other == Transcript(prompt=second, completion=[assistant("x")], tools=tools)


def test_a_return_to_an_earlier_conversation_continues_the_longest_that_fits():
    talk = [user("a"), assistant("b"), user("c")]
    found = transcripts_of(said(exchange([user("a")], "b"), exchange([user("x")], "y"), exchange(talk, "d"), exchange(talk, "e")))
    assert [[m["content"] for m in one.completion] for one in found] == [["b", "c", "d"], ["y"], ["e"]]
    assert found[2].prompt == talk


def test_of_several_agents_only_the_one_that_trains_is_transcribed():
    """A v1 taskset with two players and a host (`tests/packages`): the members of the group of one task have the same agent."""
    from rlx.config.schema import EnvConfig
    from rlx.envs.verifiers_v1 import load_environment

    env = load_environment("e", EnvConfig(id="rlx_test_v1", num_tasks=8), dict(SAMPLING), 30.0)
    env.policy = policy_of(StandIn(tiny_chat(), answer=lambda text: "7", error=0.0), context_length=2000)
    agents = {env.trained_agent(task_of(env, index)): index for index in range(8)}
    assert set(agents) == {"left", "right"}

    async def main() -> list[Rollout]:
        try:
            return [(await env.play(task_of(env, index), [0], 0))[0] for index in agents.values()]
        finally:
            await env.close()

    for rollout in asyncio.run(main()):
        assert rollout.status == "ok"
        transcripts = transcripts_of(rollout.trace)
        answers = [m for one in transcripts for m in one.completion if m["role"] == "assistant"]
        assert len(answers) == len(turns_of(rollout)) > 0
        assert not any("HOST" in message["content"] for one in transcripts for message in one.prompt)


TOOL = {"type": "function", "function": {"name": "add", "description": "é", "parameters": {"type": "object", "properties": {"x": {}}}}}
CALLED = [
    {
        "role": "assistant",
        "content": "",
        "reasoning_content": "2+2",
        "tool_calls": [{"type": "function", "id": "a", "function": {"name": "add", "arguments": '{"x": null}'}}],
    },
    {"role": "tool", "tool_call_id": "a", "name": "add", "content": "4"},
    {"role": "assistant", "content": "It is 4.\u2028"},
]
FACTS = {"sums": {"env_id": "rlx-sums", "model": "tiny", "seed": 3, "sampling": '{"temperature": 1.0}', "run": "mine"}}


def candidate(*transcripts: Transcript, member: int = 1, env: str = "sums") -> Candidate:
    return made(2, member, env=env, transcripts=transcripts, example_id=7, rewards={"right": 1.0}, stop_condition="done", versions=[0])


def rows() -> list[dict[str, Any]]:
    plain = Transcript(prompt=[{"role": "user", "content": "1+1?"}], completion=[{"role": "assistant", "content": "2"}])
    called = Transcript(prompt=[{"role": "user", "content": "2+2?"}], completion=CALLED, tools=(TOOL,))
    return list(rows_of([candidate(plain), candidate(called, plain, member=2)], FACTS))


def test_a_row_says_where_it_comes_from():
    first, second, third = rows()
    assert list(first) == ["prompt", "completion", *COLUMNS]
    assert (first["env"], first["env_id"], first["example_id"], first["index"], first["member"]) == ("sums", "rlx-sums", 7, 2, 1)
    assert (first["reward"], json.loads(first["rewards"]), first["run"], first["seed"]) == (1.0, {"right": 1.0}, "mine", 3)
    assert (first["tools"], json.loads(second["tools"])) == (None, [TOOL])
    assert [row["part"] for row in (first, second, third)] == [0, 0, 1]
    assert all(len(to_json(row).splitlines()) == 1 for row in rows()), "some readers end a line at U+2028"


def test_supervised_training_marks_exactly_the_answers():
    """The reader of `rlx sft` takes the files as they are: answers and calls are trained, prompts and tool results are not."""
    from policy_stand_in import tiny_chat

    from rlx.data.conversations import read_conversation
    from rlx.data.masks import mark

    shown = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "two"}, {"role": "user", "content": "2+2?"}]
    plain = Transcript(prompt=shown, completion=[{"role": "assistant", "content": "4"}])
    call = {key: value for key, value in CALLED[0].items() if key != "reasoning_content"}  # the tiny model's format does not show it
    called = Transcript(prompt=shown[:1], completion=[call, CALLED[1], {"role": "assistant", "content": "It is 4."}], tools=(TOOL,))
    lines = [to_json(row) for row in rows_of([candidate(plain), candidate(called, member=2)], FACTS)]
    texts = []
    for line in lines:
        (marked,) = mark(read_conversation(json.loads(line)), tiny_chat())
        trained = [token for token, is_trained in zip(marked.token_ids, marked.trained, strict=True) if is_trained]
        texts.append(tiny_chat().tokenizer.decode(trained))
    assert texts[0] == "4<|im_end|>", "the example in the prompt is context"
    assert '"name": "add"' in texts[1]
    assert texts[1].endswith("It is 4.<|im_end|>")
    assert texts[1].count("<|im_end|>") == 2, "two answers, no tool result"


def finished(paths: RunPaths, *rollouts: tuple[int, int, str | None, int]) -> None:
    """Writes rollouts: place, number, weights, version."""
    said = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]
    nodes = [{"parent": n - 1, "message": said[n], "sampled": bool(n)} for n in (0, 1)]
    paths.finished.parent.mkdir(parents=True, exist_ok=True)

    def record(place: int, number: int, weights: str | None, version: int) -> Outcome:
        facts = {"env": "sums", "weights": weights, "version": version, "nodes": nodes}
        return msgspec.structs.replace(outcome(place, number), **facts)

    paths.finished.write_bytes(b"".join(msgspec.json.encode(record(*one)) + b"\n" for one in rollouts))


def test_the_choice_is_made_from_what_the_latest_weights_have_sampled(tmp_path: Path) -> None:
    cfg = compose(["env=sums", "num_examples=2", "rollouts_per_example=2", "duplicates=keep", "dry_run=true"], {}, SYNTHESIZE).cfg
    paths = RunPaths(tmp_path)
    for last, played in ((("b", 28), 2), (("a", 28), 3), ((None, 28), 2), (("a", 3), 1)):
        finished(paths, (0, 0, "a", 28), (0, 1, "a", 28), (2, 0, "a", 28), (1, 0, "b", 28), (1, 1, *last))
        assert export(cfg, paths)["rollouts"] == {"played": played, "kept": played, "dropped": {}}, last
    with pytest.raises(NothingKept, match=r"no rollout is kept: of 1, 1 reward too low; their rewards are 1 to 1\.\n  fix: choose again"):
        export(replace(cfg, min_reward=2.0), paths)
