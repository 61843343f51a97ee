"""Which example is played next: the environments in the proportion of their weights, each in its own shuffled order.

The whole sequence follows from the run's seed, the weights and the sizes of the data sets. Knows nothing of policies or rollouts.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from rlx.envs.base import Environment
from rlx.types import Task

log = logging.getLogger(__name__)


CHUNK = 1000  # rows that are read at once


def data_digest(rows: Sequence[Any]) -> dict[str, Any]:
    """Number and digest of a data set's examples, in their order: `{"examples": n, "xxh3": hex}`."""
    encoder = msgspec.json.Encoder(enc_hook=repr, order="deterministic")
    digest = xxhash.xxh3_128()
    for start in range(0, len(rows), CHUNK):
        digest.update(encoder.encode(rows[start : start + CHUNK]))
    return {"examples": len(rows), "xxh3": digest.hexdigest()}


class TaskSequence:
    """An endless sequence of tasks. Every environment is reshuffled whenever all its examples were used (an epoch)."""

    def __init__(self, envs: Mapping[str, Environment], weights: Mapping[str, float], seed: int) -> None:
        """Raises ValueError when no environment has a positive weight, or one of them has no examples."""
        self.envs = {name: env for name, env in envs.items() if weights[name] > 0}
        if not self.envs:
            raise ValueError(f"no environment has a weight above 0: {dict(weights)}; give one with envs.<name>.weight=1")
        for name, env in self.envs.items():
            if len(env.rows) == 0:
                raise ValueError(f"envs.{name} has no examples")
        self.weights = {name: weights[name] for name in self.envs}
        self.seed = seed
        self.index = 0
        self._credit = dict.fromkeys(self.envs, 0.0)
        self._used = dict.fromkeys(self.envs, 0)
        self._order: dict[str, NDArray[np.int64]] = {}

    def next(self, env: str | None = None) -> Task:
        """The next task, or the next one of environment `env` (to replace one of its groups without changing the mix)."""
        name = env or self._next_env()
        position = self._used[name]
        self._used[name] += 1
        size = len(self.envs[name].rows)
        epoch, place = divmod(position, size)
        if place == 0 or name not in self._order:
            self._order[name] = np.random.default_rng([self.seed, zlib.crc32(name.encode()), epoch]).permutation(size)
        row = self.envs[name].rows[int(self._order[name][place])]
        task = Task(env=name, example_id=int(row["example_id"]), index=self.index, row=row)
        self.index += 1
        return task

    def state_dict(self) -> dict[str, Any]:
        """Where the sequence is; plain numbers."""
        sizes = {name: len(env.rows) for name, env in self.envs.items()}
        return {"index": self.index, "credit": dict(self._credit), "used": dict(self._used), "sizes": sizes}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where another sequence was. An environment that is new, or whose data set has another size, begins at its beginning."""
        self.index = state["index"]
        for name, env in self.envs.items():
            size = state["sizes"].get(name)
            if size == len(env.rows):
                self._credit[name], self._used[name] = state["credit"][name], state["used"][name]
            else:
                had = "was not there" if size is None else f"had {size} examples"
                log.warning("envs.%s %s when the checkpoint was written and has %d now; it begins anew", name, had, len(env.rows))

    def _next_env(self) -> str:
        """Smooth weighted round-robin: after n draws every environment was drawn n · its share times, give or take one."""
        for name, weight in self.weights.items():
            self._credit[name] += weight
        name = max(self._credit, key=lambda n: self._credit[n])
        self._credit[name] -= sum(self.weights.values())
        return name
