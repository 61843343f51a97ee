"""How well the adaptive number of rollouts in flight does, beside every fixed one: `python benchmarks/concurrency.py`.

A simulated engine with the costs of a real one, in simulated time: a step costs a constant, a part per decoded sequence and a part per
prefilled token; the cache is a number of tokens; when it is full, the sequence that came last loses its cache and is prefilled again. The
clients are rollouts of one or several turns that start as soon as the limit allows. Prints new tokens per simulated second.

With `--real CACHE` the engine is a real vLLM server on CPU (the tiny architecture with random weights) with a cache of so many tokens, and
the limit is moved by the orchestrator's own `follow`. The answers have exponential lengths. Prints new tokens per second.
"""

from __future__ import annotations

import argparse
import asyncio
import heapq
import random
import statistics
import time
from dataclasses import dataclass
from typing import Any

from inference import served

from rlx.config.load import compose
from rlx.config.schema import Config
from rlx.inference.endpoints import Endpoint
from rlx.inference.fleet import Fleet
from rlx.inference.sampler import Sampler
from rlx.rollout.concurrency import POLL_SECONDS, Controller, follow


@dataclass(frozen=True)
class Load:
    """Engine and rollouts."""

    name: str
    slots: int = 256
    cache: int = 200_000  # tokens
    prompt: int = 200
    mean: int = 2000  # tokens of an answer; the lengths are exponential, cut at `longest`
    longest: int = 8192
    turns: int = 1
    wait: float = 0.0  # seconds of the environment between two turns
    step: float = 0.010  # seconds
    per_sequence: float = 0.00004
    per_token: float = 0.00004  # prefill


LOADS = (
    Load("long answers, small cache"),
    Load("long answers, large cache", cache=2_000_000),
    Load("short answers", prompt=50, mean=30, longest=128),
    Load("turns, slow environment", prompt=200, mean=100, longest=400, turns=6, wait=10.0),
    Load("turns, small cache", prompt=200, mean=300, longest=1000, turns=6, wait=2.0, cache=60_000),
)


class Sequence:
    """One rollout."""

    __slots__ = ("left", "tokens", "turns")

    def __init__(self, load: Load, rng: random.Random) -> None:
        self.tokens, self.turns = load.prompt, load.turns
        self.left = length(load, rng)


def length(load: Load, rng: random.Random) -> int:
    return 1 + min(load.longest, int(rng.expovariate(1 / load.mean)))


def simulate(load: Load, limit: int | None, seconds: float, seed: int = 0) -> tuple[float, int, int]:
    """New tokens per second, preemptions and the last limit. `limit` None: adaptive. The first fifth of the time does not count."""
    rng = random.Random(seed)
    controller = Controller(load.slots, 1) if limit is None else None
    now, most = 0.0, load.slots if limit is None else limit
    running: list[Sequence] = []
    waiting: list[Sequence] = []  # the next to run is last
    away: list[tuple[float, int, Sequence]] = []  # in their environments
    in_flight = answered = preemptions = tokens = cached = serial = 0
    looked, counted, counted_at = 0.0, 0, 0.0
    while now < seconds:
        if counted_at == 0.0 and now > seconds / 5:
            counted, counted_at = tokens, now
        while away and away[0][0] <= now:
            waiting.insert(0, heapq.heappop(away)[2])
        while in_flight < most:
            waiting.insert(0, Sequence(load, rng))
            in_flight += 1
        prefilled = 0
        while waiting and len(running) < load.slots and cached + waiting[-1].tokens + 1 <= load.cache and prefilled < 8192:
            sequence = waiting.pop()
            prefilled += sequence.tokens
            cached += sequence.tokens
            running.append(sequence)
        while cached + len(running) > load.cache:
            victim = running.pop()
            cached -= victim.tokens
            waiting.append(victim)
            preemptions += 1
        cost = load.step + load.per_sequence * len(running) + load.per_token * prefilled
        if not running:
            cost = max(load.step, away[0][0] - now) if away else load.step
        now += cost
        tokens += len(running)
        cached += len(running)
        still = []
        for sequence in running:
            sequence.tokens += 1
            sequence.left -= 1
            if sequence.left:
                still.append(sequence)
                continue
            cached -= sequence.tokens
            answered += 1
            sequence.turns -= 1
            if sequence.turns:
                sequence.left, serial = length(load, rng), serial + 1
                heapq.heappush(away, (now + rng.expovariate(1 / load.wait) if load.wait else now, serial, sequence))
            else:
                in_flight -= 1
        running = still
        while controller is not None and now - looked > POLL_SECONDS:
            looked += POLL_SECONDS
            stats = {
                "perf/servers": 1, "perf/running": len(running), "perf/waiting": len(waiting), "perf/preemptions": preemptions,
                "perf/kv_cache_usage": cached / load.cache, "perf/answered": answered,
            }  # fmt: skip
            most = controller.look(stats, in_flight)
    return (tokens - counted) / (now - counted_at), preemptions, most


REAL = Load("real", slots=64, prompt=40, mean=300, longest=1200)
BYTES = 2048  # a token of the tiny architecture in the cache, float32


class Lanes:
    """Requests in flight, as many as the limit allows: what `follow` needs of a `Collector`."""

    def __init__(self, sampler: Sampler, load: Load, limit: int) -> None:
        self.sampler, self.load, self.max_concurrent = sampler, load, limit
        self.rng = random.Random(0)
        self.envs: dict[str, Any] = {}
        self.done: list[tuple[float, int]] = []  # time, tokens of an answer
        self.playing: set[asyncio.Task[None]] = set()
        self.serial = 0

    @property
    def in_flight(self) -> int:
        return len(self.playing)

    def set_max_concurrent(self, limit: int) -> None:
        self.max_concurrent = limit
        while len(self.playing) < limit:
            self.serial += 1
            task = asyncio.create_task(self.play(self.serial, length(self.load, self.rng)))
            self.playing.add(task)
            task.add_done_callback(self.ended)

    def ended(self, task: asyncio.Task[None]) -> None:
        self.playing.discard(task)
        if not task.cancelled():
            task.result()
            self.set_max_concurrent(self.max_concurrent)

    async def play(self, number: int, tokens: int) -> None:
        prompt = [10 + (number * 7 + place * 13) % 80 for place in range(self.load.prompt)]
        await self.sampler.generate(prompt, {"max_tokens": tokens, "min_tokens": tokens, "seed": number}, str(number), number)
        self.done.append((time.monotonic(), tokens))

    async def close(self) -> None:
        playing = list(self.playing)
        for task in playing:
            task.cancel()
        await asyncio.gather(*playing, return_exceptions=True)


async def run_real(config: Config, endpoint: Endpoint, limit: int | None, seconds: float) -> tuple[float, float, int]:
    """New tokens and preemptions per second in the second half of the time, and the last limit."""
    async with Fleet([endpoint]) as fleet, Sampler([endpoint], 600.0) as sampler:
        lanes = Lanes(sampler, REAL, limit or REAL.slots)
        lanes.set_max_concurrent(lanes.max_concurrent)
        engines: Any = fleet
        following = asyncio.create_task(follow(config, engines, lanes)) if limit is None else None
        await asyncio.sleep(seconds / 2)
        half, before = time.monotonic(), (await fleet.stats())["perf/preemptions"]
        await asyncio.sleep(seconds / 2)
        now, after = time.monotonic(), (await fleet.stats())["perf/preemptions"]
        if following is not None:
            assert not following.done(), following.exception()
            following.cancel()
        await lanes.close()
    return sum(tokens for at, tokens in lanes.done if at > half) / (now - half), (after - before) / (now - half), lanes.max_concurrent


def real(cache: int, seconds: float, fixed: list[int], rounds: int) -> None:
    """Fixed limits and the adaptive one in turn on one server, each for three times `seconds`, measured in the second half.

    All for the same time: long answers of the beginning end late, so an earlier half counts tokens that were sampled before it.
    """
    context = REAL.prompt + REAL.longest + 8
    overrides = [
        "hardware=cpu", f"seq_len={context}", f"model.context_length={context}", f"inference.max_num_seqs={REAL.slots}",
        f"inference.kv_cache_gb={cache * BYTES / 2**30}",
    ]  # fmt: skip
    config = compose(overrides, {}).cfg
    found: dict[int | None, list[tuple[float, float, int]]] = {limit: [] for limit in (*fixed, None)}
    with served(config) as (endpoint, _):
        for _ in range(rounds):
            for limit, seen in found.items():
                seen.append(asyncio.run(run_real(config, endpoint, limit, 3 * seconds)))
    print(f"| limit, a cache of {cache} tokens | tokens/s, median of {rounds} | range | preemptions/s | last limit |")
    print("| --- | --- | --- | --- | --- |")
    for limit, seen in found.items():
        rates, preemptions, last = zip(*seen, strict=True)
        shown = f"{min(rates):.0f}-{max(rates):.0f} | {statistics.mean(preemptions):.1f} | {', '.join(map(str, last))}"
        print(f"| {limit or 'adaptive'} | {statistics.median(rates):.0f} | {shown} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, help="of each limit: simulated, 1200 by default, or a third of a real one, 20 by default")
    parser.add_argument("--real", type=int, metavar="CACHE", help="on a real engine with a cache of so many tokens")
    parser.add_argument("--limits", type=int, nargs="*", default=[4, 8, 16, 32, 64], help="fixed limits, on a real engine")
    parser.add_argument("--rounds", type=int, default=1, help="on a real engine")
    options = parser.parse_args()
    if options.real is not None:
        real(options.real, options.seconds or 20.0, options.limits, options.rounds)
        return
    options.seconds = options.seconds or 1200.0
    fixed = (16, 32, 64, 96, 128, 192, 256, 384, 512, 1024, 2048)
    print("| load | best fixed | its tokens/s | 256 | adaptive | of the best | last limit | preemptions: best, adaptive |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for load in LOADS:
        rates = {limit: simulate(load, limit, options.seconds) for limit in fixed}
        best = max(fixed, key=lambda limit: rates[limit][0])
        rate, preemptions, last = simulate(load, None, options.seconds)
        of_best = rate / rates[best][0]
        print(
            f"| {load.name} | {best} | {rates[best][0]:.0f} | {rates[256][0]:.0f} | {rate:.0f} | {of_best:.3f} | {last} | "
            f"{rates[best][1]}, {preemptions} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
