"""The evaluation of one policy version on several environments: what is played, what was played already, and its scores.

Evaluations beside training (`rlx.rollout.evaluate`) and `rlx eval` share it. `scores.py` has the statistics, `results.py` the files.
`rlx eval` also keeps records of single rollouts, so that a killed one goes on:

eval/<env>--<model>/step_N/played.jsonl     one finished rollout a line, appended; deleted when the version has its record
eval/<env>--<model>/step_N/played_by.txt    digest of the weights that played them; deleted with it
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rlx.config.evaluated import evaluated
from rlx.config.schema import EvaluatedRun
from rlx.config.schema_eval import EvalRoot
from rlx.envs.base import Environment, sampling_of
from rlx.paths import RunPaths
from rlx.rollout.play import Job, Records, in_turn, jobs_of
from rlx.rollout.results import Outcome, attempts, means, outcome_of, write_results
from rlx.rollout.scores import average, passes
from rlx.types import Rollout

log = logging.getLogger("rlx.evaluation")

PLAYED = "played.jsonl"


class Evaluation:
    """See the module's text."""

    def __init__(self, config: EvaluatedRun | EvalRoot, paths: RunPaths, envs: Mapping[str, Environment], version: int) -> None:
        """`envs`: by their names without a prefix."""
        self.config, self.paths, self.envs, self.version = config, paths, envs, version
        self.specs = evaluated(config)
        self.began = time.monotonic()
        self.newest = version  # the newest version that sampled one of its tokens
        self.tokens = self.failed = 0  # of this attempt: tokens sampled, rollouts that failed
        self.outcomes: dict[str, dict[tuple[int, int], Outcome]] = {name: {} for name in self.specs}  # by example's place and rollout
        self._records: dict[str, Records[Outcome]] = {}
        self._unrecorded: dict[str, list[Outcome]] = {name: [] for name in self.specs}  # failures since the last rollout that did not fail
        self.total = sum(len(self._places(name)) * self._rollouts(name) for name in self.specs)

    @property
    def played(self) -> int:
        """Rollouts that are finished."""
        return sum(map(len, self.outcomes.values()))

    def keep_records(self, digest: str | None) -> None:
        """Keep records, and read what an earlier attempt has finished with the same weights. `digest`: theirs; None: not known."""
        for name in self.specs:
            self._records[name] = records = Records(self.folder(name) / PLAYED, Outcome)
            records.belong_to(digest, f"version {self.version} of the weights")
            self.outcomes[name] = {(one.place, one.rollout): one for one in records.read()}

    def forget_records(self) -> None:
        """Delete the records of single rollouts: the version has its own record now."""
        for records in self._records.values():
            records.delete()

    def folder(self, name: str) -> Path:
        """Where the results of an environment are."""
        return self.paths.evaluation_of(name, self.config.model.name, self.version)

    def jobs(self) -> Iterator[Job]:
        """What is not finished, the environments in turn."""
        return in_turn(
            [
                jobs_of(name, self.envs[name], self._places(name), self._rollouts(name), self.outcomes[name].__contains__)
                for name in self.specs
            ]
        )

    def add(self, job: Job, rollouts: Sequence[Rollout]) -> None:
        """Take the rollouts of a job. One that failed for good scores 0.

        A failure is recorded once a later rollout succeeds: if everything fails from here on, nothing is, and it is all played again.
        """
        found = [outcome_of(rollout) for rollout in rollouts]
        self.outcomes[job.env] |= {(one.place, one.rollout): one for one in found}
        self.tokens += sum(rollout.trace.num_sampled for rollout in rollouts)
        self.failed += sum(not one.is_completed for one in found)
        self._unrecorded[job.env] += found
        if any(one.is_completed for one in found):
            self.record(job.env)

    def record(self, name: str) -> None:
        """Record what was played of an environment."""
        for one in self._unrecorded.pop(name) if self._records else ():
            self._records[name].add(one)
        self._unrecorded[name] = []

    def write(self, pass_threshold: float, facts: Mapping[str, Any]) -> dict[str, float]:
        """Write the results of all environments, and return the metrics of the version's record. Call it in a thread.

        `facts`: further ones for `metadata.json`.
        """
        seconds = time.monotonic() - self.began
        values: dict[str, float] = {"time/evaluation": seconds}
        for name, spec in self.specs.items():
            examples = [[self.outcomes[name][place, n] for n in range(self._rollouts(name))] for place in self._places(name)]
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
            write_results(self.folder(name), examples, own | dict(facts), pass_threshold)
            values |= (scores := score_metrics(name, examples, pass_threshold))
            score = f"eval/{name}/avg@{len(examples[0])}"
            log.info("evaluated version %d on %d examples of %s: %s %.4f", self.version, len(examples), name, score, scores[score])
            if errors := [one.error for example in examples for one in example if not one.is_completed]:
                last = (errors[-1] or {}).get("error_chain_str")
                log.warning("%s: %d rollouts failed and score 0; the last: %s", name, len(errors), last)
        return values

    def _places(self, name: str) -> range:
        """The rows of an environment that are evaluated."""
        rows = len(self.envs[name].rows)
        return range(min(rows, self.specs[name].num_examples or rows))

    def _rollouts(self, name: str) -> int:
        return self.specs[name].rollouts_per_example or 1


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
