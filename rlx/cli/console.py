"""Displays a run of `rlx train`: steps, reward, lag, speed, and what took the time."""

from __future__ import annotations

import json
import shlex
import time
from typing import Any

from rlx.checkpoints.best import best_of
from rlx.checkpoints.folders import steps as checkpoints
from rlx.cli.display import LINE_INTERVAL, OF_ONE_RUN, Display, clock, count, sparkline, tell
from rlx.config.schema import EvaluatedRun
from rlx.rollout.failures import in_words
from rlx.runs.measured import STAGES
from rlx.started import program
from rlx.terminal import shown

STOPPED = ("interrupted", "preempted")  # states of a run that was stopped from outside
WAITS = 0.15  # share of its time above which one side is said to wait for the other


class Console(Display):
    """Displays a run of `rlx train`."""

    cfg: EvaluatedRun

    # live, on a terminal

    def _head(self) -> list[Any]:
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        steps, total = self.history.steps, self.cfg.max_steps
        if not self.history.begun:
            return []
        pace = self.history.steps_per_second()
        head = Table.grid(padding=(0, 2))
        eta = f"ETA {clock((total - steps) / pace)}" if pace else ""
        head.add_row(
            f"step [bold]{steps}[/]/{total}",
            ProgressBar(total=total, completed=steps, width=30),
            f"{pace:.2f} steps/s" if pace else "",
            eta,
        )
        lines = [self._stages(), self._balance()]
        return [head, Text.from_markup(self._numbers(markup=True)), Text(shown("\n".join(filter(None, lines))), style="dim")]

    def _numbers(self, markup: bool = False) -> str:
        """Reward, lag and speed of the last steps."""
        h = self.history
        reward = h.trained("reward/mean", "orchestrator")
        parts = []
        if reward is not None:
            text = f"reward {reward:.3f}"
            curve = sparkline(h.series("reward/mean", "orchestrator")) if markup else ""
            parts.append(f"[bold]{text}[/] [green]{curve}[/]" if markup else text)
        parts += self._scores()
        lag, lag_max = h.last("off_policy/lag_mean", "trainer"), h.last("off_policy/lag_max", "trainer")
        if lag is not None and lag_max is not None:
            parts.append(f"lag {lag:.1f} (max {lag_max:.0f})")
        sampled = h.speed("perf/inference_tokens_per_second", over=5)
        trained = h.speed("perf/tokens_per_second", over=5)
        if sampled is not None:
            parts.append(f"{count(sampled)} tok/s sampled")
        if trained is not None:
            parts.append(f"{count(trained)} tok/s trained")
        return "   ".join(parts)

    def _scores(self) -> list[str]:
        """The newest evaluation of each environment in this attempt."""
        found = self.history.scores(self.history.first).items()
        return [f"eval {name} {values[step]:.3f} (step {step})" for name, values in found for step in [max(values)]]

    def _stages(self) -> str:
        """Mean seconds of each stage over the last steps; they show which role waits for the other."""
        parts = []
        for source, stages in STAGES.items():
            values = [(label, self.history.last(name, source, over=5)) for name, label in stages.items()]
            shown = " · ".join(f"{label} {value:.2f} s" for label, value in values if value is not None)
            if shown:
                parts.append(f"{source}: {shown}")
        return "\n".join(parts)

    def _balance(self) -> str:
        """Which of sampling and training waits for the other, over the last steps; empty if that is not known."""
        trainer, orchestrator = (self._share(*each) for each in (("time/wait_batch", "trainer"), ("time/wait_weights", "orchestrator")))
        if trainer is None or orchestrator is None:
            return ""
        if max(trainer, orchestrator) < WAITS:
            return "neither sampling nor training waits for the other"
        if trainer >= orchestrator:
            return f"the trainer waits for rollouts {trainer:.0%} of its time: sampling is slower"
        return f"sampling waits for weights {orchestrator:.0%} of its time: training is slower"

    def _share(self, metric: str, source: str) -> float | None:
        """A stage's share of its role's last steps."""
        stage, step = (self.history.last(name, source, over=5) for name in (metric, "time/step"))
        return stage / step if stage is not None and step else None

    # plain lines

    def _lines(self, final: bool = False) -> None:
        steps = self.history.steps
        if steps <= self.history.first:
            self._new_phases()
            return
        now = time.time()
        if steps > self._printed_step and (final or steps == self.cfg.max_steps or now - self._printed_at >= LINE_INTERVAL):
            self._printed_step, self._printed_at = steps, now
            pace = self.history.steps_per_second()
            eta = f"   {pace:.2f} steps/s   ETA {clock((self.cfg.max_steps - steps) / pace)}" if pace else ""
            tell(f"[{clock(now - self.started)}] step {steps}/{self.cfg.max_steps}   {self._numbers()}{eta}")

    # the end

    def summary(self, exit_code: int) -> str:
        """The closing text of a run that ended with `exit_code`."""
        h, root = self.history, self.paths.root
        status = self.run.status
        state = "ended" if status is None else status.state
        lines = [
            "",
            f"{root.name}: {state} after {h.steps} of {self.cfg.max_steps} steps{self._newest(state)}, {clock(time.time() - self.started)}",
        ]
        rewards = h.series("reward/mean", "orchestrator")
        if rewards:
            first, last = rewards[:5], rewards[-5:]
            start, end = sum(first) / len(first), sum(last) / len(last)
            lines.append(f"  reward    {start:.3f} → {end:.3f}  {sparkline(rewards)}  (means of the first and last {len(last)} steps)")
        lines += self._evaluations()
        for source, stages in STAGES.items():
            total = sum(h.series("time/step", source))
            if not total:
                continue
            shares = [(label, sum(h.series(name, source)) / total) for name, label in stages.items()]
            shown = " · ".join(f"{label} {share:.0%}" for label, share in sorted(shares, key=lambda s: -s[1]) if share >= 0.005)
            lines.append(f"  time      {source} {clock(total)}: {shown}")
        sampled, trained = h.speed("perf/inference_tokens_per_second"), h.speed("perf/tokens_per_second")
        pace = h.steps_per_second(over=10**9)
        if sampled is not None and trained is not None and pace is not None:
            lines.append(f"  speed     {pace:.2f} steps/s · {count(sampled)} tokens/s sampled · {count(trained)} tokens/s trained")
        drops = self._drops()
        lines.append(f"  dropped   {', '.join(f'{n:.0f} {cause}' for cause, n in drops.items()) or 'no rollout'}")
        if status is not None and status.restarts:
            self._restarts = status.restarts
            lines.append(f"  restarted {self._restarted()}")
        if self.paths.failures.exists():
            failures = in_words(json.loads(self.paths.failures.read_text()))
            lines += [f"{'  failed    ' if n == 0 else ' ' * 12}{line}" for n, line in enumerate(failures)]
        lines += self._kernels()
        lines.append(f"  run       {root}")
        lines += self._next(exit_code)
        return "\n".join(lines)

    def _kernels(self) -> list[str]:
        """What `auto` chose in the trainer."""
        if not self.paths.kernels.exists():
            return []
        kernels = json.loads(self.paths.kernels.read_text())
        line = f"  kernels   log-probabilities by {kernels['logprob']} · Liger's layer kernels {kernels['layers']}"
        return [line, f"  warning   {kernels['warning']}"] if "warning" in kernels else [line]

    def _evaluations(self) -> list[str]:
        """The first and the last evaluation of each environment, and the checkpoint that `ckpt.keep_best` keeps."""
        lines = []
        for name, values in self.history.scores().items():
            first, last = min(values), max(values)
            metric = f"eval/{name.replace(' ', '/')}"
            record = self.history.records["eval"][last]
            ends = [record[end] for end in (f"{metric}_low", f"{metric}_high") if end in record]
            interval = f"  [{ends[0]:.3f}, {ends[1]:.3f}]" if len(ends) == 2 else ""
            start = f"{values[first]:.3f} → " if first != last else ""
            lines.append(f"  eval      {name}: {start}{values[last]:.3f} at step {last}{interval}")
        if self.cfg.ckpt.keep_best is not None and (best := best_of(self.paths, self.cfg.ckpt.keep_best)) is not None:
            value, step = best
            lines.append(f"  best      {self.cfg.ckpt.keep_best} {value:.3f}: {self.paths.checkpoint_of(step)}")
        return lines

    def _drops(self) -> dict[str, float]:
        records = self.history.records["orchestrator"]
        if not records:
            return {}
        last = records[max(records)]
        prefixes = ("rollouts/dropped_", "rollouts/failed_")
        return {name.split("/", 1)[1].replace("_", " "): value for name, value in last.items() if name.startswith(prefixes) and value}

    def _newest(self, state: str) -> str:
        """The checkpoint from which a stopped run can go on; empty for other runs."""
        if state not in STOPPED:
            return ""
        steps = checkpoints(self.paths)
        return f"; the newest checkpoint is step {steps[-1]}" if steps else "; there is no checkpoint"

    def _unfinished(self, command: str) -> list[str]:
        """Where the logs are; and, if the run was stopped, the command that goes on with its own configuration."""
        lines, status = [f"  look at   {self.paths.latest_logs}/"], self.run.status
        if status is not None and status.state in STOPPED:
            directory = shlex.quote(str(self.paths.root))
            lines.insert(0, f"  go on     {program(command)} --config-dir {directory} --config-name config resume=latest")
        return lines

    def _next(self, exit_code: int) -> list[str]:
        root = self.paths.root
        if exit_code != 0:
            return self._unfinished("train")
        train = program()
        kept = [part for part in self.argv if part.lstrip("+").partition("=")[0] not in OF_ONE_RUN or _is_fork(part)]
        kept += ["run.name=null", "run.dir=null"] if "--config-name" in kept else []  # that of a run has both
        suggestions = [
            (f"{train} {shlex.join([*kept, f'seed={self.cfg.seed + 1}'])}", "another seed"),
            (f"bash {shlex.quote(str(root / 'reproduce.sh'))}", "the same run again"),
        ]
        if self.run.rollouts:  # a replay has none, nor a run with orchestrator.save_rollouts=false
            suggestions.append((f"{program('view')} {shlex.quote(str(root))}", "what the policy wrote, rollout by rollout"))
        return [f"{'  next      ' if n == 0 else ' ' * 12}{command}   # {what}" for n, (command, what) in enumerate(suggestions)]


def _is_fork(part: str) -> bool:
    """Whether `resume=` names another run's checkpoint, which the suggested run can also start from."""
    key, _, value = part.partition("=")
    return key == "resume" and value not in ("latest", "null", "") and not value.isdecimal()
