"""Compares the trainer's step with two bare Hugging Face loops on the same batch: forward, loss, backward, clip, AdamW.

    OMP_NUM_THREADS=1 python benchmarks/trainer.py [--steps 20] [--model FOLDER --prompts 4 --row 1024]

The batch is that of the default run: 32 prompts × 8 rollouts of reverse_text's lengths, one optimizer step. The model is the default
run's, or the one of a folder. The bare loops do what a short script does, with `log_softmax` of the logits, without entropy or diagnostics:

    padded   64 rollouts at a time in a rectangle, with an attention mask
    packed   `model(input_ids, position_ids)` on rlx's own packed rows, as transformers takes packed sequences

All take turns, step by step, so that changes in the machine's load affect all. Prints one table.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable, Sequence

import torch
from transformers import AutoModelForCausalLM

from rlx.config.schema import LossTerms, WarmStartConfig
from rlx.data.packing import pack
from rlx.data.source import FakeSource
from rlx.losses.base import Objective
from rlx.losses.reinforce import reinforce
from rlx.models.policy import PolicyModel
from rlx.models.tiny import build_model
from rlx.train.step import PolicyTrainer
from rlx.types import MiniBatch, TrainingSample

ROLLOUTS = 8


def padded_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, samples: Sequence[TrainingSample]) -> None:
    """A step on padded rectangles of 64 samples: log_softmax, REINFORCE, token mean."""
    total = sum(int(s.loss_mask.sum()) for s in samples)
    for start in range(0, len(samples), 64):
        rows = samples[start : start + 64]
        width = max(len(s.token_ids) for s in rows)
        ids, attend = torch.zeros(len(rows), width, dtype=torch.long), torch.zeros(len(rows), width, dtype=torch.long)
        mask, advantage = torch.zeros(len(rows), width), torch.zeros(len(rows), width)
        for i, s in enumerate(rows):
            n = len(s.token_ids)
            ids[i, :n], attend[i, :n] = torch.from_numpy(s.token_ids).long(), 1
            mask[i, :n], advantage[i, :n] = torch.from_numpy(s.loss_mask).float(), torch.from_numpy(s.advantages)
        logits = model(input_ids=ids, attention_mask=attend, use_cache=False).logits[:, :-1].float()
        logp = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
        loss = -(logp * advantage[:, 1:] * mask[:, 1:]).sum() / total
        loss.backward()
    finish(model, optimizer)


def packed_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: MiniBatch) -> None:
    """The same step on packed rows; transformers finds the sequences in the positions."""
    total = sum(int(row.loss_mask.sum()) for row in batch.micro_batches)
    for row in batch.micro_batches:
        ids, labels = (torch.from_numpy(part).long()[None] for part in (row.token_ids, row.labels))
        positions = torch.cat([torch.arange(int(length)) for length in torch.from_numpy(row.cu_seqlens).diff()])[None]
        logits = model(input_ids=ids, position_ids=positions, use_cache=False).logits.float()
        logp = logits.log_softmax(-1).gather(-1, labels[..., None])[0, :, 0]
        loss = -(logp * torch.from_numpy(row.advantages) * torch.from_numpy(row.loss_mask)).sum() / total
        loss.backward()
    finish(model, optimizer)


def finish(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--model", help="folder of a model; default: the tiny model of the default run")
    parser.add_argument("--prompts", type=int, default=32, help="groups of 8 rollouts")
    parser.add_argument("--row", type=int, default=4096, help="tokens of a packed row")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    tiny = build_model(WarmStartConfig(), context_length=256) if args.model is None else None
    first = tiny or AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    first.train()
    batch = FakeSource(  # the default run's lengths
        groups=args.prompts, members=ROLLOUTS, prompt_tokens=(20, 24), completion_tokens=(4, 12), vocab_size=first.config.vocab_size
    ).receive(0)
    samples = batch.mini_batches[0]
    adam = {"lr": 3e-4, "betas": (0.9, 0.95), "weight_decay": 0.0}
    second, ours = copy.deepcopy(first), PolicyModel(copy.deepcopy(first))
    optimizers = [torch.optim.AdamW(model.parameters(), **adam) for model in (first, second, ours)]
    trainer = PolicyTrainer(ours, Objective(reinforce, LossTerms(aggregate="token_mean")), optimizers[2], max_norm=1.0)

    def packed() -> MiniBatch:
        return pack(batch, rank=0, ranks=1, tokens=args.row).mini_batches[0]

    loops: dict[str, Callable[[], object]] = {
        "bare Hugging Face loop, padded": lambda: padded_step(first, optimizers[0], samples),
        "bare Hugging Face loop, packed": lambda: packed_step(second, optimizers[1], packed()),
        "rlx trainer, packing included": lambda: trainer.train_batch(pack(batch, rank=0, ranks=1, tokens=args.row)),
    }
    seconds: dict[str, list[float]] = {name: [] for name in loops}
    for step in range(args.steps + 2):
        for name, loop in loops.items():
            start = time.perf_counter()
            loop()
            if step >= 2:  # the first two warm caches
                seconds[name].append(time.perf_counter() - start)
    tokens = sum(len(s.token_ids) for s in samples)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} thread, {len(samples)} samples, {tokens} tokens, {args.steps} steps\n")
    print("| loop | s a step, median | min–max | tokens/s | rlx is faster by |\n| --- | --- | --- | --- | --- |")
    own = statistics.median(list(seconds.values())[-1])
    for name, values in seconds.items():
        median = statistics.median(values)
        print(f"| {name} | {median:.3f} | {min(values):.3f}–{max(values):.3f} | {tokens / median:,.0f} | {median / own:.2f} |")


if __name__ == "__main__":
    main()
