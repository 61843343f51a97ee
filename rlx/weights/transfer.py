"""Weight sync without files: `weight_broadcast.type` nccl (between GPUs) or ipc (processes on one GPU), by vLLM's own transfer engines.

    step 12 ends      offer(13)   endpoints/weights.json         {"version": 13, "token": …}
    the fleet pauses              endpoints/weights_wanted.json  {"version": 13, "id": …, "servers": [{"url": …, "api_key": …}]}
    still in offer                every rank gathers layer by layer; rank 0 drives all servers over HTTP and sends them the tensors
                                  endpoints/weights_sent.json    {"version": 13, "id": …, "failed": ""}
    the fleet sets the label and resumes; the trainer goes on

An NCCL group has fixed members, so other servers, or a transfer that failed, mean a new group. Servers are the same if their whole records
are. A failure of one server fails the transfer for all, since any of them may hold half a version: the fleet asks again, for those that
still answer. Pausing, labels and resuming are the fleet's; nothing here compares what arrived.
Written against the documented calls of vLLM 0.32 and 0.33 and tested up to these calls, not on a GPU. Importing this imports vLLM.
"""

from __future__ import annotations

import base64
import functools
import http.client
import json
import math
import os
import pickle
import socket
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.weight_transfer import ParamMeta, WeightSource, WeightTransferTrainerFactory
from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo
from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

from rlx.parallel.rendezvous import LOOPBACK, TOKEN
from rlx.paths import RunPaths, arrived, write_text
from rlx.polling import wait_for
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
        return RuntimeError(f"{server['url']} /{path}: {error or type(error).__name__} {more}".strip())


class TransferClient:
    """vLLM's client of a transfer (`VLLMWeightSyncClient`), for several servers: each message goes to all of them at once.

    If one fails, the message raises RuntimeError, after `abort`: others may wait for it in NCCL.
    """

    failed = ""  # why a message failed: the error that the sender sees in NCCL does not say it

    def __init__(self, servers: list[Record], timeout: float) -> None:
        """`timeout`: seconds for each message."""
        self.servers, self.timeout = servers, timeout
        self.abort: Callable[[], None] = lambda: None
        self.workers = [answer["world_size"] for answer in self._tell("get_world_size", [None] * len(servers))]

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Give the workers ranks of their own in the group: vLLM's trainer knows one server only, whose workers begin at rank 1."""
        ranks = list(accumulate(self.workers, initial=1))[:-1]
        own = [init_info | ({"rank_offset": rank} if "rank_offset" in init_info else {}) for rank in ranks]
        self._tell("init_weight_transfer_engine", [{"init_info": each} for each in own])

    def start_weight_update(self) -> None:
        self._tell("start_weight_update")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        if update_info.get("ipc_handles") is not None:  # vLLM's form of GPU memory handles in JSON
            update_info["ipc_handles_pickled"] = base64.b64encode(pickle.dumps(update_info.pop("ipc_handles"))).decode()
        self._tell("update_weights", [{"update_info": update_info}] * len(self.servers))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._tell("finish_weight_update")

    def leave(self) -> None:
        """Ask all servers to leave the group. After a failure some may be within an update, and others may not answer."""
        if self.failed:
            self._ask("finish_weight_update", [{}] * len(self.servers), GOODBYE)
        self._ask("shutdown_weight_transfer_engine", [{}] * len(self.servers), GOODBYE)

    def _tell(self, path: str, bodies: Sequence[Any] | None = None) -> list[Any]:
        answers = self._ask(path, bodies or [{}] * len(self.servers), self.timeout)
        if broken := [str(answer) for answer in answers if isinstance(answer, RuntimeError)]:
            self.failed = "; ".join(broken)
            self.abort()
            raise RuntimeError(self.failed)
        return answers

    def _ask(self, path: str, bodies: Sequence[Any], timeout: float) -> list[Any]:
        with ThreadPoolExecutor(max(1, len(self.servers))) as pool:
            return list(pool.map(lambda server, body: call(server, path, body, timeout), self.servers, bodies))


class _Described(list):
    """vLLM 0.32 calls `source.metadata()`, 0.33 reads `source.metadata`."""

    def __call__(self) -> _Described:
        return self


class Weights(WeightSource):
    """The trained weights by their names in checkpoints.

    Gathering is collective: every rank makes the same passes, of which each begins with `begin` and is iterated to its end.
    """

    def __init__(self, model: PolicyModel, mesh: Mesh, export: Export) -> None:
        self.model, self.mesh, self.export = model, mesh, export
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
    """The weights of one run, for its servers. Every rank has it and makes the same calls."""

    def __init__(self, kind: str, timeout: float, host: str, weights: Weights, paths: RunPaths) -> None:
        """`kind`: nccl or ipc. `timeout`: seconds for each message. `host`: where a group meets."""
        self.kind, self.timeout, self.host, self.weights, self.mesh = kind, timeout, host, weights, weights.mesh
        self.offer_file, self.request_file, self.sent_file = (paths.endpoints / f"weights{end}.json" for end in ("", "_wanted", "_sent"))
        self._request: dict[str, Any] = {"id": "", "servers": []}  # the latest one of the fleet, on rank 0
        self.seconds = 0.0  # that the latest offer has held the trainer
        self._servers = TransferClient([], timeout)
        self._engine: Any = None
        if self.mesh.first:
            for file in (self.offer_file, self.request_file, self.sent_file):  # of an earlier attempt
                file.unlink(missing_ok=True)

    @classmethod
    def of(cls, cfg: Config, model: PolicyModel, mesh: Mesh, paths: RunPaths, export: Export) -> Transfer:
        """The transfer of the configuration."""
        host = host_name() if cfg.hardware.nodes > 1 else LOOPBACK
        return cls(cfg.weight_broadcast.type, cfg.weight_broadcast.timeout, host, Weights(model, mesh, export), paths)

    def offer(self, version: int, tick: Callable[[], None]) -> None:
        """Send this version to the servers once they wait for it, until they all have it. Every rank calls this.

        Raises Preempted on every rank if `tick`, which is called while waiting, raises it on rank 0.
        """
        began, failed = time.monotonic(), True
        if self.mesh.first:
            write_text(self.offer_file, json.dumps({"version": version, "token": os.environ.get(TOKEN, "")}))
        try:
            while failed:
                self.mesh.read(lambda waits: self._asked(version, waits), tick)
                failed = self.mesh.any(not self._send(version))
        finally:
            self.seconds = time.monotonic() - began
            self._end_offer()

    def close(self) -> None:
        """Let the servers go."""
        self._end_offer()
        self._leave()

    def _end_offer(self) -> None:
        if self.mesh.first:
            self.offer_file.unlink(missing_ok=True)

    def _asked(self, version: int, waits: Callable[[], None]) -> bytes:
        """On rank 0: wait for a request of the fleet for this version."""

        def probe() -> bool:
            found: dict[str, Any] = json.loads(arrived(self.request_file) or "{}")
            is_new = found.get("version") == version and found["id"] != self._request["id"]
            self._request = found if is_new else self._request
            return is_new

        wait_for(probe, "servers", math.inf, tick=waits)
        return b"asked"

    def _send(self, version: int) -> bool:
        """Send the weights to the servers that rank 0 was asked for, and reply. Whether they have them; other ranks do not know."""
        servers, failed = self._request["servers"], ""
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
            failed = f"the transfer failed: {self._servers.failed or error}"
            self._leave()
        if self.mesh.first and not failed and json.loads(arrived(self.request_file) or "{}").get("id") != self._request["id"]:
            failed = "the transfer took longer than the fleet waits (weight_broadcast.timeout)"
        for _ in self.weights.left:  # what a failed transfer has not gathered: the other ranks do
            pass
        if self.mesh.first:
            write_text(self.sent_file, json.dumps({"version": version, "id": self._request["id"], "failed": failed}))
        return not failed

    def _join(self, servers: list[Record]) -> None:
        """Form a group with the servers."""
        self._servers = TransferClient(servers, self.timeout)
        info: Any = IPCTrainerInitInfo(rank=self.mesh.rank, packed=True)
        largest = max(each.dtype.itemsize * torch.Size(each.shape).numel() for each in self.weights.metadata)
        info.packed_buffer_size_bytes = max(info.packed_buffer_size_bytes, largest)  # a tensor must fit into the buffer
        if self.kind == "nccl":
            with socket.create_server((self.host, 0)) as free:
                place = {"master_address": self.host, "master_port": free.getsockname()[1]}
            info = NCCLTrainerInitInfo(rank=self.mesh.rank, world_size=1 + sum(self._servers.workers), **place)
        self._engine = WeightTransferTrainerFactory.trainer_init(info, client=self._servers, source=self.weights)
        self._servers.abort = self._engine.shutdown  # frees this process from NCCL, which waits for ever for a server that is lost

    def _leave(self) -> None:
        """Take the group apart at both ends."""
        if self._engine is not None:
            self._engine.shutdown()
        self._servers.leave()
        self._servers, self._engine = TransferClient([], self.timeout), None
