"""Which models tensor and expert parallelism divide. `test_train_ranks.py` trains divided ones."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from trainer_examples import make_model
from transformers.models.gpt2 import GPT2Config
from transformers.models.gpt_oss import GptOssConfig
from transformers.models.llama import LlamaConfig
from transformers.models.olmoe import OlmoeConfig

from rlx.models.split import split_experts, split_layers
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
        (LlamaConfig, {"num_key_value_heads": 1}, r"trainer\.tp=2 does not divide num_key_value_heads=1 of LlamaForCausalLM"),
    ],
    ids=["without_a_plan", "norms_over_all_heads", "sinks", "one_key_head"],
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
