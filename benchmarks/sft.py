"""Compares supervised training with a bare Hugging Face loop on the same packed rows, and with TRL's SFTTrainer on the same data.

    python benchmarks/sft.py [--model FOLDER_OF_A_135M_MODEL] [--threads 2] [--rounds 3] [--ranks 1]
    python benchmarks/sft.py --threads 1 --cpu        on a machine with other work: seconds of a core, not of the clock

Two sizes: the tiny model with the demo's lengths (a word and its reverse, 256 rows a step), and the model of `--model`, or one of SmolLM2
135M's shape with random weights, on conversations of 16 to 160 tokens, 8 rows a step. Everything is in float32, on all cores; with
`--dtype bfloat16` all three compute in 16 bits, with parameters in float32 (TRL and the bare loop by autocast).

    rlx      the trainer of `rlx sft` (`sft_rlx.py`): rendering rows, masks, packing, forward, backward, clipping, AdamW; with `--ranks`
             the threads are those of several processes (`hardware.trainer_processes`)
    bare     `model(input_ids, position_ids)` on the same packed rows, cross-entropy on the trained tokens, clipping, the same AdamW
    TRL      SFTTrainer in its own environment (`demo.py`), with the same batches of rows, padded; no logging, saving or recomputation

All three take turns, block by block, in one call, so that changes of the machine's load affect all. rlx and TRL have processes of their
own, which wait while the others compute. A rate counts the tokens of the rows, padding not; TRL's rows have one more, the line break
behind the end mark. Rendering and tokenizing rows is not counted: TRL does that for all rows before its first step; `rlx sft` does it in a
thread beside training, in the first pass over the data. Drawing, packing and padding are counted, but for the bare loop. Prints one table,
and what a new row costs.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from demo import install_trl, trl_version
from sft_rlx import rows_of
from torch.nn import functional
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from rlx.config.schema import WarmStartConfig
from rlx.data.packing import pack
from rlx.data.supervised import SupervisedSource
from rlx.models import tiny
from rlx.process import keep_freed_memory
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
    ranks: int = 1  # rlx's trainer processes, among which the threads are divided


def cases(folder: Path, given: str | None, ranks: int) -> list[Case]:
    """Write models and data sets into `folder`. `ranks`: of the tiny model."""
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
        Case("tiny", small, folder / "tiny.jsonl", batch=256, row=4096, seq_len=64, steps=2, ranks=ranks),
        Case("135M", large, folder / "135m.jsonl", batch=8, row=1024, seq_len=1024, steps=1),
    ]


def bare_step(model: Any, optimizer: torch.optim.Optimizer, batch: MiniBatch) -> None:
    """The step of a short script on packed rows."""
    for row in batch.micro_batches:
        ids = torch.from_numpy(row.token_ids).long()[None]
        positions = torch.cat([torch.arange(int(length)) for length in torch.from_numpy(row.cu_seqlens).diff()])[None]
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


class Side:
    """The processes of one side: `block` lets them train some steps and returns their seconds and tokens, as the first one says."""

    def __init__(self, command: list[str], name: str, case: Case, folder: Path, args: argparse.Namespace, ranks: int) -> None:
        """`command` runs one rank, with the settings and, if there are several, its number as arguments."""
        settings = {
            "model": str(case.model),
            "data": str(case.data),
            "folder": str(folder / f"{name}-{case.name}"),
            "batch": case.batch,
            "row": case.row,
            "seq_len": case.seq_len,
            "steps": case.steps,
            "blocks": args.rounds + 1,
            "ranks": ranks,
            "threads": args.threads // ranks,
            "cpu": args.cpu,
            "dtype": args.dtype,
            "adam": ADAM,
        }
        path = folder / f"{name}-{case.name}.json"
        path.write_text(json.dumps(settings))
        variables = {"OMP_NUM_THREADS": str(args.threads // ranks), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        environ = {**os.environ, **variables}
        environ.pop("PYTHONPATH", None)
        self.log = (folder / f"{name}-{case.name}.log").open("w")
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.processes = [
            subprocess.Popen([*command, str(path), str(rank)], env=environ, stderr=self.log, text=True, **pipes)  # type: ignore[call-overload]
            for rank in range(ranks)
        ]

    def block(self) -> tuple[float, float]:
        for process in self.processes:
            process.stdin.write("go\n")
            process.stdin.flush()
        for line in self.processes[0].stdout:
            if line.startswith("{"):
                said = json.loads(line)
                return said["seconds"], said["tokens"]
        raise SystemExit(f"a side ended; the end of its output:\n{Path(self.log.name).read_text(encoding='utf-8')[-2000:]}")

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


def compare(case: Case, folder: Path, python: Path, args: argparse.Namespace) -> None:
    """Print the case's rows of the table."""
    settings = {"model": str(case.model), "data": str(case.data), "seq_len": case.seq_len}
    source = SupervisedSource([(rows_of(settings), 1.0)], batch_size=case.batch, seed=0)
    bare = AutoModelForCausalLM.from_pretrained(case.model, dtype=torch.float32)
    optimizer = torch.optim.AdamW(bare.parameters(), **ADAM)
    step = 0
    now = time.process_time if args.cpu else time.perf_counter

    def bare_block() -> tuple[float, float]:
        began = now()
        for batch in made:
            with torch.autocast("cpu", torch.bfloat16, enabled=args.dtype == "bfloat16"):
                bare_step(bare, optimizer, batch)
        return now() - began, sum(map(tokens_of, made))

    ours = Side([sys.executable, str(HERE / "sft_rlx.py")], "rlx", case, folder, args, case.ranks)
    theirs = Side([str(python), str(HERE / "sft_trl.py")], "TRL", case, folder, args, 1)
    rates: dict[str, list[float]] = {"rlx": [], "bare": [], "TRL": []}
    rendering = 0.0
    try:
        for number in range(args.rounds + 1):
            began = time.process_time()
            packed = (pack(source.receive(each), rank=0, ranks=1, tokens=case.row) for each in range(step, step + case.steps))
            made = [batch for each in packed for batch in each.mini_batches]
            rendering += time.process_time() - began
            for name, (seconds, tokens) in (("rlx", ours.block()), ("bare", bare_block()), ("TRL", theirs.block())):
                if number > 0:  # the first block warms caches
                    rates[name].append(tokens / seconds)
            step += case.steps
    finally:
        ours.close()
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
    parser.add_argument("--ranks", type=int, default=1, help="rlx's trainer processes for the tiny model, which share the threads")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--only", choices=("tiny", "135M"))
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    keep_freed_memory()  # as the trainer's process does
    torch.manual_seed(0)
    python = install_trl()
    print(f"torch {torch.__version__}, TRL {trl_version(python)}, {args.threads} threads, {args.dtype}, {args.rounds} blocks\n")
    print("| model | loop | tokens/s, median | min–max | rlx is faster by |\n| --- | --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory() as name:
        for case in cases(Path(name), args.model, args.ranks):
            if args.only in (None, case.name):
                compare(case, Path(name), python, args)


if __name__ == "__main__":
    sys.path.insert(0, str(HERE))
    main()
