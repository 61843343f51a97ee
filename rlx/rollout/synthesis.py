"""A synthesis: which rollouts it needs, what is kept of each, and what becomes training data.

    jobs(envs)  →  somebody plays them  →  take(job, rollouts, policy)  →  rollouts/finished.jsonl
    write()  →  select  →  data/train.parquet, data/metadata.json

Plays nothing itself and knows no servers.
"""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

import rlx
from rlx.config.pythons import python_of, version_in
from rlx.config.schema_synthesize import SelectionConfig, SynthesizeRoot
from rlx.envs.base import Environment, sampling_of
from rlx.envs.kinds import version_of
from rlx.paths import RunPaths
from rlx.policy.transcript import transcripts_of
from rlx.rollout.play import Job, Player, Records, in_turn, jobs_of
from rlx.rollout.selection import CAUSES, Candidate, Selection, select
from rlx.rollout.synthesized import FORMATS, METADATA, rows_of, to_json, write_metadata, write_rows
from rlx.types import Rollout


class NothingKept(ValueError):
    """No rollout is left to train on. The message says why, and what to change."""


class Synthesis:
    """One run of `rlx synthesize`."""

    def __init__(self, config: SynthesizeRoot, paths: RunPaths) -> None:
        """Opens the file of finished rollouts."""
        self.config, self.paths = config, paths
        self.finished = Records(paths.finished, Candidate)
        # Places of rollouts that did not fail. A failed one is played again by the next attempt, and the later record counts.
        self.done = {one.place for one in self.finished.read() if not one.failed and self.is_wanted(one)}
        self.total = 0  # rollouts that are wanted; `begin` counts them
        self.before = len(self.done)  # rollouts that earlier attempts have finished
        self.failed = 0  # rollouts of this attempt that failed for good
        self.tokens = 0  # sampled in this attempt
        self._began = time.monotonic()
        self._places: dict[str, range] = {}  # of the examples, by environment

    @property
    def played(self) -> int:
        """Rollouts that are finished, in this attempt or before."""
        return len(self.done) + self.failed

    def progress(self, player: Player) -> dict[str, Any]:
        """For the console: rollouts, tokens and seconds of this attempt."""
        counts = {"done": self.played, "total": self.total, "before": self.before, "tokens": self.tokens, "failed": self.failed}
        return {"what": "playing", **counts, "seconds": time.monotonic() - self._began, **player.now()}

    def members(self, name: str) -> int:
        """Rollouts of each example of an environment."""
        return self.config.envs[name].rollouts_per_example or self.config.rollouts_per_example

    def examples(self, name: str) -> int | None:
        """How many examples of an environment are played; None: all."""
        return self.config.envs[name].num_examples or self.config.num_examples

    def is_wanted(self, one: Candidate) -> bool:
        """Whether a finished rollout is among those that the configuration asks for."""
        return one.member < self.members(one.env) and one.index < (self.examples(one.env) or math.inf)

    def belong_to(self, digest: str | None, what: str) -> None:
        """Put aside what an earlier attempt played with other weights. Call it before `begin`. See `Records.belong_to`.

        To choose among those instead, give the file its old name and use play=false.
        """
        if self.finished.belong_to(digest, what):
            self.done, self.before = set(), 0

    def begin(self, envs: Mapping[str, Environment]) -> None:
        """Count what is to be played. `envs`: the environments, loaded. Raises ValueError if one has no examples."""
        if empty := [name for name, env in envs.items() if not len(env.rows)]:
            raise ValueError(f"there is nothing to play: no examples in {', '.join(empty)}")
        self._places = {name: range(min(len(env.rows), self.examples(name) or len(env.rows))) for name, env in envs.items()}
        self.total = sum(len(self._places[name]) * self.members(name) for name in envs)
        self._began = time.monotonic()

    def jobs(self, envs: Mapping[str, Environment]) -> Iterator[Job]:
        """What is not finished, the environments in turn. If rewards compare a group, all of it is played together."""
        streams = [
            jobs_of(name, env, self._places[name], self.members(name), {key[1:] for key in self.done if key[0] == name}.__contains__)
            for name, env in envs.items()
        ]
        return in_turn(streams)

    def take(self, job: Job, rollouts: Sequence[Rollout]) -> None:
        """Keep the rollouts of a job, after its retries."""
        for rollout in rollouts:
            one = candidate_of(job, rollout)
            self.finished.add(one)
            self.tokens += rollout.trace.num_sampled
            if one.failed:
                self.failed += 1
            else:
                self.done.add(one.place)

    # -- the choice

    def write(self) -> dict[str, Any]:
        """Choose among the finished rollouts, write the data and its metadata, and return the metadata. Call it in a thread.

        Raises NothingKept if no rollout is left; the metadata then says why, and there is no data. Raises ValueError as `write_rows`.
        """
        config = self.config
        candidates = list({one.place: one for one in self.finished.read() if self.is_wanted(one)}.values())  # the later record counts
        choice = select(candidates, config, config.seed)
        rows = list(rows_of(choice.kept, self._facts()))
        path = self.paths.synthesized(config.format)
        for kind in FORMATS:
            if kind != config.format or not rows:
                self.paths.synthesized(kind).unlink(missing_ok=True)  # of an earlier choice
        if rows:
            write_rows(path, rows, config.format)
        metadata = self._metadata(path, candidates, choice, rows)
        write_metadata(path.with_name(METADATA), metadata)
        if not rows:
            raise NothingKept(nothing_kept(candidates, choice))
        return metadata

    def _facts(self) -> dict[str, dict[str, Any]]:
        """The columns that are the same for all rows of an environment."""
        config = self.config
        same = {
            "model": config.model.name,
            "endpoint": config.client.base_url,
            "seed": config.seed,
            "run": config.run.name,
            "commit": commit_of(self.paths),
        }
        return {
            name: {
                **same,
                "env_id": env.id,
                "env_version": version_of(env.id) if (own := python_of(env.id, env.python)) is None else version_in(own, env.id),
                "sampling": to_json(sampling_of(config, env)),
            }
            for name, env in config.envs.items()
        }

    def _metadata(
        self, path: Path, candidates: Sequence[Candidate], choice: Selection, rows: Sequence[Mapping[str, Any]]
    ) -> dict[str, Any]:
        config, facts = self.config, self._facts()
        rewards = [candidate.reward for candidate in candidates if not candidate.failed]
        return {
            "file": str(path) if rows else None,
            "format": config.format,
            "rows": len(rows),
            "raw_text_rows": sum(isinstance(row["prompt"], str) for row in rows),
            "rollouts": {
                "played": len(candidates),
                "kept": len(choice.kept),
                "dropped": {cause: choice.dropped[cause] for cause in CAUSES if choice.dropped[cause]},
            },
            "examples": {"played": num_examples(candidates), "kept": num_examples(choice.kept)},
            "reward": {"played": mean(rewards), "kept": mean([candidate.reward for candidate in choice.kept])},
            "selection": {field.name: getattr(config, field.name) for field in fields(SelectionConfig)},
            "asked": config.asked,  # for `rlx.runs.run.has_done`
            "environments": {
                name: {
                    "id": env.id,
                    "version": facts[name]["env_version"],
                    "args": env.args,
                    "split": env.split,
                    "examples": num_examples([one for one in candidates if one.env == name]),
                    "rollouts_per_example": self.members(name),
                    "sampling": sampling_of(config, env),
                    "kept": Counter(candidate.env for candidate in choice.kept)[name],
                }
                for name, env in config.envs.items()
            },
            "model": {
                "name": config.model.name,
                "endpoint": config.client.base_url or (list(config.inference.base_url) or None),
                "weights_dir": config.weights_dir,
                "step": config.step,
            },
            "seed": config.seed,
            "run": config.run.name,
            "commit": facts[next(iter(facts))]["commit"],
            "rlx": rlx.__version__,
            "date": provenance_of(self.paths).get("time"),
        }


def candidate_of(job: Job, rollout: Rollout) -> Candidate:
    """A finished rollout, as the selection sees it."""
    ok = rollout.status == "ok"
    versions = rollout.trace.versions
    return Candidate(
        env=job.env,
        index=job.task.index,
        member=rollout.member,
        reward=rollout.reward if ok else 0.0,
        failed=not ok,
        truncated=rollout.is_truncated,
        transcripts=tuple(transcripts_of(rollout.trace)),
        about={
            "example_id": rollout.task.example_id,
            "rewards": to_json(rollout.rewards),
            "stop": rollout.stop,
            "num_tokens": rollout.trace.num_sampled if rollout.trace.has_tokens else None,
            "policy_version": versions[0] if len(versions) == 1 and versions[0] >= 0 else None,
        },
    )


def num_examples(candidates: Sequence[Candidate]) -> int:
    """Different examples among the rollouts."""
    return len({(candidate.env, candidate.index) for candidate in candidates})


def mean(values: Sequence[float]) -> float | None:
    """The mean; None without values, because JSON has no NaN."""
    return float(np.mean(values)) if values else None


def nothing_kept(candidates: Sequence[Candidate], choice: Selection) -> str:
    """Why no rollout is left, and what to do."""
    causes = ", ".join(f"{count} {cause}" for cause, count in choice.dropped.most_common())
    rewards = [candidate.reward for candidate in candidates if not candidate.failed]
    text = f"no rollout is kept: of {len(candidates)}, {causes}"
    if rewards:
        text += f"; their rewards are {min(rewards):g} to {max(rewards):g}"
    return f"{text}. Choose again with other keys, such as min_reward={max(rewards, default=0):g}, and resume=latest play=false"


def provenance_of(paths: RunPaths) -> dict[str, Any]:
    """The run's provenance record; empty without one."""
    return json.loads(paths.provenance.read_text()) if paths.provenance.is_file() else {}


def commit_of(paths: RunPaths) -> str | None:
    """The commit of rlx's code, with `-dirty` if it had changes; None if it is not known."""
    source = provenance_of(paths).get("source") or {}
    return f"{source['commit']}{'-dirty' if source.get('diff') else ''}" if source.get("commit") else None
