"""Throughput of environment workers with rewards that block: `python benchmarks/workers.py`.

Plays rollouts whose reward takes `--seconds` and compares the rate with the workers' own limit, number of workers / seconds.
What a worker costs: `python benchmarks/orchestrator.py --workers N`.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import uvloop

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))

from served_stand_in import served

from rlx.config.schema import Config, ModelConfig, TrainedEnvConfig
from rlx.envs.load import give_policy, load_environments, wait_loaded
from rlx.models.tiny import build_tokenizer
from rlx.policy.chat import load_chat
from rlx.trace import Turn
from rlx.types import Task

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


def throughput(options: argparse.Namespace) -> None:
    """Rollouts per second with a reward that blocks."""
    workers = options.workers
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "blocking_reward.py").write_text(BLOCKING)
        os.environ["PYTHONPATH"] = folder
        config = Config(seq_len=256, loss={"_target_": "unused"}, advantage={"_target_": "rlx.advantages.group.group_norm"})
        config.model.name, config.orchestrator.env_workers, config.sampling.max_tokens = "tiny", workers, 8
        config.envs = {"slow": TrainedEnvConfig(id="blocking_reward", args={"seconds": options.seconds, "cpu": options.cpu})}
        envs: Any = load_environments(config, lambda _: None)
        wait_loaded(envs, lambda _: None)
        chat = load_chat(build_tokenizer(256), ModelConfig(name="tiny"))
        pool = envs["slow"]

        async def run() -> tuple[float, float]:
            blocked = Blocked()
            watching = asyncio.create_task(blocked.watch())
            rows = pool.rows
            tasks = [Task(env="slow", example_id=n, index=n, row=rows[n % len(rows)]) for n in range(options.rollouts)]
            async with served(Instant()) as sampler:
                give_policy(envs, config, chat, sampler)
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
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each reward")
    parser.add_argument("--rollouts", type=int, default=16)
    parser.add_argument("--cpu", action="store_true", help="the reward computes instead of sleeping; needs a free core for each worker")
    throughput(parser.parse_args())


if __name__ == "__main__":
    main()
