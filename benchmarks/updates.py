"""An update of the weights while 64 requests are in flight: what each part of it takes, and how much longer the requests do.

    python benchmarks/updates.py [--model FOLDER] [--concurrent 64] [--tokens 96] [--rounds 5] [KEY=VALUE …]

One vLLM server on this machine's CPU has the tiny architecture with random weights, or the model in FOLDER (SmolLM2-135M, which
`python tools/smollm2.py FOLDER` makes). This process is the trainer and the client. In each round every tensor changes and the version is
published; then a batch of completions is sampled undisturbed, and one during which the server gets the version. Medians of:

    gather, write     of the trainer: the copy that holds it, and the files with their checksums, written concurrently with its next step
    copy              what the files' bytes take alone: a copy of the weights' files
    check             of the server, while it generates: names, shapes, lengths and checksums of the files on every rank
    pause, load, compare, resume       the server is paused from the first to the last
    paused            all four, and what is between them
    batch, batch with an update        the difference is what an update takes from generation; KV cache computed anew is part of it

Before stock vLLM, up to b6449f95, other scripts measured this, and can be run in a checkout of that commit (`benchmarks/inference.py` says
how): `benchmarks/weights.py --model FOLDER`, without requests in flight, and `benchmarks/updates.py --run RUN`, on prompts of a run.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import uvloop
from inference import LIMIT, PROMPT, config_of, prompt_of, served
from transformers import AutoModelForCausalLM

from rlx.inference import wire
from rlx.inference.client import Client
from rlx.inference.endpoints import Endpoint
from rlx.inference.fleet import INITIAL
from rlx.inference.replica import Replica
from rlx.inference.sampler import Sampler
from rlx.inference.wire import label_of
from rlx.models.policy import PolicyModel
from rlx.parallel.mesh import one_process
from rlx.paths import RunPaths
from rlx.trace import Turn
from rlx.weights.publish import Publisher
from rlx.weights.subscribe import version_at

RUN = "0a1b2c3d"  # the token in the labels of this run's versions
BEGIN = 0.3  # share of an undisturbed batch's time after which the update begins
PARTS = {"check": "rlx_check", "pause": wire.PAUSE, "load": "rlx_load", "compare": "rlx_compare", "resume": wire.RESUME}


class Trainer:
    """The trainer's end. Each version differs from the one before it in every tensor."""

    def __init__(self, root: Path, source: str, dtype: str) -> None:
        self.paths = RunPaths(root)
        self.model = PolicyModel(AutoModelForCausalLM.from_pretrained(source, dtype=getattr(torch, dtype)))
        self.publisher = Publisher.of(self.model, one_process("cpu"), self.paths, source=source, dtype=getattr(torch, dtype))

    def publish(self, version: int) -> dict[str, float]:
        """Change the weights and publish them. Seconds of the parts."""
        with torch.no_grad():
            for _, tensor in self.model.named_weights():
                tensor.mul_(1.01 if version % 2 else 1 / 1.01)  # more than 16 bits round away
        began = time.perf_counter()
        self.publisher.gather(version)
        held = time.perf_counter() - began
        self.publisher.announce(version, keep_last=1)
        self.publisher.wait()
        return {"gather": held, "write": self.publisher.seconds, "copy": self._copy(version)}

    def _copy(self, version: int) -> float:
        began = time.perf_counter()
        for file in self.paths.weights_of(version).glob("*.safetensors"):
            shutil.copyfile(file, self.paths.root / f"copy_{file.name}")
        return time.perf_counter() - began


class TimedClient(Client):
    """A client that records when each call began and ended, by its path or the extension's method."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, list[tuple[float, float]]] = {}

    async def send(self, endpoint: Endpoint, path: str, body: bytes | None = None) -> tuple[int, bytes]:
        name = json.loads(body)["method"] if path == wire.RPC and body else path
        began = time.perf_counter()
        answer = await super().send(endpoint, path, body)
        self.calls.setdefault(name, []).append((began, time.perf_counter()))
        return answer

    def seconds(self) -> dict[str, float]:
        """Seconds of the parts of the latest update."""
        spans = {part: (self.calls[name][0][0], self.calls[name][-1][1]) for part, name in PARTS.items()}
        self.calls.clear()
        return {part: end - begin for part, (begin, end) in spans.items()} | {"paused": spans["resume"][1] - spans["pause"][0]}


async def sample(sampler: Sampler, serial: int, count: int, tokens: int) -> tuple[float, list[Turn]]:
    """Seconds of `count` completions at once, and the completions. No two calls have a prompt in common."""
    began = time.perf_counter()
    sampling = {"max_tokens": tokens, "min_tokens": tokens}
    numbers = range(serial * count, (serial + 1) * count)
    turns = await asyncio.gather(
        *(sampler.generate(prompt_of(number), sampling | {"seed": number}, f"bench-{number}", number) for number in numbers)
    )
    return time.perf_counter() - began, turns


async def measure(endpoint: Endpoint, root: Path, dtype: str, options: argparse.Namespace) -> list[dict[str, float]]:
    async with TimedClient() as client, Sampler([endpoint], LIMIT, run=RUN) as sampler:
        server = Replica(client, endpoint)
        source = (await server.look()).model
        await server.load(INITIAL, label_of(0, RUN), source, verify_every=1)
        trainer, found, size = Trainer(root, source, dtype), list[dict[str, float]](), (options.concurrent, options.tokens)
        for version in range(1, options.rounds + 2):
            seconds = await asyncio.to_thread(trainer.publish, version)
            seconds["batch"], _ = await sample(sampler, 2 * version, *size)
            client.calls.clear()
            disturbed = asyncio.create_task(sample(sampler, 2 * version + 1, *size))
            await asyncio.sleep(BEGIN * seconds["batch"])
            await server.load(version_at(trainer.paths.weights_of(version), version), label_of(version, RUN), source, verify_every=1)
            seconds["batch with an update"], turns = await disturbed
            sampler.version = version
            in_flight = sum(len(set(turn.versions.tolist())) == 2 for turn in turns)
            if in_flight < options.concurrent:
                raise SystemExit(f"only {in_flight} of {options.concurrent} requests were in flight at the update: set more --tokens")
            found.append(seconds | client.seconds())
        trainer.publisher.close()
    return found[1:]  # the first has more to do


def report(rows: Sequence[dict[str, float]], options: argparse.Namespace) -> None:
    print(f"{options.concurrent} requests in flight, {options.tokens} tokens each, {options.rounds} rounds\n")
    print("| part | ms, median | range |\n| --- | --- | --- |")
    for part in rows[0]:
        values = [1e3 * row[part] for row in rows]
        print(f"| {part} | {statistics.median(values):.1f} | {min(values):.1f}–{max(values):.1f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="folder of SmolLM2-135M")
    parser.add_argument("--concurrent", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=96, help="of each completion")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("keys", nargs="*", help="further keys of the configuration, like model.dtype=bfloat16")
    options = parser.parse_args()
    model = options.model and options.model.absolute()
    room = [f"inference.max_num_seqs={options.concurrent}", "inference.kv_cache_gb=1.0"]
    config = config_of(model, max(256, PROMPT + options.tokens + 1), [*room, *options.keys])
    with served(config, model) as (endpoint, _), tempfile.TemporaryDirectory() as root:
        report(uvloop.run(measure(endpoint, Path(root), config.model.dtype, options)), options)


if __name__ == "__main__":
    main()
