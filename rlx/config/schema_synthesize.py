"""The keys of `rlx synthesize`: which rollouts are played, which become training data, and how it is written."""

# ruff: noqa: RUF009  (key and section return dataclass fields)
from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, ClassVar

from rlx.config.keys import key
from rlx.config.schema_eval import PlayWithModel
from rlx.config.schema_rollout import ScoredEnvConfig


@dataclass
class SelectionConfig:
    """Which rollouts are kept: the rules in their order, except that `select_by` decides between rollouts for those after it."""

    drop_failed: bool = key(True, "drop rollouts that failed; false: keep the messages before the failure, with reward 0")
    drop_truncated: bool = key(True, "drop rollouts that a length limit cut, because their last completion has no end")
    min_reward: float | None = key(None, "drop rollouts with a reward below this; null is off")
    max_reward: float | None = key(None, "drop rollouts with a reward above this; null is off")
    select_by: str = key(
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
    require_all: bool = key(False, "drop examples of which fewer than `per_example` rollouts are left, so that all have equally many")


@dataclass
class SynthesizedEnvConfig(ScoredEnvConfig):
    """One environment of `rlx synthesize`."""

    split: str = key("train", "which data set of the environment to use", choices=("train", "eval"))


@dataclass
class SynthesizeRoot(SelectionConfig, PlayWithModel):
    """The keys of `rlx synthesize`."""

    may_change: ClassVar[tuple[str, ...]] = (
        *PlayWithModel.may_change,
        *(field.name for field in fields(SelectionConfig)),
        *("num_examples", "rollouts_per_example", "play"),
    )

    envs: dict[str, SynthesizedEnvConfig] = key({}, "the environments to play, by name")  # type: ignore[assignment]
    num_examples: int | None = key(200, "how many of the first examples of an environment to sample; null: all", low=1)
    rollouts_per_example: int = key(4, "rollouts of each example", low=1)
    step: int | None = key(None, "which `step_N` of `weights_dir` to sample with; null: the newest that is complete", low=0)
    play: bool = key(
        True, "sample what is missing; false: only choose again from the finished rollouts of the run, with resume=latest; starts no server"
    )

    @property
    def started_servers(self) -> int:
        return super().started_servers if self.play else 0

    @property
    def output_options(self) -> dict[str, Any]:
        """Those keys that may change when a synthesis resumes and say what is played, chosen and written."""
        return {name: getattr(self, name) for name in self.may_change if name not in PlayWithModel.may_change}

    @property
    def progress_source(self) -> str:
        return "synthesis"  # no step, and no record in `metrics.jsonl`: a heartbeat has the progress
