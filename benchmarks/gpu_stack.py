"""The parts of `gpu.py` that go through the loader and the commands: a model's options beside plain training, and `rlx sft` itself."""

from __future__ import annotations

import json
import math
import os
import random
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from gpu_models import over_itself, rollouts, shape_of
from gpu_rows import Report
from transformers import Qwen3ForCausalLM

from rlx.config.schema import AcConfig, LoraConfig, LossTerms
from rlx.data.packing import pack
from rlx.losses.base import Objective
from rlx.losses.grpo import grpo
from rlx.models.load import load_policy
from rlx.parallel.mesh import one_process
from rlx.train.muon import Muon, groups_of
from rlx.train.offload import CPUOffloadOptimizer
from rlx.train.step import PolicyTrainer

ROOT = Path(__file__).resolve().parent.parent
MEMORY = Path("/dev/shm")
STEPS = 3
TOKEN = 950_000  # bytes of activations that a token of Qwen3-0.6B takes without checkpointing
ADAMW, MUON, ADAPTERS = "adamw", "muon", "adamw of adapters"
LORA = LoraConfig(rank=16)
BY_ITSELF = "lora.rank=16, one process without FSDP"
# name: (keys of `load_policy`, optimizer, whether its state lies in host memory). Each is compared with the first of its optimizer.
OPTIONS: dict[str, tuple[dict[str, Any], str, bool]] = {
    "plain": ({}, ADAMW, False),
    "plain, again": ({}, ADAMW, False),
    "trainer.reshard_after_forward=false": ({"reshard_after_forward": False}, ADAMW, False),
    "trainer.fsdp_cpu_offload=true": ({"cpu_offload": True}, ADAMW, False),
    "trainer.optim_cpu_offload=true": ({}, ADAMW, True),
    "trainer.ac.freq=1": ({"ac": AcConfig(freq=1)}, ADAMW, False),
    "trainer.ac.freq=1 mode=selective": ({"ac": AcConfig(freq=1, mode="selective")}, ADAMW, False),
    "trainer.ac.freq=1 trainer.ac_offloading=true": ({"ac": AcConfig(freq=1), "ac_offloading": True}, ADAMW, False),
    "model.attention=sdpa": ({"attention": "sdpa"}, ADAMW, False),
    "model.liger=false model.logprob_backend=torch": ({"liger": False, "logprob_backend": "torch"}, ADAMW, False),
    "trainer.reduce_dtype=bfloat16": ({"reduce_dtype": "bfloat16"}, ADAMW, False),
    BY_ITSELF: ({"lora": LORA}, ADAPTERS, False),
    "lora.rank=16, FSDP": ({"lora": LORA}, ADAPTERS, False),
    "lora.rank=16 trainer.ac.freq=1 mode=selective, FSDP": ({"lora": LORA, "ac": AcConfig(freq=1, mode="selective")}, ADAPTERS, False),
    "optim=muon": ({}, MUON, False),
    "optim=muon trainer.optim_cpu_offload=true": ({}, MUON, True),
    "trainer.compile=true": ({"compile": True}, ADAMW, False),
    "trainer.compile=true trainer.ac.freq=1": ({"compile": True, "ac": AcConfig(freq=1)}, ADAMW, False),
}


def made(report: Report, name: str, layers: int | None, folder: str) -> str:
    """A folder with random weights in a model's sizes."""
    shape = shape_of(report, name)
    with torch.device(report.device):
        hf: Any = Qwen3ForCausalLM._from_config(shape.config(layers), dtype=report.dtype)
    hf.save_pretrained(folder)
    del hf
    report.clear()
    return folder


def options(report: Report) -> None:
    """Three steps of a model that was read from its files. The gradient's norm and the entropy at the third show what two steps did."""
    sharded, alone, (samples, length) = over_itself(report), one_process(report.device), (8, 2048) if not report.small else (4, 64)
    shape, layers = shape_of(report, "0.6B"), 4
    where = f"{shape.name} width, {layers} layers, {samples} rollouts of {length:,} tokens"
    base = MEMORY if report.cuda else Path(tempfile.gettempdir())
    source = rollouts(shape, samples, length)
    dtype = str(report.dtype).removeprefix("torch.")
    first: dict[str, dict[str, float]] = {}
    plain = 0.0
    with tempfile.TemporaryDirectory(dir=base) as folder:
        made(report, "0.6B", layers, folder)
        for name, (keys, kind, offloaded) in OPTIONS.items():
            if "compile" in name and not report.cuda:
                report.error(name, where, "left out without a GPU: compiling takes longer than all the rest")
                continue
            mesh = alone if name == BY_ITSELF else sharded
            with report.attempt(name, where):
                model = load_policy(folder, mesh, dtype=dtype, optimization_dtype="float32", **keys)
                groups, how = groups_of(model.layers, model), {"lr": 1e-4, "betas": (0.9, 0.95), "weight_decay": 0.0, "fused": True}
                optimizer: Any = Muon(groups, **how) if kind == MUON else torch.optim.AdamW(groups, **how)
                if offloaded:
                    optimizer = CPUOffloadOptimizer(optimizer, mesh)
                objective = Objective(grpo, LossTerms(aggregate="token_mean", entropy_coef=0.01))
                trainer = PolicyTrainer(model, objective, optimizer, max_norm=1.0, mesh=mesh)
                for step in range(STEPS):
                    began = time.perf_counter()
                    found = trainer.train_batch(pack(source.receive(step), rank=0, ranks=1, tokens=2 * length))
                    mesh.synchronize()
                    seconds = time.perf_counter() - began
                peak, beside = report.peak(), first.setdefault(kind, found)
                plain = plain or seconds
                for metric in ("optim/grad_norm", "policy/entropy"):
                    differs = abs(found[metric] / beside[metric] - 1)
                    report.row(f"{name}: {metric}", where, differs, "of the plain one's, off", "<= 0.01", exact=True)
                report.row(f"{name}: a step", where, seconds / plain, "times the plain one's", peak_gib=peak)
                del model, optimizer, trainer


def played(arguments: list[str], folder: Path, limit: float) -> subprocess.CompletedProcess[str]:
    """Run `rlx` in `folder`."""
    env = os.environ | {"PYTHONPATH": str(ROOT) + os.pathsep + os.environ.get("PYTHONPATH", "")}
    done = subprocess.run([sys.executable, "-m", "rlx.cli", *arguments], cwd=folder, env=env, capture_output=True, text=True, timeout=limit)
    print(done.stdout[-3000:], done.stderr[-3000:], file=sys.stderr)
    return done


def command(arguments: list[str], folder: Path, limit: float) -> Path:
    """Run `rlx` in `folder`, and return the run's directory. Raises RuntimeError with the last line if it fails."""
    done = played(arguments, folder, limit)
    if done.returncode != 0:
        said = [line for line in (done.stdout + done.stderr).splitlines() if "Error" in line or "failed" in line or line.startswith("rlx:")]
        raise RuntimeError(f"exit code {done.returncode}: {said[-1] if said else 'it said nothing'}")
    name = next(argument for argument in arguments if argument.startswith("run.name=")).partition("=")[2]
    return folder / "outputs" / name


def demonstrations(path: Path) -> str:
    """Words to write backwards, which the tiny model learns."""
    draw = random.Random(0)
    with path.open("w", encoding="utf-8") as file:
        for _ in range(2048):
            word = "".join(draw.choices("abcdefgh", k=5))
            said = [{"role": "user", "content": word}, {"role": "assistant", "content": word[::-1]}]
            file.write(json.dumps({"messages": said}) + "\n")
    return str(path)


def losses(run: Path) -> list[float]:
    """The training loss of each step."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [record["loss/nll"] for record in records if "loss/nll" in record]


def roles(report: Report) -> None:
    """`rlx sft`, through every check, and submitit: its benchmark on rows of 16k tokens, and a run that resumes."""
    missing = [name for name in ("hydra", "omegaconf", "submitit", "msgspec", "xxhash", "zstandard") if find_spec(name) is None]
    if missing:
        report.error("rlx sft", "", f"{', '.join(missing)} not installed: the commands need rlx's dependencies")
        return
    layout = "hardware=gpu1_shared" if report.cuda else "hardware=cpu"
    shape, length = shape_of(report, "0.6B"), 16_384 if not report.small else 64
    dtype = str(report.dtype).removeprefix("torch.")
    with tempfile.TemporaryDirectory(dir=MEMORY if report.cuda else None) as name:
        folder = Path(name)
        where = f"{shape.name}, 4 samples of {length:,} tokens"
        with report.attempt("rlx sft bench=true", where):
            model = made(report, "0.6B", None, str(folder / "model"))
            facts = {"num_layers": shape.layers, "hidden_size": shape.width, "vocab_size": shape.vocabulary, "head_dim": shape.head_dim}
            facts |= {"num_attention_heads": shape.heads, "num_key_value_heads": shape.key_heads, "num_parameters": 100_000}
            bench = [
                "sft", "bench=true", "data=fake", "model=qwen3_0_6b", f"model.name={model}", f"model.dtype={dtype}", "trainer.ac.freq=0",
                "max_steps=8", "sampling.max_tokens=32", layout, *[f"model.{key}={value}" for key, value in facts.items() if report.small],
            ]  # fmt: skip
            run = command([*bench, "data.batch_size=4", f"seq_len={length}", "run.name=bench"], folder, 120)
            found = json.loads((run / "bench.json").read_text())
            memory = found["memory"]["trainer"]
            report.row("rlx sft bench=true", where, found["tokens_per_second"], "tokens/s", peak_gib=memory["peak_gb"])
            if report.cuda:
                report.row("rlx sft bench=true", where, 100 * found["mfu_causal"], "% causal MFU")
                ratio = memory["peak_gb"] / memory["estimated_gb"]
                report.row(f"peak / the plan's {memory['estimated_gb']:.1f} GiB", where, ratio, "times", "0.75 to 1.33")
        where = "the tiny model, 60 steps of 64 words to write backwards"
        with report.attempt("rlx sft", where):
            data = demonstrations(folder / "words.jsonl")
            keys = ["sft", f"data.name={data}", "scheduler.type=constant", "ckpt.interval=30", "optim.lr=2e-3", layout]
            keys.append(f"model.dtype={dtype}")
            with ThreadPoolExecutor() as pool:  # both at once: starting takes most of the time
                uninterrupted = pool.submit(command, [*keys, "max_steps=60", "run.name=whole"], folder, 120)
                command([*keys, "max_steps=30", "run.name=parts"], folder, 120)
                parts = losses(command([*keys, "max_steps=60", "run.name=parts", "resume=latest"], folder, 120))
                whole = losses(uninterrupted.result())
            report.row("rlx sft: the last loss / the first", where, whole[-1] / whole[0], "times", "<= 0.8", exact=True)
            assert len(parts) == len(whole) == 60, (len(parts), len(whole))
            worst = max(abs(one / other - 1) for one, other in zip(whole, parts, strict=True))
            report.row("rlx sft, resumed at step 30: the largest difference of a loss", where, worst, "of it", "<= 0.02", exact=True)
        if report.cuda:  # last: it may take what is left of the time
            samples = math.ceil(1.7 * torch.cuda.mem_get_info()[1] / (TOKEN * length))
            row = samples * length
            where = f"{shape.name}, rows of {row:,} tokens, no checkpointing"
            with report.attempt("an out-of-memory error: keys named", where):
                rows = [f"data.batch_size={samples}", f"seq_len={length}", f"trainer.micro_batch_tokens={row}"]
                done = played([*bench, *rows, "run.name=too_long"], folder, 60)
                said = done.stdout + done.stderr
                assert done.returncode != 0, "the device had memory enough"
                assert "the device ran out of memory; the estimate was" in said, said[-300:]
                named = sum(f"  trainer.{key}" in said for key in ("ac.freq=1", "micro_batch_tokens="))
                report.row("an out-of-memory error: keys named", where, named, "of 2", "== 2", exact=True)
