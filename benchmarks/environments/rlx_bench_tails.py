"""An environment for timing: answers of 4 to 256 tokens with a heavy tail, mean about 35.

The prompt is a letter, the answer that letter over and over; how often is drawn from a log-normal distribution, which a model warm-started
on these answers learns to sample. The reward is 1.0 for an even number of letters: about half of a group, whatever the policy does.
"""

from __future__ import annotations

import random
import string

import verifiers as vf
from datasets import Dataset

MEDIAN, SIGMA = 21.0, 1.0  # of the log-normal distribution, in tokens; with the bounds below the mean is 34
SHORTEST, LONGEST = 4, 256  # tokens, the end of turn included


def build_rows(num_examples: int, seed: int) -> list[dict]:
    """`num_examples` rows; the same seed gives the same rows."""
    rng = random.Random(seed)
    rows = []
    for _ in range(num_examples):
        letter = rng.choice(string.ascii_lowercase)
        tokens = min(max(round(MEDIAN * rng.lognormvariate(0.0, SIGMA)), SHORTEST), LONGEST)
        rows.append({"question": letter, "answer": letter * (tokens - 1), "prompt": [{"role": "user", "content": letter}]})
    return rows


def even(completion: vf.Messages) -> float:
    """1.0 if the reply has an even number of letters."""
    return float(len(completion[-1]["content"]) % 2 == 0)


def load_environment(num_examples: int = 4096, seed: int = 0) -> vf.SingleTurnEnv:
    """The environment."""
    return vf.SingleTurnEnv(dataset=Dataset.from_list(build_rows(num_examples, seed)), rubric=vf.Rubric(funcs=[even]))
