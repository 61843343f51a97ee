"""Muon against torch's own, and the state that it keeps."""

from __future__ import annotations

import pytest
import torch
from trainer_examples import make_model
from transformers.models.cohere import CohereConfig
from transformers.models.gpt2 import GPT2Config
from transformers.models.gpt_oss import GptOssConfig
from transformers.models.jamba import JambaConfig
from transformers.models.qwen2_moe import Qwen2MoeConfig

from rlx.config.schema import LoraConfig
from rlx.models.lora import add_adapters
from rlx.models.policy import PolicyModel
from rlx.train.muon import Muon, groups_of


def test_muon_steps_as_torchs_on_the_matrices_of_layers_and_as_adamw_on_the_rest():
    hf, other = make_model(), make_model()
    keys = {"lr": 1e-2, "weight_decay": 0.1}
    groups = groups_of(PolicyModel(hf).layers, hf)
    ours = Muon(groups, betas=(0.9, 0.95), **keys)
    matrices, rest = ([p for p in other.parameters() if any(p.shape == q.shape and torch.equal(p, q) for q in g["params"])] for g in groups)
    assert len(matrices) == 2 * 7, "of two layers"
    theirs = [
        torch.optim.Muon(matrices, nesterov=True, adjust_lr_fn="match_rms_adamw", **keys),
        torch.optim.AdamW(rest, betas=(0.9, 0.95), **keys),
    ]
    for seed in range(3):
        for model, optimizers in ((hf, [ours]), (other, theirs)):
            generator = torch.Generator().manual_seed(seed)
            for parameter in model.parameters():
                parameter.grad = torch.randn(parameter.shape, generator=generator)
            for optimizer in optimizers:
                optimizer.step()
    for (name, a), b in zip(hf.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7, msg=name)


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_momentum_of_muon_is_the_mean_of_gradients(dtype: torch.dtype, nesterov: bool):
    """torch's orthogonalisation works in bfloat16, in place if its argument is that already."""
    weight = torch.nn.Parameter(torch.zeros(8, 4, dtype=dtype))
    optimizer = Muon(
        [{"params": [weight], "matrices": True}], lr=1e-2, weight_decay=0.0, betas=(0.9, 0.95), momentum=0.9, nesterov=nesterov
    )
    expected = torch.zeros(8, 4, dtype=torch.float64)
    for seed in range(6):
        weight.grad = torch.randn(8, 4, generator=torch.Generator().manual_seed(seed)).to(dtype)
        expected += 0.1 * (weight.grad.double() - expected)
        optimizer.step()
    found = optimizer.state[weight]["momentum_buffer"].double()
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.01)


EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
ATTENTION = {f"self_attn.{part}_proj.weight" for part in "qkvo"}
FEED_FORWARD = {f"{part}_proj.weight" for part in ("gate", "up", "down")}
JAMBA = {
    "num_hidden_layers": 2, "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 4, "expert_layer_offset": 3,
    "use_mamba_kernels": False, "mamba_d_state": 4, "mamba_d_conv": 2, "mamba_dt_rank": 4,
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "keys", "wanted", "stacks"),
    [
        (
            GptOssConfig,
            {"num_local_experts": 4, "num_experts_per_tok": 2},
            ATTENTION | {"mlp.router.weight"},
            {"mlp.experts.gate_up_proj_bias", "mlp.experts.down_proj_bias"},
        ),
        (
            CohereConfig,
            {"use_qk_norm": True},
            ATTENTION | {f"mlp.{name}" for name in FEED_FORWARD},
            {"self_attn.q_norm.weight", "self_attn.k_norm.weight"},
        ),
        (
            Qwen2MoeConfig,
            EXPERTS,
            ATTENTION | {"mlp.gate.weight"} | {f"mlp.shared_expert.{name}" for name in FEED_FORWARD},
            {"mlp.shared_expert_gate.weight"},
        ),
        (
            GPT2Config,
            {"n_embd": 16, "n_layer": 2, "n_head": 4},
            {f"{n}.weight" for n in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")},
            set(),
        ),
        (
            JambaConfig,
            JAMBA,
            ATTENTION | {f"feed_forward.{name}" for name in FEED_FORWARD} | {f"mamba.{n}_proj.weight" for n in ("in", "x", "dt", "out")},
            {"mamba.A_log"},
        ),
    ],
)
def test_stacks_of_vectors_are_no_matrices(config: type, keys: dict, wanted: set[str], stacks: set[str]) -> None:
    hf = make_model(config, **keys)
    matrices, others = names_of(hf)
    assert matrices == wanted
    assert stacks <= others
    two = {name for name, parameter in PolicyModel(hf).layers.named_parameters() if parameter.ndim == 2}
    assert {name.partition(".")[2] for name in two} == wanted | stacks, "else this tests less than it says"


def test_adapters_are_matrices() -> None:
    hf = make_model()
    add_adapters(hf, LoraConfig(rank=2), torch.float32)
    matrices, others = names_of(hf)
    assert {name.rpartition(".")[2] for name in matrices} == {"lora_A", "lora_B"}
    assert not others


def names_of(hf: torch.nn.Module) -> tuple[set[str], set[str]]:
    """(what Muon trains, what AdamW trains) in the layers, by the names within a layer."""
    layers = PolicyModel(hf).layers
    first, *rest = groups_of(layers, hf)
    assert first["matrices"]
    assert not any(group["matrices"] for group in rest)
    of = {id(parameter): name.partition(".")[2] for name, parameter in layers.named_parameters()}
    others = {of[id(parameter)] for group in rest for parameter in group["params"] if id(parameter) in of}
    return {of[id(parameter)] for parameter in first["params"]}, others
