"""The check of a loaded mixture of experts: experts that rounding chooses are no error, and anything else is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from trainer_examples import make_model
from transformers.models.deepseek_v3 import DeepseekV3Config
from transformers.models.gpt_oss import GptOssConfig
from transformers.models.qwen3_moe import Qwen3MoeConfig

from rlx.models.attention import NAME
from rlx.models.load import check_packed_forward
from rlx.models.policy import PolicyModel

pytestmark = pytest.mark.slow

FAMILIES: dict[str, tuple[type, dict[str, Any]]] = {
    "gpt_oss": (GptOssConfig, {"num_local_experts": 8, "num_experts_per_tok": 2, "num_hidden_layers": 4}),
    "qwen3_moe": (Qwen3MoeConfig, {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "num_hidden_layers": 4}),
    "deepseek_v3": (
        DeepseekV3Config,
        {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 0, "head_dim": 4,
         "moe_intermediate_size": 16, "num_key_value_heads": 4, "num_hidden_layers": 4, "kv_lora_rank": 8, "q_lora_rank": None,
         "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8},
    ),
}  # fmt: skip


def made(name: str, seed: int, dtype: torch.dtype) -> PolicyModel:
    config, keys = FAMILIES[name]
    return PolicyModel(make_model(config, seed=seed, **keys).to(dtype))


def refused(model: PolicyModel) -> bool:
    try:
        check_packed_forward(model)
    except ValueError as error:
        return "its packed forward differs from its own" in str(error)
    return False


@pytest.mark.parametrize("name", FAMILIES)
def test_experts_that_rounding_chooses_are_no_error(name: str) -> None:
    assert [seed for seed in range(24) if refused(made(name, seed, torch.bfloat16))] == []


def negated(module: Any, inputs: Any, output: Any) -> Any:
    return (-output[0], *output[1:]) if isinstance(output, tuple) else -output


def other_experts(module: Any, inputs: Any) -> Any:
    return (-inputs[0], *inputs[1:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("part", ["attention", "experts", "router", "head"])
def test_a_wrong_packed_forward_is_still_refused(name: str, part: str, dtype: torch.dtype) -> None:
    for seed in range(3):
        model = made(name, seed, dtype)

        def when_packed(change: Callable[..., Any], config: Any = model.hf.config) -> Callable[..., Any]:
            return lambda module, *given: change(module, *given) if config._attn_implementation == NAME else None

        for layer in model.layers:  # one alone may change less than the tolerance of 16 bits
            if part == "attention":
                layer.self_attn.o_proj.register_forward_hook(when_packed(negated))
            elif part == "experts":
                layer.mlp.experts.register_forward_hook(when_packed(negated))
            elif part == "router":
                getattr(layer.mlp, "router" if name == "gpt_oss" else "gate").register_forward_pre_hook(when_packed(other_experts))
        if part == "head":
            model.logit_scale = 0.5
        assert refused(model), seed
