"""The fused log-probability op against its naive twin."""

from __future__ import annotations

import pytest
import torch

from rlx.kernels.logprob import logprob
from rlx.kernels.reference import logprob_reference

SOFTCAPS = [None, 2.0]


def inputs(n: int, d: int, v: int, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(n * 1000 + v)
    hidden = torch.randn(n, d, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    head = torch.randn(v, d, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    labels = torch.randint(0, v, (n,), generator=generator)
    temperature = torch.rand(n, generator=generator, dtype=torch.float64) + 0.5
    return hidden, head, labels, temperature if dtype == torch.float64 else temperature.float()


@pytest.mark.parametrize("softcap", SOFTCAPS)
@pytest.mark.parametrize(("n", "v", "tile"), [(1, 5, (4, 8)), (7, 19, (3, 5)), (8, 16, (4, 8)), (13, 37, (5, 36)), (6, 11, None)])
def test_values_and_gradients_equal_the_naive_twin_on_ragged_tiles(n, v, tile, softcap):
    hidden, head, labels, temperature = inputs(n, 3, v)
    weights = torch.linspace(-1, 2, n, dtype=torch.float64)
    results = []
    for function, keys in ((logprob, {"tile": tile}), (logprob_reference, {})):
        logp, entropy = function(hidden, head, labels, temperature, softcap=softcap, **keys)
        gradient = torch.autograd.grad((weights * logp + weights.flip(0) * entropy).sum(), (hidden, head))
        results.append((logp, entropy, *gradient))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("softcap", SOFTCAPS)
def test_gradcheck_with_ragged_tiles(softcap):
    hidden, head, labels, temperature = inputs(5, 3, 11)
    assert torch.autograd.gradcheck(lambda h, w: logprob(h, w, labels, temperature, softcap=softcap, tile=(2, 4)), (hidden, head))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_gradients_in_lower_precision_stay_close_to_float64(dtype, tolerance):
    hidden, head, labels, temperature = inputs(50, 16, 300, dtype)
    logp, entropy = logprob(hidden, head, labels, temperature, tile=(16, 64))
    assert logp.dtype == entropy.dtype == torch.float32
    found = torch.autograd.grad((logp + 0.3 * entropy).sum(), (hidden, head))
    exact = [t.detach().double().requires_grad_() for t in (hidden, head)]
    logp64, entropy64 = logprob_reference(*exact, labels, temperature.double())
    wanted = torch.autograd.grad((logp64 + 0.3 * entropy64).sum(), exact)
    for ours, theirs in zip(found, wanted, strict=True):
        assert (ours.double() - theirs).norm() / theirs.norm() < tolerance
    # The logits are accumulated in float32 even for bfloat16 inputs, so the values are as good as float32 ones.
    assert (logp.double() - logp64).abs().max() < 1e-4


def test_huge_logits_give_finite_values_and_gradients():
    hidden = torch.tensor([[1e4], [-1e4]], requires_grad=True)
    head = torch.tensor([[1.0], [0.0], [-1.0]], requires_grad=True)
    logp, entropy = logprob(hidden, head, torch.tensor([0, 0]), torch.ones(2), tile=(1, 2))
    assert logp.tolist() == [0.0, -2e4]
    assert entropy.tolist() == [0.0, 0.0]
    (logp.sum() + entropy.sum()).backward()
    assert hidden.grad.isfinite().all()
    assert head.grad.isfinite().all()


def test_no_tokens_give_zero_gradients_not_none():
    head = torch.randn(7, 3, requires_grad=True)
    hidden = torch.randn(2, 3, requires_grad=True)
    logp, entropy = logprob(hidden[:0], head, torch.zeros(0, dtype=torch.int64), torch.ones(0))
    (logp.sum() + entropy.sum()).backward()
    assert head.grad.abs().sum() == 0
    assert hidden.grad.abs().sum() == 0


def test_logits_are_never_held_whole():
    hidden, head, labels, temperature = inputs(400, 4, 3000, torch.float32)
    largest = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            largest.extend(t.numel() for t in (out if isinstance(out, tuple) else (out,)) if isinstance(t, torch.Tensor))
            return out

    with Watch():
        logp, _ = logprob(hidden, head, labels, temperature, tile=(64, 256))
        logp.sum().backward()
    assert max(largest) <= max(64 * 256, head.numel())


def test_different_dtypes_are_refused():
    with pytest.raises(ValueError, match=r"hidden is torch\.bfloat16 and head is torch\.float32"):
        logprob(torch.zeros(1, 2, dtype=torch.bfloat16), torch.zeros(3, 2), torch.zeros(1, dtype=torch.int64), torch.ones(1))
