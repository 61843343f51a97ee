"""The acceptance list: environments of every kind on one real vLLM, one row each, beside stock verifiers on the same replies.

In each row the first rollout says what a script says (the engine samples its tokens, `steer.py`), the second what the tiny model samples,
unless an episode needs players that know the game.
Both have the messages, stops, rewards and metrics of stock verifiers. The files that a run would write have every token that the engine
answered in the trajectory once, with its context, log-probability, version, temperature and advantage, and the trainer computes that
log-probability. The tasksets that are refused are in `test_envs_public_v1.py`.
"""

from __future__ import annotations

import asyncio
import importlib.util
import random
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import public_environments as v1
import pytest
from chat_templates import RETAINING, STRIPPING
from policy_stand_in import OUTSIDE, task_of
from public_classic import Endpoint, Said, Script, check_as_stock, judge, local_data, nth, on_path, stock, stock_group
from real_engine import CONTEXT, LIMITS, Engine
from traces import turns_of

from rlx.config.schema import EnvConfig
from rlx.envs.errors import in_one_line
from rlx.envs.verifiers_v0 import load_environment
from rlx.models.tiny import build_tokenizer
from rlx.policy.chat import Chat

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.filterwarnings("ignore::DeprecationWarning")]


def no_arguments(_: Endpoint) -> dict[str, Any]:
    return {}


@dataclass(frozen=True)
class Case:
    """How one classic environment is played."""

    script: Script
    arguments: Callable[[Endpoint], dict[str, Any]] = no_arguments
    verdict: str = "yes"  # of its judge
    needs: tuple[str, ...] = ()  # modules that rlx does not install
    requests: int = 0  # of the trajectory of the scripted rollout; 0: not said
    beside: tuple[int, ...] = ()  # numbers of a rollout's requests that are answered and not trained
    reward: float | None = None  # of the scripted rollout
    stop: dict[str, Any] = field(default_factory=dict)  # of its requests
    reward_error: float = 0.0  # of the scripted rollout
    raises: bool = False  # whether its reward raises for what an untrained model writes
    row: int = 0


SORTED = [
    Said("<alphabetical_sorted>\nAnnLee\nBobRay\n</alphabetical_sorted>"),
    Said("<combined_alphabetical_sorted>\nAnnLee\nBobRay // new name!\n</combined_alphabetical_sorted>"),
]
A_CALL = (("tool_A", {"x": 3}), ("tool_B", {"x": "a"}))
REVERSE = (("reverse", {"text": "word"}),)

PUBLIC = {
    "alphabet_sort": Case(SORTED, lambda _: {"min_turns": 2, "max_turns": 3}),
    "continuation_quality": Case(
        [Said(" and so it goes on")], lambda e: {"judge_base_url": e.url}, requests=1, reward=0.0, reward_error=1.0, stop={"stop": ["\n"]}
    ),
    "doublecheck": Case([Said("\\boxed{1}"), Said("yes, \\boxed{1}")], requests=2, reward=1.0),
    "gem_wordle": Case([Said("\\boxed{crane}")], lambda _: {"num_train_episodes": 2, "max_turns": 3}, needs=("gem", "nltk")),
    "gsm8k": Case([Said("So it is \\boxed{2}.")], lambda _: {"num_train_examples": 4, "num_eval_examples": 4}, requests=1, reward=1.0),
    "math_group": Case([Said("So it is \\boxed{2}.")], requests=1, reward=1.0),
    "reasoning_gym_env": Case(
        [Said("<answer>5</answer>")], lambda _: {"gym": "chain_sum", "num_train_examples": 4, "num_eval_examples": 4}, requests=1
    ),
    "reverse_text": Case([Said("<reversed_text>cbx</reversed_text>")], requests=1),
    "sentence_repeater": Case([Said("I do not know")], requests=5),
    "tool_test": Case([Said("", A_CALL)], lambda _: {"num_train_examples": 4, "num_eval_examples": 1}, requests=1, reward=0.0, raises=True),
    "toxicity_explanation": Case(
        [Said("<classification>toxic</classification>")], lambda e: {"judge_base_url": e.url}, requests=1, reward=0.0, reward_error=1.0
    ),
    "wiki_search": Case(
        [Said("", (("view_sections", {"page_id": "ada"}),)), Said("", (("read_section", {"section_id": "ada:life"}),)), Said("Ada")],
        lambda e: {"judge_base_url": e.url, "embed_base_url": e.url},
        needs=("chromadb",),
        requests=3,
        reward=1.0,
    ),
    "wordle": Case([Said("<guess>[crane]</guess>")], lambda _: {"num_train_examples": 2}, needs=("textarena", "nltk")),
}
OWN = {
    "rlx_test_single": Case([Said("x")], requests=1),
    "rlx_test_multi": Case([Said("no"), Said("nono")]),
    "rlx_test_tool": Case([Said("I try. ", REVERSE), Said("drow")], requests=2),
    "rlx_test_mcp": Case([Said("", REVERSE), Said("drow")], requests=2),
    "rlx_test_stateful": Case(
        [Said("", (("count", {"step": 2}),)), Said("", (("count", {"step": 1}), ("count", {"step": 2})))], requests=3
    ),
    "rlx_test_rewrite": Case([Said("abc"), Said("def"), Said("ghi")], requests=3),
    "rlx_test_judge": Case([Said("x")], lambda e: {"url": e.url}, verdict="yes, it is", requests=1, reward=0.5),
    "rlx_test_beside": Case([Said("plan"), Said("answer"), Said("good")], requests=1, beside=(0, 2), reward=1.0),
    "rlx_test_group": Case([Said("")], requests=1, reward=1.0),
    "rlx_test_nested single": Case([Said("x")]),
    "rlx_test_nested multi": Case([Said("x"), Said("y"), Said("z")], row=2),
    "rlx_test_nested group": Case([Said("")], row=4, reward=1.0),
}
REFUSED = {  # public classic environments that cannot run here
    "math_python": "CreateSandboxRequest",  # a sandbox in somebody's cloud, of another version
    "mcp_search_env": "EXA_API_KEY environment variable is required",
    "rlm_arbitrary_data_demo": "No module named 'verifiers.envs.experimental.rlm_env'",
}


def installed(modules: tuple[str, ...]) -> None:
    """Skip the test if one of the modules is missing."""
    for missing in (module for module in modules if importlib.util.find_spec(module) is None):
        pytest.skip(f"{missing} is not installed")


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    engine = Engine(tmp_path_factory.mktemp("engine"))
    yield engine
    engine.run.stop()


def play(engine: Engine, name: str, case: Case, run_dir: Path) -> None:
    """Play and compare one row."""
    members = 4 if "group" in name.partition(" ")[2] or name == "rlx_test_group" else 2
    module = name.partition(" ")[0]
    with judge(case.verdict) as endpoint:
        arguments = case.arguments(endpoint)
        random.seed(0)
        rule = "zero" if case.reward_error or case.raises else "fail"  # stock verifiers scores 0
        env = load_environment(module, EnvConfig(id=module, args=arguments, on_reward_error=rule), LIMITS, 300.0)
        rollouts, heard = engine.play(env, task_of(env, case.row), lambda _, number: nth(case.script, number).written, members)
        said = [heard.script(rollout.member) for rollout in rollouts]
        if members == 4:
            expected = stock_group(module, arguments, said, case.row)
        else:
            expected = [stock(module, arguments, script, case.row) for script in said]
    for rollout, one in zip(rollouts, expected, strict=True):
        check_as_stock(rollout, one)
        assert rollout.metrics["requests_beside"] == len(case.beside)
    first = rollouts[0]
    assert first.metrics["reward_error"] == case.reward_error
    assert len(turns_of(first)) == (case.requests or len(turns_of(first)))
    assert case.reward is None or first.reward == pytest.approx(case.reward)
    assert all(case.stop.items() <= sampling.items() for sampling in heard.sampling)
    engine.train(rollouts, {rollout.member: heard.of_trajectory(rollout.member, case.beside) for rollout in rollouts}, run_dir)


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_classic_environment_trains_as_stock_verifiers_plays_it(
    name: str, engine: Engine, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    case = PUBLIC[name]
    installed(case.needs)
    local_data(monkeypatch)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    on_path(name, monkeypatch)
    play(engine, name, case, tmp_path / "run")


@pytest.mark.parametrize("name", REFUSED)
def test_a_public_classic_environment_that_cannot_run_here_says_why(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    local_data(monkeypatch)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("EXA_API_KEY", raising=False)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    on_path(name, monkeypatch)
    with pytest.raises((ValueError, RuntimeError)) as refused:
        load_environment(name, EnvConfig(id=name), LIMITS, 300.0)
    said = in_one_line(refused.value)  # what a user sees
    assert REFUSED[name] in said
    assert "\n" not in said


@pytest.mark.parametrize(("name", "module"), [("wordle", "textarena"), ("gem_wordle", "gem"), ("wiki_search", "chromadb")])
def test_a_public_classic_environment_without_a_module_that_it_imports_names_it(
    name: str, module: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    for imported in [each for each in sys.modules if each.partition(".")[0] == module]:
        monkeypatch.delitem(sys.modules, imported)
    monkeypatch.setitem(sys.modules, module, None)
    local_data(monkeypatch)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    on_path(name, monkeypatch)
    with pytest.raises((ValueError, RuntimeError)) as refused:
        load_environment(name, EnvConfig(id=name), LIMITS, 300.0)
    said = in_one_line(refused.value)  # what a user sees: verifiers alone says that the environment is not installed
    assert re.search(rf"ModuleNotFoundError: .*\b{module}\b", said), said


@pytest.mark.parametrize("name", OWN)
def test_an_environment_of_our_own_trains_as_stock_verifiers_plays_it(
    name: str, engine: Engine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "path", [OUTSIDE, *sys.path])
    play(engine, name, OWN[name], tmp_path)


@pytest.mark.parametrize(
    ("template", "strategy", "samples"), [(RETAINING, "interleaved", 1), (STRIPPING, "interleaved", 3), (STRIPPING, "branching", 3)]
)
def test_a_thinking_model_trains_its_thoughts_in_the_context_that_the_engine_saw(
    template: str, strategy: str, samples: int, engine: Engine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The template of `STRIPPING` drops the thoughts of earlier turns, so that each turn is a sample of its own."""
    monkeypatch.setattr(sys, "path", [OUTSIDE, *sys.path])
    tokenizer = build_tokenizer(CONTEXT)
    tokenizer.chat_template = template
    chat = Chat(tokenizer, keeps_tokens=strategy == "interleaved")
    assert chat.reasoning_parser == "qwen3"
    env = load_environment("rlx_test_multi", EnvConfig(id="rlx_test_multi"), LIMITS, 300.0)
    script = ["<think>\nno idea\n</think>\n\nabc", "<think>\nstill none\n</think>\n\nabcd", "ab"]
    rollouts, heard = engine.play(env, task_of(env), lambda _, number: script[number], chat=chat)
    replies = heard.replies[0]
    assert [reply.content.strip() for reply in replies] == ["abc", "abcd", "ab"]
    assert [reply.message["reasoning_content"].strip() for reply in replies[:2]] == ["no idea", "still none"]
    trained = engine.train(rollouts, {one.member: heard.of_trajectory(one.member) for one in rollouts}, tmp_path / "run", strategy)
    scripted = [sample for sample in trained if sample.member == 0]
    assert len(scripted) == samples
    texts = [tokenizer.decode(sample.token_ids) for sample in scripted]
    assert sum("no idea" in text for text in texts) == 1, "in one sample as what is trained, in no other as context"
    said = "".join(tokenizer.decode(sample.token_ids[sample.loss_mask]) for sample in scripted)
    assert said.count("no idea") == said.count("still none") == 1


@pytest.mark.parametrize("case", v1.CASES, ids=lambda case: f"{case.name}-{case.agent}")
def test_a_public_taskset_trains_as_stock_verifiers_plays_it(
    case: v1.Case, engine: Engine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from rlx.envs.verifiers_v1 import load_environment

    installed(case.needs)
    monkeypatch.delenv("PRIME_API_KEY", raising=False)
    v1.local_data(monkeypatch)
    v1.on_path(case.name, monkeypatch)
    with case.served(tmp_path, monkeypatch) as played:
        env = load_environment("e", EnvConfig(id=case.name, args=played.args, agents=[case.agent], num_tasks=3), LIMITS, 300.0)
        task = task_of(env)
        rollouts, heard = engine.play(env, task, lambda prompt, _: case.model(prompt), steered=1 if case.free else 2)
        for rollout in rollouts:
            assert rollout.status == "ok", rollout.error
        assert case.turns in (0, len(turns_of(rollouts[0])))
        for rollout in rollouts[: case.stock]:
            expected = asyncio.run(v1.stock(played, env.rows[0], v1.Replayed(heard.turns(rollout.member)), task, rollout.member))
            v1.check_as_stock(rollout, expected)
    several = case.agent in ("player0", "player1", "proposer", "solver")  # agents that sample
    sampled = {one.member: heard.of_agent(one) if several else heard.of_trajectory(one.member) for one in rollouts}
    engine.train(rollouts, sampled, tmp_path / "run")
