"""Long samples of a packed row, which cuDNN computes on CUDA: how rows are cut, and that values and gradients stay the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from trainer_examples import make_model
from transformers import Gemma3TextConfig, MistralConfig

from rlx.models import attention, flash, layout
from rlx.models.flash import attend_long, cudnn_agrees
from rlx.models.layout import build_layout
from rlx.models.policy import PolicyModel

CUDA = torch.device("cuda")


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
    assert row.cu_seqlens is not None
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
    assert cudnn_agrees(CUDA, [(32, 8, 128), (16, 16, 64)]) is chosen


@pytest.mark.gpu
def test_a_mixed_row_has_the_values_and_gradients_of_flash_attention_alone() -> None:
    keys = {"hidden_size": 64, "head_dim": 64, "max_position_embeddings": 8192}
    model = PolicyModel(make_model(**keys).to(CUDA, torch.bfloat16))
    lengths = [300, 4500, 5000, 17]
    mixed, varlen = (gradients_of(model, row_of(lengths, kind, CUDA)) for kind in ("mixed", "varlen"))
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
    model = PolicyModel(make_model(family, hidden_size=64, head_dim=64, max_position_embeddings=8192, **keys).to(CUDA, torch.bfloat16))
    lengths = [300, 20, 1500, 49]
    fast, plain = (gradients_of(model, row_of(lengths, kind, CUDA)) for kind in ("varlen", "shared"))
    for one, other in zip(fast, plain, strict=True):
        assert float((one.float() - other.float()).norm() / other.float().norm()) < 0.03
