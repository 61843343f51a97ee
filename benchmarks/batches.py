"""A step's batch on its way to the trainer: size in bytes, time to encode and decode, time to pack for one of several ranks.

    OMP_NUM_THREADS=1 python benchmarks/batches.py [--ranks 8] [--row 8192] [--repeat 20]

The batch has about 430,000 tokens, cut in three ways: 256 long samples (a reasoning model's), 1,024 of medium length, 4,096 short ones.
Packing is rank 0's own work: it splits all samples over all ranks and builds the arrays of its own rows. Times are medians of CPU time.
Prints one table.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

from rlx.codec import decode, encode
from rlx.data.packing import pack
from rlx.data.source import FakeSource
from rlx.types import StepBatch

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--row", type=int, default=8192, help="tokens of a packed row")
    parser.add_argument("--repeat", type=int, default=20)
    args = parser.parse_args()
    print(f"| {args.ranks} ranks, rows of {args.row} | tokens | MB | bytes/token | encode, ms | decode, ms | pack one rank, ms |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for name, (groups, members, prompt, completion) in SHAPES.items():
        source = FakeSource(groups=groups, members=members, prompt_tokens=prompt, completion_tokens=completion, vocab_size=150_000)
        batch = source.receive(0)
        tokens = sum(len(sample.token_ids) for mini_batch in batch.mini_batches for sample in mini_batch)
        content = bytearray(b"".join(encode(batch)))
        received = decode(content, StepBatch)

        def pack_one(received: StepBatch = received) -> None:
            pack(received, rank=0, ranks=args.ranks, tokens=args.row)

        times = [
            median(lambda batch=batch: bytearray(b"".join(encode(batch))), args.repeat),
            median(lambda content=content: decode(content, StepBatch), args.repeat),
            median(pack_one, args.repeat),
        ]
        size = len(content)
        print(f"| {name} | {tokens:,} | {size / 1e6:.1f} | {size / tokens:.1f} | " + " | ".join(f"{ms:.1f}" for ms in times) + " |")


if __name__ == "__main__":
    main()
