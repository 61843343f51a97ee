"""Compares supervised training with a bare Hugging Face loop on the same packed rows, and with TRL's SFTTrainer on the same data.

    python benchmarks/sft.py [--model FOLDER_OF_A_135M_MODEL] [--threads 2] [--rounds 3]
    python benchmarks/sft.py --threads 1 --cpu        on a machine with other work: seconds of a core, not of the clock

Two sizes: the tiny model with the demo's lengths (a word and its reverse, 256 rows a step), and the model of `--model`, or one of SmolLM2
135M's shape with random weights, on conversations of 16 to 160 tokens, 8 rows a step. Everything is in float32, on all cores.

    rlx      the trainer of `rlx sft`: rendering rows, masks, packing, forward, backward, clipping, AdamW
    bare     `model(input_ids, position_ids)` on the same packed rows, cross-entropy on the trained tokens, clipping, the same AdamW
    TRL      SFTTrainer in its own environment (`demo.py`), with the same batches of rows, padded; no logging, saving or recomputation

All three take turns, block by block, in one call, so that changes of the machine's load affect all. TRL is a process of its own, which
waits while the others compute. A rate counts the tokens of the rows, padding not; TRL's rows have one more, the line break behind the end
mark. Rendering and tokenizing rows is not counted: TRL does that for all rows before its first step; `rlx sft` does it in a thread beside
training, in the first pass over the data. Drawing, packing and padding are counted, but for the bare loop. Prints one table, and what a
new row costs.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from demo import install_trl, trl_version
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from rlx.config.schema import LossTerms, ModelConfig, WarmStartConfig
from rlx.data.packing import pack
from rlx.data.rows import open_rows
from rlx.data.supervised import Conversations, SupervisedSource
from rlx.losses.base import Objective
from rlx.losses.sft import sft
from rlx.models import tiny
from rlx.models.policy import PolicyModel
from rlx.policy.chat import load_chat
from rlx.process import keep_freed_memory
from rlx.train.step import PolicyTrainer
from rlx.types import MiniBatch

HERE = Path(__file__).resolve().parent
ADAM = {"lr": 1e-5, "betas": (0.9, 0.95), "weight_decay": 0.0, "fused": True}
SHAPE = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}


@dataclass(frozen=True)
class Case:
    """One size of the comparison."""

    name: str
    model: Path
    data: Path
    batch: int  # rows of the data set per step
    row: int  # tokens of a packed row
    seq_len: int
    steps: int  # of a block


def cases(folder: Path, given: str | None) -> list[Case]:
    """Write models and data sets into `folder`."""
    state = random.Random(0)
    small, large = folder / "tiny", Path(given) if given else folder / "135m"
    tiny.save(tiny.build_model(WarmStartConfig(), 256), tiny.build_tokenizer(256), small)
    if given is None:
        tokenizer = tiny.build_tokenizer(256)
        tiny.save(LlamaForCausalLM(LlamaConfig(**SHAPE)), tokenizer, large)  # type: ignore[arg-type]
    words = ["".join(state.choices("abcdefghijklmnopqrstuvwxyz", k=state.randint(3, 6))) for _ in range(4_096)]
    asked = [" ".join(state.choices(words, k=state.randint(3, 25))) for _ in range(1_000)]
    rows = {"tiny": [(word, word[::-1]) for word in words], "135m": [(text, text.upper()) for text in asked]}
    for name, pairs in rows.items():
        lines = (
            {"prompt": [{"role": "user", "content": one}], "completion": [{"role": "assistant", "content": two}]} for one, two in pairs
        )
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return [
        Case("tiny", small, folder / "tiny.jsonl", batch=256, row=4096, seq_len=64, steps=2),
        Case("135M", large, folder / "135m.jsonl", batch=8, row=1024, seq_len=1024, steps=1),
    ]


def ours(case: Case) -> tuple[Conversations, PolicyTrainer]:
    """The rows and the trainer of `rlx sft`."""
    tokenizer = AutoTokenizer.from_pretrained(case.model)
    chat = load_chat(tokenizer, ModelConfig(name=str(case.model), renderer="default"))
    model = AutoModelForCausalLM.from_pretrained(case.model, dtype=torch.float32)
    rows = Conversations(name="data", rows=open_rows(str(case.data)), chat=chat, seq_len=case.seq_len, vocab_size=model.config.vocab_size)
    policy = PolicyModel(model)
    objective = Objective(sft, LossTerms(aggregate="token_mean"))
    trainer = PolicyTrainer(policy, objective, torch.optim.AdamW(policy.parameters(), **ADAM), max_norm=1.0)
    return rows, trainer


def source_of(case: Case, rows: Conversations) -> SupervisedSource:
    return SupervisedSource([(rows, 1.0)], batch_size=case.batch, seed=0)


def bare_step(model: Any, optimizer: torch.optim.Optimizer, batch: MiniBatch) -> None:
    """The step of a short script on packed rows."""
    for row in batch.micro_batches:
        ids, positions = (torch.from_numpy(each).long()[None] for each in (row.token_ids, row.position_ids))
        hidden = model.base_model(input_ids=ids, position_ids=positions, use_cache=False).last_hidden_state[0]
        trained = torch.from_numpy(row.loss_mask)
        logits = model.lm_head(hidden[trained])
        loss = functional.cross_entropy(logits, torch.from_numpy(row.labels).long()[trained], reduction="sum")
        (loss / batch.num_loss_tokens).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def tokens_of(batch: MiniBatch) -> float:
    return float(sum(len(row.token_ids) for row in batch.micro_batches))


class Theirs:
    """TRL's process: `block` lets it train some steps and returns their seconds and tokens."""

    def __init__(self, python: Path, case: Case, folder: Path, threads: int, rounds: int, cpu: bool) -> None:
        settings = {
            "model": str(case.model),
            "data": str(case.data),
            "folder": str(folder / f"trl-{case.name}"),
            "batch": case.batch,
            "seq_len": case.seq_len,
            "steps": case.steps,
            "blocks": rounds + 1,
            "threads": threads,
            "cpu": cpu,
            "lr": ADAM["lr"],
        }
        path = folder / f"{case.name}.json"
        path.write_text(json.dumps(settings))
        environ = {**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        environ.pop("PYTHONPATH", None)
        self.log = (folder / f"{case.name}.log").open("w")
        command = [str(python), str(HERE / "sft_trl.py"), str(path)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.process = subprocess.Popen(command, env=environ, stderr=self.log, text=True, **pipes)  # type: ignore[call-overload]

    def block(self) -> tuple[float, float]:
        self.process.stdin.write("go\n")
        self.process.stdin.flush()
        for line in self.process.stdout:
            if line.startswith("{"):
                said = json.loads(line)
                return said["seconds"], said["tokens"]
        raise SystemExit(f"TRL ended; the end of its output:\n{Path(self.log.name).read_text()[-2000:]}")

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


def compare(case: Case, folder: Path, python: Path, args: argparse.Namespace) -> None:
    """Print the case's rows of the table."""
    rows, trainer = ours(case)
    ahead, source = source_of(case, rows), source_of(case, rows)  # the first renders the rows, which the second then finds
    bare = copy.deepcopy(trainer.model.hf)
    bare.set_attn_implementation("sdpa")
    optimizer = torch.optim.AdamW(bare.parameters(), **ADAM)
    step = 0
    now = time.process_time if args.cpu else time.perf_counter

    def block(run: Callable[[int], float]) -> tuple[float, float]:
        tokens, began = 0.0, now()
        for number in range(step, step + case.steps):
            tokens += run(number)
        return now() - began, tokens

    def packed(source: SupervisedSource, number: int) -> MiniBatch:
        (batch,) = pack(source.receive(number), rank=0, ranks=1, tokens=case.row).mini_batches
        return batch

    def our_step(number: int) -> float:
        batch = packed(source, number)
        trainer.train_minibatch(batch)
        return tokens_of(batch)

    def one_bare_step(number: int) -> float:
        bare_step(bare, optimizer, made[number])
        return tokens_of(made[number])

    theirs = Theirs(python, case, folder, args.threads, args.rounds, args.cpu)
    rates: dict[str, list[float]] = {"rlx": [], "bare": [], "TRL": []}
    rendering = 0.0
    try:
        for number in range(args.rounds + 1):
            began = time.process_time()
            made = {each: packed(ahead, each) for each in range(step, step + case.steps)}
            rendering += time.process_time() - began
            for name, (seconds, tokens) in (("rlx", block(our_step)), ("bare", block(one_bare_step)), ("TRL", theirs.block())):
                if number > 0:  # the first block warms caches
                    rates[name].append(tokens / seconds)
            step += case.steps
    finally:
        theirs.close()
    medians = {name: statistics.median(values) for name, values in rates.items()}
    for name, values in rates.items():
        shown = f"{min(values):,.0f}–{max(values):,.0f}"
        print(f"| {case.name} | {name} | {medians[name]:,.0f} | {shown} | {medians['rlx'] / medians[name]:.2f} × |", flush=True)
    print(f"| {case.name} | rendering, drawing and packing a row: {rendering / (step * case.batch) * 1e3:.2f} ms of a core |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder of a model of 135 million parameters; default: that shape with random weights")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--rounds", type=int, default=3, help="blocks of each side that count")
    parser.add_argument("--cpu", action="store_true", help="count seconds of a core; with --threads 1 other work hardly changes them")
    parser.add_argument("--only", choices=("tiny", "135M"))
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    keep_freed_memory()  # as the trainer's process does
    torch.manual_seed(0)
    python = install_trl()
    print(f"torch {torch.__version__}, TRL {trl_version(python)}, {args.threads} threads, {args.rounds} blocks\n")
    print("| model | loop | tokens/s, median | min–max | rlx is faster by |\n| --- | --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory() as name:
        for case in cases(Path(name), args.model):
            if args.only in (None, case.name):
                compare(case, Path(name), python, args)


if __name__ == "__main__":
    sys.path.insert(0, str(HERE))
    main()
