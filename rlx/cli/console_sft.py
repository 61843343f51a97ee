"""Displays a run of `rlx sft`: steps, loss, validation loss, speed, and what took the time."""

from __future__ import annotations

import json
import shlex
import time
from pathlib import Path

from rlx.cli.console import Console
from rlx.cli.display import OF_ONE_RUN, clock, count, sparkline
from rlx.config.schema import SftRoot
from rlx.config.shipped import shipped_groups
from rlx.rollout.synthesized import METADATA
from rlx.runs.measured import STAGES
from rlx.started import program

LOSS, VAL = "loss/nll", "val/loss"
LEFT_OUT = {
    "overlong": "samples longer than seq_len",
    "truncated": "samples cut to seq_len",
    "refused": "rows that cannot be marked",
}


class SftConsole(Console):
    """Displays a run of `rlx sft`."""

    cfg: SftRoot

    def _numbers(self, markup: bool = False) -> str:
        """Loss and speed of the last steps, and the newest validation."""
        h, parts = self.history, []
        if (loss := h.last(LOSS, "trainer")) is not None:
            text = f"loss {loss:.3f}"
            parts.append(f"[bold]{text}[/] [green]{sparkline(h.series(LOSS, 'trainer'))}[/]" if markup else text)
        if validated := {step: record[VAL] for step, record in h.records["val"].items() if step >= h.first}:
            step = max(validated)
            parts.append(f"val {validated[step]:.3f} (step {step})")
        parts += self._scores()
        if (epoch := h.last("data/epoch", "trainer")) is not None:
            parts.append(f"epoch {epoch:.2f}")
        if (trained := h.speed("perf/tokens_per_second", over=5)) is not None:
            parts.append(f"{count(trained)} tok/s")
        return "   ".join(parts)

    def summary(self, exit_code: int) -> str:
        """The closing text of a run that ended with `exit_code`."""
        h, root, status = self.history, self.paths.root, self.run.status
        state = "ended" if status is None else status.state
        lines = [
            "",
            f"{root.name}: {state} after {h.steps} of {self.cfg.max_steps} steps{self._newest(state)}, {clock(time.time() - self.started)}",
        ]
        if losses := h.series(LOSS, "trainer"):
            first, last = losses[:5], losses[-5:]
            start, end = sum(first) / len(first), sum(last) / len(last)
            lines.append(
                f"  loss      {start:.3f} → {end:.3f}  {sparkline(losses)}  (nats a token; means of the first and last {len(last)} steps)"
            )
        if validated := {step: record[VAL] for step, record in h.records["val"].items()}:
            best = min(validated, key=lambda step: (validated[step], step))
            start, end = validated[min(validated)], validated[max(validated)]
            curve = sparkline([validated[step] for step in sorted(validated)])
            lines.append(f"  val       {start:.3f} → {end:.3f}  {curve}  (lowest {validated[best]:.3f}, at step {best})")
        lines += self._evaluations()
        if total := sum(h.series("time/step", "trainer")):
            shares = [(sum(h.series(name, "trainer")) / total, label) for name, label in STAGES["trainer"].items()]
            shown = " · ".join(f"{label} {share:.0%}" for share, label in sorted(shares, reverse=True) if share >= 0.005)
            lines.append(f"  time      trainer {clock(total)}: {shown}")
        pace, trained = h.steps_per_second(over=10**9), h.speed("perf/tokens_per_second")
        if pace is not None and trained is not None:
            lines.append(f"  speed     {pace:.2f} steps/s · {count(trained)} tokens/s trained")
        of_training = {text: sum(h.series(f"data/{name}", "trainer")) for name, text in LEFT_OUT.items()}
        held_out = {text: h.last(f"val/{name}", "val") or 0 for name, text in LEFT_OUT.items()}  # the same rows at every validation
        lost = f"; of the validation {_counted(held_out)}" if any(held_out.values()) else ""
        lines.append(f"  left out  {_counted(of_training) or 'nothing'}{lost}")
        return "\n".join([*lines, *self._kernels(), f"  run       {root}", *self._next(exit_code)])

    def _next(self, exit_code: int) -> list[str]:
        root = self.paths.root
        if exit_code != 0:
            return self._unfinished("sft")
        kept = [part for part in self.argv if part.lstrip("+").partition("=")[0] not in OF_ONE_RUN]
        kept += ["run.name=null", "run.dir=null"] if "--config-name" in kept else []  # that of a run has both
        sft, train = (program(command) for command in ("sft", "train"))
        weights = shlex.quote(f"model.name={self.paths.weights_of(self.cfg.max_steps)}")
        learn = (f"{train} {self._learner(kept)} {weights}", "reinforcement learning from the result")
        suggestions = [
            *([] if self.cfg.lora.on else [learn]),  # adapters are no model to start from
            (f"{sft} {shlex.join([*kept, f'seed={self.cfg.seed + 1}'])}", "another seed"),
            (f"bash {shlex.quote(str(root / 'reproduce.sh'))}", "the same run again"),
        ]
        return [f"{'  next      ' if n == 0 else ' ' * 12}{command}   # {what}" for n, (command, what) in enumerate(suggestions)]

    def _learner(self, given: list[str]) -> str:
        """The options of environments and model for reinforcement learning: the experiment of this run if it has one."""
        model = [part for part in given if part.startswith("model=")]
        if self.cfg.model.warm_start is not None:
            model = ["model=tiny_trained"]  # whose weights come from a folder
        if experiment := [part for part in given if part.startswith("experiment=")]:
            places = [n for n, part in enumerate(given) if part.startswith("--config-dir")]
            folder = [part for n in places for part in given[n : n + (1 if "=" in given[n] else 2)]]
            return shlex.join([*folder, *experiment, *model])
        return f"{self._env()} {shlex.join(model) or 'model=…'}"

    def _env(self) -> str:
        """The environments that the run evaluates on, or that `rlx synthesize` played for the data, if they are shipped options; otherwise
        a gap to fill."""
        metadata = Path(self.cfg.data.name).expanduser().with_name(METADATA) if self.cfg.data.name else None
        options = {path.stem for path in shipped_groups()["env"].glob("*.yaml")} - {"custom"}
        envs = list(self.cfg.envs)
        if not envs and metadata is not None and metadata.is_file():
            envs = list(json.loads(metadata.read_text()).get("environments", ()))
        if not envs or not options.issuperset(envs):
            return "env=…"
        return f"env={envs[0]}" if len(envs) == 1 else shlex.quote(f"env=[{','.join(envs)}]")


def _counted(left: dict[str, float]) -> str:
    return ", ".join(f"{number:.0f} {text}" for text, number in left.items() if number)
