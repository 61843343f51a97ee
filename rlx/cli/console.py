"""Displays a run that trains (`rlx train`, `rlx sft`): steps, reward or loss, lag, speed, and what took the time. One table serves all of
them, also benchmarks and shared trainers: a number that no record has is left out."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlx.checkpoints.folders import best_of
from rlx.cli.bench import rows_of
from rlx.cli.display import Display, Progress, count, sparkline
from rlx.config.schema import SftRoot
from rlx.config.strangers import is_mine
from rlx.invocation import program
from rlx.paths import write_text
from rlx.rollout.failures import in_words
from rlx.runs.bench_summary import STAGES, measured
from rlx.runs.members import members_in
from rlx.runs.status import read_status
from rlx.terminal import clock

CURVES = {"reward": ("reward/mean", "orchestrator"), "loss": ("loss/nll", "trainer"), "val": ("val/loss", "val")}
NUMBERS: tuple[tuple[str, str, tuple[str, ...]], ...] = (  # of the newest step: text, source, metrics
    ("lag {:.1f} (max {:.0f})", "trainer", ("off_policy/lag_mean", "off_policy/lag_max")),
    ("epoch {:.2f}", "trainer", ("data/epoch",)),
    ("{:.0f} runs", "trainer", ("perf/runs",)),
)
SPEEDS = {"perf/inference_tokens_per_second": "sampled", "perf/tokens_per_second": "trained"}
LEFT_OUT = {
    "overlong": "samples longer than seq_len",
    "truncated": "samples cut to seq_len",
    "refused": "rows that cannot be marked",
}
NEWEST = 5  # steps whose means are shown


class Console(Display):
    """Displays a run that trains."""

    def __init__(self, run_dir: Path | str, cfg: Any) -> None:
        super().__init__(run_dir, cfg)
        self.history.counted = cfg.progress_source if cfg.bench else "trainer"

    # while it runs

    def progress(self) -> Progress | None:
        steps, total, pace = self.history.steps, self.cfg.max_steps, self.history.steps_per_second()
        if steps <= self.history.first:  # until then, the newest values are those of an earlier attempt
            return None
        details = "   ".join([*self._numbers(), *([f"{pace:.2f} steps/s"] if pace else [])])
        curve = next((line for line in map(sparkline, self._curves().values()) if line), "")
        more = "\n".join(filter(None, [curve, *(f"{source} {text}" for source, text in self._times(NEWEST))]))
        return Progress("step", steps, total, details, more, (total - steps) / pace if pace else None)

    def _curves(self) -> dict[str, list[float]]:
        return {label: self.history.series(*names) for label, names in CURVES.items()}

    def _numbers(self) -> Iterator[str]:
        """What the trainer's newest step has: rewards, losses and their evaluations, lag, speeds."""
        h = self.history
        for label, (name, source) in CURVES.items():
            value, at = h.trained(name, source), max(h.records[source], default=0)
            if value is not None:
                yield f"{label} {value:.3f}" + (f" (step {at})" if label == "val" else "")
        yield from (f"eval {name} {values[step]:.3f} (step {step})" for name, values in h.scores(h.first).items() for step in [max(values)])
        for text, source, names in NUMBERS:
            values = [h.trained(name, source) for name in names]
            if None not in values:
                yield text.format(*values)
        for name, what in SPEEDS.items():
            speed = h.speed(name, over=NEWEST) or h.last(name, "inference", over=NEWEST)
            if speed is not None:
                yield f"{count(speed)} tok/s {what}"

    def _times(self, over: int = 0) -> Iterator[tuple[str, str]]:
        """What each role spent its time on in the last steps (0: in all). It shows which one waits for the other."""
        h = self.history
        for source, stages in STAGES.items():
            seconds = sum(h.series("time/step", source)[-over:])
            shares = [(sum(h.series(name, source)[-over:]) / seconds, label) for name, label in stages.items()] if seconds else []
            text = " · ".join(f"{label} {share:.0%}" for share, label in sorted(shares, reverse=True) if share >= 0.005)
            if text:
                yield source, f"{clock(seconds)}: {text}"

    # at its end

    def results(self) -> list[tuple[str, str]]:
        rows = [*self._benchmark(), *self._members(), *self._learned(), *self._evaluations()]
        rows += [("time", f"{source} {text}") for source, text in self._times()]
        speeds = [(self.history.speed(name), what) for name, what in SPEEDS.items()]
        parts = [f"{pace:.2f} steps/s" for pace in [self.history.steps_per_second(over=10**9)] if pace]
        parts += [f"{count(speed)} tokens/s {what}" for speed, what in speeds if speed is not None]
        rows += [("speed", " · ".join(parts))] if parts else []
        rows.append(("dropped", ", ".join(self._dropped()) or "nothing"))
        if self.paths.failures.is_file():
            rows += [("failed", line) for line in in_words(json.loads(self.paths.failures.read_text()))]
        if self.paths.kernels.is_file():
            kernels = json.loads(self.paths.kernels.read_text())
            rows.append(("kernels", f"log-probabilities by {kernels['logprob']} · Liger's layer kernels {kernels['layers']}"))
            rows += [("warning", kernels["warning"])] if "warning" in kernels else []
        return rows

    def _reached(self) -> str:
        common = " common" if self.cfg.is_shared_trainer else f" of {self.cfg.max_steps}"
        return f" after {self.history.steps}{common} steps"

    def _learned(self) -> Iterator[tuple[str, str]]:
        for label, values in self._curves().items():
            first, last = values[:NEWEST], values[-NEWEST:]
            if values:
                ends = f"{sum(first) / len(first):.3f} → {sum(last) / len(last):.3f}"
                yield label, f"{ends}  {sparkline(values)}  (means of the first and last {len(last)})"

    def _evaluations(self) -> Iterator[tuple[str, str]]:
        """The first and the last evaluation of each environment, and the checkpoint that `ckpt.keep_best` keeps."""
        for name, values in self.history.scores().items():
            first, last = min(values), max(values)
            metric, record = f"eval/{name.replace(' ', '/')}", self.history.records["eval"][last]
            ends = [record[end] for end in (f"{metric}_low", f"{metric}_high") if end in record]
            interval = f"  [{ends[0]:.3f}, {ends[1]:.3f}]" if len(ends) == 2 else ""
            yield "eval", f"{name}: {values[first]:.3f} → {values[last]:.3f} at step {last}{interval}"
        if self.cfg.ckpt.keep_best is not None and (best := best_of(self.paths, self.cfg.ckpt.keep_best)) is not None:
            yield "best", f"{self.cfg.ckpt.keep_best} {best[0]:.3f}: {self.paths.checkpoint_of(best[1])}"

    def _dropped(self) -> Iterator[str]:
        """Rollouts that were not trained, by cause; rows of supervised data that were not."""
        records = self.history.records["orchestrator"]
        for name, number in (records[max(records)] if records else {}).items():
            if number and name.startswith(("rollouts/dropped_", "rollouts/failed_")):
                yield f"{number:.0f} {name.partition('/')[2].replace('_', ' ')}"
        for name, text in LEFT_OUT.items():
            if number := sum(self.history.series(f"data/{name}", "trainer")):
                yield f"{number:.0f} {text}"
            if number := self.history.last(f"val/{name}", "val"):  # the same rows at every validation
                yield f"of the validation {number:.0f} {text}"

    def _benchmark(self) -> list[tuple[str, str]]:
        """The numbers of `bench.json`, which is written here."""
        status = self.run.status
        if not self.cfg.bench or not self.history.steps or status is None or status.state != "completed":
            return []
        found = measured(self.cfg, self.history.records)
        write_text(self.paths.root / "bench.json", json.dumps(found, indent=1) + "\n")
        return [*(("measured", line) for line in rows_of(found)), ("numbers", str(self.paths.root / "bench.json"))]

    def _members(self) -> Iterator[tuple[str, str]]:
        """The runs of a shared trainer."""
        for name in members_in(self.paths.root) if self.cfg.is_shared_trainer else ():
            status = read_status(self.paths.member(name.removeprefix("run_")))
            if status is not None:
                yield name, f"{status.state}, {status.step} of {status.max_steps} steps"

    def suggestions(self) -> list[str]:
        root = self.paths.root
        lines = [f"bash {shlex.quote(str(root / 'reproduce.sh'))}   # the same run again"] if is_mine(root) else []
        if isinstance(self.cfg, SftRoot) and not self.cfg.lora.enabled:  # adapters are no model to start from
            weights = shlex.quote(f"model.name={self.paths.weights_of(self.cfg.max_steps)}")
            lines.append(f"{program()} env=… model=… {weights}   # reinforcement learning from the result")
        if self.run.rollouts:  # a replay has none, nor a run with orchestrator.save_rollouts=false
            lines.append(f"{program('view')} {shlex.quote(str(root))}   # what the policy wrote, rollout by rollout")
        return lines
