"""Families of causal language models at a tiny width: the trainer's loss and gradients are the plain model's, and what it writes is too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from trainer_examples import make_model, make_samples, step_batch, train_minibatch
from transformers import AutoModelForCausalLM
from transformers.models.cohere import CohereConfig
from transformers.models.gemma2 import Gemma2Config
from transformers.models.gemma3 import Gemma3TextConfig
from transformers.models.glm4 import Glm4Config
from transformers.models.gpt2 import GPT2Config
from transformers.models.gpt_neox import GPTNeoXConfig
from transformers.models.granite import GraniteConfig
from transformers.models.llama import LlamaConfig
from transformers.models.mistral import MistralConfig
from transformers.models.olmo2 import Olmo2Config
from transformers.models.olmoe import OlmoeConfig
from transformers.models.phi3 import Phi3Config
from transformers.models.qwen2 import Qwen2Config
from transformers.models.qwen3 import Qwen3Config
from transformers.models.qwen3_moe import Qwen3MoeConfig
from transformers.models.smollm3 import SmolLM3Config

from rlx.config.schema import LossTerms
from rlx.data.packing import pack
from rlx.losses.base import Objective
from rlx.losses.sft import sft
from rlx.models.load import load_policy
from rlx.parallel.mesh import one_process
from rlx.paths import RunPaths
from rlx.train.step import PolicyTrainer
from rlx.types import TrainingSample
from rlx.weights.publish import Publisher

pytestmark = pytest.mark.slow

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
WINDOWS = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}
FIRST: dict[str, tuple[type, dict[str, Any]]] = {
    "llama": (LlamaConfig, {}),
    "qwen2": (Qwen2Config, {"tie_word_embeddings": True}),
    "qwen3_moe": (Qwen3MoeConfig, EXPERTS | {"moe_intermediate_size": 16}),
    "gemma3": (Gemma3TextConfig, WINDOWS),
    "phi3": (Phi3Config, {}),
    "gpt_neox": (GPTNeoXConfig, {"num_key_value_heads": 4}),  # it has no others; vLLM would believe the number
}
OTHERS: dict[str, tuple[type, dict[str, Any]]] = {
    "cohere": (CohereConfig, {"logit_scale": 0.3}),
    "gemma2": (Gemma2Config, WINDOWS | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 1.0}),
    "glm4": (Glm4Config, {}),
    "gpt2": (GPT2Config, {"n_inner": 32}),
    "granite": (
        GraniteConfig,
        {"logits_scaling": 3.0, "embedding_multiplier": 2.0, "attention_multiplier": 0.3, "residual_multiplier": 0.5},
    ),
    "mistral": (MistralConfig, {"sliding_window": 5}),
    "olmo2": (Olmo2Config, {}),
    "olmoe": (OlmoeConfig, EXPERTS | {"head_dim": 4}),
    "qwen3": (Qwen3Config, {"tie_word_embeddings": True}),
    "smollm3": (SmolLM3Config, {}),
}
FAMILIES = FIRST | OTHERS


def own_loss(hf: Any, samples: list[TrainingSample]) -> torch.Tensor:
    """The mean cross-entropy of the trained tokens, one sample at a time, by the model's own forward."""
    found = []
    for sample in samples:
        logits = hf(input_ids=torch.from_numpy(sample.token_ids).long()[None], use_cache=False).logits[0].double()
        log_probs = (logits[:-1] / torch.from_numpy(sample.temperature[1:]).double()[:, None]).log_softmax(-1)
        found += [-log_probs[t - 1, sample.token_ids[t]] for t in np.flatnonzero(sample.loss_mask)]
    return torch.stack(found).mean()


@pytest.mark.parametrize("name", [*FIRST, *(pytest.param(name, marks=[pytest.mark.slow, pytest.mark.long]) for name in OTHERS)])
def test_loss_gradients_and_written_weights_are_those_of_the_plain_model(name: str, tmp_path: Path) -> None:
    config, keys = FAMILIES[name]
    source = str(tmp_path / "model")
    make_model(config, **keys).save_pretrained(source)
    samples = make_samples(longest=20)
    plain = AutoModelForCausalLM.from_pretrained(source, attn_implementation="eager").eval()
    wanted = own_loss(plain, samples)
    wanted.backward()

    mesh = one_process("cpu")
    model = load_policy(source, mesh, dtype="float32")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = PolicyTrainer(model, Objective(sft, LossTerms(aggregate="token_mean")), optimizer, mesh=mesh)
    (mini_batch,) = pack(step_batch(0, [samples]), rank=0, ranks=1, tokens=80).mini_batches
    assert len(mini_batch.micro_batches) > 1
    trainer.accumulate_gradients(mini_batch)
    gradients, scale = {n: p.grad for n, p in plain.named_parameters()}, max(float(p.grad.abs().max()) for p in plain.parameters())
    found = {n: p.grad.clone() for n, p in model.hf.named_parameters()}
    assert found.keys() == gradients.keys()
    for parameter, gradient in gradients.items():
        torch.testing.assert_close(found[parameter], gradient, rtol=1e-4, atol=1e-5 * scale, msg=parameter)
    optimizer.zero_grad()
    metrics = train_minibatch(trainer, mini_batch, step=None)
    assert metrics["loss/total"] == pytest.approx(float(wanted.detach()), rel=1e-5)

    paths = RunPaths(tmp_path / "run")
    Publisher.of(model, mesh, paths, source=source, dtype=torch.float32).ensure(1)
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter -= 0.1 * parameter.grad
    written = AutoModelForCausalLM.from_pretrained(paths.weights_of(1), attn_implementation="eager").eval()
    for parameter, tensor in model.hf.state_dict().items():
        assert torch.equal(written.state_dict()[parameter], tensor), parameter
    ids = torch.from_numpy(samples[0].token_ids).long()[None]
    with torch.no_grad():
        torch.testing.assert_close(written(ids).logits, plain(ids).logits, rtol=1e-3, atol=1e-4)
