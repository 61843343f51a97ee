"""A StatefulToolEnv: a tool that counts its calls in the rollout's state, and several reward functions, one with weight 0."""

from typing import Any

import verifiers as vf
from rlx_test_envs import words


def count(step: int, counter: dict[str, int]) -> str:
    """Add to the counter.

    Args:
        step: how much.
        counter: the counter of this rollout.
    """
    counter["value"] += step
    return str(counter["value"])


class Counting(vf.StatefulToolEnv):
    """Gives each rollout a counter of its own. The episode ends when it reaches 5."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_tool(count, args_to_skip=["counter"])

    async def setup_state(self, state: vf.State, **kwargs: Any) -> vf.State:
        state["counter"] = {"value": 0}
        return await super().setup_state(state, **kwargs) or state

    def update_tool_args(self, tool_name: str, tool_args: dict, messages: vf.Messages, state: vf.State, **kwargs: Any) -> dict:
        return {**tool_args, "counter": state["counter"]}

    @vf.stop
    async def counted(self, state: vf.State) -> bool:
        """Whether the counter has reached 5."""
        return state["counter"]["value"] >= 5


def reached(state: vf.State) -> float:
    """How far it came."""
    return state["counter"]["value"] / 5


def turns(state: vf.State) -> int:
    """Number of requests."""
    return len(state["trajectory"])


def load_environment(num_examples: int = 8) -> vf.Environment:
    """The environment."""
    return Counting(dataset=words(num_examples), tools=[], max_turns=4, rubric=vf.Rubric(funcs=[reached, turns], weights=[1.0, 0.0]))
