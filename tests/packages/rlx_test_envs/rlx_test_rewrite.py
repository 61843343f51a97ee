"""An environment that rewrites history: every prompt is a summary, and the second keeps the first answer in capitals."""

import verifiers as vf
from rlx_test_envs import words


class Rewriting(vf.MultiTurnEnv):
    """The prompt of a later turn does not extend the turn before."""

    async def get_prompt_messages(self, state: vf.State) -> vf.Messages:
        said = [step["completion"][-1].content for step in state["trajectory"]]
        if len(said) == 1:
            return [*state["prompt"], {"role": "assistant", "content": said[0].upper()}, {"role": "user", "content": "again"}]
        return [{"role": "user", "content": f"you said {', '.join(said)}"}] if said else state["prompt"]

    async def env_response(self, messages: vf.Messages, state: vf.State, **kwargs) -> vf.Messages:
        raise AssertionError("prompts are made by get_prompt_messages")


def turns(state: vf.State) -> float:
    """Number of requests."""
    return float(len(state["trajectory"]))


def load_environment(num_examples: int = 8) -> vf.Environment:
    """The environment."""
    return Rewriting(dataset=words(num_examples), max_turns=3, rubric=vf.Rubric(funcs=[turns]))
