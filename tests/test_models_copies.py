"""Mixed precision of one process: copies of the parameters, which are in the model only while it computes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from rank_worker import whole_of
from torch import nn
from torch.optim import SGD
from trainer_examples import make_model, make_samples, make_trainer, step_batch
from transformers import AutoModelForCausalLM

from rlx.config.schema import LossTerms
from rlx.data.packing import pack
from rlx.losses.base import Objective
from rlx.losses.grpo import grpo
from rlx.losses.reinforce import reinforce
from rlx.models.copies import Copies
from rlx.models.load import load_policy
from rlx.parallel.mesh import join, one_process
from rlx.train.step import PolicyTrainer

pytestmark = pytest.mark.slow


@pytest.fixture
def model(tmp_path: Path):
    """A tied model with float32 parameters that computes in bfloat16."""
    make_model(tie_word_embeddings=True).save_pretrained(tmp_path)
    model = load_policy(str(tmp_path), one_process("cpu"), dtype="bfloat16")
    assert model.copies is not None
    return model


def rows(tokens: int = 60):
    (mini_batch,) = pack(step_batch(0, [make_samples(groups=4)]), rank=0, ranks=1, tokens=tokens).mini_batches
    assert len(mini_batch.micro_batches) > 2
    return mini_batch


def test_gradients_are_those_of_a_16_bit_model_summed_in_float32_row_by_row(model, tmp_path):
    plain = make_trainer(AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16), reinforce, "token_mean")
    ours = make_trainer(model.hf, reinforce, "token_mean")
    ours.model = model
    mini_batch = rows()
    ours.accumulate_gradients(mini_batch)
    summed: dict[str, torch.Tensor] = {}
    for row, scores in zip(mini_batch.micro_batches, plain._score_before(mini_batch, recompute=False), strict=True):
        inputs, logp, entropy = plain._forward(row, plain.model)
        plain.loss_of(inputs, logp, entropy, scores, mini_batch, step=None, fresh=True)[0].backward()
        for name, parameter in plain.model.hf.named_parameters():
            gradient = parameter.grad.float()
            summed[name] = summed[name] + gradient if name in summed else gradient
            parameter.grad = None
    found = {name: parameter.grad for name, parameter in model.hf.named_parameters()}
    assert found.keys() == summed.keys()
    for name, gradient in found.items():
        assert gradient.dtype == torch.float32
        assert torch.equal(gradient, summed[name]), name


def test_parameters_are_float32_outside_and_16_bit_inside_and_tied_ones_have_one_copy(model):
    head, embedding = model.hf.get_output_embeddings(), model.hf.get_input_embeddings()
    before = head.weight
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    with model.computing():
        assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
        assert head.weight is embedding.weight
        with model.computing():
            assert head.weight.dtype == torch.bfloat16
        assert head.weight.dtype == torch.bfloat16, "the inner one changed nothing"
        assert {tensor.dtype for name, tensor in model.named_weights() if name.endswith("weight")} == {torch.float32}
        assert torch.equal(dict(model.named_weights())["model.embed_tokens.weight"], before)
    assert head.weight is embedding.weight is before
    with pytest.raises(ZeroDivisionError), model.computing():
        raise ZeroDivisionError
    assert head.weight is before, "also after an error"


def test_an_update_is_seen_even_if_autograd_is_not_told_of_it(model):
    trainer = make_trainer(model.hf, grpo, "seq_mean")
    trainer.model = model
    row = rows().micro_batches[0]
    first, _ = trainer.score(row)
    for parameter in model.parameters():
        parameter.data.mul_(1.1)
    second, _ = trainer.score(row)
    assert not torch.equal(first, second)


def test_a_step_moves_the_parameters_and_leaves_no_gradients_in_the_copies(model):
    trainer = make_trainer(model.hf, reinforce, "token_mean")
    trainer.model = model
    before = {name: parameter.clone() for name, parameter in model.hf.named_parameters()}
    metrics = trainer.train_minibatch(rows(), step=2)
    assert metrics["optim/grad_norm"] > 0
    assert all(not torch.equal(parameter, before[name]) for name, parameter in model.hf.named_parameters())
    with model.computing():
        assert all(parameter.grad is None for parameter in model.parameters())


def test_a_forward_outside_is_refused_instead_of_computed_in_float32(model):
    trainer = make_trainer(model.hf, reinforce, "token_mean")
    with pytest.raises(RuntimeError, match=r"only within `computing\(\)`"):
        trainer._forward(rows().micro_batches[0], model)


def test_parameters_that_stay_float32_have_no_copies():
    layers = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    layers[1].bias.requires_grad_(False)
    copies = Copies(layers, torch.bfloat16, {"0.bias"})
    with copies.placed():
        found = {name: (parameter.dtype, parameter.requires_grad) for name, parameter in layers.named_parameters()}
    half = torch.bfloat16
    assert found == {"0.weight": (half, True), "0.bias": (torch.float32, True), "1.weight": (half, True), "1.bias": (half, False)}


def test_rows_whose_tokens_do_not_move_the_loss_have_no_backward_also_in_mixed_precision(model, tmp_path):
    """With copies as well as sharded over one process, and the gradients are those of the other rows."""
    samples = [s if s.group % 2 else replace(s, advantages=np.zeros_like(s.advantages)) for s in make_samples(groups=8)]
    batch = step_batch(0, [samples])
    mesh = join(torch.device("cpu"), rank=0, world_size=1, timeout=60)
    found = []
    try:
        sharded = load_policy(str(tmp_path), mesh, dtype="bfloat16")
        for policy, where in ((model, one_process("cpu")), (sharded, mesh)):
            trainer = PolicyTrainer(
                policy, Objective(reinforce, LossTerms(aggregate="token_mean")), SGD(policy.parameters(), lr=0.1), mesh=where
            )
            (mini_batch,) = pack(batch, rank=0, ranks=1, tokens=60).mini_batches
            trainer.accumulate_gradients(mini_batch, step=2)
            assert trainer.forward_only
            found.append({name: whole_of(parameter.grad).clone() for name, parameter in policy.named_parameters()})
            trainer.optimizer.zero_grad()
            trainer._backward = lambda loss, *_: [loss.backward()]  # every row
            trainer.accumulate_gradients(mini_batch, step=2)
            found.append({name: whole_of(parameter.grad) for name, parameter in policy.named_parameters()})
    finally:
        mesh.close()
    for other in found[1:]:
        for name, gradient in found[0].items():
            assert torch.equal(gradient, other[name]), name
