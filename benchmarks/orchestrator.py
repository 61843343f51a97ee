"""CPU time of the orchestrator per rollout, against a mock server that answers at once: `python benchmarks/orchestrator.py`.

Real: environment (`reverse_text`), verifiers' episode loop, chat template, HTTP client, collector, advantages, samples, encoding, metrics.
Mock: the policy. It runs in another process, whose time does not count, and sends the same tokens every time.
Prints milliseconds of CPU per rollout of the whole main loop, rollouts per second, how long the event loop was blocked (the delay of a
timer of 1 ms), and how memory, open files and temporary files grew from the second fifth of the steps to the last one, the first two also
of each environment worker.
With `--burn` each reward computes for so long, in its worker. `--stock N` also plays N rollouts with verifiers' own client.
With `--v1` the environment is a v1 taskset of the same words (`environments/rlx_bench_v1.py`).
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import multiprocessing as mp
import os
import pstats
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import uvloop
from aiohttp import web

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))

from run_servers import Servers
from server_stand_in import Stand, publish

from rlx.aio import first_failure
from rlx.config.schema import Config, ModelConfig, TrainedEnvConfig
from rlx.envs.load import give_policy, load_environments, wait_loaded
from rlx.heartbeat import Heartbeat
from rlx.inference.endpoints import Endpoint
from rlx.models.tiny import build_tokenizer
from rlx.paths import RunPaths
from rlx.policy.chat import load_chat
from rlx.process import keep_event_loop_free
from rlx.roles.orchestrator import Orchestrator

KEY, LABEL = "key", b"LABEL"


class Mock(Stand):
    """A server that completes every prompt at once, with the same tokens and the label of its weights."""

    def __init__(self, num_tokens: int, latency: float) -> None:
        super().__init__(delay=latency)
        self.state["context"] = 1 << 20
        ids = [*(token % 90 + 8 for token in range(num_tokens - 1)), 2]  # the last is <|im_end|>
        scored = {"content": [{"token_id": token, "logprob": -0.5, "rank": 1, "top_logprobs": []} for token in ids]}
        choice = {"index": 0, "token_ids": ids, "finish_reason": "stop", "logprobs": scored}
        choice["weight_versions"] = [{"version": LABEL.decode(), "start": 0, "end": num_tokens}]
        self.tokens = msgspec.json.encode({"request_id": "1", "choices": [choice]})
        text = "".join(chr(40 + token % 80) for token in ids)
        spelled = [{"token": letter, "logprob": -0.5, "bytes": [ord(letter)], "top_logprobs": []} for letter in text]
        choice = {"index": 0, "token_ids": ids, "finish_reason": "stop", "logprobs": {"content": spelled}}
        choice["message"] = {"role": "assistant", "content": text}
        usage = {"prompt_tokens": 32, "completion_tokens": num_tokens, "total_tokens": num_tokens + 32}
        facts = {"id": "1", "object": "chat.completion", "created": 1, "model": "mock", "usage": usage, "prompt_token_ids": [8] * 32}
        self.chat = msgspec.json.encode({**facts, "choices": [choice]})

    async def inference_v1_generate(self, _: Any) -> web.Response:
        if self.delay:
            await asyncio.sleep(self.delay)
        return web.Response(body=self.tokens.replace(LABEL, self.label.encode()), content_type="application/json")

    async def v1_chat_completions(self, _: Any) -> web.Response:
        return web.Response(body=self.chat, content_type="application/json")


def serve(url: Any, num_tokens: int, latency: float) -> None:
    """The mock server, in its own process. It puts its address into the queue `url`."""

    async def forever() -> None:
        async with Mock(num_tokens, latency) as mock:
            url.put(mock.url)
            await asyncio.Event().wait()

    uvloop.run(forever())


BURNING = """
import time
import rlx_reverse_text
import verifiers as vf

def load_environment(seconds: float):
    env = rlx_reverse_text.load_environment()

    async def burns(completion) -> float:
        end = time.process_time() + seconds
        while time.process_time() < end:
            pass
        return 0.0

    env.add_rubric(vf.Rubric(funcs=[burns], weights=[0.0]))
    return env
"""
"""`reverse_text` with a reward function that computes."""


async def stock(url: str, tokens: int, count: int, concurrent: int) -> str:
    """The cost of the same rollouts with verifiers' own client, in this process."""
    import verifiers as vf
    from verifiers.legacy.clients import resolve_client

    os.environ["RLX_BENCH_KEY"] = KEY
    env = vf.load_environment("rlx-reverse-text")
    rows = list(env.get_dataset().select(range(256)))
    client = resolve_client(vf.ClientConfig(api_key_var="RLX_BENCH_KEY", api_base_url=f"{url}/v1"))
    sampling = {"max_tokens": tokens, "temperature": 1.0, "logprobs": True, "extra_body": {"return_token_ids": True}}
    numbers = iter(range(count))

    async def lane() -> None:
        for number in numbers:
            state = await env.run_rollout(dict(rows[number % 256]), client, "mock", sampling)
            assert state["completion"], state

    wall, cpu = time.monotonic(), time.process_time()
    await asyncio.gather(*(lane() for _ in range(concurrent)))
    cpu, wall = time.process_time() - cpu, time.monotonic() - wall
    return f"verifiers' own client: {1000 * cpu / count:.2f} ms CPU per rollout, {count / wall:.0f} rollouts/s"


async def stock_v1(url: str, count: int, concurrent: int) -> str:
    """The cost of the same v1 rollouts with verifiers' own client and harness, which starts a process for each; that counts, too."""
    import verifiers.v1 as vf
    from verifiers.v1.utils.loaders import load_environment

    from rlx.envs.verifiers_v1 import block_of

    os.environ["RLX_BENCH_KEY"] = KEY
    block, _ = block_of("envs.reverse_text", TrainedEnvConfig(id="rlx_bench_v1"))
    env = load_environment(block)
    tasks = list(env.taskset.load())
    client = vf.EvalClientConfig(base_url=f"{url}/v1", api_key_var="RLX_BENCH_KEY")
    context = vf.ModelContext(model="mock", client=client, sampling=vf.SamplingConfig())
    numbers = iter(range(count))

    async def lane() -> None:
        for number in numbers:
            (slot,) = env.slots(tasks[number % 256])
            (trace,) = (await env.run_slot(slot, context)).traces
            assert trace.last_reply, trace

    def spent() -> float:
        return sum(usage.ru_utime + usage.ru_stime for usage in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)))

    async with env.serving():
        wall, cpu = time.monotonic(), spent()
        await asyncio.gather(*(lane() for _ in range(concurrent)))
        cpu, wall = spent() - cpu, time.monotonic() - wall
    return f"verifiers' own v1 harness and client: {1000 * cpu / count:.2f} ms CPU per rollout, {count / wall:.0f} rollouts/s"


class Watch:
    """Measures the process while it runs."""

    def __init__(self) -> None:
        self.delays: list[float] = []  # seconds that the event loop was late
        self.busy: list[float] = []  # seconds of CPU of the event loop's thread meanwhile: what the machine's other work does not change
        self.cpu = 0.0  # seconds, when the last batch was taken
        self.held: list[tuple[float, int, int]] = []  # KiB of resident memory, open files, temporary files; one a step
        self.workers: dict[str, list[tuple[float, int]]] = {}  # the first two of each environment worker

    async def delay(self) -> None:
        while True:
            began, cpu = time.perf_counter(), time.thread_time()
            await asyncio.sleep(0.001)
            self.delays.append(time.perf_counter() - began - 0.001)
            self.busy.append(time.thread_time() - cpu)

    def look(self, envs: Any) -> None:
        self.held.append((*held_by("self"), sum(1 for _ in Path(tempfile.gettempdir()).glob("*"))))
        for child in children(envs):
            self.workers.setdefault(child.name, []).append(held_by(child.process.pid))

    def report(self, rollouts: int) -> list[str]:
        """`rollouts`: of the whole run."""
        lines = []
        for what, seconds in (("late", self.delays), ("busy, CPU", self.busy)):
            late = np.sort(np.array(seconds)) * 1000
            p99, p999 = late[int(0.99 * len(late))], late[int(0.999 * len(late))]
            lines.append(f"event loop {what}: p99 {p99:.1f} ms, p99.9 {p999:.1f} ms, max {late[-1]:.1f} ms")
        if len(self.held) >= 5:
            between, before, after = growth(self.held, rollouts)
            lines.append(f"{between}; temporary files {before[2]:.0f} → {after[2]:.0f}")
            lines += [f"{name}: {growth(held, rollouts / len(self.workers))[0]}" for name, held in self.workers.items()]
        return lines


def held_by(pid: int | str) -> tuple[float, int]:
    """KiB of a process's resident memory, and its open files."""
    pages = int(Path(f"/proc/{pid}/statm").read_text(encoding="utf-8").split()[1])
    return pages * resource.getpagesize() / 1024, len(os.listdir(f"/proc/{pid}/fd"))


def growth(held: Sequence[Sequence[float]], rollouts: float) -> tuple[str, np.ndarray, np.ndarray]:
    """What changed from the second fifth of the steps to the last one, in words, and both medians. `rollouts`: in all steps."""
    fifth = len(held) // 5
    first, last = np.median(held[fifth : 2 * fifth], axis=0), np.median(held[-fifth:], axis=0)
    each = (last[0] - first[0]) * 1024 / (rollouts * 3.5 * fifth / len(held))
    words = (
        f"memory {first[0] / 1024:.1f} → {last[0] / 1024:.1f} MiB: {each:.0f} bytes a rollout; open files {first[1]:.0f} → {last[1]:.0f}"
    )
    return words, first, last


def children(envs: Any) -> list[Any]:
    """The processes of the environments' workers."""
    return [worker for env in envs.values() for worker in getattr(env, "_workers", [])]


def cpu_seconds(envs: Any) -> float:
    """CPU time of this process and of the environments' workers."""
    ticks = 0
    for child in children(envs):
        ticks += sum(map(int, Path(f"/proc/{child.process.pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[11:13]))
    return time.process_time() + ticks / os.sysconf("SC_CLK_TCK")


async def train(paths: RunPaths, steps: int, watch: Watch, envs: Any) -> None:
    """A trainer that takes no time: it consumes every batch and publishes the next version. It keeps the last two, as the real one does."""
    paths.weights.mkdir()
    for step in range(steps):
        while not paths.batch_of(step).exists():
            await asyncio.sleep(0.005)
        paths.batch_of(step).unlink()
        publish(paths.weights_of(step + 1), step + 1)
        watch.look(envs)
        watch.cpu = cpu_seconds(envs)
        if step > 1:
            shutil.rmtree(paths.weights_of(step - 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--concurrent", type=int, default=256)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=8, help="tokens per completion")
    parser.add_argument("--workers", type=int, default=1, help="processes that play the environment; their CPU time counts")
    parser.add_argument("--latency", type=float, default=0.0, help="seconds per request")
    parser.add_argument("--burn", type=float, default=0.0, help="seconds of CPU in each reward")
    parser.add_argument("--v1", action="store_true", help="the same words as a v1 taskset")
    parser.add_argument("--stock", type=int, default=0, help="rollouts with verifiers' own client, too")
    parser.add_argument("--loop", choices=("uvloop", "asyncio"), default="uvloop")
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    if options.v1 and options.burn:
        parser.error("--burn is for the classic environment; leave out --v1")

    spawn = mp.get_context("spawn")
    address = spawn.Queue()
    server = spawn.Process(target=serve, args=(address, options.tokens, options.latency), daemon=True)
    server.start()
    seq_len = 64 + options.tokens
    config = Config(
        max_steps=options.steps,
        max_async_level=1,
        seq_len=seq_len,
        loss={"_target_": "unused", "aggregate": "token_mean"},
        advantage={"_target_": "rlx.advantages.group.group_norm"},
        envs={"reverse_text": TrainedEnvConfig(id="rlx-reverse-text")},
    )
    config.sampling.max_tokens = options.tokens
    config.orchestrator.batch_size, config.orchestrator.rollouts_per_example = options.batch, 8
    config.orchestrator.max_concurrent = options.concurrent
    config.trainer.micro_batch_tokens = max(8192, seq_len)
    config.model.name = "tiny"
    config.ckpt.interval = None

    config.orchestrator.env_workers = options.workers
    if options.burn:
        modules = tempfile.mkdtemp()
        (Path(modules) / "burning_reward.py").write_text(BURNING)
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (modules, os.environ.get("PYTHONPATH"))))
        config.envs["reverse_text"] = TrainedEnvConfig(id="burning_reward", args={"seconds": options.burn})
    if options.v1:
        place = str(Path(__file__).parent / "environments")
        sys.path.append(place)
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (place, os.environ.get("PYTHONPATH"))))
        config.envs["reverse_text"] = TrainedEnvConfig(id="rlx_bench_v1")
    envs: Any = load_environments(config, lambda phase: None)
    wait_loaded(envs, lambda phase: None)
    chat = load_chat(build_tokenizer(seq_len), ModelConfig(name="tiny"))
    url = address.get(timeout=60)

    async def run(root: Path) -> tuple[float, float, int]:
        paths = RunPaths(root)
        async with Servers([Endpoint(url, KEY)], request_timeout=600) as servers:
            await servers.ready()
            give_policy(envs, config, chat, servers.sampler)
            orchestrator = Orchestrator(config, paths, envs, servers.sampler, servers.fleet, Heartbeat(paths, "orchestrator"))
            wall, cpu = time.monotonic(), cpu_seconds(envs)
            await first_failure(orchestrator.run(), train(paths, options.steps, watch, envs), forever=[watch.delay()])
            return time.monotonic() - wall, watch.cpu - cpu, orchestrator.collector.tally.finished

    profile, watch = cProfile.Profile(), Watch()
    keep_event_loop_free()  # as the role does; else half of the CPU goes into collections that walk everything imported
    with tempfile.TemporaryDirectory() as folder:
        runner = uvloop.run if options.loop == "uvloop" else asyncio.run
        if options.profile:
            profile.enable()
        wall, cpu, finished = runner(run(Path(folder)))
        profile.disable()
    if options.burn:
        shutil.rmtree(modules)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    kind = "v1" if options.v1 else "classic"
    print(
        f"{finished} rollouts, {options.concurrent} concurrent, {options.tokens} tokens each, {options.loop}, {kind}: "
        f"{1000 * cpu / finished - 1000 * options.burn:.2f} ms CPU per rollout, {finished / wall:.0f} rollouts/s, {memory:.0f} MiB"
    )
    print("\n".join(watch.report(finished)))
    if options.stock:
        if options.v1:  # 16 processes at once are enough for two cores
            print(asyncio.run(stock_v1(url, options.stock, min(16, options.concurrent))))
        else:
            print(asyncio.run(stock(url, options.tokens, options.stock, options.concurrent)))
    server.kill()
    if options.profile:
        pstats.Stats(profile).sort_stats("tottime").print_stats(40)


if __name__ == "__main__":
    main()
