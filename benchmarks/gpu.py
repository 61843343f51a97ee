"""Everything that rlx computes on one NVIDIA GPU (H100, H200), in under 9 minutes: `python benchmarks/gpu.py [--write] [--out FOLDER]`.

It needs torch, triton, transformers, safetensors and numpy; pytest for the part `tests`; Liger, if it is there, has rows of its own. It
needs neither vLLM nor a network, and rlx need not be installed. Each part is a process with its own time limit, so a hang, a crash or a
lack of memory ends that part alone. Each row is printed as one JSON line when it is measured, and all of them as a table at the end:

    part, what, shape   what was measured, and on which sizes
    number, unit        medians after a warm-up, timed by CUDA events
    goal, met           met is null without a goal, and at small sizes, where the speeds mean nothing
    seconds, peak_gib   what the row took, and torch's peak of memory on the device
    versions, device    of the libraries and the GPU
    error               instead of a number, why there is none

Without a GPU every part runs at small sizes (`--small`): that shows that the script works, and nothing about speed.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from gpu_rows import Report, finished

ROOT = Path(__file__).resolve().parent.parent
RESULTS = Path(__file__).with_name("HISTORY.md")
TOTAL = 538.0  # seconds for all parts
SHORTEST = 10.0  # a part does not begin with fewer seconds left


class Part(NamedTuple):
    limit: float  # seconds
    function: str  # `module.function`; it takes a `Report`
    question: str


PARTS = {
    "op": Part(
        26, "gpu_parts.op", "Does the log-probability op reach 600 TFLOP/s, forward and backward with entropy, for every objective?"
    ),
    "tests": Part(55, "gpu_parts.tests", "Do the kernels' tests pass on this device?"),
    "attention": Part(16, "gpu_parts.attention", "How fast and how exact is attention in packed rows, beside sdpa and plain products?"),
    "head": Part(10, "gpu_parts.head", "What do a float32 head and 16-bit logits cost and err?"),
    "small_rl": Part(48, "gpu_models.small_rl", "Do steps of Qwen3-0.6B at 16k tokens reach 30k tokens/s?"),
    "lora": Part(32, "gpu_models.lora", "Do steps of Qwen3-4B with adapters reach 12k tokens/s?"),
    "large": Part(42, "gpu_models.large", "Do steps of 8B with full checkpointing reach 45 % causal MFU?"),
    "fsdp": Part(20, "gpu_models.fsdp", "Is the peak of memory under FSDP2 what the plan's formula says?"),
    "options": Part(
        90, "gpu_stack.options", "Do the trainer's options compute on this device what plain training does, and what do they cost?"
    ),
    "roles": Part(80, "gpu_stack.roles", "Does `rlx sft` run here, is its peak of memory what the plan says, and does it resume?"),
    "compile": Part(40, "gpu_models.compiled", "Do compiled layers stay compiled over six layouts of rows, and what do they gain?"),
    "write": Part(
        14, "gpu_weights.write", "How long does a version of the weights take to be copied and written, and how much holds the trainer?"
    ),
    "stager": Part(
        14, "gpu_weights.stager", "Is a checkpoint that is copied beside training whole, and how long does it hold the trainer?"
    ),
}


def run_part(name: str, limit: float, command: list[str]) -> Iterator[dict[str, Any]]:
    """Start a part and yield its rows as they come. One that fails or takes longer than `limit` seconds has a last row with an error."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])), "HF_HUB_OFFLINE": "1"}
    env.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")  # as the trainer sets it
    began = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env, text=True, start_new_session=True)
    assert process.stdout is not None
    assert process.stderr is not None
    late = threading.Event()

    def end() -> None:
        late.set()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)

    timer = threading.Timer(limit, end)
    said: list[str] = []
    reader = threading.Thread(target=lambda stream=process.stderr: said.extend(stream), daemon=True)
    timer.start()
    reader.start()
    try:
        for line in process.stdout:
            if line.startswith('{"part": '):
                yield json.loads(line)
        code = process.wait()
    finally:
        timer.cancel()
        end_of = process.poll()
        if end_of is None:
            end()
            process.wait()
    reader.join(60)  # what the part has started may keep its end open
    seconds = time.monotonic() - began
    if late.is_set():
        yield finished(name, error=f"the part was ended after its limit of {limit:.0f} s", seconds=seconds)
    elif code != 0:
        last = [line.strip() for line in said if line.strip()][-1:] or ["it printed nothing"]
        yield finished(name, error=f"exit code {code}: {last[0][:300]}", seconds=seconds)


def child(name: str, small: bool) -> None:
    """One part, in this process."""
    module, _, function = PARTS[name].function.partition(".")
    getattr(importlib.import_module(module), function)(Report(name, small=small))


def run_all(names: list[str], small: bool, total: float, patience: float, say: Callable[[str], None]) -> list[dict[str, Any]]:
    began, rows = time.monotonic(), []
    for name in names:
        left = total - (time.monotonic() - began)
        if left < SHORTEST:
            part = [finished(name, error=f"not started: {max(left, 0):.0f} s of {total:.0f} were left")]
        else:
            command = [sys.executable, str(Path(__file__).resolve()), "--part", name, *(["--small"] if small else [])]
            part = run_part(name, min(PARTS[name].limit * patience * (3 if small else 1), left), command)  # type: ignore[assignment]
        for row in part:
            rows.append(row)
            say(json.dumps(row))
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    lines = ["| part | what | shape | number | goal | met | peak GiB | s |", "| --- | --- | --- | --- | --- | --- | --- | --- |"]
    for row in rows:
        number = f"{row['number']:.4g} {row['unit']}" if row["number"] is not None else f"error: {row['error']}".replace("|", "/")
        met = {True: "yes", False: "**no**", None: ""}[row["met"]]
        peak = "" if row["peak_gib"] is None else f"{row['peak_gib']:.1f}"
        cells = [row["part"], row["what"], row["shape"], number, row["goal"] or "", met, peak, f"{row['seconds']:.1f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PARTS, metavar="PART", default=list(PARTS), help=", ".join(PARTS))
    parser.add_argument("--small", action="store_true", help="small sizes; without a GPU always")
    parser.add_argument("--total", type=float, default=TOTAL, help="seconds for all parts")
    parser.add_argument("--patience", type=float, default=1.0, help="factor on each part's own limit, for a slower machine")
    parser.add_argument("--out", type=Path, help="folder for gpu.jsonl and gpu.md")
    parser.add_argument("--write", action="store_true", help=f"append the table to {RESULTS.name}")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part:
        child(args.part, args.small)
        return
    import torch

    small, began = args.small or not torch.cuda.is_available(), time.monotonic()
    file = None
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        file = (args.out / "gpu.jsonl").open("w", buffering=1)

    def say(line: str) -> None:
        print(line, flush=True)
        if file is not None:
            file.write(line + "\n")

    rows = run_all(args.only, small, args.total, args.patience, say)
    first = finished("all", number=time.monotonic() - began, unit="s")
    versions = ", ".join(f"{name} {version}" for name, version in first["versions"].items())
    title = f"## {datetime.date.today()} One GPU: `python benchmarks/gpu.py`"
    sizes = " Small sizes: the numbers say nothing about speed." if small else ""
    questions = "\n".join(f"- `{name}`: {PARTS[name].question}" for name in args.only)
    text = f"{title}\n\n{first['device']}, {versions}; {first['number']:.0f} s in all.{sizes}\n\n{questions}\n\n{table(rows)}\n"
    print(f"\n{text}")
    if args.out:
        (args.out / "gpu.md").write_text(text)
    if args.write:
        with RESULTS.open("a") as results:
            results.write("\n" + text)


if __name__ == "__main__":
    main()
