"""A step's batch on its way to the trainer: size in bytes, time to encode and decode, time to pack for one of several ranks.

    OMP_NUM_THREADS=1 python benchmarks/batches.py [--ranks 8] [--row 8192] [--repeat 20]
    python benchmarks/batches.py --balance       how unequal the rows of ranks are, if samples differ in length; no times

The batch has about 430,000 tokens, cut in three ways: 256 long samples (a reasoning model's), 1,024 of medium length, 4,096 short ones.
Packing is rank 0's own work: it splits all samples over all ranks and builds the arrays of its own rows. Times are medians of CPU time.
Prints one table.

`--balance`: lengths are lognormal (median 700 tokens, σ 1, at most 8,192). `perf/imbalance` of rows that are balanced by tokens, and by
work, for models whose attention costs as much as their matrices at so many tokens (Qwen3-8B: 55,000).
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rlx.codec import decode, encode
from rlx.data.packing import Cost, pack
from rlx.data.source import FakeSource
from rlx.types import StepBatch, TrainingSample

SHAPES = {  # groups, members, prompt and completion tokens
    "256 samples": (32, 8, (180, 220), (1000, 1960)),
    "1,024 samples": (128, 8, (90, 110), (200, 440)),
    "4,096 samples": (256, 16, (25, 35), (40, 110)),
}


def median(action: Callable[[], Any], repeat: int) -> float:
    """Median CPU time of `action` in milliseconds."""
    seconds = []
    for _ in range(repeat + 1):
        began = time.process_time()
        action()
        seconds.append(time.process_time() - began)
    return 1000 * statistics.median(seconds[1:])  # the first one warms caches


def unequal(seed: int, groups: int = 64, members: int = 8) -> StepBatch:
    """Samples of lognormal length."""
    lengths = np.random.default_rng(seed).lognormal(np.log(700), 1.0, (groups, members)).clip(20, 8192).astype(int)

    def sample(group: int, member: int, length: int) -> TrainingSample:
        mask, zeros = np.arange(length) >= 10, np.zeros(length, np.float32)
        return TrainingSample(
            group=group,
            member=member,
            env="fake",
            token_ids=zeros.astype(np.int32),
            loss_mask=mask,
            inference_logprobs=zeros,
            advantages=mask.astype(np.float32),
            temperature=zeros + 1,
            versions=zeros.astype(np.int32),
        )

    return StepBatch(step=seed, mini_batches=(tuple(sample(*at, length) for at, length in np.ndenumerate(lengths)),))  # type: ignore[misc]


def imbalance(batch: StepBatch, ranks: int, row: int, cost: Cost, balanced_by: Cost) -> float:
    """`perf/imbalance` by `cost` of the rows that all ranks make, balanced by another."""
    everyone = [pack(batch, rank=rank, ranks=ranks, tokens=row, cost=balanced_by).mini_batches[0].micro_batches for rank in range(ranks)]
    turns = np.array([[cost(np.diff(own.cu_seqlens).tolist()) for own in rows] for rows in everyone]).T  # [turns, ranks]
    return float(turns.max(1).sum() / turns.mean(1).sum())


def print_balance(ranks: int, row: int, batches: int = 6) -> None:
    """One table."""
    print(f"| {ranks} ranks, rows of {row}; mean of {batches} batches | imbalance, balanced by tokens | by work |")
    print("| --- | --- | --- |")
    for equal in (55_000, 8_000, 1_000):

        def work(lengths: Sequence[int], equal: int = equal) -> float:
            return sum(n + n * n / equal for n in lengths)

        by_tokens, by_work = (
            statistics.mean(imbalance(unequal(seed), ranks, row, work, by) for seed in range(batches)) for by in (sum, work)
        )
        print(f"| attention equals matrices at {equal:,} tokens | {by_tokens:.3f} | {by_work:.3f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--row", type=int, default=8192, help="tokens of a packed row")
    parser.add_argument("--repeat", type=int, default=20)
    parser.add_argument("--balance", action="store_true", help="print how unequal rows are, and nothing else")
    args = parser.parse_args()
    if args.balance:
        print_balance(args.ranks, args.row)
    else:
        print_times(args.ranks, args.row, args.repeat)


def print_times(ranks: int, row: int, repeat: int) -> None:
    """One table."""
    print(f"| {ranks} ranks, rows of {row} | tokens | MB | bytes/token | encode, ms | decode, ms | pack one rank, ms |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for name, (groups, members, prompt, completion) in SHAPES.items():
        source = FakeSource(groups=groups, members=members, prompt_tokens=prompt, completion_tokens=completion, vocab_size=150_000)
        batch = source.receive(0)
        tokens = sum(len(sample.token_ids) for mini_batch in batch.mini_batches for sample in mini_batch)
        content = bytearray(encode(batch))
        received = decode(content, StepBatch)

        def pack_one(received: StepBatch = received) -> None:
            pack(received, rank=0, ranks=ranks, tokens=row)

        times = [
            median(lambda batch=batch: bytearray(encode(batch)), repeat),
            median(lambda content=content: decode(content, StepBatch), repeat),
            median(pack_one, repeat),
        ]
        size = len(content)
        print(f"| {name} | {tokens:,} | {size / 1e6:.1f} | {size / tokens:.1f} | " + " | ".join(f"{ms:.1f}" for ms in times) + " |")


if __name__ == "__main__":
    main()
