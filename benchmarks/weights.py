"""An update of the weights, from files and from memory: `python benchmarks/weights.py --model FOLDER`.

One real server on CPU has a Hugging Face model. This process is the trainer, on one rank, and brings changed weights to the server in turn:

- `files`: gathered, written with checksums, announced, checked, loaded and compared (`weight_broadcast.type=filesystem`).
- `gloo`: sent, loaded as they arrive, compared (`weight_broadcast.type=gloo`).

Beside them, what the bytes cost alone: `copy`, one copy of the model's file; `broadcast`, a broadcast of one array of as many bytes over
gloo between two processes that do nothing else. Prints medians, and all of them as JSON with `--json`. `held` is the time in which the
trainer could not train. `write` is the time of writing the files with their checksums. `server` is the time from telling the server until
it generates with the new weights. It says itself how long it took until it was `ready` to change them (over files it has checked them
then), and how long it was `paused`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from rlx.config.load import compose, to_yaml
from rlx.inference.endpoints import endpoint_file, read_endpoints
from rlx.inference.fleet import Fleet
from rlx.paths import RunPaths
from rlx.weights.subscribe import Subscriber

LIMIT = 300.0  # seconds for one update, and for the server's start


def receive(where: str, count: int) -> None:
    """The other end of the bare broadcast."""
    import torch.distributed as dist
    from torch import empty, uint8

    from rlx.parallel.transfer import PIECE, reach_store

    store = reach_store(where, LIMIT)
    group: Any = dist.ProcessGroupGloo(dist.PrefixStore("bare", store), 1, 2, timedelta(seconds=LIMIT))
    size = int(store.get("size"))
    flat = empty(size, dtype=uint8)
    for _ in range(count):
        for work in [group.broadcast(piece, 0) for piece in flat.split(PIECE)]:
            work.wait()
        group.barrier().wait()


def broadcast(size: int, count: int) -> list[float]:
    """Seconds for each broadcast of `size` bytes to a process of its own, until that has them."""
    import torch
    import torch.distributed as dist

    from rlx.parallel.transfer import PIECE, serve_store

    store = serve_store(LIMIT)
    store.set("size", str(size))
    other = subprocess.Popen([sys.executable, __file__, "--receive", f"{store.host}:{store.port}", "--rounds", str(count)])
    group: Any = dist.ProcessGroupGloo(dist.PrefixStore("bare", store), 0, 2, timedelta(seconds=LIMIT))
    flat, seconds = torch.ones(size, dtype=torch.uint8), []
    for _ in range(count):
        began = time.perf_counter()
        for work in [group.broadcast(piece, 0) for piece in flat.split(PIECE)]:
            work.wait()
        group.barrier().wait()
        seconds.append(time.perf_counter() - began)
    other.wait(LIMIT)
    return seconds


class Trainer:
    """The trainer's end of both ways. Each version differs from the one before it in every tensor."""

    def __init__(self, paths: RunPaths, folder: Path, dtype: str) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        from rlx.models.policy import PolicyModel
        from rlx.parallel.mesh import one_process
        from rlx.weights.memory import Offers
        from rlx.weights.publish import Publisher

        self.paths = paths
        self.model = PolicyModel(AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)))
        mesh = one_process("cpu")
        self.publisher = Publisher.of(self.model, mesh, paths, source=str(folder), dtype=getattr(torch, dtype))
        self.offers = Offers(self.model, mesh, paths, getattr(torch, dtype), LIMIT)
        self.version = 0
        self.bytes = sum(tensor.numel() * tensor.itemsize for _, tensor in self.model.named_weights())

    def change(self) -> int:
        import torch

        self.version += 1
        with torch.no_grad():
            for _, tensor in self.model.named_weights():
                tensor.mul_(1.01)  # more than 16 bits round away
        return self.version

    async def files(self, fleet: Fleet) -> dict[str, float]:
        version, began = self.change(), time.perf_counter()
        self.publisher.gather(version)
        held = time.perf_counter() - began
        self.publisher.announce(version, keep_last=1)
        await asyncio.to_thread(self.publisher.wait)
        told = time.perf_counter()
        await self._take(fleet)
        ended = time.perf_counter()
        return {"all": ended - began, "held": held, "write": self.publisher.seconds, "server": ended - told}

    async def gloo(self, fleet: Fleet) -> dict[str, float]:
        version, began = self.change(), time.perf_counter()
        self.offers.offer(version)
        taking = asyncio.create_task(self._take(fleet))
        while not taking.done():
            await asyncio.to_thread(self.offers.send)
            await asyncio.sleep(0.001)
        await taking
        ended = time.perf_counter()
        self.paths.offer.unlink()
        return {"all": ended - began, "held": self.offers.seconds, "server": ended - began}

    async def _take(self, fleet: Fleet) -> None:
        found = Subscriber(self.paths).latest()
        assert found is not None
        assert found.version == self.version, (found, self.version)
        await fleet.update(found, LIMIT)


async def measure(paths: RunPaths, folder: Path, rounds: int, dtype: str) -> dict[str, Any]:
    trainer = Trainer(paths, folder, dtype)
    endpoints = read_endpoints(paths, 1)
    found: dict[str, list[dict[str, float]]] = {"files": [], "gloo": []}
    async with Fleet(endpoints) as fleet:
        await fleet.wait_ready(LIMIT)
        for number in range(rounds + 1):
            for name in found:
                seconds = await getattr(trainer, name)(fleet)
                assert (await fleet.states())[0].attested > 0.99
                if number:  # the first of each has more to do
                    found[name].append(seconds)
    trainer.offers.close()
    trainer.publisher.close()
    result: dict[str, Any] = {
        name: {key: statistics.median(one[key] for one in measured) for key in measured[0]} for name, measured in found.items()
    }
    return result | {"bytes": trainer.bytes, "version": trainer.version - 1}


def bare(paths: RunPaths, result: dict[str, Any], rounds: int) -> dict[str, Any]:
    """What the bytes cost alone. The server and the trainer's model are gone by now: a model of a billion parameters needs their memory."""
    sources = sorted((paths.weights / f"step_{result['version']}").glob("*.safetensors"))
    copies = []
    for _ in range(rounds):
        began = time.perf_counter()
        for source in sources:
            shutil.copyfile(source, paths.root / f"copy_{source.name}")
        copies.append(time.perf_counter() - began)
    seconds = broadcast(result["bytes"], rounds + 1)[1:]
    return {"copy": {"all": statistics.median(copies)}, "broadcast": {"all": statistics.median(seconds)}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="folder of a model")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the trainer's and of the server's weights")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--receive", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.receive:
        receive(options.receive, options.rounds)
        sys.exit()
    with tempfile.TemporaryDirectory() as name:
        paths = RunPaths(Path(name))
        keys = [f"model.name={options.model.resolve()}", "model=smollm2_135m", "env=reverse_text", "hardware=cpu", "seq_len=256"]
        config = compose(
            [*keys, f"model.dtype={options.dtype}", "sampling.max_tokens=64", "weight_broadcast.type=gloo", "hardware.cpu_threads=1"], {}
        ).cfg
        paths.config.write_text(to_yaml(config))
        paths.initial_model.write_text(f"{options.model.resolve()}\n")
        paths.endpoints.mkdir()
        with (paths.root / "server.log").open("wb") as log:
            command = [sys.executable, "-m", "rlx.roles.inference", "--run-dir", name]
            server = subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | {"HF_HUB_OFFLINE": "1"})
        try:
            deadline = time.monotonic() + LIMIT
            while not endpoint_file(paths, 0).exists():
                if server.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError((paths.root / "server.log").read_text()[-3000:])
                time.sleep(0.1)
            result = asyncio.run(measure(paths, options.model, options.rounds, options.dtype))
            said = re.findall(r"ready after (\d+) ms, paused for (\d+) ms", (paths.root / "server.log").read_text())
            for place, name in enumerate(("files", "gloo")):  # the server's own words; the first of each has more to do
                ready, paused = zip(*said[place + 2 :: 2], strict=True)
                result[name] |= {"ready": statistics.median(map(int, ready)) / 1e3, "paused": statistics.median(map(int, paused)) / 1e3}
        finally:
            server.kill()
            server.wait()
        result |= bare(paths, result, options.rounds)
    if options.json:
        print(json.dumps(result))
    print(f"{result['bytes'] / 1e6:.0f} MB, {options.rounds} rounds")
    for name, reference in (("files", "copy"), ("gloo", "broadcast")):
        one, alone = result[name], result[reference]["all"]
        parts = ", ".join(f"{key} {one[key]:.3f} s" for key in ("held", "write", "server", "ready", "paused") if key in one)
        print(f"{name}: {one['all']:.3f} s ({parts}), {one['all'] / alone:.2f} x the {reference} ({alone:.3f} s)")


if __name__ == "__main__":
    main()
