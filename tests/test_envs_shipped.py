"""The environments that rlx ships."""

from __future__ import annotations

import importlib
import inspect
import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import rlx_countdown
import rlx_reasoning_gym
import rlx_reverse_text
import rlx_sums
import rlx_tool_math
import rlx_word_guess
import verifiers as vf
from policy_stand_in import load, play_texts, tiny_chat
from traces import turns_of

from rlx.config.load import compose
from rlx.data.conversations import Conversation
from rlx.data.masks import mark
from rlx.envs.base import sampling_of
from rlx.envs.demonstrations import conversations
from rlx.models.tiny import build_tokenizer
from rlx.policy.chat import load_chat

pytestmark = pytest.mark.slow

ENVIRONMENTS = Path(__file__).parent.parent / "environments"


def reply(text: str) -> list[dict]:
    return [{"role": "assistant", "content": text}]


def test_reversing_rewards_the_exact_answer_only() -> None:
    parser = rlx_reverse_text.AnswerParser()
    assert rlx_reverse_text.exact(parser, reply(" cba\n"), "cba") == 1.0
    assert rlx_reverse_text.exact(parser, reply("cbaa"), "cba") == 0.0
    assert rlx_reverse_text.exact(parser, reply(""), "cba") == 0.0
    assert 0 < rlx_reverse_text.similarity(parser, reply("cb"), "cba") < 1


def test_words_have_the_asked_lengths_and_follow_from_the_seed() -> None:
    rows = rlx_reverse_text.build_rows(200, 2, 4, seed=1)
    assert {len(row["question"]) for row in rows} == {2, 3, 4}
    assert all(row["answer"] == row["question"][::-1] for row in rows)
    assert rows == rlx_reverse_text.build_rows(200, 2, 4, seed=1)
    assert rows != rlx_reverse_text.build_rows(200, 2, 4, seed=2)


def test_a_prompt_of_the_easy_environments_is_well_under_40_tokens_of_the_tiny_model() -> None:
    rows = rlx_reverse_text.build_rows(100, 3, 6, seed=0) + rlx_sums.build_rows(1, 100, seed=0)
    prompts = [row.get("prompt") or [{"role": "user", "content": row["question"]}] for row in rows]
    assert max(len(tiny_chat().render(prompt)) for prompt in prompts) <= 24


# sums


@pytest.mark.parametrize(
    ("reply_text", "answer"),
    [
        ("7 + 2 = 9", "9"),
        ("It is 9.", "9"),
        ("9.0", "9"),
        ("3 - 8 = -5\n", "-5"),
        ("1,234", "1234"),
        ("2.5", "2.5"),
        ("nine", "nine"),
        ("", ""),
    ],
)
def test_the_last_number_of_a_reply_in_words_counts(reply_text: str, answer: str) -> None:
    assert rlx_sums.LastNumberParser().parse(reply_text) == answer
    assert rlx_sums.build_rows(2, 9, seed=3, words=True)[0]["question"].startswith("What is ")


@pytest.mark.parametrize("level", list(rlx_sums.LEVELS))
def test_every_level_of_sums_accepts_its_own_answers(level: int) -> None:
    rows = rlx_sums.build_rows(level, 64, seed=3)
    parser = rlx_sums.AnswerParser()
    assert rows == rlx_sums.build_rows(level, 64, seed=3)
    for row in rows:
        assert str(eval(row["question"].removesuffix("="))) == row["answer"]
        assert rlx_sums.correct(parser, reply(row["answer"] + "\n"), row["answer"]) == 1.0
        assert rlx_sums.correct(parser, reply(row["answer"] + "1"), row["answer"]) == 0.0


def test_the_easiest_level_of_sums_has_two_digits() -> None:
    for row in rlx_sums.build_rows(1, 64, seed=0):
        left, plus, right, equals = row["question"].split()
        assert (len(left), plus, len(right), equals) == (1, "+", 1, "=")
    assert {len(row["question"].split()) for row in rlx_sums.build_rows(3, 64, seed=0)} == {4, 6}


@pytest.mark.parametrize("level", list(rlx_sums.LEVELS))
def test_sums_are_evaluated_on_problems_that_no_seed_trains_on_or_shows(level: int) -> None:
    def terms(row: dict[str, str]) -> tuple[str, ...]:
        expression = row["question"].removeprefix("What is ").partition("?")[0].removesuffix(" =")
        return tuple(sorted(f"+ {expression}".replace("+ ", "+").replace("- ", "-").split()))

    env = rlx_sums.load_environment(level=level, num_examples=200, num_eval_examples=64, shots=4, words=True)
    held_out = list(env.get_eval_dataset())
    shown = [{"question": message["content"]} for message in held_out[0]["prompt"] if message["role"] == "user"][:-1]
    assert len(shown) == 4
    asked, trained = {terms(row) for row in held_out}, {terms(row) for row in [*env.get_dataset(), *shown]}
    for seed in range(5):
        rows = rlx_sums.build_eval_rows(level, 256, seed + rlx_sums.EVAL_SEED)
        assert rows == rlx_sums.build_eval_rows(level, 256, seed + rlx_sums.EVAL_SEED)
        assert len({row["question"] for row in rows}) == len(rows) == (24 if level == 1 else 256), "none twice"
        asked |= {terms(row) for row in rows}
        trained |= {terms(row) for row in rlx_sums.build_rows(level, 4096, seed)}
    assert not asked & trained
    if level == 1:
        assert len(trained) + len(asked) == 55, "every pair of digits is on one of the two sides"


def test_the_teacher_of_sums_in_words_calculates_step_by_step_and_errs_in_the_last_result() -> None:
    env = rlx_sums.load_environment(level=3, words=True, num_examples=64)
    for row in env.get_dataset():
        (right,), (wrong,) = (env.demonstration(row, errs, random.Random(0)) for errs in (False, True))
        assert rlx_sums.correct(env.parser, reply(right["content"]), row["answer"]) == 1.0
        assert rlx_sums.correct(env.parser, reply(wrong["content"]), row["answer"]) == 0.0
        assert right["role"] == wrong["role"] == "assistant"
        assert right["content"].count("=") == len(row["question"].split("?")[0].split()) // 2 - 1
        assert right["content"].rpartition("=")[0] == wrong["content"].rpartition("=")[0]
    assert not hasattr(rlx_sums.load_environment(level=3), "demonstration"), "a bare expression has a bare answer"


def test_solved_sums_are_shown_step_by_step_in_words_and_bare_otherwise() -> None:
    assert rlx_sums.steps("23 + 45 - 90") == "23 + 45 = 68. 68 - 90 = -22."
    for words, parser in ((True, rlx_sums.LastNumberParser()), (False, rlx_sums.AnswerParser())):
        env = rlx_sums.load_environment(level=3, words=words, shots=8, num_examples=2)
        *said, question = env.get_dataset()[0]["prompt"]
        shown = rlx_sums.build_rows(3, 8, rlx_sums.SHOTS_SEED, words)
        assert question["content"] == env.get_dataset()[0]["question"]
        assert [message["content"] for message in said[::2]] == [row["question"] for row in shown]
        assert [parser.parse(message["content"].rstrip(".")) for message in said[1::2]] == [row["answer"] for row in shown]


# reasoning_gym


def test_reasoning_gym_mixes_data_sets_by_weight_and_scores_with_their_own_rules() -> None:
    env = rlx_reasoning_gym.load_environment(
        names=["chain_sum", "spell_backward"],
        config={"chain_sum": {"max_terms": 2}},
        weights={"chain_sum": 3},
        num_examples=80,
        num_eval_examples=8,
    )
    rows = list(env.get_dataset())
    count = Counter(row["info"]["source"] for row in rows)
    assert 48 <= count["chain_sum"] <= 72
    assert not {row["question"] for row in rows} & {row["question"] for row in env.get_eval_dataset()}
    score = env.rubric.rubrics[0].funcs[0] if hasattr(env.rubric, "rubrics") else env.rubric.funcs[0]
    for row in [*rows[:6], env.get_eval_dataset()[0]]:
        assert score(env.parser, reply(f"Well. <answer>{row['answer']}</answer>"), row["info"], {}) == 1.0
        assert score(env.parser, reply(row["answer"]), row["info"], {}) == 0.0, "without tags"
        assert score(env.parser, reply("<answer>no</answer>"), row["info"], {}) < 0.5


# countdown


def test_every_countdown_is_solvable_and_only_its_numbers_once_solve_it() -> None:
    parser = rlx_countdown.load_environment(num_examples=1).parser
    for row in rlx_countdown.build_rows(64, 2, 5, 25, 100, seed=1):
        said = reply(f"<answer>{row['answer'].replace('*', chr(92) + 'times')} = {row['info']['target']}</answer>")
        assert rlx_countdown.solved(parser, said, row["info"]) == 1.0
        assert rlx_countdown.solved(parser, reply(f"<answer>{row['info']['target']}</answer>"), row["info"]) == 0.0
        twice = reply(f"<answer>{row['answer']} + {row['info']['numbers'][0]} - {row['info']['numbers'][0]}</answer>")
        assert rlx_countdown.solved(parser, twice, row["info"]) == 0.0
        assert rlx_countdown.uses_numbers(parser, twice, row["info"]) == 0.0


@pytest.mark.parametrize(
    "text", ["1/0", "9**9**9", "__import__('os')", "1 + ", "", "(" * 150 + "1" + ")" * 150, "1.5 + 2", "True + 1", "-" * 199 + "1"]
)
def test_what_is_no_countdown_expression_has_no_value(text: str) -> None:
    assert rlx_countdown.evaluate(text) is None


# tool_math


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("47+85", "132"),
        ("2*(3-5)", "-4"),
        ("1/4", "0.25"),
        ("1/0", "error: division"),
        ("9**9", "error: not an"),
        ("2 +", "error: not an"),
        ("1" * 201, "error: the expression has 201"),
        (5, "5"),
        *((wrong, "error: ") for wrong in (None, ["1+1"], "1e308*10+1/3", "*".join(["1e308"] * 20))),
    ],
)
def test_the_calculator_knows_arithmetic_and_nothing_else(expression: Any, value: str) -> None:
    assert rlx_tool_math.calc(expression).startswith(value)


@pytest.mark.parametrize(
    ("text", "number"), [("132", 132), ("It is \\boxed{1,320}.", 1320), ("2 lamps cost -4.0", -4), ("none", None), ("<think>5</think>6", 6)]
)
def test_the_answer_of_tool_math_is_the_last_number(text: str, number: int | None) -> None:
    assert rlx_tool_math.last_number(text) == number


def test_the_teacher_of_tool_math_calls_the_calculator_and_one_that_errs_guesses_wrongly_without_it() -> None:
    env: Any = rlx_tool_math.load_environment(level=1, num_examples=4)
    row = {"info": {"expression": "7*8"}, "answer": "56"}
    call, result, answer = env.demonstration(row, False, random.Random(0))
    assert json.loads(call["tool_calls"][0]["function"]["arguments"]) == {"x": "7*8"}
    assert (result["content"], answer["content"]) == ("56", "56")
    guesses = [env.demonstration(row, True, random.Random(seed)) for seed in range(50)]
    assert {len(said) for said in guesses} == {1}
    assert "56" not in {said[0]["content"] for said in guesses}


@pytest.mark.parametrize("level", [1, 2, 3])
def test_solved_problems_of_tool_math_are_shown_as_the_policy_would_have_played_them(level: int) -> None:
    env = load("rlx-tool-math", level=level, shots=2, num_examples=2)
    rollout = play_texts(env, env.rows[0]["answer"])
    chat, (turn,) = tiny_chat(), turns_of(rollout)
    rows = rlx_tool_math.build_rows(level, 2, rlx_tool_math.SHOTS_SEED)
    said = chat.tokenizer.decode(turn.prompt_ids)
    spoken = said.split("<|im_start|>assistant\n")[1:-1]  # calls and answers in turn
    calls = [one.partition("<tool_call>\n")[2].partition("\n</tool_call>")[0] for one in spoken[::2]]
    results = [one.partition("<|im_start|>tool\n")[2].partition("<|im_end|>")[0] for one in spoken[::2]]
    answers = [one.partition("<|im_end|>")[0] for one in spoken[1::2]]
    assert [json.loads(call)["arguments"]["x"] for call in calls] == [row["info"]["expression"] for row in rows]
    assert results == [row["answer"] for row in rows]
    assert [rlx_tool_math.last_number(answer) for answer in answers] == [int(row["answer"]) for row in rows]
    assert rollout.metrics["called_before_answering"] == 0.0, "what the prompt shows is not the policy's"
    assert rollout.reward == 1.0
    assert said.count("<|im_start|>user") == 3


# word_guess


@pytest.mark.parametrize(
    ("guess", "word", "signs"),
    [("abc", "abc", "+++"), ("bca", "abc", "???"), ("aab", "abc", "+-?"), ("aaa", "bab", "-+-"), ("bba", "abb", "?+?")],
)
def test_feedback_marks_each_letter_as_often_as_it_stands_in_the_word(guess: str, word: str, signs: str) -> None:
    assert rlx_word_guess.feedback(guess, word) == signs


def test_a_guess_that_is_no_word_costs_a_turn_and_is_explained() -> None:
    env = load("rlx-word-guess", alphabet="abc", length=3, max_guesses=3, num_examples=4)
    word = env.rows[0]["answer"]
    rollout = play_texts(env, "xyz", "abcabc", word)
    assert [message["content"] for message in rollout.completion if message["role"] == "user"] == ["3 of abc"] * 2
    assert (rollout.reward, rollout.metrics["num_guesses"], rollout.metrics["follows_feedback"]) == (1.0, 3.0, 0.5)


# alphabet_sort


def test_alphabet_sort_pays_for_each_right_list() -> None:
    env = load("rlx-alphabet-sort", letters=True, min_turns=2, max_turns=2, num_examples=4)
    first, second = env.rows[0]["info"]["turns"]
    right = " ".join(sorted(first))
    assert play_texts(env, right, " ".join(sorted(first + second))).reward == 1.0
    assert play_texts(env, right, right).reward == 0.5


# all


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        ("reverse_text", {"min_length": 5, "max_length": 2}, "min_length=5 and max_length=2"),
        ("sums", {"level": 9}, "level=9 is not one of 1: the sum"),
        ("countdown", {"min_numbers": 5}, "min_numbers=5 and max_numbers=4 must satisfy"),
        ("alphabet_sort", {"letters": True, "max_turns": 9}, "max_turns=9 × max_words=4 words are needed, but there are only 26 letters"),
        ("word_guess", {"length": 4}, "length=4, but the English words"),
        ("word_guess", {"alphabet": "aab"}, "alphabet=aab must be"),
        ("word_guess", {"alphabet": "abcdefghij", "length": 6}, "1000000 words"),
        ("math", {"level": 5}, "level=5 is not one of 1: one step"),
        ("math", {"check_workers": 0}, "check_workers=0"),
        ("math", {"num_examples": 0}, "num_examples=0"),
        ("math", {"shots": -1}, "shots=-1"),
        ("reasoning_gym", {"names": ["chain_sums"]}, "reasoning-gym has no chain_sums. It has .*chain_sum"),
        ("reasoning_gym", {"names": ["rush_hour"]}, "names: rush_hour cannot be trained on, because it does not accept its own answers"),
        ("reasoning_gym", {"names": ["chain_sum"], "config": {"gcd": {}}}, "config is for gcd, but names="),
        ("reasoning_gym", {"names": ["chain_sum"], "config": {"chain_sum": {"terms": 2}}}, "config={chain_sum: .*terms"),
        ("reasoning_gym", {"names": ["chain_sum", "chain_sum"]}, "names a data set twice"),
        ("reasoning_gym", {"names": ["chain_sum"], "weights": {"chain_sum": 0}}, "a weight must be above 0"),
        ("reasoning_gym", {"names": []}, "names is empty"),
    ],
)
def test_wrong_arguments_are_named(name: str, arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        importlib.import_module(f"rlx_{name}").load_environment(**{"num_examples": 8} | arguments)


SHIPPED = sorted(path for path in ENVIRONMENTS.iterdir() if path.is_dir())
TAUGHT = [  # those that bring a teacher, as experiment=…_tiny and as language models have them
    ("rlx-word-guess", {"alphabet": "abc", "length": 3, "max_guesses": 27}),
    ("rlx-word-guess", {"max_guesses": 30}),
    ("rlx-tool-math", {"level": 1}),
    ("rlx-tool-math", {"level": 2}),
    ("rlx-tool-math", {"level": 3}),
    ("rlx-alphabet-sort", {"letters": True}),
    ("rlx-alphabet-sort", {}),
]


def text_of(message: dict[str, Any]) -> str:
    """A message of the teacher as the tiny model writes it."""
    calls = [call["function"] for call in message.get("tool_calls", ())]
    return message["content"] + "".join(
        f'<tool_call>\n{{"name": "{call["name"]}", "arguments": {call["arguments"]}}}\n</tool_call>' for call in calls
    )


def marked(said, chat=None):
    return mark(Conversation(messages=[*said.prompt, *said.played], first=len(said.prompt), tools=said.tools), chat or tiny_chat())


@pytest.mark.parametrize(
    ("id", "arguments"), TAUGHT, ids=lambda value: value if isinstance(value, str) else ",".join(map(str, value.values()))
)
def test_the_teacher_of_an_environment_plays_it_right_and_the_environment_answers_as_it_says(id: str, arguments: dict) -> None:
    env = load(id, **arguments, num_examples=4)
    for index, said in enumerate(conversations(env, list(env.rows), teacher_error=0.0, seed=1)):
        mine = [text_of(message) for message in said.played if message["role"] == "assistant"]
        rollout = play_texts(env, *mine, index=index)
        assert (rollout.status, rollout.reward) == ("ok", 1.0)
        theirs = [message["content"] for message in rollout.completion if message["role"] != "assistant"]
        assert theirs == [message["content"] for message in said.played if message["role"] != "assistant"]
        (whole,) = marked(said)
        assert whole.token_ids == [*turns_of(rollout)[-1].prompt_ids, *turns_of(rollout)[-1].completion_ids], "what the policy will see"
    wrong = conversations(env, list(env.rows), teacher_error=1.0, seed=1)
    rewards = [
        play_texts(env, *(text_of(m) for m in said.played if m["role"] == "assistant"), index=i).reward for i, said in enumerate(wrong)
    ]
    assert sum(rewards) < 4


@pytest.mark.parametrize("experiment", ["word_guess_tiny", "tool_math_tiny", "alphabet_sort_tiny", "sums_tiny"])
def test_what_the_tiny_model_learns_fits_into_its_lengths(experiment: str) -> None:
    cfg = compose([f"experiment={experiment}"], {}).cfg
    (config,) = cfg.envs.values()
    env = load(config.id, **config.args, num_examples=64)
    limit = sampling_of(cfg, config)["max_tokens"]
    chat = load_chat(build_tokenizer(cfg.model.context_length, cfg.model.warm_start.tool_calls), cfg.model)
    for said in conversations(env, list(env.rows), teacher_error=0.5, seed=1):
        (whole,) = marked(said, chat)
        assert len(whole) <= cfg.seq_len
        assert max(len(turn) for turn in "".join(" x"[spoken] for spoken in whole.trained).split()) <= limit


@pytest.mark.parametrize("folder", SHIPPED, ids=lambda path: path.name)
def test_a_shipped_environment_loads_by_its_id_with_the_same_data_for_the_same_seed(folder: Path) -> None:
    id = folder.name.replace("_", "-")
    sizes = {"num_examples": 24, "num_eval_examples": 8}
    one, same, other = (vf.load_environment(id, **sizes, seed=seed) for seed in (1, 1, 2))
    rows, held_out = list(one.get_dataset()), list(one.get_eval_dataset())
    assert (len(rows), len(held_out)) == (24, 8)
    assert rows == list(same.get_dataset()) != list(other.get_dataset())
    assert held_out == list(same.get_eval_dataset()) != rows[:8]
    assert sum(weight > 0 for weight in one.rubric._get_reward_weights()) == 1


@pytest.mark.parametrize("folder", SHIPPED, ids=lambda path: path.name)
def test_a_shipped_environment_is_a_package_of_its_own(folder: Path) -> None:
    page = (folder / "README.md").read_text()
    module = importlib.import_module(folder.name)
    assert [name for name in inspect.signature(module.load_environment).parameters if f"`{name}`" not in page] == []
    env = vf.load_environment(folder.name, num_examples=2, num_eval_examples=2)
    own = [name for name in env.rubric._get_reward_func_names() if name not in ("num_turns", "total_tool_calls", "calc_calls")]
    assert [name for name in own if f"`{name}`" not in page] == []
    assert f'packages = ["{folder.name}"]' in (folder / "pyproject.toml").read_text()
    ours = (ENVIRONMENTS.parent / "pyproject.toml").read_text()
    assert f'{folder.name} = "environments/{folder.name}/{folder.name}"' in ours
    assert f'    "{folder.name}",\n' in ours
    option = ENVIRONMENTS.parent / "conf" / "env" / f"{folder.name.removeprefix('rlx_')}.yaml"
    assert f"id: {folder.name.replace('_', '-')}\n" in option.read_text()
