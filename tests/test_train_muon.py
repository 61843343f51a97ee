"""Muon against torch's own, and the state that it keeps."""

from __future__ import annotations

import pytest
import torch
from trainer_examples import make_model

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
