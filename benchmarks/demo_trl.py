"""TRL's side of `demo.py`: GRPOTrainer on the same model, prompts, batch and learning rate. Runs in TRL's own environment.

    python demo_trl.py SETTINGS.json

Does not import rlx. Writes one JSON line per step to `out`, `{step, time, reward, tokens}`, as soon as the batch's rewards are known.
Ends once the mean reward of five steps has reached `goal`.

The settings are the fastest on a CPU: rlx's dtype (16 bits by autocast, so the weights are float32, as rlx's are), no gradient
checkpointing, one forward and backward for the whole batch, no reference model, no logging or saving, transformers' generation with the
dynamic cache (`--continuous-batching` tries the other engine). It is on-policy: every step waits for the longest answer of its batch.
"""

from __future__ import annotations

import json
import re
import sys
import time
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


def exact(text: str, answer: str) -> float:
    return float(text.strip() == answer)


def even(text: str, answer: str) -> float:
    return float(len(text) % 2 == 0)


def last_number(text: str, answer: str) -> float:
    """As `rlx_sums.LastNumberParser`, for whole numbers."""
    numbers = re.findall(r"-?\d+(?:,\d{3})*(?:\.\d+)?", text)
    return float(bool(numbers) and re.sub(r"\.0*$", "", numbers[-1].replace(",", "")) == answer)


REWARDS = {"exact": exact, "even": even, "last_number": last_number}


class Recorder(TrainerCallback):
    """Records the reward of every batch as soon as it is known, and stops the training at the goal."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.function, self.goal = REWARDS[settings["reward"]], settings["goal"]
        self.out = open(settings["out"], "w", encoding="utf-8")  # noqa: SIM115  (open as long as the process)
        self.means: list[float] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.write(step=-1)

    def __call__(self, completions: list, answer: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        texts = [completion[0]["content"] for completion in completions]
        rewards = [self.function(text, right) for text, right in zip(texts, answer, strict=True)]
        self.means.append(sum(rewards) / len(rewards))
        self.write(step=len(self.means) - 1, reward=self.means[-1], tokens=[len(ids) for ids in completion_ids])
        return rewards

    __name__ = "reward"

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        last = self.means[-5:]
        control.should_training_stop |= self.goal is not None and len(last) == 5 and sum(last) / 5 >= self.goal

    def write(self, **values: Any) -> None:
        self.out.write(json.dumps({"time": time.time(), **values}) + "\n")
        self.out.flush()


def main() -> None:
    with open(sys.argv[1], encoding="utf-8") as file:
        settings = json.load(file)
    torch.set_num_threads(settings["threads"])
    sampling = settings["sampling"]  # all keys of rlx's section, with the environment's own values
    config = GRPOConfig(
        output_dir=settings["folder"],
        seed=settings["seed"],
        data_seed=settings["seed"],
        use_cpu=True,
        bf16=settings["bf16"],
        gradient_checkpointing=False,
        per_device_train_batch_size=settings["batch_size"],
        gradient_accumulation_steps=1,
        num_generations=settings["group_size"],
        max_completion_length=sampling["max_tokens"],
        max_steps=settings["steps"],
        learning_rate=settings["lr"],
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=settings["warmup_steps"],
        adam_beta1=0.9,
        adam_beta2=0.95,
        weight_decay=0.0,
        max_grad_norm=1.0,
        loss_type="grpo",
        scale_rewards="group",
        epsilon=0.2,
        beta=0.0,
        num_iterations=1,
        temperature=sampling["temperature"],
        top_p=sampling["top_p"],
        top_k=max(0, sampling["top_k"]),  # 0 keeps the whole vocabulary, as -1 does for vLLM
        min_p=sampling["min_p"] or None,
        generation_kwargs={"min_new_tokens": sampling["min_tokens"]} if sampling["min_tokens"] else None,
        use_transformers_continuous_batching=settings["continuous_batching"],
        logging_steps=10**6,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_num_workers=0,
    )
    recorder = Recorder(settings)
    with open(settings["rows"], encoding="utf-8") as file:
        rows = json.load(file)
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(settings["model"], dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(settings["model"]),
        reward_funcs=recorder,
        args=config,
        train_dataset=Dataset.from_list(rows),
        callbacks=[recorder],
    )
    trainer.train()


if __name__ == "__main__":
    main()
