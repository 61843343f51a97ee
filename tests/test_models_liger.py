"""Liger's layer kernels: which models get them, what the run reports, and that the rest of the process is unchanged."""

from __future__ import annotations

import pytest
import torch
from trainer_examples import make_model, make_samples, make_trainer, step_batch
from transformers.models.gemma2 import Gemma2Config
from transformers.models.granite import GraniteConfig
from transformers.models.llama import LlamaConfig
from transformers.models.mistral import MistralConfig
from transformers.models.mixtral import MixtralConfig
from transformers.models.phi import PhiConfig
from transformers.models.qwen2 import Qwen2Config
from transformers.models.qwen3 import Qwen3Config, modeling_qwen3
from transformers.models.qwen3_moe import Qwen3MoeConfig

from rlx.config.schema import AcConfig
from rlx.data.packing import pack
from rlx.models import liger
from rlx.models.liger import apply_liger, patch
from rlx.models.load import check_packed_forward, load_policy
from rlx.models.policy import PolicyModel
from rlx.models.shard import checkpoint_activations
from rlx.parallel.mesh import one_process

pytest.importorskip("liger_kernel")
CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def test_on_cpu_auto_leaves_the_model_alone_and_says_why():
    hf = make_model()
    assert apply_liger(hf, "auto", CPU) == "off: its kernels need CUDA, but this is cpu"
    assert apply_liger(hf, False, CUDA) == "off: model.liger is false"
    check_packed_forward(PolicyModel(hf))
    with pytest.raises(ValueError, match=r"model\.liger is true: its kernels need CUDA, but this is cpu; set model\.liger=auto"):
        apply_liger(hf, True, CPU)


@pytest.mark.parametrize(
    ("config_class", "keys", "message"),
    [(PhiConfig, {}, "this head has a bias"), (Gemma2Config, {"final_logit_softcapping": 30.0}, "these logits are bounded by 30")],
)
def test_a_head_that_its_op_does_not_know_is_refused_when_the_model_is_loaded(config_class, keys, message, tmp_path):
    make_model(config_class, **keys).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=f"model.logprob_backend is liger: {message}; set model.logprob_backend=auto"):
        load_policy(str(tmp_path), one_process(CPU), dtype="float32", logprob_backend="liger")
    assert load_policy(str(tmp_path), one_process(CPU), dtype="float32").logprob_backend == "torch"


def test_kernels_are_put_into_one_model_and_no_other():
    names = dict(vars(modeling_qwen3))
    hf = make_model(num_hidden_layers=2)
    said = apply_liger(hf, "auto", CUDA)  # computes nothing, so it needs no GPU
    assert said == "rope, rms_norm, swiglu of qwen3; 11 modules"  # 5 per layer, and the last norm
    assert hf.model.norm._get_name() == "LigerRMSNorm"
    assert hf.model.layers[1].mlp._get_name() == "LigerSwiGLUMLP"
    changed = {name for name, value in vars(modeling_qwen3).items() if names.get(name) is not value}
    assert changed == {"apply_rotary_pos_emb"}
    check_packed_forward(PolicyModel(make_model(num_hidden_layers=2)))  # a later model on the CPU, such as the reference


@pytest.mark.parametrize(("config_class", "keys", "kernels"), [
    (LlamaConfig, {"hidden_act": "gelu"}, "rope, rms_norm of llama"),
    (LlamaConfig, {"hidden_act": "swish"}, "rope, rms_norm, swiglu of llama"),
    (Gemma2Config, {"hidden_activation": "gelu"}, "rope, rms_norm of gemma2"),
    (Gemma2Config, {"hidden_activation": "gelu_pytorch_tanh"}, "rope, rms_norm, geglu of gemma2"),
])  # fmt: skip
def test_feed_forward_layers_with_another_activation_than_the_kernels_keep_it(config_class, keys, kernels):
    hf = make_model(config_class, **keys)
    assert apply_liger(hf, "auto", CUDA).split(";")[0] == kernels
    assert ("Liger" in hf.model.layers[0].mlp._get_name()) == ("glu" in kernels)


@pytest.mark.parametrize(("ac", "compile", "kernels"), [
    (AcConfig(freq=1, mode="selective"), False, "rms_norm, swiglu of llama"),
    (None, True, "rms_norm, swiglu of llama"),
    (AcConfig(freq=1), False, "rope, rms_norm, swiglu of llama"),
    (AcConfig(freq=0, mode="selective"), False, "rope, rms_norm, swiglu of llama"),
])  # fmt: skip
def test_the_rotary_kernel_rotates_in_place_and_is_left_out_where_that_would_count_twice(ac, compile, kernels, tmp_path, monkeypatch):
    make_model(LlamaConfig).save_pretrained(tmp_path)
    monkeypatch.setattr(liger, "_why_not", lambda *_: None)  # as on CUDA; the kernels are chosen by each tensor's device
    monkeypatch.setattr("rlx.models.load.check_packed_forward", lambda *_: None)
    model = load_policy(str(tmp_path), one_process("cpu"), dtype="float32", ac=ac, compile=compile)
    assert model.liger.startswith(kernels)


@pytest.mark.parametrize("config_class", [LlamaConfig, Qwen2Config, Gemma2Config, MistralConfig, GraniteConfig])
def test_families_that_liger_knows_get_norms_and_feed_forward(config_class):
    hf = make_model(config_class)
    said = apply_liger(hf, True, CUDA)
    assert said.startswith("rope, rms_norm, ")
    kinds = {module._get_name() for module in hf.modules()}
    assert "LigerRMSNorm" in kinds
    assert kinds & {"LigerSwiGLUMLP", "LigerGEGLUMLP"}
    check_packed_forward(PolicyModel(make_model(config_class)))


@pytest.mark.parametrize("config_class", [Qwen3MoeConfig, MixtralConfig])
def test_experts_are_left_to_transformers(config_class):
    hf = make_model(config_class)
    said = apply_liger(hf, True, CUDA)
    assert said.startswith("rope, rms_norm of ")
    assert not any(name.startswith("Liger") and name != "LigerRMSNorm" for name in (module._get_name() for module in hf.modules()))


@pytest.mark.gpu
@pytest.mark.parametrize("config_class", [LlamaConfig, Qwen2Config, Qwen3Config, Gemma2Config, Qwen3MoeConfig])
@pytest.mark.parametrize("selective", [False, True])
def test_kernels_give_the_gradients_of_the_plain_model(config_class, selective):
    found = []
    for with_kernels in (False, True):
        trainer = make_trainer(make_model(config_class).to(CUDA), entropy_coef=0.1)
        if with_kernels:
            patch(trainer.model.hf, rope=not selective)
        if selective:
            checkpoint_activations(trainer.model, AcConfig(freq=1, mode="selective"))
        trainer.accumulate_gradients(pack(step_batch(0, [make_samples(longest=20)]), rank=0, ranks=1, tokens=10_000).mini_batches[0])
        found.append({name: p.grad for name, p in trainer.model.named_parameters()})
    for name, gradient in found[0].items():
        torch.testing.assert_close(gradient, found[1][name], rtol=2e-3, atol=1e-5, msg=name)
