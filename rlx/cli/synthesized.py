"""Displays a run of `rlx synthesize`: its progress; then what was played, kept and dropped, where the data is, and what to do with it."""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path
from typing import Any

from rlx.cli.playing import PlayDisplay
from rlx.rollout.failures import in_words
from rlx.rollout.synthesized import METADATA
from rlx.started import program


class SynthesisDisplay(PlayDisplay):
    """The progress of any command that plays, and what was kept."""

    def summary(self, exit_code: int) -> str:
        lines = super().summary(exit_code).splitlines()
        root = short(self.paths.root)
        again = f"{program('synthesize')} --config-dir {root} --config-name config resume=latest"
        if exit_code == 0:
            data = short(self.paths.synthesized(self.cfg.format))
            lines.append(f"  next      {program('sft')} data.name={data} {self._model()} seq_len={self.cfg.seq_len}   # train on it")
            lines.append(f"            {again} play=false min_reward=…   # choose again; plays nothing")
        elif exit_code != 1:
            lines.append(f"            {again}")
        return "\n".join(lines)

    def _model(self) -> str:
        """The choice of the model that wrote the data, for another command."""
        chosen = next((argument for argument in self.argv if argument.startswith("model=")), "model=…")
        if self.cfg.client.base_url:
            return "model=…"
        if self.cfg.model.warm_start is not None:  # another command would make it anew, or start from random weights
            chosen = "model=tiny_trained"
        if self.cfg.weights_dir is not None and self.cfg.step:
            return f"{chosen} model.name={short(Path(self.cfg.weights_dir) / f'step_{self.cfg.step}')}"
        if self.cfg.model.warm_start is not None and self.paths.initial_model.is_file():
            return f"{chosen} model.name={shlex.quote(self.paths.initial_model.read_text().strip())}"
        return " ".join([chosen, *(shlex.quote(argument) for argument in self.argv if argument.startswith("model.name="))])

    def results(self) -> list[str]:
        lines = []
        metadata = self.paths.synthesized(self.cfg.format).with_name(METADATA)
        if metadata.is_file() and metadata.stat().st_mtime >= self.started - 1:
            lines += numbers(json.loads(metadata.read_text()))
        if self.paths.failures.is_file() and self.paths.failures.stat().st_mtime >= self.started - 1:
            texts = in_words(json.loads(self.paths.failures.read_text()))
            lines += [f"  {'' if number else 'failures':<9} {text}" for number, text in enumerate(texts)]
        return lines


def numbers(metadata: dict[str, Any]) -> list[str]:
    """What `metadata.json` says about the rollouts and the file."""
    rollouts, reward = metadata["rollouts"], metadata["reward"]
    dropped = ", ".join(f"{count} {cause}" for cause, count in rollouts["dropped"].items()) or "none"
    lines = [
        f"  played    {rollouts['played']} rollouts of {metadata['examples']['played']} examples" + _reward(reward["played"]),
        f"  kept      {rollouts['kept']} of {metadata['examples']['kept']} examples" + _reward(reward["kept"]),
        f"  dropped   {dropped}",
    ]
    if metadata["file"]:
        lines.append(f"  data      {short(Path(metadata['file']))}: {metadata['rows']} rows")
    if metadata["raw_text_rows"]:
        lines.append(
            f"  note      {metadata['raw_text_rows']} rows are raw text: `rlx sft` trains them as a user's message and its answer, "
            "in the model's chat format"
        )
    return lines


def _reward(mean: float | None) -> str:
    return "" if mean is None else f", mean reward {mean:.3f}"


def short(path: Path) -> str:
    """The path, from the current directory if it is below, for a shell."""
    return shlex.quote(str(path).removeprefix(os.getcwd() + os.sep))
