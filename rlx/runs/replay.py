"""Checks of `replay=`: the recorded batches must exist, and no changed key may be without effect.

The recorded batches hold samples with their advantages. A replay may change what the trainer does with them: objective, optimizer,
rows, ranks, mini-batches. It cannot change what made them: environments, sampling, rewards, advantages, filters.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rlx.config.errors import ConfigError
from rlx.config.load import load_run
from rlx.config.schema import Config
from rlx.invocation import program
from rlx.paths import RunPaths
from rlx.runs.config_diff import flat

WITHOUT_EFFECT = (
    "seed",
    "max_async_level",
    "model.name",  # the replay begins with the model that the run began with
    "model.warm_start",
    "model.renderer",
    "model.chat_template",
    "model.chat_template_kwargs",
    "model.tool_call_parser",
    "model.reasoning_parser",
    "teacher",  # what it answered is in the batches
    "envs",
    "sampling",
    "orchestrator",
    "reward",
    "advantage",
    "loss.mask_overlong",  # masked rollouts have no recorded samples
    "inference",  # a replay has no servers
    "weight_broadcast",
    "eval",
)
"""Keys and sections that a replay cannot change: they took effect when the batches were made, or are for parts that a replay lacks."""

MAY_DIFFER = (
    "inference.api_key",  # a secret, which the message would show
    "teacher.api_key",
    "inference.gpu_memory_utilization",  # a layout sets it, and a replay may have another layout
    "weight_broadcast.keep_last",  # old versions of checkpoints stay on the disk
)
"""Exceptions in those sections."""

OWN_LOSS = re.compile(r"envs\.[^.]+\.loss(\.(?!mask_overlong$).*)?")  # an environment's own objective is the trainer's, like the run's


def check_replay(cfg: Config, first: int) -> RunPaths:
    """The paths of the run to replay, from step `first` on.

    Raises ConfigError if a batch was not recorded, or if `cfg` changes a key that cannot take effect.
    """
    paths = RunPaths(Path(str(cfg.replay)).expanduser().absolute())
    if not paths.config.is_file():
        raise ConfigError(f"replay={cfg.replay}: {paths.root} is no run directory.\n  fix: give the directory of the run to replay")
    missing = [step for step in range(first, cfg.max_steps) if not paths.recorded_of(step).is_file()]
    if missing:
        raise ConfigError(
            f"replay={cfg.replay}: the batch of step {missing[0]} was not recorded, and max_steps={cfg.max_steps}.\n"
            "  fix: lower max_steps to the recorded steps; if that run started from a checkpoint, replay from it with resume="
        )
    problems = list(without_effect(cfg, load_run(paths.root, secrets=False)))
    if problems:
        raise ConfigError(
            f"replay={cfg.replay} trains on batches that already exist, so these keys cannot take effect:\n"
            + "\n".join(f"    {problem}" for problem in problems)
            + f"\n  fix: start from that run's configuration and change only what the trainer does:\n"
            f"       {program()} --config-dir {shlex.quote(str(paths.root))} --config-name config "
            f"{shlex.quote(f'replay={paths.root}')} run.name=NAME …"
        )
    return paths


def without_effect(cfg: Config, recorded: Config) -> Iterator[str]:
    """Each changed key that cannot take effect, with both values: `sampling.temperature is 0.7, and the run was recorded with 1.0`."""
    other = sorted(cfg.envs.keys() ^ recorded.envs.keys())
    if other:
        yield f"the environments are {', '.join(sorted(cfg.envs))}, and the run was recorded with {', '.join(sorted(recorded.envs))}"
    here, there = (_used_up(config, without={f"envs.{name}" for name in other}) for config in (cfg, recorded))
    for name in sorted({*here, *there}):
        if here.get(name) != there.get(name):
            yield f"{name} is {here.get(name)}, and the run was recorded with {there.get(name)}"


def _used_up(cfg: Config, without: set[str]) -> dict[str, Any]:
    leaves = {"loss.mask_overlong": False, **flat(asdict(cfg))}
    used = {name: value for name, value in leaves.items() if _under(name, WITHOUT_EFFECT) and not _under(name, without | {*MAY_DIFFER})}
    same = {f"envs.{name}.advantage" for name, env in cfg.envs.items() if env.advantage in ({}, cfg.advantage)}  # the run's, if it has none
    return {name: value for name, value in used.items() if not OWN_LOSS.fullmatch(name) and not _under(name, same)}


def _under(name: str, keys: Iterable[str]) -> bool:
    return any(f"{name}.".startswith(f"{key}.") for key in keys)
