"""What a teacher says in an environment: right answers, copies, and teachers that environments bring themselves."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
import verifiers as vf
from datasets import Dataset
from verifiers.types import Tool

from rlx.config.schema import EnvConfig
from rlx.envs.demonstrations import conversations, last_question
from rlx.envs.verifiers_client import function_of
from rlx.envs.verifiers_v0 import VerifiersEnvironment, load_environment

WORDS = ["abc", "hello", "word", "xyzzy"]
SYSTEM = {"role": "system", "content": "reverse"}


def add(x: int, y: int) -> int:
    """The sum."""
    return x + y


class Taught(vf.ToolEnv):
    """A tool environment with a teacher of its own."""

    def demonstration(self, row: dict[str, Any], errs: bool, random: random.Random) -> list[dict[str, Any]] | None:
        if row["answer"] == "word":
            return None
        call = {"id": "a", "type": "function", "function": {"name": "add", "arguments": json.dumps({"x": 1, "y": 9 if errs else 2})}}
        return [
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "a", "content": "3"},
            {"role": "assistant", "content": f"{row['answer']} {random.random()}"},
        ]


def words(kind: type[vf.Environment] = vf.SingleTurnEnv, **options: Any) -> vf.Environment:
    rows = {"prompt": [[SYSTEM, {"role": "user", "content": word}] for word in WORDS], "answer": [word[::-1] for word in WORDS]}
    return kind(dataset=Dataset.from_dict(rows), rubric=vf.Rubric(), **options)


def said_in(env: vf.Environment, teacher_error: float, seed: int = 0, times: int = 1) -> list[Any]:
    return conversations(VerifiersEnvironment("words", env, {}, 10.0), list(env.get_dataset()) * times, teacher_error, seed)


def texts(said: list[Any]) -> list[str]:
    return [conversation.played[-1]["content"] for conversation in said]


def test_a_faultless_teacher_answers_and_one_that_always_errs_copies():
    said = said_in(words(), 0.0)
    assert texts(said) == [word[::-1] for word in WORDS]
    assert said[0].prompt == [SYSTEM, {"role": "user", "content": "abc"}]
    assert said[0].tools is None
    assert texts(said_in(words(), 1.0)) == WORDS


def test_a_teacher_errs_as_often_as_it_should_and_the_same_way_again():
    first = texts(said_in(words(), 0.3, seed=1, times=100))
    right = sum(text == word[::-1] for text, word in zip(first, WORDS * 100, strict=True))
    assert 240 < right < 320
    assert texts(said_in(words(), 0.3, seed=1, times=100)) == first
    assert texts(said_in(words(), 0.3, seed=2, times=100)) != first


def test_the_question_is_the_last_user_message_or_the_whole_text():
    turns = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}, {"role": "user", "content": "three"}]
    assert last_question({"prompt": turns}) == "three"
    assert last_question({"prompt": [{"role": "user", "content": [{"type": "text", "text": "part"}]}]}) == "part"
    assert last_question({"prompt": "plain"}) == "plain"


def test_an_environment_with_a_teacher_is_shown_as_it_is_played_with_its_tools():
    right, wrong = said_in(words(Taught, tools=[add]), 0.0), said_in(words(Taught, tools=[add]), 1.0)
    assert [message["role"] for message in right[0].played] == ["assistant", "tool", "assistant"]
    assert right[0].played[0]["content"] == ""
    arguments = [json.loads(said[0].played[0]["tool_calls"][0]["function"]["arguments"]) for said in (right, wrong)]
    assert arguments == [{"x": 1, "y": 2}, {"x": 1, "y": 9}]
    assert [tool["function"]["name"] for tool in right[0].tools] == ["add"]
    assert texts(said_in(words(Taught, tools=[add]), 0.0)) == texts(right), "all chance comes from the seed"


def test_a_row_about_which_the_teacher_is_silent_gets_the_right_answer():
    env = words(Taught, tools=[add])
    env.dataset = env.dataset.map(lambda row: {**row, "answer": "word"})
    assert texts(said_in(env, 0.0)) == ["word"] * 4


def test_a_group_asks_the_teacher_and_the_tools_of_the_child_that_plays_the_row():
    group = vf.EnvGroup([words(Taught, tools=[add]), words()], env_names=["taught", "plain"])
    said = said_in(group, 0.0)
    assert [len(conversation.played) for conversation in said] == [3] * 4 + [1] * 4
    assert [bool(conversation.tools) for conversation in said] == [True] * 4 + [False] * 4


def test_parts_of_a_text_are_shown_as_the_policy_gets_them():
    env = words()
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    env.dataset = Dataset.from_list([{"prompt": [{"role": "user", "content": parts}], "answer": "ba"}])
    assert [(said.prompt, said.played[0]["content"]) for said in said_in(env, 0.0)] == [([{"role": "user", "content": "a\nb"}], "ba")]
    assert texts(said_in(env, 1.0)) == ["a\nb"]


@pytest.mark.parametrize("form", ["type", "prompt", "child"])
def test_an_environment_whose_prompts_are_raw_text_is_refused(form: str):
    env = words(message_type="chat" if form == "prompt" else "completion")
    if form == "prompt":
        env.dataset = Dataset.from_list([{"prompt": "once", "answer": ""}])
    if form == "child":
        env = vf.EnvGroup([words(), env], env_names=["plain", "raw"])
    with pytest.raises(ValueError, match=r"envs\.words: the warm start .* are raw text \(message_type=\"completion\""):
        said_in(env, 0.0)


@pytest.mark.parametrize("wrong", ["text", [], [{"role": "user", "content": "x"}]])
def test_a_teacher_that_returns_something_else_is_named(wrong: Any):
    env = words()
    env.demonstration = lambda row, errs, random: wrong
    with pytest.raises(ValueError, match=r"envs\.words: `demonstration` must return a list of messages that ends with the assistant's"):
        said_in(env, 0.0)


@pytest.mark.parametrize(("parser", "form"), [(None, "<answer>\n{}\n</answer>"), (vf.Parser(), "{}")], ids=["xml", "plain"])
def test_answers_of_reasoning_gym_are_the_entrys_in_the_parsers_form(parser: vf.Parser | None, form: str):
    env = vf.ReasoningGymEnv("chain_sum", num_train_examples=8, num_eval_examples=2, parser=parser)
    environment = VerifiersEnvironment("gym", env, {}, 10.0)
    row = environment.rows[3]
    assert row["answer"] == "3", "a reasoning-gym row holds an index, not the answer"
    text = environment.answer_of(row)
    assert text == form.format(env.rg_dataset[3]["answer"])
    assert env.parser.parse_answer([{"role": "assistant", "content": text}]) == env.rg_dataset[3]["answer"]


def test_answers_that_are_no_text_are_unknown():
    environment = load_environment("words", EnvConfig(id="rlx-reverse-text", args={"num_examples": 4}), {}, 10.0)
    assert environment.answer_of(environment.rows[0]) == environment.rows[0]["answer"]
    for answer in (None, "", 7):
        assert environment.answer_of({"answer": answer}) is None


def test_the_tools_of_a_row_do_not_show_those_of_other_rows() -> None:
    """Arrow gives all rows the fields of each, as nulls."""
    add = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
    look = {"type": "object", "properties": {"page": {"type": "string", "enum": ["a"]}, "deep": {"type": "boolean"}}}
    rows = Dataset.from_list([{"tools": [{"name": "add", "parameters": add}]}, {"tools": [{"name": "look", "parameters": look}]}])
    assert rows[0]["tools"][0]["parameters"] != add
    tools = [Tool(description="", **row["tools"][0]) for row in rows]
    assert [function_of(tool)["function"]["parameters"] for tool in tools] == [add, look]
    kept = {"type": "object", "properties": {"x": {"type": "integer", "default": None}}}
    assert function_of(Tool(name="f", description="", parameters=kept))["function"]["parameters"] == kept
