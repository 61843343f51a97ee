"""The evaluation of one policy version on several environments: which rollouts it needs, its scores and its files.

Evaluations during training (`rlx.rollout.evaluate`) and `rlx eval` share it. `eval_stats.py` has the statistics, `eval_results.py` the
files.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rlx.config.eval_envs import evaluated
from rlx.config.schema import EvaluatedRun
from rlx.config.schema_eval import EvalRoot
from rlx.envs.base import Environment, sampling_of
from rlx.paths import RunPaths
from rlx.rollout.eval_results import Outcome, attempts, means, write_results
from rlx.rollout.eval_stats import average, passes
from rlx.rollout.rollout_set import RolloutSet

log = logging.getLogger("rlx.evaluation")


class Evaluation(RolloutSet):
    """See the module's text."""

    keeps_content = True

    def __init__(
        self,
        config: EvaluatedRun | EvalRoot,
        paths: RunPaths,
        envs: Mapping[str, Environment],
        version: int,
        file: Path | None = None,
        digest: str | None = None,
    ) -> None:
        """`envs`: by their names without a prefix. `file`, `digest`: see `RolloutSet`."""
        self.config, self.paths, self.specs = config, paths, evaluated(config)
        wanted = {name: (spec.num_examples, spec.rollouts_per_example or 1) for name, spec in self.specs.items()}
        super().__init__(envs, wanted, version=version, file=file, digest=digest)
        self.newest = version  # the newest version that sampled one of its tokens

    def write(self, pass_threshold: float, facts: Mapping[str, Any], seconds: float) -> dict[str, float]:
        """Write the results of all environments, and return the metrics of the version's record. Call it in a thread.

        A rollout that failed for good scores 0. `facts`: further ones for `metadata.json`. `seconds`: how long it took.
        """
        values: dict[str, float] = {"time/evaluation": seconds}
        for name, spec in self.specs.items():
            examples = self.examples(name)
            own = {
                "env_id": spec.id,
                "name": name,
                "env_args": spec.args,
                "model": self.config.model.name,
                "base_url": ", ".join(self.config.inference.base_url),
                "policy_version": self.version,
                "split": spec.split,
                "seed": self.config.seed,
                "sampling_args": sampling_of(self.config, spec),
                "time": seconds,
            }
            folder = self.paths.evaluation_of(name, self.config.model.name, self.version)
            write_results(folder, examples, own | dict(facts), pass_threshold)
            values |= (scores := score_metrics(name, examples, pass_threshold))
            score = f"eval/{name}/avg@{len(examples[0])}"
            log.info("evaluated version %d on %d examples of %s: %s %.4f", self.version, len(examples), name, score, scores[score])
            if errors := [one.error for example in examples for one in example if not one.is_completed]:
                last = (errors[-1] or {}).get("error_chain_str")
                log.warning("%s: %d rollouts failed and score 0; the last: %s", name, len(errors), last)
        return values


def score_metrics(name: str, examples: Sequence[Sequence[Outcome]], pass_threshold: float) -> dict[str, float]:
    """The metrics of one environment's evaluation (`rlx.metrics`, source eval). `examples` [N][n]: the rollouts of each example."""
    outcomes = [outcome for example in examples for outcome in example]
    estimates = {f"avg@{len(examples[0])}": average([[outcome.reward for outcome in example] for example in examples])}
    estimates |= {f"pass@{k}": one for k, one in passes(attempts(examples), pass_threshold).items()}
    values: dict[str, float] = {}
    for metric, one in estimates.items():
        values |= {metric: one.mean, f"{metric}_low": one.low, f"{metric}_high": one.high}
    values |= {
        "examples": len(examples),
        "error_frac": float(np.mean([not outcome.is_completed for outcome in outcomes])),
        "truncated_frac": float(np.mean([outcome.is_truncated for outcome in outcomes])),
    }
    if any(outcome.token_usage.turns for outcome in outcomes):  # a rollout that failed before an answer counts as 0 then
        values["completion_mean"] = float(np.mean([outcome.token_usage.output_tokens or 0 for outcome in outcomes]))
    scored = [outcome for outcome in outcomes if outcome.is_completed]
    values |= {f"reward/{key}": value for key, value in means([one.rewards for one in scored]).items()}
    metrics = [{key: value for key, value in one.metrics.items() if key not in one.rewards} for one in scored]
    values |= {f"metric/{key}": value for key, value in means(metrics).items()}
    return {f"eval/{name}/{metric}": value for metric, value in values.items() if not math.isnan(value)}
