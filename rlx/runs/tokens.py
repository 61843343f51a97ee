"""The tokens of one rollout with their numbers, from the recorded batch of its step, and their texts, if the run's tokenizer is at hand.

Needs neither torch nor the model. It reads the whole batch of the step, about 21 bytes a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from rlx.arrays import Float
from rlx.config.errors import ConfigError
from rlx.data.scores import TokenScores, read_scores
from rlx.data.source import read_recorded
from rlx.paths import RunPaths, step_of
from rlx.types import TrainingSample


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """One training sample, a token sequence, with what the trainer computed for it. NaN where the policy did not sample.

    A rollout has several if its turns do not extend each other.
    """

    sample: TrainingSample
    entropy: Float | None  # [L] in nats, of the trainer's forward pass; None: not recorded
    mismatch: Float | None  # [L] log-probability of the trainer's forward pass minus the engine's; None: not recorded


def tokens_of(run: Path, step: int, group: int, member: int) -> list[Tokens]:
    """The samples of a rollout. Raises ConfigError if none were recorded."""
    paths = RunPaths(run)
    path = paths.recorded_of(step)
    if not path.is_file():
        raise ConfigError(f"{path} does not exist: tokens are recorded with orchestrator.save_batches=true")
    try:
        batch, ranks = read_recorded(path, step), read_scores(paths, step)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    samples = [one for part in batch.mini_batches for one in part]
    places = [i for i, one in enumerate(samples) if (one.group, one.member) == (group, member)]
    if not places:
        raise ConfigError(f"the batch of step {step} has no tokens of this rollout: it was not trained on")
    return [_tokens(samples[place], ranks, place) for place in places]


def _tokens(sample: TrainingSample, ranks: Sequence[TokenScores], place: int) -> Tokens:
    """`place`: of the sample in the batch, by which one of the ranks knows it."""
    for rank in ranks:
        for number in np.flatnonzero(rank.samples == place):
            end = int(rank.lengths[: number + 1].sum())
            part = slice(end - int(rank.lengths[number]), end)
            entropy, mismatch = np.full((2, len(sample.token_ids)), np.nan, np.float32)
            entropy[sample.loss_mask], mismatch[sample.loss_mask] = rank.entropy[part], rank.mismatch[part]
            return Tokens(sample=sample, entropy=entropy, mismatch=mismatch)
    return Tokens(sample=sample, entropy=None, mismatch=None)


def texts_of(run: Path, ids: Sequence[int]) -> list[str]:
    """The text that each token adds. A character of several tokens belongs to its last one. Without a tokenizer it is the id."""
    file = tokenizer_file(RunPaths(run))
    tokenizer = None if file is None else _load(file)
    if tokenizer is None:
        return [f"⟨{token}⟩" for token in ids]
    from tokenizers.decoders import DecodeStream

    stream, texts = DecodeStream(skip_special_tokens=False), []
    for token in ids:
        try:
            text = stream.step(tokenizer, token)
        except Exception:  # tokenizers has no narrower type for bytes that begin no character (Llama 2, Gemma)
            stream = DecodeStream(skip_special_tokens=False)
            text = stream.step(tokenizer, token)
        texts.append(text or "")
    return texts


def tokenizer_file(paths: RunPaths) -> Path | None:
    """`tokenizer.json` of a run: of its newest policy version, of its initial model, or that model's in the hub's cache. No network."""
    versions = sorted(paths.weights.glob("step_*/tokenizer.json"), key=lambda path: step_of(path.parent) or 0)
    if versions:
        return versions[-1]
    try:
        name = paths.initial_model.read_text().strip()
    except OSError:
        return None
    if (local := Path(name) / "tokenizer.json").is_file():
        return local
    from huggingface_hub import try_to_load_from_cache

    try:
        found = try_to_load_from_cache(name, "tokenizer.json")
    except ValueError:  # a path on another machine is no name of the hub
        return None
    return Path(found) if isinstance(found, str) else None


@cache
def _load(file: Path) -> Any:
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_file(str(file))
    except Exception:  # tokenizers raises plain Exception for a file of a newer version; the ids are still of use
        return None
