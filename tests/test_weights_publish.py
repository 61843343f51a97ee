"""How a version appears."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from trainer_examples import make_model
from transformers.models.deepseek_v3 import DeepseekV3Config
from xxhash import xxh3_64_hexdigest

from rlx.models.policy import PolicyModel
from rlx.parallel.mesh import one_process
from rlx.paths import RunPaths, write_text
from rlx.types import WeightVersion
from rlx.weights import files
from rlx.weights.files import ModelFiles, versions
from rlx.weights.publish import Publisher, PublishFailed
from rlx.weights.subscribe import Subscriber, request_transfer


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    return RunPaths(tmp_path / "run")


def publisher_of(paths: RunPaths) -> Publisher:
    return Publisher(PolicyModel(make_model()), one_process("cpu"), paths, ModelFiles({}), torch.float32)


def test_a_version_is_that_of_its_step_and_appears_only_when_it_is_announced(paths: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    publisher, subscriber = publisher_of(paths), Subscriber(paths)
    publisher.gather(1)
    publisher.wait()
    assert subscriber.latest() is None, "written, but not announced"
    publisher.gather(1)
    publisher.announce(1)
    publisher.wait()
    assert subscriber.latest() == WeightVersion(version=1, kind="files", where=str(paths.weights_of(1)))
    goes_on, write = threading.Event(), files.write
    monkeypatch.setattr(files, "write", lambda *arguments: write(*arguments) if goes_on.wait(20) else None)
    trained = {name: tensor.clone() for name, tensor in publisher.model.named_weights()}
    publisher.gather(2)
    publisher.announce(2)
    with torch.no_grad():  # as the next step changes the weights while they are written
        for parameter in publisher.model.parameters():
            parameter.zero_()
    assert (found := subscriber.latest()) is not None
    assert found.version == 1, "announced, but not written"
    goes_on.set()
    publisher.close()
    written = load_file(paths.weights_of(2) / "model.safetensors")
    assert written.keys() == trained.keys()
    assert all(torch.equal(written[name], trained[name]) for name in written)
    assert publisher.seconds > 0


@pytest.mark.parametrize(
    ("what", "error"),
    [
        ("rlx.weights.files._digest", OSError(28, "No space left on device")),
        ("safetensors.torch.save_file", SafetensorError("I/O error: No space left on device (os error 28)")),
    ],
)
def test_a_writer_that_fails_is_heard_at_once_and_leaves_nothing(
    what: str, error: Exception, paths: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher = publisher_of(paths)

    def full(*_: Any, **__: Any) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(what, full)
        publisher.gather(1)
        publisher.announce(1)
        said = rf"version 1 of the weights could not be written to {paths.weights}: \w+: .*No space left on device.*\n  fix: .*=latest"
        for late in (publisher.wait, publisher.check, lambda: publisher.gather(2)):
            with pytest.raises(PublishFailed, match=said):
                late()
    assert list(paths.weights.iterdir()) == []
    again = publisher_of(paths)
    again.publish(1)
    assert files.versions(paths.weights) == [1]


def test_an_announced_version_appears_before_an_end_by_an_error_but_not_at_any_price(
    paths: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher, slow = publisher_of(paths), threading.Event()
    plain = files.complete
    monkeypatch.setattr("rlx.weights.files.complete", lambda *a, **k: (slow.wait(30), plain(*a, **k))[1])
    publisher.gather(1)
    publisher.announce(1)
    publisher.wait_briefly(0.05)
    assert not files.is_persistent(paths, 1)
    slow.set()
    publisher.wait_briefly(30.0)
    assert files.is_persistent(paths, 1)


def test_a_version_that_is_missing_is_made_from_the_weights_as_they_are(paths: RunPaths) -> None:
    publisher = publisher_of(paths)
    publisher.ensure(3)
    before = files.verify(paths.weights_of(3))
    publisher.model.head[0].weight.data.zero_()
    publisher.ensure(3)
    assert files.verify(paths.weights_of(3)) == before, "an existing version must not be written again"


def test_a_buffer_keeps_its_dtype_because_the_trainer_computes_with_all_its_digits(paths: RunPaths) -> None:
    """A router's bias is 3 in float32, plus what load balancing adds; rounded, it would send tokens to other experts."""
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 16}
    heads = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8, "num_key_value_heads": 4}
    model = PolicyModel(make_model(DeepseekV3Config, first_k_dense_replace=0, **experts, **heads))
    name = "model.layers.0.mlp.gate.e_score_correction_bias"
    bias = model.hf.get_buffer(name)
    bias.copy_(3 + torch.arange(4) / 1000)
    publisher = Publisher(model, one_process("cpu"), paths, ModelFiles({}), torch.bfloat16)
    publisher.ensure(1)
    found = load_file(paths.weights_of(1) / "model.safetensors")
    assert torch.equal(found[name], bias)
    assert found["model.layers.0.mlp.gate.weight"].dtype == torch.bfloat16


def test_the_manifest_has_the_digest_of_what_the_trainer_has_and_not_of_what_the_disk_took(
    paths: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher = publisher_of(paths)
    publisher.ensure(1)
    file = paths.weights_of(1) / "model.safetensors"
    assert files.verify(paths.weights_of(1))["files"]["model.safetensors"]["xxh3"] == xxh3_64_hexdigest(file.read_bytes())

    def damaged(tensors: dict[str, torch.Tensor], path: Path, **keys: Any) -> None:
        save_file({name: tensor + (name == "model.norm.weight") for name, tensor in tensors.items()}, path, **keys)

    monkeypatch.setattr("safetensors.torch.save_file", damaged)
    publisher.ensure(2)
    with pytest.raises(files.WeightsError, match=r"model\.safetensors: expected checksum"):
        files.verify(paths.weights_of(2))


def test_version_0_of_adapters_is_published_at_the_start_and_again_by_a_later_attempt(paths: RunPaths) -> None:
    publisher = publisher_of(paths)
    publisher.publish(0)
    before = files.verify(paths.weights_of(0))
    publisher.model.head[0].weight.data.zero_()
    publisher.publish(0)
    assert files.verify(paths.weights_of(0)) != before


URL = "http://127.0.0.1:1"


@pytest.fixture
def run_paths(tmp_path: Path) -> RunPaths:
    found = RunPaths(tmp_path / "run")
    for folder in (found.endpoints, found.weights):
        folder.mkdir(parents=True)
    return found


def offer(run_paths: RunPaths, version: int) -> None:
    write_text(run_paths.offer, json.dumps({"version": version, "token": ""}))


class Sends:
    """A transfer whose servers take everything at once."""

    def __init__(self) -> None:
        self.seconds, self.sent = 0.0, list[int]()

    def offer(self, version: int, tick: Callable[[], None]) -> None:
        self.sent.append(version)

    def close(self) -> None: ...


@pytest.mark.parametrize("memory", [False, True], ids=["files", "memory"])
def test_only_a_transfer_sends_what_is_offered_and_leaves_a_version_on_the_disk_at_the_end(run_paths: RunPaths, memory: bool) -> None:
    publisher, phases = Publisher(PolicyModel(make_model()), one_process("cpu"), run_paths, ModelFiles({}), torch.float32), list[str]()
    transfer: Any = Sends()
    publisher.transfer = transfer if memory else None

    def working(phase: str, step: int | None = None) -> nullcontext[None]:
        phases.append(f"{phase}, step {step}")
        return nullcontext()

    publisher.working = working
    publisher.offer(3, lambda: None)
    publisher.leave_on_disk(3)
    assert transfer.sent == ([3] if memory else [])
    assert versions(run_paths.weights) == ([3] if memory else [])
    assert phases == (["sending version 3, step 3", "writing version 3, step None"] if memory else [])
    assert publisher.times.keys() == {"time/write_weights", "time/send_weights"}
    publisher.close()


def test_the_orchestrator_asks_for_what_is_offered_and_hears_why_servers_do_not_have_it(run_paths: RunPaths) -> None:
    subscriber, wanted = Subscriber(run_paths), run_paths.endpoints / "weights_wanted.json"
    assert subscriber.latest() is None
    offer(run_paths, 3)
    found = WeightVersion(version=3, kind="memory", where=str(run_paths.endpoints))
    assert subscriber.latest() == subscriber.at(3) == found
    assert subscriber.at(2) is None

    async def ask(version: int, timeout: float, meanwhile: Callable[[], None] = lambda: None) -> str:
        asked = asyncio.create_task(request_transfer(found.where, version, [(URL, "the key")], timeout))
        await asyncio.sleep(0.05)
        meanwhile()
        return await asked

    def send() -> None:
        asked = json.loads(wanted.read_text())
        number = asked.pop("id")
        assert asked == {"version": 3, "servers": [{"url": URL, "api_key": "the key"}]}
        assert wanted.stat().st_mode & 0o777 == 0o600, "it has the servers' key"
        write_text(run_paths.endpoints / "weights_sent.json", json.dumps({"version": 3, "id": number, "failed": ""}))

    assert asyncio.run(ask(3, 20, send)) == ""
    assert asyncio.run(ask(3, 0.1)) == "the trainer did not send version 3 within 0.1 s (weight_broadcast.timeout)", "an old reply"
    assert not wanted.exists()
    assert asyncio.run(ask(3, 20, lambda: offer(run_paths, 4))).startswith("the trainer has version 4 instead of 3")
    assert asyncio.run(ask(4, 20, run_paths.offer.unlink)).startswith("the trainer has version None instead of 4")


def test_an_offer_of_an_earlier_attempt_is_ignored(run_paths: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    offer(run_paths, 3)
    monkeypatch.setenv("RLX_RUN_TOKEN", "the next attempt")
    assert Subscriber(run_paths).latest() is None
