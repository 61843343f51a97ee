"""Attention of long and packed rows on a GPU."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.attention import _fa3, current_flash_attention_impl
from trainer_examples import make_model
from transformers import Gemma3TextConfig, MistralConfig

from rlx.models import attention, flash, layout, load
from rlx.models.flash import attend_long, cudnn_agrees, install_flash_attention_3, remove_flash_attention_3
from rlx.models.layout import build_layout
from rlx.models.policy import PolicyModel

ON_CUDA = torch.device("cuda")


def row_of(lengths: list[int], kind: Any, device: torch.device | str = "cpu", vocabulary: int = 40) -> layout.Layout:
    """A row of random samples, in which every token but a sample's last predicts a trainable one."""
    ids = np.random.default_rng(0).integers(3, vocabulary, sum(lengths))
    bounds = np.array([0, *np.cumsum(lengths)])
    scored = np.ones(len(ids), dtype=bool)
    scored[bounds[1:] - 1] = False
    return build_layout(ids, bounds, scored, kind, device)


def gradients_of(model: PolicyModel, row: layout.Layout) -> list[torch.Tensor]:
    """The log-probabilities of all tokens, and the gradients of a function of them."""
    model.zero_grad()
    count = row.num_tokens
    device = row.token_ids.device
    labels = (torch.arange(count, device=device) * 7) % 40
    logp, entropy = model(row, torch.arange(count, device=device), labels, torch.ones(count, device=device))
    ((logp * torch.linspace(-1, 1, count, device=device)).sum() + entropy.sum()).backward()
    return [logp.detach(), *(parameter.grad.clone() for parameter in model.parameters())]


def test_every_long_sample_is_a_piece_and_so_are_the_short_ones_between_two(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "LONG", 8)
    row = row_of([4, 6, 10, 8, 3], "mixed")  # a sample's last token predicts nothing and is left out: of 8 tokens, 7 are computed
    found = [
        (piece.start, piece.end, None if piece.cu_seqlens is None else piece.cu_seqlens.tolist(), piece.longest) for piece in row.pieces
    ]
    assert found == [(0, 8, [0, 3, 8], 5), (8, 17, None, 0), (17, 24, None, 0), (24, 26, [0, 2], 2)]
    assert row.cu_seqlens.tolist() == [0, 3, 8, 17, 24, 26]
    assert not row_of([4, 6], "mixed").pieces, "a row without a long sample is one call"
    assert not row_of([4, 6, 10], "varlen").pieces


@pytest.mark.parametrize("lengths", [[7], [8, 5, 12]])
def test_long_samples_by_themselves_have_the_values_and_gradients_of_the_packed_row(
    lengths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layout, "LONG", 2)
    monkeypatch.setattr(flash, "STEP", 4)  # some are padded
    model = PolicyModel(make_model())
    row = row_of(lengths, "mixed")
    assert len(row.pieces) == len(lengths)
    for one, other in zip(gradients_of(model, row), gradients_of(model, row_of(lengths, "shared")), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_a_sliding_window_that_a_long_sample_exceeds_is_left_to_flash_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "LONG", 2)
    seen: list[tuple[int, int]] = []

    def stand_in(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bounds: Any, longest: int, scale: Any, back: int, grouped: bool) -> Any:
        seen.append((longest, back))
        return torch.zeros_like(q)

    monkeypatch.setattr(attention, "flash", stand_in)
    module = torch.nn.Module()
    q, k = torch.randn(1, 4, 11, 8), torch.randn(1, 2, 11, 8)
    row = row_of([12], "mixed")
    attention.packed_attention(module, q, k, k, None, layout=row, sliding_window=5)
    assert seen == [(11, 4)]
    whole, _ = attention.packed_attention(module, q, k, k, None, layout=row, sliding_window=11)
    plain = attend_long(q[0].transpose(0, 1), k[0].transpose(0, 1), k[0].transpose(0, 1), None, True)
    assert seen == [(11, 4)], "a window as long as the sample hides nothing"
    torch.testing.assert_close(whole[0], plain)


def test_one_long_sample_takes_no_memory_of_its_length_squared() -> None:
    row = row_of([4097], "shared")
    sizes = [getattr(bucket, name).numel() for bucket in row.buckets for name in ("queries", "keys", "query_positions", "key_positions")]
    assert max(sizes) == 4096
    assert all(bucket.visible(window) is None for bucket in row.buckets for window in (None, 4096))


def test_without_cuda_neither_cudnn_nor_the_third_generation_is_chosen() -> None:
    assert not cudnn_agrees(torch.device("cpu"), [(4, 2, 64)])
    assert not flash.install_flash_attention_3(torch.device("cpu"), [(4, 2, 64)])


@pytest.mark.parametrize(("factor", "agrees"), [(1.0, True), (1.001, True), (1.05, False), (float("nan"), False)])
def test_another_way_is_used_only_if_its_values_and_gradients_agree(
    factor: float, agrees: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(flash, "TRIED", 48)

    def attended(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return attend_long(q, k, v, None, True)

    cpu, shapes = torch.device("cpu"), [(4, 2, 16), (4, 2, 32)]
    plain = flash._tried(cpu, shapes, attended)
    assert len(plain) == 8, "values and three gradients of each width"
    other = flash._tried(cpu, shapes, lambda q, k, v: attended(q, k, v) * factor)
    assert flash._agree(plain, other, "cuDNN") is agrees
    assert ("attention by cuDNN differs" in caplog.text) is not agrees


def test_heads_that_cannot_be_computed_are_left_to_the_other_way() -> None:
    def fails(*_: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate")

    found = flash._tried(torch.device("cpu"), [(4, 2, 16)], fails)
    assert found == []
    assert not flash._agree([torch.ones(1)], found, "cuDNN")


@pytest.mark.gpu
def test_from_hopper_on_cudnn_agrees_with_flash_attention_on_this_gpu() -> None:
    chosen = torch.cuda.get_device_capability() >= flash.HOPPER
    assert cudnn_agrees(ON_CUDA, [(32, 8, 128), (16, 16, 64)]) is chosen


@pytest.mark.gpu
def test_a_mixed_row_has_the_values_and_gradients_of_flash_attention_alone() -> None:
    keys = {"hidden_size": 64, "head_dim": 64, "max_position_embeddings": 8192}
    model = PolicyModel(make_model(**keys).to(ON_CUDA, torch.bfloat16))
    lengths = [300, 4500, 5000, 17]
    mixed, varlen = (gradients_of(model, row_of(lengths, kind, ON_CUDA)) for kind in ("mixed", "varlen"))
    for one, other in zip(mixed, varlen, strict=True):
        assert float((one.float() - other.float()).norm() / other.float().norm()) < 0.03


WINDOWS = [
    pytest.param(MistralConfig, {"sliding_window": 48}, id="mistral"),
    pytest.param(Gemma3TextConfig, {"sliding_window": 48}, id="gemma3"),
]
"""Families with windows that the samples below exceed."""


@pytest.mark.gpu
@pytest.mark.parametrize(("family", "keys"), WINDOWS)
def test_sliding_windows_have_the_values_and_gradients_of_segments_by_sdpa(family: type, keys: dict[str, Any]) -> None:
    model = PolicyModel(make_model(family, hidden_size=64, head_dim=64, max_position_embeddings=8192, **keys).to(ON_CUDA, torch.bfloat16))
    lengths = [300, 20, 1500, 49]
    fast, plain = (gradients_of(model, row_of(lengths, kind, ON_CUDA)) for kind in ("varlen", "shared"))
    for one, other in zip(fast, plain, strict=True):
        assert float((one.float() - other.float()).norm() / other.float().norm()) < 0.03


CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")
SHAPES = [(4, 2, 16), (4, 4, 32)]
NAME = "flash_attn_interface"


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """This machine has a Hopper GPU, whose tensors lie in host memory, and a second generation of FlashAttention."""
    tried = flash._tried
    monkeypatch.setattr(flash, "_tried", lambda device, *rest: tried(CPU if device.type == "cuda" else device, *rest))
    monkeypatch.setattr(flash, "TRIED", 48)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: flash.HOPPER)
    for refuses in ("_fa3_forward_support_error", "_fa3_backward_support_error"):  # they ask for tensors on a GPU
        monkeypatch.setattr(_fa3, refuses, lambda *_: None)
    with torch.library._scoped_library("aten", "IMPL") as kernels:
        kernels.impl("_flash_attention_forward", forward, "CPU")
        kernels.impl("_flash_attention_backward", backward, "CPU")
        yield monkeypatch
    remove_flash_attention_3()


@pytest.fixture
def package(hopper: pytest.MonkeyPatch) -> Iterator[Any]:
    """The package is installed."""
    hopper.syspath_prepend(Path(__file__).parent / "flash_attention_3")
    module = importlib.import_module(NAME)
    yield module
    remove_flash_attention_3()
    module.LIBRARY._destroy()
    del sys.modules[NAME]


def plain() -> ModuleType:
    return sys.modules[NAME]


def forward(q: Any, k: Any, v: Any, bounds: Any, bounds_k: Any, *rest: Any, **keys: Any) -> Any:
    """What torch's dispatcher does on CUDA: the kernel of the generation that is active."""
    if current_flash_attention_impl() == "FA3":
        return _fa3._fa3_flash_attention_forward_impl_default(q, k, v, bounds, bounds_k, *rest, **keys)
    causal, left, right = rest[3], keys["window_size_left"], keys["window_size_right"]
    out, lse, _ = plain().attend(q, k, v, bounds, keys.get("scale"), causal, left, right)
    unused = torch.zeros(2, dtype=torch.uint64)
    return out.to(q.dtype), lse, unused, unused[0].clone(), torch.empty(0)


def backward(dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, bounds: Any, *rest: Any, **keys: Any) -> Any:
    if current_flash_attention_impl() == "FA3":
        return _fa3._fa3_flash_attention_backward_impl(dout, q, k, v, out, lse, bounds, *rest, **keys)
    _, _, kept = plain().attend(q, k, v, bounds, keys.get("scale"), rest[4], keys["window_size_left"], keys["window_size_right"])
    return tuple(gradient.to(q.dtype) for gradient in plain().gradients(dout, q, k, kept, keys.get("scale")))


def test_it_is_activated_after_it_was_compared_with_the_second_generation_and_removed(package: Any) -> None:
    assert install_flash_attention_3(CUDA, SHAPES)
    assert current_flash_attention_impl() == "FA3"
    assert [call["op"] for call in package.CALLS] == ["fwd", "bwd"] * len(SHAPES), "values and gradients of every width"
    for call, shape in zip(package.CALLS, (shape for shape in SHAPES for _ in range(2)), strict=True):
        heads, key_heads, width = shape
        assert call["q"].shape == (48, heads, width)
        assert call["k"].shape == call["v"].shape == (48, key_heads, width)
        assert call["q"].dtype == torch.bfloat16
        assert call["cu_seqlens_q"].tolist() == call["cu_seqlens_k"].tolist() == [0, 48]
    remove_flash_attention_3()
    assert current_flash_attention_impl() is None
    package.CALLS.clear()
    gradients_of(PolicyModel(make_model()), row_of([7, 5], "varlen"))
    assert package.CALLS == [], "the second generation computes again"


def test_a_build_that_differs_or_cannot_be_imported_is_not_used(
    package: Any, hopper: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert install_flash_attention_3(CUDA, SHAPES)
    package.STATE["factor"] = 1.05
    assert not install_flash_attention_3(CUDA, SHAPES), "it is not compared with itself"
    assert current_flash_attention_impl() is None
    assert "attention by FlashAttention 3 differs from torch's FlashAttention by" in caplog.text

    package.STATE["factor"] = 1.0
    hopper.setattr(_fa3, "_fa3_import_module", lambda _: (_ for _ in ()).throw(ImportError("undefined symbol")))
    assert not install_flash_attention_3(CUDA, SHAPES)
    assert current_flash_attention_impl() is None
    assert "FlashAttention 3 is installed, but torch cannot use it: undefined symbol" in caplog.text


@pytest.mark.parametrize("everywhere", [True, False])
def test_all_ranks_use_the_same_generation(package: Any, everywhere: bool, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "rlx.trainer")
    mesh: Any = SimpleNamespace(device=CUDA, any=lambda lacks: lacks or not everywhere)
    model = PolicyModel(make_model())
    load.choose_attention(model, mesh)
    assert current_flash_attention_impl() == ("FA3" if everywhere else None)
    assert not model.long_apart
    assert caplog.messages[-1] == f"attention: FlashAttention {3 if everywhere else 2}"
