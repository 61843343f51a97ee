"""How long a checkpoint takes compared with torch.save of the same bytes, and how long a background checkpoint blocks the trainer.

    python benchmarks/checkpoint.py [--parameters 600] [--folder DIR] [--repeat 3]

The model has that many million random float32 parameters and AdamW's state, in one process without training: 12 bytes per parameter.
All variants take turns on the same disk and end with fsync; the disk's queue is emptied before each. Memory: the state, and the same
again for the background's copy.
"""

from __future__ import annotations

import argparse
import gc
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.models.qwen3 import Qwen3Config

from rlx.config.schema import LossTerms
from rlx.losses.base import Objective
from rlx.losses.grpo import grpo
from rlx.models.policy import PolicyModel
from rlx.train.checkpoint import Saver, TrainerProgress
from rlx.train.step import PolicyTrainer
from rlx.weights.shapes import digest_of


def make_trainer(million: int) -> PolicyTrainer:
    """Qwen3-0.6B's shapes, with the number of layers that gives about `million` million parameters."""
    sizes = {"hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128}
    layers = max(1, round((million - 155.6) / 15.73))  # embedding and head are one matrix of 151,936 × 1,024
    config = Qwen3Config(vocab_size=151936, num_hidden_layers=layers, tie_word_embeddings=True, **sizes)
    model = PolicyModel(AutoModelForCausalLM.from_config(config, dtype=torch.float32))
    trainer = PolicyTrainer(model, Objective(grpo, LossTerms(aggregate="token_mean")), torch.optim.AdamW(model.parameters(), lr=1e-4))
    for parameter in model.parameters():  # the state after a step, without memory for gradients
        trainer.optimizer.state[parameter] = {
            "step": torch.tensor(1.0),
            "exp_avg": torch.randn_like(parameter),
            "exp_avg_sq": torch.rand_like(parameter),
        }
    return trainer


def everything(trainer: PolicyTrainer) -> dict[str, Any]:
    return {"model": dict(trainer.model.named_weights()), "optimizer": trainer.optimizer.state_dict()}


def with_torch_save(trainer: PolicyTrainer, folder: Path) -> float:
    began = time.perf_counter()
    with (folder / "state.pt").open("wb") as file:
        torch.save(everything(trainer), file)
        file.flush()
        os.fsync(file.fileno())
    return time.perf_counter() - began


def synchronous(trainer: PolicyTrainer, folder: Path) -> float:
    began = time.perf_counter()
    Saver(trainer, digest_of).save(folder / "trainer", TrainerProgress(1, 1)).files()
    return time.perf_counter() - began


def in_background(saver: Saver, folder: Path) -> tuple[float, float]:
    """(seconds that the trainer is blocked, seconds until everything is on disk)."""
    began = time.perf_counter()
    saving = saver.save(folder / "trainer", TrainerProgress(1, 1))
    saving.wait_copied()
    held = time.perf_counter() - began
    saving.files()
    return held, time.perf_counter() - began


def on_empty_disk(parent: Path, measure: Callable[[Path], Any]) -> Any:
    folder = Path(tempfile.mkdtemp(dir=parent))
    os.sync()
    try:
        return measure(folder)
    finally:
        shutil.rmtree(folder)
        os.sync()
        gc.collect()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=int, default=600, help="millions")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    trainer = make_trainer(options.parameters)
    size = 3 * 4 * sum(p.numel() for p in trainer.model.parameters())
    print(f"{size / 12e6:.0f} million parameters, {size / 1e9:.2f} GB of state", flush=True)
    rows: dict[str, list[float]] = {"torch.save": [], "synchronous": [], "background, held": [], "background, written": []}
    for _ in range(options.repeat):
        rows["torch.save"].append(on_empty_disk(options.folder, lambda folder: with_torch_save(trainer, folder)))
        rows["synchronous"].append(on_empty_disk(options.folder, lambda folder: synchronous(trainer, folder)))
        print({name: [f"{value:.2f}" for value in values] for name, values in rows.items()}, flush=True)
    saver = Saver(trainer, digest_of, in_background=True)
    for _ in range(options.repeat):
        held, written = on_empty_disk(options.folder, lambda folder: in_background(saver, folder))
        rows["background, held"].append(held)
        rows["background, written"].append(written)
    saver.close()
    for name, values in rows.items():
        print(f"{name:20} {min(values):6.2f} s best   all: {', '.join(f'{value:.2f}' for value in values)}")
    best = {name: min(values) for name, values in rows.items()}
    held, synchronous_ = min(rows["background, held"]), best["synchronous"]
    print(f"synchronous / torch.save = {synchronous_ / best['torch.save']:.2f} (wanted: at most 1.3)")
    print(f"background, held / synchronous = {held / synchronous_:.2f} (wanted: at most 0.2)")


if __name__ == "__main__":
    main()
