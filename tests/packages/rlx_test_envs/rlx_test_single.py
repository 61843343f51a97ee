"""A plain SingleTurnEnv with a system prompt: say the word backwards."""

import verifiers as vf
from rlx_test_envs import words


def backwards(completion: vf.Messages, answer: str) -> float:
    """1 if the reply is the answer."""
    return float(completion[-1]["content"].strip() == answer)


def load_environment(num_examples: int = 64, system_prompt: str | None = "reverse") -> vf.Environment:
    """The environment."""
    return vf.SingleTurnEnv(dataset=words(num_examples), system_prompt=system_prompt, rubric=vf.Rubric(funcs=[backwards]))
