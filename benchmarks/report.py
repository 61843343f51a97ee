"""How long `rlx report` takes for a sweep of 64 runs of 500 steps, and how large its page is.

    python benchmarks/report.py [--elements 64] [--steps 500] [--runs 3] [--keep FOLDER]

The directories are made as a sweep makes them; their metrics are random numbers under the names and in the number of a real run's.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import zstandard

from rlx.config.load import compose
from rlx.config.schema import Config, RunConfig
from rlx.metrics import METRICS
from rlx.plan.make import make_plan
from rlx.runs.run_dir import create
from rlx.runs.status import Status

LOSSES = ("grpo", "gspo", "cispo", "dr_grpo")
ORCHESTRATOR_ENDS = "perf/cpu_ms_per_rollout"  # the names of METRICS up to this one are the orchestrator's


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elements", type=int, default=64)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--keep", type=Path, help="make the sweep here and leave it")
    args = parser.parse_args()
    with nullcontext(str(args.keep)) if args.keep else tempfile.TemporaryDirectory() as folder:
        sweep = Path(folder) / "sweep"
        make(sweep, args.elements, args.steps)
        seconds = []
        for _ in range(args.runs):
            started = time.perf_counter()
            subprocess.run([sys.executable, "-m", "rlx.cli", "report", str(sweep)], check=True, stdout=subprocess.DEVNULL)
            seconds.append(time.perf_counter() - started)
        size = (sweep / "report.html").stat().st_size / 1e6
        lines = sum(path.stat().st_size for path in sweep.glob("*/metrics.jsonl")) / 1e6
    print("| what | median s | range | goal |\n| --- | --- | --- | --- |")
    what = f"report of {args.elements} runs of {args.steps} steps ({lines:.0f} MB of metrics; the page has {size:.1f} MB)"
    print(f"| {what} | {statistics.median(seconds):.2f} | {min(seconds):.2f}–{max(seconds):.2f} | ≤ 10 |")


def make(sweep: Path, elements: int, steps: int) -> None:
    """Run directories with random metrics: four objectives, the other runs are seeds; one run failed half-way."""
    composed = {loss: compose([f"loss={loss}", f"max_steps={steps}"], {}).cfg for loss in LOSSES}
    for number in range(elements):
        loss, seed = LOSSES[number % len(LOSSES)], number // len(LOSSES)
        name = f"loss={loss},seed={seed}"
        cfg: Config = replace(composed[loss], seed=seed, run=RunConfig(name=name, dir=str(sweep / name)))
        paths, lock = create(cfg, [f"max_steps={steps}", f"loss={loss}", f"seed={seed}"], make_plan(cfg, sweep / name))
        lock.close()
        done = steps // 2 if number == elements - 1 else steps
        write_metrics(paths.metrics, done, random.Random(number))
        paths.rollouts.mkdir()
        for step in (0, done - 1):
            paths.rollouts_of(step).write_bytes(zstandard.ZstdCompressor().compress(rollouts(step)))
        status = Status(step=done, max_steps=steps)
        status.finish("completed" if done == steps else "failed")
        status.write(paths)


def write_metrics(path: Path, steps: int, draws: random.Random) -> None:
    """Records of three sources, as long as those of a real run."""
    names = [name.replace("<env>", "reverse_text").replace("<function>", "exact") for name in METRICS if not name.startswith("eval/")]
    names = [name for name in names if "<" not in name]
    cut = names.index(ORCHESTRATOR_ENDS) + 1
    sources = {"orchestrator": names[:cut], "trainer": names[cut:-7], "inference": names[-7:-2]}
    with path.open("w", encoding="utf-8") as file:
        for step in range(steps):
            for source, found in sources.items():
                values = {name: draws.random() * (1 + step / steps) for name in found}
                file.write(json.dumps({"step": step, "source": source, "time": time.time(), **values}) + "\n")


def rollouts(step: int) -> bytes:
    record = {"env": "reverse_text", "example_id": 1, "group": step, "num_tokens": 5, "stop": "stop", "advantage": 0.5}
    messages = {"prompt": [{"role": "user", "content": "abc"}], "completion": [{"role": "assistant", "content": "cba"}]}
    return b"".join(json.dumps({**record, **messages, "reward": n / 256}).encode() + b"\n" for n in range(256))


if __name__ == "__main__":
    main()
