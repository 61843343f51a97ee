"""The trainer's end of vLLM's own weight transfer: NCCL between GPUs, CUDA IPC between processes on one GPU.

The trainer imports this for `weight_broadcast.type` nccl and ipc only. Everything on the device is vLLM's. Here its engine gets our tensors
(`Source`) and our messages (`Client`), which carry its orders to all servers of a transfer.
"""

from __future__ import annotations

import functools
import socket
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import ParamMeta, TrainerInitInfo, WeightSource
from vllm.distributed.weight_transfer.clients import _json_safe_update_payload
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo
from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

from rlx.weights.mailbox import Client
from rlx.weights.memory import MakeSender, Source


class _Weights(WeightSource):
    """Our source as vLLM's."""

    def __init__(self, source: Source) -> None:
        self.source = source

    def metadata(self) -> list[ParamMeta]:
        return [ParamMeta(name, dtype, shape) for name, dtype, shape in self.source.metadata()]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self.source)


class VllmSender:
    """A sender around vLLM's trainer-side engine. It is vLLM's client as well, and passes orders on to the client of the transfer."""

    def __init__(self, kind: str, client: Client, source: Source) -> None:
        """Form a group with the client's members. Every rank calls this."""
        self.client = client
        host = client.mailbox.store.host if source.mesh.first else ""  # others do not send
        info = init_info(kind, source.mesh.rank, 1 + sum(member.workers for member in client.members), host)
        self._engine = WeightTransferTrainerFactory.trainer_init(info, client=self, source=_Weights(source))

    def send_weights(self) -> None:
        self._engine.send_weights()

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


def init_info(kind: str, rank: int, world_size: int, host: str) -> TrainerInitInfo:
    """What vLLM's engine of this kind begins with. Rank 0 sends, and listens at a free port of this `host` for NCCL's other members."""
    if kind == "ipc":
        return IPCTrainerInitInfo(rank=rank, packed=True)
    with socket.create_server((host, 0)) as free:
        port = free.getsockname()[1]
    return NCCLTrainerInitInfo(rank=rank, master_address=host, master_port=port, world_size=world_size, packed=True)


def vllm_sender(kind: str) -> MakeSender:
    """What makes the senders of `nccl` or `ipc`."""
    return functools.partial(VllmSender, kind)
