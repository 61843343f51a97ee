"""One version of a model, evaluated on several environments by `rlx eval`: what is played, what was played already, and its scores.

eval/<env>--<model>/step_N/played.jsonl     one finished rollout a line, appended; deleted when the version has its record
eval/<env>--<model>/step_N/played_by.txt    digest of the weights that played them; deleted with it
eval/<env>--<model>/step_N/results.jsonl, metadata.json     in verifiers' layout, at the end
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rlx.concurrent import first_failure
from rlx.config.evaluated import evaluated
from rlx.config.schema_eval import EvalRoot
from rlx.envs.base import Environment
from rlx.paths import RunPaths
from rlx.rollout.evaluate import facts_of, write_scores
from rlx.rollout.failures import ErrorRate
from rlx.rollout.models import Model, Origin
from rlx.rollout.play import FIRST, Job, NothingWorks, Player, Records, in_turn, jobs_of, note_weights, other_weights
from rlx.rollout.results import Outcome, outcome_of
from rlx.types import Rollout

log = logging.getLogger("rlx.evaluator")

PLAYED, PLAYED_BY = "played.jsonl", "played_by.txt"


class Scored:
    """The evaluation of one version."""

    def __init__(
        self, config: EvalRoot, paths: RunPaths, envs: Mapping[str, Environment], version: int, model: Model, digest: str | None = None
    ) -> None:
        """Reads the rollouts that an earlier attempt has finished with the same weights. `digest`: theirs (`Origin`); None: not known."""
        self.config, self.paths, self.envs, self.version, self.model = config, paths, envs, version, model
        self.specs = evaluated(config)
        self.began = time.monotonic()
        self.tokens = 0  # sampled in this attempt
        self._errors = ErrorRate(config.orchestrator.max_error_rate)
        self._failures: dict[str, list[Outcome]] = {name: [] for name in self.specs}  # since the last rollout that did not fail
        self._succeeded = dict.fromkeys(self.specs, False)
        self._records, self._outcomes = {}, {}
        for name in self.specs:
            if digest is not None:
                self._note_weights(name, digest)
            records = Records(self._folder(name) / PLAYED, Outcome)
            known = {(one.place, one.rollout): one for one in records.read()}
            self._records[name], self._outcomes[name] = records, known
            self._succeeded[name] = bool(known)
        self.total = sum(len(self._places(name)) * self._rollouts(name) for name in self.specs)
        retries = config.orchestrator.max_retries
        most = config.concurrency
        self.player = Player(envs, max_retries=retries, max_concurrent=most, played=self._played, check=model.check, away=model.away)
        self.before = sum(map(len, self._outcomes.values()))
        self.player.begun = self.player.finished = self.before

    async def play(self) -> None:
        """Play what is not finished, all environments side by side. Raises NothingWorks, or what `Model.check` raises."""
        await first_failure(self.player.play(self._jobs()), forever=[self.model.follow(self.player)])
        for name in self.specs:
            self._flush(name)
            if not self._succeeded[name]:
                raise self._hopeless(name)

    def progress(self) -> dict[str, Any]:
        """For the console: rollouts, tokens and seconds of this attempt."""
        failed = sum(one.failed for known in self._outcomes.values() for one in known.values())
        return {
            "what": "model" if self.config.weights_dir is None else f"step_{self.version}" if self.version else "base",
            "done": self.player.finished,
            "total": self.total,
            "before": self.before,
            "tokens": self.tokens,
            "failed": failed + sum(map(len, self._failures.values())),
            "seconds": time.monotonic() - self.began,
            **self.player.now(),
        }

    def write(self, origin: Origin) -> dict[str, float]:
        """Write the results of all environments; return the metrics of the version's record. Call it in a thread.

        `origin`: what has played.
        """
        seconds = time.monotonic() - self.began
        values: dict[str, float] = {"time/evaluation": seconds} | ({} if origin.attested is None else {"eval/attested": origin.attested})
        for name, spec in self.specs.items():
            facts = facts_of(name, self.config, spec, self.version)
            if self.config.client.base_url:
                facts["base_url"] = self.config.client.base_url
            facts |= {"served_model": origin.model, "weights": origin.weights, "attested": origin.attested, "time": seconds}
            values |= write_scores(self._folder(name), self._examples(name), facts, self.config.pass_threshold)
        return values

    def forget(self) -> None:
        """Delete the records of single rollouts: the version has its own record now."""
        for records in self._records.values():
            records.close()
            records.path.unlink()
            records.path.with_name(PLAYED_BY).unlink(missing_ok=True)

    def _note_weights(self, name: str, digest: str) -> None:
        """Note which weights play. Discards what an earlier attempt played with others: training may have written the version anew."""
        played, note = self._folder(name) / PLAYED, self._folder(name) / PLAYED_BY
        before = other_weights(note, digest)
        if before is not None and played.is_file() and (lines := played.read_bytes().count(b"\n")):
            log.warning(
                "version %d of the weights has changed since an earlier attempt (digest %s in %s, now %s): the %d rollouts of %s that were "
                "played with the old ones are discarded and played again",
                *(self.version, before, note, digest, lines, name),
            )
            played.unlink()
        note_weights(note, digest)

    def _jobs(self) -> Iterator[Job]:
        """The jobs of all environments in turn."""
        each = [
            jobs_of(name, self.envs[name], self._places(name), self._rollouts(name), self._outcomes[name].__contains__)
            for name in self.specs
        ]
        return in_turn(each)

    def _played(self, job: Job, rollouts: Sequence[Rollout]) -> None:
        """Keep the outcomes of a job.

        A failure is recorded once a later rollout succeeds: if everything fails from here on, nothing is, and it is all played again.
        """
        outcomes = [outcome_of(rollout) for rollout in rollouts]
        self.tokens += sum(one.num_tokens or 0 for one in outcomes)
        self._failures[job.env] += outcomes
        self._errors.add([one for one in rollouts if one.status == "ok"], lambda: self.player.in_flight)  # the others: below
        if not all(one.failed for one in outcomes):
            self._succeeded[job.env] = True
            self._flush(job.env)
        elif len(self._failures[job.env]) >= max(FIRST, self.config.concurrency if self._succeeded[job.env] else 0):
            raise self._hopeless(job.env)

    def _flush(self, name: str) -> None:
        if not self._succeeded[name]:
            return
        for one in self._failures[name]:
            if (one.place, one.rollout) not in self._outcomes[name]:
                self._records[name].add(one)
                self._outcomes[name][one.place, one.rollout] = one
        self._failures[name] = []

    def _hopeless(self, name: str) -> NothingWorks:
        failed = self._failures[name]
        return NothingWorks("evaluation", name, len(failed), failed[-1].example_id, failed[-1].stop, failed[-1].error)

    def _examples(self, name: str) -> list[list[Outcome]]:
        """The rollouts of each example [N][n], in a fixed order."""
        known = self._outcomes[name]
        return [[known[place, member] for member in range(self._rollouts(name))] for place in self._places(name)]

    def _places(self, name: str) -> range:
        rows = len(self.envs[name].rows)
        return range(min(rows, self.specs[name].num_examples or rows))

    def _rollouts(self, name: str) -> int:
        return self.specs[name].rollouts_per_example or 1

    def _folder(self, name: str) -> Any:
        return self.paths.evaluation_of(name, self.config.model.name, self.version)
