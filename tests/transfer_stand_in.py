"""Stand-ins for what a transfer through vLLM's engines needs beside them: servers with vLLM's routes, and NCCL.

What the servers are told is read with vLLM's own records. A broadcast puts bytes into a queue of each worker.
"""

from __future__ import annotations

import json
import queue
import threading
from contextlib import nullcontext
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
import torch
from vllm.distributed.weight_transfer import nccl_engine, packed_tensor
from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferInitInfo, IPCWeightTransferUpdateInfo
from vllm.distributed.weight_transfer.nccl_common import NCCLWeightTransferInitInfo
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferUpdateInfo

TIMEOUT = 20.0
ABORTED = b""
MEETINGS: dict[int, dict[int, queue.Queue[bytes]]] = {}  # the members of each group, by the port where they meet and by rank
CHANGED = threading.Condition()


class Group:
    """The sender's communicator of a group."""

    def __init__(self, info: Any) -> None:
        with CHANGED:
            ready = CHANGED.wait_for(lambda: len(MEETINGS.get(info.master_port, {})) == info.world_size - 1, TIMEOUT)
        if not ready:
            raise RuntimeError("a member did not come")
        self.members = MEETINGS[info.master_port]
        assert sorted(self.members) == list(range(1, info.world_size))
        self.destroyed = False

    def broadcast(self, tensor: torch.Tensor, src: int, stream: Any = None) -> None:
        assert src == 0
        for member in self.members.values():
            member.put(bytes(tensor.reshape(-1).view(torch.uint8).tolist()))

    def destroy(self) -> None:
        self.destroyed = True
        for member in self.members.values():
            member.put(ABORTED)


def without_gpu(patch: pytest.MonkeyPatch) -> list[Group]:
    """Let vLLM's sender use stand-ins for NCCL and CUDA's streams. Returns the groups that it forms, in order."""
    formed: list[Group] = []

    def form(info: Any) -> Group:
        formed.append(Group(info))
        return formed[-1]

    class Stream:
        def synchronize(self) -> None: ...

    patch.setattr(nccl_engine, "open_trainer_endpoint", form)
    patch.setattr(packed_tensor, "_get_streams", lambda device, count: [Stream()] * count)
    patch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    patch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    return formed


class Server:
    """A vLLM server with the routes of a transfer, and `workers` workers. `told`: the routes that were called, in order."""

    def __init__(self, workers: int = 1, backend: str = "nccl", key: str = "secret") -> None:
        self.workers, self.backend, self.key = workers, backend, key
        self.told: list[str] = []
        self.inits: list[Any] = []
        self.tensors: dict[str, torch.Tensor] = {}  # of the last version that arrived whole
        self.handles: list[Any] = []
        self.fails_at = ""  # the route that is answered with 500
        self._inboxes: list[queue.Queue[bytes]] = []
        self._described: Any = None
        self._arrived: dict[str, torch.Tensor] | None = None  # None: no update is in progress
        owner = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.do_POST()

            def do_POST(self) -> None:
                content = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                status, answer = 200, {}
                if self.headers["Authorization"] != f"Bearer {owner.key}":
                    status, answer = 401, {"error": "Unauthorized"}
                else:
                    owner.told.append(self.path.removeprefix("/"))
                    try:
                        answer = owner.obey(self.path.removeprefix("/"), json.loads(content or b"null"))
                    except Exception as error:
                        status, answer = 500, {"error": {"message": f"{type(error).__name__}: {error}"}}
                body = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *arguments: Any) -> None: ...

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        threading.Thread(target=self._http.serve_forever, args=(0.01,), daemon=True).start()

    @property
    def record(self) -> dict[str, str]:
        """As the fleet writes it."""
        return {"url": f"http://127.0.0.1:{self._http.server_port}", "api_key": self.key}

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()

    def obey(self, path: str, body: Any) -> Any:
        if path == self.fails_at:
            raise RuntimeError(f"cannot {path}")
        if path == "get_world_size":
            return {"world_size": self.workers}
        return getattr(self, path)(**(body or {})) or {"message": "done"}

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        if self.backend == "ipc":
            self.inits.append(IPCWeightTransferInitInfo(**init_info))
            return
        info = NCCLWeightTransferInitInfo(**init_info)
        assert info.packed
        self.inits.append(info)
        self._inboxes, self._described = [queue.Queue() for _ in range(self.workers)], None
        with CHANGED:
            assert info.master_port is not None
            members = MEETINGS.setdefault(info.master_port, {})
            members |= {info.rank_offset + number: inbox for number, inbox in enumerate(self._inboxes)}
            CHANGED.notify_all()

    def shutdown_weight_transfer_engine(self) -> None:
        if self._arrived is not None:
            raise RuntimeError("Cannot release a trainer connection during a weight update")
        self._inboxes = []

    def start_weight_update(self) -> None:
        assert self._arrived is None
        self._arrived = {}

    def update_weights(self, update_info: dict[str, Any]) -> None:
        assert self._arrived is not None
        if self.backend == "ipc":
            self.handles.append(IPCWeightTransferUpdateInfo(**update_info).ipc_handles)
            self._arrived |= dict.fromkeys(update_info["names"], torch.empty(0))
            return
        update = NCCLWeightTransferUpdateInfo(**update_info)
        self._described = update if update.names else self._described
        for inbox in self._inboxes:
            self._arrived = self._received(inbox)

    def _received(self, inbox: queue.Queue[bytes]) -> dict[str, torch.Tensor]:
        described = [(name, getattr(torch, dtype), torch.Size(shape)) for name, dtype, shape in zip(
            self._described.names, self._described.dtype_names, self._described.shapes, strict=True)]  # fmt: skip
        sizes = [dtype.itemsize * shape.numel() for _, dtype, shape in described]
        content = bytearray()
        while len(content) < sum(sizes):
            if (more := inbox.get(timeout=TIMEOUT)) == ABORTED:
                self._arrived = None
                raise RuntimeError("NCCL error: unhandled system error")
            content += more
        pieces = torch.frombuffer(content, dtype=torch.uint8).split(sizes)
        return {name: piece.clone().view(dtype).view(shape) for (name, dtype, shape), piece in zip(described, pieces, strict=True)}

    def finish_weight_update(self) -> None:
        assert self._arrived is not None
        self.tensors, self._arrived = self._arrived, None
