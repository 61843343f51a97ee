"""Whole runs with vLLM on one NVIDIA GPU that the engine and the trainer share: `python benchmarks/gpu_engine.py [--folder FOLDER]`.

`benchmarks/gpu.py` needs no vLLM and asks about the trainer alone; this needs vLLM's CUDA build and asks: does the engine start with the
options that rlx gives it, do versions reach it over both transports that one GPU allows (files and `ipc`), are they what was trained, and
how far are its log-probabilities from the trainer's? The small runs are started together, so their times say little about speed.
`--only large_files large_ipc` runs models of 1.4B parameters, one after the other; each takes some 40 GB by estimate.

Each row is one JSON line, and all of them are a table at the end. Logs and metrics of the runs stay in FOLDER. Without a GPU the runs that
a CPU can play are played with few steps: that shows that the script works.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from gpu import table
from gpu_rows import finished

ROOT = Path(__file__).resolve().parent.parent
CACHE = 4 << 30  # bytes, named: vLLM's own estimate fails while other processes give memory of the GPU back
EARLY = 3  # the first updates compile and load what later ones find


class Run(NamedTuple):
    question: str
    keys: list[str]
    cpu: bool = True  # whether a CPU can play it
    made: bool = False  # from random weights of 1.4B parameters, which this script makes


SHORT = ["max_steps=30"]
WIDE = [
    "hidden_size=1024",
    "intermediate_size=3072",
    "num_hidden_layers=16",
    "num_attention_heads=16",
    "num_key_value_heads=8",
    "head_dim=64",
]
RUNS = {
    "files": Run("the default run, float32, versions from files", SHORT),
    "exact": Run(
        "float32, eager, no asynchronous level: how far are both log-probabilities?",
        ["max_steps=12", "max_async_level=0", "inference.enforce_eager=true"],
    ),
    "half": Run("bfloat16, versions from files", [*SHORT, "model.dtype=bfloat16"]),
    "ipc": Run(
        "bfloat16, 16 layers 1,024 wide, through the GPU's memory",
        [
            "max_steps=12",
            "weight_broadcast.type=ipc",
            "model.dtype=bfloat16",
            "model.num_parameters=210000000",
            "model.warm_start.steps=40",
            *[f"model.warm_start.{key}" for key in WIDE],
        ],
        cpu=False,
    ),
    "lora": Run("bfloat16, eager, adapters from files", [*SHORT, "model.dtype=bfloat16", "lora.rank=8", "inference.enforce_eager=true"]),
}
# A random model is rewarded for some of the letters that it writes, so its weights change. Its requests are in flight at every update.
LARGE = [
    "env=reverse_text",
    "model=qwen3_1_7b",
    "model.context_length=1024",
    "max_steps=8",
    "seq_len=512",
    "sampling.max_tokens=256",
    "orchestrator.batch_size=64",
    "model.dtype=bfloat16",
    "trainer.micro_batch_tokens=8192",
    "optim.lr=1e-4",
]
RUNS |= {
    f"large_{name}": Run(f"bfloat16, 1.4B parameters on a GPU, {what}", [*LARGE, *keys], cpu=name != "ipc", made=True)
    for name, what, keys in (
        ("files", "versions from files in memory", ["weight_broadcast.folder=/dev/shm"]),
        ("ipc", "through the GPU's memory", ["weight_broadcast.type=ipc"]),
    )
}


def made(folder: Path, *, cuda: bool) -> Path:
    """A model of random weights in bfloat16 with the tiny model's tokenizer: 28 layers, 2,048 wide; on a CPU two, 64 wide."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from rlx.models.tiny import VOCABULARY, build_tokenizer

    width, layers, heads, wide = (2048, 28, 16, 128) if cuda else (64, 2, 4, 32)
    eos = VOCABULARY.index("<|im_end|>")
    config = Qwen3Config(
        vocab_size=len(VOCABULARY),
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        head_dim=wide,
        max_position_embeddings=1024,
        eos_token_id=eos,
        pad_token_id=eos,
        dtype="bfloat16",
    )
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda" if cuda else "cpu"):
        model = Qwen3ForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    model.save_pretrained(folder)
    del model
    if cuda:
        torch.cuda.empty_cache()  # the runs need it
    build_tokenizer(1024).save_pretrained(folder)
    return folder


def sizes(folder: Path) -> list[str]:
    """The keys that say how large the model of a folder is."""
    from safetensors import safe_open

    config = json.loads((folder / "config.json").read_text())
    with safe_open(folder / "model.safetensors", "pt") as file:
        count = sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118 - safetensors files are not iterable
    keys = {"num_layers": "num_hidden_layers", "num_attention_heads": "num_attention_heads", "num_key_value_heads": "num_key_value_heads"}
    keys |= {name: name for name in ("hidden_size", "head_dim", "vocab_size")}
    return [f"model.num_parameters={count}", *[f"model.{name}={config[field]}" for name, field in keys.items()]]


def play(name: str, folder: Path, *, cuda: bool, limit: float) -> subprocess.CompletedProcess[str]:
    """One run of `rlx train` in `folder/name`."""
    layout = (
        ["hardware=gpu1_shared", "inference.gpu_memory_utilization=0.12", f"inference.vllm.kv_cache_memory_bytes={CACHE}"]
        if cuda
        else ["hardware=cpu", "max_steps=3"]
    )
    keys = [key for key in RUNS[name].keys if cuda or not key.startswith(("max_steps=", "model.dtype="))]
    if RUNS[name].made:
        keys += [f"model.name={folder / 'made'}", *sizes(folder / "made")]
    path = os.pathsep.join([str(ROOT), *map(str, sorted((ROOT / "environments").glob("rlx_*"))), os.environ.get("PYTHONPATH", "")])
    env = os.environ | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "INFO"}
    command = [sys.executable, "-m", "rlx.cli", "train", *layout, *keys, f"run.dir={folder / name}"]
    with (folder / f"{name}.console").open("w") as console:
        return subprocess.run(command, env=env, stdout=console, stderr=subprocess.STDOUT, text=True, timeout=limit)


def judge(name: str, folder: Path, code: int) -> list[dict[str, object]]:
    """The rows of a run that has ended."""
    run, question = folder / name, RUNS[name].question
    rows: list[dict[str, object]] = []

    def row(what: str, number: float, unit: str, goal: str | None = None) -> None:
        rows.append(finished(name, what, question, number=number, unit=unit, goal=goal))

    if code != 0:
        said = [line for line in (folder / f"{name}.console").read_text().splitlines() if line.strip()]
        found = [line for line in said if "Error" in line or "failed" in line] or said[-1:] or ["it said nothing"]
        rows.append(finished(name, "the run", question, error=f"exit code {code}: {found[-1].strip()[:300]}"))
    metrics = run / "metrics.jsonl"
    records = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []

    def every(metric: str) -> list[float]:
        return [record[metric] for record in records if metric in record]

    rewards, kl, largest = every("reward/mean"), every("mismatch/kl"), every("mismatch/abs_logp_diff_max")
    if kl:
        row("steps", len(kl), "")
        row("reward, mean of the first and last three steps: gain", statistics.mean(rewards[-3:]) - statistics.mean(rewards[:3]), "")
        row("mismatch/kl: median of the steps; goal: bfloat16's", statistics.median(kl), "nats", "<= 0.01")
        row("mismatch/abs_logp_diff_mean: median", statistics.median(every("mismatch/abs_logp_diff_mean")), "nats")
        row("mismatch/abs_logp_diff_max: largest", max(largest), "nats")
    for name_of, metric in (
        ("the trainer, held by a version: waits and copies, median", "time/broadcast"),
        ("the trainer, held by sending one, median", "time/send_weights"),
        ("a version is written beside a step, median", "time/write_weights"),
        ("a step of the trainer with its waiting, median", "time/step"),
        ("until all servers had a version, median", "time/update_weights"),
    ):
        source = "orchestrator" if metric == "time/update_weights" else "trainer"
        times = [record[metric] for record in records if metric in record and record["source"] == source][EARLY:]
        if times:
            row(name_of, statistics.median(times), "s")
    if compared := [share for share in every("perf/weights_compared") if share]:  # 0: nothing compares what came from memory
        row("compared with the published files", 100 * min(compared), "%", ">= 99")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", nargs="+", choices=RUNS, metavar="RUN", default=[name for name in RUNS if not RUNS[name].made], help=", ".join(RUNS)
    )
    parser.add_argument("--folder", type=Path, help="of the runs' directories; default: a temporary one")
    parser.add_argument("--limit", type=float, default=240.0, help="seconds for each run")
    parser.add_argument("--apart", type=float, default=2.0, help="seconds between the starts of two runs")
    args = parser.parse_args()
    import torch

    cuda = torch.cuda.is_available()
    names = [name for name in args.only if cuda or RUNS[name].cpu]
    folder = args.folder or Path(tempfile.mkdtemp())
    folder.mkdir(parents=True, exist_ok=True)
    if any(RUNS[name].made for name in names):
        made(folder / "made", cuda=cuda)
    rows: list[dict[str, object]] = []

    def run(number: int, name: str) -> list[dict[str, object]]:
        time.sleep(number * args.apart)
        began = time.monotonic()
        try:
            code = play(name, folder, cuda=cuda, limit=args.limit).returncode
        except subprocess.TimeoutExpired:
            code = 124
        found = judge(name, folder, code)
        found.append(finished(name, "the whole command, beside the others", RUNS[name].question, number=time.monotonic() - began, unit="s"))
        for row in found:
            print(json.dumps(row), flush=True)
        return found

    small = [name for name in names if not RUNS[name].made]
    with ThreadPoolExecutor(max(1, len(small)) if cuda else 1) as pool:
        for found in pool.map(run, range(len(small)), small):
            rows += found
    for name in names:
        if RUNS[name].made:
            rows += run(0, name)
    print("\n" + table(rows))


if __name__ == "__main__":
    main()
