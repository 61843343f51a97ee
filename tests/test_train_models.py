"""Packed rows of every architecture have the log-probabilities and gradients of samples alone; other models are refused."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from trainer_examples import make_model, make_samples, make_trainer, step_batch
from transformers.models.bloom import BloomConfig
from transformers.models.cohere import CohereConfig
from transformers.models.cohere2 import Cohere2Config
from transformers.models.deepseek_v3 import DeepseekV3Config
from transformers.models.ernie4_5_moe import Ernie4_5_MoeConfig
from transformers.models.gemma2 import Gemma2Config
from transformers.models.gpt2 import GPT2Config
from transformers.models.gpt_oss import GptOssConfig
from transformers.models.granite import GraniteConfig
from transformers.models.hyperclovax import HyperCLOVAXConfig
from transformers.models.llama import LlamaConfig
from transformers.models.llama4 import Llama4TextConfig
from transformers.models.mistral import MistralConfig
from transformers.models.nanochat import NanoChatConfig
from transformers.models.phi import PhiConfig
from transformers.models.qwen3 import Qwen3Config
from transformers.models.qwen3_moe import Qwen3MoeConfig
from transformers.models.qwen3_next import Qwen3NextConfig

from rlx.data.packing import pack
from rlx.kernels.logprob import logprob
from rlx.models.attention import NAME
from rlx.models.layout import build_layout
from rlx.models.load import check_packed_forward
from rlx.models.policy import PolicyModel
from rlx.parallel.row import Axis, SequenceParallelGroup
from rlx.types import MicroBatch, TrainingSample

pytestmark = pytest.mark.slow

GPT2 = {"n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 128}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
ARCHITECTURES = {
    "llama": (LlamaConfig, {}),
    "qwen3_tied": (Qwen3Config, {"tie_word_embeddings": True}),
    "mistral_sliding_window": (MistralConfig, {"sliding_window": 5}),
    "gemma2_softcaps_and_windows": (Gemma2Config, {"sliding_window": 5, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 1.0}),
    "gpt2_learned_positions": (GPT2Config, GPT2),
    "granite_scaled_logits": (GraniteConfig, {"logits_scaling": 3.0}),
    "cohere_scaled_logits": (CohereConfig, {"logit_scale": 0.3}),
    "cohere2_scaled_logits": (Cohere2Config, {"logit_scale": 0.3, "sliding_window": 5}),
    "hyperclovax_scaled_logits": (HyperCLOVAXConfig, {"logits_scaling": 3.0}),
    "nanochat_bounded_logits": (NanoChatConfig, {"final_logit_softcapping": 1.0}),
    "phi_head_bias": (PhiConfig, {}),
    "ernie_head_bias": (Ernie4_5_MoeConfig, {"use_bias": True, "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16}),
    "gpt_oss_sinks": (GptOssConfig, {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 5}),
    "qwen3_moe": (Qwen3MoeConfig, EXPERTS),
    "qwen3_next_recurrent": (
        Qwen3NextConfig,
        EXPERTS | {"shared_expert_intermediate_size": 16, "num_hidden_layers": 4, "linear_num_value_heads": 2, "linear_num_key_heads": 2,
                   "linear_key_head_dim": 8, "linear_value_head_dim": 8},
    ),
    "llama4_chunks": (
        Llama4TextConfig,
        {"num_hidden_layers": 4, "num_local_experts": 4, "intermediate_size_mlp": 32, "interleave_moe_layer_step": 2,
         "attention_chunk_size": 5, "attn_temperature_tuning": True, "floor_scale": 4},
    ),
}  # fmt: skip


def own_log_probabilities(hf, samples: list[TrainingSample]) -> tuple[torch.Tensor, torch.Tensor]:
    """(logp, entropy) of the trainable tokens in order, one sample at a time, by the model's own forward with plain attention."""
    logps, entropies = [], []
    implementation = hf.config._attn_implementation
    hf.set_attn_implementation("eager")
    for sample in samples:
        logits = hf(input_ids=torch.from_numpy(sample.token_ids).long()[None], use_cache=False).logits[0]
        temperature = torch.from_numpy(sample.temperature[1:]).double()[:, None]  # of the token that each position predicts
        log_probs = (logits[:-1].double() / temperature).log_softmax(-1)
        for t in np.flatnonzero(sample.loss_mask):
            logps.append(log_probs[t - 1, sample.token_ids[t]])
            entropies.append(-(log_probs[t - 1].exp() * log_probs[t - 1]).sum())
    hf.set_attn_implementation(implementation)
    return torch.stack(logps), torch.stack(entropies)


def one_row(samples: list[TrainingSample]) -> MicroBatch:
    (mini_batch,) = pack(step_batch(0, [samples]), rank=0, ranks=1, tokens=10_000).mini_batches
    (row,) = mini_batch.micro_batches
    return row


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_packed_log_probabilities_equal_the_models_own(name):
    config_class, keys = ARCHITECTURES[name]
    hf = make_model(config_class, **keys)
    if getattr(hf.get_output_embeddings(), "bias", None) is not None:
        torch.nn.init.normal_(hf.get_output_embeddings().bias)  # it is initialised to zero
    trainer = make_trainer(hf)
    check_packed_forward(trainer.model)
    samples = make_samples(longest=20)
    with torch.no_grad():
        wanted = own_log_probabilities(hf, samples)
    for ours, theirs in zip(trainer.score(one_row(samples)), wanted, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=0, atol=2e-5)
    kind = "rows" if name in ("qwen3_next_recurrent", "llama4_chunks") else "shared"
    assert trainer.model.layout_kind(torch.device("cpu")) == kind


@pytest.mark.parametrize("name", ["llama", "mistral_sliding_window", "gemma2_softcaps_and_windows", "gpt_oss_sinks"])
def test_shared_prompts_give_the_gradients_of_separate_rows(name):
    config_class, keys = ARCHITECTURES[name]
    found = []
    for attention in ("sdpa", "rows"):
        trainer = make_trainer(make_model(config_class, **keys), attention=attention, entropy_coef=0.1)
        trainer.accumulate_gradients(pack(step_batch(0, [make_samples(longest=20)]), rank=0, ranks=1, tokens=10_000).mini_batches[0])
        found.append({name: p.grad for name, p in trainer.model.named_parameters()})
    for parameter, gradient in found[0].items():
        torch.testing.assert_close(gradient, found[1][parameter], rtol=2e-4, atol=2e-6, msg=parameter)


def test_the_head_meets_only_tokens_that_predict_a_trainable_one(monkeypatch):
    met = []

    def counted(hidden, *args, **keys):
        met.append(len(hidden))
        return logprob(hidden, *args, **keys)

    monkeypatch.setattr("rlx.models.policy.logprob", counted)
    row = one_row(make_samples())
    make_trainer(make_model()).score(row)
    assert met == [int(row.loss_mask.sum())]
    assert met[0] < len(row.token_ids)


def test_a_common_prompt_is_computed_once_and_nothing_behind_the_last_trainable_token():
    prompt = np.arange(3, 13, dtype=np.int32)
    samples = [np.concatenate([prompt, np.arange(20 + r, 20 + r + n, dtype=np.int32)]) for r, n in enumerate((4, 6, 5))]
    ids = np.concatenate(samples)
    boundaries = np.cumsum([0, *map(len, samples)])
    mask = np.zeros(len(ids), dtype=bool)
    for start, end in itertools.pairwise(boundaries):
        mask[start + 9 : end - 2] = True  # labels up to the last token but one, so the last two inputs are not needed
    layout = build_layout(ids, boundaries, mask, "shared", "cpu")
    assert layout.num_tokens == 10 + sum(n - 2 for n in (4, 6, 5))
    assert (layout.token_index[mask] >= 0).all()
    computed = layout.token_ids[0].numpy()
    needed = layout.token_index >= 0
    assert (computed[layout.token_index[needed]] == ids[needed]).all()
    positions = np.concatenate([np.arange(len(s)) for s in samples])
    assert (layout.position_ids[0].numpy()[layout.token_index[needed]] == positions[needed]).all()


def computed(samples: list[list[int]]) -> tuple[int, bool]:
    """(computed tokens, whether all attention is plain) of samples whose tokens are all trained."""
    ids = np.concatenate(samples).astype(np.int32)
    layout = build_layout(ids, np.cumsum([0, *map(len, samples)]), np.ones(len(ids), dtype=bool), "shared", "cpu")
    return layout.num_tokens, all(bucket.mask is None for bucket in layout.buckets)


@pytest.mark.parametrize("seed", range(4))
def test_layouts_of_random_trees_attend_to_the_right_tokens(seed):
    """Lists the visible keys of every query and compares them with the definition: earlier tokens of the same sample."""
    rng = np.random.default_rng(seed)
    samples: list[list[int]] = []
    for _ in range(6):  # long and short branches, identical samples, lone samples
        prompt = rng.integers(3, 30, rng.integers(1, 40)).tolist()
        samples += [prompt + rng.integers(3, 6, rng.integers(1, 50)).tolist() for _ in range(rng.integers(1, 9))]
        if rng.random() < 0.5:
            samples.append(list(samples[-1]))
    ids = np.concatenate(samples).astype(np.int32)
    boundaries = np.cumsum([0, *map(len, samples)])
    mask = rng.random(len(ids)) < 0.5
    layout = build_layout(ids, boundaries, mask, "shared", "cpu")
    seen: dict[int, set[int]] = {}
    offset = 0
    for bucket in layout.buckets:
        for window in (None, 7):
            visible = bucket.visible(window)
            visible = bucket.causal() if visible is None else visible
            for s, q in np.ndindex(*bucket.queries.shape):
                query = int(bucket.queries[s, q])
                if int(layout.order[query]) != offset + s * bucket.queries.shape[1] + q:
                    continue  # padding
                keys = bucket.keys[s][visible[s if len(visible) > 1 else 0, 0, q]].tolist()
                assert len(keys) == len(set(keys)), "a key counts twice"
                if window is None:
                    assert query not in seen
                    seen[query] = set(keys)
                else:
                    position = layout.position_ids[0]
                    assert set(keys) == {k for k in seen[query] if position[query] - position[k] < window}
        offset += bucket.queries.numel()
    assert sorted(seen) == list(range(layout.num_tokens))
    for start, end in itertools.pairwise(boundaries):
        for t in range(start, end):
            if layout.token_index[t] >= 0:
                assert seen[int(layout.token_index[t])] == set(layout.token_index[start : t + 1].tolist())


def test_a_model_whose_packed_forward_is_wrong_is_refused():
    bloom = make_model(BloomConfig, n_layer=2, n_head=4)
    with pytest.raises(ValueError, match=r"BloomForCausalLM cannot be trained like this.*Set model\.attention=rows"):
        check_packed_forward(PolicyModel(bloom))
    check_packed_forward(PolicyModel(make_model(BloomConfig, n_layer=2, n_head=4), attention="rows"))
    tampered = PolicyModel(make_model(GraniteConfig, logits_scaling=3.0))
    tampered.logit_scale = 1.0
    with pytest.raises(ValueError, match="head is not supported"):
        check_packed_forward(tampered)


def test_varlen_attention_is_refused_without_cuda():
    with pytest.raises(ValueError, match=r"model\.attention=varlen needs CUDA, but this is cpu"):
        PolicyModel(make_model(), attention="varlen").layout_kind(torch.device("cpu"))


def test_heads_that_varlen_attention_cannot_compute_are_left_to_sdpa():
    def kind(attention: str = "auto", config_class: type = LlamaConfig, **keys) -> str:
        model = PolicyModel(make_model(config_class, **keys), attention=attention, compute_dtype=torch.bfloat16)
        return model.layout_kind(torch.device("cuda"))

    assert kind(head_dim=16) == "varlen"
    assert kind(head_dim=12) == "shared"
    assert kind(head_dim=264) == "shared"
    latent = {"qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "kv_lora_rank": 8, "q_lora_rank": 8, "n_routed_experts": 4}
    assert kind(config_class=DeepseekV3Config, **latent, n_group=1, topk_group=1, num_experts_per_tok=2) == "shared"
    with pytest.raises(ValueError, match=r"varlen cannot compute heads of 264 and values of 264 \(model\.layers\.0\.self_attn\)"):
        kind("varlen", head_dim=264)


def test_rows_of_a_model_that_mixes_tokens_outside_attention_are_not_cut():
    _, keys = ARCHITECTURES["qwen3_next_recurrent"]
    hf = make_model(Qwen3NextConfig, **keys)
    with pytest.raises(ValueError, match=r"trainer\.cp=2 cuts .* Qwen3NextForCausalLM need whole sequences \(linear_attention\); "):
        PolicyModel(hf, row=SequenceParallelGroup(Axis(None, 0, 2), context=Axis(None, 0, 2)))


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
