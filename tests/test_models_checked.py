"""Models that cannot be trained, or not as they are asked for, are refused."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from trainer_examples import SIZES, VOCABULARY, make_model, make_sample, step_batch
from transformers import AutoModelForCausalLM
from transformers.models.doge import DogeConfig
from transformers.models.gemma2 import Gemma2Config
from transformers.models.gemma3n import Gemma3nTextConfig
from transformers.models.gpt2 import GPT2Config
from transformers.models.gpt_oss import GptOssConfig
from transformers.models.llama import LlamaConfig
from transformers.models.llama4 import Llama4Config, Llama4ForConditionalGeneration, Llama4TextConfig
from transformers.models.mistral import MistralConfig
from transformers.models.olmoe import OlmoeConfig
from transformers.models.phi3 import Phi3Config
from transformers.models.phimoe import PhimoeConfig
from transformers.models.qwen2 import Qwen2Config
from transformers.models.qwen2_moe import Qwen2MoeConfig
from transformers.models.qwen3 import Qwen3Config

from rlx.config.load import compose, to_yaml
from rlx.config.schema import AcConfig, LossTerms
from rlx.data.packing import pack
from rlx.losses.base import Objective
from rlx.losses.sft import sft
from rlx.models.load import load_policy
from rlx.models.policy import PolicyModel
from rlx.models.split import apply_expert_parallel, apply_tensor_parallel
from rlx.models.tiny import build_tokenizer
from rlx.parallel.mesh import one_process
from rlx.parallel.row import Axis, SequenceParallelGroup
from rlx.paths import RunPaths
from rlx.shared.member import HostedRun
from rlx.train.build import policy_of
from rlx.train.step import PolicyTrainer
from rlx.types import TrainingSample

WINDOW = 12  # more than the samples of the check have, less than the tests'
LOOPED = {"num_hidden_layers": 2, "H_cycles": 2, "L_cycles": 2, "num_key_value_heads": 4, "head_dim": 4}
STREAMS = {
    "num_hidden_layers": 4, "num_kv_shared_layers": 2, "layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 5,
    "vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 8, "laurel_rank": 4, "activation_sparsity_pattern": [0.5] * 4,
    "intermediate_size": [32] * 4,
}  # fmt: skip
EXPERTS = {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
WINDOWS: dict[str, tuple[type, dict[str, Any]]] = {
    "phimoe": (PhimoeConfig, {"num_local_experts": 4, "sliding_window": WINDOW}),
    "qwen2_moe": (Qwen2MoeConfig, EXPERTS | {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2}),
}


LONGROPE = {
    "rope_parameters": {"rope_theta": 1e4, "rope_type": "longrope", "short_factor": [1.0] * 2, "long_factor": [2.0] * 2},
    "original_max_position_embeddings": WINDOW, "head_dim": 4,
}  # fmt: skip


def saved(tmp_path: Path, config: type, **keys: Any) -> str:
    folder = str(tmp_path / "model")
    make_model(config, **keys).save_pretrained(folder)
    return folder


def short_answers(longest: int = 20) -> list[TrainingSample]:
    """Samples that are mostly prompt, so that few of their tokens are read."""
    rng = np.random.default_rng(0)
    samples = []
    for group in range(4):
        ids = rng.integers(3, VOCABULARY, longest - group).tolist()
        samples.append(make_sample(group, 0, ids, [len(ids) - 2, len(ids) - 1], rng))
    return samples


def check_gradients(source: str, **keys: Any) -> PolicyModel:
    """The gradients of one packed row are those of transformers' own forward, one sample at a time."""
    samples = short_answers()
    plain = AutoModelForCausalLM.from_pretrained(source, attn_implementation="eager").eval()
    losses = []
    for sample in samples:
        log_probs = plain(input_ids=torch.from_numpy(sample.token_ids).long()[None], use_cache=False).logits[0].log_softmax(-1)
        losses += [-log_probs[t - 1, sample.token_ids[t]] for t in np.flatnonzero(sample.loss_mask)]
    wanted = torch.stack(losses).mean()
    wanted.backward()

    mesh = one_process("cpu")
    model = load_policy(source, mesh, dtype="float32", **keys)
    trainer = PolicyTrainer(model, Objective(sft, LossTerms(aggregate="token_mean")), torch.optim.SGD(model.parameters()), mesh=mesh)
    (mini_batch,) = pack(step_batch(0, [samples]), rank=0, ranks=1, tokens=100).mini_batches
    trainer.accumulate_gradients(mini_batch)
    scale = max(float(p.grad.abs().max()) for p in plain.parameters() if p.grad is not None)
    found = dict(model.hf.named_parameters())
    for name, parameter in plain.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(found[name].grad, parameter.grad, rtol=1e-4, atol=1e-5 * scale, msg=name)
    return model


@pytest.mark.parametrize("name", WINDOWS)
def test_a_window_that_attention_is_not_told_is_refused(name: str, tmp_path: Path) -> None:
    config, keys = WINDOWS[name]
    source = saved(tmp_path, config, **keys)
    for context in (None, WINDOW + 1):
        with pytest.raises(ValueError, match=rf"ForCausalLM.*window of {WINDOW} tokens.*seq_len={WINDOW}.*model\.attention=rows"):
            load_policy(source, one_process("cpu"), dtype="float32", context=context)
    load_policy(source, one_process("cpu"), dtype="float32", context=WINDOW)
    check_gradients(source, attention="rows")


@pytest.mark.parametrize("longest", [8, 60])
@pytest.mark.parametrize(("config", "keys", "message"), [
    (*WINDOWS["phimoe"], rf"window of {WINDOW} tokens.*Set seq_len={WINDOW} or less, not 60"),
    (Phi3Config, LONGROPE, rf"beyond {WINDOW} tokens \(longrope\).*Set seq_len={WINDOW} or less, not 60"),
])  # fmt: skip
def test_a_run_with_longer_samples_than_its_shared_trainers_is_refused_if_the_model_cannot_have_them(
    config: type, keys: dict[str, Any], message: str, longest: int, tmp_path: Path
) -> None:
    source = saved(tmp_path, config, pad_token_id=0, **keys)
    build_tokenizer(64).save_pretrained(source)
    mesh, alike = one_process("cpu"), ["hardware=cpu", "lora.rank=4", "lora.target_modules=[o_proj]", "sampling.max_tokens=4"]
    host = compose([*alike, f"seq_len={WINDOW}", "trainer.max_concurrent_runs=2", "trainer.micro_batch_tokens=60"], {}).cfg
    shared = policy_of(host, source, mesh, lambda _: nullcontext())
    paths = RunPaths(tmp_path / "run")
    paths.root.mkdir()
    paths.config.write_text(to_yaml(compose([*alike, f"seq_len={longest}", "trainer.shared_trainer_dir=/outputs/host"], {}).cfg))
    with nullcontext() if longest <= WINDOW else pytest.raises(ValueError, match=message):
        HostedRun(host, paths, "token", 0, shared, mesh, lambda: None)


@pytest.mark.parametrize(
    ("config", "keys"),
    [
        (Qwen2Config, {"use_sliding_window": False, "sliding_window": WINDOW}),
        (Qwen3Config, {"use_sliding_window": False, "sliding_window": WINDOW}),
        (Qwen2MoeConfig, EXPERTS | {"use_sliding_window": False, "sliding_window": WINDOW}),
        (MistralConfig, {"sliding_window": None}),
        (MistralConfig, {"sliding_window": WINDOW}),
        (PhimoeConfig, {"num_local_experts": 4, "sliding_window": None}),
        (Gemma2Config, {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}),
        (Gemma2Config, {"sliding_window": WINDOW, "layer_types": ["full_attention"] * 2}),
    ],
)
def test_windows_that_are_unused_or_told_are_trained(config: type, keys: dict[str, Any], tmp_path: Path) -> None:
    check_gradients(saved(tmp_path, config, **keys))


def test_selective_checkpointing_is_refused_where_a_layer_writes_into_what_it_would_keep(tmp_path: Path) -> None:
    """Gemma 3n adds in place to what `torch.matmul` returns. torch does not notice, and gradients had a cosine of 0.78 to the right."""
    selective = {"ac": AcConfig(freq=1, mode="selective"), "dtype": "float32"}
    with pytest.raises(ValueError, match=r"writes into results .*; set trainer.ac.mode=full"):
        load_policy(saved(tmp_path / "streams", Gemma3nTextConfig, **STREAMS), one_process("cpu"), **selective)
    load_policy(saved(tmp_path / "plain", Qwen3Config), one_process("cpu"), **selective)


def test_a_layer_with_a_mask_of_its_own_is_refused_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"DogeAttention makes an attention mask of its own.*Set model.attention=rows"):
        load_policy(saved(tmp_path, DogeConfig), one_process("cpu"), dtype="float32")


CHUNKS = {
    "num_hidden_layers": 4, "num_local_experts": 4, "intermediate_size_mlp": 32, "interleave_moe_layer_step": 2, "attention_chunk_size": 5,
    "attn_temperature_tuning": True, "floor_scale": 4,
}  # fmt: skip
SEEN = {
    "hidden_size": 16, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28, "patch_size": 14,
    "vision_output_dim": 16, "projector_input_dim": 16, "projector_output_dim": 16,
}  # fmt: skip


def test_a_model_whose_base_is_itself_is_trained(tmp_path: Path) -> None:
    model = check_gradients(saved(tmp_path, Llama4TextConfig, **CHUNKS))
    assert model.hf.base_model is model.hf, "else this tests nothing"
    assert model.padded


def test_the_text_of_a_model_that_also_sees_is_trained(tmp_path: Path) -> None:
    whole = Llama4ForConditionalGeneration(Llama4Config(vision_config=SEEN, text_config=SIZES | CHUNKS))
    whole.save_pretrained(tmp_path / "model")
    model = load_policy(str(tmp_path / "model"), one_process("cpu"), dtype="float32")
    weights = whole.state_dict()
    for name, parameter in model.hf.named_parameters():
        assert torch.equal(parameter, weights[f"language_model.{name}"]), name


def test_a_model_whose_layers_are_nowhere_known_is_refused_by_name() -> None:
    hf = make_model(LlamaConfig)
    hf.base_model_prefix, hf.decoder = "elsewhere", hf.model
    del hf.model
    with pytest.raises(
        ValueError, match="LlamaForCausalLM cannot be trained: its layers are in none of the modules `elsewhere` and `model`"
    ):
        PolicyModel(hf)


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
        apply_tensor_parallel(hf, SequenceParallelGroup(group, tensor=group), SimpleNamespace(size=lambda: 2))  # type: ignore[arg-type]


def test_a_model_without_experts_or_with_an_odd_number_of_them_is_refused():
    group: Any = SimpleNamespace(size=lambda: 2)
    with pytest.raises(ValueError, match=r"trainer\.ep=2: transformers has no plan that divides experts of LlamaForCausalLM"):
        apply_expert_parallel(make_model(LlamaConfig), group, group)
    apply_expert_parallel(make_model(LlamaConfig), group, group, dense=True)
    with pytest.raises(ValueError, match=r"trainer\.ep=2 does not divide the 3 experts of OlmoeForCausalLM"):
        apply_expert_parallel(make_model(OlmoeConfig, num_experts=3, num_experts_per_tok=2), group, group)
