"""rlx's side of `sft.py`: one rank of the trainer of `rlx sft`, with its source of rows.

    python sft_rlx.py SETTINGS.json RANK

Waits for a line on its standard input before each block of steps. Rank 0 prints the block's seconds and the tokens of all ranks as JSON.
Rendering the rows is not part of a block.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoTokenizer

from rlx.config.schema import LossTerms, ModelConfig
from rlx.data.packing import pack
from rlx.data.rows import open_rows
from rlx.data.supervised import Conversations, SupervisedSource
from rlx.losses.base import Objective
from rlx.losses.sft import sft
from rlx.models.load import load_policy
from rlx.parallel.mesh import Mesh, join
from rlx.policy.chat import load_chat
from rlx.process import keep_freed_memory
from rlx.train.step import PolicyTrainer
from rlx.types import StepBatch


def rows_of(settings: dict[str, Any]) -> Conversations:
    """The rows of the case, as `rlx sft` reads and renders them."""
    chat = load_chat(AutoTokenizer.from_pretrained(settings["model"]), ModelConfig(name=settings["model"], renderer="default"))
    size = AutoConfig.from_pretrained(settings["model"]).vocab_size
    return Conversations(name="data", rows=open_rows(settings["data"]), chat=chat, seq_len=settings["seq_len"], vocab_size=size)


def main() -> None:
    settings, rank = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")), int(sys.argv[2])
    ranks, steps = settings["ranks"], settings["steps"]
    torch.set_num_threads(settings["threads"])
    keep_freed_memory()  # as the trainer's role does
    torch.manual_seed(0)
    mesh = Mesh(device=torch.device("cpu"))
    if ranks > 1:
        store = dist.FileStore(settings["folder"] + ".store", ranks)
        # A copy of the parameters on every rank: sharding a model this small only adds messages.
        mesh = join(torch.device("cpu"), rank=rank, world_size=ranks, timeout=600, store=store, copies=ranks)
    policy = load_policy(settings["model"], mesh, dtype=settings["dtype"])
    optimizer = torch.optim.AdamW(policy.parameters(), **settings["adam"])
    trainer = PolicyTrainer(policy, Objective(sft, LossTerms(aggregate="token_mean")), optimizer, max_norm=1.0, mesh=mesh)
    now = time.process_time if settings["cpu"] else time.perf_counter
    rows = rows_of(settings)
    ahead, source = (SupervisedSource([(rows, 1.0)], batch_size=settings["batch"], seed=0) for _ in range(2))  # the first renders the rows

    def tokens_of(batch: StepBatch) -> float:
        return float(sum(len(sample.token_ids) for samples in batch.mini_batches for sample in samples))

    for block in range(settings["blocks"]):
        numbers = range(block * steps, (block + 1) * steps)
        tokens = sum(tokens_of(ahead.receive(number)) for number in numbers)
        sys.stdin.readline()
        mesh.barrier()
        began = now()
        for number in numbers:
            trainer.train_batch(pack(source.receive(number), rank=rank, ranks=ranks, tokens=settings["row"]))
        mesh.barrier()
        if rank == 0:
            print(json.dumps({"seconds": now() - began, "tokens": tokens}), flush=True)
    mesh.close()


if __name__ == "__main__":
    main()
