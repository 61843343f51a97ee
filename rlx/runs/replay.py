"""Whether a run can be trained on again with `replay=`: its batches are there, and no key is asked for that cannot take effect.

What was recorded are samples with their advantages. What the trainer does with them may differ: objective, optimizer, rows, ranks,
mini-batches. What made them is over: environments, sampling, rewards, advantages, and what the orchestrator left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rlx.config.errors import ConfigError
from rlx.config.load import load_run
from rlx.config.schema import Config
from rlx.paths import RunPaths
from rlx.runs.compare import flat

WITHOUT_EFFECT = (
    "seed",
    "max_async_level",
    "model.name",  # the replay begins with the model that the run began with
    "model.warm_start",
    "envs",
    "sampling",
    "orchestrator",
    "reward",
    "advantage",
    "loss.mask_overlong",  # such rollouts have no samples
)
"""Keys and sections that were used up when the batches were made."""


def check_replay(cfg: Config, first: int) -> RunPaths:
    """The run whose batches are trained on again, from step `first` on.

    Raises ConfigError when it has not recorded all of them, or when `cfg` has another value than that run where it cannot take effect.
    """
    paths = RunPaths(Path(str(cfg.replay)).expanduser().absolute())
    if not paths.config.is_file():
        raise ConfigError(f"replay={cfg.replay}: {paths.root} is no run directory.\n  fix: name the directory of the run to train on again")
    missing = [step for step in range(first, cfg.max_steps) if not paths.recorded_of(step).is_file()]
    if missing:
        there = sorted(int(path.name.removeprefix("step_").split(".")[0]) for path in paths.recorded.glob("step_*.batch.zst"))
        has = f"it has those of {there[0]} … {there[-1]}" if there else "it has none (orchestrator.save_batches=false?)"
        raise ConfigError(
            f"replay={cfg.replay}: the batch of step {missing[0]} was not recorded; {has}, and max_steps={cfg.max_steps}.\n"
            "  fix: set max_steps to what there is; a run that began at a checkpoint is replayed from it, with resume="
        )
    problems = list(without_effect(cfg, load_run(paths.root)))
    if problems:
        raise ConfigError(
            f"replay={cfg.replay} trains on batches that are made already, so these keys cannot take effect:\n"
            + "\n".join(f"    {problem}" for problem in problems)
            + f"\n  fix: take that run's configuration and change what the trainer does:\n"
            f"       python train.py --config-dir {paths.root} --config-name config replay={paths.root} run.name=NAME …"
        )
    return paths


def without_effect(cfg: Config, recorded: Config) -> Iterator[str]:
    """Every key that differs and is used up, with both values: `sampling.temperature is 0.7, and the run was recorded with 1.0`."""
    other = sorted(cfg.envs.keys() ^ recorded.envs.keys())
    if other:
        yield f"the environments are {', '.join(sorted(cfg.envs))}, and the run was recorded with {', '.join(sorted(recorded.envs))}"
    here, there = (_used_up(config, without={f"envs.{name}" for name in other}) for config in (cfg, recorded))
    for name in sorted({*here, *there}):
        if name not in there:
            yield f"{name} is {here[name]}, and the run was recorded without it"
        elif name not in here:
            yield f"{name} is not set, and the run was recorded with {there[name]}"
        elif here[name] != there[name]:
            yield f"{name} is {here[name]}, and the run was recorded with {there[name]}"


def _used_up(cfg: Config, without: set[str]) -> dict[str, Any]:
    leaves = {"loss.mask_overlong": False, **flat(asdict(cfg))}
    return {name: value for name, value in leaves.items() if _under(name, WITHOUT_EFFECT) and not _under(name, without)}


def _under(name: str, keys: Iterable[str]) -> bool:
    return any(f"{name}.".startswith(f"{key}.") for key in keys)
