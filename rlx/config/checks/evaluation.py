"""The rules for evaluations beside training, and for the best checkpoint by their metrics."""

from __future__ import annotations

import re
from collections.abc import Iterator

from rlx.config.checks.data import module_problems
from rlx.config.evaluated import PREFIX, evaluated
from rlx.config.rules import Show, rule
from rlx.config.schema import EvaluatedRun, SftRoot

LOWER_IS_BETTER = ("error_frac", "truncated_frac")
FACTS = ("examples", *LOWER_IS_BETTER, "completion_mean")  # metrics of every evaluation, beside its scores


@rule("eval", "envs", "launcher")
def evaluated_environments(cfg: EvaluatedRun, of: Show) -> Iterator[str]:
    for name, entry in cfg.eval.envs.items():
        if entry.id is not None:
            yield from module_problems(f"eval.envs.{name}.id", entry.id, cfg.launcher.check_envs and entry.python is None, of)
        elif name not in cfg.envs:
            known = ", ".join(cfg.envs) or "none"
            yield (
                f"eval.envs.{name} has no id, and the run has no environment of this name to evaluate (it has {known}).\n"
                f"Set eval.envs.{name}.id=MODULE, choose an option with env@eval.envs.{name}=OPTION, or correct the name."
            )
    for name in cfg.eval.envs or cfg.envs:
        if cfg.eval.interval is not None and PREFIX + name in cfg.envs:
            yield f"the evaluation of {name} and the environment envs.{PREFIX}{name} would have one name. Rename one of the two."


@rule("data", "eval", "envs")
def something_is_evaluated(cfg: SftRoot, of: Show) -> Iterator[str]:
    if cfg.eval.interval is not None and not cfg.envs and not cfg.eval.envs:
        yield f"there is no environment to evaluate on: {of('eval.interval')}.\nChoose some: env=reverse_text, env=[sums,reverse_text]."
    if cfg.eval.interval is None and cfg.envs:
        yield (
            f"supervised training plays no environment, and there is no evaluation: {of('eval.interval')}, envs has "
            f"{', '.join(cfg.envs)}.\nSet eval.interval, or remove env=."
        )


@rule("eval.envs")
def keys_of_training_alone(cfg: EvaluatedRun, of: Show) -> Iterator[str]:
    for name, entry in cfg.eval.envs.items():
        set_ = [key for key, untouched in (("weight", 1.0), ("curriculum", None)) if getattr(entry, key) not in (None, untouched)]
        for key in set_:
            why = "plays its first examples in their order" if key == "curriculum" else "plays all environments of eval.envs in full"
            yield f"`eval.envs.{name}.{key}` has no effect: an evaluation {why}: {of(f'eval.envs.{name}.{key}')}. Remove it."


@rule("eval", "envs", "sampling.max_tokens", "seq_len", "inference.max_model_len")
def room_for_prompt_of_evaluation(cfg: EvaluatedRun, of: Show) -> Iterator[str]:
    if any(entry.id is None and name not in cfg.envs for name, entry in cfg.eval.envs.items()):
        return  # reported above
    for name, env in evaluated(cfg).items():
        if env.sampling.max_tokens is not None and env.sampling.max_tokens >= cfg.max_model_len:
            own = cfg.eval.envs.get(name)
            key = f"eval.envs.{name}.sampling.max_tokens" if own and own.sampling.max_tokens else "eval.sampling.max_tokens"
            yield (
                f"a completion leaves no room for its prompt when {name} is evaluated: {env.sampling.max_tokens} new tokens >= the "
                f"engine's context of {cfg.max_model_len} (inference.max_model_len, or seq_len).\n"
                f"Lower {key} or raise inference.max_model_len."
            )


@rule("eval.sampling", "eval.envs")
def top_k_of_evaluation(cfg: EvaluatedRun, of: Show) -> Iterator[str]:
    for key, sampling in [
        ("eval.sampling", cfg.eval.sampling),
        *((f"eval.envs.{name}.sampling", env.sampling) for name, env in cfg.eval.envs.items()),
    ]:
        if sampling.top_k == 0:
            yield f"`{key}.top_k` must be -1 (all tokens) or at least 1: {of(f'{key}.top_k')}."


@rule("ckpt", "eval", "envs")
def best_checkpoint(cfg: EvaluatedRun, of: Show) -> Iterator[str]:
    if cfg.ckpt.keep_best is None:
        return
    if cfg.eval.interval is None:
        yield f"there is no evaluation to choose the best checkpoint by: {of('ckpt.keep_best')}, {of('eval.interval')}. Set eval.interval."
        return
    if cfg.ckpt.interval is None or cfg.eval.interval % cfg.ckpt.interval:
        yield (
            "an evaluated version must have a checkpoint for the best one to be kept: "
            f"{of('eval.interval')} is not a multiple of {of('ckpt.interval')}.\n"
            f"Use ckpt.interval={cfg.eval.interval} or a divisor of it."
        )
    if any(entry.id is None and name not in cfg.envs for name, entry in cfg.eval.envs.items()):
        return  # reported above
    envs = evaluated(cfg)
    _, name, metric = [*cfg.ckpt.keep_best.split("/", 2), "", ""][:3]
    if not cfg.ckpt.keep_best.startswith("eval/") or name not in envs or not metric:
        examples = ", ".join(f"eval/{name}/avg@{env.rollouts_per_example}" for name, env in envs.items())
        yield f"`ckpt.keep_best` must name a metric of an evaluation: {of('ckpt.keep_best')}. For example {examples}."
        return
    n = envs[name].rollouts_per_example or 1
    if metric in LOWER_IS_BETTER:
        yield (
            f"the best checkpoint is the one with the highest value, but a lower {metric} is better: {of('ckpt.keep_best')}.\n"
            f"Choose from {', '.join(_scores_of(n))}, with or without _low or _high, reward/FUNCTION, metric/METRIC."
        )
        return
    if metric in metrics_of(n) or re.fullmatch(r"(reward|metric)/.+", metric):  # the environment's own names are not known yet
        return
    scores = ", ".join(_scores_of(n))
    if re.fullmatch(r"(avg|pass)@\d+(_low|_high)?", metric):
        yield (
            f"the evaluation of {name} has no {metric}, because it plays {n} rollouts of each example: {of('ckpt.keep_best')}.\n"
            f"Choose from {scores}, or set eval.rollouts_per_example."
        )
    else:
        yield (
            f"the evaluation of {name} has no {metric}: {of('ckpt.keep_best')}.\n"
            f"Choose from {scores}, with or without _low or _high, examples, completion_mean, reward/FUNCTION, metric/METRIC."
        )


def _scores_of(n: int) -> list[str]:
    """The scores of an evaluation with `n` rollouts of each example."""
    return [f"avg@{n}", *(f"pass@{2**i}" for i in range(n.bit_length()))]


def metrics_of(n: int) -> set[str]:
    """The metrics that every evaluation has with `n` rollouts of each example, without `eval/<env>/`."""
    return {*FACTS, *(score + end for score in _scores_of(n) for end in ("", "_low", "_high"))}
