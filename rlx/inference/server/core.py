"""vLLM's engine core behind `AsyncLLM`. It extracts the tokens of policy requests and stamps each with its policy version.

The core runs either in a thread of this process (CPU: no second process, no sockets, no serialisation), in a separate process (GPU: the
event loop never waits for the engine's Python), or in several (data parallelism). `AsyncLLM` works with all and serves `/v1/…` beside us.

A token's version is the value of `version` when the token arrives here. That is exact, because `PolicyEngine` pauses the core and calls
`settle` before it changes `version`: by then every token that the old weights sampled has passed through `_take`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

from vllm.config import VllmConfig
from vllm.v1.engine import EngineCoreEventType, EngineCoreOutputs, EngineCoreRequest
from vllm.v1.engine.core import EngineCore
from vllm.v1.engine.core_client import AsyncMPClient, DPLBAsyncMPClient
from vllm.v1.engine.detokenizer import IncrementalDetokenizer
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.executor import Executor

FINISH_REASONS = {0: "stop", 1: "length", 2: "abort", 3: "error", 4: "stop"}  # vllm.v1.engine.FinishReason


class Sink:
    """The tokens sampled so far for one policy request.

    The core knows stop tokens, but not text. A request with stop strings has `text`, which finds the token that completes one of them.
    The tokens that the core has sampled beyond it are dropped, and the core is told to abort the request (`cut`).
    """

    __slots__ = ("cut", "done", "finish_reason", "interrupted", "logprobs", "max_tokens", "text", "token_ids", "versions")

    def __init__(self, done: asyncio.Future[None], max_tokens: int) -> None:
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.versions: list[list[int]] = []  # runs [version, tokens]
        self.finish_reason = ""
        self.max_tokens = max_tokens
        self.interrupted = False  # by a weight update: the engine reports this as a preemption
        self.done = done
        self.text: IncrementalDetokenizer | None = None
        self.cut = False  # ended by a stop string while the core goes on

    def add(self, tokens: list[int], logprobs: list[float], version: int, reason: str) -> None:
        """Take new tokens and their log-probabilities. `reason`: why the core ends the request, if it does."""
        if self.text is not None:
            for number, token in enumerate(tokens, 1):
                if self.text.update([token], reason == "stop" and number == len(tokens)) is not None:
                    tokens, logprobs = tokens[:number], logprobs[:number]
                    self.cut, reason = not reason, "stop"
                    break
        if tokens:
            self.token_ids += tokens
            self.logprobs += logprobs
            if self.versions and self.versions[-1][0] == version:
                self.versions[-1][1] += len(tokens)
            else:
                self.versions.append([version, len(tokens)])
        self.finish_reason = reason


class PolicyOutputs:
    """Takes the outputs of requests in `sinks` and keeps the scheduler's statistics. A mixin of both cores."""

    sinks: dict[str, Sink]
    version: int
    running: int
    waiting: int
    kv_cache_usage: float
    preemptions: int
    prompt_tokens: int  # of all requests so far
    cached_tokens: int  # of these: those whose keys and values were found in the cache
    steps: int  # of the engine

    def _open(self) -> None:
        self.sinks = {}
        self.version = 0
        self.running = self.waiting = self.preemptions = self.steps = 0
        self.prompt_tokens = self.cached_tokens = 0
        self.kv_cache_usage = 0.0
        self._loads: dict[int, tuple[int, int, float]] = {}  # by engine: running, waiting, usage

    def _take(self, outputs: EngineCoreOutputs) -> bool:
        """Move our requests' tokens into their sinks. True if outputs are left for `AsyncLLM`."""
        others = []
        version = self.version
        self.steps += 1  # the core reports every step, also one without a token, because it keeps the scheduler's statistics
        for output in outputs.outputs:
            sink = self.sinks.get(output.request_id)
            if output.events:
                preempted = sum(event.type == EngineCoreEventType.PREEMPTED for event in output.events)
                if sink is not None and preempted:
                    preempted, sink.interrupted = preempted - sink.interrupted, False
                self.preemptions += preempted
            if sink is None:
                others.append(output)
                continue
            tokens = output.new_token_ids
            logprobs: list[float] = []
            if tokens:
                assert output.new_logprobs is not None
                logprobs = output.new_logprobs.logprobs[:, 0].tolist()
            sink.add(tokens, logprobs, version, "" if output.finish_reason is None else FINISH_REASONS[output.finish_reason])
            if sink.finish_reason:
                del self.sinks[output.request_id]
                if not sink.done.done():
                    sink.done.set_result(None)
        stats = outputs.scheduler_stats
        if stats is not None:
            self._loads[outputs.engine_index] = stats.num_running_reqs, stats.num_waiting_reqs, stats.kv_cache_usage
            running, waiting, usage = zip(*self._loads.values(), strict=True)
            self.running, self.waiting, self.kv_cache_usage = sum(running), sum(waiting), max(usage)
            if stats.prefix_cache_stats is not None:  # of this step's new requests; those that compute theirs again are counted apart
                self.prompt_tokens += stats.prefix_cache_stats.queries
                self.cached_tokens += stats.prefix_cache_stats.hits
        outputs.outputs = others
        return bool(others)

    def interrupt(self) -> None:
        """A weight update has interrupted the running requests. That is not for lack of cache, so it does not count as preemption."""
        for sink in self.sinks.values():
            sink.interrupted = bool(sink.token_ids)  # a request that waits has no tokens, except after a preemption

    def _fail(self, error: BaseException) -> None:
        """Fail every open request, because the engine is dead."""
        for sink in self.sinks.values():
            if not sink.done.done():
                sink.done.set_exception(EngineDeadError())
        self.sinks.clear()


class SeparateCore(PolicyOutputs, AsyncMPClient):
    """The engine in a separate process, over vLLM's sockets."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._open()
        super().__init__(*args, **kwargs)

    async def get_output_async(self) -> EngineCoreOutputs:
        while True:
            try:
                outputs = await super().get_output_async()
            except Exception as error:
                self._fail(error)
                raise
            if self._take(outputs):
                return outputs

    async def settle(self) -> None:
        """Return when all outputs of the paused core have been taken.

        The answer to the pause comes through the same socket after the last tokens. Once the queue is empty, its reader has the last item
        and passes it to `_take` without another wait.
        """
        while not self.outputs_queue.empty():
            await asyncio.sleep(0)


class DataParallelCore(SeparateCore, DPLBAsyncMPClient):
    """Several engines that divide the experts of one model, each in a process of its own, perhaps on other hosts.

    A request goes to the engine with the fewest; every call goes to all of them.
    """

    async def call_utility_async(self, method: str, *args: Any) -> Any:
        """The answer of the first engine; of `collective_rpc` those of all workers, engine by engine. Raises what the first of them raises,
        when all have answered."""
        calls = (self._call_utility_async(method, *args, engine=engine) for engine in self.core_engines)
        answers = await asyncio.gather(*calls, return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        if method == "collective_rpc":
            return [one for answer in answers for one in answer]  # type: ignore[union-attr]
        return all(answers) if method == "reset_prefix_cache" else answers[0]


class InProcessCore(PolicyOutputs, AsyncMPClient):
    """The engine in one thread of this process. Steps run when `AsyncLLM` requests outputs; calls run between steps."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        executor_class: type[Executor],
        log_stats: bool,
        client_addresses: dict[str, Any] | None = None,
        client_count: int = 1,
        client_index: int = 0,
    ) -> None:
        """The base class's constructor is not called, because it would start the process and its sockets."""
        self._open()
        self.vllm_config = vllm_config
        self.resources: Any = SimpleNamespace(engine_dead=False)
        self.engine_ranks_managed = [0]
        self.client_count, self.client_index = client_count, client_index
        self.engines_running = False
        self._inbox: deque[EngineCoreRequest | list[str]] = deque()
        self._work = asyncio.Event()
        # OpenMP keeps its thread count per thread, so the thread that runs the engine must also create it.
        self._thread = ThreadPoolExecutor(1, "engine")
        self.engine: EngineCore = self._thread.submit(EngineCore, vllm_config, executor_class, log_stats).result()

    def shutdown(self, timeout: float | None = None) -> None:
        if not self.resources.engine_dead:
            self.resources.engine_dead = True
            self._thread.submit(self.engine.shutdown).result()
            self._thread.shutdown()

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        self.ensure_alive()
        self._inbox.append(request)
        self._work.set()

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        if request_ids and not self.resources.engine_dead:
            self._inbox.append(request_ids)
            self._work.set()

    async def call_utility_async(self, method: str, *args: Any) -> Any:
        self.ensure_alive()
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, lambda: getattr(self.engine, method)(*args))
        finally:
            self._work.set()

    async def get_output_async(self) -> EngineCoreOutputs:
        loop = asyncio.get_running_loop()
        try:
            while True:
                while not self._inbox and not self.engine.scheduler.has_requests():
                    self._work.clear()
                    await self._work.wait()
                outputs = await loop.run_in_executor(self._thread, self._step)
                if outputs is not None and self._take(outputs):
                    return outputs
        except Exception as error:
            self.resources.engine_dead = True
            self._fail(error)
            raise

    def _step(self) -> EngineCoreOutputs | None:
        """Pass new requests and aborts to the engine, then run one step. Runs in the engine's thread."""
        while self._inbox:
            item = self._inbox.popleft()
            if isinstance(item, list):
                self.engine.abort_requests(item)
            else:
                self.engine.add_request(*self.engine.preprocess_add_request(item))
        outputs, executed = self.engine.step_fn()
        self.engine.post_step(executed)
        return outputs.get(self.client_index) if outputs else None

    async def settle(self) -> None:
        """Nothing to do: a step's tokens are taken before the next call in the engine's thread is answered."""
