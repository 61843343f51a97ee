"""Initial models whose files hold more than is trained: servers do without what transformers leaves out, and nothing else."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from trainer_examples import make_model
from transformers import AutoModelForCausalLM
from transformers.models.deepseek_v3 import DeepseekV3Config
from transformers.models.gpt2 import GPT2Config
from transformers.models.llama import LlamaConfig

from rlx.config.load import compose
from rlx.models.load import load_policy
from rlx.models.tiny import build_tokenizer
from rlx.parallel.mesh import one_process
from rlx.paths import RunPaths
from rlx.weights.publish import Publisher
from rlx.weights.shapes import check_shapes, manifest, tensor_shapes

LATENT = {
    "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8,
    "num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 16,
}  # fmt: skip
FURTHER, TABLE = "model.layers.61.shared_head.norm.weight", "model.layers.0.self_attn.rotary_emb.inv_freq"
MORE: dict[str, tuple[type, dict[str, Any], str]] = {
    "a layer that predicts further tokens": (DeepseekV3Config, LATENT, FURTHER),
    "a rotary table": (LlamaConfig, {}, TABLE),
}


def saved(folder: Path, config: type, keys: dict[str, Any], more: dict[str, torch.Tensor], prefix: str = "") -> str:
    """A model folder with more tensors than the model has, its own without the `prefix` of their names."""
    make_model(config, tie_word_embeddings=False, **keys).save_pretrained(folder)
    build_tokenizer(64).save_pretrained(folder)
    weights = {name.removeprefix(prefix): tensor for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(weights | more, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


def begun(tmp_path: Path, source: str, *overrides: str) -> tuple[Publisher, RunPaths]:
    """The trainer's end of a run that begins with `source`."""
    cfg = compose(["hardware=cpu", "seq_len=60", "sampling.max_tokens=8", *overrides], environ={}).cfg
    mesh, paths = one_process("cpu"), RunPaths(tmp_path / "run")
    model = load_policy(source, mesh, dtype="float32", lora=cfg.lora if cfg.lora.on else None)
    return Publisher.from_config(cfg, model, mesh, paths, source, lambda *_: nullcontext()), paths


@pytest.mark.parametrize("what", MORE)
def test_versions_without_what_transformers_leaves_out_are_served_but_not_without_a_trained_tensor(what: str, tmp_path: Path) -> None:
    config, keys, name = MORE[what]
    source = saved(tmp_path / "model", config, keys, {name: torch.ones(2)})
    served = tensor_shapes(Path(source))
    broadcast, paths = begun(tmp_path, source)
    broadcast.ensure(1)
    trained, left_out = tensor_shapes(paths.weights_of(1)), manifest(paths.weights_of(1))["untrained"]
    check_shapes("version 1", trained, served, False, left_out)
    with pytest.raises(ValueError, match=r"is not this model; missing: another\.weight$"):
        check_shapes("version 1", trained, served | {"another.weight": (2,)}, False, left_out)
    broadcast.close()


def test_a_model_whose_versions_its_servers_would_refuse_is_refused_before_the_first_step_and_can_be_converted(tmp_path: Path) -> None:
    """GPT-2's files on the hub have names without the prefix `transformer.`, which versions have."""
    source = saved(tmp_path / "model", GPT2Config, {"n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 128}, {}, "transformer.")
    words = rf"(?s)start with {source} would refuse .* missing: h\.0\..*; unknown: transformer\.h\.0.*save_pretrained\(FOLDER\)"
    with pytest.raises(ValueError, match=words):
        begun(tmp_path, source)
    begun(tmp_path, source, "inference.base_url=[http://127.0.0.1:1]")  # servers that already run may have other files of the model
    AutoModelForCausalLM.from_pretrained(source, dtype="auto").save_pretrained(tmp_path / "converted")
    build_tokenizer(64).save_pretrained(tmp_path / "converted")
    begun(tmp_path, str(tmp_path / "converted"))


def test_adapters_of_layers_that_the_servers_files_call_otherwise_are_refused_before_the_first_step(tmp_path: Path) -> None:
    source = saved(tmp_path / "model", LlamaConfig, {}, {TABLE: torch.ones(2)})
    adapters = ("lora.rank=4", "lora.target_modules=[q_proj]")
    begun(tmp_path, source, *adapters)
    bare = saved(tmp_path / "bare", LlamaConfig, {}, {}, "model.")
    with pytest.raises(ValueError, match=r"would refuse .*a version holds no adapters for this model: base_model\.model\.model\.layers\.0"):
        begun(tmp_path, bare, *adapters)
