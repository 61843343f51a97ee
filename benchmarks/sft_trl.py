"""TRL's side of `sft.py`: SFTTrainer on the same model and data. Runs in TRL's own environment; does not import rlx.

    python sft_trl.py SETTINGS.json

Waits for a line on its standard input before each block of steps, and prints the block's seconds and tokens as JSON. The settings are the
fastest on a CPU: float32, no gradient checkpointing, one forward and backward for the whole batch, no logging or saving. Packing needs
FlashAttention, which needs a GPU, so rows are padded to the longest of their batch.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import SFTConfig, SFTTrainer


class Blocks(TrainerCallback):
    """Times blocks of steps."""

    def __init__(self, steps: int, cpu: bool) -> None:
        self.now = time.process_time if cpu else time.perf_counter
        self.steps, self.tokens, self.began, self.done = steps, 0.0, 0.0, 0

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.done % self.steps == 0:
            sys.stdin.readline()
            self.tokens, self.began = 0.0, self.now()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.done += 1
        if self.done % self.steps == 0:
            print(json.dumps({"seconds": self.now() - self.began, "tokens": self.tokens}), flush=True)


class Counting(SFTTrainer):
    """Counts the tokens of the batches, padding not."""

    blocks: Blocks

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        self.blocks.tokens += float(inputs["attention_mask"].sum())
        return super().training_step(model, inputs, *args, **kwargs)


def main() -> None:
    with open(sys.argv[1], encoding="utf-8") as file:
        settings = json.load(file)
    torch.set_num_threads(settings["threads"])
    config = SFTConfig(
        output_dir=settings["folder"],
        use_cpu=True,
        bf16=settings["dtype"] == "bfloat16",  # by autocast
        gradient_checkpointing=False,
        per_device_train_batch_size=settings["batch"],
        gradient_accumulation_steps=1,
        max_length=settings["seq_len"],
        max_steps=settings["steps"] * settings["blocks"],
        learning_rate=settings["adam"]["lr"],
        adam_beta2=0.95,
        weight_decay=0.0,
        optim="adamw_torch_fused",
        logging_strategy="no",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        packing=False,
        completion_only_loss=True,
        dataloader_pin_memory=False,
    )
    blocks = Blocks(settings["steps"], settings["cpu"])
    trainer = Counting(
        model=AutoModelForCausalLM.from_pretrained(settings["model"], dtype=torch.float32),
        args=config,
        train_dataset=load_dataset("json", data_files=settings["data"], split="train"),
        processing_class=AutoTokenizer.from_pretrained(settings["model"]),
        callbacks=[blocks],
    )
    trainer.blocks = blocks
    trainer.train()


if __name__ == "__main__":
    main()
