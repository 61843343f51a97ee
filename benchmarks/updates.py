"""The cost of the policy server's engine on CPU: `python benchmarks/updates.py --run RUN`.

A finished run provides the configuration, the initial model and the prompts (those of its last rollouts). The engine runs without HTTP
and gets as many concurrent requests as a step has rollouts, each of `--tokens` new tokens. Prints seconds and CPU seconds per batch of
rollouts, first undisturbed, then with one weight update once each has `BEFORE` tokens: applied at once, with keys and values dropped or
kept, or when the batch is done (then the batch's time has the update in it). No batch finds keys and values of the one before it. Then
what an update takes from generation, beside what it cannot do without: reading the version's bytes once and, if keys and values are
dropped, one prefill of the requests that were running, with the tokens that they had.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import time
from pathlib import Path

import numpy as np

from rlx.config.load import load_run
from rlx.inference.server.arguments import engine_arguments, environment, runs_in_process
from rlx.paths import RunPaths
from rlx.weights.files import latest_version

LIMIT = 1 << 20  # tokens: more than any rollout has, so every update waits for the batch
BEFORE = 4  # tokens of each rollout when the update begins


async def measure(run: Path, batches: int, length: int) -> None:
    from rlx.inference.protocol import INT, Completion, GenerateRequest, Sampling, pack_ids
    from rlx.inference.server.engine import InFlight, PolicyEngine

    config, paths = load_run(run), RunPaths(run)
    model = paths.initial_model.read_text().strip()
    engine = await PolicyEngine.start(engine_arguments(config, model, 0), cpu=True, in_process=runs_in_process(config))
    prompts = read_prompts(paths, model)
    version = latest_version(paths)
    assert version is not None
    serial, running = 0, prompts

    async def rollout(prompt: list[int], seed: int, tokens: int = length) -> Completion:
        sampling = Sampling(max_tokens=tokens, min_tokens=tokens, seed=seed)
        return await engine.generate(GenerateRequest(f"r{seed}", pack_ids(prompt), sampling))

    async def batch(in_flight: InFlight | None) -> tuple[float, float, int]:
        nonlocal serial, running
        await engine.core.reset_prefix_cache_async(False, True)
        began, cpu = time.perf_counter(), time.process_time()
        serial += len(prompts)
        work = [asyncio.ensure_future(rollout(prompt, serial + i)) for i, prompt in enumerate(prompts)]
        if in_flight is not None:
            while len(engine.core.sinks) < len(work) or min(len(sink.token_ids) for sink in engine.core.sinks.values()) < BEFORE:
                if any(task.done() for task in work):
                    raise RuntimeError(f"a request ended before all had {BEFORE} tokens: set inference.max_num_seqs, or fewer rollouts")
                await asyncio.sleep(0.001)
            engine.core.version = version - 1  # so that the same files can be loaded again
            updating = asyncio.ensure_future(engine.update_weights(paths.weights_of(version), version, in_flight=in_flight))
        answers = await asyncio.gather(*work)
        if in_flight is not None:
            if not (updating.done() or in_flight.drain_tokens):
                raise RuntimeError("the update has outlasted the batch: set more --tokens")
            await updating
        seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
        if in_flight == InFlight():
            running = []
            for prompt, answer in zip(prompts, answers, strict=True):
                before = sum(count for _, count in answer.versions[:-1])
                running.append(prompt + np.frombuffer(answer.token_ids, INT)[:before].tolist())
        return seconds, cpu, sum(count for answer in answers for _, count in answer.versions)

    async def prefill() -> float:
        """Seconds until each request that was running has one new token, without keys and values of an earlier one."""
        nonlocal serial
        await engine.core.reset_prefix_cache_async(False, True)
        serial += len(prompts)
        began = time.perf_counter()
        await asyncio.gather(*(rollout(prompt, serial + i, 1) for i, prompt in enumerate(running)))
        return time.perf_counter() - began

    kinds: dict[str, InFlight | None] = {
        "undisturbed": None,
        "an update in flight": InFlight(),
        "an update in flight, keys and values kept": InFlight(keep_kv=True),
        "an update, drained": InFlight(drain_tokens=LIMIT),
    }
    found: dict[str, list[tuple[float, float, int]]] = {what: [] for what in kinds}
    for number in range(batches + 1):  # in turn, because a machine's speed drifts
        for what, in_flight in kinds.items():
            one = await batch(in_flight)
            if number:  # the first of each has more to do
                found[what].append(one)
    took: list[float] = []
    for what, measured in found.items():
        seconds, cpu, tokens = (statistics.median(column) for column in zip(*measured, strict=True))
        rate = f"{1e3 * seconds:.1f} ms a batch of {len(prompts)} ({1e3 * cpu:.1f} ms CPU), {tokens / seconds:.0f} new tokens/s"
        print(f"{what}: {rate}", flush=True)
        took.append(seconds)
    least = statistics.median([read_once(paths.weights_of(version)) for _ in range(5)])
    first = statistics.median([await prefill() for _ in range(5)])
    undisturbed, dropped, kept, _ = took
    print(f"read once {1e3 * least:.1f} ms, the running requests {1e3 * first:.1f} ms")
    print(f"an update takes {1e3 * (dropped - undisturbed):.1f} ms: {(dropped - undisturbed) / (least + first):.2f} of both (goal 1.5)")
    print(f"with keys and values kept {1e3 * (kept - undisturbed):.1f} ms: {(kept - undisturbed) / least:.2f} of reading")


def read_once(folder: Path) -> float:
    """Seconds to read the bytes of a version's tensors into memory that is there."""
    files = list(folder.glob("*.safetensors"))
    memory = [bytearray(file.stat().st_size) for file in files]
    began = time.perf_counter()
    for file, place in zip(files, memory, strict=True):
        with file.open("rb", buffering=0) as opened:
            opened.readinto(place)
    return time.perf_counter() - began


def read_prompts(paths: RunPaths, model: str) -> list[list[int]]:
    """The prompts of the last step's rollouts."""
    import json

    import zstandard
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    last = sorted(paths.root.glob("rollouts/*.jsonl.zst"))[-1]
    with zstandard.open(last, "rt") as file:
        messages = [json.loads(line)["prompt"] for line in file]
    return [list(tokenizer.apply_chat_template(m, add_generation_prompt=True, tokenize=True, return_dict=False)) for m in messages]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, required=True, help="directory of a finished run")
    parser.add_argument("--batches", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=48, help="new tokens of each rollout")
    args = parser.parse_args()
    os.environ |= environment(load_run(args.run), os.environ)
    asyncio.run(measure(args.run, args.batches, args.tokens))
    os._exit(0)


if __name__ == "__main__":
    main()
