"""Environment workers: CPU per rollout, workers included, and throughput with rewards that compute: `python benchmarks/workers.py`.

The first part runs the whole main loop of the orchestrator against the mock server of `benchmarks/orchestrator.py`, with the environment in
the orchestrator (0) and in 1 and 2 workers. The second part plays rollouts whose reward blocks for `--seconds` and compares the rate with
the workers' own limit, number of workers / seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import multiprocessing as mp
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import uvloop
from orchestrator import publish, serve

from rlx.config.schema import Config, TrainedEnvConfig
from rlx.envs.load import give_policy, load_environments, wait_loaded
from rlx.envs.pool import WorkerPool
from rlx.heartbeat import Heartbeat
from rlx.inference.endpoints import Endpoint
from rlx.inference.fleet import Fleet
from rlx.inference.sampler import Sampler
from rlx.models.tiny import build_tokenizer
from rlx.paths import RunPaths
from rlx.policy.chat import Chat
from rlx.roles.orchestrator import Orchestrator, first_failure
from rlx.types import Task, Turn

BLOCKING = """
import time
import verifiers as vf
from datasets import Dataset

def load_environment(seconds: float = 1.0, cpu: bool = False) -> vf.Environment:
    async def slow(completion) -> float:
        clock = time.process_time if cpu else time.monotonic
        end = clock() + seconds
        while clock() < end:
            if not cpu:
                time.sleep(max(0.0, end - clock()))
        return 1.0
    return vf.SingleTurnEnv(dataset=Dataset.from_list([{"question": "q", "answer": "a"}] * 64), rubric=vf.Rubric(funcs=[slow]))
"""


def config_of(options: argparse.Namespace, workers: int) -> Config:
    """The configuration of the first part."""
    config = Config(
        max_steps=options.steps,
        max_async_level=1,
        seq_len=64 + options.tokens,
        loss={"_target_": "unused", "aggregate": "token_mean"},
        advantage={"_target_": "rlx.advantages.group.group_norm"},
        envs={"reverse_text": TrainedEnvConfig(id="rlx-reverse-text")},
    )
    config.sampling.max_tokens = options.tokens
    config.orchestrator.batch_size, config.orchestrator.rollouts_per_example = options.batch, 8
    config.orchestrator.max_concurrent, config.orchestrator.env_workers = options.concurrent, workers
    config.trainer.micro_batch_tokens = 8192
    config.model.name = "tiny"
    config.ckpt.interval = None
    return config


def cpu_of(pid: int) -> float:
    """CPU seconds that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Blocked:
    """How long the event loop did not run, each time."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    async def watch(self) -> None:
        """Look every 2 ms."""
        while True:
            before = time.monotonic()
            await asyncio.sleep(0.002)
            self.seconds.append(time.monotonic() - before - 0.002)


def overhead(options: argparse.Namespace, workers: int) -> None:
    """CPU per rollout of the whole main loop. Call it in a process of its own."""
    port = mp.get_context("spawn").Value("i", 0)
    server = mp.get_context("spawn").Process(target=serve, args=(port, options.tokens, 0.0), daemon=True)
    server.start()
    config = config_of(options, workers)
    envs: Any = load_environments(config, lambda _: None)
    wait_loaded(envs, lambda _: None)
    pids = [worker.child.pid for env in envs.values() if isinstance(env, WorkerPool) for worker in env._workers]
    chat = Chat(build_tokenizer(config.seq_len))
    while port.value == 0:
        time.sleep(0.01)

    async def run(root: Path) -> str:
        endpoints, blocked = [Endpoint(f"http://127.0.0.1:{port.value}", "")], Blocked()
        async with Fleet(endpoints) as fleet, Sampler(endpoints, 600.0, restore=fleet.restore) as sampler:
            give_policy(envs, config, chat, sampler)
            paths = RunPaths(root)
            orchestrator = Orchestrator(config, paths, envs, sampler, fleet, Heartbeat(paths, "orchestrator"))
            wall, cpu, before = time.monotonic(), time.process_time(), {pid: cpu_of(pid) for pid in pids}
            watching, used = asyncio.create_task(blocked.watch()), 0.0

            async def publish_and_look() -> None:
                nonlocal used
                await publish(paths, options.steps)
                used = sum(cpu_of(pid) - before[pid] for pid in pids)

            await first_failure(orchestrator.run(), publish_and_look())
            watching.cancel()
            wall, cpu, finished = time.monotonic() - wall, time.process_time() - cpu, orchestrator.collector.tally.finished
        return (
            f"{workers} workers: {1000 * (cpu + used) / finished:.3f} ms CPU per rollout (orchestrator {1000 * cpu / finished:.3f}, "
            f"workers {1000 * used / finished:.3f}), {finished / wall:.0f} rollouts/s, event loop blocked at the 99.9th percentile "
            f"{1000 * float(np.quantile(blocked.seconds, 0.999)):.0f} ms, {finished} rollouts"
        )

    gc.freeze()
    with tempfile.TemporaryDirectory() as folder:
        print(uvloop.run(run(Path(folder))), flush=True)
    server.kill()


class Instant:
    """A policy that answers at once."""

    async def generate(self, prompt_ids: Any, sampling: dict, request_id: str, affinity: int) -> Turn:
        ids = np.array([9, 2], dtype=np.int32)
        return Turn(
            prompt_ids=np.asarray(prompt_ids, dtype=np.int32),
            completion_ids=ids,
            logprobs=np.zeros(2, np.float32),
            versions=np.zeros(2, np.int32),
            temperature=1.0,
            finish_reason="stop",
        )


def throughput(options: argparse.Namespace, workers: int) -> None:
    """Rollouts per second with a reward that blocks."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "blocking_reward.py").write_text(BLOCKING)
        os.environ["PYTHONPATH"] = folder
        config = config_of(options, workers)
        config.envs = {"slow": TrainedEnvConfig(id="blocking_reward", args={"seconds": options.seconds, "cpu": options.cpu})}
        envs: Any = load_environments(config, lambda _: None)
        wait_loaded(envs, lambda _: None)
        give_policy(envs, config, Chat(build_tokenizer(256)), Instant())
        pool = envs["slow"]

        async def run() -> tuple[float, float]:
            blocked = Blocked()
            watching = asyncio.create_task(blocked.watch())
            rows = pool.rows
            tasks = [Task(env="slow", example_id=n, index=n, row=rows[n % len(rows)]) for n in range(options.rollouts)]
            began = time.monotonic()
            played = await asyncio.gather(*(pool.play(task, [0], 0) for task in tasks))
            wall = time.monotonic() - began
            assert all(rollout.status == "ok" for (rollout,) in played), played
            watching.cancel()
            await pool.close()
            return wall, float(np.quantile(blocked.seconds, 0.999))

        wall, worst = uvloop.run(run())
    rate, limit = options.rollouts / wall, workers / options.seconds
    kind = "CPU time" if options.cpu else "wall-clock time, blocking"
    print(
        f"{workers} workers, {options.seconds:g} s ({kind}) in each reward: {rate:.3f} rollouts/s, "
        f"{rate / limit:.2f} of the workers' limit; event loop blocked at the 99.9th percentile {1000 * worst:.0f} ms",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--concurrent", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128, help="tokens per completion")
    parser.add_argument("--seconds", type=float, default=2.0, help="of each reward in the second part")
    parser.add_argument("--rollouts", type=int, default=16, help="rollouts of the second part")
    parser.add_argument("--cpu", action="store_true", help="the reward computes instead of sleeping; needs a free core for each worker")
    parser.add_argument("--part", choices=("overhead", "throughput"), help="only this part")
    options = parser.parse_args()
    for part, function in (("overhead", overhead), ("throughput", throughput)):
        if options.part in (None, part):
            for workers in options.workers if part == "overhead" else [max(options.workers)]:
                process = mp.get_context("spawn").Process(target=function, args=(options, workers))
                process.start()
                process.join()
                if process.exitcode:
                    sys.exit(process.exitcode)


if __name__ == "__main__":
    main()
