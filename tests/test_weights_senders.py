"""What the trainer gives to vLLM's own transfer engines, as far as that can be seen without a GPU."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

import pytest
import torch
from trainer_examples import make_model

from rlx.models.policy import PolicyModel
from rlx.parallel.mesh import Mesh
from rlx.parallel.transfer import LOOPBACK, serve_store
from rlx.waiting import wait_for
from rlx.weights.mailbox import Caller, Client, Mailbox
from rlx.weights.memory import Source

pytestmark = pytest.mark.slow  # importing vLLM takes seconds


def test_vllms_nccl_engine_gets_a_group_with_a_place_for_every_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.distributed.weight_transfer import nccl_engine
    from vllm.distributed.weight_transfer.nccl_common import NCCLWeightTransferInitInfo

    from rlx.inference.server.senders import vllm_sender

    opened: list[Any] = []
    monkeypatch.setattr(nccl_engine, "open_trainer_endpoint", opened.append)
    told: list[dict[str, Any]] = []
    monkeypatch.setattr(Client, "tell_each", lambda client, order, arguments: told.extend(arguments))
    monkeypatch.setattr(Client, "wait", lambda client: None)
    source = Source(PolicyModel(make_model()), Mesh(device=torch.device("cpu")), torch.float32)
    members = [Caller(call=name, server=name, version=1, workers=2, together=2) for name in "ab"]
    vllm_sender("nccl")(Client(Mailbox(serve_store(10.0), source.announced(), b"secret"), members, 10.0), source)
    infos = [NCCLWeightTransferInitInfo(**arguments["init_info"]) for arguments in told]
    assert [info.rank_offset for info in infos] == [1, 3]
    assert {info.master_address for info in infos} == {LOOPBACK}, "no other host can connect"
    assert {info.world_size for info in infos} == {5} == {opened[0].world_size}
    assert {info.master_port for info in infos} == {opened[0].master_port}


def test_ranks_that_do_not_send_only_gather() -> None:
    from rlx.inference.server.senders import vllm_sender

    source = Source(PolicyModel(make_model()), Mesh(device=torch.device("cpu"), rank=1), torch.float32)
    sender = vllm_sender("nccl")(Client(None, [], 10.0), source)  # type: ignore[arg-type]
    sender.send_weights()
    assert source.sums == {}
    assert next(source._rest, None) is None, "all was gathered"


def test_ipc_begins_with_what_vllm_takes() -> None:
    from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo, IPCWeightTransferInitInfo

    from rlx.inference.server.senders import init_info

    info = init_info("ipc", 0, 2, LOOPBACK)
    assert isinstance(info, IPCTrainerInitInfo)
    assert info.is_sender
    assert asdict(IPCWeightTransferInitInfo(packed=info.packed)) == {"packed": True}
    assert info.packed_buffer_size_bytes == 2**30
    large = init_info("ipc", 0, 2, LOOPBACK, largest=151_936 * 4096 * 2)
    assert isinstance(large, IPCTrainerInitInfo)
    assert large.packed_buffer_size_bytes == 151_936 * 4096 * 2


def test_a_transfer_that_takes_no_tensor_for_too_long_ends_the_trainer_and_a_slow_one_does_not() -> None:
    from rlx.inference.server.senders import watched

    taken, ends = 0, []
    with watched(lambda: taken, 1.5, ends.append):
        for _ in range(20):
            time.sleep(0.1)
            taken += 1
    assert not ends
    with watched(lambda: taken, 0.2, ends.append):
        wait_for(lambda: ends, "the end", 60)
    assert len(ends) == 1
    assert "taken no tensor for 0.2 s (weight_broadcast.timeout" in ends[0]


def test_weights_that_lie_in_host_memory_are_on_the_trainers_device_when_they_are_sent() -> None:
    from rlx.inference.server.senders import _Weights

    source = Source(PolicyModel(make_model()), Mesh(device=torch.device("meta")), torch.float32)
    sent = list(_Weights(source))
    assert [name for name, _ in sent] == [name for name, _, _ in source.metadata()]
    assert {tensor.device.type for _, tensor in sent} == {"meta"}
