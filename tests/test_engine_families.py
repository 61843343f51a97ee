"""Families of models on real vLLM on CPU: what the trainer writes is served with the trainer's log-probabilities."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from inference_server import ALONE, CONTEXT, EOS, EXACT, LORA, Run, prompts, same, sample_all, versions_of
from run_servers import Servers
from safetensors.torch import load_file, save_file
from test_models_families import FAMILIES
from trainer_examples import make_model
from transformers import AutoModelForCausalLM
from transformers.models.deepseek_v2 import DeepseekV2Config

from rlx.config.memory import CPU_BLOCK
from rlx.config.schema_model import CPU_WIDTHS
from rlx.models.load import load_policy
from rlx.models.tiny import VOCABULARY, build_tokenizer
from rlx.trace import Turn
from rlx.weights.publish import Publisher

pytestmark = [pytest.mark.slow, pytest.mark.long]
# Logits by the embedding; windows in some layers; queries, keys and values of a head in turn, and a head of another name; experts.
UNLIKE_OTHERS = ("gemma2", "gpt_neox", "olmoe")
SERVED = [name if name in UNLIKE_OTHERS else pytest.param(name, marks=pytest.mark.nightly) for name in sorted(FAMILIES)]
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


def plain(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


@torch.no_grad()
def save_random(name: str, folder: Path) -> None:
    """A random model of the family with its tokenizer, in place of what is in the folder. Its biases and norms are random, too."""
    config, keys = (FAMILIES | LATENT)[name]
    model = make_model(config, **{**keys, **SIZES, **({"head_dim": 64} if name in LATENT else {})})
    torch.manual_seed(1)
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.add_(0.1 * torch.randn_like(parameter))
    for file in folder.iterdir():
        file.unlink()
    model.save_pretrained(folder)
    build_tokenizer(CONTEXT).save_pretrained(folder)


def family(name: str, root: Path, **keys: Any) -> Run:
    """A run whose model is of this family."""
    run = Run(root, tied=False, **keys)
    save_random(name, run.model)
    run.models = {0: plain(run.model)}
    return run


def trained_version(run: Run, version: int) -> Path:
    """Change all weights of the initial model, each by a tenth, and write it as the trainer does."""
    policy = load_policy(str(run.model), ALONE, dtype="float32")
    with torch.no_grad():
        for parameter in policy.hf.parameters():
            parameter.mul_(1 + 0.1 * version)
    Publisher.of(policy, ALONE, run.paths, source=str(run.model), dtype=torch.float32).ensure(version)
    policy.hf.set_attn_implementation("eager")
    run.models[version] = policy.hf.eval()
    return run.paths.weights_of(version)


def served(run: Run, *folders: Path) -> tuple[list[Turn], float]:
    """Completions of the initial model and of versions 1, 2, …; and the share of the last one's weights that was compared."""

    async def scene(client: Servers) -> tuple[list[Turn], float]:
        turns = await sample_all(client, prompts(3))
        for version, folder in enumerate(folders, 1):
            await client.update(folder, version)
            turns += await sample_all(client, prompts(3))
        return turns, client.fleet.compared

    try:
        run.start()
        return run.talk(scene, verify_every=1)
    finally:
        run.stop()


@pytest.mark.parametrize("name", SERVED)
def test_versions_of_a_family_are_served_as_they_were_trained(name: str, tmp_path: Path) -> None:
    run = family(name, tmp_path)
    turns, compared = served(run, trained_version(run, 1), trained_version(run, 2))
    assert versions_of(turns) == {0, 1, 2}
    assert run.worst(turns) < EXACT
    assert compared > 0.99


def test_a_version_without_the_rotary_table_that_its_initial_model_stores_is_served_as_it_was_trained(tmp_path: Path) -> None:
    run = family("llama", tmp_path)
    weights = load_file(run.model / "model.safetensors")
    table = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(16)}
    save_file(weights | table, run.model / "model.safetensors", metadata={"format": "pt"})
    turns, compared = served(run, trained_version(run, 1))
    assert versions_of(turns) == {0, 1}
    assert run.worst(turns) < EXACT
    assert compared > 0.99


@pytest.mark.parametrize("equal", [pytest.param(True, marks=pytest.mark.nightly), False], ids=["equal", "different"])
def test_a_tied_model_whose_files_store_a_head_is_served_as_it_is_trained(equal: bool, tmp_path: Path) -> None:
    """Equal: the trainer ties the head, and publishes it once. Different: both untie it and use the stored head, from version 0 on."""
    run = Run(tmp_path, tied=True)
    embedding, file = run.models[0].get_input_embeddings().weight.detach(), run.model / "model.safetensors"
    head = embedding.clone() if equal else embedding.flip(0).contiguous()
    save_file(load_file(file) | {"lm_head.weight": head}, file, metadata={"format": "pt"})
    policy = load_policy(str(run.model), ALONE, dtype="float32")
    policy.hf.set_attn_implementation("eager")
    run.models = {0: policy.hf.eval()}
    folder = trained_version(run, 1)
    assert ("lm_head.weight" in load_file(folder / "model.safetensors")) is not equal
    turns, compared = served(run, folder)
    assert versions_of(turns) == {0, 1}
    assert run.worst(turns) < EXACT
    assert compared > 0.99


@pytest.mark.nightly
def test_a_dense_model_with_latent_attention_serves_a_version_as_a_server_that_began_with_it(tmp_path: Path) -> None:
    """The engine decodes with matrices that it derives from a weight. On a CPU its log-probabilities are not those of transformers
    (docs/models.md), so those of version 1 are compared with another server's."""
    run, other = family("deepseek_v2", tmp_path / "updated"), Run(tmp_path / "began", tied=False)
    folder = trained_version(run, 1)
    shutil.rmtree(other.model)
    shutil.copytree(folder, other.model)
    (version_1, _), (began, _) = served(run, folder), served(other)
    assert all(map(same, version_1[3:], began))


@pytest.mark.nightly
@pytest.mark.parametrize("name", sorted(FAMILIES.keys() - {"gpt2", "gpt_neox", "glm4"}))  # docs/lora.md has what these lack
def test_adapters_of_a_family_are_served_as_they_were_trained(name: str, tmp_path: Path) -> None:
    run = family(name, tmp_path, lora=LORA)
    turns, _ = served(run, run.version(1))
    assert versions_of(turns) == {0, 1}
    assert run.worst(turns) < EXACT


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
