"""`rlx synthesize`: play environments with a model, and write what is worth learning as supervised data."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlx.cli.start import Command
    from rlx.config.schema_synthesize import SynthesizeRoot

SUMMARY = "make training data: play environments with a model, keep what scored well"


def help_text() -> str:
    return f"""\
rlx synthesize: {SUMMARY}.

usage: rlx synthesize env=NAME [GROUP=OPTION …] [key=value …]

  rlx synthesize env=tool_math model=qwen3_0_6b rollouts_per_example=8 num_examples=500 min_reward=1
                                                        every rollout that scored 1, once
  rlx synthesize env=[math,countdown] weights_dir=outputs/mine prefer=best per_example=1
                                                        with a run's newest weights; the best rollout of each example
  rlx synthesize env=sums client.base_url=https://api.example.com/v1 client.api_key_var=MY_KEY model.name=big-model
                                                        with a model that somebody else serves
  rlx synthesize run.name=mine resume=latest            go on after a kill; nothing is played twice. Give the same keys
  rlx synthesize --config-dir outputs/mine --config-name config resume=latest play=false min_reward=0.5
                                                        choose again from what was played; starts no server

The data is `data/train.parquet` of the run directory, or `train.jsonl` with format=jsonl; `data/metadata.json` says where it comes from.
`rlx sft` reads it. docs/synthesis.md has the columns and the rules, docs/configuration.md all keys.

exit codes: 0 done; 1 it failed, or no rollout is kept; 2 the configuration is invalid and nothing was started; 130 interrupted"""


def run(argv: list[str]) -> int:
    from rlx.cli.start import run as start

    return start(argv, command())


def command() -> Command:
    """The command, for `rlx.cli.start`."""
    from rlx.cli.start import Command
    from rlx.config.roots import SYNTHESIZE

    return Command(SYNTHESIZE, _display(), resolve)


def resolve(cfg: SynthesizeRoot) -> SynthesizeRoot:
    """The configuration with an absolute folder of weights and the step in it. Raises ConfigError if that step is not there."""
    from dataclasses import replace

    from rlx.config.errors import ConfigError
    from rlx.config.inherited import find_weights
    from rlx.paths import COMPLETE

    if cfg.weights_dir is None:
        return cfg
    folder, _ = find_weights(cfg.weights_dir)
    steps = sorted(int(path.parent.name.removeprefix("step_")) for path in folder.glob(f"step_*/{COMPLETE}"))
    if not steps and cfg.step is None:
        raise ConfigError(
            f"weights_dir={cfg.weights_dir} has no complete step_N.\n  fix: name another run, or step=0 for its initial model"
        )
    if cfg.step not in (None, 0, *steps):
        shown = ", ".join(map(str, steps)) or "none"
        raise ConfigError(f"step={cfg.step} is not among the complete weights of {folder}: {shown}.\n  fix: choose one of them, or step=0")
    return replace(cfg, weights_dir=str(folder), step=steps[-1] if cfg.step is None else cfg.step)


def _display() -> Any:
    """The display's class. It is made here because `rlx --help` imports this module and must not wait for the rest."""
    from rlx.cli.display import LINE_INTERVAL, Display, clock
    from rlx.cli.synthesized import closing_lines

    class SynthesisDisplay(Display):
        """Displays one run of `rlx synthesize`: how many rollouts are played, then what was kept."""

        def _progress(self) -> tuple[int, int, str] | None:
            """Rollouts played, rollouts wanted, and further words; None before the first."""
            phase = self._beats().get("synthesizer", {}).get("phase", "")
            if not phase.startswith("playing "):
                return None
            numbers, _, more = phase.removeprefix("playing ").partition(", ")
            played, total = map(int, numbers.split("/"))
            return played, total, more

        def _rate(self, played: int) -> float:
            """Rollouts a second in this attempt."""
            if not hasattr(self, "_begin"):
                self._begin = (time.monotonic(), played)
            seconds = time.monotonic() - self._begin[0]
            return (played - self._begin[1]) / seconds if seconds > 1 else 0.0

        def _text(self, played: int, total: int, more: str) -> str:
            rate = self._rate(played)
            parts = [f"rollouts {played}/{total}", more, f"{rate:.1f} rollouts/s" if rate else ""]
            parts.append(f"ETA {clock((total - played) / rate)}" if rate and played < total else "")
            return "   ".join(part for part in parts if part)

        def _head(self) -> list[Any]:
            if (now := self._progress()) is None:
                return []
            from rich.progress_bar import ProgressBar
            from rich.text import Text

            return [Text(self._text(*now)), ProgressBar(total=max(now[1], 1), completed=now[0], width=60)]

        def _lines(self, final: bool = False) -> None:
            now = self._progress()
            if now is None or now[0] == 0:
                self._new_phases()
            elif now[0] > self._printed_step and time.time() - self._printed_at >= LINE_INTERVAL:
                self._printed_step, self._printed_at = now[0], time.time()
                print(f"[{clock(time.time() - self.started)}] {self._text(*now)}", flush=True)

        def summary(self, exit_code: int) -> str:
            status = self.run.status
            state = "ended" if status is None else status.state
            head = f"\n{self.paths.root.name}: {state}, {clock(time.time() - self.started)}"
            return "\n".join([head, *closing_lines(self.paths, self.cfg, exit_code)])

    return SynthesisDisplay
