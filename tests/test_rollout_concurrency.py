"""The number of rollouts in flight that follows the engines: the rules, and the simulated engine of the benchmark."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest
from test_rollout_collector import FakeEnv, collector, indices

from rlx.config.schema import Config
from rlx.inference.wire import ServerUnreachable
from rlx.rollout import concurrency
from rlx.rollout.concurrency import WINDOW, Controller

pytestmark = pytest.mark.slow

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))


class Engines:
    """Statistics by name; `look` asks the controller after a whole window of them."""

    def __init__(self, slots: int = 100, servers: int = 1) -> None:
        self.controller = Controller(slots, servers)
        self.stats = {"perf/servers": servers, "perf/running": 0, "perf/waiting": 0, "perf/preemptions": 0, "perf/kv_cache_usage": 0.5}
        self.stats["perf/answered"] = 0

    def look(self, in_flight: int, preempted: int = 0, answered: int = 10, held: int = 0, **stats: float) -> int:
        self.stats |= {f"perf/{name}": value for name, value in stats.items()}
        limit = 0
        for _ in range(WINDOW):
            self.stats["perf/preemptions"] += preempted / WINDOW
            self.stats["perf/answered"] += answered
            limit = self.controller.look(self.stats, in_flight, held)
        return limit


def test_it_begins_with_the_slots_and_grows_while_all_are_used_and_nothing_waits() -> None:
    engines = Engines()
    assert engines.look(in_flight=80, running=80) == 100, "the limit does not hold anything back"
    assert engines.look(in_flight=100, running=60) == 125
    assert engines.look(in_flight=124, running=70) == 156
    assert engines.look(in_flight=156, running=100, kv_cache_usage=0.97) == 156
    for _ in range(50):
        limit = engines.look(in_flight=round(engines.controller.limit), running=100, kv_cache_usage=0.1)
    assert limit == 800


def test_preemptions_lower_it_and_the_limit_that_was_too_high_is_approached_slowly() -> None:
    engines = Engines()
    engines.look(in_flight=100, running=90)
    lower = engines.look(in_flight=125, running=90, preempted=100)
    assert lower == 106
    assert engines.look(in_flight=120, running=90, preempted=100) == 106, "rollouts that began before still play"
    assert engines.look(in_flight=106, running=90, preempted=1) == 108
    assert engines.look(in_flight=108, running=90) == 111


def test_a_queue_that_stays_lowers_it_and_a_burst_does_not() -> None:
    engines = Engines()
    engines.look(in_flight=100, running=100)
    for waiting in (50, 0, 50, 50):
        engines.stats |= {"perf/waiting": waiting}
        limit = engines.controller.look(engines.stats, 125)
    assert limit == 156
    assert engines.look(in_flight=156, running=100, waiting=56) == 128
    assert engines.look(in_flight=128, running=100, waiting=28) == 114


def test_it_does_not_grow_while_rollouts_wait_for_busy_workers_and_falls_if_most_do() -> None:
    engines = Engines()
    assert engines.look(in_flight=100, running=60, held=30) == 100, "the workers cannot score more, however much room the engines have"
    assert engines.look(in_flight=100, running=2, held=96) == 52
    assert "wait until the environments' workers" in engines.controller.why
    for _ in range(20):
        limit = engines.look(in_flight=round(engines.controller.limit), running=0, held=round(engines.controller.limit) - 1)
    assert limit == 3
    assert engines.look(in_flight=3, running=3) == 4, "the workers keep up: more again"


def test_it_scales_with_servers_that_come_and_go_and_forgets_counters_of_a_server_that_restarted() -> None:
    engines = Engines(servers=2)
    assert engines.look(in_flight=100) == 200
    assert engines.look(in_flight=100, servers=3) == 300
    assert engines.look(in_flight=50, servers=1) == 100
    engines.look(in_flight=100, preempted=400)
    engines.stats["perf/preemptions"] = 0
    assert engines.look(in_flight=50) == 85


@pytest.mark.parametrize(
    ("load", "fixed", "seconds"),
    [
        (0, (96, 128), 400),
        (1, (192, 256, 1024), 100),
        (2, (192, 256, 1024), 100),
        (3, (1024, 2048), 400),
        (4, (64, 1024), 1200),
    ],
    ids=["small cache", "large cache", "short answers", "slow environment", "turns, small cache"],
)
def test_it_comes_near_the_best_fixed_number_on_a_simulated_engine(load: int, fixed: tuple[int, ...], seconds: float) -> None:
    """The benchmark tries more fixed numbers; the best ones are here. With a large cache every number from 256 on is the best."""
    from concurrency import LOADS, simulate  # type: ignore[attr-defined]

    best = max(simulate(LOADS[load], limit, seconds)[0] for limit in fixed)
    assert simulate(LOADS[load], None, seconds)[0] >= 0.95 * best


async def test_a_batch_on_policy_is_the_same_whatever_the_limit_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(concurrency, "POLL_SECONDS", 0.001)
    config = Config(max_steps=1, seq_len=8)
    config.inference.max_num_seqs = 4

    class Fleet:
        looks = 0

        async def stats(self) -> dict[str, float]:
            self.looks += 1
            if self.looks % 7 == 0:
                raise ServerUnreachable("for a moment")
            return {
                "perf/servers": 1,
                "perf/running": 4,
                "perf/waiting": self.looks % 3,
                "perf/preemptions": 0,
                "perf/answered": 0,
                "perf/kv_cache_usage": 0,
            }

    env, fleet = FakeEnv(lambda *_: 0.004), Fleet()
    groups = collector(env, num_groups=12, max_concurrent=4)
    following = asyncio.ensure_future(concurrency.follow(config, fleet, groups))  # type: ignore[arg-type]
    batch = await groups.collect()
    following.cancel()
    await groups.close()
    order, limit, looks = indices(batch), groups.max_concurrent, fleet.looks
    assert order == list(range(12))
    assert limit > 4
    assert looks > 5
