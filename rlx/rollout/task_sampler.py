"""Chooses the next example: environments in proportion to their weights, each in its own order (`rlx.rollout.example_sampler`).

The run's seed, the weights and the sizes of the data sets determine the whole sequence; with pools the rewards do, too.
A task's index depends only on its environment and its place in that environment's order, so it does not depend on when other groups were
replaced.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import xxhash

from rlx.config.schema import BufferConfig
from rlx.envs.base import Environment
from rlx.paths import RunPaths, write_text
from rlx.rollout.example_sampler import ExampleSampler
from rlx.rollout.state import SamplerState
from rlx.types import Rollout, Task

log = logging.getLogger(__name__)


CHUNK = 1000  # rows read at a time


def data_digest(rows: Sequence[Any]) -> dict[str, Any]:
    """Number and digest of a data set's examples, in their order: `{"examples": n, "xxh3": hex}`."""
    encoder = msgspec.json.Encoder(enc_hook=repr, order="deterministic")
    digest = xxhash.xxh3_128()
    for start in range(0, len(rows), CHUNK):
        digest.update(encoder.encode(rows[start : start + CHUNK]))
    return {"examples": len(rows), "xxh3": digest.hexdigest()}


def keep_digests(paths: RunPaths, envs: Mapping[str, Environment], kept: bool = False) -> dict[str, Any]:
    """Write the digests of the environments' examples, by their names in `envs`, and return them.

    `kept`: whether earlier attempts left finished rollouts. Then ValueError is raised, and nothing written, if their examples were others.
    """
    digests = {name: data_digest(env.rows) for name, env in envs.items()}
    if kept and paths.data.is_file():
        before = json.loads(paths.data.read_text())["envs"]
        if changed := [name for name in digests if before.get(name, digests[name]) != digests[name]]:
            raise ValueError(
                f"the examples of {', '.join(changed)} are not those of the earlier attempts, to which the finished rollouts belong.\n"
                "  fix: install the earlier version of the environment, or begin anew with another run.name or clean=true"
            )
    write_text(paths.data, json.dumps({"envs": digests}, indent=1) + "\n")
    return digests


def interleave_envs(tasks: Sequence[Task]) -> list[Task]:
    """The tasks in an order that depends on nothing else: sorted by index within each environment, environments evenly spread."""
    places = []
    for name in {task.env for task in tasks}:
        own = sorted((task for task in tasks if task.env == name), key=lambda task: task.index)
        places += [((place + 0.5) / len(own), task.index, task) for place, task in enumerate(own)]
    return [task for _, _, task in sorted(places, key=lambda place: place[:2])]


class TaskSampler:
    """An endless sequence of tasks. Without pools, an environment is reshuffled after all its examples were used (an epoch).

    With E environments, the n-th task of the e-th of them has the index n · E + e.
    """

    def __init__(
        self,
        envs: Mapping[str, Environment],
        weights: Mapping[str, float],
        seed: int,
        buffer: BufferConfig | None = None,
        curricula: Mapping[str, str | None] | None = None,
        digests: Mapping[str, Any] | None = None,
    ) -> None:
        """`curricula`: the column by environment. `digests`: of the environments' examples; None: their numbers tell them apart.

        Raises ValueError if no environment has a positive weight, if one with a positive weight has no examples, or if its examples
        lack the column of its curriculum, or for pools if it trains several agents.
        """
        self.envs = {name: env for name, env in envs.items() if weights[name] > 0}
        if not self.envs:
            raise ValueError(f"no environment has a weight above 0: {dict(weights)}.\n  fix: give one: envs.<name>.weight=1")
        self.weights = {name: weights[name] for name in self.envs}
        self.digests = {name: (digests or {}).get(name, len(env.rows)) for name, env in self.envs.items()}
        self._examples: dict[str, ExampleSampler] = {}
        for name, env in self.envs.items():
            if len(env.rows) == 0:
                raise ValueError(f"envs.{name} has no examples")
            self._examples[name] = own = ExampleSampler(name, env.rows, seed, buffer or BufferConfig(), (curricula or {}).get(name))
            if own.pooled and len(env.agents) > 1:
                raise ValueError(
                    f"envs.{name} trains several agents in turn ({', '.join(env.agents)}), and orchestrator.buffer has one pool for an "
                    "example: what is easy for one agent may be hard for the other.\n"
                    f"  fix: train one (envs.{name}.agents=[{env.agents[0]}]), or remove the thresholds of orchestrator.buffer"
                )
        self._credit = dict.fromkeys(self.envs, 0.0)
        self._used = dict.fromkeys(self.envs, 0)

    def next(self, env: str | None = None) -> Task:
        """The next task. With `env`, the next task of that environment (it replaces one of its groups without changing the mix)."""
        name = env or self._next_env()
        position = self._used[name]
        self._used[name] += 1
        place = self._examples[name].draw()
        row = self.envs[name].rows[place]
        return Task(env=name, example_id=int(row["example_id"]), index=self._index(name, position), row=row, place=place)

    def share(self, env: str) -> float:
        """The fraction of all tasks that comes from `env`, before replacements."""
        return self.weights[env] / sum(self.weights.values())

    def played(self, groups: Sequence[Sequence[Rollout]]) -> None:
        """Put the examples of these groups into the pools that their rewards say."""
        for rollouts in sorted(groups, key=lambda rollouts: rollouts[0].task.index):
            reward = sum(rollout.reward for rollout in rollouts) / len(rollouts)
            self._examples[rollouts[0].task.env].played(rollouts[0].task.place, reward)

    def pool_sizes(self) -> dict[str, float]:
        """Metrics: examples in each pool of each environment; empty without pools."""
        sizes = {name: examples.counts() for name, examples in self._examples.items()}
        return {f"buffer/{name}/{pool}": float(count) for name, counts in sizes.items() for pool, count in counts.items()}

    def state(self) -> SamplerState:
        """The current position."""
        pools = tuple(examples.state() for examples in self._examples.values())
        return SamplerState(
            envs=tuple(self.envs), credit=dict(self._credit), used=dict(self._used), digests=dict(self.digests), pools=pools
        )

    def restore(self, state: SamplerState) -> None:
        """Continue from another sampler's position. An environment that is new or has other examples starts over."""
        for name, digest in self.digests.items():
            if state.digests.get(name) == digest:
                self._credit[name], self._used[name] = state.credit[name], state.used[name]
                self._examples[name].restore(state.pools[state.envs.index(name)])
            else:
                log.warning(
                    "envs.%s starts over: its examples are not those of the checkpoint (%s, now %s). An environment that draws its "
                    "examples at random needs a seed (envs.%s.args)",
                    *(name, state.digests.get(name, "none"), digest, name),
                )

    def remap_task(self, task: Task, state: SamplerState) -> Task | None:
        """A task of the sampler that wrote `state`, with its index in this one; None if its environment is gone or starts over.

        A checkpoint has no rows, so the task gets that of its place.
        """
        if task.env not in self.envs or state.digests.get(task.env) != self.digests[task.env]:
            return None
        row = self.envs[task.env].rows[task.place]
        return replace(task, index=self._index(task.env, task.index // len(state.envs)), row=row)

    def _index(self, env: str, position: int) -> int:
        return position * len(self.envs) + list(self.envs).index(env)

    def _next_env(self) -> str:
        """Smooth weighted round-robin: after n draws, an environment was drawn n · share times, plus or minus one."""
        for name, weight in self.weights.items():
            self._credit[name] += weight
        name = max(self._credit, key=lambda n: self._credit[n])
        self._credit[name] -= sum(self.weights.values())
        return name
