"""Damage to weights on real vLLM: which check finds it, what the user reads, and that nothing is sampled with damaged weights.

what is wrong                                       found by                                     the user reads
a folder: cut, changed, incomplete, of another      the check of every rank before a load        UpdateRefused: the old version serves on
model or version
what a server has loaded is not what was written    the compare after the load                   WeightsDiffer: the server stays paused
a load ends in the middle                           the extension                                the server ends
the server restarted                                the label of its tokens                      nothing: it gets the version first
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from inference_server import EXACT, Run, lives, prompts, publish_adapter, running, same, sample, sample_all, versions_of, wait_until
from run_servers import RUN, Servers
from safetensors.torch import load_file

from rlx.config.schema import LoraConfig
from rlx.inference import wire
from rlx.inference.client import Client
from rlx.inference.wire import InferenceError, UpdateRefused, WeightsDiffer, label_of
from rlx.paths import COMPLETE, RunPaths
from rlx.trace import Turn
from rlx.weights import files
from rlx.weights.files import ModelFiles
from rlx.weights.shapes import header, manifest

pytestmark = pytest.mark.slow
long = pytest.mark.long
Engines = Callable[[str], Run]


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], object], version: int = 1) -> None:
    """Change what is in the folder and write it again, with a manifest that fits."""
    (file,) = folder.glob("*.safetensors")
    tensors, paths = load_file(file), RunPaths(folder / "again")
    change(tensors)
    files.begin(paths, version)
    written = files.write(paths, version, {file.name: tensors}, lambda part: part)
    files.complete(paths, version, [written], ModelFiles({}))
    files.publish(paths, version)
    old, new = manifest(folder), paths.weights_of(version)
    shutil.copy(new / file.name, folder)
    (folder / COMPLETE).write_text(json.dumps(old | manifest(new)))


def flip_a_bit(folder: Path) -> None:
    (file,) = folder.glob("*.safetensors")
    content = bytearray(file.read_bytes())
    content[max(entry.end for entry in header(file).values()) - 1] ^= 1
    file.write_bytes(content)


def cut(folder: Path) -> None:
    (file,) = folder.glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-100])


def leave_half(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def leave_unfinished(folder: Path) -> None:
    (folder / COMPLETE).unlink()


def drop_a_tensor(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.pop("model.layers.2.mlp.up_proj.weight"))


def change_a_shape(folder: Path) -> None:
    name = "model.layers.1.self_attn.o_proj.weight"
    rewrite(folder, lambda tensors: tensors.update({name: tensors[name][:, :-1].contiguous()}))


def add_a_tensor(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.update({"model.layers.9.input_layernorm.weight": tensors["model.norm.weight"].clone()}))


def claim_another_version(folder: Path) -> None:
    rewrite(folder, lambda tensors: None, version=7)


def drop_half_an_adapter(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.pop(min(name for name in tensors if "lora_B" in name)))


def belong_to_another_model(folder: Path) -> None:
    found = json.loads((folder / COMPLETE).read_text())
    found["base"] = {"name": "another", "identity": "0" * 16}
    (folder / COMPLETE).write_text(json.dumps(found))


WRITTEN = r"expected checksum \w{16}, found \w{16}; its \d+ bytes are damaged$"
FOLDERS: list[tuple[str, Callable[[Path], None], str]] = [
    ("tied", flip_a_bit, WRITTEN),
    ("tied", cut, r"model\.safetensors has \d+ bytes, but its header says \d+"),
    ("tied", leave_half, r"holds no model\*\.safetensors"),
    ("tied", leave_unfinished, "no file COMPLETE; the folder was not finished"),
    ("tied", drop_a_tensor, r"is not this model; missing: model\.layers\.2\.mlp\.up_proj\.weight"),
    ("tied", change_a_shape, r"wrong shape: model\.layers\.1\.self_attn\.o_proj\.weight \[128, 127\] instead of \[128, 128\]"),
    ("tied", add_a_tensor, r"unknown: model\.layers\.9\.input_layernorm\.weight"),
    ("tied", claim_another_version, "holds version 7, not 1"),
    ("split", flip_a_bit, WRITTEN),
    ("split", drop_a_tensor, "is not this model; missing: "),
    ("adapters", flip_a_bit, WRITTEN),
    ("adapters", cut, r"adapter_model\.safetensors has \d+ bytes"),
    ("adapters", drop_half_an_adapter, "holds no adapters for this model: .* without its other half"),
    ("adapters", claim_another_version, "holds version 7, not 1"),
    ("adapters", belong_to_another_model, "holds adapters of another model .another. than"),
]


def cases(table: list[tuple[str, Any, str]]) -> list[Any]:
    """One server for `make test`, the others for `make test-long`."""
    names = [what if isinstance(what, str) else what.__name__.replace("_", " ") for _, what, _ in table]
    marks = [() if kind == "tied" else long for kind, _, _ in table]
    return [pytest.param(*row, id=f"{row[0]}-{name}", marks=mark) for row, name, mark in zip(table, names, marks, strict=True)]


@pytest.mark.parametrize(("kind", "damage", "complaint"), cases(FOLDERS))
def test_a_damaged_folder_is_refused_and_the_old_version_serves_on(
    engines: Engines, tmp_path: Path, kind: str, damage: Callable[[Path], None], complaint: str
) -> None:
    run = engines(kind)
    shutil.copytree(run.version(1), folder := tmp_path / "step_1")
    damage(folder)

    async def scene(client: Servers) -> list[Turn]:
        work = [asyncio.create_task(sample(client, ids, seed, max_tokens=120)) for seed, ids in enumerate(prompts(4))]
        with pytest.raises(UpdateRefused, match=complaint):
            await client.update(folder, 1)
        assert client.fleet.version == 0
        return [*await asyncio.gather(*work), await sample(client, prompts(1)[0], 0)]

    turns = run.talk(scene)
    assert versions_of(turns) == {0}
    assert run.worst(turns) < EXACT


@pytest.mark.long
@pytest.mark.parametrize("kind", ["adapters"])
def test_adapters_without_room_on_the_server_are_refused(engines: Engines, tmp_path: Path, kind: str) -> None:
    run = engines(kind)
    large = publish_adapter(tmp_path / "weights" / "step_1", run.model, 1, LoraConfig(rank=16, alpha=6.0))

    async def scene(client: Servers) -> list[Turn]:
        with pytest.raises(InferenceError, match="LoRA rank 16 is greater than max_lora_rank 8"):
            await client.update(large, 1)
        await client.update(run.version(1), 1)
        return await sample_all(client, prompts(4))

    turns = run.talk(scene)
    assert versions_of(turns) == {1}
    assert run.worst(turns) < EXACT


async def sabotage(run: Run, how: str) -> None:
    async with Client() as client:
        await client.call_workers(run.ready()[0], "sabotage", how)


async def fails_to_load(run: Run, client: Servers, how: str, error: type[Exception], complaint: str) -> list[Turn]:
    """Load version 1, which goes wrong. Returns the requests that completed meanwhile and in the next half second."""
    await sabotage(run, how)
    work = [asyncio.create_task(sample(client, ids, seed, max_tokens=200)) for seed, ids in enumerate(prompts(16))]
    try:
        await running(client, 4)
        with pytest.raises(error, match=complaint):
            await client.update(run.version(1), 1)
        await asyncio.sleep(0.5)
        return [task.result() for task in work if task.done() and not task.exception()]
    finally:
        for task in work:
            task.cancel()
        await asyncio.gather(*work, return_exceptions=True)
        with contextlib.suppress(InferenceError, AssertionError):  # it ends, or has ended
            await sabotage(run, "")


SERVED = [
    ("tied", "vLLM alone", "lm_head"),
    ("tied", "keys and values are swapped", r"layers\.1\.self_attn\.qkv_proj"),
    ("tied", "a tensor is scaled", r"layers\.2\.mlp\.down_proj"),
    ("tied", "tensors are dropped", r"layers\.1\.self_attn\.o_proj"),
    ("split", "a rank does not load", "1 of 2 ranks"),
    ("split", "vLLM alone", "lm_head"),
    ("experts", "vLLM alone", r"layers\.\d\.mlp\.experts"),
    ("experts", "one expert is old", r"layers\.1\.mlp\.experts"),
    ("experts", "a tensor is scaled", r"layers\.2\.mlp\.experts"),
    ("experts", "tensors are dropped", r"layers\.1\."),
]


@pytest.mark.parametrize(("kind", "how", "where"), cases(SERVED))
def test_a_server_with_other_weights_than_it_loaded_is_found_before_it_samples_and_the_next_run_mends_it(
    engines: Engines, kind: str, how: str, where: str
) -> None:
    run = engines(kind)
    complaint = rf"serves other weights than version 1@\w{{8}}, which it has just loaded: \d+ numbers differ on .*{where}"
    completed = run.talk(lambda client: fails_to_load(run, client, how, WeightsDiffer, complaint), verify_every=1)
    assert versions_of(completed) <= {0}
    assert not completed or run.worst(completed) < EXACT

    async def again(client: Servers) -> tuple[list[Turn], list[Turn]]:
        before = await sample_all(client, prompts(8))
        await client.update(run.version(1), 1)
        return before, await sample_all(client, prompts(8))

    before, after = run.talk(again)
    assert (versions_of(before), versions_of(after)) == ({0}, {1})
    assert run.worst(before + after) < EXACT


@pytest.mark.parametrize("kind", ["tied", pytest.param("experts", marks=long)])
def test_vllms_own_reload_on_a_cpu_is_wrong_for_tied_heads_and_experts(engines: Engines, kind: str) -> None:
    """When this fails, vLLM does what `Policy._rlx_reload` does after its reload (a tied head) or before it (experts): remove that."""
    run = engines(kind)

    async def scene(client: Servers) -> list[Turn]:
        await fails_to_load(run, client, "vLLM alone", WeightsDiffer, "serves other weights than version 1")
        async with Client() as direct:
            await direct.ask(run.ready()[0], wire.SET_LABEL, {"new_version": label_of(1, RUN)})
            await direct.ask(run.ready()[0], wire.RESUME, {})
        client.sampler.version = 1
        return await sample_all(client, prompts(4))

    turns = run.talk(scene, verify_every=1, run=RUN, look=1000)  # no check brings the right version to it
    assert versions_of(turns) == {1}
    assert run.worst(turns) > 0.5


@pytest.mark.long
@pytest.mark.parametrize("kind", ["tied", "split"])
def test_a_load_that_ends_in_the_middle_ends_the_server(engines: Engines, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    run = engines(kind)
    processes = psutil.Process(run.process.pid).children(recursive=True)
    completed = run.talk(lambda client: fails_to_load(run, client, "the disk goes", InferenceError, run.ready()[0].url), restart_timeout=1)
    assert "failed in the middle of a load and ends: OSError: the disk is gone" in caplog.text
    assert versions_of(completed) <= {0}
    assert not completed or run.worst(completed) < EXACT
    assert run.process.wait(60) == 1
    wait_until(lambda: not any(map(lives, processes)), "the end of all its processes", 60)
    assert re.search(r"vLLM ended while it served, with exit code|vLLM's engine has died", run.log.read_text())


@pytest.mark.long
def test_a_server_that_restarted_gets_the_version_before_it_serves_and_seeds_give_the_same_bits(engines: Engines) -> None:
    """The second server has another port, another key and the initial model."""
    run = engines("tied")
    folder = run.version(4)

    async def scene(client: Servers) -> tuple[list[Turn], list[Turn], list[Turn], float]:
        await client.update(folder, 4)
        before = await sample_all(client, prompts(16))
        asked = {"max_tokens": 200, "min_tokens": 200}  # none is done before all are seen running
        caught = [asyncio.create_task(sample(client, ids, seed, **asked)) for seed, ids in enumerate(prompts(16))]
        await running(client, 16)
        await asyncio.to_thread(run.stop, signal.SIGKILL)
        run.start()
        after = await sample_all(client, prompts(16))
        return before, after, await asyncio.gather(*caught), client.fleet.compared

    before, after, caught, compared = run.talk(scene, restart_timeout=600, request_timeout=600)
    assert versions_of(before + after + caught) == {4}
    assert all(map(same, before, after))
    assert max(run.worst(after), run.worst(caught, min_tokens=200)) < EXACT
    assert compared > 0.99
