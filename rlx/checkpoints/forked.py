"""What a fork must know of the data of the run that it starts from: whether its own rows, and their order, are the same.

`forked.json` in the fork's directory, written once, so that the other run may be deleted.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from rlx.config.schema import SftRoot, TrainingRoot
from rlx.config.validate import show
from rlx.paths import RunPaths, write_text


@dataclass(frozen=True, slots=True, kw_only=True)
class Forked:
    """The run that a fork starts from."""

    source: str  # its directory
    step: int  # of the checkpoint from which the fork starts
    seed: int | None = None  # None: its configuration cannot be read
    shuffle: bool = True
    batch_size: int | None = None  # rows of a step of supervised training; None: not known, so it is taken for the fork's own
    weights: list[float] | None = None  # of its data sets, in their order; None: not known
    data: dict[str, Any] | None = None  # its `data.json`; None: it has recorded no digests

    def other_order(self, cfg: TrainingRoot) -> str | None:
        """Why the fork's rows come in another order, if they do: `seed: 0 → 1`."""
        if self.seed is None:
            return None
        shuffle = cfg.data.shuffle if isinstance(cfg, SftRoot) else True
        if shuffle != self.shuffle:
            return f"data.shuffle: {self.shuffle} → {shuffle}".lower()
        weights = weights_of(cfg)
        if self.weights is not None and len(weights) == len(self.weights) and shares_of(weights) != shares_of(self.weights):
            return f"weights of data.sets: {show(self.weights)} → {show(weights)}"
        return f"seed: {self.seed} → {cfg.seed}" if shuffle and self.seed != cfg.seed else None


def weights_of(cfg: TrainingRoot) -> list[float]:
    """The weights of the data sets of supervised training, in their order."""
    return [each.weight for each in cfg.data.all_sets.values()] if isinstance(cfg, SftRoot) else []


def shares_of(weights: Sequence[float]) -> list[float]:
    """The share of each data set: weights 1 and 3 mix them as 2 and 6 do."""
    return [weight / sum(weights) for weight in weights]


def write_forked(paths: RunPaths, source: RunPaths, step: int, before: TrainingRoot | None) -> None:
    """Record the run that a new fork starts from. `before`: its configuration; None: it cannot be read.

    A fork that has not trained yet stands where the run stood from which it starts.
    """
    data = json.loads(source.data.read_text()) if source.data.is_file() else None
    forked = read_forked(source) if data is None else None
    if forked is None or forked.step != step:
        forked = Forked(
            source="",
            step=step,
            seed=None if before is None else before.seed,
            shuffle=before.data.shuffle if isinstance(before, SftRoot) else True,
            batch_size=before.data.batch_size if isinstance(before, SftRoot) else None,
            weights=None if before is None else weights_of(before),
            data=data,
        )
    write_text(paths.forked, json.dumps(asdict(replace(forked, source=str(source.root))), indent=1) + "\n")


def read_forked(paths: RunPaths) -> Forked | None:
    """The run that this one starts from; None if it is no fork, or a fork of an older version, which goes on as it began."""
    return Forked(**json.loads(paths.forked.read_text())) if paths.forked.is_file() else None
