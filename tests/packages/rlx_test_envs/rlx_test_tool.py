"""A ToolEnv. The tool reverses a text; the model should call it and repeat the result."""

import verifiers as vf
from rlx_test_envs import words


def reverse(text: str) -> str:
    """Reverse a text.

    Args:
        text: the text to reverse.
    """
    return text[::-1]


def used_tool(completion: vf.Messages) -> float:
    """1 if the tool was called."""
    return float(any(message["role"] == "tool" for message in completion))


def right(completion: vf.Messages, answer: str) -> float:
    """1 if the last message is the answer."""
    return float((completion[-1]["content"] or "").strip() == answer)


def load_environment(num_examples: int = 64, max_turns: int = 3) -> vf.Environment:
    """The environment."""
    rubric = vf.Rubric(funcs=[right, used_tool], weights=[1.0, 0.1])
    return vf.ToolEnv(dataset=words(num_examples), tools=[reverse], max_turns=max_turns, rubric=rubric)
