"""Rows of short words, shared by the environments of this package."""

from __future__ import annotations

import random
import string

from datasets import Dataset


def words(num_examples: int, seed: int = 0) -> Dataset:
    """Rows with `question`, a word of three to five letters, and `answer`, the word backwards."""
    rng = random.Random(seed)
    found = ["".join(rng.choices(string.ascii_lowercase, k=rng.randint(3, 5))) for _ in range(num_examples)]
    return Dataset.from_list([{"question": word, "answer": word[::-1]} for word in found])
