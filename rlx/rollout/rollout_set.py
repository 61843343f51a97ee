"""The rollouts that an evaluation or a synthesis asks for: which ones, which are finished, and which are missing.

`rlx eval` and `rlx synthesize` append each finished rollout to a file (`eval/finished.jsonl`, `rollouts/finished.jsonl`), one a line, so
that a killed command goes on after the last one. A rollout that failed is played again then. Each line names the weights that sampled it:
lines of other weights are ignored, so two models are never mixed.
"""

from __future__ import annotations

import itertools
import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from rlx.envs.base import Environment
from rlx.rollout.eval_results import Outcome, outcome_of
from rlx.rollout.failures import ErrorRate, RolloutsFailed
from rlx.rollout.rollout_runner import Job, RolloutRunner
from rlx.types import Rollout, Task

log = logging.getLogger(__name__)


class RolloutSet:
    """See the module's text."""

    keeps_content = False  # what was said stays in memory, too; otherwise in the file alone

    def __init__(
        self,
        envs: Mapping[str, Environment],
        wanted: Mapping[str, tuple[int | None, int]],
        *,
        version: int = 0,
        file: Path | None = None,
        digest: str | None = None,
    ) -> None:
        """`wanted`: (number of examples, None: all; rollouts of each) of each environment. `version`: of the policy.

        `file`: where finished rollouts are kept, and read from; None: nowhere. `digest`: of the weights; None: not known.
        Raises ValueError if an environment has no examples, or for a line of the file that is not a rollout.
        """
        if empty := [name for name, env in envs.items() if not len(env.rows)]:
            raise ValueError(f"there is nothing to play: no examples in {', '.join(empty)}")
        self.envs, self.version, self.digest, self.path = envs, version, digest, file
        self.places = {name: range(min(len(env.rows), wanted[name][0] or len(env.rows))) for name, env in envs.items()}
        self.members = {name: wanted[name][1] for name in envs}
        self.total = sum(len(self.places[name]) * self.members[name] for name in envs)
        self.outcomes: dict[tuple[str, int, int], Outcome] = {}  # by environment, the example's place, and number of the rollout
        self.tokens = self.failed = 0  # of this attempt: sampled tokens, rollouts that failed
        self.began = time.monotonic()
        if file is not None:
            every = read_finished(file)
            earlier = [one for one in every if one.version == version and self._wants(one)]
            same = of_weights(earlier, digest)
            self.outcomes = {one.key: self._kept(one) for one in same if one.is_completed}
            if len(same) < len(earlier):
                log.warning(
                    "version %d of the weights has changed since an earlier attempt (digest %s, now %s): its rollouts are played again",
                    *(version, next(one.weights for one in earlier if one not in same), digest),
                )
            self._encoder, self._file = msgspec.json.Encoder(enc_hook=repr), file.open("ab")
            if same and every[-1] is not same[-1]:  # weights that came back: an export takes those of the last line
                self._file.writelines(self._encoder.encode(one) + b"\n" for one in same if one.is_completed)
                self._file.flush()
        self.before = len(self.outcomes)  # rollouts that earlier attempts have finished

    def count_finished(self, errors: ErrorRate) -> None:
        """Tell `errors` what earlier attempts have finished: otherwise the failures, which are played first, are all that it knows."""
        for name in self.envs:
            errors.succeeded(name, sum(key[0] == name for key in self.outcomes))

    def jobs(self) -> Iterator[Job]:
        """What is missing, the environments in turn."""
        streams = [self._jobs(name, env) for name, env in self.envs.items()]
        return (job for together in itertools.zip_longest(*streams) for job in together if job is not None)

    def _jobs(self, name: str, env: Environment) -> Iterator[Job]:
        """The missing rollouts of an environment; whole groups if its rewards compare them.

        A row is read when its turn comes, because reading all would block the event loop. The seeds of a rollout follow from the policy's
        seed, the environment's name, the example, its place and the member, so a rollout is the same whenever it is sampled.
        """
        for place in self.places[name]:
            left = [member for member in range(self.members[name]) if (name, place, member) not in self.outcomes]
            if not left:
                continue
            row = dict(env.rows[place])
            task = Task(env=env.name, example_id=int(row["example_id"]), index=place, row=row)
            for members in [tuple(range(self.members[name]))] if env.scores_groups else [(member,) for member in left]:
                yield Job(name, task, members)

    def add(self, job: Job, rollouts: Sequence[Rollout]) -> None:
        """Take the rollouts of a job, after its retries."""
        for rollout in rollouts:
            one = outcome_of(rollout, env=job.env, version=self.version, weights=self.digest)
            self.outcomes[one.key] = self._kept(one)
            self.tokens += rollout.trace.num_sampled
            self.failed += not one.is_completed
            if self.path is not None:
                self._file.write(self._encoder.encode(one) + b"\n")
        if self.path is not None:
            self._file.flush()

    def examples(self, name: str) -> list[list[Outcome]]:
        """[N][n] the rollouts of each example of an environment."""
        return [[self.outcomes[name, place, member] for member in range(self.members[name])] for place in self.places[name]]

    def check_success(self) -> None:
        """Raise RolloutsFailed if every rollout of an environment failed: its score of 0 would not be the model's."""
        succeeded = {one.env for one in self.outcomes.values() if one.is_completed}
        for name in self.envs.keys() - succeeded:
            own = [one for one in self.outcomes.values() if one.env == name]
            last = own[-1].error or {}
            raise RolloutsFailed(f"environment {name}: all {len(own)} rollouts failed; the last: {last.get('error_chain_str')}")

    def progress(self, what: str, runner: RolloutRunner) -> dict[str, Any]:
        """For the console: rollouts, tokens and seconds of this attempt."""
        return {
            "what": what,
            "done": len(self.outcomes),
            "total": self.total,
            "before": self.before,
            "tokens": self.tokens,
            "failed": self.failed,
            "seconds": time.monotonic() - self.began,
            "in_flight": runner.in_flight,
            "oldest": max((seconds for _, _, seconds in runner.waiting()), default=0.0),
        }

    def _kept(self, one: Outcome) -> Outcome:
        return one if self.keeps_content else msgspec.structs.replace(one, prompt=None, completion=None, nodes=msgspec.UNSET)

    def _wants(self, one: Outcome) -> bool:
        return one.env in self.envs and one.place in self.places[one.env] and one.rollout < self.members[one.env]


def read_finished(path: Path) -> list[Outcome]:
    """All rollouts in a file, in the order in which they were added. An incomplete last line, which a kill has left, is cut off.

    Raises ValueError for a line that is not a rollout.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    data = path.read_bytes() if path.exists() else b""
    whole = data[: data.rfind(b"\n") + 1]
    if len(whole) < len(data):
        os.truncate(path, len(whole))
    decoder, found = msgspec.json.Decoder(Outcome), []
    for number, line in enumerate(whole.splitlines(), 1):
        try:
            found.append(decoder.decode(line))
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise ValueError(f"{path}, line {number}: {error}.\n  fix: delete this line, and its rollout is played again") from error
    return found


def of_weights(outcomes: Sequence[Outcome], digest: str | None) -> list[Outcome]:
    """The rollouts that these weights have sampled, or if they are not known, the latest weights that are.

    Where a record does not name its weights they are taken to be the same.
    """
    wanted = digest or next((one.weights for one in reversed(outcomes) if one.weights is not None), None)
    return [one for one in outcomes if one.weights in (None, wanted)]
