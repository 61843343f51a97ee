"""Weight sync without files: `weight_broadcast.type` nccl (between GPUs) or ipc (processes on one GPU), by vLLM's own transfer engines.

    step 12 ends      offer(13)   endpoints/weights.json         {"version": 13, "token": …}
    the fleet pauses              endpoints/weights_wanted.json  {"version": 13, "id": …, "servers": [{"url": …, "api_key": …}]}
    while waiting     send()      every rank gathers layer by layer; rank 0 drives all servers over HTTP and sends them the tensors
                                  endpoints/weights_sent.json    {"version": 13, "id": …, "failed": {url: why}}
    the fleet sets the label and resumes

The weights are those of the offered version until the next step changes them: the next `offer` deletes a request for an older one.
An NCCL group has fixed members, so other servers, or a transfer that failed, mean a new group. Servers are the same if their whole records
are. A server in `failed` may hold half a version. Pausing, labels and resuming are the fleet's; nothing here compares what arrived.
Written against the documented calls of vLLM 0.32 and 0.33 and tested up to these calls, not on a GPU. Importing this imports vLLM.
"""

from __future__ import annotations

import base64
import functools
import http.client
import json
import os
import pickle
import socket
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.weight_transfer import ParamMeta, WeightSource, WeightTransferTrainerFactory
from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo
from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

from rlx.parallel.rendezvous import LOOPBACK, TOKEN
from rlx.paths import RunPaths, arrived, write_text
from rlx.process import host_name

if TYPE_CHECKING:
    from rlx.config.schema import Config
    from rlx.models.policy import PolicyModel
    from rlx.parallel.mesh import Mesh
    from rlx.weights.export import Export

GOODBYE = 10.0  # seconds for a server to leave a group; one that hangs in NCCL never does
Record = dict[str, Any]  # of one server: {"url": "http://host:port", "api_key": …}

_open = urllib.request.build_opener(urllib.request.ProxyHandler({})).open


def call(server: Record, path: str, body: Any, timeout: float) -> Any:
    """The decoded answer to a POST, or to a GET if `body` is None; a RuntimeError if there is none with status 200."""
    headers = {"Authorization": f"Bearer {server['api_key']}", "Content-Type": "application/json"}
    content = None if body is None else json.dumps(body).encode()
    try:
        with _open(urllib.request.Request(f"{server['url']}/{path}", content, headers), timeout=timeout) as answer:
            return json.loads(answer.read())
    except (OSError, http.client.HTTPException, ValueError) as error:
        more = error.read()[:500].decode(errors="replace") if isinstance(error, urllib.error.HTTPError) else ""
        return RuntimeError(f"/{path}: {error or type(error).__name__} {more}".strip())


class Servers:
    """vLLM's client of a transfer (`VLLMWeightSyncClient`), for several servers: each message goes to all of them at once.

    `failed`: why servers no longer take part, by URL. In an NCCL group, one failure breaks the transfer for all: `abort` is called, and the
    message raises RuntimeError. With CUDA IPC the transfer goes on for the others.
    """

    def __init__(self, servers: list[Record], timeout: float) -> None:
        """`timeout`: seconds for each message."""
        self.servers, self.timeout, self.grouped = servers, timeout, False
        self.failed: dict[str, str] = {}
        self.abort: Callable[[], None] = lambda: None
        self.workers = {url: answer["world_size"] for url, answer in self._tell("get_world_size", lambda _: None).items()}

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Give the workers ranks of their own in the group: vLLM's trainer knows one server only, whose workers begin at rank 1."""
        self.grouped = "rank_offset" in init_info
        first = dict(zip(self.workers, accumulate(self.workers.values(), initial=1), strict=False))
        own = {url: {"init_info": init_info | ({"rank_offset": rank} if self.grouped else {})} for url, rank in first.items()}
        self._tell("init_weight_transfer_engine", own.__getitem__)

    def start_weight_update(self) -> None:
        self._tell("start_weight_update")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        if update_info.get("ipc_handles") is not None:  # vLLM's form of GPU memory handles in JSON
            update_info["ipc_handles_pickled"] = base64.b64encode(pickle.dumps(update_info.pop("ipc_handles"))).decode()
        self._tell("update_weights", lambda _: {"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._tell("finish_weight_update")

    def leave(self) -> None:
        """Ask all servers to leave the group, also those that failed."""
        self.grouped, self.timeout, self.failed = False, GOODBYE, {}
        self._tell("shutdown_weight_transfer_engine")

    def _tell(self, path: str, body: Callable[[str], Any] = lambda _: {}) -> dict[str, Any]:
        """The answers by URL. `body`: of the message to a URL."""
        asked = [server for server in self.servers if server["url"] not in self.failed]
        with ThreadPoolExecutor(max(1, len(asked))) as pool:
            answers = pool.map(lambda server: call(server, path, body(server["url"]), self.timeout), asked)
        found = dict(zip((server["url"] for server in asked), answers, strict=True))
        self.failed |= (broken := {url: str(answer) for url, answer in found.items() if isinstance(answer, RuntimeError)})
        if broken and self.grouped:
            self.abort()
            raise RuntimeError("; ".join(f"{url} {why}" for url, why in broken.items()))
        return {url: answer for url, answer in found.items() if url not in broken}


class _Described(list):
    """vLLM 0.32 calls `source.metadata()`, 0.33 reads `source.metadata`."""

    def __call__(self) -> _Described:
        return self


class Weights(WeightSource):
    """The trained weights by their names in checkpoints.

    Gathering is collective: every rank makes the same passes, of which each begins with `begin` and is iterated to its end.
    """

    def __init__(self, model: PolicyModel, mesh: Mesh, export: Export) -> None:
        """Raises ValueError if the weights cannot be sent layer by layer."""
        self.model, self.mesh, self.export = model, mesh, export
        if not export.by_layer:
            raise ValueError(
                f"a tensor in the checkpoints of {type(model.hf).__name__} needs tensors of several layers, so its weights cannot be sent "
                "from memory\n  fix: weight_broadcast.type=filesystem"
            )
        self.left: Iterator[tuple[str, torch.Tensor]] = iter(())

    @functools.cached_property
    def metadata(self) -> Any:
        described = [item for unit in self.export.units() for item in self.export.described(unit).items()]
        return _Described(ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in described)

    def begin(self) -> None:
        """Start a pass. Waits for the optimizer's step first, because vLLM's sender reads on streams of its own."""
        self.mesh.synchronize()
        self.left = self._gathered()

    def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self.left

    __iter__ = iter_full  # of vLLM 0.32

    def _gathered(self) -> Iterator[tuple[str, torch.Tensor]]:
        """vLLM's sender goes on on another stream after each buffer, maybe within a layer: that stream must wait until the layer is there,
        and the layer's memory must not be used again before that stream has read it."""
        weights = dict(self.model.named_weights())
        for unit in self.export.units():
            tensors = self.export.convert({name: self._whole(name, weights[name]) for name in unit})
            there = torch.cuda.current_stream().record_event() if self.mesh.device.type == "cuda" else None
            for name, tensor in tensors.items():
                if there is not None:
                    torch.cuda.current_stream().wait_event(there)
                    tensor.record_stream(torch.cuda.current_stream())
                yield name, tensor

    def _whole(self, name: str, tensor: Any) -> torch.Tensor:
        shard: Any = tensor.detach().to(self.mesh.device, self.export.published(name, tensor))  # with CPU offload it is in host memory
        return shard.full_tensor() if hasattr(shard, "full_tensor") else shard


class Transfer:
    """The weights of one run, for its servers. Every rank has it and makes the same calls, except `wanted`."""

    def __init__(self, kind: str, timeout: float, host: str, weights: Weights, paths: RunPaths) -> None:
        """`kind`: nccl or ipc. `timeout`: seconds for each message. `host`: where a group meets."""
        self.kind, self.timeout, self.host, self.weights, self.mesh = kind, timeout, host, weights, weights.mesh
        self.offer_file, self.request_file, self.sent_file = (paths.endpoints / f"weights{end}.json" for end in ("", "_wanted", "_sent"))
        self.version: int | None = None
        self._answered = ""  # the latest request's id
        self.seconds = 0.0  # that transfers have taken since the last offer
        self._servers = Servers([], timeout)
        self._engine: Any = None
        if self.mesh.first:
            for file in (self.offer_file, self.request_file, self.sent_file):  # of an earlier attempt
                file.unlink(missing_ok=True)

    @classmethod
    def of(cls, cfg: Config, model: PolicyModel, mesh: Mesh, paths: RunPaths, export: Export) -> Transfer:
        """The transfer of the configuration. Raises ValueError if the model's weights cannot be sent layer by layer."""
        host = host_name() if cfg.hardware.nodes > 1 or cfg.inference.base_url else LOOPBACK
        return cls(cfg.weight_broadcast.type, cfg.weight_broadcast.timeout, host, Weights(model, mesh, export), paths)

    def offer(self, version: int) -> None:
        """From now on, servers may get this version. Call it when everything that a reader of the version must find is on disk."""
        self.version, self.seconds = version, 0.0
        if self.mesh.first:
            write_text(self.offer_file, json.dumps({"version": version, "token": os.environ.get(TOKEN, "")}))

    def wanted(self) -> bool:
        """Whether paused servers wait for the offered version; on rank 0. Cheap."""
        return self._request() is not None

    def send(self) -> None:
        """Send the offered version to the servers that wait for it. Every rank calls this, where the weights are those of the version."""
        began, request, failed = time.monotonic(), self._request() or {"id": "", "servers": []}, dict[str, str]()
        servers = request["servers"]
        if self.mesh.any(self._engine is None or servers != self._servers.servers):
            self._leave()
        self.weights.begin()
        try:
            if self._engine is None:
                self._join(servers)
            self._engine.send_weights()
        except Exception as error:
            if not self.mesh.first:
                raise
            failed = {server["url"]: f"the transfer failed: {error}" for server in servers}
        if failed := failed | self._servers.failed:
            self._leave()
        for _ in self.weights.left:  # what a failed transfer has not gathered: the other ranks do
            pass
        self.seconds += time.monotonic() - began
        if self.mesh.first:
            self._answered = request["id"]
            write_text(self.sent_file, json.dumps({"version": self.version, "id": self._answered, "failed": failed}))

    def close(self) -> None:
        """Refuse all servers from now on."""
        self.version = None
        if self.mesh.first:
            self.offer_file.unlink(missing_ok=True)
        self._leave()

    def _request(self) -> dict[str, Any] | None:
        """On rank 0: the request of the fleet for the offered version, unless it was answered."""
        found: dict[str, Any] = json.loads((arrived(self.request_file) if self.mesh.first else None) or "{}")
        waits = self.version is not None and found.get("version") == self.version and found["id"] != self._answered
        return found if waits else None

    def _join(self, servers: list[Record]) -> None:
        """Form a group with the servers that answer."""
        self._servers = Servers(servers, self.timeout)
        if self.mesh.first and not self._servers.workers:
            raise RuntimeError("no server answers")
        info: Any = IPCTrainerInitInfo(rank=self.mesh.rank, packed=True)
        largest = max(each.dtype.itemsize * torch.Size(each.shape).numel() for each in self.weights.metadata)
        info.packed_buffer_size_bytes = max(info.packed_buffer_size_bytes, largest)  # a tensor must fit into the buffer
        if self.kind == "nccl":
            with socket.create_server((self.host, 0)) as free:
                place = {"master_address": self.host, "master_port": free.getsockname()[1]}
            info = NCCLTrainerInitInfo(rank=self.mesh.rank, world_size=1 + sum(self._servers.workers.values()), **place)
        self._engine = WeightTransferTrainerFactory.trainer_init(info, client=self._servers, source=self.weights)
        self._servers.abort = self._engine.shutdown  # frees this process from NCCL, which waits for ever for a server that is lost

    def _leave(self) -> None:
        """Take the group apart at both ends."""
        if self._engine is not None:
            self._engine.shutdown()
        self._servers.leave()
        self._servers, self._engine = Servers([], self.timeout), None
