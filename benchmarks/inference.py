"""Requests and tokens per second of one vLLM server on this machine's CPU, and the CPU time that a request costs.

    python benchmarks/inference.py [--model FOLDER] [--concurrent 64 256] [--tokens 12 64] [--requests 512] [--rounds 3] [KEY=VALUE …]

The role starts the server, by the command line of `rlx.inference.arguments`. Its model is the tiny architecture with random weights, or
that in FOLDER: `python tools/smollm2.py FOLDER` makes SmolLM2-135M. The client is the sampler of a run, in this process. Each request has a
prompt of its own with PROMPT tokens, a seed, and a completion of exactly so many tokens. Printed are medians over the rounds, and CPU
milliseconds per request of three processes: the client, the API process and the engine process. They share the cores.

Two commits are compared in pairs on one machine. This file needs only what both sides of the change to stock vLLM have, so it also runs in
a checkout of the last commit before the change, whose server is one process, counted as the API process:

    git worktree add ../before b6449f95             and install that checkout in an environment of its own: it needs vLLM 0.29
    (cd ../before; .venv/bin/python ../CHECKOUT/benchmarks/inference.py)

That commit's own `benchmarks/inference.py --concurrent 64 --tokens 12` has the same requests in its row `generate`, but no CPU time of the
server, and its `benchmarks/real_model.py --part engine --model FOLDER` has those of the larger model.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import psutil
import uvloop

from rlx.config.load import compose, to_yaml
from rlx.config.schema import Config
from rlx.inference.endpoints import Endpoint, read_endpoints
from rlx.inference.sampler import Sampler
from rlx.paths import RunPaths

PROMPT = 40  # tokens
LIMIT = 600.0  # seconds for the server's start, and for a request


class Costs(NamedTuple):
    """Seconds so far; after a subtraction those between two moments."""

    wall: float
    client: float
    api: float
    engine: float

    @classmethod
    def now(cls, role: psutil.Process) -> Costs:
        """`role`: the process that started the server."""
        api = engine = 0.0
        for process in [role, *role.children(recursive=True)]:
            used = process.cpu_times()
            if "VLLM::" in " ".join(process.cmdline()):  # the engine or one of its workers, which name themselves so
                engine += used.user + used.system
            else:
                api += used.user + used.system
        return cls(time.perf_counter(), time.process_time(), api, engine)

    def since(self, before: Costs) -> Costs:
        return Costs(*(now - then for now, then in zip(self, before, strict=True)))


def prompt_of(number: int) -> list[int]:
    """PROMPT tokens that every tokenizer here has; no two prompts begin alike."""
    return random.Random(number).choices(range(10, 100), k=PROMPT)


async def sample(sampler: Sampler, numbers: Sequence[int], concurrent: int, tokens: int) -> None:
    """One completion for each number, `concurrent` at a time."""
    left = iter(numbers)

    async def lane() -> None:
        for number in left:
            sampling = {"max_tokens": tokens, "min_tokens": tokens, "seed": number}
            turn = await sampler.generate(prompt_of(number), sampling, f"bench-{number}", number)
            assert len(turn.completion_ids) == tokens

    await asyncio.gather(*(lane() for _ in range(concurrent)))


async def measure(endpoint: Endpoint, pid: int, options: argparse.Namespace) -> None:
    cases = list(itertools.product(options.concurrent, options.tokens))
    found: dict[tuple[int, int], list[Costs]] = {case: [] for case in cases}
    serial, role = itertools.count(), psutil.Process(pid)
    async with Sampler([endpoint], LIMIT) as sampler:
        await sample(sampler, list(itertools.islice(serial, max(options.concurrent))), max(options.concurrent), max(options.tokens))
        for _ in range(options.rounds):  # in turn, because a machine's speed drifts
            for concurrent, tokens in cases:
                before = Costs.now(role)
                await sample(sampler, list(itertools.islice(serial, options.requests)), concurrent, tokens)
                found[concurrent, tokens].append(Costs.now(role).since(before))
    print(f"{options.requests} requests a round, {options.rounds} rounds; CPU ms a request\n")
    print("| concurrent | tokens | requests/s | range | tokens/s | client | API process | engine |\n" + "| --- " * 8 + "|")
    for (concurrent, tokens), rounds in found.items():
        rates = [options.requests / one.wall for one in rounds]
        rate = statistics.median(rates)
        cpu = (statistics.median(column) for column in list(zip(*rounds, strict=True))[1:])
        each = " | ".join(f"{1e3 * seconds / options.requests:.2f}" for seconds in cpu)
        print(f"| {concurrent} | {tokens} | {rate:.1f} | {min(rates):.1f}–{max(rates):.1f} | {rate * tokens:.0f} | {each} |")


def config_of(model: Path | None, context: int, keys: Sequence[str]) -> Config:
    """The configuration of a server of the tiny architecture, or of SmolLM2-135M in a folder."""
    own = ["hardware=cpu", f"seq_len={context}", f"sampling.max_tokens={context // 2}"]
    size = [f"model.context_length={context}"] if model is None else ["model=smollm2_135m", f"model.name={model}"]
    return compose([*own, *size, *keys], {}).cfg


@contextmanager
def served(config: Config, model: Path | None = None) -> Iterator[tuple[Endpoint, int]]:
    """A server of the model in a folder, or of a random one of the tiny architecture: its address, and the role's process."""
    with tempfile.TemporaryDirectory() as folder:
        paths = RunPaths(Path(folder))
        paths.config.write_text(to_yaml(config))
        paths.initial_model.write_text(f"{model or make_model(config, paths.root / 'model')}\n")
        environment = os.environ | {"HF_HUB_OFFLINE": "1"}
        with (paths.root / "server.log").open("wb") as log:
            command = [sys.executable, "-m", "rlx.roles.inference", "--run-dir", folder]
            server = subprocess.Popen(command, stdout=log, stderr=log, env=environment)

        def tick() -> None:
            if server.poll() is not None:
                sys.exit((paths.root / "server.log").read_text()[-3000:])

        try:
            (endpoint,) = read_endpoints(paths, 1, LIMIT, tick)
            yield endpoint, server.pid
        finally:
            server.terminate()
            server.wait()


def make_model(config: Config, folder: Path) -> Path:
    """Save a random model of the tiny architecture: only its speed matters here."""
    from rlx.models import tiny

    assert config.model.warm_start is not None
    tiny.save(tiny.build_model(config.model.warm_start, config.model.context_length), tiny.build_tokenizer(config.seq_len), folder)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="folder of SmolLM2-135M")
    parser.add_argument("--concurrent", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--tokens", type=int, nargs="+", default=[12, 64], help="of each completion")
    parser.add_argument("--requests", type=int, default=512, help="in one round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("keys", nargs="*", help="further keys of the configuration, like model.dtype=bfloat16")
    options = parser.parse_args()
    model, context = options.model and options.model.absolute(), max(256, PROMPT + max(options.tokens) + 1)
    room = [f"inference.max_num_seqs={max(options.concurrent)}", f"inference.kv_cache_gb={0.25 if model is None else 2.0}"]
    with served(config_of(model, context, [*room, *options.keys]), model) as (endpoint, pid):
        uvloop.run(measure(endpoint, pid, options))


if __name__ == "__main__":
    main()
