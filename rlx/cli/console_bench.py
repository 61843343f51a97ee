"""Displays a benchmark of the trainer (`bench=true`): a table, and the same numbers in `bench.json`.

Each number is the median over the steps, without the first ones, which allocate and compile.
"""

from __future__ import annotations

import json
import statistics
from typing import Any

from rlx.cli.console import Console
from rlx.cli.display import count
from rlx.config.memory import size, trainer_memory
from rlx.paths import write_text
from rlx.plan.explain import table

WARMUP = 3  # steps that are not counted, if there are more
PARTS = {
    "time/wait_batch": "wait for batch",
    "time/forward_backward": "forward and backward",
    "time/optimizer": "optimizer",
    "time/broadcast": "gather weights",
}


class BenchConsole(Console):
    """Displays a benchmark."""

    def _numbers(self, markup: bool = False) -> str:
        trained = self.history.speed("perf/tokens_per_second", over=5)
        return f"{count(trained)} tok/s" if trained is not None else ""

    def summary(self, exit_code: int) -> str:
        """The closing text of a benchmark that ended with `exit_code`."""
        state = "ended" if self.run.status is None else self.run.status.state
        head = ["", f"{self.paths.root.name}: {state} after {self.history.steps} of {self.cfg.max_steps} steps"]
        if exit_code != 0 or not self.history.steps:
            return "\n".join([*head, *self._unfinished("train")])
        found = self.measured()
        write_text(self.paths.root / "bench.json", json.dumps(found, indent=1) + "\n")
        step = found["seconds"]["step"]
        rows = [["tokens/s", f"{count(found['tokens_per_second'])}, {found['tokens']:,.0f} tokens a step"]]
        if "mfu" in found:
            rows.append(["MFU", f"{found['mfu']:.1%}; {found['mfu_causal']:.1%} with causal attention"])
        rows.append(["TFLOP/s", f"{found['tflops']:.4g} each rank, of {found['ranks']}"])
        rows.append(["step", f"{step:.4g} s, the median of {found['steps']} steps after {found['warmup']}"])
        rows += [[f"  {name}", f"{value:.4g} s  {value / step:.0%}"] for name, value in found["seconds"].items() if name != "step"]
        of_rank = f" of rank {found['peak_memory_rank']}" if found["ranks"] > 1 else ""
        where = ("the trainer's process" if self.cfg.hardware.device == "cpu" else "the device") + of_rank
        estimate = size(found["estimated_memory_gb"] * 2**30)
        rows.append(["memory", f"{size(found['peak_memory_gb'] * 2**30)} at the peak, {where}; the plan estimates {estimate}"])
        lines = [f"  {line}" for line in table(["measured", "value"], rows)[1:]]
        return "\n".join([*head, *lines, *self._kernels(), f"  run       {self.paths.root} (bench.json)"])

    def measured(self) -> dict[str, Any]:
        """The numbers of `bench.json`."""
        records = [record for _, record in sorted(self.history.records["trainer"].items())]
        warmup = WARMUP if len(records) > WARMUP else 0
        counted = records[warmup:]
        highest = max(records, key=lambda record: record["perf/peak_memory_gb"])

        def median(name: str) -> float:
            return statistics.median(record[name] for record in counted)

        seconds = {"step": median("time/step")} | {label: median(name) for name, label in PARTS.items()}
        found: dict[str, Any] = {
            "tokens_per_second": median("perf/tokens_per_second"),
            "tokens": statistics.median(
                record["perf/tokens_per_second"] * (record["time/forward_backward"] + record["time/optimizer"]) for record in counted
            ),
            "tflops": median("perf/tflops"),
            "seconds": seconds,
            "peak_memory_gb": highest["perf/peak_memory_gb"],
            "peak_memory_rank": int(highest["perf/peak_memory_rank"]),
            "estimated_memory_gb": trainer_memory(self.cfg).device / 2**30,
            "steps": len(counted),
            "warmup": warmup,
            "ranks": self.cfg.trainer_ranks,
            "row_tokens": self.cfg.micro_batch_tokens,
            "seq_len": self.cfg.seq_len,
            "model": self.cfg.model.name,
        }
        return found | {name: median(f"perf/{name}") for name in ("mfu", "mfu_causal") if f"perf/{name}" in counted[-1]}
