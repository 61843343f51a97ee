"""Compares the trainer's step with a bare Hugging Face loop on the same batch: forward, loss, backward, clip, AdamW.

    OMP_NUM_THREADS=1 python benchmarks/trainer.py [--steps 20]

The batch is that of the default run: 32 prompts × 8 rollouts of reverse_text's lengths, one optimizer step. The bare loop does what a
short script does: it pads 64 rollouts at a time to a rectangle and takes `log_softmax` of the logits, without packing, entropy or
diagnostics. Both take turns, step by step, so that changes in the machine's load affect both. Prints one table.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Sequence

import torch

from rlx.config.schema import LossTerms, WarmStartConfig
from rlx.data.packing import pack
from rlx.data.source import FakeSource
from rlx.losses.base import Objective
from rlx.losses.reinforce import reinforce
from rlx.models.policy import PolicyModel
from rlx.models.tiny import build_model
from rlx.train.step import PolicyTrainer
from rlx.types import TrainingSample

PROMPTS, ROLLOUTS, VOCABULARY = 32, 8, 100


def bare_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, samples: Sequence[TrainingSample]) -> None:
    """The step of a short script: padded rectangles of 64 samples, log_softmax, REINFORCE, token mean."""
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
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--row", type=int, default=4096, help="tokens of a packed row")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    batch = FakeSource(groups=PROMPTS, members=ROLLOUTS, prompt_tokens=(20, 24), completion_tokens=(4, 12), vocab_size=VOCABULARY).receive(
        0
    )  # the default run's lengths
    samples = batch.mini_batches[0]
    bare = build_model(WarmStartConfig(), context_length=256).train()
    ours = PolicyModel(copy.deepcopy(bare))
    adam = {"lr": 3e-4, "betas": (0.9, 0.95), "weight_decay": 0.0}
    bare_optimizer = torch.optim.AdamW(bare.parameters(), **adam)
    trainer = PolicyTrainer(
        ours, Objective(reinforce, LossTerms(aggregate="token_mean")), torch.optim.AdamW(ours.parameters(), **adam), max_norm=1.0
    )
    seconds: dict[str, list[float]] = {"bare Hugging Face loop": [], "rlx trainer, packing included": []}
    for step in range(args.steps + 2):
        start = time.perf_counter()
        bare_step(bare, bare_optimizer, samples)
        middle = time.perf_counter()
        trainer.train_minibatch(pack(batch, rank=0, ranks=1, tokens=args.row).mini_batches[0], step=0)
        end = time.perf_counter()
        if step >= 2:  # the first two warm caches
            for name, value in zip(seconds, (middle - start, end - middle), strict=True):
                seconds[name].append(value)
    tokens = sum(len(s.token_ids) for s in samples)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} thread, {len(samples)} samples, {tokens} tokens, {args.steps} steps\n")
    print("| loop | s a step, median | min–max | tokens/s | ratio |\n| --- | --- | --- | --- | --- |")
    base = statistics.median(seconds["bare Hugging Face loop"])
    for name, values in seconds.items():
        median = statistics.median(values)
        print(f"| {name} | {median:.3f} | {min(values):.3f}–{max(values):.3f} | {tokens / median:,.0f} | {base / median:.2f} |")


if __name__ == "__main__":
    main()
