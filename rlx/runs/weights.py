"""Which weights of `weights_dir` a command plays with, and from which model its servers start. Reads folders only."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rlx.config.errors import ConfigError
from rlx.config.from_run import find_weights
from rlx.config.schema_eval import EvalRoot, PlayWithModel
from rlx.config.schema_synthesize import SynthesizeRoot
from rlx.paths import RunPaths
from rlx.weights.files import versions
from rlx.weights.shapes import ADAPTER_CONFIG


def resolve(cfg: EvalRoot) -> EvalRoot:
    """The configuration with an absolute `weights_dir`, and `steps` as they are now.

    Raises ConfigError if a step is not there, if there is none at all, or if version 0 is wanted but its model is gone.
    """
    if cfg.weights_dir is None:
        _refuse("steps", cfg.steps)
        return cfg
    folder = find_weights(cfg.weights_dir)[0]
    cfg = replace(cfg, weights_dir=str(folder), steps=versions(folder) if cfg.steps is None else sorted(set(cfg.steps)))
    if not cfg.versions:
        raise ConfigError(f"{folder} has no complete step_N, and eval_base=false.\n  fix: name another weights_dir, or eval_base=true")
    _check(cfg, folder, cfg.versions)
    return cfg


def resolve_step(cfg: SynthesizeRoot) -> SynthesizeRoot:
    """The configuration with an absolute `weights_dir`, and the newest complete step as its `step` if it names none.

    Raises ConfigError if that step is not there.
    """
    if cfg.weights_dir is None:
        _refuse("step", cfg.step)
        return cfg
    folder = find_weights(cfg.weights_dir)[0]
    there = versions(folder)
    if cfg.step is None and not there:
        raise ConfigError(f"{folder} has no complete step_N.\n  fix: name another weights_dir, or step=0 for the run's initial model")
    cfg = replace(cfg, weights_dir=str(folder), step=there[-1] if cfg.step is None else cfg.step)
    _check(cfg, folder, [cfg.step])
    return cfg


def _refuse(key: str, value: object) -> None:
    if value is not None:
        raise ConfigError(f"{key}={value} needs the weights that it chooses from.\n  fix: weights_dir=RUN")


def _check(cfg: PlayWithModel, folder: Path, wanted: Sequence[int | None]) -> None:
    """Raise ConfigError unless the versions are there and hold what `lora` says: adapters for the initial model, or whole models.

    Version 0 is the initial model of the run that has the weights.
    """
    there, run = versions(folder), find_weights(str(folder))[1]
    if 0 in wanted and run is None and isinstance(cfg, SynthesizeRoot):
        raise ConfigError(f"{folder} belongs to no run, so it has no version 0.\n  fix: name one of its steps, or leave weights_dir out")
    if missing := [step for step in wanted if step not in (0, *there)]:
        raise ConfigError(
            f"{folder} has no complete step_{missing[0]}; it has {', '.join(map(str, there)) or 'none'}.\n"
            "  fix: name some of these; a training keeps its newest versions (weight_broadcast.keep_last) and those of checkpoints"
        )
    for step in filter(None, wanted):
        file = folder / f"step_{step}" / ADAPTER_CONFIG
        if file.is_file() and not cfg.lora.enabled:
            rank = json.loads(file.read_text()).get("r")
            raise ConfigError(f"{file.parent} holds adapters, but lora.rank is not set.\n  fix: lora.rank={rank}, with their model")
        if not file.is_file() and cfg.lora.enabled:
            raise ConfigError(f"{file.parent} holds a whole model, but lora.rank={cfg.lora.rank} expects adapters.\n  fix: lora.rank=null")
    if (cfg.lora.enabled or 0 in wanted) and run is not None and not _is_there(RunPaths(run).initial_model):
        needs = "its weights are adapters for it" if cfg.lora.enabled else "it is version 0"
        raise ConfigError(f"the initial model of {run} is gone, and {needs}.\n  fix: restore that model's folder, or name other steps")


def initial_model(cfg: PlayWithModel) -> str | None:
    """The model from which the servers start if `weights_dir` names a run's weights: its initial model, or weights of the same shape.

    None: the model of the configuration.
    """
    if cfg.weights_dir is None:
        return None
    folder, run = find_weights(cfg.weights_dir)
    if run is None:
        return None
    file = RunPaths(run).initial_model
    if _is_there(file):
        return file.read_text().strip()
    return str(folder / f"step_{versions(folder)[0]}")


def _is_there(file: Path) -> bool:
    """Whether `initial_model.txt` names a model that can be loaded: a folder that exists, or a hub name."""
    if not file.is_file():
        return False
    name = file.read_text(encoding="utf-8").strip()
    return not name.startswith("/") or Path(name).is_dir()
