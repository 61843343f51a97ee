"""How many rollouts are in flight when `orchestrator.max_concurrent` is null: as many as the engines can use.

    preemptions           the caches are too small for this many rollouts: fewer
    a queue that stays    the engines have no slot for more: a little fewer, since waiting requests only grow old
    busy workers          rollouts wait until the environments' workers have computed for others: not more, and fewer if most of them wait
    none, at the limit    the engines have room (rollouts also wait for environments that do not compute): more

The limit never changes what is played, only when. At max_async_level 0 a batch does not depend on it. Training, `rlx eval` and
`rlx synthesize` follow their engines so; an endpoint of others does not say how busy it is.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING

from rlx.config.schema import PlayRoot
from rlx.envs.worker_metrics import pools_of
from rlx.inference.fleet import Fleet
from rlx.inference.wire import InferenceError

if TYPE_CHECKING:
    from rlx.rollout.collector import Collector
    from rlx.rollout.rollout_runner import RolloutRunner

log = logging.getLogger(__name__)

POLL_SECONDS = 0.5  # seconds between two looks at the engines
WINDOW = 4  # looks between two decisions: a queue counts if it stays for all of them
BEARABLE = 0.6  # preemptions per answered request that cost less than more concurrency gains: each repeats one prefill
FEWER, MORE, A_LITTLE = 0.85, 1.25, 1.02  # factors of the limit
HELD = 0.1  # share of the rollouts that wait for busy workers above which the limit does not grow
FULL = 0.95  # share of the caches above which the limit does not grow
MAX_RATIO = 8.0  # largest limit, as a multiple of the engines' slots: rollouts that wait for environments need no slot
MIN_RATIO = 0.03  # smallest limit, as a multiple of the slots


class Controller:
    """Decides on the limit. It knows only numbers: no engines, no time."""

    def __init__(self, slots: int, servers: int) -> None:
        """`slots`: sequences that one server decodes together (`inference.max_num_seqs`)."""
        self.slots, self.servers = slots, servers
        self.limit = float(slots * servers)
        self._known_bad = float("inf")  # the limit at which the caches were last too small; approached in small steps
        self.why = ""  # the latest change, in words
        self._looks: list[tuple[float, float, float, float, float]] = []  # in flight, running, waiting, cache usage, held by workers
        self._preemptions: float | None = None
        self._answered = 0.0

    def look(self, stats: Mapping[str, float], in_flight: int, held: int = 0) -> int:
        """The limit after one more look. `stats`: `Fleet.stats`.

        `held`: rollouts that wait until the workers of their environments have computed for others.
        """
        servers, answered = int(stats["perf/servers"]), stats["perf/answered"]
        if servers != self.servers:
            self.limit, self._known_bad = self.limit * servers / self.servers, self._known_bad * servers / self.servers
            self.servers, self._preemptions, self._looks = servers, None, []
        if self._preemptions is None or stats["perf/preemptions"] < self._preemptions:  # the first look, or a server restarted
            self._preemptions, self._answered, self._looks = stats["perf/preemptions"], answered, []
        self._looks.append((in_flight, stats["perf/running"], stats["perf/waiting"], stats["perf/kv_cache_usage"], held))
        if len(self._looks) >= WINDOW:
            self._decide(stats["perf/preemptions"] - self._preemptions, answered - self._answered)
            self._preemptions, self._answered, self._looks = stats["perf/preemptions"], answered, []
        return round(self.limit)

    def _decide(self, preempted: float, answered: float) -> None:
        slots = self.slots * self.servers
        in_flight, running, waiting, usage, held = (list(column) for column in zip(*self._looks, strict=True))
        used = min(self.limit, max(in_flight))
        if min(in_flight) > 1.05 * self.limit:
            return  # the latest decrease has not taken effect: rollouts begun before it still play
        if preempted > max(1.0, BEARABLE * answered):
            self._known_bad = used
            self.limit, self.why = used * FEWER, "the engines' caches are too small for more"
        elif min(waiting) > 0.1 * max(running) and used > 1.1 * max(running):  # not just a burst of new requests
            self.limit, self.why = max(1.1 * max(running), used - min(waiting) / 2), "requests queue at the engines"
        elif min(held) > HELD * used:
            if min(held) > used / 2:  # the engines have little to do: rollouts that begin now would only wait, and grow old
                self.limit = used - min(held) / 2
            self.why = f"{min(held):.0f} rollouts wait until the environments' workers have computed for others (orchestrator.env_workers)"
        elif max(in_flight) > 0.95 * self.limit and max(usage) < FULL:
            near = self.limit * MORE > 0.95 * self._known_bad
            self.limit, self.why = self.limit * (A_LITTLE if near else MORE), "the engines have room"
            self._known_bad *= 1.005  # lengths change while the policy learns
        self.limit = min(max(self.limit, MIN_RATIO * slots), MAX_RATIO * slots)


async def follow(config: PlayRoot, engines: Fleet, playing: Collector | RolloutRunner) -> None:
    """Adapt the limit for ever, if the configuration leaves it open. While a server does not answer, the limit stays."""
    if not config.adaptive_concurrency:
        return
    slots = config.inference.max_num_seqs
    controller = Controller(slots, playing.max_concurrent // slots)
    said = controller.limit
    while True:
        await asyncio.sleep(POLL_SECONDS)
        try:
            stats = await engines.stats()
        except InferenceError:
            continue
        playing.set_max_concurrent(controller.look(stats, playing.in_flight, sum(pool.waiting for pool in pools_of(playing.envs))))
        if not 0.8 < controller.limit / said < 1.25:
            log.info("at most %d rollouts in flight (before: %d): %s", controller.limit, said, controller.why)
            said = controller.limit
