"""Policy versions on disk can be loaded, are complete or absent, and every damaged byte is detected."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from trainer_examples import VOCABULARY, make_model
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.models.gpt2 import GPT2Config
from transformers.models.llama import LlamaConfig
from transformers.models.qwen3_moe import Qwen3MoeConfig

from rlx.models.policy import PolicyModel
from rlx.models.tiny import build_tokenizer
from rlx.parallel.mesh import one_process
from rlx.paths import COMPLETE, RunPaths
from rlx.weights import files
from rlx.weights.files import ModelFiles, WeightsError, latest_version, prune, verify
from rlx.weights.publish import Publisher

MODELS = {
    "qwen3_tied": lambda: make_model(tie_word_embeddings=True),
    "llama_untied": lambda: make_model(LlamaConfig, tie_word_embeddings=False),
    "gpt2": lambda: make_model(GPT2Config, n_embd=16, n_layer=2, n_head=4, n_positions=128),
    "qwen3_moe": lambda: make_model(Qwen3MoeConfig, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16),
}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A model folder like that of version 0."""
    folder = tmp_path / "initial"
    make_model(tie_word_embeddings=True).save_pretrained(folder)
    build_tokenizer(128).save_pretrained(folder)
    return folder


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    return RunPaths(tmp_path / "run")


def save(hf, source: Path, paths: RunPaths, version: int, dtype: str = "float32") -> Path:
    static = ModelFiles.read(source, hf, dtype)
    publisher = Publisher(PolicyModel(hf), one_process("cpu"), paths, static, getattr(torch, dtype))
    publisher.gather(version)
    publisher.announce(version)
    publisher.close()
    return paths.weights_of(version)


@pytest.mark.parametrize("name", MODELS)
def test_a_saved_version_loads_as_the_same_model(name, source, paths):
    hf = MODELS[name]()
    folder = save(hf, source, paths, 7)
    assert folder == paths.weights_of(7)
    assert verify(folder)["version"] == 7
    loaded, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    ids = torch.randint(3, VOCABULARY, (2, 9))
    torch.testing.assert_close(loaded(ids).logits, hf.set_attn_implementation("sdpa") or hf(ids).logits, rtol=1e-5, atol=1e-6)


def test_tied_weights_are_saved_once_and_the_tokenizer_comes_along(source, paths):
    folder = save(make_model(tie_word_embeddings=True), source, paths, 1)
    with safe_open(folder / "model.safetensors", "pt") as file:
        names = list(file.keys())
    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names
    assert AutoTokenizer.from_pretrained(folder).apply_chat_template([{"role": "user", "content": "ab"}], tokenize=True)
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    assert config["dtype"] == "float32"


def test_experts_are_saved_under_published_names(source, paths):
    folder = save(MODELS["qwen3_moe"](), source, paths, 1)
    with safe_open(folder / "model.safetensors", "pt") as file:
        assert "model.layers.0.mlp.experts.3.gate_proj.weight" in set(file.keys())


def test_large_models_are_saved_in_several_files_with_an_index(source, paths, monkeypatch):
    monkeypatch.setattr(files, "SHARD_BYTES", 5000)
    hf = MODELS["llama_untied"]()
    folder = save(hf, source, paths, 1)
    shards = sorted(folder.glob("*.safetensors"))
    assert len(shards) > 2
    assert shards[0].name == f"model-00001-of-{len(shards):05d}.safetensors"
    verify(folder)
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    for name, tensor in hf.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name


def test_every_damage_is_seen_and_named(source, paths):
    folder = save(make_model(tie_word_embeddings=True), source, paths, 3)
    weights = folder / "model.safetensors"
    good = weights.read_bytes()

    weights.write_bytes(good[:-1])
    with pytest.raises(WeightsError, match=rf"model\.safetensors: expected {len(good)} bytes, found {len(good) - 1}"):
        verify(folder)
    for position in (0, good.index(b"model.norm.weight"), good.index(b"F32"), len(good) // 2, len(good) - 1):
        weights.write_bytes(good[:position] + bytes([good[position] ^ 1]) + good[position + 1 :])
        with pytest.raises(WeightsError, match=r"model\.safetensors: expected checksum \w{16}, found \w{16}; its \d+ bytes are damaged"):
            verify(folder)
    (folder / "config.json").write_bytes((folder / "config.json").read_bytes()[:-1] + b" ")
    weights.write_bytes(good)
    with pytest.raises(WeightsError, match=r"config\.json: expected checksum \w{16}, found \w{16}; its \d+ bytes are damaged"):
        verify(folder)
    assert verify(folder, digests=False)["version"] == 3
    folder = save(make_model(tie_word_embeddings=True), source, paths, 3)
    weights.unlink()
    with pytest.raises(WeightsError, match="found no such file"):
        verify(folder)
    weights.write_bytes(good)
    assert verify(folder)["version"] == 3

    (folder / COMPLETE).write_text("{")
    with pytest.raises(WeightsError, match="not a manifest"):
        verify(folder)
    (folder / COMPLETE).unlink()
    with pytest.raises(WeightsError, match="no file COMPLETE"):
        verify(folder)


def test_a_version_is_replaced_by_a_later_attempt(source, paths):
    save(make_model(seed=1), source, paths, 1)
    hf = make_model(seed=2)
    folder = save(hf, source, paths, 1)
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    assert torch.equal(loaded.model.norm.weight, hf.model.norm.weight)
    assert torch.equal(loaded.model.embed_tokens.weight, hf.model.embed_tokens.weight)


def test_old_versions_are_deleted_but_not_the_protected_ones(paths):
    assert latest_version(paths) is None
    for version in (1, 2, 9, 10, 11):
        paths.weights_of(version).mkdir(parents=True)
        (paths.weights_of(version) / COMPLETE).write_text("{}")
    paths.weights_of(12).mkdir()  # not complete
    assert latest_version(paths) == 11
    assert prune(paths, keep_last=2, protect={2}) == [1, 9]
    assert sorted(path.name for path in paths.weights.iterdir()) == ["step_10", "step_11", "step_12", "step_2"]


def test_of_a_version_that_a_user_has_moved_and_linked_only_the_link_goes(paths, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    for version in range(3):
        paths.weights_of(version).mkdir(parents=True)
        (paths.weights_of(version) / COMPLETE).write_text("{}")
    paths.weights_of(0).rename(elsewhere)
    paths.weights_of(0).symlink_to(elsewhere)
    prune(paths, keep_last=1)
    assert not paths.weights_of(0).is_symlink()
    assert (elsewhere / COMPLETE).exists()
