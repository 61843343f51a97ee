"""`rlx eval` against a bare load generator on the same server: `python benchmarks/eval.py --run RUN`.

RUN is a finished run; its initial model is served once, by `rlx inference`. After one whole command `rlx eval`, this process takes turns:
it plays the same evaluation again, as the evaluator's process does, and then sends the same prompts, with the lengths of the answers, as
fast as the server takes them: no environment, no chat template, no records. Prints seconds, rollouts and tokens per second of both, the CPU
time of a rollout by process (on few cores they share them), and the median of the pairs' ratios (goal: at least 0.9). A pair takes seconds,
so that other work on the machine disturbs both alike. `--tokens N` makes every answer N tokens long.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil
import uvloop

from rlx.config.evaluated import PREFIX
from rlx.config.load import load_play
from rlx.config.schema_eval import EvalRoot
from rlx.envs.base import Local
from rlx.envs.load import load_environments, load_tokenizer, wait_loaded
from rlx.inference.endpoints import Endpoint, endpoint_file, read_endpoint
from rlx.inference.sampler import Sampler
from rlx.paths import RunPaths, write_text
from rlx.process import keep_event_loop_free
from rlx.rollout.models import connected
from rlx.rollout.scored import Scored
from rlx.waiting import wait_for

KEY = "key-of-the-benchmark"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--examples", type=int, default=256)
    parser.add_argument("--rollouts", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--tokens", type=int, help="tokens of every answer; by default the model ends its answers")
    parser.add_argument("keys", nargs="*", help="further keys of `rlx eval`")
    options = parser.parse_args()
    os.environ["BENCHMARK_KEY"] = KEY
    run = options.run.absolute()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        keys = ["--config-dir", str(run), "--config-name", "config", "run.name=null", f"run.dir={folder / 'server'}", "resume=null"]
        keys += lengths(options.tokens)[-1:]
        command = [sys.executable, "-m", "rlx.cli", "inference", *keys, f"inference.api_key={KEY}"]
        paths = RunPaths(folder / "server")
        server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        try:
            wait_for(paths.config.exists, f"the server's directory ({paths.config})", 60)
            write_text(paths.initial_model, RunPaths(run).initial_model.read_text())
            file = endpoint_file(paths, 0)
            endpoint = wait_for(lambda: read_endpoint(file) if server.poll() is None else None, f"the server ({file})", 120)
            root = folder / "eval"
            evaluate(run, root, endpoint, options)
            config = load_play(root)
            assert isinstance(config, EvalRoot)
            envs = load_environments(config, lambda phase: None)
            wait_loaded(envs, lambda phase: None)
            keep_event_loop_free()  # as the role does
            uvloop.run(compare(config, root, envs, endpoint, options.repeats))
        finally:
            server.terminate()
            server.wait()


def lengths(tokens: int | None) -> list[str]:
    """The keys that make every answer `tokens` long."""
    return [] if tokens is None else [f"sampling.max_tokens={tokens}", f"sampling.min_tokens={tokens}", f"seq_len={tokens + 128}"]


class CpuTimes:
    """Samples the CPU seconds of this process and its children, by role, until `stop`."""

    def __init__(self, interval: float = 0.1) -> None:
        self._samples: list[tuple[float, dict[str, float]]] = []  # time and CPU seconds so far
        self._interval, self._stopped = interval, threading.Event()
        self._root = psutil.Process()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stopped.wait(self._interval):
            sample: dict[str, float] = {}
            for process in [self._root, *self._root.children(recursive=True)]:
                try:
                    role, used = role_of(process), process.cpu_times()
                except (psutil.NoSuchProcess, psutil.AccessDenied):
                    continue
                sample[role] = sample.get(role, 0.0) + used.user + used.system
            self._samples.append((time.time(), sample))

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()

    def between(self, start: float, end: float) -> dict[str, float]:
        """CPU seconds by role between two times."""
        before, after = (next(sample for when, sample in reversed(self._samples) if when <= moment) for moment in (start, end))
        return {role: used - before.get(role, 0.0) for role, used in after.items()}


def role_of(process: psutil.Process) -> str:
    """What a process does."""
    line = " ".join(process.cmdline())
    names = {"EngineCore": "engine", "rlx.roles.": "", "boot.py": "environment worker", "benchmarks/eval.py": "this process"}
    for mark, name in names.items():
        if mark in line:
            return name or line.partition("rlx.roles.")[2].split()[0]
    return "launcher"


async def compare(config: EvalRoot, root: Path, envs: Mapping[str, Local], endpoint: Endpoint, repeats: int) -> None:
    """Run both, alternately, and print what they took. `root`: the directory of the whole command's evaluation."""
    lines = [json.loads(line) for file in sorted(root.glob("eval/*/*/results.jsonl")) for line in file.read_text().splitlines()]
    tokens = sum(line["token_usage"]["output_tokens"] for line in lines)
    paths = RunPaths(root)
    chat = load_tokenizer(config, paths, lambda phase: None)
    requests = [(chat.render(line["prompt"]), max(1, line["token_usage"]["output_tokens"])) for line in lines]
    cpu, ratios = CpuTimes(), []
    print("and the milliseconds of CPU that a rollout costs each process")
    mine = {name.removeprefix(PREFIX): env for name, env in envs.items()}
    async with connected(config, paths, envs, chat, lambda phase: None) as model, Sampler([endpoint], 600.0) as sampler:
        for repeat in range(repeats + 1):
            seconds = []
            scored = Scored(config, RunPaths(root / f"round_{repeat}"), mine, 0, model)
            for name, work in (("rlx eval", scored.play()), ("load generator", generate(sampler, requests, config.concurrency, repeat))):
                began = time.time()
                await work
                seconds.append(took := time.time() - began)
                cpus = {role: 1000 * each / len(lines) for role, each in cpu.between(began, began + took).items()}
                used = ", ".join(f"{role} {each:.2f}" for role, each in cpus.items() if each >= 0.01)
                note = "" if repeat else "   (does not count)"
                speed = f"{len(lines) / took:7.1f} rollouts/s  {tokens / took:6.0f} tokens/s"
                print(f"{name.ljust(14)}  {took:6.2f} s  {speed}   {used}{note}", flush=True)
            ratios += [seconds[1] / seconds[0]] if repeat else []
        await asyncio.gather(*(env.close() for env in envs.values()))
    cpu.stop()
    each = ", ".join(f"{ratio:.2f}" for ratio in ratios)
    print(f"rlx eval has {statistics.median(ratios):.2f} of the load generator's throughput, the median of {each}")


def evaluate(run: Path, root: Path, endpoint: Endpoint, options: argparse.Namespace) -> None:
    """`rlx eval` of the run's initial model, on the run's environments."""
    keys = [f"weights_dir={run}", "steps=[0]", f"num_examples={options.examples}", f"rollouts_per_example={options.rollouts}"]
    served = [f"inference.base_url=[{endpoint.url}]", "inference.api_key=${oc.env:BENCHMARK_KEY}", f"run.dir={root}"]
    served += [*lengths(options.tokens), *options.keys]
    subprocess.run([sys.executable, "-m", "rlx.cli", "eval", *keys, *served], check=True, stdout=subprocess.DEVNULL, timeout=600)


async def generate(sampler: Sampler, requests: Sequence[tuple[list[int], int]], concurrency: int, repeat: int) -> None:
    """Sample an answer of the given length to each prompt, `concurrency` at a time."""
    room = asyncio.Semaphore(concurrency)

    async def one(number: int, prompt: list[int], length: int) -> None:
        async with room:
            sampling = {"max_tokens": length, "min_tokens": length, "seed": number}
            await sampler.generate(prompt, sampling, f"bare_{repeat}_{number}", number)

    await asyncio.gather(*(one(number, *request) for number, request in enumerate(requests)))


if __name__ == "__main__":
    main()
