"""Families of models on real vLLM on CPU: what the trainer writes is served with the trainer's log-probabilities."""

from __future__ import annotations

import asyncio
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from inference_server import CONTEXT, EOS, EXACT, MemoryTrainer, Run, from_memory, prompts, running, same, sample, under_load
from run_servers import Servers
from safetensors.torch import load_file, save_file
from test_inference_adapter import adapter_run, publish
from test_inference_heads import trained_version
from test_models_families import FAMILIES
from trainer_examples import make_model
from transformers import AutoModelForCausalLM
from transformers.models.deepseek_v2 import DeepseekV2Config

from rlx.config.kv_cache import CPU_BLOCK
from rlx.config.schema_model import CPU_WIDTHS, LoraConfig
from rlx.inference.protocol import PolicyState
from rlx.inference.server.arguments import adapter_arguments
from rlx.inference.server.start import refuse_unused_adapters, refuse_widths
from rlx.models.tiny import VOCABULARY, build_tokenizer
from rlx.types import Turn

# Logits by the embedding; windows in some layers; queries, keys and values of a head in turn, and a head of another name; experts.
UNLIKE_OTHERS = ("llama", "gemma2", "gemma3", "gpt_neox", "olmoe")
SERVED = [name if name in UNLIKE_OTHERS else pytest.param(name, marks=pytest.mark.nightly) for name in sorted(FAMILIES)]
COMPARED = {"gpt2": 0.249, "gpt_neox": 0.618, "olmoe": 0.039, "qwen3_moe": 0.101}  # share of the weights; of all others the whole
BESIDE_EXPERTS = {f"model.layers.*.{name}" for name in ("mlp.experts", "mlp.gate", *(f"self_attn.{part}_proj" for part in "qkvo"))}
NOT_COMPARED = {  # the rest: the engine packs it, or puts it into another order
    "gpt2": {f"transformer.h.*.{name}" for name in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")},
    "gpt_neox": {"gpt_neox.layers.*.attention.query_key_value"},
    "olmoe": BESIDE_EXPERTS,
    "qwen3_moe": BESIDE_EXPERTS,
}
SIZES = {
    "vocab_size": len(VOCABULARY), "hidden_size": 128, "intermediate_size": 192, "head_dim": 32, "max_position_embeddings": CONTEXT,
    "eos_token_id": EOS, "bos_token_id": None, "initializer_range": 0.1,
}  # fmt: skip
LATENT = {  # the widths that vLLM computes on a CPU
    "deepseek_v2": (
        DeepseekV2Config,
        {
            "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 32, "v_head_dim": 32, "q_lora_rank": None,
            "first_k_dense_replace": 99, "n_routed_experts": 4, "num_attention_heads": 4, "num_key_value_heads": 4,
        },
    )
}  # fmt: skip


@torch.no_grad()
def multiplied(hf: Any, factor: float) -> Any:
    for parameter in hf.parameters():
        parameter.mul_(factor)
    return hf


def plain(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


@torch.no_grad()
def moved(hf: Any) -> Any:
    """With other biases and norms."""
    torch.manual_seed(1)
    for parameter in hf.parameters():
        if parameter.ndim == 1:
            parameter.add_(0.1 * torch.randn_like(parameter))
    return hf


def save_random(name: str, folder: Path, new: bool = False) -> None:
    """A random model of the family with its tokenizer, in place of what is in the folder. Its biases and norms are random, too, unless
    it is `new`: as transformers makes it."""
    config, keys = (FAMILIES | LATENT)[name]
    model = make_model(config, **{**keys, **SIZES, **({"head_dim": 64} if name in LATENT else {})})
    if not new:
        moved(model)
    for file in folder.iterdir():
        file.unlink()
    model.save_pretrained(folder)
    build_tokenizer(CONTEXT).save_pretrained(folder)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("name", SERVED)
def test_versions_of_a_family_are_served_as_they_were_trained(name: str, tmp_path: Path) -> None:
    """Version 0 is that of transformers, 1 comes from the trainer's files, 2 from its memory. All weights of each differ by a tenth."""
    run = from_memory(Run(tmp_path, tied=False))
    source = run.paths.root / "model"
    save_random(name, source)
    run.models[0] = plain(source)
    folder = trained_version(run, 1)
    run.models[2] = multiplied(plain(folder), 1.1)
    run.start()
    trainer = MemoryTrainer(run)

    async def conversation() -> tuple[list[Turn], list[PolicyState]]:
        async with Servers(run.ready()) as servers:
            turns, states = [], []
            for version in range(3):
                if version == 1:
                    await servers.update(folder, 1)
                if version == 2:
                    trainer.offer(2)
                    await trainer.update(servers)
                states += await servers.fleet.states()
                turns += [await sample(servers, ids, seed) for seed, ids in enumerate(prompts(3))]
            return turns, states

    turns, states = asyncio.run(conversation())
    run.stop()
    assert [set(turn.versions.tolist()) for turn in turns] == [{version} for version in (0, 0, 0, 1, 1, 1, 2, 2, 2)]
    assert run.worst(turns, 1.0) < EXACT
    for state in states[1:]:
        assert state.attested == pytest.approx(COMPARED.get(name, 1.0), abs=1e-3)
        assert {re.split(r"(?<=experts)|\.weight|\.bias", left_out)[0] for left_out in state.not_compared} == NOT_COMPARED.get(name, set())
        assert state.attested + sum(state.not_compared.values()) == pytest.approx(1.0)


@pytest.mark.slow
@pytest.mark.long
def test_a_version_without_the_rotary_table_that_its_initial_model_stores_is_served_as_it_was_trained(tmp_path: Path) -> None:
    run = Run(tmp_path, tied=False)
    source = run.paths.root / "model"
    save_random("llama", source)
    weights = load_file(source / "model.safetensors")
    table = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(16)}
    save_file(weights | table, source / "model.safetensors", metadata={"format": "pt"})
    run.models[0] = plain(source)
    folder = trained_version(run, 1)
    run.start()

    async def conversation() -> tuple[Turn, PolicyState]:
        async with Servers(run.ready()) as servers:
            await servers.update(folder, 1)
            return await sample(servers, prompts(1)[0], 0), (await servers.fleet.states())[0]

    turn, state = asyncio.run(conversation())
    run.stop()
    assert set(turn.versions.tolist()) == {1}
    assert run.worst([turn], 1.0) < EXACT
    assert state.attested == pytest.approx(1.0)


@pytest.mark.slow
@pytest.mark.long
def test_biases_of_a_new_model_that_the_engine_reorders_do_not_end_its_server_once_they_are_trained(tmp_path: Path) -> None:
    """At first all are 0, so their order does not show."""
    run = from_memory(Run(tmp_path, tied=False))
    source = run.paths.root / "model"
    save_random("gpt_neox", source, new=True)
    run.models[0], run.models[1] = plain(source), moved(plain(source))
    run.start()
    trainer = MemoryTrainer(run)

    async def conversation() -> tuple[Turn, PolicyState]:
        async with Servers(run.ready()) as servers:
            trainer.offer(1)
            await trainer.update(servers)
            return await sample(servers, prompts(1)[0], 0), (await servers.fleet.states())[0]

    turn, state = asyncio.run(conversation())
    run.stop()
    assert set(turn.versions.tolist()) == {1}
    assert run.worst([turn], 1.0) < EXACT
    assert state.attested == pytest.approx(COMPARED["gpt_neox"], abs=1e-3)


@pytest.mark.slow
@pytest.mark.nightly
def test_a_dense_model_with_latent_attention_serves_a_version_as_a_server_that_began_with_it(tmp_path: Path) -> None:
    """The engine decodes with matrices that it derives from a weight. On a CPU its log-probabilities are not those of transformers
    (docs/models.md). Those of version 1, from files, are compared with another server's; version 2, from memory, is version 0 once more."""
    runs = [from_memory(Run(tmp_path / name, tied=False)) for name in ("updated", "began")]
    source, other = (run.paths.root / "model" for run in runs)
    save_random("deepseek_v2", source)
    runs[0].models[0] = runs[0].models[2] = plain(source)
    folder = trained_version(runs[0], 1)
    shutil.copytree(folder, other, dirs_exist_ok=True)

    async def conversation(run: Run) -> list[list[Turn]]:
        trainer = MemoryTrainer(run)
        async with Servers(run.ready()) as servers:
            found = [[await sample(servers, ids, seed) for seed, ids in enumerate(prompts(3))]]
            if run is runs[0]:
                await servers.update(folder, 1)
                found.append([await sample(servers, ids, seed) for seed, ids in enumerate(prompts(3))])
                trainer.offer(2)
                await trainer.update(servers)
                found.append([await sample(servers, ids, seed) for seed, ids in enumerate(prompts(3))])
            return found

    found = []
    for run in runs:
        run.start()
        found += asyncio.run(conversation(run))
        run.stop()
    version_0, version_1, version_2, began = found
    assert [same(*turns) for turns in zip(version_1, began, strict=True)] == [True] * 3
    assert [same(*turns) for turns in zip(version_0, version_2, strict=True)] == [True] * 3


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("name", sorted(FAMILIES.keys() - {"gpt2", "gpt_neox", "glm4"}))  # docs/lora.md has what these lack
def test_adapters_of_a_family_are_served_as_merged_weights(name: str, tmp_path: Path) -> None:
    run = adapter_run(tmp_path)
    save_random(name, run.paths.root / "model")
    run.models[0] = plain(run.paths.root / "model")
    folder = publish(run, 1)
    run.start()

    async def conversation() -> tuple[list[Turn], PolicyState]:
        async with Servers(run.ready()) as servers:
            turns = [await sample(servers, ids, seed) for seed, ids in enumerate(prompts(3))]
            await servers.update(folder, 1)
            turns += [await sample(servers, ids, seed) for seed, ids in enumerate(prompts(3))]
            return turns, (await servers.fleet.states())[0]

    turns, state = asyncio.run(conversation())
    run.stop()
    assert [set(turn.versions.tolist()) for turn in turns] == [{0}, {0}, {0}, {1}, {1}, {1}]
    assert run.worst(turns, 1.0) < EXACT
    assert state.attested == 1.0


@pytest.mark.slow
@pytest.mark.long
def test_the_widths_of_heads_that_are_refused_are_those_that_the_engine_cannot_compute() -> None:
    """vLLM starts with any width and ends at its first request."""
    from vllm._custom_ops import cpu_attn_get_scheduler_metadata
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    def computes(width: int, dtype: torch.dtype) -> bool:
        lengths, starts = torch.tensor([8], dtype=torch.int32), torch.tensor([0, 8], dtype=torch.int32)
        isa = _get_attn_isa(dtype, CPU_BLOCK, width)
        try:
            cpu_attn_get_scheduler_metadata(1, 4, 2, width, lengths, dtype, starts, True, -1, isa, False)
        except RuntimeError as error:
            assert "Unsupported CPU attention configuration" in str(error)  # noqa: PT017
            return False
        return True

    for dtype in (torch.float32, torch.bfloat16):
        assert tuple(width for width in range(8, 1025, 8) if computes(width, dtype)) == CPU_WIDTHS


@pytest.mark.slow
@pytest.mark.parametrize("width", [24, 32])
def test_a_server_on_a_cpu_names_the_heads_that_it_cannot_compute_before_it_loads_the_model(width: int, tmp_path: Path) -> None:
    """The width is that of the model's own configuration, whatever `model.head_dim` says."""
    from vllm.config import ModelConfig

    config, keys = FAMILIES["llama"]
    make_model(config, **{**keys, **SIZES, "head_dim": width}).save_pretrained(tmp_path)
    model = ModelConfig(model=str(tmp_path), skip_tokenizer_init=True, dtype="float32")
    if width in CPU_WIDTHS:
        refuse_widths(model)
        return
    with pytest.raises(ValueError, match=f"heads 24 wide on a CPU, and {tmp_path} has such heads"):
        refuse_widths(model)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["deepseek_v2", "llama"])
def test_adapters_that_latent_attention_would_not_use_are_refused_with_the_layers_that_can_have_some(name: str, tmp_path: Path) -> None:
    """vLLM loads them, so the comparison with the trained ones finds them equal."""
    from vllm.config import ModelConfig

    save_random(name, tmp_path)
    model = ModelConfig(model=str(tmp_path), skip_tokenizer_init=True, dtype="float32")
    targets = adapter_arguments(LoraConfig(rank=4), tmp_path)["lora_target_modules"]
    if name not in LATENT:
        refuse_unused_adapters(model, targets)
        return
    others = "down_proj,gate_proj,kv_a_proj_with_mqa,o_proj,q_proj,up_proj"
    with pytest.raises(ValueError, match=rf"adapters of kv_b_proj .*{tmp_path}.*lora\.target_modules=\[{others}\]$"):
        refuse_unused_adapters(model, targets)
    refuse_unused_adapters(model, others.split(","))


@pytest.mark.slow
@pytest.mark.long
def test_experts_that_the_trainer_has_in_one_tensor_arrive_from_its_memory_as_they_were_trained(tmp_path: Path) -> None:
    run = from_memory(Run(tmp_path, tied=True, experts=4))
    run.start()
    trainer, ids = MemoryTrainer(run), prompts(6)
    assert any(name.endswith("experts.gate_up_proj") for name, _ in trainer.offers.source.model.named_weights())

    async def conversation() -> list[Turn]:
        async with Servers(run.ready(), request_timeout=120) as servers:
            await servers.fleet.wait_ready(300)

            async def change() -> None:
                for version in (1, 2):
                    await running(servers, len(ids))
                    trainer.offer(version)
                    await trainer.update(servers)

            turns = await under_load(servers, ids, change)
            (state,) = await servers.fleet.states()
            assert state.version == 2
            assert state.attested > 0
            return turns

    turns = asyncio.run(conversation())
    run.stop()
    assert {version for turn in turns for version in turn.versions.tolist()} == {0, 1, 2}
    assert run.worst(turns, 1.0) < EXACT
