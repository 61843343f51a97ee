"""Adapters on real vLLM on CPU: what is served is what was trained, in flight and after, and an adapter that is not ends the server."""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from inference_server import EXACT, START, Run, prompts, running, sample, under_load
from run_servers import Servers
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from vllm.lora.layers import RowParallelLinearWithLoRA

from rlx.config.schema import LoraConfig
from rlx.inference.endpoints import Endpoint
from rlx.inference.protocol import PolicyState
from rlx.inference.server import adapter
from rlx.inference.server.arguments import adapter_arguments
from rlx.inference.server.policy_files import check_adapter, linear_layers, tensor_shapes
from rlx.inference.telling import Manner
from rlx.models.load import load_policy
from rlx.models.lora import adapted
from rlx.parallel.mesh import one_process
from rlx.paths import COMPLETE
from rlx.types import Turn
from rlx.waiting import UNFIT
from rlx.weights.files import identity
from rlx.weights.publish import Publisher
from rlx.weights.saving import facts

pytestmark = pytest.mark.slow

LORA = LoraConfig(rank=3, alpha=6.0, rslora=True)
ALONE = one_process("cpu")
# vLLM's engine forgets to copy one matrix of the adapter.
FORGETS = f"""
from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA as Layer
copy = Layer.set_lora
def set_lora(layer, index, lora_a, lora_b):
    copy(layer, index, lora_a, lora_b if lora_b.shape[0] != layer.input_size else lora_b * 0)
Layer.set_lora = set_lora
{START}
"""


def adapter_run(root: Path, experts: int = 0) -> Run:
    """A run whose server serves adapters."""
    run = Run(root, tied=True, experts=experts)
    text = run.paths.config.read_text()
    assert "rank: null" in text
    run.paths.config.write_text(text.replace("rank: null", f"rank: {LORA.rank}"))
    return run


def publish(run: Run, version: int) -> Path:
    """Write adapters as the trainer does. The test scores with them merged into a plain model of transformers."""
    policy = load_policy(str(run.paths.root / "model"), ALONE, dtype="float32", lora=LORA, seed=version)
    generator = torch.Generator().manual_seed(version)
    merged = copy.deepcopy(run.models[0])
    for name, layer in adapted(policy.hf).items():
        layer.lora_B.data.normal_(0, 0.1, generator=generator)
        merged.get_submodule(name).weight.data += LORA.scaling * (layer.lora_B @ layer.lora_A).detach()
    Publisher.of(policy, ALONE, run.paths, source=str(run.paths.root / "model"), dtype=torch.float32, lora=LORA).ensure(version)
    run.models[version] = merged
    return run.paths.weights_of(version)


@pytest.mark.parametrize(
    ("experts", "keep_kv"),
    [(0, False), pytest.param(4, False, marks=pytest.mark.long), pytest.param(0, True, marks=pytest.mark.long)],
    ids=["dense", "beside experts", "kept keys"],
)
def test_the_served_adapter_equals_merged_weights_and_changes_under_requests_in_flight(tmp_path: Path, experts: int, keep_kv: bool) -> None:
    run = adapter_run(tmp_path, experts)
    folders = {version: publish(run, version) for version in (1, 2)}
    whole = Run(tmp_path / "whole", tied=True).version(3)

    async def conversation(endpoints: list[Endpoint]) -> tuple[list[list[Turn]], PolicyState]:
        async with Servers(endpoints, manner=Manner(keep_kv=keep_kv)) as servers:
            await servers.fleet.wait_ready(60)
            ids = prompts(3)
            said = [[await sample(servers, each, seed) for seed, each in enumerate(ids)]]  # these prompts are cached now
            await servers.update(folders[1], 1)
            said.append([await sample(servers, each, seed) for seed, each in enumerate(ids)])
            with pytest.raises(RuntimeError, match=r"holds whole models .*started to serve adapters"):
                await servers.update(whole, 3)

            async def change() -> None:
                await running(servers, len(ids))  # each has tokens of version 1
                await servers.update(folders[2], 2)

            said.append(await under_load(servers, ids, change))
            said.append([await sample(servers, each, seed) for seed, each in enumerate(ids)])
            (state,) = await servers.fleet.states()
            return said, state

    run.start()
    (base, first, changing, second), state = asyncio.run(conversation(run.ready()))
    assert run.stop() == 143
    for turns, version in ((base, 0), (first, 1), (second, 2)):
        assert {v for turn in turns for v in turn.versions.tolist()} == {version}
        assert run.worst(turns, 1.0) < EXACT
    assert any(set(turn.versions.tolist()) == {1, 2} for turn in changing)
    assert (run.worst_kept(changing) if keep_kv else run.worst(changing, 1.0)) < EXACT
    assert state.attested == 1.0
    assert not np.array_equal(base[0].completion_ids, first[0].completion_ids)


@pytest.mark.long
def test_an_adapter_that_is_not_served_as_it_was_trained_ends_the_server(tmp_path: Path) -> None:
    run = adapter_run(tmp_path)
    folder = publish(run, 1)
    run.start(FORGETS)

    async def conversation(endpoints: list[Endpoint]) -> None:
        async with Servers(endpoints, request_timeout=20, restart_timeout=1) as servers:
            await servers.fleet.wait_ready(60)
            with pytest.raises(RuntimeError, match=r"failed midway.*the served adapter is not the one that was trained: 4 tensors differ"):
                await servers.update(folder, 1)

    asyncio.run(conversation(run.ready()))
    assert run.process is not None
    assert run.process.wait(60) == UNFIT


def test_the_engine_has_room_for_the_trained_layers_alone(tmp_path: Path) -> None:
    run = Run(tmp_path, tied=True)
    model = run.paths.root / "model"
    every = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
    assert linear_layers(tensor_shapes(model)) == every
    for lora, rank, names in (
        (LoraConfig(rank=3), 8, every),
        (LoraConfig(rank=16, target_modules=["self_attn.q_proj", "v_proj"]), 16, ["q_proj", "v_proj"]),
        (LoraConfig(rank=17), 32, every),
    ):
        found: dict[str, Any] = adapter_arguments(lora, model)
        assert (found["max_lora_rank"], found["lora_target_modules"], found["max_loras"]) == (rank, names, 1)


def test_the_engine_has_no_room_at_experts_and_a_cpu_that_would_make_some_is_refused(tmp_path: Path) -> None:
    shapes = {f"model.layers.0.self_attn.{name}.weight": (8, 8) for name in ("q_proj", "o_proj")}
    shapes |= {f"model.layers.0.mlp.experts.{number}.{name}.weight": (4, 8) for number in range(2) for name in ("gate_proj", "up_proj")}
    save_file({name: torch.zeros(shape) for name, shape in shapes.items()}, tmp_path / "model.safetensors")
    assert adapter_arguments(LoraConfig(rank=3), tmp_path, cpu=True)["lora_target_modules"] == ["o_proj", "q_proj"]
    shapes["model.layers.0.mlp.shared_expert.up_proj.weight"] = (4, 8)
    save_file({name: torch.zeros(shape) for name, shape in shapes.items()}, tmp_path / "model.safetensors")
    assert adapter_arguments(LoraConfig(rank=3), tmp_path)["lora_target_modules"] == ["o_proj", "q_proj", "up_proj"]
    with pytest.raises(
        ValueError, match=r"adapters of up_proj in a model .*lora.target_modules=\[all-linear\]. Name layers of the attention"
    ):
        adapter_arguments(LoraConfig(rank=3), tmp_path, cpu=True)


def test_adapters_of_another_model_version_or_rank_are_refused(tmp_path: Path) -> None:
    run = Run(tmp_path, tied=True)
    shapes, folder = tensor_shapes(run.paths.root / "model"), publish(run, 1)
    check_adapter(folder, 1, shapes, 8)
    with pytest.raises(ValueError, match="holds version 1, not 2"):
        check_adapter(folder, 2, shapes, 8)
    with pytest.raises(ValueError, match=r"rank 3, but this server was started for rank 1 \(lora.rank\)"):
        check_adapter(folder, 1, shapes, 1)
    with pytest.raises(ValueError, match=r"no adapters for this model: base_model\.model\.model\.layers\.0\.mlp\.down_proj"):
        check_adapter(folder, 1, {name: (*shape[:-1], shape[-1] + 1) for name, shape in shapes.items()}, 8)
    with pytest.raises(ValueError, match="no adapters for this model"):
        check_adapter(folder, 1, {}, 8)
    check_adapter(folder, 1, shapes, 8, identity(run.paths.root / "model"))
    with safe_open(run.paths.root / "model" / "model.safetensors", "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    tensors["model.norm.weight"][0] += 1  # the same model, trained a little
    (tmp_path / "other").mkdir()
    save_file(tensors, tmp_path / "other" / "model.safetensors")
    with pytest.raises(ValueError, match=r"trained beside .*model \(weights \w{16}\), but this server has other weights \(\w{16}\)"):
        check_adapter(folder, 1, shapes, 8, identity(tmp_path / "other"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_plain_product_is_that_of_vllms_own_operation(dtype: torch.dtype) -> None:
    from vllm.lora.layers import LoRAMapping
    from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

    from rlx.inference.server.adapter import _add_adapter

    wrapper = PunicaWrapperCPU(64, max_batches=8, device="cpu")
    wrapper.update_metadata(LoRAMapping((1,) * 7, (1, 1), is_prefill=True), [1], 2, 100)
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    x, base, slices = draw(7, 12), draw(7, 14), (8, 6)
    a, b = [draw(1, 1, 4, 12) for _ in slices], [draw(1, 1, size, 4) for size in slices]
    theirs, ours = base.clone(), base.clone()
    wrapper.add_lora_linear(theirs, x, tuple(a), tuple(b), 1.0, slices)
    _add_adapter(wrapper, ours, x, a, b, 1.0, slices)
    assert not torch.allclose(ours, base)
    torch.testing.assert_close(ours, theirs, rtol=1e-5 if dtype == torch.float32 else 0.05, atol=1e-5 if dtype == torch.float32 else 0.2)


class Slots:
    """A layer of a tensor-parallel worker: its slots for `number` matrices A and B of adapters, with room for rank 4."""

    def __init__(self, inputs: int, outputs: Sequence[int], places: Sequence[int]) -> None:
        self.lora_a_stacked = [torch.zeros(1, 1, 4, inputs) for _ in outputs]
        self.lora_b_stacked = [torch.zeros(1, 1, size, 4) for size in outputs]
        self.output_ids = tuple(places)


class Manager:
    """Stands in for vLLM's managers, and loads an adapter as each worker of a tensor-parallel engine does: only its slices."""

    def __init__(self, rank: int, ranks: int) -> None:
        kv = rank // 2  # as many key heads as half the workers: two workers share one
        self.modules = {
            "attn.qkv_proj": Slots(6, (8 // ranks, 4, 4), (rank, kv, kv)),
            "attn.o_proj": Slots(8 // ranks, (6,), ()),
        }
        row = object.__new__(RowParallelLinearWithLoRA)
        vars(row).update(vars(self.modules["attn.o_proj"]), tp_rank=rank)
        del vars(row)["output_ids"]
        self.modules["attn.o_proj"] = row  # type: ignore[assignment]
        self.packed_modules = {"attn.qkv_proj": [f"attn.{part}_proj" for part in "qkv"]}
        self.lora_index_to_id = [1]
        self._adapter_manager = self
        self.rank, self.ranks, self.kv = rank, ranks, kv

    def add_adapter(self, request: Any) -> None:
        found = load_file(Path(request.lora_path) / "adapter_model.safetensors")
        for number, part in enumerate("qkv"):
            a, b = (found[f"base_model.model.attn.{part}_proj.lora_{half}.weight"] for half in "AB")
            slot = self.modules["attn.qkv_proj"]
            slot.lora_a_stacked[number][0, 0, :3] = a
            slot.lora_b_stacked[number][0, 0, :, :3] = b.chunk(self.ranks)[self.rank] if part == "q" else b.chunk(self.ranks // 2)[self.kv]
        a, b = (found[f"base_model.model.attn.o_proj.lora_{half}.weight"] for half in "AB")
        self.modules["attn.o_proj"].lora_a_stacked[0][0, 0, :3] = a.chunk(self.ranks, 1)[self.rank]
        self.modules["attn.o_proj"].lora_b_stacked[0][0, 0, :, :3] = b


def test_the_slices_of_an_adapter_that_tensor_parallel_workers_have_are_compared(tmp_path: Path) -> None:
    sizes = {"q": (8, 6), "k": (8, 6), "v": (8, 6), "o": (6, 8)}
    tensors = {}
    for part, (rows, columns) in sizes.items():
        tensors[f"base_model.model.attn.{part}_proj.lora_A.weight"] = torch.randn(3, columns)
        tensors[f"base_model.model.attn.{part}_proj.lora_B.weight"] = torch.randn(rows, 3)
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text(
        json.dumps(
            {"peft_type": "LORA", "r": 3, "lora_alpha": 3, "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"], "bias": "none"}
        )
    )
    (tmp_path / COMPLETE).write_text(json.dumps({"tensors": {name: facts(tensor) for name, tensor in tensors.items()}}))
    for rank in range(4):
        manager = Manager(rank, 4)
        assert adapter.replace(manager, tmp_path) == (1.0, {}, {})
    load = manager.add_adapter

    def wrongly(request: Any) -> None:
        load(request)
        manager.modules["attn.qkv_proj"].lora_b_stacked[0][0, 0] = tensors["base_model.model.attn.q_proj.lora_B.weight"].new_zeros(2, 4)
        manager.modules["attn.qkv_proj"].lora_b_stacked[0][0, 0, :, :3] = tensors["base_model.model.attn.q_proj.lora_B.weight"][:2]

    manager.add_adapter = wrongly  # type: ignore[method-assign]
    with pytest.raises(ValueError, match=r"1 tensors differ: base_model\.model\.attn\.q_proj\.lora_B\.weight$"):
        adapter.replace(manager, tmp_path)
