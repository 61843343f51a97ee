"""Several ranks write the files of one version: real processes with gloo, as if each had a host of its own."""

from __future__ import annotations

import json
import os
import signal
import time
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from safetensors.torch import load_file
from trainer_examples import make_model
from transformers import AutoModelForCausalLM
from transformers.models.llama import LlamaConfig
from transformers.models.qwen3_moe import Qwen3MoeConfig

from rlx.models.load import load_policy
from rlx.parallel import mesh as meshes
from rlx.parallel.mesh import Mesh, join, one_process
from rlx.paths import RunPaths
from rlx.weights import files, publish
from rlx.weights.export import by_layer
from rlx.weights.files import divide
from rlx.weights.publish import Publisher, PublishFailed
from rlx.weights.shapes import entries

MODELS = {
    "dense": lambda: make_model(LlamaConfig, tie_word_embeddings=False),
    "experts": lambda: make_model(Qwen3MoeConfig, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16),
}
INDEX = "model.safetensors.index.json"


def publisher_of(folder: Path, name: str, mesh: Mesh) -> Publisher:
    """Of the model `name`, into `folder/name_<ranks>`."""
    source = str(folder / name)
    model = load_policy(source, mesh, dtype="float32")
    paths = RunPaths(folder / f"{name}_{mesh.world_size}")
    return Publisher.of(model, mesh, paths, source=source, dtype=torch.bfloat16)


def rank(number: int, folder: Path) -> None:
    """One of two ranks, through all cases; the last of them ends rank 1."""
    os.environ["RLX_HOST"] = f"host{number}"
    torch.set_num_threads(1)
    meshes.RANK_LOST_SECONDS = 0.0
    meeting = dist.FileStore(str(folder / "store"), 2)
    mesh = join(torch.device("cpu"), rank=number, world_size=2, timeout=60, store=meeting)
    assert mesh.ranks_by_host() == [[0], [1]]
    publishers = {name: publisher_of(folder, name, mesh) for name in MODELS}
    with patch.object(files, "SHARD_BYTES", 20_000):
        for publisher in publishers.values():
            publisher.ensure(1)
    kept = {name: {key: tensor.nbytes for key, tensor in publisher._copies.items()} for name, publisher in publishers.items()}
    (folder / f"kept_{number}.json").write_text(json.dumps(kept))
    publisher = publishers["dense"]
    a_writer_with_a_full_disk(publisher)
    rank_0_without_a_folder(publisher)
    a_writer_that_is_killed(publisher)
    (folder / "heard").touch()
    os._exit(0)  # leaving the group would wait for the other rank


def published(publisher: Publisher, version: int) -> str:
    """The error of a version on this rank; empty if it has none."""
    publisher.gather(version)
    publisher.announce(version, keep_last=1)
    try:
        publisher.wait()
    except PublishFailed as error:
        publisher._pending = []
        return str(error)
    return ""


def full(*_: object, **__: object) -> None:
    raise OSError(28, "No space left on device")


def a_writer_with_a_full_disk(publisher: Publisher) -> None:
    first = publisher.mesh.first
    with nullcontext() if first else patch("safetensors.torch.save_file", full):
        said = published(publisher, 2)
    why = f"{'RuntimeError: rank 1: ' if first else ''}OSError: [Errno 28] No space left on device\n  fix: free"
    assert said.startswith(f"version 2 of the weights could not be written to {publisher.paths.weights}: {why}"), said
    if first:
        assert [path.name for path in publisher.paths.weights.iterdir()] == ["step_1"]
    publisher.mesh.barrier()


def rank_0_without_a_folder(publisher: Publisher) -> None:
    with patch.object(files, "begin", full), patch.object(publish, "FOLDER_TIMEOUT", 1.0):
        said = published(publisher, 3)
    assert said.startswith("version 3 of the weights"), said
    assert ("OSError: [Errno 28]" if publisher.mesh.first else "waited 1 s for") in said, said
    publisher.mesh.barrier()


def a_writer_that_is_killed(publisher: Publisher) -> None:
    def killed(tensors: dict, path: Path, **_: object) -> None:
        path.write_bytes(b"half of a file")
        os.kill(os.getpid(), signal.SIGKILL)

    with nullcontext() if publisher.mesh.first else patch("safetensors.torch.save_file", killed):
        said = published(publisher, 7)
    assert "RankLost: another writer left, " in said, said
    assert said.endswith("its own log says why\n  fix: continue with resume=latest"), said


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a single process and two of them have written of the same models."""
    folder = tmp_path_factory.mktemp("writers")
    for name, make in MODELS.items():
        make().save_pretrained(folder / name)
        publisher_of(folder, name, one_process("cpu")).ensure(1)
    processes = [mp.get_context("spawn").Process(target=rank, args=(number, folder)) for number in range(2)]
    for process in processes:
        process.start()
    deadline = time.monotonic() + 240
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
    hung = [process.is_alive() for process in processes]
    for process in processes:
        process.kill()
        process.join()
    assert hung == [False, False]
    assert [process.exitcode for process in processes] == [0, -signal.SIGKILL]
    return folder


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("name", MODELS)
def test_the_files_of_two_writers_hold_the_tensors_of_one(folder: Path, name: str) -> None:
    one, two = RunPaths(folder / f"{name}_1").weights_of(1), RunPaths(folder / f"{name}_2").weights_of(1)
    for each in (one, two):
        files.verify(each)
    assert files.identity(one) == files.identity(two)
    shards = sorted({entry.path for entry in entries(two).values()})
    assert len(shards) >= 2
    assert not list(one.glob(INDEX)), "the version of one process is one file"
    index = json.loads((two / INDEX).read_text())["weight_map"]
    found = {key: (tensor, shard.name) for shard in shards for key, tensor in load_file(shard).items()}
    assert {key: shard for key, (_, shard) in found.items()} == index
    for layer in range(2):
        assert len({shard for key, shard in index.items() if f".layers.{layer}." in key}) == 1
    for key, tensor in load_file(one / "model.safetensors").items():
        assert torch.equal(found[key][0], tensor), key
    loaded, info = AutoModelForCausalLM.from_pretrained(two, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    for key, tensor in AutoModelForCausalLM.from_pretrained(one).state_dict().items():
        assert torch.equal(loaded.state_dict()[key], tensor), key


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("name", MODELS)
def test_each_writer_has_memory_for_its_half_alone(folder: Path, name: str) -> None:
    kept = [json.loads((folder / f"kept_{number}.json").read_text())[name] for number in range(2)]
    assert not kept[0].keys() & kept[1].keys()
    model = AutoModelForCausalLM.from_pretrained(folder / name)
    assert kept[0].keys() | kept[1].keys() == {key for key, _ in model.named_parameters()}
    units = by_layer(key for key, _ in model.named_parameters())
    largest = max(sum({**kept[0], **kept[1]}[key] for key in unit) for unit in units)
    assert abs(sum(kept[0].values()) - sum(kept[1].values())) <= largest


@pytest.mark.slow
@pytest.mark.long
def test_a_writer_that_fails_is_named_and_one_that_is_killed_leaves_the_old_version(folder: Path) -> None:
    """What the ranks have heard was checked there."""
    assert (folder / "heard").exists()
    weights = RunPaths(folder / "dense_2").weights
    assert [path.name for path in weights.iterdir()] == ["step_1"], "nothing is left of the version that was never complete"
    files.verify(weights / "step_1")


def test_files_have_about_the_same_number_of_bytes_and_every_writer_the_same_number_of_files(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"embedding": 50, **{f"layers.{n}.{name}": 10 for n in range(4) for name in ("a", "b")}, "head": 50}
    assert divide([list(sizes)], sizes, [0]) == {"model.safetensors": (0, list(sizes))}
    units = by_layer(sizes)
    assert units[0] == ["embedding"]
    assert units[1] == ["layers.0.a", "layers.0.b"]
    monkeypatch.setattr(files, "SHARD_BYTES", 60)
    parts = divide(units, sizes, [0, 4])
    assert list(parts) == [f"model-0000{n}-of-00004.safetensors" for n in range(1, 5)]
    assert [(writer, sum(sizes[name] for name in names)) for writer, names in parts.values()] == [(0, 50), (0, 40), (4, 40), (4, 50)]
    assert [name for _, names in parts.values() for name in names] == list(sizes), "in the model's order"
    large = {"table": 1000, "layers.0.a": 10, "layers.1.a": 10}
    assert [names for _, names in divide(by_layer(large), large, [0, 4]).values()] == [["table"], ["layers.0.a", "layers.1.a"]]
