"""`rlx eval` against a bare load generator on the same server: `python benchmarks/eval.py --run RUN`.

RUN is a finished run; its initial model is served once, by `rlx inference`. The load generator sends the prompts of the evaluation, with
the lengths of its answers, as fast as the server takes them: no environment, no chat template, no records. Prints seconds, rollouts and
tokens per second of both, alternately, and the median of the pairs' ratios (goal: at least 0.9). The time of an evaluation counts from its
first request to its last result, not its start. Below each line stands the CPU time of a rollout by process in that time: on few cores the
engine and the evaluation share them. `--tokens N` makes every answer N tokens long.
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
from pathlib import Path
from typing import Any

import psutil

from rlx.config.load import load_play
from rlx.inference.endpoints import Endpoint, endpoint_file, read_endpoint
from rlx.inference.sampler import Sampler
from rlx.paths import RunPaths, write_text
from rlx.policy.chat import load_chat
from rlx.policy.templates import ends_of, tokenizer_of
from rlx.polling import wait_for

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
            compare(options, run, folder, endpoint)
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
    names = {"EngineCore": "engine", "vllm.entrypoints": "API process", "rlx.roles.": "", "boot.py": "environment worker"}
    names["benchmarks/eval.py"] = "load generator"
    for mark, name in names.items():
        if mark in line:
            return name or line.partition("rlx.roles.")[2].split()[0]
    return "launcher"


def compare(options: argparse.Namespace, run: Path, folder: Path, endpoint: Endpoint) -> None:
    """Run both, alternately, and print what they took."""
    cpu = CpuTimes()
    seconds: dict[str, list[float]] = {"rlx eval": [], "load generator": []}
    for repeat in range(options.repeats + 1):  # the first warms the server up and does not count
        root = folder / f"eval_{repeat}"
        evaluate(run, root, endpoint, options)
        record = json.loads((root / "metrics.jsonl").read_text().splitlines()[-1])
        lines = [json.loads(line) for file in sorted(root.glob("eval/*/*/results.jsonl")) for line in file.read_text().splitlines()]
        bare = asyncio.run(generate(root, endpoint, lines))
        tokens = sum(line["token_usage"]["output_tokens"] for line in lines)
        for name, took, end in (("rlx eval", record["time/evaluation"], record["time"]), ("load generator", bare, time.time())):
            if repeat:
                seconds[name].append(took)
            note = "" if repeat else "   (warming up)"
            print(f"{name.ljust(14)}  {took:6.2f} s  {len(lines) / took:8.1f} rollouts/s  {tokens / took:8.0f} tokens/s{note}", flush=True)
            used = {role: 1000 * each / len(lines) for role, each in cpu.between(end - took, end).items()}
            print(f"{'':14}  " + "  ".join(f"{role} {each:.2f}" for role, each in used.items() if each >= 0.01) + " ms of CPU a rollout")
    cpu.stop()
    ratios = [bare / took for took, bare in zip(seconds["rlx eval"], seconds["load generator"], strict=True)]
    each = ", ".join(f"{ratio:.2f}" for ratio in ratios)
    print(f"rlx eval has {statistics.median(ratios):.2f} of the load generator's throughput, the median of {each}")


def evaluate(run: Path, root: Path, endpoint: Endpoint, options: argparse.Namespace) -> None:
    """`rlx eval` of the run's initial model, on the run's environments."""
    keys = [f"weights_dir={run}", "steps=[0]", f"num_examples={options.examples}", f"rollouts_per_example={options.rollouts}"]
    served = [f"inference.base_url=[{endpoint.url}]", "inference.api_key=${oc.env:BENCHMARK_KEY}", f"run.dir={root}"]
    served += [*lengths(options.tokens), *options.keys]
    environment = os.environ | {"BENCHMARK_KEY": KEY}
    subprocess.run(
        [sys.executable, "-m", "rlx.cli", "eval", *keys, *served], env=environment, check=True, stdout=subprocess.DEVNULL, timeout=600
    )


async def generate(root: Path, endpoint: Endpoint, lines: list[dict[str, Any]]) -> float:
    """Seconds for all prompts of the evaluation, answered with as many tokens as there, `concurrency` at a time."""
    config = load_play(root)
    source = RunPaths(root).initial_model.read_text().strip()
    chat = load_chat(tokenizer_of(source, config.model), config.model, ends=ends_of(source))
    requests = [(chat.render(line["prompt"]), max(1, line["token_usage"]["output_tokens"])) for line in lines]
    room = asyncio.Semaphore(config.concurrency)
    async with Sampler([Endpoint(endpoint.url, KEY)], 600.0) as sampler:

        async def one(number: int, prompt: list[int], length: int) -> None:
            async with room:
                sampling = {"max_tokens": length, "min_tokens": length, "seed": number}
                await sampler.generate(prompt, sampling, f"bare_{root.name}_{number}", number)

        began = time.perf_counter()
        await asyncio.gather(*(one(number, *request) for number, request in enumerate(requests)))
        return time.perf_counter() - began


if __name__ == "__main__":
    main()
