"""A MultiTurnEnv that repeats the word until the reply is the reversed word, for at most `max_turns` turns."""

import verifiers as vf
from rlx_test_envs import words


class AskAgain(vf.MultiTurnEnv):
    """Repeats the question after a wrong answer."""

    @vf.stop
    async def answered(self, state: vf.State) -> bool:
        return bool(state["trajectory"]) and state["trajectory"][-1]["completion"][-1].content.strip() == state["answer"]

    async def env_response(self, messages: vf.Messages, state: vf.State, **kwargs) -> vf.Messages:
        return [{"role": "user", "content": state["prompt"][-1]["content"]}]


def solved(state: vf.State, answer: str) -> float:
    """1 for the first try, less for every further one."""
    right = state["trajectory"][-1]["completion"][-1].content.strip() == answer
    return right / len(state["trajectory"])


def load_environment(num_examples: int = 64, max_turns: int = 3) -> vf.Environment:
    """The environment."""
    return AskAgain(dataset=words(num_examples), max_turns=max_turns, rubric=vf.Rubric(funcs=[solved]))
