"""Chooses the next example: environments in proportion to their weights, each in its own order (`rlx.rollout.pools`).

The run's seed, the weights and the sizes of the data sets determine the whole sequence; with pools the rewards do, too.
A task's index depends only on its environment and its place in that environment's order, so it does not depend on when other groups were
replaced.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import xxhash

from rlx.checkpoints.folders import read_start
from rlx.checkpoints.forked import read_forked
from rlx.config.schema import BufferConfig, Config
from rlx.envs.base import Environment
from rlx.paths import RunPaths, write_text
from rlx.rollout.pools import Examples
from rlx.rollout.state import SequenceState
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


def keep_digests(paths: RunPaths, envs: Mapping[str, Environment], kept: bool = False, trained: bool = False) -> None:
    """Write the digests of the environments' examples, by their names in `envs`.

    `kept`: whether earlier attempts left finished rollouts. Then ValueError is raised, and nothing written, if their examples were others.
    `trained`: whether training goes on from a checkpoint of this run (`goes_on`). Then other examples are a warning: a job that was
    requeued should not end because a row has today's date in it.
    """
    digests = {name: data_digest(env.rows) for name, env in envs.items()}
    if (kept or trained) and paths.data.is_file():
        before = json.loads(paths.data.read_text())["envs"]
        changed = [name for name in digests if before.get(name, digests[name]) != digests[name]]
        if changed and not trained:
            raise ValueError(
                f"the examples of {', '.join(changed)} are not those of the earlier attempts, so their finished rollouts belong to others. "
                "Install the earlier version of the environment, or begin anew with another run.name or clean=true"
            )
        for name in changed:
            log.warning(
                "envs.%s has other examples than before this attempt: %s → %s. Training goes on at their places, so it may skip some and "
                "repeat others. An environment that draws its examples at random needs a seed (envs.%s.args)",
                name, _in_words(before[name]), _in_words(digests[name]), name,
            )  # fmt: skip
    write_text(paths.data, json.dumps({"envs": digests}, indent=1) + "\n")


def _in_words(digest: Mapping[str, Any]) -> str:
    return f"{digest['examples']} examples (xxh3 {digest['xxh3']})"


def goes_on(paths: RunPaths) -> bool:
    """Whether this attempt goes on from what the run itself has trained. At the start of a fork it does not: see `other_examples`."""
    start, forked = read_start(paths), read_forked(paths)
    return start is not None and (forked is None or forked.step != start.step)


def other_examples(config: Config, paths: RunPaths, step: int) -> dict[str, str]:
    """The environments whose examples, or their order, are others than in the run from which this one was forked, and why.

    `step`: of the checkpoint from which this attempt starts; those of the fork itself have its own examples. Call it after `keep_digests`.
    """
    forked = read_forked(paths)
    if forked is None or forked.step != step or forked.data is None:
        return {}
    here, there = json.loads(paths.data.read_text())["envs"], forked.data.get("envs", {})
    if order := forked.other_order(config):
        return dict.fromkeys(here, order)
    return {name: "other examples" for name, digest in here.items() if there.get(name, digest) != digest}


def started_over(state: SequenceState, names: Collection[str]) -> SequenceState:
    """The position without these environments, which then start over: nothing of theirs is carried on."""
    return replace(state, sizes={name: size for name, size in state.sizes.items() if name not in names})


def mixed(tasks: Sequence[Task]) -> list[Task]:
    """The tasks in an order that depends on nothing else: sorted by index within each environment, environments evenly spread."""
    places = []
    for name in {task.env for task in tasks}:
        own = sorted((task for task in tasks if task.env == name), key=lambda task: task.index)
        places += [((place + 0.5) / len(own), task.index, task) for place, task in enumerate(own)]
    return [task for _, _, task in sorted(places, key=lambda place: place[:2])]


class TaskSequence:
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
    ) -> None:
        """Raises ValueError if no environment has a positive weight, if one with a positive weight has no examples, or if its examples
        lack the column of its curriculum, or for pools if it trains several agents. `curricula`: the column by environment.
        """
        self.envs = {name: env for name, env in envs.items() if weights[name] > 0}
        if not self.envs:
            raise ValueError(f"no environment has a weight above 0: {dict(weights)}; give one with envs.<name>.weight=1")
        for name, env in self.envs.items():
            if len(env.rows) == 0:
                raise ValueError(f"envs.{name} has no examples")
        self.weights = {name: weights[name] for name in self.envs}
        self._examples = {
            name: Examples(name, env.rows, seed, buffer or BufferConfig(), (curricula or {}).get(name)) for name, env in self.envs.items()
        }
        for name, env in self.envs.items():
            if self._examples[name].pooled and len(env.agents) > 1:
                raise ValueError(
                    f"envs.{name} trains several agents in turn ({', '.join(env.agents)}), and orchestrator.buffer has one pool for an "
                    "example: what is easy for one agent may be hard for the other. Train one (envs."
                    f"{name}.agents=[{env.agents[0]}]), or remove orchestrator.buffer.easy_threshold and .hard_threshold"
                )
        self._credit = dict.fromkeys(self.envs, 0.0)
        self._used = dict.fromkeys(self.envs, 0)

    def next(self, env: str | None = None) -> Task:
        """The next task. With `env`, the next task of that environment (it replaces one of its groups without changing the mix)."""
        name = env or self._next_env()
        position = self._used[name]
        self._used[name] += 1
        row = self.envs[name].rows[self._examples[name].draw()]
        return Task(env=name, example_id=int(row["example_id"]), index=self._index(name, position), row=row)

    def share(self, env: str) -> float:
        """The fraction of all tasks that comes from `env`, before replacements."""
        return self.weights[env] / sum(self.weights.values())

    def played(self, groups: Sequence[Sequence[Rollout]]) -> None:
        """Put the examples of these groups into the pools that their rewards say."""
        for rollouts in sorted(groups, key=lambda rollouts: rollouts[0].task.index):
            reward = sum(rollout.reward for rollout in rollouts) / len(rollouts)
            self._examples[rollouts[0].task.env].played(rollouts[0].task.example_id, reward)

    def pool_sizes(self) -> dict[str, float]:
        """Metrics: examples in each pool of each environment; empty without pools."""
        sizes = {name: examples.counts() for name, examples in self._examples.items()}
        return {f"buffer/{name}/{pool}": float(count) for name, counts in sizes.items() for pool, count in counts.items()}

    def state(self) -> SequenceState:
        """The current position."""
        sizes = {name: len(env.rows) for name, env in self.envs.items()}
        pools = tuple(examples.state() for examples in self._examples.values())
        return SequenceState(envs=tuple(self.envs), credit=dict(self._credit), used=dict(self._used), sizes=sizes, pools=pools)

    def restore(self, state: SequenceState) -> None:
        """Continue from another sequence's position. An environment that is new or has another number of examples starts over.

        So does one that `state` has no size of (`started_over`).
        """
        for name, env in self.envs.items():
            size = state.sizes.get(name)
            if size == len(env.rows):
                self._credit[name], self._used[name] = state.credit[name], state.used[name]
                self._examples[name].restore(state.pools[state.envs.index(name)])
            else:
                had = "was not there, or had other examples," if size is None else f"had {size} examples"
                log.warning("envs.%s %s when the checkpoint was written and has %d now; it starts over", name, had, len(env.rows))

    def carried(self, task: Task, state: SequenceState) -> Task | None:
        """A task of the sequence that wrote `state`, with its index in this one; None if its environment is gone or starts over."""
        if task.env not in self.envs or state.sizes.get(task.env) != len(self.envs[task.env].rows):
            return None
        return replace(task, index=self._index(task.env, task.index // len(state.envs)))

    def _index(self, env: str, position: int) -> int:
        return position * len(self.envs) + list(self.envs).index(env)

    def _next_env(self) -> str:
        """Smooth weighted round-robin: after n draws, an environment was drawn n · share times, plus or minus one."""
        for name, weight in self.weights.items():
            self._credit[name] += weight
        name = max(self._credit, key=lambda n: self._credit[n])
        self._credit[name] -= sum(self.weights.values())
        return name
