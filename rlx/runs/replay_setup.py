"""Prepares `rlx replay`: the other objective, and where the policy of a recorded step comes from. Pure; loads no model.

Every problem is a ConfigError before anything is loaded.
"""

from __future__ import annotations

import hashlib
import re
import shlex
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rlx.checkpoints import folders
from rlx.config.errors import ConfigError
from rlx.config.load import compose, to_yaml
from rlx.config.objectives import loss_of
from rlx.config.rules import declared
from rlx.config.schema import Config, LossTerms
from rlx.config.secret import secrets_of
from rlx.config.strangers import executing, is_mine, said
from rlx.invocation import program
from rlx.paths import write_text
from rlx.runs.config_diff import flat
from rlx.runs.run import Run
from rlx.weights.files import versions

MAY_DIFFER = ("loss", "ref")  # sections that change the gradient of a recorded batch at given weights
OF_ENV = re.compile(r"envs\.([^.]+)\.loss(\..*)?")  # the same of one environment
FLAGS = ("--config-dir", "--config-path")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayPolicy:
    """Where version `step` comes from: `Policy(model="/run/weights/step_12", step=12, checkpoint=None)`."""

    model: str  # a folder or a hub name
    step: int  # the version that `model`, or the checkpoint, holds; later steps must be trained again
    checkpoint: Path | None
    initial: str | None  # version 0, for a reference; None: unknown


def other_objective(run: Run, overrides: Sequence[str]) -> tuple[Config, Config, list[str]]:
    """The run's configuration, the same with another objective, and notes for the user. `overrides`: `loss=gspo loss.eps_low=1e-3`.

    Raises ConfigError for an override that would change nothing here, or an objective that the run's configuration refuses.
    """
    recorded = run.config
    if recorded is None:
        raise ConfigError(f"{run.root} has no config.yaml, so nothing is known of its objective.\n  fix: name another run")
    if not isinstance(recorded, Config):
        raise ConfigError(f"{run.root} is no training run, so it has no recorded batches.\n  fix: name a directory of rlx train")
    found = {} if is_mine(run.root) else dict(executing(asdict(recorded)))
    left = {key: value for key, value in found.items() if key[0] != "slurm"}  # a replay is no job
    if left:
        raise ConfigError(
            f"{run.root} is a run of another user, and would execute code here: {said(left)}.\n"
            "  fix: read that code; then copy the run (cp -r), and replay your copy"
        )
    flags, lines = _split(overrides)
    if not lines:
        raise ConfigError("give another objective to compare with, such as loss=gspo or loss.eps_high=0.3.")
    keys = {line: line.lstrip("+~").partition("=")[0] for line in lines}
    without = [line for line, key in keys.items() if not _may_differ(key) or key.endswith("loss.mask_overlong")]
    if without:
        raise ConfigError(
            f"{', '.join(without)}: has no effect on the gradient of a recorded batch at given weights; only loss, envs.NAME.loss and ref "
            "have.\n"
            "  fix: leave it out; to train the whole run again with it: "
            f"{program()} --config-dir {shlex.quote(str(run.root))} --config-name config {shlex.join([f'replay={run.root}', *without])}"
        )
    given = ["dry_run=true", *(f"{key}=unknown" for key in secrets_of(recorded))]  # nothing is started, and no server is asked
    with (
        tempfile.TemporaryDirectory() as folder
    ):  # what was checked, not the file again: hydra would read more in it, and it may be a stranger's
        write_text(Path(folder) / "config.yaml", to_yaml(recorded))
        composed = compose(["--config-dir", folder, *flags, "--config-name", "config", *given, *lines], {}).cfg
    envs = {name: replace(env, loss=composed.envs[name].loss) for name, env in recorded.envs.items()}
    other = replace(recorded, loss=composed.loss, ref=composed.ref, envs=envs)
    notes = []
    if keys_of := _without_ratios(recorded, other):
        notes.append(
            f"{keys_of[0]}.proximal=recompute: the ratios of the other objective compare with the policy at the start of the step, which "
            f"is the one here, so all are 1 and none is clipped; {keys_of[0]}.proximal=inference compares with the engine"
        )
    if recorded.ref == other.ref and _trained(recorded) == _trained(other):
        notes.append("this is the run's own objective, so both sides are equal")
    return recorded, other, notes


def _without_ratios(recorded: Config, other: Config) -> list[str]:
    """The keys of the losses that differ from the run's and have only ratios of 1 at the weights of the step."""
    keys = []
    for name in other.envs:
        loss, key = loss_of(other, name), f"envs.{name}.loss" if other.envs[name].loss else "loss"
        compares = declared(loss).uses_ratio and not declared(loss).against_engine
        if loss != loss_of(recorded, name) and compares and loss.get("proximal") == "recompute":
            keys.append(key)
    return keys


def _may_differ(key: str) -> bool:
    return key.partition(".")[0] in MAY_DIFFER or OF_ENV.fullmatch(key) is not None


def _trained(cfg: Config) -> list[dict[str, Any]]:
    """What each environment is trained with, with the defaults of the keys that every objective has."""
    shared = flat(asdict(LossTerms(aggregate="")))
    return [shared | flat(loss) for loss in ([loss_of(cfg, name) for name in cfg.envs] or [cfg.loss])]


def changes(recorded: Config, other: Config) -> dict[str, tuple[Any, Any]]:
    """The keys in which the two differ, each with both values."""
    there, here = map(_leaves, (recorded, other))
    return {name: (there.get(name), here.get(name)) for name in sorted({*there, *here}) if there.get(name) != here.get(name)}


def _leaves(cfg: Config) -> dict[str, Any]:
    """The keys of the sections that may differ, with the defaults of those that every objective has."""
    shared = flat(asdict(LossTerms(aggregate="")), "loss.")
    return shared | {name: value for name, value in flat(asdict(cfg)).items() if _may_differ(name) and value != {}}


def _split(overrides: Sequence[str]) -> tuple[list[str], list[str]]:
    """The folder of the user's own options, and the overrides."""
    flags, lines, waiting = [], [], list(overrides)
    while waiting:
        part = waiting.pop(0)
        if part in FLAGS and waiting:
            flags += [part, waiting.pop(0)]
        elif part.startswith(tuple(f"{flag}=" for flag in FLAGS)):
            flags += list(part.split("=", 1))
        elif part.startswith("--"):
            raise ConfigError(f"there is no option {part}. See rlx replay --help.")
        else:
            lines.append(part)
    return flags, lines


def policy_of(run: Run, cfg: Config, other: Config, step: int) -> ReplayPolicy:
    """Where the policy of `step` comes from. Raises ConfigError if it is gone, or the batch was not recorded."""
    paths, recorded = run.paths, run.recorded
    if step not in recorded:
        raise ConfigError(
            f"{run.root} has no recorded batch of step {step}, only of steps {_listed(recorded)}.\n  fix: name one with --step"
        )
    initial = paths.initial_model.read_text().strip() if paths.initial_model.is_file() else None
    here = versions(paths.weights)
    follows = cfg.ref.sync_interval is not None and cfg.uses_reference
    if other.uses_reference and other.ref.sync_interval is not None and (other.ref != cfg.ref or not cfg.uses_reference):
        raise ConfigError(
            f"ref.sync_interval={other.ref.sync_interval}: this reference would have followed the policy, but the run's did not, so no "
            "file has it.\n  fix: ref.sync_interval=null compares with the initial policy"
        )
    gone = initial is None or (Path(initial).is_absolute() and not Path(initial).is_dir())
    if gone and any(each.uses_reference and each.ref.name is None for each in (cfg, other)):
        raise ConfigError(f"the reference is the initial model, and that is gone: {initial}.\n  fix: name a copy of it with ref.name=")
    if not follows and step in here and not cfg.lora.enabled:  # the version holds adapters alone
        return ReplayPolicy(model=str(paths.weights_of(step).absolute()), step=step, checkpoint=None, initial=initial)
    # A checkpoint is loaded over a model of the same shape: the initial one, or any version.
    shape = str(initial) if not gone else str(paths.weights_of(here[-1]).absolute()) if here and not cfg.lora.enabled else None
    for at in sorted([each for each in folders.steps(paths) if each <= step], reverse=True):
        if shape is not None and set(range(at, step)) <= set(recorded):
            return ReplayPolicy(model=shape, step=at, checkpoint=(paths.checkpoint_of(at) / folders.TRAINER).absolute(), initial=initial)
    if not gone and set(range(step)) <= set(recorded):
        return ReplayPolicy(model=str(initial), step=0, checkpoint=None, initial=initial)
    raise ConfigError(
        f"the policy of step {step} is gone: weights/ has versions {_listed(here)}; checkpoints/ has {_listed(folders.steps(paths))}; "
        f"recorded batches are {_listed(recorded)}.\n"
        "  fix: name a step whose weights are there; in the next run keep more with weight_broadcast.keep_last or ckpt.keep_last"
    )


def _listed(numbers: Sequence[int]) -> str:
    shown = numbers if len(numbers) <= 12 else [*numbers[:5], "…", numbers[-1]]
    return ", ".join(map(str, shown)) or "none"


def label_of(overrides: Sequence[str]) -> str:
    """A folder's name for the other objective: `loss=gspo,loss.eps_low=0.001`. With folders of the user's own, a hash of these follows.

    `loss=mine` of one folder is another objective than that of another folder.
    """
    from rlx.config.sweeps import element_name

    flags, lines = _split(overrides)
    name = element_name(lines)
    if not flags:
        return name
    own = [part if part in FLAGS else str(Path(part).expanduser().absolute()) for part in flags]
    return f"{name}-{hashlib.sha256(chr(0).join(own).encode()).hexdigest()[:8]}"
