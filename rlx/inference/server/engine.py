"""The served policy: vLLM's engine, the version of its weights, and the update to the next version.

An update is exact for requests in flight. The old version keeps generating while the files are read and checked. Then the engine is paused
between two steps, all tokens of the old weights are stamped, the weights are replaced, the keys and values of the old weights are dropped
(requests in flight recompute theirs, or keep them: `InFlight.keep_kv`), and the engine resumes. If all requests in flight end soon, waiting
for them is cheaper (`InFlight.drain_tokens`).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from vllm.exceptions import VLLMValidationError
from vllm.v1.engine import core_client
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.detokenizer import IncrementalDetokenizer

from rlx.inference.protocol import FLOAT, INT, Completion, GenerateRequest, PolicyState, pack_ids
from rlx.inference.server.adapter import every_request_with_adapter
from rlx.inference.server.core import DataParallelCore, InProcessCore, SeparateCore, Sink
from rlx.inference.server.half import Half
from rlx.inference.server.orders import Disobeyed, obeyed
from rlx.inference.server.policy_files import Shapes, check_adapter, check_policy, check_shapes, tensor_shapes, twin_of_head
from rlx.inference.server.reading import read
from rlx.inference.server.sampling import refuse_what_ends_an_engine, sampling_params
from rlx.inference.server.served import Compared, settle
from rlx.inference.server.start import engine_config
from rlx.waiting import UNFIT
from rlx.weights.files import identity
from rlx.weights.mailbox import Call, Gone, Interrupted
from rlx.weights.offer import read_secret

log = logging.getLogger(__name__)


class BadRequest(ValueError):
    """The request is invalid. `kind` is `context` if the prompt is too long."""

    def __init__(self, message: str, kind: str = "") -> None:
        super().__init__(message)
        self.kind = kind


class RequestFailed(RuntimeError):
    """The engine failed this request with an internal error. Other requests continue."""


class BadWeights(ValueError):
    """New weights were refused. The old ones are still served."""


class Broken(RuntimeError):
    """A failed update left a model that is partly old and partly new. The process must end."""


class Ending(NamedTuple):
    """Why the process must end with a model that is only partly updated."""

    why: str
    code: int  # UNFIT: another start would hide a defect; 1: the next version may well arrive


@dataclass(frozen=True, slots=True)
class InFlight:
    """What an update does with the requests in flight."""

    drain_tokens: int = 0  # if each has at most this many tokens left, they finish under the old version, and new ones wait
    keep_kv: bool = False  # they go on with the keys and values of the older versions; else they compute all of them again


class PolicyEngine:
    """One vLLM engine and its policy version. It is made and used on one running event loop."""

    def __init__(self, llm: AsyncLLM, model: Path, served: Shapes) -> None:
        self.llm = llm
        assert isinstance(llm.engine_core, SeparateCore | InProcessCore)
        self.core = llm.engine_core
        self.model = model
        self.weights = str(model)  # where the served version came from
        self.served = served
        lora = llm.vllm_config.lora_config
        self.rank = lora.max_lora_rank if lora is not None else 0  # of adapters; 0: whole models are served
        self.identity = ""  # of version 0's weights, to which adapters belong
        self.attested = 0.0
        self.left_out: dict[str, float] = {}  # what was not compared, and why → its share
        self._said: dict[str, float] = {}  # the latest warning about it
        self.broken: asyncio.Future[Ending] = asyncio.get_running_loop().create_future()  # the process must end
        self._updating = asyncio.Lock()
        self.secret: Path | None = None  # the file with the secret of messages between the trainer and this server
        self.asking = False  # for weights, for which the trainer must first be ready
        self._name = uuid.uuid4().hex  # of this start, also in the trainer's mailbox
        self._half = Half(self._give_up)  # whether the model is partly old and partly new, and the engine is paused
        self._numbers = itertools.count()
        self._open = asyncio.Event()  # set while new requests are admitted
        self._open.set()
        self._context = llm.model_config.max_model_len
        untied_by_vllm = getattr(llm.model_config, "word_embeddings_untied_by_checkpoint", False)  # because the files store a head, too
        self._tied = bool(llm.model_config.hf_config.tie_word_embeddings) or (untied_by_vllm and twin_of_head(model) is not None)
        self._tasks: tuple[Any, ...] = ()

    @classmethod
    async def start(cls, arguments: dict[str, Any], *, cpu: bool, in_process: bool) -> PolicyEngine:
        """Load version 0 and get ready to serve. This blocks the event loop, as vLLM does."""
        served = tensor_shapes(Path(arguments["model"]))
        config = engine_config(arguments, cpu=cpu)
        several = config.parallel_config.data_parallel_size > 1
        kind = InProcessCore if in_process else DataParallelCore if several else SeparateCore

        def make_core(vllm_config: Any, executor_class: Any, log_stats: bool, *args: Any, **kwargs: Any) -> Any:
            return kind(vllm_config, executor_class, True, *args, **kwargs)

        # AsyncLLM always makes its core through this function.
        core_client.EngineCoreClient.make_async_mp_client = staticmethod(make_core)
        llm = AsyncLLM.from_vllm_config(config, disable_log_stats=arguments["disable_log_stats"])
        engine = cls(llm, Path(arguments["model"]), served)
        engine._tasks = await llm.get_supported_tasks()
        llm._run_output_handler()
        engine.identity = await asyncio.to_thread(identity, engine.model)
        if engine.rank:
            await llm.collective_rpc("load_adapter", None, (None,))
            every_request_with_adapter(llm.input_processor)
        else:
            await llm.collective_rpc("know_initial")  # now, and not in the pause of the first update: it reads the model's files
        return engine

    def shutdown(self) -> None:
        """End the engine's own process. An engine in this process ends with the process; shutting it down would take seconds."""
        if isinstance(self.core, SeparateCore):
            self.llm.shutdown(timeout=0)

    # -- generating

    async def generate(self, request: GenerateRequest) -> Completion:
        """Sample one completion. Cancelling the call aborts the request in the engine.

        Raises BadRequest for parameters that vLLM refuses or a prompt that fills the context, RequestFailed if the engine could not
        finish the request, and EngineDeadError if the engine dies.
        """
        prompt = np.frombuffer(request.prompt_ids, INT).tolist()
        if len(prompt) >= self._context:
            raise BadRequest(f"the prompt has {len(prompt)} tokens, the context {self._context}: no room for a new token", "context")
        try:
            parameters = sampling_params(request.sampling)
            core_request = self.llm.input_processor.process_inputs(
                request.request_id, {"type": "token", "prompt_token_ids": prompt}, parameters, self._tasks
            )
            refuse_what_ends_an_engine(parameters, len(prompt))
        except (VLLMValidationError, ValueError, TypeError) as error:
            raise BadRequest(str(error)) from error
        while not self._open.is_set():
            await self._open.wait()
        core_request.external_req_id = request.request_id
        core_request.request_id = f"{request.request_id}#{next(self._numbers)}"  # unique even if clients' ids are not
        sink = Sink(asyncio.get_running_loop().create_future(), request.sampling.max_tokens)
        if parameters.stop:
            sink.text = IncrementalDetokenizer.from_new_request(self.llm.tokenizer, core_request)
        self.core.sinks[core_request.request_id] = sink
        try:
            await self.core.add_request_async(core_request)
            await sink.done
        except BaseException as error:
            self.core.sinks.pop(core_request.request_id, None)
            sink.done.cancel()  # an update may be waiting for it
            if isinstance(error, asyncio.CancelledError):
                await self.core.abort_requests_async([core_request.request_id])
            raise
        if sink.cut:
            await self.core.abort_requests_async([core_request.request_id])
        if sink.finish_reason == "error":
            raise RequestFailed(f"the engine failed request {request.request_id} after {len(sink.token_ids)} tokens; see its log")
        return Completion(
            token_ids=pack_ids(sink.token_ids),
            logprobs=np.asarray(sink.logprobs, FLOAT).tobytes(),
            temperature=parameters.temperature or 1.0,  # vLLM raises values below 0.01; 0 takes the most likely token, scored at 1
            versions=[(version, count) for version, count in sink.versions],
            finish_reason=sink.finish_reason,
        )

    # -- versions

    @property
    def version(self) -> int:
        return self.core.version

    @property
    def activity(self) -> int:
        """A number that changes as long as the engine works: its steps."""
        return self.core.steps

    @property
    def waited_for(self) -> int:
        """Requests that the engine has to answer; 0 while it is changed to another version."""
        return 0 if self._updating.locked() or self._half.partly else len(self.core.sinks)

    def state(self) -> PolicyState:
        core = self.core
        return PolicyState(
            version=core.version,
            attested=self.attested,
            not_compared=self.left_out,
            model=str(self.model),
            context_length=self._context,
            running=core.running,
            waiting=core.waiting,
            kv_cache_usage=core.kv_cache_usage,
            preemptions=core.preemptions,
            prompt_tokens=core.prompt_tokens,
            cached_tokens=core.cached_tokens,
            weights=self.weights,
            identity=self.identity,
            asking=self.asking,
            start=self._name,
        )

    async def update_weights(self, folder: Path, version: int, kind: str = "files", in_flight: InFlight = InFlight()) -> None:
        """Serve `version` from a folder with a `COMPLETE` marker: a Hugging Face model, or with the kind `adapter` adapters for version 0.

        Raises BadWeights if nothing was changed, Broken if loading failed midway.
        """
        async with self._updating:
            started = time.perf_counter()
            try:
                if (kind == "adapter") != bool(self.rank):
                    raise ValueError(
                        f"{folder} holds {_what(kind == 'adapter')}, but this server was started to serve {_what(bool(self.rank))}"
                    )
                if self.rank:
                    await asyncio.to_thread(check_adapter, folder, version, self.served, self.rank, self.identity)
                else:
                    await asyncio.to_thread(check_policy, folder, version, self.served, self._tied)
                    await read(self._workers, folder)
            except (ValueError, KeyError, TypeError, OSError, Disobeyed) as error:
                raise BadWeights(f"version {version} was refused, version {self.version} is still served: {error}") from error
            try:
                await self._drain(in_flight.drain_tokens)
                await self._load(folder, version, started, in_flight.keep_kv)
            finally:
                self._open.set()

    async def take_weights(
        self, where: str, version: int, in_flight: InFlight = InFlight(), together: int = 1, timeout: float = 600.0
    ) -> None:
        """Serve `version` from the memory of the trainer at `where`. For the arguments see `protocol.UpdateRequest`.

        The old version keeps generating until the trainer is ready to send. Raises BadWeights if nothing was changed, Gone if the trainer
        does not have the version or the transfer broke, Broken if what is served is not what was trained. After a transfer that broke
        midway nothing is generated until another version is loaded, for at most `timeout` seconds.
        """
        async with self._updating:
            if version == self.version and not self._half.partly:
                return
            started = time.perf_counter()
            try:
                if self.llm.vllm_config.weight_transfer_config is None:
                    raise ValueError("this server was started to read weights from files (weight_broadcast.type=filesystem)")
                if self.secret is None:
                    raise ValueError("this server has no secret in common with a trainer")
                try:
                    call = await asyncio.to_thread(Call, where, timeout, await asyncio.to_thread(read_secret, self.secret))
                except OSError as error:
                    raise Gone(f"the trainer at {where} cannot be asked: {error}") from error
                announced = call.announced
                given = {name: tuple(shape) for name, shape in zip(announced.names, announced.shapes, strict=True)}
                check_shapes(f"the trainer's model at {where}", given, self.served, self._tied, call.untrained)
            except ValueError as error:
                raise BadWeights(f"version {version} was refused, version {self.version} is still served: {error}") from error
            workers = self.llm.vllm_config.parallel_config.world_size_across_dp
            try:
                self.asking = True
                self._half.stop()  # a trainer that is lost does not keep the server waiting: that raises Gone
                await asyncio.to_thread(call.ask, self._name, version, workers, together)
                self.asking, checked = False, time.perf_counter()
                sums = await self._receive(call, version, in_flight, timeout)
                if sums.keys() != given.keys():
                    raise ValueError(f"the trainer's checksums lack or add tensors: {sorted(sums.keys() ^ given.keys())[:5]}")
                found: list[Compared] = await self._workers("attest_policy", sums)
                await self._resume(version, where, found)
            except Gone:
                raise
            except Exception as error:
                raise self._break(f"version {version} from {where}", error) from error
            finally:
                self.asking = False
                call.end()  # a thread that still waits would keep this process from ending
                self._open.set()
                self._half.run(timeout)
            self._report(started, checked)
            with contextlib.suppress(Interrupted):  # the trainer need not wait for this
                await asyncio.to_thread(call.done)

    async def _receive(self, call: Call, version: int, in_flight: InFlight, timeout: float) -> dict[str, Any]:
        """Obey the trainer until it has sent everything. Returns the checksums of what it sent. Raises Gone if the transfer breaks."""
        order, paused, several = "", False, isinstance(self.core, DataParallelCore)
        try:
            while True:
                order, arguments = await asyncio.to_thread(call.next)
                begins = order == "start_weight_update"
                # Data-parallel engines wait for each other in every step. One that waits for another's part of a group would stop both.
                if not paused and (begins or (several and order == "init_weight_transfer_engine")):
                    await self._drain(in_flight.drain_tokens)
                    await self._pause(in_flight.keep_kv)
                    paused = True
                self._half.partly |= begins
                sums = arguments.pop("sums", None)
                await self._workers(order, **arguments)
                if sums is not None:
                    return sums
                await asyncio.to_thread(call.done)
        except Exception as error:
            text = f"version {version} did not arrive ({order or 'no order'}): {type(error).__name__}: {error}"
            log.warning("%s", text)
            self._half.broke(text, timeout)
            with contextlib.suppress(Exception):
                await self._workers("abandon_transfer")
                if paused and not self._half.partly:
                    await self.core.resume_scheduler_async()
                await asyncio.to_thread(call.done, text)
            raise Gone(text) from error

    async def reload_weights(self) -> None:
        """Return to version 0. Raises the same errors as `update_weights`."""
        async with self._updating:
            started = time.perf_counter()
            try:
                shapes = await asyncio.to_thread(tensor_shapes, self.model)
                if shapes != self.served:
                    raise ValueError(f"{self.model} has changed since this server started")
                if not self.rank:
                    await read(self._workers, self.model)
            except (ValueError, OSError, Disobeyed) as error:
                raise BadWeights(f"the initial model was refused, version {self.version} is still served: {error}") from error
            await self._load(self.model, 0, started)

    async def _workers(self, method: str, *arguments: Any, **named: Any) -> list[Any]:
        """Call a method of all workers. Raises Disobeyed when all have answered, if any failed."""
        return await obeyed(self.core.collective_rpc_async, method, *arguments, **named)

    async def _drain(self, tokens: int) -> None:
        """If all requests in flight are running and each has at most `tokens` tokens left, admit no more and wait for them."""
        sinks = list(self.core.sinks.values())
        config = self.llm.vllm_config  # each engine of the server has a scheduler of its own
        fit = len(sinks) <= config.scheduler_config.max_num_seqs * config.parallel_config.data_parallel_size
        running = fit and not self._half.partly  # after a transfer that broke, the engine is paused
        if sinks and running and all(sink.max_tokens - len(sink.token_ids) <= tokens for sink in sinks):
            self._open.clear()
            await asyncio.wait([sink.done for sink in sinks])

    async def _load(self, folder: Path, version: int, started: float, keep_kv: bool = False) -> None:
        if self.broken.done():
            raise Broken(self.broken.result().why)
        checked = time.perf_counter()
        try:
            await self._pause(keep_kv)
            method, *what = ("load_adapter", str(folder) if version else None) if self.rank else ("load_policy",)
            found: list[Compared] = await self._workers(method, *what)
            await self._resume(version, str(folder), found)
        except Exception as error:
            raise self._break(f"version {version} from {folder}", error) from error
        self._report(started, checked)

    async def _pause(self, keep_kv: bool) -> None:
        """Stop between two steps. All tokens of the old weights are stamped then, and their keys and values are dropped.

        With `keep_kv`, the running requests keep theirs, and no other request finds them (`scheduler.py`).
        """
        self._half.stop()
        await self.core.pause_scheduler_async("keep", not keep_kv)
        await self.core.settle()
        if not keep_kv:
            self.core.interrupt()
        elif not await self.core.reset_prefix_cache_async(False, True):
            raise RuntimeError("with a KV connector, cached prefixes outlive an update; set weight_broadcast.keep_kv=false")

    async def _resume(self, version: int, where: str, found: Sequence[Compared]) -> None:
        """Serve what the workers have loaded. Raises ValueError if their parts together are not what was trained."""
        engines = self.llm.vllm_config.parallel_config.data_parallel_size
        (self.attested, self.left_out), self.weights = settle(found, engines), where
        self.core.version = version
        self._half.whole()
        await self.core.resume_scheduler_async()

    def _break(self, what: str, error: Exception) -> Broken:
        message = f"loading {what} failed midway: {type(error).__name__}: {error}"
        log.critical(message, exc_info=error)
        self._fail(message)
        return Broken(message)

    def _give_up(self, why: str) -> None:
        self._fail(why, 1)

    def _fail(self, why: str, code: int = UNFIT) -> None:
        if not self.broken.done():
            self.broken.set_result(Ending(why, code))

    def _report(self, started: float, checked: float) -> None:
        log.info(
            "version %d: ready after %.0f ms, paused for %.0f ms; compared %.1f %% of the served %s with the trained ones",
            self.version, 1e3 * (checked - started), 1e3 * (time.perf_counter() - checked), 100 * self.attested,
            "adapters" if self.rank else "weights",
        )  # fmt: skip
        if self.left_out and self.left_out != self._said:
            self._said = self.left_out
            shares = sorted(self.left_out.items(), key=lambda item: -item[1])
            log.warning("not compared: %s", ", ".join(f"{name} {100 * share:.1f} %" for name, share in shares))


def _what(adapter: bool) -> str:
    return "adapters (lora.rank)" if adapter else "whole models (lora.rank=null)"
