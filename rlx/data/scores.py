"""What the trainer computed for the tokens of a recorded batch: entropy, and how its log-probability differs from the engine's.

Every rank writes the rows that it trained, beside the batch: `recorded/step_000012.scores_0.zst`, 4 bytes a token. `rlx view` reads them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from rlx import codec
from rlx.arrays import Float, Half, Int
from rlx.paths import RunPaths, atomic
from rlx.types import MicroBatch, StepBatch

Scored = tuple[MicroBatch, Float, Float]  # a row, with the trainer's log-probability [N] and entropy [N] of its scored tokens
_LARGEST = float(np.finfo(np.float16).max)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenScores:
    """Of one rank's samples: n samples with N sampled tokens, sample after sample."""

    SCHEMA: ClassVar[str] = "rlx.TokenScores/2"

    step: int
    samples: Int  # [n] index of each sample in the batch, counted over its mini-batches
    lengths: Int  # [n] sampled tokens of each
    entropy: Half  # [N] nats, of the policy when the token was first trained on
    mismatch: Half  # [N] the trainer's log-probability minus that of the engine that sampled the token


def write_scores(paths: RunPaths, batch: StepBatch, rows: Sequence[Scored], rank: int) -> None:
    """Write the scores of one rank, of the `rows` of a batch that it trained, atomically."""
    import zstandard  # only for recordings, as in `rlx.data.source`

    index = {id(sample): i for i, sample in enumerate(sample for part in batch.mini_batches for sample in part)}
    chosen = [sample for row, _, _ in rows for sample in row.samples]
    engine = _joined(sample.inference_logprobs[sample.loss_mask] for sample in chosen)
    sampled = [row.loss_mask[row.scored] for row, _, _ in rows]  # without the tokens that only a cross-entropy loss reads
    trainer = _joined(logp[kept] for (_, logp, _), kept in zip(rows, sampled, strict=True))
    entropy = _joined(found[kept] for (_, _, found), kept in zip(rows, sampled, strict=True))
    scores = TokenScores(
        step=batch.step,
        samples=np.array([index[id(sample)] for sample in chosen], dtype=np.int32),
        lengths=np.array([np.count_nonzero(sample.loss_mask) for sample in chosen], dtype=np.int32),
        entropy=entropy.clip(0, _LARGEST).astype(np.float16),
        mismatch=(trainer - engine).clip(-_LARGEST, _LARGEST).astype(np.float16),
    )
    with atomic(paths.scores_of(batch.step, rank)) as temporary:
        temporary.write_bytes(zstandard.ZstdCompressor(level=1).compress(codec.encode(scores)))


def _joined(parts: Iterable[Float]) -> Float:
    return np.concatenate([np.empty(0, np.float32), *parts])


def read_scores(paths: RunPaths, step: int) -> list[TokenScores]:
    """The scores of all ranks that wrote any. Raises ValueError for a damaged file."""
    import zstandard

    found = []
    for path in sorted(paths.recorded.glob(paths.scores_of(step, 0).name.replace("_0.zst", "_*.zst"))):
        try:
            found.append(codec.decode(bytearray(zstandard.ZstdDecompressor().decompress(path.read_bytes())), TokenScores))
        except (zstandard.ZstdError, codec.CodecError) as error:
            raise ValueError(f"{path} is damaged: {error}") from error
    return found
