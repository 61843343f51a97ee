"""An environment whose reward compares the rollouts of a group: only the shortest replies get 1."""

import verifiers as vf
from rlx_test_envs import words


def shortest(completions: list[vf.Messages], **kwargs) -> list[float]:
    """1 for the replies of the smallest length in the group."""
    lengths = [len(completion[-1]["content"]) for completion in completions]
    return [float(length == min(lengths)) for length in lengths]


def load_environment(num_examples: int = 64) -> vf.Environment:
    """The environment."""
    return vf.SingleTurnEnv(dataset=words(num_examples), rubric=vf.Rubric(funcs=[shortest]))
