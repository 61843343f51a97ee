"""The load generator role: measures the servers alone, on random prompts (`bench=true bench_role=inference`).

    for step in range(max_steps):
        send a batch of requests, as many in flight as a run begins with, and wait for all answers
        tokens per second, share of the peak, seconds to the first token, memory → a record of source `inference`

A step begins with idle servers, so its rates count only work that it has done itself.

Prompts and answers have the lengths of the trainer's benchmark: groups with a common prompt, `sampling.max_tokens` new tokens or up to
that. Requests go through the run's own sampler; no environment plays, and the servers keep version 0. Beside the load, requests for one
token measure how long a new prompt waits for its first token.
"""

from __future__ import annotations

import asyncio
import logging
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from rlx.aio import all_of, first_failure
from rlx.config.load import load_run
from rlx.config.schema import Config
from rlx.heartbeat import INTERVAL, WAITING_FOR_MODEL, Heartbeat, wait_for_model
from rlx.inference.fleet import Fleet
from rlx.inference.replica import ServerState, memory_of
from rlx.inference.sampler import Sampler
from rlx.inference.wire import ServerUnreachable
from rlx.metrics import MetricsWriter
from rlx.paths import RunPaths, listed
from rlx.policy.source import fake_rollouts
from rlx.polling import Preempted
from rlx.rollout.policy_backend import connect_servers
from rlx.rollout.role import begin, end, run_until_stopped
from rlx.tracking import tracked
from rlx.types import TrainingSample

if TYPE_CHECKING:
    from rlx.train.flops import Flops

log = logging.getLogger("rlx.load_generator")
POLL_SECONDS = 0.1  # seconds between two looks at the servers' state
PROBES = 0.05  # share of the time in which a request for a first token is in flight


class RequestCounters:
    """What one step has measured."""

    def __init__(self) -> None:
        self.began = time.perf_counter()
        self.seconds: list[float] = []  # of each answered request
        self.lengths: list[int] = []  # tokens that the engine computed for each: the last one is sampled and not read
        self.prompts = self.answers = 0  # tokens
        self.first: list[float] = []  # seconds until a first token
        self.states: list[dict[str, float]] = []  # of the servers, at each look

    def took(self, turn_prompt: int, turn_answer: int, seconds: float) -> None:
        """Count an answered request."""
        self.seconds.append(seconds)
        self.lengths.append(turn_prompt + turn_answer - 1)
        self.prompts += turn_prompt
        self.answers += turn_answer

    def metrics(self, now: float) -> dict[str, float]:
        """Metrics by name of the step that ends at `now`, a value of `time.perf_counter`."""
        seconds, looks = now - self.began, self.states
        values = {
            "time/step": seconds,
            "time/rollout_mean": statistics.fmean(self.seconds),
            "time/rollout_max": max(self.seconds),
            "perf/rollouts_per_second": len(self.seconds) / seconds,
            "perf/inference_tokens_per_second": self.answers / seconds,
            "perf/prompt_tokens_per_second": self.prompts / seconds,
        }
        if self.first:
            values["time/first_token"] = statistics.fmean(self.first)
        if looks:
            values |= {name: statistics.fmean(look[name] for look in looks) for name in looks[0]}
            values["perf/preemptions"] = looks[-1]["perf/preemptions"]
        return values


def compute_of(flops: Flops, lengths: Sequence[int], seconds: float, devices: Sequence[str]) -> dict[str, float]:
    """Metrics by name of the operations of a forward over sequences of `lengths`: per second and device, and as a share of its peak."""
    from rlx.train.flops import peak_of

    def rate(causal: bool) -> float:
        return (flops.count(lengths, causal=causal) - flops.count_backward(lengths, causal=causal)) / seconds / max(len(devices), 1)

    values, peak = {"perf/tflops": rate(causal=False) / 1e12}, peak_of(devices[0]) if devices else None
    if peak is not None:
        values |= {"perf/mfu": rate(causal=False) / peak, "perf/mfu_causal": rate(causal=True) / peak}
    return values


class LoadGenerator:
    """Keeps the servers busy and writes what it measures."""

    def __init__(self, config: Config, paths: RunPaths, fleet: Fleet, sampler: Sampler, flops: Flops, heartbeat: Heartbeat) -> None:
        self.config, self.paths, self.fleet, self.sampler, self.flops, self.heartbeat = config, paths, fleet, sampler, flops, heartbeat
        self.source = fake_rollouts(config)
        self.in_flight = min(config.concurrency, config.num_groups * config.orchestrator.rollouts_per_example)
        self.metrics = MetricsWriter(paths.metrics, "inference")
        self.step = self.answered = 0
        self.servers: list[ServerState] = []
        self.seen: list[dict[str, float]] = []  # the servers' latest state
        self.tally = RequestCounters()

    @property
    def batch(self) -> int:
        """Requests of a step."""
        return self.source.groups * self.source.members

    async def run(self) -> None:
        """Send all requests. Raises the first error of any part."""
        await first_failure(self._load(), forever=[self._beat(), self._look(), self._probe()])

    async def _load(self) -> None:
        for step in range(self.config.max_steps):
            samples = enumerate(chain.from_iterable(self.source.receive(step).mini_batches))
            self.step, self.tally = step, RequestCounters()
            await all_of(self._lane(samples) for _ in range(self.in_flight))
            ended = time.perf_counter()
            with suppress(ServerUnreachable):  # the record then has the latest that is known
                self.servers = await self.fleet.states()
            self._end_step(ended)

    async def _lane(self, samples: Iterator[tuple[int, TrainingSample]]) -> None:
        """Ask for one answer after the other, until nothing is left of the step's samples, which other lanes take as well."""
        for place, sample in samples:
            number, group = self.step * self.batch + place, self.step * self.source.groups + sample.group
            prompt, tokens = sample.token_ids[~sample.loss_mask], int(sample.loss_mask.sum())
            seconds = await self._ask(f"load-{number}", prompt.tolist(), tokens, seed=number, affinity=group)
            self.tally.took(len(prompt), tokens, seconds)
            self.answered += 1

    async def _ask(self, request_id: str, prompt: list[int], tokens: int, *, seed: int, affinity: int) -> float:
        """Sample exactly `tokens` tokens. Returns the seconds."""
        s = self.config.sampling
        own = {"temperature": s.temperature, "top_p": s.top_p, "top_k": s.top_k, "min_p": s.min_p}
        lengths: dict[str, Any] = {"max_tokens": tokens, "min_tokens": tokens, "seed": seed}
        began = time.perf_counter()
        turn = await self.sampler.generate(prompt, own | lengths, request_id, affinity)
        assert len(turn.completion_ids) == tokens, f"{request_id} has {len(turn.completion_ids)} new tokens instead of {tokens}"
        return time.perf_counter() - began

    def _end_step(self, ended: float) -> None:
        """Write the record of the step that ended at `ended`."""
        done = self.tally
        done.states = done.states or self.seen  # a step may be shorter than the time between two looks
        values = done.metrics(ended) | memory_of(self.servers) | {"perf/in_flight": self.in_flight}
        self.metrics.write(
            self.step,
            values | compute_of(self.flops, done.lengths, values["time/step"], [d["device"] for s in self.servers for d in s.devices]),
        )
        log.info("step %d: %.0f tokens/s sampled", self.step, values["perf/inference_tokens_per_second"])

    async def _look(self) -> None:
        """Note what the servers say of themselves."""
        while True:
            with suppress(ServerUnreachable):  # it may start again, and requests wait for it; other errors end the benchmark
                self.seen = [await self.fleet.stats()]
                self.tally.states += self.seen
            await asyncio.sleep(POLL_SECONDS)

    async def _probe(self) -> None:
        """Ask for one token of a new prompt now and then, one request at a time."""
        rng, number = np.random.default_rng([self.config.seed, self.config.max_steps]), 0
        while True:
            prompt = rng.integers(0, self.source.vocab_size, self.source.prompt_tokens[1]).tolist()
            seconds = await self._ask(f"first-{number}", prompt, 1, seed=number, affinity=-1 - number)
            self.tally.first.append(seconds)
            number += 1
            await asyncio.sleep(seconds * (1 / PROBES - 1))

    async def _beat(self) -> None:
        """Report the current phase and the progress."""
        while True:
            self.heartbeat.progress = self.answered
            self.heartbeat.beat(f"load, requests {self.answered}/{self.config.max_steps * self.batch}", step=self.step)
            if listed(self.paths.preempt):
                raise Preempted
            await asyncio.sleep(INTERVAL)


async def generate_load(config: Config, paths: RunPaths, flops: Flops, heartbeat: Heartbeat) -> None:
    """Connect to the servers and measure to the end."""
    others = bool(config.inference.base_url)
    async with connect_servers(config, paths, {}, None, heartbeat.beat, adopt=others) as (fleet, sampler):
        sampler.version = fleet.version
        await LoadGenerator(config, paths, fleet, sampler, flops, heartbeat).run()


def main() -> int:
    """The role as a process. Returns its exit code."""
    config, paths, heartbeat = begin("load_generator", __doc__, load_run)
    source = wait_for_model(paths, config.inference.startup_timeout, lambda: heartbeat.beat(WAITING_FOR_MODEL))
    heartbeat.beat("importing torch")
    from rlx.train.flops import flops_of

    flops = flops_of(source, trust_remote_code=config.model.trust_remote_code)
    with tracked(config, paths, "load_generator"):
        return run_until_stopped(generate_load(config, paths, flops, heartbeat), paths)


if __name__ == "__main__":
    end(main, "load_generator")
