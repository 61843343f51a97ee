"""Displays a benchmark (`bench=true`): a table at its end, and the same numbers in `bench.json` (`rlx.runs.measured`)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlx.cli.console import Console
from rlx.cli.display import count
from rlx.config.memory import size
from rlx.paths import write_text
from rlx.plan.explain import table
from rlx.runs.measured import BESIDE, measured


class BenchConsole(Console):
    """Displays a benchmark."""

    def __init__(self, run_dir: Path | str, cfg: Any, argv: Sequence[str] = ()) -> None:
        super().__init__(run_dir, cfg, argv)
        self.history.counted = cfg.counted

    def _numbers(self, markup: bool = False) -> str:
        if self.cfg.measured == "rl":
            return super()._numbers(markup)
        if self.cfg.measured == "inference":
            speed = self.history.last("perf/inference_tokens_per_second", "inference", over=5)
        else:
            speed = self.history.speed("perf/tokens_per_second", over=5)
        return f"{count(speed)} tok/s" if speed is not None else ""

    def summary(self, exit_code: int) -> str:
        """The closing text of a benchmark that ended with `exit_code`."""
        state = "ended" if self.run.status is None else self.run.status.state
        head = ["", f"{self.paths.root.name}: {state} after {self.history.steps} of {self.cfg.max_steps} steps"]
        if exit_code != 0 or not self.history.steps:
            return "\n".join([*head, *self._unfinished("train")])
        found = measured(self.cfg, self.history.records)
        write_text(self.paths.root / "bench.json", json.dumps(found, indent=1) + "\n")
        ends = [line.split(maxsplit=1) for line in [*self._kernels(), f"run {self.paths.root} (bench.json)"]]
        lines = [f"  {line}" for line in table(["measured", "value"], [*rows_of(found, self.cfg.hardware.device), *ends])[1:]]
        return "\n".join([*head, *lines])


def rows_of(found: Mapping[str, Any], device: str) -> list[list[str]]:
    """The rows of the table of a `bench.json`. `device`: `hardware.device`."""
    rows = [*_speeds(found)]
    if "mfu" in found:
        rows.append(["MFU", f"{found['mfu']:.1%}; {found['mfu_causal']:.1%} with causal attention{_when(found)}"])
    if "mfu_of_step" in found:
        rows.append(["  of the step", f"{found['mfu_of_step']:.1%}; {found['mfu_causal_of_step']:.1%}, waiting included"])
    if "tflops" in found:
        ranks = found.get("ranks", 1)
        whose = " each device" if "ranks" not in found else f" each of {ranks} ranks" if ranks > 1 else ""
        rows.append(["TFLOP/s", f"{found['tflops']:.3g}{whose}"])
    rows += _steps(found)
    return rows + _memory(found, device)


def _speeds(found: Mapping[str, Any]) -> list[list[str]]:
    if found["role"] == "trainer":
        return [["tokens/s", f"{count(found['tokens_per_second'])}, {found['tokens']:,.0f} tokens a step"]]
    sampled = f"{count(found['sampled_tokens_per_second'])} tokens/s, {found['rollouts_per_second']:.4g} "
    of_cache = []
    if "kv_cache_usage" in found:
        cache = f"{found['kv_cache_usage']:.0%} in use, {found['running']:.4g} decoded, {found['waiting']:.4g} queued"
        when = " as a step ends" if found["role"] == "rl" else ""
        of_cache = [["cache", f"{cache}{when}, {found['preemptions']:.0f} preempted in the run"]]
    if found["role"] == "rl":
        trained = f"{count(found['trained_tokens_per_second'])} tokens/s while it computes, {found['tokens']:,.0f} tokens a step"
        rows = [["trained", trained], ["sampled", f"{sampled}rollouts/s of {found['tokens_per_rollout']:,.0f} tokens"]]
        return [*rows, ["lag", f"{found['lag']:.3g} version{'' if found['lag'] == 1 else 's'}"], *of_cache]
    prompts = f"{count(found['prompt_tokens_per_second'])} tokens/s, cached ones included"
    rows = [["sampled", f"{sampled}requests/s, {found['in_flight']:.0f} in flight"], ["prompts", prompts]]
    rows += [["first token", f"{duration(found['first_token_seconds'])} beside the load"]] if "first_token_seconds" in found else []
    return [*rows, ["request", duration(found["request_seconds"])], *of_cache]


def duration(seconds: float) -> str:
    """`12.3 s` or `4.5 ms`."""
    if seconds >= 0.9995:
        return f"{seconds:.4g} s"
    return f"{1e3 * seconds:.3g} ms"


def _when(found: Mapping[str, Any]) -> str:
    return ", while the trainer computes" if found["role"] == "rl" else ""


def _steps(found: Mapping[str, Any]) -> list[list[str]]:
    """Where the time of a step goes, of each role that has one."""
    rows = []
    when = ", beside the others" if found.get("lag") else ", in the wait for weights"  # on policy, all rollouts wait for it
    for source, seconds in found["seconds"].items():
        step = seconds["step"]
        whose = f"{source}'s step" if found["role"] == "rl" else "step"
        rows.append([whose, f"{duration(step)}, the median of {found['steps']} steps after the first {found['warmup']}"])
        for name, value in seconds.items():
            if name != "step":
                rows.append([f"  {name}", f"{duration(value)}  {value / step:.0%}{when if name == BESIDE else ''}"])
    return rows


def _memory(found: Mapping[str, Any], device: str) -> list[list[str]]:
    """The peak of each role beside the estimate."""
    rows: list[list[str]] = []
    for role, memory in found["memory"].items():
        on_host = device == "cpu" or role not in ("trainer", "inference")
        whose = {"trainer": "the trainer's", "inference": "a server's", "orchestrator": "the orchestrator's"}.get(role, f"an {role}'s")
        of_rank = f" of rank {memory['rank']}" if role == "trainer" and found["ranks"] > 1 else ""
        where = f"{whose} {'process' if on_host else 'device'}{of_rank}"
        aside = " without Python and its libraries" if on_host else ""
        estimate = f"; the plan estimates {size(memory['estimated_gb'] * 2**30)}{aside}" if "estimated_gb" in memory else ""
        rows.append(["memory" if not rows else "", f"{size(memory['peak_gb'] * 2**30)} at the peak, {where}{estimate}"])
    return rows
