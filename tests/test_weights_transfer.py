"""A version goes from the trainer's memory to servers through vLLM's own trainer engines, up to NCCL and CUDA, which are stand-ins."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from safetensors.torch import load_file
from trainer_examples import make_model
from transformers.models.mixtral import MixtralConfig
from transformers.models.olmoe import OlmoeConfig
from transformers.models.qwen3_moe import Qwen3MoeConfig

from rlx.models.load import load_policy
from rlx.models.policy import PolicyModel
from rlx.parallel.mesh import Mesh, join, one_process
from rlx.paths import RunPaths, write_text
from rlx.polling import Preempted
from rlx.weights import subscribe
from rlx.weights.export import Export
from rlx.weights.subscribe import Subscriber, request_transfer

pytestmark = pytest.mark.slow  # importing vLLM takes seconds

ROUND = ["start_weight_update", "update_weights", "finish_weight_update"]
JOINED = ["get_world_size", "init_weight_transfer_engine", *ROUND]
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
FUSED: dict[str, tuple[type, dict[str, Any]]] = {
    "qwen3_moe": (Qwen3MoeConfig, EXPERTS | {"moe_intermediate_size": 16}),
    "olmoe": (OlmoeConfig, EXPERTS | {"head_dim": 4}),
    "mixtral": (MixtralConfig, {"num_local_experts": 4, "num_experts_per_tok": 2}),
}


class Trainer:
    """A trainer of one process with a transfer, and the file by which the fleet asks for a version."""

    def __init__(self, folder: Path, kind: str, model: Any, mesh: Mesh, dtype: torch.dtype, timeout: float = 20.0) -> None:
        from rlx.weights.transfer import Transfer

        self.paths, self.weights = RunPaths(folder), dict(model.named_weights())
        self.paths.endpoints.mkdir(parents=True, exist_ok=True)
        cfg: Any = SimpleNamespace(
            weight_broadcast=SimpleNamespace(type=kind, timeout=timeout),
            hardware=SimpleNamespace(nodes=1),
            inference=SimpleNamespace(base_url=[]),
        )
        self.transfer = Transfer.of(cfg, model, mesh, self.paths, Export(model, dtype))

    def train(self) -> None:
        """Take a step."""
        for tensor in self.weights.values():
            tensor.data.add_(1)

    def ask(self, version: int, *servers: Any) -> None:
        content = {"version": version, "id": uuid.uuid4().hex, "servers": [server.record for server in servers]}
        (self.paths.endpoints / "weights_wanted.json").write_text(json.dumps(content))

    def sent(self, version: int, *asked: tuple[Any, ...]) -> list[str]:
        """Offer a version until servers have it that ask for it, one tuple of them after another. The replies to the fleet."""
        left, replies = list(asked), list[str]()
        reply = self.paths.endpoints / "weights_sent.json"
        reply.unlink(missing_ok=True)

        def heard() -> None:
            if reply.exists():
                replies.append(json.loads(reply.read_text())["failed"])
                reply.unlink()

        def tick() -> None:
            assert self.paths.offer.exists()
            heard()
            if len(replies) + len(left) == len(asked):
                self.ask(version, *left.pop(0))

        self.transfer.offer(version, tick)
        heard()
        assert not self.paths.offer.exists()
        return replies


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    from transfer_stand_in import without_gpu

    return without_gpu(monkeypatch)


@pytest.fixture
def server() -> Iterator[Callable[..., Any]]:
    from transfer_stand_in import Server

    made: list[Server] = []

    def make(*arguments: Any) -> Server:
        made.append(Server(*arguments))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture
def trainer(tmp_path: Path) -> Iterator[Trainer]:
    made = Trainer(tmp_path, "nccl", PolicyModel(make_model()), one_process("cpu"), torch.float32)
    yield made
    made.transfer.close()


def has(server: Any, trainer: Trainer) -> bool:
    return server.tensors.keys() == trainer.weights.keys() and all(torch.equal(server.tensors[n], t) for n, t in trainer.weights.items())


def test_all_servers_get_each_version_in_one_group(trainer: Trainer, groups: list[Any], server: Callable[..., Any]) -> None:
    first, second = server(2), server(1, "nccl", "another key")
    for version in (1, 2, 3):
        trainer.train()
        assert trainer.sent(version, (first, second)) == [""]
        assert has(first, trainer)
        assert has(second, trainer)
        assert trainer.transfer.seconds > 0
    assert len(groups) == 1
    assert first.told == second.told == [*JOINED, *ROUND, *ROUND], "no pause, no label: these are the fleet's"
    (one,), (other,) = first.inits, second.inits
    assert (one.rank_offset, other.rank_offset) == (1, 3)
    assert one.world_size == other.world_size == 4
    assert one.master_address == "127.0.0.1", "no other host can connect"


def test_a_late_server_means_a_new_group(trainer: Trainer, groups: list[Any], server: Callable[..., Any]) -> None:
    first, late = server(), server()
    for version, servers in ((1, (first,)), (2, (first, late))):
        trainer.train()
        assert trainer.sent(version, servers) == [""]
        assert all(has(each, trainer) for each in servers)
    assert groups[0].destroyed
    assert len(groups) == 2
    assert first.told == [*JOINED, "shutdown_weight_transfer_engine", *JOINED]
    assert late.told == JOINED


@pytest.mark.parametrize("route", ["init_weight_transfer_engine", *ROUND])
def test_a_server_that_fails_fails_the_transfer_for_all_and_the_offer_stands_until_servers_have_the_version(
    route: str, trainer: Trainer, groups: list[Any], server: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transfer_stand_in.TIMEOUT", 1.0)
    good, bad = server(), server()
    bad.fails_at = route
    restarted = server(), server()
    trainer.train()
    failed, reply = trainer.sent(1, (good, bad), restarted)
    assert f"the transfer failed: {bad.record['url']} /{route}: HTTP Error 500" in failed
    assert f"cannot {route}" in failed
    assert reply == ""
    assert all(group.destroyed for group in groups[:-1])
    assert all(has(each, trainer) for each in restarted)


def test_a_server_that_does_not_answer_or_refuses_the_key_is_named(trainer: Trainer, groups: list[Any], server: Callable[..., Any]) -> None:
    good, gone, another = server(), server(), server(1, "nccl", "key")
    gone.close()
    unauthorized = SimpleNamespace(record=another.record | {"api_key": "wrong"})
    trainer.train()
    failed, reply = trainer.sent(1, (good, gone, unauthorized), (good,))
    assert f"{gone.record['url']} /get_world_size: <urlopen error [Errno 111] Connection refused>" in failed
    assert f"{another.record['url']} /get_world_size: HTTP Error 401" in failed
    assert reply == ""
    assert has(good, trainer)


def test_only_the_offered_version_can_be_had_and_a_preemption_ends_the_offer(
    trainer: Trainer, groups: list[Any], server: Callable[..., Any]
) -> None:
    subscriber, seen = Subscriber(trainer.paths), list[Any]()
    assert subscriber.latest() is None
    trainer.ask(0, server())

    def tick() -> None:
        seen.append(subscriber.latest())
        if len(seen) == 3:
            raise Preempted

    with pytest.raises(Preempted):
        trainer.transfer.offer(1, tick)
    assert {(found.version, found.kind) for found in seen} == {(1, "memory")}
    assert subscriber.latest() is None


async def test_the_fleet_asks_and_gets_a_reply(trainer: Trainer, groups: list[Any], server: Callable[..., Any]) -> None:
    good = server()

    trainer.train()
    sending = asyncio.create_task(asyncio.to_thread(trainer.transfer.offer, 1, lambda: None))
    while not trainer.paths.offer.exists():
        await asyncio.sleep(0.01)
    reply = await request_transfer(str(trainer.paths.endpoints), 1, [(good.record["url"], good.key)], 20.0)
    await sending
    assert reply == ""
    assert has(good, trainer)


async def test_a_reply_that_comes_just_before_the_offer_ends_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fleet that took the end of the offer for a refusal would wait for a version that the trainer believes to be served."""
    paths, look = RunPaths(tmp_path), subscribe.arrived
    offered, wanted, sent = (paths.endpoints / f"weights{end}.json" for end in ("", "_wanted", "_sent"))
    write_text(offered, json.dumps({"version": 1, "token": ""}))

    def arrived(path: Path) -> bytes | None:
        found = look(path)
        if path == sent and found is None:  # the trainer ends its offer right after this look
            write_text(sent, json.dumps({"version": 1, "id": json.loads(wanted.read_text())["id"], "failed": ""}))
            offered.unlink()
        return found

    monkeypatch.setattr(subscribe, "arrived", arrived)
    assert await request_transfer(str(paths.endpoints), 1, [("http://server", "key")], 5.0) == ""


def test_a_transfer_that_outlives_its_request_is_none_for_the_next(
    trainer: Trainer, groups: list[Any], server: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fleet has given up and asked again, maybe for other servers: what arrived belongs to no request."""
    good, begin, replies = server(), trainer.transfer.weights.begin, list[str]()

    def begin_late() -> None:
        monkeypatch.setattr(trainer.transfer.weights, "begin", begin_again)
        trainer.ask(1, good)
        begin()

    def begin_again() -> None:
        replies.append(json.loads((trainer.paths.endpoints / "weights_sent.json").read_text())["failed"])
        begin()

    monkeypatch.setattr(trainer.transfer.weights, "begin", begin_late)
    trainer.train()
    trainer.ask(1, good)
    trainer.transfer.offer(1, lambda: None)
    (late,) = replies
    assert "longer than the fleet waits (weight_broadcast.timeout)" in late
    assert has(good, trainer)


def test_files_of_an_earlier_attempt_are_deleted(tmp_path: Path) -> None:
    (tmp_path / "endpoints").mkdir()
    for name in ("weights.json", "weights_wanted.json", "weights_sent.json"):
        (tmp_path / "endpoints" / name).write_text("{}")
    Trainer(tmp_path, "nccl", PolicyModel(make_model()), one_process("cpu"), torch.float32)
    assert list((tmp_path / "endpoints").iterdir()) == []


def test_handles_of_gpu_memory_go_to_every_server_as_vllm_reads_them(
    tmp_path: Path, server: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With CUDA IPC, a server that fails does not keep the others from the version."""
    from vllm.distributed.weight_transfer import ipc_engine

    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="GPU-1"))
    monkeypatch.setattr(torch.cuda, "ipc_collect", lambda: None)
    buffers: list[int] = []

    def chunks(iterator: Any, gpu_uuid: str, post_iter_func: Any, buffer_size_bytes: int) -> Iterator[Any]:
        buffers.append(buffer_size_bytes)
        for name, tensor in iterator:
            names, sizes = [name], [tensor.nbytes]
            handle = {gpu_uuid: (tensor.dtype, tuple(tensor.shape))}
            yield SimpleNamespace(names=names, shapes=[[*tensor.shape]], dtype_names=["float32"], tensor_sizes=sizes, ipc_handle=handle)

    monkeypatch.setattr(ipc_engine, "packed_ipc_producer", chunks)
    trainer = Trainer(tmp_path, "ipc", PolicyModel(make_model()), one_process("cpu"), torch.float32)
    good, bad = server(1, "ipc"), server(1, "ipc")
    trainer.train()
    assert trainer.sent(1, (good, bad)) == [""]
    assert good.inits[0].packed
    assert good.handles == [{"GPU-1": (tensor.dtype, tuple(tensor.shape))} for tensor in trainer.weights.values()]
    bad.fails_at = "update_weights"
    trainer.train()
    good.tensors = {}
    failed, reply = trainer.sent(2, (good, bad), (good,))
    assert bad.record["url"] in failed
    assert reply == ""
    assert good.tensors.keys() == trainer.weights.keys()
    assert set(buffers) == {2**30}


@pytest.mark.parametrize("name", FUSED)
def test_fused_experts_are_sent_as_files_have_them(name: str, tmp_path: Path, groups: list[Any], server: Callable[..., Any]) -> None:
    config, keys = FUSED[name]
    hf = make_model(config, **keys)
    hf.bfloat16().save_pretrained(tmp_path / "model")
    trainer = Trainer(tmp_path, "nccl", PolicyModel(hf), one_process("cpu"), torch.bfloat16)
    good = server()
    assert trainer.sent(1, (good,)) == [""]
    assert len(good.tensors) > len(trainer.weights), "a matrix of each expert"
    written = load_file(tmp_path / "model" / "model.safetensors")
    assert good.tensors.keys() == written.keys()
    assert all(torch.equal(good.tensors[name], tensor) for name, tensor in written.items())
    trainer.transfer.close()


def test_a_model_that_cannot_be_converted_layer_by_layer_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = PolicyModel(make_model(FUSED["qwen3_moe"][0], **FUSED["qwen3_moe"][1]))
    monkeypatch.setattr("rlx.weights.export.by_layer", lambda names: [[name] for name in names])
    monkeypatch.setattr(Export, "shapes", {"joined": (1,)})
    with pytest.raises(ValueError, match="Qwen3MoeForCausalLM needs tensors of several layers"):
        Export(model, torch.float32).units()


def test_weights_that_lie_in_host_memory_are_on_the_trainers_device_when_they_are_sent() -> None:
    from rlx.weights.transfer import Weights

    model = PolicyModel(make_model())
    weights = Weights(model, Mesh(device=torch.device("meta")), Export(model, torch.float32))
    weights.begin()
    assert {tensor.device.type for _, tensor in weights.left} == {"meta"}


def test_a_pass_begins_when_the_optimizers_step_is_done(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[bool] = []
    monkeypatch.setattr(Mesh, "synchronize", lambda _: waited.append(True))
    trainer.transfer.weights.begin()
    assert waited == [True]


def test_the_stream_that_reads_a_layer_waits_for_it_and_holds_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's sender goes on on another stream when a buffer is full: between tensors of one layer."""
    from rlx.weights.transfer import Weights

    class Stream:
        def __init__(self, name: str) -> None:
            self.name, self.waited = name, list[str]()

        def record_event(self) -> str:
            return f"after what {self.name} has to do"

        def wait_event(self, event: str) -> None:
            self.waited.append(event)

    class Tensor:
        def __init__(self) -> None:
            self.readers: list[Stream] = []

        def record_stream(self, stream: Stream) -> None:
            self.readers.append(stream)

    first, second = Stream("first"), Stream("second")
    current = first
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: current)
    monkeypatch.setattr(Weights, "_whole", lambda self, name, tensor: Tensor())
    export: Any = SimpleNamespace(by_layer=True, units=lambda: [["a", "b"], ["c"]], convert=lambda tensors: tensors)
    model: Any = SimpleNamespace(named_weights=lambda: dict.fromkeys("abc").items())
    mesh: Any = SimpleNamespace(device=SimpleNamespace(type="cuda"), synchronize=lambda: None)
    weights = Weights(model, mesh, export)
    weights.begin()
    found: dict[str, Any] = dict([next(weights.left)])
    current = second
    found |= weights.left
    assert {name: tensor.readers for name, tensor in found.items()} == {"a": [first], "b": [second], "c": [second]}
    assert second.waited == ["after what first has to do", "after what second has to do"]


def rank(number: int, folders: list[str]) -> None:
    """One of two ranks that shard each model over themselves and send it, also to a server that fails before or after the broadcast."""
    from transfer_stand_in import Server, without_gpu

    mesh = join(torch.device("cpu"), rank=number, world_size=2, timeout=60, store=dist.FileStore(f"{folders[0]}/store", 2))
    with pytest.MonkeyPatch.context() as patch:
        without_gpu(patch)
        for folder in folders:
            trainer = Trainer(Path(folder), "nccl", load_policy(f"{folder}/model", mesh, dtype="bfloat16"), mesh, torch.bfloat16)
            servers = [(Server(),) for _ in range(3)] if mesh.first else []
            for (server,), fails_at in zip(servers, ("start_weight_update", "finish_weight_update", ""), strict=False):
                server.fails_at = fails_at
            if not mesh.first:
                trainer.transfer.offer(1, lambda: None)
            else:
                assert [bool(reply) for reply in trainer.sent(1, *servers)] == [True, True, False]
                expected = load_file(f"{folder}/model/model.safetensors")
                assert server.tensors.keys() == expected.keys()
                assert all(torch.equal(server.tensors[name], tensor.bfloat16()) for name, tensor in expected.items())
                Path(folder, "sent").touch()
            mesh.barrier()
            trainer.transfer.close()
    mesh.close()


@pytest.mark.long
def test_ranks_that_shard_the_model_send_it_whole_also_after_a_transfer_failed(tmp_path: Path) -> None:
    """Other ranks gather what the first has not when it fails, so no rank waits for another."""
    folders = [tmp_path / "dense", tmp_path / "experts"]
    make_model().save_pretrained(folders[0] / "model")
    make_model(FUSED["qwen3_moe"][0], **FUSED["qwen3_moe"][1]).save_pretrained(folders[1] / "model")
    mp.spawn(rank, ([str(folder) for folder in folders],), nprocs=2)
    assert all((folder / "sent").exists() for folder in folders)
