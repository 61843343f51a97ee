"""The public set of classic environments: each trains as verifiers plays it, or is refused by a clear sentence."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from public_classic import Endpoint, Said, Script, check_as_stock, check_tokens, judge, local_data, on_path, ours, stock

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::DeprecationWarning")]
IN_SLOW = ("alphabet_sort", "mcp_search_env")  # the others are long


def no_arguments(_: Endpoint) -> dict[str, Any]:
    return {}


@dataclass(frozen=True)
class Case:
    """How one environment is played."""

    script: Script
    arguments: Callable[[Endpoint], dict[str, Any]] = no_arguments
    verdict: str = "yes"  # of its judge
    needs: tuple[str, ...] = ()  # modules that rlx does not install
    requests: int = 1
    reward: float | None = None
    stop: dict[str, Any] = field(default_factory=dict)  # of its requests
    reward_error: float = 0.0


SORTED = [
    Said("<alphabetical_sorted>\nAnnLee\nBobRay\n</alphabetical_sorted>"),
    Said("<combined_alphabetical_sorted>\nAnnLee\nBobRay // new name!\n</combined_alphabetical_sorted>"),
]
A_CALL = (("tool_A", {"x": 3}), ("tool_B", {"x": "a"}))

CASES = {
    "alphabet_sort": Case(SORTED, lambda _: {"min_turns": 2, "max_turns": 3}, requests=0),
    "continuation_quality": Case(
        [Said(" and so it goes on")], lambda e: {"judge_base_url": e.url}, reward=0.0, reward_error=1.0, stop={"stop": ["\n"]}
    ),
    "doublecheck": Case([Said("\\boxed{1}"), Said("yes, \\boxed{1}")], requests=2, reward=1.0),
    "gem_wordle": Case([Said("\\boxed{crane}")], lambda _: {"num_train_episodes": 2, "max_turns": 3}, needs=("gem", "nltk"), requests=0),
    "gsm8k": Case([Said("So it is \\boxed{2}.")], lambda _: {"num_train_examples": 4, "num_eval_examples": 4}, reward=1.0),
    "math_group": Case([Said("So it is \\boxed{2}.")], reward=1.0),
    "reasoning_gym_env": Case(
        [Said("<answer>5</answer>")], lambda _: {"gym": "chain_sum", "num_train_examples": 4, "num_eval_examples": 4}
    ),
    "reverse_text": Case([Said("<reversed_text>cbx</reversed_text>")]),
    "sentence_repeater": Case([Said("I do not know")], requests=5),
    "tool_test": Case([Said("", A_CALL)], lambda _: {"num_train_examples": 4, "num_eval_examples": 1}, reward=0.0),
    "toxicity_explanation": Case(
        [Said("<classification>toxic</classification>")], lambda e: {"judge_base_url": e.url}, reward=0.0, reward_error=1.0
    ),
    "wiki_search": Case(
        [Said("", (("view_sections", {"page_id": "ada"}),)), Said("", (("read_section", {"section_id": "ada:life"}),)), Said("Ada")],
        lambda e: {"judge_base_url": e.url, "embed_base_url": e.url},
        needs=("chromadb",),
        requests=3,
        reward=1.0,
    ),
    "wordle": Case([Said("<guess>[crane]</guess>")], lambda _: {"num_train_examples": 2}, needs=("textarena", "nltk"), requests=0),
}
REFUSED = {
    "math_python": "CreateSandboxRequest",  # a sandbox in somebody's cloud, of another version
    "self_reward": "its rubric (JudgeRubric) has no reward function",  # verifiers refuses to score it, too
    "mcp_search_env": "EXA_API_KEY environment variable is required",
    "rlm_arbitrary_data_demo": "rlm",
}


def each(names: Any) -> list[Any]:
    return [pytest.param(name, marks=() if name in IN_SLOW else pytest.mark.long) for name in names]


@pytest.fixture(autouse=True)
def keys(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    local_data(monkeypatch)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    monkeypatch.delenv("EXA_API_KEY", raising=False)


@pytest.mark.parametrize("name", each(CASES))
def test_a_public_environment_trains_as_verifiers_plays_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[name]
    for module in case.needs:
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed")
    on_path(name, monkeypatch)
    with judge(case.verdict) as endpoint:
        arguments = case.arguments(endpoint)
        _, (rollout,), generator = ours(name, arguments, case.script)
        expected = stock(name, arguments, case.script)
    check_as_stock(rollout, expected)
    assert len(rollout.turns) == (case.requests or len(rollout.turns))
    assert case.reward is None or rollout.reward == pytest.approx(case.reward)
    assert rollout.metrics["reward_error"] == case.reward_error
    assert all(case.stop.items() <= sampling.items() for sampling in generator.sampling)
    assert len(generator.turns) == len(rollout.turns)
    check_tokens(rollout, generator.turns)


@pytest.mark.parametrize("name", each(REFUSED))
def test_a_public_environment_that_cannot_run_here_says_why(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    on_path(name, monkeypatch)
    monkeypatch.delenv("OPENAI_API_KEY")
    with pytest.raises((ValueError, RuntimeError)) as refused:
        ours(name, {}, [Said("x")])
    assert REFUSED[name].lower() in str(refused.value).lower()
    logging.getLogger(__name__).info("%s: %s", name, refused.value)
