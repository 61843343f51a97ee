"""How much of a vLLM server's throughput reaches the rollouts, and the CPU that each costs: `python benchmarks/inference.py`.

One real server on CPU (the tiny architecture with random weights), 64 requests at once, single-turn rollouts of `reverse_text`, each answer
exactly as long as the others. Four clients play the same prompts in turn, several rounds:

- `completions`: a bare load generator on vLLM's own `/v1/completions`: token ids in, no rollouts, no rewards.
- `generate`: a bare load generator on the policy server's `/generate`: one message a request, nothing kept.
- `rlx`: environment, worker, chat format, policy and sampler, as the orchestrator plays them.
- `verifiers`: verifiers alone with its own OpenAI client, on `/v1/chat/completions`.

Prints the median of the rounds: rollouts and tokens a second, CPU milliseconds a rollout of the client (workers included, without the
server), and the share of the better bare generator. The server and the clients share the machine, so a client that needs less CPU leaves
more of it to the server.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from rlx.config.load import compose, to_yaml
from rlx.config.schema import Config
from rlx.envs.load import give_policy, load_environments, load_tokenizer, wait_loaded
from rlx.inference.endpoints import Endpoint, endpoint_file, read_endpoint
from rlx.inference.protocol import Answer, Asked, GenerateRequest, Sampling, pack_ids
from rlx.inference.sampler import Sampler
from rlx.paths import RunPaths
from rlx.policy.chat import Chat
from rlx.types import Task

ENV = "reverse_text"
Client = Callable[[int], Awaitable[None]]  # plays the example of this number


def cpu_of(pids: Sequence[int]) -> float:
    """CPU seconds of this process and of others."""
    ticks = sum(sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13])) for pid in pids)
    return time.process_time() + ticks / os.sysconf("SC_CLK_TCK")


async def at_once(client: Client, count: int, concurrent: int, serial: itertools.count[int]) -> None:
    """Play `count` examples, `concurrent` at once."""
    numbers = itertools.islice(serial, count)

    async def lane() -> None:
        for number in numbers:
            await client(number)

    await asyncio.gather(*(lane() for _ in range(concurrent)))


class Bench:
    """The clients, on one server."""

    def __init__(self, config: Config, server: Endpoint, chat: Chat, env: Any, tokens: int) -> None:
        self.config, self.server, self.chat, self.env, self.tokens = config, server, chat, env, tokens
        self.rows = [env.rows[place] for place in range(256)]
        self.prompts = [chat.render(row["prompt"]) for row in self.rows]
        self.model = ""

    def _row(self, number: int) -> int:
        return number % len(self.rows)

    async def completions(self, session: aiohttp.ClientSession, number: int) -> None:
        body = {"model": self.model, "prompt": self.prompts[self._row(number)], "max_tokens": self.tokens, "min_tokens": self.tokens}
        body |= {"seed": number, "temperature": 1.0}
        async with session.post(f"{self.server.url}/v1/completions", json=body, headers=self.server.headers) as answer:
            assert (await answer.json())["usage"]["completion_tokens"] == self.tokens

    async def rlx(self, number: int) -> None:
        place = self._row(number)
        task = Task(env=ENV, example_id=int(self.rows[place]["example_id"]), index=number, row=self.rows[place])
        (rollout,) = await self.env.play(task, [0], 0)
        assert rollout.status == "ok", rollout.error
        assert rollout.num_completion_tokens == self.tokens

    def verifiers(self) -> Client:
        import verifiers as vf

        os.environ["RLX_BENCH_KEY"] = self.server.api_key
        env = vf.load_environment("rlx-reverse-text")
        rows = env.get_dataset()
        client = vf.ClientConfig(api_key_var="RLX_BENCH_KEY", api_base_url=f"{self.server.url}/v1")
        from verifiers.legacy.clients import resolve_client

        opened = resolve_client(client)
        sampling = {"max_tokens": self.tokens, "temperature": 1.0, "extra_body": {"min_tokens": self.tokens}}

        async def play(number: int) -> None:
            row = dict(rows[self._row(number)])
            await env.run_rollout(row, opened, self.model, sampling | {"seed": number})

        return play


class Generate:
    """A bare client of `/generate`."""

    def __init__(self, bench: Bench, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.bench, self.socket = bench, socket
        self.waiting: dict[int, asyncio.Future[Answer]] = {}
        self.encode, self.decode = msgspec.msgpack.Encoder().encode, msgspec.msgpack.Decoder(list[Answer]).decode
        self.reading = asyncio.ensure_future(self.read())

    async def read(self) -> None:
        async for message in self.socket:
            for answer in self.decode(message.data):
                self.waiting.pop(answer.number).set_result(answer)

    async def ask(self, number: int) -> None:
        sampling = Sampling(self.bench.tokens, seed=number, min_tokens=self.bench.tokens)
        prompt = pack_ids(self.bench.prompts[number % len(self.bench.prompts)])
        future = self.waiting[number] = asyncio.get_running_loop().create_future()
        await self.socket.send_bytes(self.encode(Asked([(number, GenerateRequest(f"bare-{number}", prompt, sampling))])))
        assert (await future).status == 200


async def measure(config: Config, paths: RunPaths, server: Endpoint, options: argparse.Namespace) -> None:
    envs: Any = load_environments(config, lambda phase: None)
    wait_loaded(envs, lambda phase: None)
    chat = load_tokenizer(config, paths, lambda phase: None)
    bench, serial = Bench(config, server, chat, envs[ENV], options.tokens), itertools.count()
    workers = [worker.child.pid for worker in getattr(envs[ENV], "_workers", [])]
    timeout = aiohttp.ClientTimeout(total=None)
    connector = aiohttp.TCPConnector(limit=0)
    async with Sampler([server], 600.0) as sampler, aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        async with session.get(f"{server.url}/v1/models", headers=server.headers) as answer:
            bench.model = (await answer.json())["data"][0]["id"]
        give_policy(envs, config, chat, sampler)
        async with session.ws_connect(server.url + "/generate", headers=server.headers, max_msg_size=0) as socket:
            clients: dict[str, Client] = {
                "completions": lambda number: bench.completions(session, number),
                "generate": Generate(bench, socket).ask,
                "rlx": bench.rlx,
                "verifiers": bench.verifiers(),
            }
            found: dict[str, list[tuple[float, float]]] = {name: [] for name in clients}
            for client in clients.values():
                await at_once(client, options.concurrent, options.concurrent, serial)  # warm
            for _ in range(options.rounds):
                for name, client in clients.items():
                    began, cpu = time.perf_counter(), cpu_of(workers)
                    await at_once(client, options.rollouts, options.concurrent, serial)
                    found[name].append((options.rollouts / (time.perf_counter() - began), (cpu_of(workers) - cpu) / options.rollouts))
        rates = {name: statistics.median(rate for rate, _ in rounds) for name, rounds in found.items()}
        best = max(rates["completions"], rates["generate"])
        print(f"{options.concurrent} at once, {options.tokens} tokens each, {options.rollouts} rollouts a round, {options.rounds} rounds")
        result = {
            name: {
                "rollouts_per_second": rates[name],
                "tokens_per_second": rates[name] * options.tokens,
                "cpu_ms_per_rollout": 1e3 * statistics.median(seconds for _, seconds in rounds),
                "share_of_better_bare": rates[name] / best,
            }
            for name, rounds in found.items()
        }
        if options.json:
            options.json.write_text(
                json.dumps({"options": {**vars(options), "json": str(options.json)}, "clients": result}, indent=1) + "\n"
            )
        for name, rounds in found.items():
            spread = f"{min(rate for rate, _ in rounds):.1f}-{max(rate for rate, _ in rounds):.1f}"
            print(
                f"{name:12} {rates[name]:7.1f} rollouts/s ({spread})  {result[name]['tokens_per_second']:8.0f} tokens/s  "
                f"{result[name]['cpu_ms_per_rollout']:6.2f} ms CPU a rollout  "
                f"{result[name]['share_of_better_bare']:.3f} of the better bare generator",
                flush=True,
            )
        for env in envs.values():
            await env.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--concurrent", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64, help="tokens of each answer")
    parser.add_argument("--rollouts", type=int, default=256, help="rollouts of one client in one round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the numbers to this file, too")
    options = parser.parse_args()
    length = 64 + options.tokens
    overrides = [
        "hardware=cpu", f"seq_len={length}", f"sampling.max_tokens={options.tokens}", f"sampling.min_tokens={options.tokens}",
        "sampling.allow_biased_ratio=true", f"inference.max_num_seqs={options.concurrent}", f"model.context_length={max(256, length)}",
    ]  # fmt: skip
    config = compose(overrides, {}).cfg
    with served(config) as (paths, endpoint):
        asyncio.run(measure(config, paths, endpoint, options))


@contextmanager
def served(config: Config) -> Iterator[tuple[RunPaths, Endpoint]]:
    """A real server of a random model of the tiny architecture."""
    with tempfile.TemporaryDirectory() as folder:
        paths = RunPaths(Path(folder))
        paths.config.write_text(to_yaml(config))
        make_model(config, paths)
        with (paths.root / "server.log").open("wb") as log:
            server = subprocess.Popen([sys.executable, "-m", "rlx.roles.inference", "--run-dir", folder], stdout=log, stderr=log)
        try:
            while (endpoint := read_endpoint(endpoint_file(paths, 0))) is None:
                if server.poll() is not None:
                    sys.exit((paths.root / "server.log").read_text()[-2000:])
                time.sleep(0.2)
            yield paths, endpoint
        finally:
            server.terminate()
            server.wait()


def make_model(config: Config, paths: RunPaths) -> None:
    """A random model of the tiny architecture: what it says does not matter here, only how fast."""
    from rlx.models import tiny

    assert config.model.warm_start is not None
    folder = paths.root / "model"
    tiny.save(tiny.build_model(config.model.warm_start, config.model.context_length), tiny.build_tokenizer(config.seq_len), folder)
    paths.initial_model.write_text(f"{folder}\n")


if __name__ == "__main__":
    main()
