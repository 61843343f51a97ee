"""Weights that travel without files: cut and joined exactly, agreed on by messages, and nothing hangs when one end is lost."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
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
from rlx.parallel import transfer
from rlx.parallel.mesh import Mesh, join, one_process
from rlx.parallel.transfer import Announced, Group, parts, reach_store, serve_store
from rlx.paths import RunPaths
from rlx.types import WeightVersion
from rlx.waiting import wait_for
from rlx.weights.attest import checksum
from rlx.weights.export import Export
from rlx.weights.files import ModelFiles, verify
from rlx.weights.mailbox import Call, Gone
from rlx.weights.memory import Offers, Source
from rlx.weights.offer import new_secret, read_secret, write_offer
from rlx.weights.publish import Publisher
from rlx.weights.subscribe import Subscriber

pytestmark = pytest.mark.slow

TIMEOUT = 120.0
GROUPS: dict[str, Group | None] = {}  # of the servers, which keep them between two versions


class Server(threading.Thread):
    """The server's end, with one worker: asks once, and takes what the trainer sends. `tensors`: what arrived."""

    def __init__(
        self,
        paths: RunPaths,
        version: int,
        name: str = "a",
        together: int = 1,
        dies_after: int | None = None,
        hangs_after: int | None = None,
    ) -> None:
        """`dies_after`, `hangs_after`: the number of the part that it takes last. Hanging stops the whole process."""
        super().__init__(daemon=True)
        self.paths, self.version, self.server, self.together = paths, version, name, together
        self.dies_after, self.hangs_after = dies_after, hangs_after
        self.tensors: dict[str, torch.Tensor] = {}
        self.sums: dict | None = None
        self.error: Exception | None = None
        self.start()

    def run(self) -> None:
        group = GROUPS.pop(self.server, None)
        try:
            call = call_of(self.paths)
            call.ask(self.server, self.version, 1, self.together)
            while self.sums is None:
                order, arguments = call.next()
                if order == "init_weight_transfer_engine":
                    info = arguments["init_info"]
                    store = reach_store(info["where"], TIMEOUT)
                    group = Group(store, info["name"], info["rank_offset"], info["world_size"], TIMEOUT)
                if order == "update_weights":
                    assert group is not None
                    for count, part in enumerate(group.receive(Announced(**arguments["update_info"]))):
                        if count == self.dies_after:
                            group.abort()
                            return
                        if count == self.hangs_after:
                            os.kill(os.getpid(), signal.SIGSTOP)
                        self.tensors |= {name: tensor.clone() for name, tensor in part}
                self.sums = arguments.get("sums")
                call.done()
            GROUPS[self.server] = group
        except Exception as error:
            self.error = error

    def ended(self) -> Server:
        self.join(TIMEOUT)
        assert not self.is_alive()
        return self


@pytest.fixture
def offers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Offers]:
    monkeypatch.setattr("rlx.weights.memory.SOON", 3.0)  # threads of a busy machine call late
    monkeypatch.setattr("rlx.weights.memory.TOGETHER", TIMEOUT)
    paths = RunPaths(tmp_path / "run")
    paths.endpoints.mkdir(parents=True)
    made = Offers(PolicyModel(make_model()), one_process("cpu"), paths, torch.float32, TIMEOUT)
    yield made
    made.close()
    GROUPS.clear()


def where(paths: RunPaths) -> str:
    found = Subscriber(paths).latest()
    assert found is not None
    return found.where


def call_of(paths: RunPaths) -> Call:
    return Call(where(paths), TIMEOUT, read_secret(paths.offer_secret))


@pytest.mark.parametrize(("device", "piece"), [("cpu", 4096), ("gpu", 4096), ("cpu", 1 << 26)])
def test_tensors_of_all_sizes_and_dtypes_arrive_as_they_were(device: str, piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """`gpu`: through the buffers that a GPU's tensors are copied to. `piece`: of a message; some tensors are larger than 4096 bytes."""
    monkeypatch.setattr(transfer, "_in_host_memory", lambda _: device == "cpu")
    monkeypatch.setattr(transfer, "SMALL", 1000)
    monkeypatch.setattr(transfer, "PIECE", piece)
    torch.manual_seed(0)
    kinds = [(torch.float32, (3,)), (torch.bfloat16, (7, 5)), (torch.int64, ()), (torch.float32, (0,)), (torch.float32, (300, 11))]
    sent = [(f"{i}", (torch.randn(shape) * 9).to(dtype)) for i, (dtype, shape) in enumerate(kinds * 30)]
    sent.append(("turned", torch.randn(40, 50).T))
    announced = Announced.of((name, tensor.dtype, tensor.shape) for name, tensor in sent)
    assert len(parts(announced.sizes())) > 30
    store = serve_store(TIMEOUT)
    found: dict[str, torch.Tensor] = {}
    memory: list[set[int]] = []
    others: list[torch.Tensor] = []
    groups: list[Group] = []

    def receive() -> None:
        group = Group(reach_store(f"{store.host}:{store.port}", TIMEOUT), "x", 1, 2, TIMEOUT)
        groups.append(group)
        for _ in range(2):
            memory.append(set())
            others.extend(torch.empty(4096, dtype=torch.uint8) for _ in range(8))  # would get memory that the receiver has given back
            for part in group.receive(announced):
                memory[-1] |= {tensor.untyped_storage().data_ptr() for _, tensor in part}
                found.update({name: tensor.clone() for name, tensor in part})

    receiver = threading.Thread(target=receive)
    receiver.start()
    group = Group(store, "x", 0, 2, TIMEOUT)
    group.send(announced, [(name, tensor * 0) for name, tensor in sent])
    group.send(announced, sent)
    receiver.join(TIMEOUT)
    assert len(group._pinned) == (0 if device == "cpu" else transfer.AHEAD), "however much was sent"
    assert len(memory[0]) == (2 if piece == 4096 else transfer.AHEAD), "a receiver expects fewer large parts"
    assert memory[0] == memory[1], "the second transfer arrives in the memory of the first"
    assert list(found) == [name for name, _ in sent]
    assert all(torch.equal(found[name], tensor) and found[name].dtype == tensor.dtype for name, tensor in sent)

    places = {name: torch.zeros_like(tensor, memory_format=torch.contiguous_format) for name, tensor in sent[::2]}
    places["2"] = torch.zeros(1)  # not what is sent
    places["turned"] = torch.zeros(50, 40).T  # not contiguous
    rest: list[str] = []
    receiver = threading.Thread(target=lambda: rest.extend(name for part in groups[0].receive(announced, places) for name, _ in part))
    receiver.start()
    group.send(announced, sent)
    receiver.join(TIMEOUT)
    direct = [name for name, _ in sent[::2] if name not in ("2", "turned")]
    assert rest == [name for name, _ in sent if name not in direct]
    assert all(torch.equal(places[name], tensor) for name, tensor in sent if name in direct)
    with pytest.raises(ValueError, match=r"tensor 0 to send is \('0', 'float64', \[3\]\), but \('0', 'float32', \[3\]\) was announced"):
        group.send(announced, [("0", sent[0][1].double())])
    with pytest.raises(ValueError, match="was announced, but not sent"):
        group.send(Announced.of([("a", torch.float32, (2,)), ("b", torch.float32, (2,))]), [("a", torch.zeros(2))])


def test_servers_that_call_together_get_the_version_in_one_transfer_and_again_in_the_next(offers: Offers) -> None:
    weights = dict(offers.source.model.named_weights())
    for version in (1, 2):
        for tensor in weights.values():
            tensor.add_(1)
        offers.offer(version)
        servers = [Server(offers.paths, version, name, together=2) for name in "ab"]
        offers.send_soon()
        group = offers._sender
        for server in servers:
            server.ended()
            assert server.error is None
            assert server.tensors.keys() == weights.keys()
            assert all(torch.equal(server.tensors[name], tensor) for name, tensor in weights.items())
            assert {name: fact["sum"] for name, fact in server.sums.items()} == {n: checksum(t) for n, t in weights.items()}
        assert offers.seconds > 0
    assert offers._sender is group


def test_only_the_offered_version_can_be_had(offers: Offers) -> None:
    subscriber = Subscriber(offers.paths)
    assert subscriber.latest() is None
    offers.offer(4)
    assert subscriber.latest() == WeightVersion(version=4, kind="memory", where=where(offers.paths))
    assert subscriber.at(4) == subscriber.latest()
    assert subscriber.at(3) is None
    old = Server(offers.paths, 3)
    offers.send_soon()
    assert isinstance(old.ended().error, Gone)
    assert "the trainer has version 4, not version 3" in str(old.error)
    offers.close()
    assert subscriber.latest() is None


def test_servers_that_called_too_late_are_waited_for_after_the_next_step(offers: Offers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlx.weights.memory.SOON", TIMEOUT)
    offers._taken = False  # nobody has taken the version before
    offers.offer(3)
    late = Server(offers.paths, 3)
    wait_for(offers.called, "the call", TIMEOUT)
    offers.offer(4)
    assert "the trainer has version 4, not version 3" in str(late.ended().error)
    again: list[Server] = []
    timer = threading.Timer(0.3, lambda: again.append(Server(offers.paths, 4)))
    timer.start()
    offers.send_soon()
    timer.join()
    assert again[0].ended().error is None
    assert again[0].sums


def test_the_offer_of_an_earlier_attempt_is_ignored(offers: Offers, monkeypatch: pytest.MonkeyPatch) -> None:
    offers.offer(4)
    monkeypatch.setenv("RLX_RUN_TOKEN", "the next attempt")
    assert Subscriber(offers.paths).latest() is None


def test_a_server_that_is_lost_midway_does_not_keep_the_others_from_the_version(offers: Offers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "SMALL", 16)
    monkeypatch.setattr("rlx.weights.memory.TOGETHER", 3.0)
    offers.offer(1)
    lost, left = Server(offers.paths, 1, "a", together=2, dies_after=1), Server(offers.paths, 1, "b", together=2)
    offers.send_soon()
    lost.ended()
    left.ended()
    again = Server(offers.paths, 1, "b", together=2)
    while again.is_alive():
        offers.send()
    assert again.error is None
    assert all(torch.equal(again.tensors[name], tensor) for name, tensor in offers.source.model.named_weights())


def stopped_server(root: Path) -> None:
    Server(RunPaths(root), 1, "stopped", hangs_after=0).join()


def test_a_server_that_is_stopped_midway_holds_the_trainer_for_its_limit_and_the_next_call_gets_the_version(tmp_path: Path) -> None:
    """The head is larger than what the sockets of a connection hold, so it cannot leave."""
    paths, limit = RunPaths(tmp_path), 4.0
    paths.endpoints.mkdir(parents=True)
    model = PolicyModel(make_model(vocab_size=1_100_000, tie_word_embeddings=False))
    weights = dict(model.named_weights())
    assert weights["lm_head.weight"].nbytes >= 1 << 26
    offers = Offers(model, one_process("cpu"), paths, torch.float32, limit)
    offers.offer(1)
    stopped = mp.get_context("spawn").Process(target=stopped_server, args=(tmp_path,), daemon=True)
    stopped.start()
    try:
        wait_for(offers.called, "the call", TIMEOUT)
        began = time.monotonic()
        offers.send()
        assert psutil.Process(stopped.pid).status() == psutil.STATUS_STOPPED
        assert limit - 1 < time.monotonic() - began < 10 * limit
        assert offers._sender is None
        left = Server(paths, 1, "left")
        wait_for(offers.called, "the other call", TIMEOUT)
        offers.send()
        assert left.ended().error is None
        assert all(torch.equal(left.tensors[name], tensor) for name, tensor in weights.items())
    finally:
        stopped.kill()
        stopped.join()
        offers.close()
        GROUPS.clear()


def test_a_server_that_called_and_died_is_not_waited_for_long(offers: Offers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlx.weights.mailbox.READY", 0.5)
    offers.offer(1)
    call = call_of(offers.paths)
    monkeypatch.setattr(Call, "done", lambda self, error="": None)  # it never says that it is there

    def ask() -> None:
        with contextlib.suppress(Gone):
            call.ask("a", 1, 1, 1)

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    offers.send_soon()
    assert offers._sender is None
    asking.join(TIMEOUT)
    assert not asking.is_alive()


TRAINER = """
import sys, time
from rlx.parallel.transfer import Announced, serve_store
from rlx.weights.mailbox import Mailbox
mailbox = Mailbox(serve_store(60.0), Announced([], [], []), sys.argv[1].encode())
print(mailbox.where, flush=True)
time.sleep(60)
"""


def test_a_trainer_that_dies_is_noticed_at_once(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    trainer = subprocess.Popen([sys.executable, "-c", TRAINER, new_secret(paths).decode()], stdout=subprocess.PIPE, text=True)
    assert trainer.stdout is not None
    address = trainer.stdout.readline().strip()
    write_offer(paths, 1, address)
    waiting = Server(paths, 1)
    store = reach_store(address, TIMEOUT)
    while not store.queue_len("calls"):
        time.sleep(0.01)
    trainer.kill()
    trainer.wait()
    began = time.monotonic()
    assert isinstance(waiting.ended().error, Gone)
    with pytest.raises(Gone, match="does not answer"):
        call_of(paths)
    assert time.monotonic() - began < TIMEOUT / 2


EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}


FUSED: dict[str, tuple[type, dict[str, Any]]] = {
    "qwen3_moe": (Qwen3MoeConfig, EXPERTS | {"moe_intermediate_size": 16}),
    "olmoe": (OlmoeConfig, EXPERTS | {"head_dim": 4}),
    "mixtral": (MixtralConfig, {"num_local_experts": 4, "num_experts_per_tok": 2}),
}


@pytest.mark.parametrize("name", FUSED)
def test_fused_experts_are_sent_with_the_names_and_checksums_of_files(name: str, tmp_path: Path) -> None:
    config, keys = FUSED[name]
    paths, mesh, model = RunPaths(tmp_path), one_process("cpu"), PolicyModel(make_model(config, **keys))
    Publisher(model, mesh, paths, ModelFiles({}), torch.bfloat16).ensure(1)
    written = verify(paths.weights_of(1))["tensors"]
    source = Source(model, mesh, torch.bfloat16)
    sent = dict(source)
    assert len(sent) > len(dict(model.named_weights())), "a matrix of each expert"
    assert source.sums == written
    assert [(key, tensor.dtype, tuple(tensor.shape)) for key, tensor in sent.items()] == source.metadata()


def test_a_model_that_cannot_be_converted_layer_by_layer_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = PolicyModel(make_model(FUSED["qwen3_moe"][0], **FUSED["qwen3_moe"][1]))
    monkeypatch.setattr(Export, "by_layer", False)
    with pytest.raises(ValueError, match=r"Qwen3MoeForCausalLM needs tensors of several layers.*set weight_broadcast.type=filesystem"):
        Source(model, one_process("cpu"), torch.float32)


def rank(number: int, folder: str) -> None:
    """One of two ranks that shard a model over themselves and send it, the first time to a server that dies midway."""
    mesh = join(torch.device("cpu"), rank=number, world_size=2, timeout=60, store=dist.FileStore(f"{folder}/store", 2))
    model = load_policy(f"{folder}/model", mesh, dtype="bfloat16")
    offers = Offers(model, mesh, RunPaths(Path(folder)), torch.bfloat16, TIMEOUT)
    offers.offer(1)
    for dies_after in (0, None):
        server = Server(offers.paths, 1, f"server {dies_after}", dies_after=dies_after) if mesh.first else None
        while mesh.any(server is not None and server.is_alive()):
            offers.send()
    if server is not None:
        assert server.error is None
        expected = load_file(f"{folder}/model/model.safetensors")
        assert server.tensors.keys() == expected.keys()
        assert all(torch.equal(server.tensors[name], tensor.bfloat16()) for name, tensor in expected.items())
        Path(folder, "sent").touch()
    mesh.barrier()
    offers.close()
    mesh.close()


@pytest.mark.long
@pytest.mark.parametrize("experts", [False, True], ids=["dense", "experts"])
def test_ranks_that_shard_the_model_send_it_whole_also_after_a_server_died(tmp_path: Path, experts: bool) -> None:
    hf = make_model(FUSED["qwen3_moe"][0], **FUSED["qwen3_moe"][1]) if experts else make_model()
    hf.save_pretrained(tmp_path / "model")
    (tmp_path / "endpoints").mkdir()
    mp.spawn(rank, (str(tmp_path),), nprocs=2)
    assert (tmp_path / "sent").exists()


def test_a_transfer_begins_when_the_optimizers_step_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sender for GPUs reads the parameters on streams of its own, which do not wait for the trainer's."""
    waited: list[bool] = []
    monkeypatch.setattr(Mesh, "synchronize", lambda _: waited.append(True))
    source = Source(PolicyModel(make_model()), one_process("cpu"), torch.float32)
    assert not waited
    source.begin()
    assert waited
