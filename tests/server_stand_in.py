"""A stand-in for a server of vLLM's with rlx's worker extension: the same routes and JSON, no model, failures on demand."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from aiohttp import web
from run_servers import Servers

from rlx.inference.endpoints import Endpoint

CONTEXT = 64  # tokens of prompt and completion together
UPDATE = ["rlx_check", "/pause", "rlx_load", "/update_weight_version", "/resume"]  # the calls of an update without a compare
Answer = dict[str, Any]
Version = Callable[[int], Path]  # the fixture `version`


class Clock:
    """It stands for `time` in a module whose limits a test lets pass instead of waiting for them."""

    def __init__(self) -> None:
        self.passed = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self.passed

    perf_counter = monotonic


class Stand:
    """A server that completes every prompt with its reverse. What a test sets in it makes it fail.

    A call's name is its path, or for the extension the method's name.
    """

    def __init__(self, delay: float = 0.0, ranks: int = 1, **attributes: Any) -> None:
        self.delay, self.ranks, self.key = delay, ranks, "key"  # seconds of a completion; workers; what every route asks for
        self.fails: Counter[str] = Counter()  # this many of the next calls get a 500
        self.drops: Counter[str] = Counter()  # … end without a response
        self.hangs: set[str] = set()  # calls that get no response until they are not in here any more
        self.errors: dict[str, Answer] = {}  # what the last rank's method returns instead: {"error": …, "broken": …} or {"wrong": …}
        self.completion: Answer = {}  # what differs in the next completions' choice
        self.extension, self.holds = True, False  # has rlx's worker extension; ends no completion
        self.state: Answer = {
            "model": "model",
            "identity": "a",
            "context": CONTEXT,
            "lora": False,
            "device": "",
            "peak_memory": 1 << 30,
            "memory": 0,
        }
        self.waiting, self.preemptions = 0, 3
        # What a test looks at.
        self.calls: list[str] = []
        self.bodies: dict[str, list[Any]] = {}  # by name, in order
        self.served: list[str] = []  # label or adapter of each completion
        self.in_flight = self.aborted = self.refused = 0
        self.connections: set[asyncio.Transport] = set()
        self.starts = 0
        # It holds the port while the server is away, so that nobody else gets it. It does not listen: connections are refused.
        self.place = socket.socket()
        self.place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.place.bind(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.place.getsockname()[1]}"
        vars(self).update(attributes)

    def __del__(self) -> None:
        self.place.close()

    async def start(self) -> None:
        """Start it, as a process that knows of no version."""
        self.label, self.loaded, self.folder, self.paused, self.adapters = "default", None, "", False, {}
        self.starts += 1
        application = web.Application(client_max_size=1 << 30)
        application.router.add_route("*", "/{path:.*}", self.receive)
        self.runner = web.AppRunner(application, handler_cancellation=True, shutdown_timeout=0)
        await self.runner.setup()
        await web.TCPSite(self.runner, *self.place.getsockname(), backlog=4096).start()

    async def stop(self) -> None:
        """End it, as a killed process does."""
        for transport in self.connections:
            transport.abort()
        self.connections.clear()
        await self.runner.cleanup()

    async def __aenter__(self) -> Stand:
        await self.start()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.stop()

    @property
    def endpoint(self) -> Endpoint:
        return Endpoint(self.url, "key")

    @property
    def version(self) -> int | None:
        return None if self.label == "default" else int(self.label.partition("@")[0])

    @property
    def changes(self) -> list[str]:
        """The calls that are no looks at its state, and no requests."""
        looks = {"/v1/models", "/weight_info", "rlx_state", "/metrics", "/inference/v1/generate"}
        return [call for call in self.calls if call not in looks]

    @property
    def requests(self) -> list[Any]:
        return self.bodies.get("/inference/v1/generate", [])

    async def receive(self, request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        self.connections.add(request.transport)
        body = await request.json() if request.can_read_body else {}
        name = body["method"] if request.path == "/collective_rpc" else request.path
        if request.headers.get("Authorization") != f"Bearer {self.key}":
            self.refused += 1
            return web.Response(status=401)
        self.calls.append(name)
        self.bodies.setdefault(name, []).append(body or dict(request.query))
        while name in self.hangs:
            await asyncio.sleep(0.01)
        if self.drops[name] > 0:
            self.drops[name] -= 1
            request.transport.abort()
            return web.Response()
        if self.fails[name] > 0:
            self.fails[name] -= 1
            return failure(500, "out of luck")
        if request.path == "/collective_rpc":
            if not self.extension:
                return failure(500, f"Call to collective_rpc method failed: Method '{name}' is not implemented.")
            return web.json_response({"results": [self.call(name, rank, *body.get("args", [])) for rank in range(self.ranks)]})
        respond = getattr(self, request.path.strip("/").replace("/", "_"), None)
        return web.Response(status=404) if respond is None else await respond(body)

    def call(self, method: str, rank: int, *args: str) -> Answer:
        """What one worker returns of a method of the extension."""
        if rank == self.ranks - 1 and method in self.errors:
            return {"rank": rank, **self.errors[method]}
        if method == "rlx_load":
            self.folder, self.loaded = args
        return {"rank": rank} | {
            "rlx_state": {"start": str(self.starts), "label": self.loaded} | self.state,
            "rlx_check": {"ready": True},
            "rlx_load": {"seconds": 0.01},
            "rlx_compare": {"equal": 100, "different": 0, "served": 100, "names": [], "seconds": 0.01},
        }[method]

    async def inference_v1_generate(self, asked: Answer) -> web.Response:
        ids, model, before = asked["token_ids"], asked.get("model"), self.label
        if model not in ("policy", None, *self.adapters):
            return failure(404, f"The model `{model}` does not exist.")
        if len(ids) >= CONTEXT or min(ids) < 0:
            return failure(
                400, f"The decoder prompt (length {len(ids)}) is longer than the maximum model length of {CONTEXT}, or has wrong ids. "
            )
        self.in_flight += 1
        try:
            await asyncio.sleep(self.delay)
            while self.paused or self.holds:
                await asyncio.sleep(0.005 + self.in_flight / 2000)
        except asyncio.CancelledError:
            self.aborted += 1
            raise
        finally:
            self.in_flight -= 1
        spans = [(before, 0, 1), (self.label, 1, len(ids))] if before != self.label and len(ids) > 1 else [(self.label, 0, len(ids))]
        choice = {
            "index": 0,
            "token_ids": ids[::-1],
            "logprobs": {"content": [{"token_id": i, "logprob": -i / 7, "rank": 1, "top_logprobs": []} for i in ids[::-1]]},
            "finish_reason": "stop",
            "weight_versions": [{"version": label, "start": start, "end": end} for label, start, end in spans],
        }
        self.served.append(model if model in self.adapters else self.label)
        return web.json_response({"request_id": asked.get("request_id"), "choices": [choice | self.completion]})

    async def pause(self, _: Answer) -> web.Response:
        self.paused = True
        self.preemptions += self.in_flight
        return web.json_response({"status": "paused"})

    async def resume(self, _: Answer) -> web.Response:
        self.paused = False
        return web.json_response({"status": "resumed"})

    async def update_weight_version(self, asked: Answer) -> web.Response:
        self.label = asked["new_version"]
        return web.json_response({"success": True, "new_version": self.label})

    async def weight_info(self, _: Answer) -> web.Response:
        return web.json_response({"weight_version": self.label})

    async def is_paused(self, _: Answer) -> web.Response:
        return web.json_response({"is_paused": self.paused})

    async def health(self, _: Answer) -> web.Response:
        return web.Response()

    async def v1_models(self, _: Answer) -> web.Response:
        cards = [{"id": "policy", "root": self.state["model"], "max_model_len": CONTEXT, "parent": None}]
        cards += [{"id": name, "root": path, "max_model_len": None, "parent": "policy"} for name, path in self.adapters.items()]
        return web.json_response({"object": "list", "data": cards})

    async def v1_load_lora_adapter(self, asked: Answer) -> web.Response:
        if asked["lora_name"] in self.adapters:
            return failure(400, f"The lora adapter '{asked['lora_name']}' has already been loaded.")
        self.adapters[asked["lora_name"]] = asked["lora_path"]
        return web.Response(text=f"Success: LoRA adapter '{asked['lora_name']}' added successfully.")

    async def v1_unload_lora_adapter(self, asked: Answer) -> web.Response:
        if self.adapters.pop(asked["lora_name"], None) is None:
            return failure(404, f"The lora adapter '{asked['lora_name']}' cannot be found.")
        return web.Response(text=f"Success: LoRA adapter '{asked['lora_name']}' removed successfully.")

    async def metrics(self, _: Answer) -> web.Response:
        values = {"num_requests_running": self.in_flight, "num_requests_waiting": self.waiting, "kv_cache_usage_perc": 0.25}
        values |= {"num_preemptions_total": self.preemptions, "generation_tokens_total": 70, "prompt_tokens_total": 40}
        values |= {"prefix_cache_queries_total": 40, "prefix_cache_hits_total": 10}
        lines = [
            f'# TYPE vllm:{name} gauge\nvllm:{name}{{engine="0",model_name="policy"}} {float(value)}' for name, value in values.items()
        ]
        return web.Response(text="\n".join(lines) + "\n")


def failure(status: int, message: str) -> web.Response:
    """An error in vLLM's form."""
    return web.json_response({"error": {"message": message, "type": "BadRequestError", "param": None, "code": status}}, status=status)


def publish(folder: Path, version: int, adapter: bool = False) -> Path:
    """Write a version's folder, as far as clients of servers read it."""
    folder.mkdir()
    if adapter:
        (folder / "adapter_config.json").touch()
    (folder / "COMPLETE").write_text(json.dumps({"version": version, "files": {}, "tensors": {}}))
    return folder


async def until(condition: Callable[[], object]) -> None:
    """Return when the condition holds."""
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)


@asynccontextmanager
async def serving(*stands: Stand, **options: Any) -> AsyncIterator[tuple[Any, ...]]:
    """A client of running servers that it found ready, and the servers."""
    for stand in stands:
        await stand.start()
    try:
        async with Servers([stand.endpoint for stand in stands], **({"request_timeout": 60} | options)) as client:
            yield await client.ready(), *stands
    finally:
        for stand in stands:
            await stand.stop()
