"""Which weights of `weights_dir` a command plays with, and from which model its servers start. Reads folders only."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rlx.config.errors import ConfigError
from rlx.config.inherited import find_weights
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
    folder, run = find_weights(cfg.weights_dir)
    there = versions(folder)
    _check_there(folder, there, sorted(set(cfg.steps or ())))
    cfg = replace(cfg, weights_dir=str(folder), steps=there if cfg.steps is None else sorted(set(cfg.steps)))
    if not cfg.versions:
        raise ConfigError(f"{folder} has no complete step_N, and eval_base=false.\n  fix: name another weights_dir, or eval_base=true")
    _check_kind(cfg, folder, cfg.versions)
    if 0 in cfg.versions and run is not None and not cfg.lora.on:
        _check_initial(run)
    return cfg


def resolve_step(cfg: SynthesizeRoot) -> SynthesizeRoot:
    """The configuration with an absolute `weights_dir`, and the newest complete step as its `step` if it names none.

    Raises ConfigError if that step is not there.
    """
    if cfg.weights_dir is None:
        _refuse("step", cfg.step)
        return cfg
    folder, run = find_weights(cfg.weights_dir)
    there = versions(folder)
    if cfg.step is None and not there:
        raise ConfigError(f"{folder} has no complete step_N.\n  fix: name another weights_dir, or step=0 for the run's initial model")
    step = there[-1] if cfg.step is None else cfg.step
    _check_there(folder, there, [step])
    if step == 0:
        _check_initial(run or folder)
    cfg = replace(cfg, weights_dir=str(folder), step=step)
    _check_kind(cfg, folder, [step])
    return cfg


def _refuse(key: str, value: object) -> None:
    if value is not None:
        raise ConfigError(f"{key}={value} needs the weights that it chooses from.\n  fix: weights_dir=RUN")


def _check_there(folder: Path, there: Sequence[int], wanted: Sequence[int]) -> None:
    """Raise ConfigError if a version of a run is not there; 0 is its initial model."""
    if missing := [step for step in wanted if step not in (0, *there)]:
        raise ConfigError(
            f"{folder} has no complete step_{missing[0]}; it has {', '.join(map(str, there)) or 'none'}.\n"
            "  fix: name some of these; a training keeps its newest versions (weight_broadcast.keep_last) and those of checkpoints"
        )


def _check_initial(run: Path) -> None:
    if not _is_there(RunPaths(run).initial_model):
        raise ConfigError(f"the initial model of {run} is gone, so version 0 cannot be played.\n  fix: name steps of its weights")


def _check_kind(cfg: PlayWithModel, folder: Path, steps: Sequence[int]) -> None:
    """Raise ConfigError unless the steps hold what `lora` says: adapters for the initial model, or whole models."""
    for step in filter(None, steps):
        file = folder / f"step_{step}" / ADAPTER_CONFIG
        if file.is_file() and not cfg.lora.on:
            rank = json.loads(file.read_text()).get("r")
            raise ConfigError(f"{file.parent} holds adapters, but lora.rank is not set.\n  fix: lora.rank={rank}, with their model")
        if not file.is_file() and cfg.lora.on:
            raise ConfigError(f"{file.parent} holds a whole model, but lora.rank={cfg.lora.rank} expects adapters.\n  fix: lora.rank=null")
    run = find_weights(str(folder))[1]
    if cfg.lora.on and run is not None and not _is_there(RunPaths(run).initial_model):
        raise ConfigError(f"the initial model of {run} is gone, and its weights are adapters for it.\n  fix: restore that model's folder")


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
    name = file.read_text().strip()
    return not name.startswith("/") or Path(name).is_dir()
