"""The order in which the examples of one environment are played: epochs, a curriculum, and pools by how well they went.

    order of an epoch     shuffled; the first epoch follows a column of the examples if there is a curriculum
    pools                 normal → easy or hard, by the mean reward of the example's latest group (`orchestrator.buffer`)
    a draw                choose a pool by its share, then its next example in the order of epochs

Without pools every epoch plays every example once. The sequence of draws depends on the seed, the examples and the recorded rewards only.
"""

from __future__ import annotations

import functools
import operator
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlx.arrays import Int
from rlx.config.schema import BufferConfig
from rlx.rollout.eval_stats import at_least
from rlx.rollout.state import PoolState

NORMAL, EASY, HARD = 0, 1, 2
NAMES = ("normal", "easy", "hard")
CHUNK = 4096  # examples looked at together when the next one of a pool is searched
ORDERS_KEPT = 3  # epochs whose order is kept: each pool is at an epoch of its own


class ExampleSampler:
    """The examples of one environment, in the order in which they are played."""

    def __init__(
        self, name: str, rows: Sequence[Mapping[str, Any]], seed: int, buffer: BufferConfig, curriculum: str | None = None
    ) -> None:
        """`curriculum`: see `EnvConfig`. Raises ValueError if an example lacks that column, or if its values cannot be sorted."""
        self.name, self.rows, self.seed, self.buffer = name, rows, seed, buffer
        self.pooled = buffer.easy_threshold is not None or buffer.hard_threshold is not None
        self.size = len(rows)
        self._orders: dict[int, NDArray[np.int64]] = {}
        self._ranks = self._curriculum(curriculum) if curriculum is not None else None
        self._pool: Int = np.zeros(self.size if self.pooled else 0, dtype=np.int32)
        self._counts = [self.size, 0, 0]
        self._places = [0, 0, 0]  # by pool: where its next example is searched, counted over all epochs
        self._credit = [0.0, 0.0, 0.0]

    def draw(self) -> int:
        """The row of the next example to play."""
        pool = self._next_pool() if self.pooled else NORMAL
        place = self._places[pool]
        while True:
            epoch, start = divmod(place, self.size)
            order = self._order(epoch)
            found = np.flatnonzero(self._pool[order[start : start + CHUNK]] == pool) if self.pooled else (0,)
            if len(found):
                self._places[pool] = place + int(found[0]) + 1
                return int(order[start + int(found[0])])
            place = min(place + CHUNK, (epoch + 1) * self.size)

    def played(self, place: int, reward: float) -> None:
        """The group of the example at this place had this mean reward: put the example into its pool."""
        if not self.pooled:
            return
        easy, hard = self.buffer.easy_threshold, self.buffer.hard_threshold
        is_easy = easy is not None and at_least(reward, easy)
        pool = EASY if is_easy else HARD if hard is not None and at_least(hard, reward) else NORMAL
        self._counts[self._pool[place]] -= 1
        self._counts[pool] += 1
        self._pool[place] = pool

    def counts(self) -> dict[str, int]:
        """Examples in each pool; empty without pools."""
        return dict(zip(NAMES, self._counts, strict=True)) if self.pooled else {}

    def state(self) -> PoolState:
        """The position, for a checkpoint."""
        return PoolState(pools=self._pool.copy(), places=list(self._places), credit=list(self._credit))

    def restore(self, state: PoolState) -> None:
        """Continue from a position in the same examples. Pools of a run without pools, and for a run without pools, are ignored."""
        self._places, self._credit = list(state.places), list(state.credit)
        if self.pooled and len(state.pools):
            self._pool = state.pools.copy()
            self._counts = [int((self._pool == pool).sum()) for pool in range(len(NAMES))]

    def _next_pool(self) -> int:
        """Smooth weighted round-robin over the pools. An empty pool's turn goes to the normal, then the hard, then the easy one."""
        shares = [1 - self.buffer.easy_fraction - self.buffer.hard_fraction, self.buffer.easy_fraction, self.buffer.hard_fraction]
        self._credit = [credit + share for credit, share in zip(self._credit, shares, strict=True)]
        chosen = max(range(len(shares)), key=lambda pool: self._credit[pool])
        self._credit[chosen] -= 1
        return next(pool for pool in (chosen, NORMAL, HARD, EASY) if self._counts[pool])

    def _order(self, epoch: int) -> NDArray[np.int64]:
        if epoch not in self._orders:
            order = np.random.default_rng([self.seed, zlib.crc32(self.name.encode()), epoch]).permutation(self.size)
            if epoch == 0 and self._ranks is not None:
                order = order[np.argsort(self._ranks[order], kind="stable")]
            if len(self._orders) >= ORDERS_KEPT:
                self._orders.pop(next(iter(self._orders)))
            self._orders[epoch] = order
        return self._orders[epoch]

    def _curriculum(self, column: str) -> NDArray[np.int64]:
        """Rank of each row by the column; equal values have equal ranks."""
        path, falling = column.removeprefix("-").split("."), column.startswith("-")
        try:
            values: list[Any] = [functools.reduce(operator.getitem, path, row) for row in self.rows]
            if any(value is None or value != value for value in values):  # NaN is neither smaller nor larger than any
                raise TypeError("None and NaN have no place")
            ranks = {value: rank for rank, value in enumerate(sorted(set(values), reverse=falling))}
        except (KeyError, TypeError) as error:
            what = f"{type(error).__name__}: {error}"
            raise ValueError(f"envs.{self.name}.curriculum={column}: the examples cannot be sorted by this column: {what}") from error
        return np.array([ranks[value] for value in values])
