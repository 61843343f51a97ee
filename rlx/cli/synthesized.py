"""The closing lines of `rlx synthesize`: what was played, kept and dropped, where the data is, and what to do with it."""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path
from typing import Any

from rlx.cli.display import started_as
from rlx.config.schema_synthesize import SynthesizeRoot
from rlx.paths import RunPaths
from rlx.rollout.failures import in_words


def closing_lines(paths: RunPaths, cfg: SynthesizeRoot, exit_code: int) -> list[str]:
    """The lines after the headline."""
    lines = []
    metadata = paths.synthesized(cfg.format).with_name("metadata.json")
    if exit_code in (0, 1) and metadata.is_file():
        lines += _numbers(json.loads(metadata.read_text()))
    if paths.failures.is_file():
        lines += [
            f"  {'failures' if not number else '':<9} {text}"
            for number, text in enumerate(in_words(json.loads(paths.failures.read_text())))
        ]
    root = _short(paths.root)
    lines.append(f"  run       {root}")
    data = paths.synthesized(cfg.format)
    program = started_as(sys.executable, sys.argv[0]).removesuffix(" train")
    if exit_code == 0:
        lines.append(f"  next      {program} sft data.name={_short(data)} {_model(cfg)}   # train on it")
    again = f"{program} synthesize --config-dir {root} --config-name config resume=latest"
    lines.append(f"            {again} play=false min_reward=…   # choose again" if exit_code in (0, 1) else f"  resume    {again}")
    return lines


def _numbers(metadata: dict[str, Any]) -> list[str]:
    rollouts, reward = metadata["rollouts"], metadata["reward"]
    dropped = ", ".join(f"{count} {cause}" for cause, count in rollouts["dropped"].items()) or "none"
    lines = [
        f"  played    {rollouts['played']} rollouts of {metadata['examples']['played']} examples" + _reward(reward["played"]),
        f"  kept      {rollouts['kept']} of {metadata['examples']['kept']} examples" + _reward(reward["kept"]),
        f"  dropped   {dropped}",
    ]
    if metadata["file"]:
        lines.append(f"  data      {_short(Path(metadata['file']))}: {metadata['rows']} rows")
    if metadata["raw_text_rows"]:
        lines.append(
            f"  note      {metadata['raw_text_rows']} rows are raw text: `rlx sft` trains them as a user's message and its answer, "
            "in the model's chat format"
        )
    return lines


def _reward(mean: float | None) -> str:
    return "" if mean is None else f", mean reward {mean:.3f}"


def _model(cfg: SynthesizeRoot) -> str:
    return f"model.name={shlex.quote(cfg.model.name)}" if cfg.model.warm_start is None and not cfg.client.base_url else "model=…"


def _short(path: Path) -> str:
    """The path from the current directory, if it is below."""
    return shlex.quote(str(path).removeprefix(os.getcwd() + os.sep))
