"""Which models tensor and expert parallelism divide. `test_train_ranks.py` trains divided ones."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from trainer_examples import make_model
from transformers.models.gemma3n import Gemma3nTextConfig
from transformers.models.gpt2 import GPT2Config
from transformers.models.gpt_oss import GptOssConfig
from transformers.models.llama import LlamaConfig
from transformers.models.olmoe import OlmoeConfig

from rlx.models.experts import split_experts
from rlx.models.load import check_division
from rlx.models.split import split_layers
from rlx.parallel.mesh import Mesh
from rlx.parallel.row import Axis, Row


@pytest.mark.parametrize(
    ("config", "keys", "why"),
    [
        (
            GPT2Config,
            {"n_embd": 16, "n_layer": 2, "n_head": 4},
            r"no plan that divides the attention of GPT2LMHeadModel by heads; set trainer",
        ),
        (OlmoeConfig, {"num_experts": 4, "num_experts_per_tok": 2}, "no plan that divides the attention of OlmoeForCausalLM by heads"),
        (
            GptOssConfig,
            {"num_local_experts": 4, "num_experts_per_tok": 2},
            "no plan that divides the attention of GptOssForCausalLM by heads",
        ),
        (
            Gemma3nTextConfig,
            {
                "vocab_size_per_layer_input": 40,
                "hidden_size_per_layer_input": 8,
                "layer_types": ["full_attention"] * 2,
                "num_kv_shared_layers": 0,
                "activation_sparsity_pattern": [0.95, 0.0],
            },
            r"trainer\.tp=2 would change the results of Gemma3nForCausalLM: Gemma3nTextMLP computes its sparsity over all inner units",
        ),
        (LlamaConfig, {"num_key_value_heads": 1}, r"trainer\.tp=2 does not divide num_key_value_heads=1 of LlamaForCausalLM"),
    ],
    ids=["without_a_plan", "norms_over_all_heads", "sinks", "sparsity", "one_key_head"],
)
def test_a_model_that_cannot_be_divided_by_heads_is_refused(config, keys, why):
    hf, group = make_model(config, **keys), Axis(None, 0, 2)
    with pytest.raises(ValueError, match=why):
        split_layers(hf, Row(group, tensor=group), SimpleNamespace(size=lambda: 2))  # type: ignore[arg-type]


def test_a_model_without_experts_or_with_an_odd_number_of_them_is_refused():
    group: Any = SimpleNamespace(size=lambda: 2)
    with pytest.raises(ValueError, match=r"trainer\.ep=2: transformers has no plan that divides experts of LlamaForCausalLM"):
        split_experts(make_model(LlamaConfig), group, group)
    split_experts(make_model(LlamaConfig), group, group, dense=True)
    with pytest.raises(ValueError, match=r"trainer\.ep=2 does not divide the 3 experts of OlmoeForCausalLM"):
        split_experts(make_model(OlmoeConfig, num_experts=3, num_experts_per_tok=2), group, group)


def test_a_model_without_experts_stays_as_it_is():
    split_experts(make_model(LlamaConfig), SimpleNamespace(size=lambda: 2), SimpleNamespace(size=lambda: 1), dense=True)


def test_a_teacher_that_cannot_be_divided_is_named_and_a_dense_one_keeps_its_layers(tmp_path):
    make_model(LlamaConfig, num_key_value_heads=1).save_pretrained(tmp_path)
    two: Any = SimpleNamespace(size=lambda: 2)
    group, device = Axis(None, 0, 2), torch.device("cpu")
    check_division("ref.name", str(tmp_path), Mesh(device=device, expert=two, alone=two))
    with pytest.raises(ValueError, match=rf"^ref\.name={tmp_path}: trainer\.tp=2 does not divide num_key_value_heads=1"):
        check_division("ref.name", str(tmp_path), Mesh(device=device, row=Row(group, tensor=group), tensor=two))
