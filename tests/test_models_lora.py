"""Adapters: their math against PEFT's, what is trained, the reference without a copy, the files, and which layers get one."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from trainer_examples import make_model, make_samples, make_trainer, step_batch
from transformers.models.gpt2 import GPT2Config

from rlx.config.schema import AcConfig, KlTerms, LoraConfig
from rlx.data.packing import pack
from rlx.kernels.reference import logprob_reference
from rlx.losses.grpo import grpo
from rlx.models.load import load_policy
from rlx.models.lora import adapted, add_adapters, draw_adapters, targets, without_adapters
from rlx.models.policy import PolicyModel
from rlx.parallel.mesh import one_process
from rlx.paths import COMPLETE, RunPaths
from rlx.train.reference import Reference
from rlx.train.step import score_before
from rlx.weights.files import verify
from rlx.weights.publish import Publisher
from rlx.weights.shapes import ADAPTER
from rlx.weights.subscribe import version_at

LORA = LoraConfig(rank=4, alpha=12.0)
SOME = LoraConfig(rank=3, alpha=6.0, rslora=True, target_modules=["q_proj", "mlp.down_proj"])


def with_adapters(lora: LoraConfig = LORA, *, trained: bool = True, dtype: torch.dtype = torch.float32, **keys):
    """A tiny model with adapters. `trained`: B is not 0 any more."""
    hf = make_model(**keys).to(dtype)
    add_adapters(hf, lora)
    draw_adapters(hf, seed=0)
    if trained:
        generator = torch.Generator().manual_seed(1)
        for layer in adapted(hf).values():
            layer.lora_B.data.normal_(0, 0.1, generator=generator)
    return hf


def publisher(hf, lora: LoraConfig, root: Path) -> Publisher:
    hf.save_pretrained(root / "base", state_dict={name: tensor for name, tensor in hf.state_dict().items() if "lora_" not in name})
    policy = PolicyModel(copy.deepcopy(hf))  # it changes the attention
    return Publisher.of(policy, one_process("cpu"), RunPaths(root), source=str(root / "base"), dtype=torch.float32, lora=lora)


def batch():
    return pack(step_batch(0, [make_samples()]), rank=0, ranks=1, tokens=200)


@pytest.mark.parametrize(("lora", "dtype"), [(LORA, torch.float64), (SOME, torch.float32)])
def test_published_adapters_in_peft_compute_the_same_and_have_the_same_gradients(tmp_path: Path, lora: LoraConfig, dtype: torch.dtype):
    peft = pytest.importorskip("peft")
    ours = with_adapters(lora, dtype=dtype)
    base = make_model().to(dtype)
    publisher(ours, lora, tmp_path).ensure(1)
    theirs = peft.PeftModel.from_pretrained(base, RunPaths(tmp_path).weights_of(1), is_trainable=True, autocast_adapter_dtype=False).to(
        dtype
    )
    # PEFT loads files with other names without an error, and leaves its own adapters as they were.
    assert load_file(RunPaths(tmp_path).weights_of(1) / ADAPTER).keys() == peft.get_peft_model_state_dict(theirs).keys()
    for name, parameter in theirs.named_parameters():  # the files are float32
        if "lora_" in name:
            path, _, which = name.removeprefix("base_model.model.").removesuffix(".default.weight").rpartition(".")
            parameter.data.copy_(getattr(ours.get_submodule(path), which))
    ids = torch.randint(0, 40, (2, 9), generator=torch.Generator().manual_seed(0))
    found, expected = (model(input_ids=ids).logits for model in (ours, theirs))
    exact = 1e-12 if dtype == torch.float64 else 2e-6
    torch.testing.assert_close(found, expected, rtol=exact, atol=exact)
    for logits in (found, expected):
        logits.logsumexp(-1).square().sum().backward()
    theirs_by_name = {
        name.removeprefix("base_model.model.").replace(".default.weight", ""): p.grad
        for name, p in theirs.named_parameters()
        if p.requires_grad
    }
    ours_by_name = {name: p.grad for name, p in ours.named_parameters() if p.requires_grad}
    assert ours_by_name.keys() == theirs_by_name.keys()
    for name, gradient in ours_by_name.items():
        torch.testing.assert_close(gradient, theirs_by_name[name], rtol=100 * exact, atol=100 * exact, msg=name)
    merged = theirs.merge_and_unload()
    torch.testing.assert_close(merged(input_ids=ids).logits, expected, rtol=1e-4, atol=1e-5)


def test_new_adapters_change_nothing_and_the_same_seed_draws_the_same():
    base, ours = make_model(), with_adapters(trained=False)
    ids = torch.arange(3, 12)[None]
    assert torch.equal(ours(input_ids=ids).logits, base(input_ids=ids).logits)
    again, other = with_adapters(trained=False), make_model()
    add_adapters(other, LORA)
    draw_adapters(other, seed=1)
    layers = adapted(ours)
    assert all(torch.equal(layer.lora_A, adapted(again)[name].lora_A) for name, layer in layers.items())
    assert not any(torch.equal(layer.lora_A, adapted(other)[name].lora_A) for name, layer in layers.items())
    assert len(layers) == 2 * 7


def test_only_adapters_are_trained_and_have_optimizer_state():
    hf = with_adapters()
    before = {name: p.detach().clone() for name, p in hf.named_parameters()}
    trainer = make_trainer(hf, grpo)
    trainer.optimizer = torch.optim.AdamW([p for p in hf.parameters() if p.requires_grad], lr=0.01)
    trainer.train_batch(batch())
    changed = {name for name, p in hf.named_parameters() if not torch.equal(p, before[name])}
    assert changed == {name for name in before if name.endswith(("lora_A", "lora_B"))}
    assert len(trainer.optimizer.state) == len(changed) == len(dict(trainer.model.named_weights()))


def test_the_head_op_of_a_frozen_head_gives_the_gradient_of_plain_autograd():
    hf = with_adapters()
    model = PolicyModel(hf)
    hidden = torch.randn(6, 16, generator=torch.Generator().manual_seed(0), requires_grad=True)
    head, labels, temperature = model.head[0].weight, torch.arange(6), torch.ones(6)
    from rlx.kernels.logprob import logprob

    assert not head.requires_grad
    found = torch.autograd.grad(logprob(hidden, head, labels, temperature)[0].square().sum(), hidden)[0]
    expected = torch.autograd.grad(logprob_reference(hidden, head, labels, temperature)[0].square().sum(), hidden)[0]
    torch.testing.assert_close(found, expected)


def test_the_reference_is_the_model_without_its_adapters_and_needs_no_copy():
    row = batch().mini_batches[0].micro_batches[0]
    plain = make_trainer(make_model()).score(row)[0]
    trainer = make_trainer(with_adapters(), kl=KlTerms(beta=0.1))
    trainer.reference = Reference(trainer.model, adapters=False)
    assert trainer.reference.model is trainer.model
    before = score_before([{0: row}], {0: trainer}, set())
    torch.testing.assert_close(before[id(row)]["ref_logp"], plain, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(trainer.score(row)[0], plain, atol=1e-3)  # the adapters are back
    assert all(layer.lora_A.requires_grad for layer in adapted(trainer.model).values())


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_dropout_acts_in_training_alone_and_recomputed_layers_draw_the_same(mode):
    from rlx.models.shard import checkpoint_activations

    row = batch().mini_batches[0]
    found = {}
    for freq in (0, 1):
        hf = with_adapters(LoraConfig(rank=4, dropout=0.5))
        trainer = make_trainer(hf, grpo)
        checkpoint_activations(trainer.model, AcConfig(freq=freq, mode=mode), random=True)
        torch.manual_seed(0)
        trainer.accumulate_gradients(row)
        found[freq] = {name: p.grad.clone() for name, p in hf.named_parameters() if p.grad is not None}
        scores = [trainer.score(row.micro_batches[0])[0] for _ in range(2)]
        assert torch.equal(*scores)
    for name, gradient in found[0].items():
        torch.testing.assert_close(found[1][name], gradient, msg=name)
    torch.manual_seed(1)
    trainer.optimizer.zero_grad()
    trainer.accumulate_gradients(row)
    assert any(not torch.allclose(p.grad, found[1][name]) for name, p in hf.named_parameters() if p.grad is not None)


def test_a_version_is_a_peft_folder_with_a_manifest(tmp_path: Path):
    hf = with_adapters(SOME)
    publisher(hf, SOME, tmp_path).ensure(3)
    folder = RunPaths(tmp_path).weights_of(3)
    assert sorted(file.name for file in folder.iterdir()) == [COMPLETE, "adapter_config.json", "adapter_model.safetensors"]
    assert verify(folder)["version"] == 3
    assert len(load_file(folder / "adapter_model.safetensors")) == 2 * 2 * 2
    config = json.loads((folder / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["use_rslora"]) == (3, 6, True)
    assert config["target_modules"] == ["down_proj", "q_proj"]
    assert config["base_model_name_or_path"] == str(tmp_path / "base")
    assert version_at(folder, 3).kind == "adapter"


def test_target_modules_that_would_also_match_other_layers_are_written_in_full(tmp_path: Path):
    lora = LoraConfig(rank=2, target_modules=["layers.1.self_attn.q_proj"])
    publisher(with_adapters(lora), lora, tmp_path).ensure(1)
    config = json.loads((RunPaths(tmp_path).weights_of(1) / "adapter_config.json").read_text())
    assert config["target_modules"] == ["model.layers.1.self_attn.q_proj"]


def test_targets_are_named_by_the_last_parts_of_their_names():
    hf = make_model()
    assert len(targets(hf, ["all-linear"])) == 14  # not the head
    assert targets(hf, ["mlp.up_proj"]) == ["model.layers.0.mlp.up_proj", "model.layers.1.mlp.up_proj"]
    with pytest.raises(
        ValueError, match=r"`key` matches nothing in Qwen3ForCausalLM. Its linear layers are: down_proj, gate_proj, k_proj, "
    ):
        targets(hf, ["q_proj", "key"])
    with pytest.raises(ValueError, match="`input_layernorm` names a Qwen3RMSNorm, which cannot have an adapter"):
        targets(hf, ["input_layernorm"])
    with pytest.raises(ValueError, match="`lm_head` names a Linear, which cannot have an adapter"):
        targets(make_model(tie_word_embeddings=False), ["lm_head"])
    with pytest.raises(ValueError, match="GPT2LMHeadModel has no linear layer"):
        targets(make_model(GPT2Config, n_embd=16, n_layer=1, n_head=2), ["all-linear"])


def test_a_loaded_model_has_frozen_parameters_in_the_dtype_of_computing(tmp_path: Path):
    make_model().save_pretrained(tmp_path)
    model = load_policy(str(tmp_path), one_process("cpu"), dtype="float32", lora=LORA, seed=5)
    layer = next(iter(adapted(model).values()))
    assert model.adapts
    assert [name for name, p in model.hf.named_parameters() if p.requires_grad] == [name for name, _ in model.named_weights()]
    assert isinstance(layer, nn.Linear)
    with without_adapters(model):
        assert not layer.active
    assert layer.active
    assert copy.deepcopy(layer).scaling == 3.0
