"""Real servers on CPU that load a version wrongly end before they generate a token of it. Slices of workers, and damaged files."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path

import pytest
from inference_server import EXACT, START, MemoryTrainer, Run, from_memory, prompts, running, sample, split_over_two, under_load
from run_servers import Servers
from safetensors.torch import load_file

from rlx.inference.endpoints import Endpoint
from rlx.inference.protocol import InferenceError, PolicyState, UpdateRefused
from rlx.inference.telling import Manner
from rlx.types import Turn
from rlx.waiting import UNFIT
from rlx.weights.files import header
from rlx.weights.saving import save

pytestmark = pytest.mark.slow
STALE = "the head multiplies with other values than its weight has"
PACKED = r"1 of \d+ tensors differ: model\.layers\.2\.self_attn\.o_proj\.weight"

# Files are loaded by the module `worker`, what comes from memory by `transfer`: each program names its ROOM.
PERTURBED = f"""
from rlx.inference.server import ROOM as room
pack = room.pack
def wrong(model, *rest):
    model.model.norm.weight[3] += 1e-3
    return pack(model, *rest)
room.pack = wrong
{START}
"""
PERTURBED_ORIGINAL = PERTURBED.replace("model.model.norm.weight[3]", "model.model.layers[2].self_attn.o_proj.weight[0, 0]")
STALE_HEAD = f"""
from rlx.inference.server import ROOM as room
pack = room.pack
def stale(model, *rest):
    kind = type(model.lm_head.quant_method)
    before, kind.process_weights_after_loading = kind.process_weights_after_loading, lambda *_: None
    beside = pack(model, *rest)
    kind.process_weights_after_loading = before
    return beside
room.pack = stale
{START}
"""
SKIPPED = f"""
from rlx.inference.server import transfer, worker
tensors, read, receive, received = worker.tensors, worker.Reading, transfer.GlooEngine.receive_weights, []
def earlier(folder, entries, written, *rest):
    skipped = folder.name == 'step_2'
    return read(folder, tensors(folder.parent / 'step_1') if skipped else entries, {{}} if skipped else written, *rest)
def first(engine, info):
    received.append(info)
    if len(received) == 1:
        return receive(engine, info)
    for _ in engine.group.receive(transfer.Announced(info.names, info.dtypes, info.shapes)):
        pass
worker.Reading, transfer.GlooEngine.receive_weights = earlier, first
{START}
"""
WRONG_SLICE = f"""
from rlx.inference.server import ROOM as room
pack, loaded = room.pack, []
def wrong(model, *rest):
    from vllm.distributed import get_tensor_model_parallel_rank
    loaded.append(model)
    if len(loaded) == 2 and get_tensor_model_parallel_rank() == 1:
        model.model.layers[2].self_attn.o_proj.weight[0, 0] += 1e-3
    return pack(model, *rest)
room.pack = wrong
{START}
"""


def started(run: Run, memory: bool, program: str = START) -> MemoryTrainer | None:
    """Start a server of the run. Returns the trainer that sends its versions; None if they are files."""
    trainer = MemoryTrainer(from_memory(run)) if memory else None
    run.start(program.replace("ROOM", "transfer" if memory else "worker"))
    return trainer


async def take(run: Run, servers: Servers, trainer: MemoryTrainer | None, version: int) -> None:
    """Have the servers take a version."""
    if trainer is None:
        await servers.update(run.version(version), version)
    else:
        trainer.offer(version)
        await trainer.update(servers)


@pytest.mark.parametrize(
    ("memory", "program", "complaint"),
    [
        pytest.param(False, STALE_HEAD, STALE, id="files-stale tied head"),
        pytest.param(False, PERTURBED, r"1 of \d+ tensors differ: model\.norm\.weight", id="files-one tensor", marks=pytest.mark.long),
        pytest.param(False, PERTURBED_ORIGINAL, PACKED, id="files-one packed tensor"),
        pytest.param(True, PERTURBED_ORIGINAL, PACKED, id="gloo-one packed tensor", marks=pytest.mark.long),
        pytest.param(False, SKIPPED, r"\d\d of \d\d tensors differ", id="files-a version skipped", marks=pytest.mark.long),
        pytest.param(True, STALE_HEAD, STALE, id="gloo-stale tied head"),
        pytest.param(True, PERTURBED, r"1 of \d+ tensors differ: model\.norm\.weight", id="gloo-one tensor", marks=pytest.mark.nightly),
        pytest.param(True, SKIPPED, r"\d\d of \d\d tensors differ", id="gloo-a version skipped", marks=pytest.mark.long),
    ],
)
def test_weights_that_are_not_those_that_were_trained_end_the_server(tmp_path: Path, memory: bool, program: str, complaint: str) -> None:
    run = Run(tmp_path, tied=True)
    trainer = started(run, memory, program)

    async def conversation(endpoints: list[Endpoint]) -> None:
        async with Servers(endpoints, request_timeout=20, restart_timeout=1) as servers:
            await servers.fleet.wait_ready(60)
            if program == SKIPPED:
                await take(run, servers, trainer, 1)
            with pytest.raises(InferenceError, match=rf"failed midway.*{complaint}"):
                await take(run, servers, trainer, 2)

    asyncio.run(conversation(run.ready()))
    assert run.process is not None
    assert run.process.wait(60) == UNFIT


@pytest.mark.long
@pytest.mark.parametrize(("memory", "keep_kv"), [(False, False), (True, True)], ids=["files", "gloo, kept keys"])
def test_every_slice_of_a_tensor_parallel_engine_is_compared_and_a_wrong_one_ends_the_server(
    tmp_path: Path, memory: bool, keep_kv: bool
) -> None:
    """Version 1 comes under requests in flight and all its slices are right; of version 2 one value of the second worker is wrong."""
    run = split_over_two(Run(tmp_path, tied=True))
    trainer = started(run, memory, WRONG_SLICE)
    complaint = r"1 of \d+ tensors differ: model\.layers\.2\.self_attn\.o_proj\.weight"

    async def conversation(endpoints: list[Endpoint]) -> tuple[list[Turn], Turn, PolicyState]:
        async with Servers(endpoints, request_timeout=120, restart_timeout=1, manner=Manner(keep_kv=keep_kv)) as servers:
            await servers.fleet.wait_ready(60)

            async def change() -> None:
                await running(servers, 3)
                await take(run, servers, trainer, 1)

            flying = await under_load(servers, prompts(3), change)
            found = flying, await sample(servers, prompts(1)[0], 0), (await servers.fleet.states())[0]
            with pytest.raises(InferenceError, match=rf"failed midway.*{complaint}"):
                await take(run, servers, trainer, 2)
            return found

    flying, turn, state = asyncio.run(conversation(run.ready()))
    assert (state.attested, state.not_compared) == (1.0, {})
    assert any(set(turn.versions.tolist()) == {0, 1} for turn in flying)
    assert (run.worst_kept(flying) if keep_kv else run.worst(flying, 1.0)) < EXACT
    assert set(turn.versions.tolist()) == {1}
    assert run.worst([turn], 1.0) < EXACT
    assert run.process is not None
    assert run.process.wait(60) == UNFIT


@pytest.mark.long
def test_a_tensor_damaged_in_its_file_is_refused_while_the_old_version_serves_and_the_next_version_is_whole(tmp_path: Path) -> None:
    """The folders are as the trainer writes them. What was read before the damage was found lies in the engine's memory by then."""
    run = Run(tmp_path, tied=True)
    run.start()
    good = load_file(run.version(1) / "model.safetensors")
    spoiled = []
    for name in ("model.layers.3.mlp.down_proj.weight", "model.embed_tokens.weight"):
        shutil.copytree(run.version(1), folder := tmp_path / name)
        file = folder / "model.safetensors"
        record, facts = save(good, file)
        (folder / "COMPLETE").write_text(json.dumps({"version": 1, "files": {file.name: record}, "tensors": facts}))
        entries, begin = header(file)
        content = bytearray(file.read_bytes())
        content[begin + entries[name]["data_offsets"][1] - 1] ^= 1
        file.write_bytes(content)
        spoiled.append(folder)

    async def conversation(endpoints: list[Endpoint]) -> list[Turn]:
        async with Servers(endpoints, request_timeout=120) as client:
            await client.fleet.wait_ready(60)
            return await updates(client)

    async def updates(client: Servers) -> list[Turn]:
        work = [asyncio.create_task(sample(client, ids, seed, max_tokens=120)) for seed, ids in enumerate(prompts(4))]
        await asyncio.sleep(0.05)
        for folder in spoiled:
            with pytest.raises(UpdateRefused, match=rf"the tensor {folder.name} is damaged"):
                await client.update(folder, 1)
        old = await sample(client, prompts(1)[0], 0)
        await client.update(run.version(1), 1)
        return [*await asyncio.gather(*work), old, await sample(client, prompts(1)[0], 0)]

    turns = asyncio.run(conversation(run.ready()))
    run.stop()
    assert run.worst(turns, 1.0) < EXACT
    assert [set(turn.versions.tolist()) for turn in turns[-2:]] == [{0}, {1}]


@pytest.mark.long
@pytest.mark.parametrize("memory", [False, True], ids=["files", "gloo"])
def test_the_first_update_does_not_read_the_initial_model_again(tmp_path: Path, memory: bool) -> None:
    """The server has read its files at the start, so it generates and compares without them. Reading them in the pause would hold it."""
    run = Run(tmp_path, tied=True)
    trainer = started(run, memory)

    async def conversation(endpoints: list[Endpoint]) -> tuple[Turn, PolicyState]:
        async with Servers(endpoints, request_timeout=120, restart_timeout=1) as servers:
            await servers.fleet.wait_ready(60)
            initial = list((tmp_path / "model").glob("*.safetensors"))
            assert initial
            for file in initial:
                file.unlink()
            await take(run, servers, trainer, 1)
            return await sample(servers, prompts(1)[0], 0), (await servers.fleet.states())[0]

    turn, state = asyncio.run(conversation(run.ready()))
    run.stop()
    assert (state.version, state.attested, state.not_compared) == (1, 1.0, {})
    assert set(turn.versions.tolist()) == {1}
    assert run.worst([turn], 1.0) < EXACT
