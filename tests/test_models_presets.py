"""The shipped models, built from the classes of their families on the meta device: sizes, and which divisions of ranks they allow."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import test_models_families
import torch
import torch.distributed as dist
import yaml
from launch_configs import config
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoModelForCausalLM
from transformers.models.gemma3 import Gemma3TextConfig
from transformers.models.llama import LlamaConfig
from transformers.models.mistral import MistralConfig
from transformers.models.olmoe import OlmoeConfig
from transformers.models.qwen2 import Qwen2Config
from transformers.models.qwen3 import Qwen3Config
from transformers.models.qwen3_moe import Qwen3MoeConfig

from rlx.config.checks import check
from rlx.config.load import compose
from rlx.config.memory import size as size_of
from rlx.config.memory import trainer_memory
from rlx.config.presets import conf_directory
from rlx.config.roots import TRAIN
from rlx.models.split import apply_expert_parallel, apply_tensor_parallel
from rlx.parallel.row import Axis, SequenceParallelGroup
from rlx.plan.explain import explain
from rlx.plan.make import make_plan

MOST = 16  # ranks
TIED: dict[str, Any] = {"tie_word_embeddings": True}
UNTIED: dict[str, Any] = {"tie_word_embeddings": False}
FAMILIES: dict[str, tuple[type, dict[str, Any]]] = {
    # the class of a preset, and what its configuration does not say; from the models' own config.json
    "gemma3_1b": (Gemma3TextConfig, TIED),
    "llama3_1_8b": (LlamaConfig, UNTIED),
    "llama3_2_1b": (LlamaConfig, TIED),
    "mistral_7b": (MistralConfig, UNTIED),
    "olmoe_1b_7b": (OlmoeConfig, UNTIED),
    "qwen2_5_0_5b": (Qwen2Config, TIED),
    "qwen3_0_6b": (Qwen3Config, TIED),
    "qwen3_1_7b": (Qwen3Config, TIED),
    "qwen3_4b": (Qwen3Config, TIED),
    "qwen3_8b": (Qwen3Config, UNTIED),
    "qwen3_14b": (Qwen3Config, UNTIED),
    "qwen3_32b": (Qwen3Config, UNTIED),
    "qwen3_30b_a3b": (Qwen3MoeConfig, UNTIED),
    "smollm2_135m": (LlamaConfig, TIED),
}
OTHERS = {"endpoint", "named", "tiny", "tiny_trained"}  # of no published architecture


def preset(name: str) -> dict[str, Any]:
    """The section `model` of a preset."""
    return yaml.safe_load((conf_directory() / "model" / f"{name}.yaml").read_text())["model"]


def on_meta(name: str, *, layers: int | None = None) -> Any:
    """The preset's model, without memory for its weights."""
    family, more = FAMILIES[name]
    model = preset(name)
    same = (
        *("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size"),
        *("num_experts", "num_experts_per_tok"),
    )
    sizes = {key: model[key] for key in same if key in model}
    if "moe_intermediate_size" in inspect.signature(family).parameters:
        sizes["moe_intermediate_size"] = sizes["intermediate_size"]
    own = family(num_hidden_layers=layers or model["num_layers"], **sizes, **more)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(own)


def test_every_model_is_here():
    assert FAMILIES.keys() | OTHERS == {file.stem for file in (conf_directory() / "model").glob("*.yaml")}


@pytest.mark.parametrize("name", FAMILIES)
def test_a_presets_sizes_are_those_of_its_family(name):
    """A wrong size gives another number of parameters."""
    shape = {key: preset(name)[key] for key in ("num_parameters", "num_layers")}
    one, two = (sum(p.numel() for p in on_meta(name, layers=layers).parameters()) for layers in (1, 2))
    assert one + (two - one) * (shape["num_layers"] - 1) == shape["num_parameters"]


def test_every_presets_architecture_is_also_trained_and_exported_at_tiny_width():
    tiny = {config for config, _ in test_models_families.FAMILIES.values()}
    assert {family for family, _ in FAMILIES.values()} <= tiny


@pytest.mark.parametrize("name", FAMILIES)
def test_a_preset_is_planned_at_full_size_on_gpus(name, tmp_path):
    """Parameters, gradients and AdamW's moments in float32 alone are 16 bytes for each parameter, over the trainer's four ranks."""
    cfg = compose([f"model={name}", "hardware=node8", "env=math", "dry_run=true"], {}, TRAIN).cfg
    memory = trainer_memory(cfg)
    assert memory.states - memory.context == pytest.approx(16 * cfg.model.num_parameters / 4)
    assert memory.device > memory.states + memory.layers
    text = explain(cfg, make_plan(cfg, tmp_path), {}, [], str(tmp_path))
    assert f"trainer, each GPU: {size_of(memory.device)}\n" in text


@pytest.fixture(scope="module")
def meshes() -> Iterator[dict[int, Any]]:
    """For each size a mesh in this process, whose other ranks do not exist."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=MOST)
    try:
        yield {size: init_device_mesh("cpu", (MOST // size, size), mesh_dim_names=("data", "own"))["own"] for size in (2, 4, 8, MOST)}
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("name", FAMILIES)
def test_what_a_preset_cannot_be_divided_into_is_refused_before_a_model_is_loaded(name, meshes):
    """Every model that passes the checks is then divided; every one that they refuse cannot be."""
    for axis in ("tp", "ep", "cp"):
        for size, mesh in meshes.items():
            cfg = config("node8x4", model=preset(name), trainer={"micro_batch_tokens": 8192, axis: size})
            assert cfg.trainer_ranks % size == 0
            problems = [problem.text for problem in check(cfg) if f"trainer.{axis}={size}" in problem.text]
            assert bool(problems) == (not divides(on_meta(name, layers=1), axis, size, mesh)), (axis, size, problems)
            assert all(f"trainer.{axis}" in text.split("fix: ")[1] for text in problems), problems


def divides(hf: Any, axis: str, size: int, mesh: Any) -> bool:
    """Whether the ranks of an axis can have equal parts, by what divides the model itself."""
    if axis == "cp":  # heads are exchanged in training; nothing is divided before
        return hf.config.num_attention_heads % size == 0
    group = Axis(None, 0, size)
    try:
        if axis == "tp":
            apply_tensor_parallel(hf, SequenceParallelGroup(group, tensor=group), mesh)
        else:
            apply_expert_parallel(hf, mesh, mesh)
    except ValueError:
        return False
    return True
