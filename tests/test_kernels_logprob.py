"""The fused log-probability op against its naive twin: values, gradients, precision, memory, and the choice of a backend."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from triton_worker import compare_with_offset

from rlx.kernels.liger import why_not
from rlx.kernels.logprob import choose_backend, logprob
from rlx.kernels.reference import logprob_reference

pytestmark = pytest.mark.slow

HEADS: dict[str, dict[str, Any]] = {
    "plain": {},
    "softcap": {"softcap": 2.0},
    "bias": {"bias": True},
    "scale": {"scale": 0.3},
    "all": {"softcap": 2.0, "bias": True, "scale": 1.7},
}
Tensors = tuple[torch.Tensor, ...]


def inputs(n: int, d: int, v: int, dtype: torch.dtype = torch.float64) -> Tensors:
    """(hidden, head, labels, temperature); every token has its own temperature."""
    generator = torch.Generator().manual_seed(n * 1000 + v)
    hidden = torch.randn(n, d, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    head = torch.randn(v, d, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    labels = torch.randint(0, v, (n,), generator=generator)
    temperature = torch.rand(n, generator=generator, dtype=torch.float64) + 0.5
    return hidden, head, labels, temperature if dtype == torch.float64 else temperature.float()


def keys_of(name: str, v: int, dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    """Keyword arguments for a kind of head."""
    keys = dict(HEADS[name])
    if keys.get("bias"):
        keys["bias"] = torch.linspace(-1, 1, v, dtype=torch.float64).to(dtype).requires_grad_()
    return keys


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize(("n", "v", "tile"), [(1, 5, (4, 8)), (7, 19, (3, 5)), (8, 16, (4, 8)), (13, 37, (5, 36)), (6, 11, None)])
@pytest.mark.parametrize("frozen", [False, True])
def test_values_and_gradients_equal_the_naive_twin_on_ragged_tiles(kind, n, v, tile, frozen):
    hidden, head, labels, temperature = inputs(n, 3, v)
    keys = keys_of(kind, v)
    learned = [hidden, *([] if frozen else [head, *([keys["bias"]] if "bias" in keys else [])])]
    if frozen:
        head = head.detach()
        keys |= {"bias": keys["bias"].detach()} if "bias" in keys else {}
    weights = torch.linspace(-1, 2, n, dtype=torch.float64)
    for with_entropy in (True, False):  # with a frozen head, only an entropy gradient recomputes the tiles
        results = []
        for function, more in ((logprob, {"tile": tile, "backend": "torch"}), (logprob_reference, {})):
            logp, entropy = function(hidden, head, labels, temperature, **keys, **more)
            loss = (weights * logp).sum()
            if with_entropy:
                loss = loss + (weights.flip(0) * entropy).sum()
            results.append((logp, entropy, *torch.autograd.grad(loss, learned)))
        for ours, theirs in zip(*results, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("kind", HEADS)
def test_gradcheck_of_both_outputs_with_ragged_tiles_and_tokens_left_out(kind):
    hidden, head, labels, temperature = inputs(7, 3, 11)
    keys = keys_of(kind, 11)
    bias = keys.pop("bias", None)
    trainable = torch.tensor([0, 1, 3, 4, 6])  # only these tokens reach the head

    def op(h, w, *b):
        return logprob(h[trainable], w, labels[trainable], temperature[trainable], bias=b[0] if b else None, tile=(2, 4), **keys)

    assert torch.autograd.gradcheck(op, (hidden, head, *([] if bias is None else [bias])))


@pytest.mark.parametrize("kind", ["plain", "all"])
def test_float32_is_within_1e_5_of_float64(kind):
    hidden, head, labels, temperature = inputs(50, 16, 300, torch.float32)
    ours = values_and_gradients(logprob, hidden, head, labels, temperature, tile=(16, 64), **keys_of(kind, 300, torch.float32))
    exact = values_and_gradients(logprob_reference, *doubles(hidden, head), labels, temperature.double(), **keys_of(kind, 300))
    for found, wanted in zip(ours, exact, strict=True):
        assert (found.double() - wanted).norm() / wanted.norm() < 1e-5


def test_bfloat16_inputs_give_float32_values_and_gradients_good_to_their_own_rounding():
    hidden, head, labels, temperature = inputs(512, 64, 3000, torch.bfloat16)
    with torch.no_grad():
        head *= 0.3  # gives logits as large as a real model's
    ours = values_and_gradients(logprob, hidden, head, labels, temperature, tile=(100, 256))
    exact = values_and_gradients(logprob_reference, *doubles(hidden, head), labels, temperature.double())
    assert ours[0].dtype == ours[1].dtype == torch.float32
    assert ours[2].dtype == ours[3].dtype == torch.bfloat16
    assert (ours[0].double() - exact[0]).abs().max() <= 1e-5
    assert (ours[1].double() - exact[1]).abs().max() <= 1e-5
    for found, wanted in zip(ours[2:], exact[2:], strict=True):
        assert (found.double() - wanted).norm() / wanted.norm() <= 3e-3


def doubles(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [tensor.detach().double().requires_grad_() for tensor in tensors]


def values_and_gradients(function: Any, hidden: torch.Tensor, head: torch.Tensor, *rest: Any, **keys: Any) -> Tensors:
    logp, entropy = function(hidden, head, *rest, **keys)
    learned = [hidden, head, *([keys["bias"]] if "bias" in keys else [])]
    return logp.detach(), entropy.detach(), *torch.autograd.grad((logp + 0.3 * entropy).sum(), learned)


def test_huge_logits_give_finite_values_and_gradients():
    hidden = torch.tensor([[1e4], [-1e4]], requires_grad=True)
    head = torch.tensor([[1.0], [0.0], [-1.0]], requires_grad=True)
    logp, entropy = logprob(hidden, head, torch.tensor([0, 0]), torch.ones(2), tile=(1, 2))
    assert logp.tolist() == [0.0, -2e4]
    assert entropy.tolist() == [0.0, 0.0]
    (logp.sum() + entropy.sum()).backward()
    assert hidden.grad.isfinite().all()
    assert head.grad.isfinite().all()


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_a_common_offset_of_all_logits_does_not_spoil_the_gradient(backend, frozen):
    """Maximum and log-sum are stored apart. Their sum, −1000 + log s, would be rounded to 3e-5, and the offset multiplies that error."""
    assert compare_with_offset(backend, frozen) < 3e-3


@pytest.mark.parametrize("backend", ["torch", "liger"])
def test_no_tokens_give_zero_gradients_not_none(backend):
    head = torch.randn(7, 3, requires_grad=True)
    hidden = torch.randn(2, 3, requires_grad=True)
    logp, entropy = logprob(hidden[:0], head, torch.zeros(0, dtype=torch.int64), torch.ones(0), backend=backend)
    (logp.sum() + entropy.sum()).backward()
    assert head.grad.abs().sum() == 0
    assert hidden.grad.abs().sum() == 0


class LargestTensor(torch.utils._python_dispatch.TorchDispatchMode):
    """Records the size of the largest tensor that any operation returns, and counts products."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = self.products = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple) else (out,):
            if isinstance(tensor, torch.Tensor):
                self.largest = max(self.largest, tensor.numel())
        self.products += func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm_)
        return out


@pytest.mark.parametrize("frozen", [False, True])
def test_logits_are_never_held_whole(frozen):
    hidden, head, labels, temperature = inputs(400, 4, 3000, torch.float32)
    with LargestTensor() as watch:
        logp, _ = logprob(hidden, head.detach() if frozen else head, labels, temperature, tile=(64, 256))
        logp.sum().backward()
    assert watch.largest <= max(64 * 256, head.numel())


def test_a_frozen_head_costs_two_products_a_tile():
    hidden, head, labels, temperature = inputs(40, 4, 300, torch.float32)
    tiles = 3 * 3
    for frozen, products in ((False, 4), (True, 2)):
        with LargestTensor() as watch:
            logp, _ = logprob(hidden, head.detach() if frozen else head, labels, temperature, tile=(16, 100))
            logp.sum().backward()
        assert watch.products == products * tiles


def test_liger_gives_the_same_values_and_gradients_where_it_applies():
    hidden, head, labels, _ = inputs(20, 8, 50, torch.float32)
    temperature = torch.full((20,), 0.7)
    results = [
        values_and_gradients(logprob, hidden, head, labels, temperature, scale=0.5, backend=backend) for backend in ("torch", "liger")
    ]
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"bias": torch.zeros(50)}, "this head has a bias"),
        ({"softcap": 2.0}, "these logits are bounded by 2;"),
        ({"softcap": 2.0, "bias": torch.zeros(50)}, "this head has a bias and these logits are bounded by 2;"),
        ({}, "it supports one temperature, but these tokens have 0.6"),
    ],
)
def test_liger_is_refused_where_it_computes_something_else(keys, message):
    hidden, head, labels, temperature = inputs(20, 8, 50, torch.float32)
    with pytest.raises(ValueError, match=rf"model\.logprob_backend is liger: {message}.*set model\.logprob_backend=auto"):
        logprob(hidden, head, labels, temperature, backend="liger", **keys)


@pytest.mark.parametrize(
    ("name", "dtype", "message"),
    [
        ("triton", torch.float32, "it needs CUDA, but this is cpu"),
        ("triton", torch.float64, "its kernels compute in float32"),
        ("liger", torch.bfloat16, r"on cpu it rounds logits and entropy to torch\.bfloat16, but float32 is needed"),
        ("liger", torch.float64, "it computes in float32, but these tensors are float64"),
        ("cuda", torch.float32, "it must be one of auto, torch, triton, liger"),
    ],
)
def test_a_backend_that_does_not_apply_is_refused_with_the_reason(name, dtype, message):
    with pytest.raises(ValueError, match=rf"model\.logprob_backend is {name}: {message}.*set model\.logprob_backend=auto"):
        choose_backend(name, torch.device("cpu"), dtype)


@pytest.mark.parametrize(
    ("capability", "dtype", "message"),
    [
        ((9, 0), torch.bfloat16, "its kernel for compute capability 9.0 rounds the entropy to bfloat16, but float32 is needed"),
        ((9, 0), torch.float32, "its kernel for compute capability 9.0 takes bfloat16, but these tensors are torch.float32"),
        ((8, 0), torch.bfloat16, "on cuda it rounds logits and entropy to torch.bfloat16, but float32 is needed"),
        ((10, 0), torch.float32, None),
    ],
)
def test_liger_is_refused_wherever_it_does_not_give_float32(capability, dtype, message, monkeypatch):
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: capability)
    monkeypatch.setattr("rlx.kernels.liger.find_spec", lambda name: name)
    assert why_not(torch.device("cuda"), dtype) == message


def test_auto_takes_triton_on_cuda_for_a_real_vocabulary_and_torch_elsewhere():
    assert choose_backend("auto", torch.device("cuda"), torch.bfloat16) == "triton"
    assert choose_backend("auto", torch.device("cuda"), torch.bfloat16, 151_936) == "triton"
    assert choose_backend("auto", torch.device("cuda"), torch.bfloat16, 104) == "torch"
    assert choose_backend("auto", torch.device("cuda"), torch.float64) == "torch"
    assert choose_backend("auto", torch.device("cpu"), torch.float32) == "torch"


def test_different_dtypes_are_refused():
    labels, one = torch.zeros(1, dtype=torch.int64), torch.ones(1)
    half, full = torch.zeros(1, 2, dtype=torch.bfloat16), torch.zeros(3, 2)
    with pytest.raises(ValueError, match=r"hidden is torch\.bfloat16 but head is torch\.float32"):
        logprob(half, full, labels, one)
    with pytest.raises(ValueError, match=r"hidden is torch\.bfloat16 but bias is torch\.float32"):
        logprob(half, full.bfloat16(), labels, one, bias=torch.zeros(3))


MEASURE = """
import sys
from pathlib import Path
import torch
from rlx.kernels.logprob import logprob

def mib(field):
    return next(int(line.split()[1]) for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field)) / 1024

def run(n, v):
    hidden, head = torch.randn(n, 16).requires_grad_(), torch.randn(v, 16).requires_grad_()
    labels, temperature = torch.randint(0, v, (n,)), torch.ones(n)
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = mib("VmRSS")
    logp, entropy = logprob(hidden, head, labels, temperature)
    (logp.sum() + entropy.sum()).backward()
    return mib("VmHWM") - before - hidden.grad.nbytes / 2**20 - 2 * logp.nbytes / 2**20

torch.set_num_threads(1)
run(64, 500)  # libraries
print(run(int(sys.argv[1]), 151_936))
"""
