"""The tokens of one rollout with their numbers, from the recorded batch of its step, and their texts, if the run's tokenizer is at hand.
The weights that `rlx replay` gave them come from the files of that command.

Needs neither torch nor the model. It reads the whole batch of the step, about 21 bytes a token.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from rlx.arrays import Bool, Float, Int
from rlx.data.scores import TokenScores, read_scores
from rlx.data.source import read_recorded
from rlx.paths import RunPaths
from rlx.runs.run import Run
from rlx.types import TrainingSample

REPLAY_TOKENS, REPLAY_SUMMARY = "tokens.csv", "summary.json"
"""The files of `rlx replay` (docs/replay.md); the second is written last."""


class NoTokens(LookupError):
    """Why there are no tokens to show. The message is for the user."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """What two objectives do with the tokens of one sample (`rlx replay`). NaN where no loss reads the token."""

    recorded: Float  # [L] weight under the run's objective
    other: Float  # [L] weight under the other
    norms: tuple[float, float]  # of the gradients of its mini-batch, the run's and the other


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """One training sample: a token sequence. A rollout has several if its turns do not extend each other."""

    ids: Int  # [L]
    sampled: Bool  # [L] whether the policy sampled the token; the numbers below mean something only there
    logprobs: Float  # [L] of the engine that sampled the token
    versions: Int  # [L] policy version
    advantages: Float  # [L]
    temperature: Float  # [L]
    entropy: Float | None = None  # [L] in nats, of the trainer's forward pass; None: not recorded
    mismatch: Float | None = None  # [L] log-probability of the trainer's forward pass minus `logprobs`; None: not recorded
    replays: Mapping[str, Replayed] = field(default_factory=dict)  # by the other objective's overrides

    def __len__(self) -> int:
        return len(self.ids)


def tokens_of(run: Path, step: int, group: int, member: int) -> list[Tokens]:
    """The samples of a rollout. Raises NoTokens."""
    paths = Run(run).paths
    path = paths.recorded_of(step)
    if not path.is_file():
        raise NoTokens(f"{path} does not exist: tokens are recorded with orchestrator.save_batches=true")
    try:
        batch = read_recorded(path, step)
    except ValueError as error:
        raise NoTokens(str(error)) from error
    samples = [one for part in batch.mini_batches for one in part]
    places = [i for i, one in enumerate(samples) if (one.group, one.member) == (group, member)]
    if not places:
        raise NoTokens(f"the batch of step {step} has no tokens of this rollout: it was not trained on")
    try:
        ranks = read_scores(paths, step)
    except ValueError as error:
        raise NoTokens(str(error)) from error
    replays = _replays(paths, step, [samples[place] for place in places])
    return [_tokens(samples[place], _scores(ranks, place), found) for place, found in zip(places, replays, strict=True)]


def _replays(paths: RunPaths, step: int, samples: Sequence[TrainingSample]) -> list[dict[str, Replayed]]:
    """The replays of each sample of one rollout, by their names. A replay of a batch that was recorded again since is left out."""
    found: list[dict[str, Replayed]] = [{} for _ in samples]
    rollout = (str(samples[0].group), str(samples[0].member))
    for folder in sorted(paths.replays.glob(f"step_{step}--*")):
        try:
            parts = json.loads((folder / REPLAY_SUMMARY).read_text())["mini_batches"]
            with (folder / REPLAY_TOKENS).open(newline="") as file:
                rows = [row for row in csv.DictReader(file) if (row["group"], row["member"]) == rollout]
            weights = [np.full((2, len(sample.token_ids)), np.nan, np.float32) for sample in samples]
            part_of, same = [0] * len(samples), bool(rows)
            for row in rows:
                number, at = int(row["sample"]), int(row["position"])
                same = same and int(samples[number].token_ids[at]) == int(row["token_id"])
                weights[number][:, at] = float(row["weight_recorded"]), float(row["weight_other"])
                part_of[number] = int(row["mini_batch"])
            norms = [(parts[part]["recorded"]["gradient_norm"], parts[part]["other"]["gradient_norm"]) for part in part_of]
        except (OSError, ValueError, KeyError, IndexError):  # not finished, or of another version
            continue
        if same:
            for one, both, pair in zip(found, weights, norms, strict=True):
                one[folder.name.partition("--")[2]] = Replayed(recorded=both[0], other=both[1], norms=pair)
    return found


def _scores(ranks: Sequence[TokenScores], place: int) -> tuple[Float, Float] | None:
    """(entropy, mismatch) of the trainable tokens of the sample at `place` of the batch; `None` if no rank recorded them."""
    for one in ranks:
        for number in np.flatnonzero(one.samples == place):
            end = int(one.lengths[: number + 1].sum())
            part = slice(end - int(one.lengths[number]), end)
            return one.entropy[part].astype(np.float32), one.mismatch[part].astype(np.float32)
    return None


def _tokens(sample: TrainingSample, scores: tuple[Float, Float] | None, replays: Mapping[str, Replayed]) -> Tokens:
    """A copy, so that the rest of the batch can go."""
    entropy, mismatch = (None, None) if scores is None else (np.full(len(sample.token_ids), np.nan, np.float32) for _ in range(2))
    if scores is not None and entropy is not None and mismatch is not None:
        entropy[sample.loss_mask], mismatch[sample.loss_mask] = scores
    return Tokens(
        replays=replays,
        entropy=entropy,
        mismatch=mismatch,
        ids=sample.token_ids.copy(),
        sampled=sample.loss_mask.copy(),
        logprobs=sample.inference_logprobs.copy(),
        versions=sample.versions.copy(),
        advantages=sample.advantages.copy(),
        temperature=sample.temperature.copy(),
    )


class Pieces:
    """Turns token ids into the text that each adds. Without a tokenizer it gives the ids."""

    def __init__(self, run: Path) -> None:
        self.file = tokenizer_file(Run(run).paths)
        self._tokenizer: Any = None if self.file is None else _load(self.file)

    def of(self, ids: Sequence[int]) -> list[str]:
        """The text of each token. A character of several tokens belongs to its last one; the others are empty."""
        if self._tokenizer is None:
            return [f"⟨{token}⟩" for token in ids]
        from tokenizers.decoders import DecodeStream

        stream, pieces = DecodeStream(skip_special_tokens=False), []
        for token in np.asarray(ids).tolist():
            try:
                piece = stream.step(self._tokenizer, token)
            except Exception:  # tokenizers has no narrower type for bytes that begin no character (Llama 2, Gemma)
                stream = DecodeStream(skip_special_tokens=False)
                piece = stream.step(self._tokenizer, token)
            pieces.append(piece or "")
        return pieces


def tokenizer_file(paths: RunPaths) -> Path | None:
    """`tokenizer.json` of a run: of its newest policy version, of its initial model, or that model's in the hub's cache. No network."""
    versions = sorted(paths.weights.glob("step_*/tokenizer.json"), key=lambda path: int(path.parent.name.removeprefix("step_")))
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
