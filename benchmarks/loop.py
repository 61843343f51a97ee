"""The whole loop of reinforcement learning: speed of rollouts and training, and where a step's time goes, as a table and JSON.

    python benchmarks/loop.py --run outputs/bench max_steps=20 model=smollm2_135m     starts `train.py` there
    python benchmarks/loop.py --run outputs/NAME                                      reads a run that is there

Everything takes part: servers, environments, orchestrator, trainer, new weights. Numbers are medians over the steps after the third, which
warm up. The trainer alone is `rlx train bench=true`; the engine beside bare clients is benchmarks/inference.py. Writes `bench_loop.json`
into the run directory.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rlx.metrics import read_metrics
from rlx.paths import RunPaths, write_text

WARMUP = 3  # steps that are not counted, if there are more
SPEEDS = {  # of a record: what it is called in the result
    "orchestrator": {
        "perf/inference_tokens_per_second": "sampled_tokens_per_second",
        "perf/rollouts_per_second": "rollouts_per_second",
        "perf/in_flight": "rollouts_in_flight",
        "perf/kv_cache_usage": "kv_cache_usage",
    },
    "trainer": {
        "perf/tokens_per_second": "trained_tokens_per_second",
        "perf/tflops": "tflops",
        "perf/mfu": "mfu",
        "perf/mfu_causal": "mfu_causal",
        "perf/compute_frac": "trainer_compute_share",
        "perf/imbalance": "imbalance",
    },
}
PARTS = {  # what a step of each consists of
    "trainer": ("time/wait_batch", "time/forward_backward", "time/optimizer", "time/broadcast"),
    "orchestrator": ("time/wait_rollouts", "time/wait_weights", "time/update_weights"),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, required=True, help="the run directory")
    args, overrides = parser.parse_known_args()
    paths = RunPaths(args.run)
    if not paths.metrics.exists():
        command = [sys.executable, str(Path(__file__).parents[1] / "train.py"), f"run.dir={args.run}", *overrides]
        if code := subprocess.run(command, check=False).returncode:
            return code
    elif overrides:
        parser.error(f"{args.run} has a run already; leave out {' '.join(overrides)}, or name another directory")
    found = measured(record for record, _ in read_metrics(paths.metrics))
    write_text(paths.root / "bench_loop.json", json.dumps(found, indent=1) + "\n")
    print("\n".join(table(found)))
    return 0


def measured(records: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The numbers of `bench_loop.json`, of the records of a run. Raises ValueError if no step is complete."""
    of: dict[str, dict[int, Mapping[str, Any]]] = {source: {} for source in PARTS}
    for record in records:
        if record["source"] in of:
            of[record["source"]][record["step"]] = record
    steps = sorted(of["trainer"].keys() & of["orchestrator"].keys())
    if not steps:
        raise ValueError("the run has no step with records of both trainer and orchestrator; it must complete one")
    counted = steps[WARMUP if len(steps) > WARMUP else 0 :]

    def median(source: str, name: str) -> float | None:
        values = [of[source][step][name] for step in counted if name in of[source][step]]
        return statistics.median(values) if values else None

    seconds = {
        source: {name.removeprefix("time/"): median(source, name) for name in ("time/step", *parts)} for source, parts in PARTS.items()
    }
    speeds = {label: median(source, name) for source, names in SPEEDS.items() for name, label in names.items()}
    peaks = [record["perf/peak_memory_gb"] for record in of["trainer"].values() if "perf/peak_memory_gb" in record]
    return {
        "steps": len(counted),
        "warmup": len(steps) - len(counted),
        "seconds": seconds,
        **{label: value for label, value in speeds.items() if value is not None},
        **({"trainer_peak_memory_gb": max(peaks)} if peaks else {}),
    }


def table(found: Mapping[str, Any]) -> list[str]:
    """The same as lines of Markdown."""
    lines = [f"| median of {found['steps']} steps after {found['warmup']} | value | share of the step |", "| --- | --- | --- |"]
    lines += [f"| {name.replace('_', ' ')} | {value:,.4g} | |" for name, value in found.items() if isinstance(value, float)]
    for source, seconds in found["seconds"].items():
        for name, value in seconds.items():
            if value is not None:
                lines.append(f"| {source}: {name.replace('_', ' ')}, s | {value:.4g} | {value / seconds['step']:.0%} |")
    return lines


if __name__ == "__main__":
    sys.exit(main())
