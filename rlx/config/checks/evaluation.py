"""The rules for evaluations beside training, and for the best checkpoint by their metrics."""

from __future__ import annotations

import re
from collections.abc import Iterator

from rlx.config.checks.data import is_complete, module_problems
from rlx.config.evaluated import PREFIX, evaluated
from rlx.config.rules import Rule, Show, check_of, problem, table
from rlx.config.schema import EvaluatedRun, SftRoot
from rlx.config.tree import Problem

FACTS = ("examples", "completion_mean")  # metrics of every evaluation, beside its scores

OF_SFT: list[Rule[SftRoot]] = [
    Rule(
        "eval.interval",
        lambda c: c.eval.interval is not None and not c.envs and not c.eval.envs,
        "there is no environment to evaluate on",
        "env=reverse_text, or several: env=[sums,reverse_text]",
    ),
    Rule(
        "eval.interval",
        lambda c: c.eval.interval is None and c.envs,
        "supervised training plays no environment, and there is no evaluation",
        "eval.interval=50 or so, or leave out env=",
    ),
]
table(SftRoot, OF_SFT)


@check_of(EvaluatedRun)
def evaluated_environments(cfg: EvaluatedRun, of: Show) -> Iterator[Problem]:
    for name, entry in cfg.eval.envs.items():
        if entry.id is not None:
            yield from module_problems(f"eval.envs.{name}.id", entry.id, cfg.launcher.check_envs and entry.python is None, of)
        elif name not in cfg.envs:
            yield problem(
                f"the run has no environment {name} to evaluate (it has {', '.join(cfg.envs) or 'none'})",
                [f"eval.envs.{name}.id"],
                f"eval.envs.{name}.id=MODULE, or env@eval.envs.{name}=OPTION, or correct the name",
                of,
            )
    for name in cfg.eval.envs or cfg.envs:
        if cfg.eval.interval is not None and PREFIX + name in cfg.envs:
            yield Problem(f"the evaluation of {name} and envs.{PREFIX}{name} would have one name.\n  fix: rename one", ("envs",))


@check_of(EvaluatedRun)
def best_checkpoint(cfg: EvaluatedRun, of: Show) -> Iterator[Problem]:
    wanted = cfg.ckpt.keep_best
    if wanted is None or not is_complete(cfg):
        return
    if cfg.eval.interval is None or cfg.ckpt.interval is None or cfg.eval.interval % cfg.ckpt.interval:
        fix = "an eval.interval that is a multiple of ckpt.interval"
        yield problem("every evaluated version must have a checkpoint", ["ckpt.keep_best", "eval.interval", "ckpt.interval"], fix, of)
        return
    known = {f"eval/{name}/{metric}" for name, env in evaluated(cfg).items() for metric in metrics_of(env.rollouts_per_example or 1)}
    own = re.fullmatch(r"eval/([^/]+)/(reward|metric)/.+", wanted)  # the environment's own names are not known yet
    if wanted not in known and not (own and own[1] in evaluated(cfg)):
        scores = ", ".join(sorted(each for each in known if each.rpartition("/")[2].startswith(("avg", "pass")) and each[-1].isdigit()))
        yield problem("this is no metric of an evaluation of which more is better", ["ckpt.keep_best"], f"one of {scores}", of)


def metrics_of(n: int) -> set[str]:
    """The metrics of which more is better that every evaluation with `n` rollouts of each example has, without `eval/<env>/`."""
    scores = [f"avg@{n}", *(f"pass@{2**i}" for i in range(n.bit_length()))]
    return {*FACTS, *(score + end for score in scores for end in ("", "_low", "_high"))}
