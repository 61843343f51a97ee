"""What the shipped environments evaluate: nothing that they train on or show, at the defaults and where there are few problems."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import verifiers as vf

pytestmark = pytest.mark.slow

ENVIRONMENTS = Path(__file__).parent.parent / "environments"
FEW: dict[str, list[dict[str, Any]]] = {  # arguments beside the defaults: those of the presets, and those that leave the fewest problems
    "alphabet_sort": [
        {"letters": True},
        {"letters": True, "max_turns": 2, "max_words": 2},
        {"letters": True, "max_turns": 1, "max_words": 2},
    ],
    "countdown": [{"min_numbers": 2, "max_numbers": 2}, {"min_numbers": 2, "max_numbers": 2, "largest": 2, "max_target": 10}],
    "math": [{"level": 1, "shots": 1}, {"level": 4}],
    "reasoning_gym": [
        {"names": ["chain_sum"], "config": {"chain_sum": {"max_terms": 2, "max_digits": 1}}, "num_examples": 64, "num_eval_examples": 32}
    ],
    "reverse_text": [{"min_length": 1, "max_length": 1}, {"min_length": 2, "max_length": 3}],
    "sums": [{"level": 1, "shots": 2}, {"level": 2, "words": True, "shots": 1}, {"level": 3}],
    "tool_math": [{"level": 1, "shots": 2}, {"level": 2, "shots": 1}],
    "word_guess": [{"alphabet": "abc", "length": 3}, {"alphabet": "ab", "length": 1}],
}
SAME: dict[str, Callable[[dict[str, Any]], str]] = {  # what makes two rows one problem; elsewhere it is the question
    "alphabet_sort": lambda row: " ".join(sorted(row["question"].lower().split())),
    "countdown": lambda row: f"{sorted(row['info']['numbers'])} {row['info']['target']}",
    "tool_math": lambda row: " ".join(sorted(row["question"].rstrip("=").replace("*", " * ").replace("+", " + ").split())),
    "word_guess": lambda row: row["answer"],
}
NAMES = sorted(path.name.removeprefix("rlx_") for path in ENVIRONMENTS.iterdir() if path.is_dir())


@pytest.mark.parametrize(
    ("name", "arguments"),
    [(name, arguments) for name in NAMES for arguments in ({}, *FEW[name])],
    ids=lambda value: value if isinstance(value, str) else json.dumps(value).replace('"', "").replace(" ", ""),
)
def test_no_problem_is_evaluated_that_is_trained_on_or_shown(name: str, arguments: dict[str, Any]) -> None:
    same = SAME.get(name, lambda row: row["question"])
    env = vf.load_environment(f"rlx-{name.replace('_', '-')}", **arguments)
    trained, held_out = list(env.get_dataset()), list(env.get_eval_dataset())
    assert trained
    assert held_out
    shown = {message["content"] for message in held_out[0]["prompt"][:-1] if message["role"] == "user"}
    assert len(shown) == arguments.get("shots", 0)
    assert not {same(row) for row in held_out} & {same(row) for row in trained}
    assert not {row["question"] for row in held_out} & shown
    if name != "word_guess":  # a game has more to it than its word
        asked = [json.dumps([row["question"], row.get("info")]) for row in held_out]
        assert len(set(asked)) == len(asked), "none twice"


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("math", "reasoning_gym")])
def test_what_is_held_out_is_the_same_for_every_seed(name: str) -> None:
    """Evaluated with another seed than it was trained with (`math` and `reasoning_gym` leave out what their own seed trains on)."""
    same = SAME.get(name, lambda row: row["question"])
    (one, other) = (vf.load_environment(f"rlx-{name.replace('_', '-')}", **FEW[name][0], num_examples=1024, seed=seed) for seed in (0, 1))
    assert not {same(row) for row in one.get_dataset()} & {same(row) for row in other.get_eval_dataset()}


def test_an_evaluation_for_which_training_leaves_no_question_is_refused() -> None:
    module = importlib.import_module("rlx_reasoning_gym")
    few = {"chain_sum": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}}
    env = module.load_environment(names=["chain_sum"], config=few, num_examples=8192, num_eval_examples=8)
    with pytest.raises(ValueError, match=r"names=\['chain_sum'\]: training has every question .*; lower num_examples"):
        env.get_eval_dataset()
