"""Every turn of the trajectory asks with sampling parameters of its own: hotter, colder with stop strings, truncated."""

import verifiers as vf
from rlx_test_envs import words

ASKED = [{}, {"temperature": 0.5}, {"temperature": 1.5, "stop": ["a", "e", "i", "o", "u"], "max_tokens": 20}, {"top_p": 0.5}]


class Varied(vf.MultiTurnEnv):
    """Four turns, one of each kind."""

    async def get_model_response(self, state: vf.State, prompt: vf.Messages, **kwargs) -> vf.Response:
        own = state["sampling_args"] | ASKED[len(state["trajectory"])]
        return await super().get_model_response(state, prompt, sampling_args=own, **kwargs)

    async def env_response(self, messages: vf.Messages, state: vf.State, **kwargs) -> vf.Messages:
        return [{"role": "user", "content": "again"}]


def length(state: vf.State) -> float:
    """Characters of the last answer."""
    return float(len(state["completion"][-1]["content"]))


def load_environment(num_examples: int = 64) -> vf.Environment:
    """The environment."""
    return Varied(dataset=words(num_examples), max_turns=4, rubric=vf.Rubric(funcs=[length]))
