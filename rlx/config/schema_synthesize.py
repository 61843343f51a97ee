"""The keys that only `rlx synthesize` has: which rollouts become training data, and how they are written."""

from __future__ import annotations

from dataclasses import dataclass

from rlx.config.keys import key


@dataclass
class SelectionConfig:
    """Which rollouts are kept, applied in the order of the keys."""

    drop_failed: bool = key(True, "drop rollouts that failed; false: keep what was said before the failure, with reward 0")
    drop_truncated: bool = key(True, "drop rollouts that a length limit cut, because their last answer has no end")
    min_reward: float | None = key(None, "drop rollouts with a reward below this; null is off")
    max_reward: float | None = key(None, "drop rollouts with a reward above this; null is off")
    prefer: str = key(
        "first",
        "which of several rollouts of an example is taken before the others: `first` (the order in which they were numbered), "
        "`best` (the highest reward) or `random` (by `seed`)",
        choices=("first", "best", "random"),
    )
    duplicates: str = key(
        "example",
        "drop rollouts that say the same as another one, apart from white space: `example` (as one of the same example), "
        "`all` (as any other with the same prompt) or `keep` (drop none)",
        choices=("example", "all", "keep"),
    )
    per_example: int | None = key(None, "keep at most this many rollouts of an example; null: all that are left", low=1)
    exactly: bool = key(False, "drop examples of which fewer than `per_example` rollouts are left, so that all have equally many")
