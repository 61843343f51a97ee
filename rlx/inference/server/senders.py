"""The trainer's end of vLLM's own weight transfer: NCCL between GPUs, CUDA IPC between processes on one GPU.

The trainer imports this for `weight_broadcast.type` nccl and ipc only. Everything on the device is vLLM's. Here its engine gets our tensors
(`Source`) and our messages (`Client`), which carry its orders to all servers of a transfer.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import ParamMeta, TrainerInitInfo, WeightSource
from vllm.distributed.weight_transfer.clients import _json_safe_update_payload
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo
from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

from rlx.weights.mailbox import READY, Client
from rlx.weights.memory import MakeSender, Source

log = logging.getLogger("rlx.trainer")


class _Weights(WeightSource):
    """Our source as vLLM's."""

    def __init__(self, source: Source) -> None:
        self.source = source

    def metadata(self) -> list[ParamMeta]:
        return [ParamMeta(name, dtype, shape) for name, dtype, shape in self.source.metadata()]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        # With trainer.fsdp_cpu_offload they lie in host memory, which neither NCCL nor CUDA IPC can send.
        return ((name, tensor.to(self.source.mesh.device)) for name, tensor in self.source)


class VllmSender:
    """A sender around vLLM's trainer-side engine. It is vLLM's client as well, and passes orders on to the client of the transfer."""

    def __init__(self, kind: str, client: Client, source: Source) -> None:
        """Form a group with the client's members. Every rank calls this."""
        self.client = client
        self.source = source
        host = client.mailbox.store.host if source.mesh.first else ""  # others do not send
        largest = max(dtype.itemsize * math.prod(shape) for _, dtype, shape in source.metadata())
        info = init_info(kind, source.mesh.rank, 1 + sum(member.workers for member in client.members), host, largest)
        with self._watched():
            self._engine = WeightTransferTrainerFactory.trainer_init(info, client=self, source=_Weights(source))

    def send_weights(self) -> None:
        with self._watched():
            self._engine.send_weights()

    def _watched(self) -> AbstractContextManager[None]:
        # Messages have the limit `timeout` themselves, and say more when it is over.
        return watched(lambda: self.source.taken, self.client.timeout + READY)

    def shutdown(self) -> None:
        self._engine.shutdown()

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.client.init_weight_transfer_engine(init_info)

    def start_weight_update(self) -> None:
        self.client.start_weight_update()

    def update_weights(self, update_info: Any) -> None:
        content = _json_safe_update_payload(update_info)  # IPC handles are no JSON
        assert isinstance(content, Mapping)
        self.client.update_weights(content)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.client.finish_weight_update(weight_version)


def _end(why: str) -> None:
    log.critical("%s", why)
    os._exit(1)


@contextlib.contextmanager
def watched(progress: Callable[[], int], limit: float, end: Callable[[str], None] = _end) -> Iterator[None]:
    """End this process if the block goes on for `limit` seconds in which `progress` stays the same.

    A call of NCCL waits for ever for a process that is lost, and no exception reaches it.
    """
    ended = threading.Event()

    def watch() -> None:
        seen, idle, looked, pause = progress(), 0.0, time.monotonic(), min(1.0, limit / 4)
        while not ended.wait(pause):
            # A look counts for little more than its pause: if this process was stopped meanwhile, the servers may be well.
            idle, looked = idle + min(time.monotonic() - looked, 2 * pause), time.monotonic()
            if (now := progress()) != seen:
                seen, idle = now, 0.0
            elif idle > limit:
                end(f"a transfer of weights has taken no tensor for {limit:g} s (weight_broadcast.timeout and some more): a server is lost")
                return

    thread = threading.Thread(target=watch, name="transfer", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def init_info(kind: str, rank: int, world_size: int, host: str, largest: int = 0) -> TrainerInitInfo:
    """What vLLM's engine of this kind begins with. Rank 0 sends, and listens at a free port of this `host` for NCCL's other members.

    `largest`: bytes of the largest tensor. `ipc` refuses one that does not fit into its buffer of 1 GiB, as the embedding of an 8B model.
    """
    if kind == "ipc":
        info = IPCTrainerInitInfo(rank=rank, packed=True)
        info.packed_buffer_size_bytes = max(info.packed_buffer_size_bytes, largest)
        return info
    with socket.create_server((host, 0)) as free:
        port = free.getsockname()[1]
    return NCCLTrainerInitInfo(rank=rank, master_address=host, master_port=port, world_size=world_size, packed=True)


def vllm_sender(kind: str) -> MakeSender:
    """What makes the senders of `nccl` or `ipc`."""
    return functools.partial(VllmSender, kind)
