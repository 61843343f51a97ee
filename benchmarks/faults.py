"""How long it takes until a fault of an environment is noticed: `python benchmarks/faults.py [FAULT …]`.

Each fault is one of `tests/packages/rlx_test_envs/rlx_test_faults.py`, in one of two examples, played by a real environment worker with a
policy that answers at once. Two times are measured: until the faulty rollout has its cause, and until another rollout that was asked for
at the same moment has been played (by the worker's replacement, if the fault cost the worker).
"""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from workers import Instant, served

from rlx.config.schema import Config, ModelConfig, TrainedEnvConfig
from rlx.envs.load import give_policy, load_environments, wait_loaded
from rlx.models.tiny import build_tokenizer
from rlx.policy.chat import Chat, load_chat
from rlx.trace import Turn
from rlx.types import Rollout, Task

PACKAGE = Path(__file__).resolve().parent.parent / "tests" / "packages" / "rlx_test_envs"
FAULTS: dict[str, dict[str, Any]] = {  # arguments of the environment
    "raise": {"kind": "raise"},
    "nan": {"kind": "nan"},
    "none": {"kind": "none"},
    "text": {"kind": "text"},
    "cpu": {"kind": "cpu", "seconds": 2},
    "response": {"kind": "raise", "where": "env_response"},
    "endless": {"where": "endless"},
    "overlong": {"where": "prompt"},
    "exit": {"kind": "exit"},
    "kill": {"kind": "kill"},
    "c": {"kind": "c", "seconds": 3600},
    "power": {"kind": "power"},
    "thread": {"kind": "c", "seconds": 3600, "where": "thread"},
    "leak": {"kind": "leak", "seconds": 700},  # MiB
    "answer": {},  # not the environment's: the policy answers `env=math` with 9^{9^9}, which its checker cannot compute
}


class Answering(Instant):
    """Answers the first question with 9^{9^9} and the others with 1."""

    def __init__(self, chat: Chat) -> None:
        self.chat, self.asked = chat, 0

    async def generate(self, prompt_ids: Any, sampling: dict, request_id: str, affinity: int) -> Turn:
        turn = await super().generate(prompt_ids, sampling, request_id, affinity)
        ids = np.array([*self.chat.encode("\\boxed{1}" if self.asked else "\\boxed{9^{9^9}}"), turn.completion_ids[-1]], np.int32)
        self.asked += 1
        return replace(turn, completion_ids=ids, logprobs=np.zeros(len(ids), np.float32), versions=np.zeros(len(ids), np.int32))


def measure(name: str, timeout: float, memory_gb: float) -> str:
    """One row of the table."""
    config = Config(seq_len=256, loss={"_target_": "unused"}, advantage={"_target_": "rlx.advantages.group.group_norm"})
    config.model.name, config.sampling.max_tokens = "tiny", 8
    config.orchestrator.env_workers, config.orchestrator.env_worker_memory_gb = 1, memory_gb
    if name == "answer":
        config.seq_len, config.sampling.max_tokens = 512, 32
        config.envs = {name: TrainedEnvConfig(id="rlx_math", args={"level": 1, "num_examples": 2}, rollout_timeout=timeout)}
    else:
        args = FAULTS[name] | {"num_examples": 2, "every": 2}
        config.envs = {name: TrainedEnvConfig(id="rlx_test_faults", args=args, rollout_timeout=timeout)}
    envs: Any = load_environments(config, lambda _: None)
    wait_loaded(envs, lambda _: None)
    chat = load_chat(build_tokenizer(config.seq_len), ModelConfig(name="tiny"))
    pool = envs[name]

    async def play(place: int) -> tuple[Rollout, float]:
        began = time.monotonic()
        (rollout,) = await pool.play(Task(env=name, example_id=place, index=place, row=pool.rows[place]), [0], 0)
        return rollout, time.monotonic() - began

    async def both() -> str:
        async with served(Answering(chat) if name == "answer" else Instant()) as sampler:
            give_policy(envs, config, chat, sampler)
            return await noticing()

    async def noticing() -> str:
        (bad, noticed), (good, went_on) = await asyncio.gather(play(0), play(1))
        for _ in range(100):  # a worker that grew is replaced between two rollouts
            if name != "leak" or pool.replaced["memory"]:
                break
            await asyncio.sleep(0.1)
            went_on = (await play(1))[1]
        await pool.close()
        said = " ".join((bad.error or "").split()).replace(str(PACKAGE), "…")
        if name == "answer":
            cause, said = f"check_timed_out {bad.metrics['check_timed_out']:g}", f"reward {bad.reward:g}"
            return f"| `{name}` | {cause} | {noticed:.2f} s | {good.status} after {went_on:.2f} s | {said} |"
        cause = bad.stop if bad.status != "ok" else "memory" if pool.replaced["memory"] else f"none: {bad.stop}, reward {bad.reward:g}"
        return f"| `{name}` | {cause} | {noticed:.2f} s | {good.status} after {went_on:.2f} s | {said} |"

    return asyncio.run(both())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("faults", nargs="*", help=f"of {', '.join(FAULTS)}; default: all")
    parser.add_argument("--timeout", type=float, default=5.0, help="rollout_timeout, seconds")
    parser.add_argument("--memory", type=float, default=0.9, help="env_worker_memory_gb")
    options = parser.parse_args()
    os.environ["PYTHONPATH"] = str(PACKAGE)
    print("| fault | cause | noticed after | the other rollout | what is said |\n| --- | --- | --- | --- | --- |")
    for name in options.faults or FAULTS:
        print(measure(name, options.timeout, options.memory), flush=True)


if __name__ == "__main__":
    main()
