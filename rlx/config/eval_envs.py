"""What a run evaluates: the environments of `eval.envs` with all values filled in, and the policy versions that are due.

Pure: reads the configuration only.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from rlx.config.schema import CommandConfig, Config, EvalEnvConfig, EvalSampling, EvaluatedRun, PlayRoot, ScoredEnvConfig, TrainingRoot
from rlx.config.schema_eval import EvalRoot
from rlx.config.schema_rollout import EnvConfig

PREFIX = "eval_"
"""An environment is evaluated under its name with this prefix, so that its seeds and requests differ from those of training."""


def evaluated(cfg: EvaluatedRun | EvalRoot) -> dict[str, ScoredEnvConfig]:
    """The environments to evaluate on, by name; empty if there are no evaluations.

    An entry without `id` takes what it does not set from `envs`. Sampling parameters come from the entry, `eval.sampling`, the environment
    in `envs` and `sampling`, in this order. Raises KeyError for an entry without `id` that `envs` does not have (a rule reports it).
    """
    if isinstance(cfg, EvalRoot):
        return {name: _completed(cfg, env) for name, env in cfg.envs.items()}
    if cfg.eval.interval is None:
        return {}
    return {name: _filled(cfg, name, entry) for name, entry in (cfg.eval.envs or {name: EvalEnvConfig() for name in cfg.envs}).items()}


def environments(cfg: CommandConfig) -> dict[str, EnvConfig]:
    """All environments that a command loads; empty for one that plays none.

    In training: those of the mix, and those to evaluate on under their names with the prefix. `rlx sft` has no mix.
    """
    if isinstance(cfg, EvaluatedRun):
        mix = cfg.envs if isinstance(cfg, Config) else {}
        return {**mix, **{PREFIX + name: env for name, env in evaluated(cfg).items()}}
    if isinstance(cfg, EvalRoot):
        return dict(evaluated(cfg))
    return dict(cfg.envs) if isinstance(cfg, PlayRoot) else {}


def rollout_envs(cfg: PlayRoot) -> dict[str, EnvConfig]:
    """All environments that a command loads, by the names under which they are played: seeds follow from these names.

    `rlx eval` plays under the names of evaluations beside training, so both play the same rollouts of the same weights.
    """
    if isinstance(cfg, EvalRoot):
        return {PREFIX + name: env for name, env in evaluated(cfg).items()}
    return environments(cfg)


def section_of(name: str) -> str:
    """The section of an environment that a run loads under this name."""
    return f"eval.envs.{name.removeprefix(PREFIX)}" if name.startswith(PREFIX) else f"envs.{name}"


def is_due(cfg: TrainingRoot, version: int) -> bool:
    """Whether a policy version is evaluated: 0 with `eval.eval_base`, multiples of `eval.interval`, and the last version."""
    return isinstance(cfg, EvaluatedRun) and cfg.generates_rollouts and cfg.eval.is_due(version, cfg.max_steps)


def _completed(cfg: EvalRoot, env: ScoredEnvConfig) -> ScoredEnvConfig:
    """An environment of `rlx eval` with what it takes from the top level."""
    return replace(
        env,
        num_examples=env.num_examples or cfg.num_examples,
        rollouts_per_example=env.rollouts_per_example or cfg.rollouts_per_example,
        sampling=_sampling(env.sampling, cfg.sampling),
    )


def _filled(cfg: EvaluatedRun, name: str, entry: EvalEnvConfig) -> EvalEnvConfig:
    own = cfg.envs[name] if entry.id is None else None
    base = own or ScoredEnvConfig()
    values: dict[str, Any] = {f.name: getattr(base, f.name) for f in fields(EnvConfig) if getattr(entry, f.name) is None}
    for part in ("box", "harness"):
        mine, usual = getattr(entry, part), type(getattr(entry, part))()
        changed = {f.name: getattr(mine, f.name) for f in fields(mine) if getattr(mine, f.name) != getattr(usual, f.name)}
        values[part] = replace(getattr(base, part), **changed)
    values |= {
        "args": {**base.args, **entry.args},
        "agents_per_group": "one",  # also where the mix trains all
        "num_examples": entry.num_examples or cfg.eval.num_examples,
        "rollouts_per_example": entry.rollouts_per_example or cfg.eval.rollouts_per_example,
        "sampling": _sampling(entry.sampling, cfg.eval.sampling, own and own.sampling, cfg.sampling),
    }
    return replace(entry, **values)


def _sampling(*sources: object) -> EvalSampling:
    """Each parameter from the first source that sets it."""
    given = {f.name: [getattr(source, f.name, None) for source in sources] for f in fields(EvalSampling)}
    return EvalSampling(**{name: next((value for value in values if value is not None), None) for name, values in given.items()})


def pins(cfg: EvaluatedRun) -> bool:
    """Whether an evaluation plays one policy version (`eval.pins`). Beside supervised training the servers have nothing else to do."""
    if cfg.eval.pins is not None or not isinstance(cfg, Config):
        return cfg.eval.pins is not False
    return cfg.max_async_level == 0 or cfg.ckpt.keep_best is not None
