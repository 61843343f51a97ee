"""The end of a CPU engine's step: the head in float32 piece by piece, and tokens drawn with one number each."""

from __future__ import annotations

from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F

from rlx.inference.server import draws
from rlx.inference.server.draws import draw, multiply, shorten_steps

pytestmark = pytest.mark.slow


def generators(count: int, first: int = 0) -> dict[int, torch.Generator]:
    return {row: torch.Generator().manual_seed(first + row) for row in range(count)}


def test_tokens_are_drawn_as_often_as_their_probabilities_say():
    wanted = torch.tensor([0.5, 0.0, 0.3, 0.15, 0.05, 0.0])
    count = 20_000
    found = torch.bincount(draw(wanted.expand(count, -1), generators(count)), minlength=len(wanted)) / count
    assert found[1] == found[5] == 0
    assert float(((found - wanted).abs() / (wanted * (1 - wanted) / count).sqrt().clamp(min=1e-9)).max()) < 4.5  # standard deviations


def test_a_row_draws_the_same_beside_other_rows_and_takes_one_number(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(draws, "PIECE", 2 * 50)  # two rows at a time
    probabilities = torch.rand(5, 50, generator=torch.Generator().manual_seed(0)).softmax(-1)
    together = draw(probabilities, given := generators(5))
    mixed = draw(probabilities, {row: one for row, one in generators(5).items() if row != 2})
    assert together[[0, 1, 3, 4]].tolist() == mixed[[0, 1, 3, 4]].tolist(), "row 2 has no seed there"
    for row in range(5):
        own = {0: torch.Generator().manual_seed(row)}
        assert draw(probabilities[row : row + 1], own) == together[row]
        one = torch.Generator().manual_seed(row)
        torch.empty((), dtype=torch.float64).uniform_(generator=one)
        assert torch.equal(one.get_state(), given[row].get_state())


def test_the_largest_random_number_draws_the_last_token_that_has_a_probability():
    """Rounding makes it the sum of all probabilities."""
    probabilities = torch.tensor([[0.25, 0.75, 0.0, 0.0], [0.1, 0.2, 0.3, 0.4]])
    with patch.object(torch.Tensor, "uniform_", lambda number, generator: number.fill_(1.0)):
        assert draw(probabilities, generators(2)).tolist() == [1, 3]
    with patch.object(torch.Tensor, "uniform_", lambda number, generator: number.fill_(0.0)):
        assert draw(torch.tensor([[0.0, 0.25, 0.75, 0.0]]), generators(1)).tolist() == [1], "and the smallest the first"


@pytest.mark.parametrize("bias", [False, True])
def test_the_head_is_multiplied_as_in_float32(bias: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(draws, "PIECE", 16 * 24)
    hidden, weight = torch.randn(3, 24).bfloat16(), torch.randn(100, 24).bfloat16()  # pieces of 16 rows, the last of 4
    offset = torch.randn(100).bfloat16() if bias else None
    expected = F.linear(hidden.double(), weight.double(), None if offset is None else offset.double())
    found = multiply(hidden, weight, offset)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(multiply(hidden[None], weight, offset), found[None])


def test_a_row_that_is_not_finite_gives_token_0_as_vllms_own_draw_does():
    assert draw(torch.tensor([[torch.nan, torch.nan], [0.0, 1.0]]), generators(2)).tolist() == [0, 1]


def test_vllms_classes_are_changed_once_for_all_rows_and_multiply_themselves_in_the_heads_own_dtype():
    shorten_steps()
    shorten_steps()
    sampler = SimpleNamespace(use_fp64_gumbel=False, logprobs_mode="raw_logprobs")
    forward = draws.TopKTopPSampler.forward_cpu
    assert not hasattr(forward.__wrapped__, "__wrapped__"), "changed once"
    sure = torch.full((2, 7), -torch.inf)
    sure[0, 3] = sure[1, 5] = 0.0
    for seeded in (0, 1, 2):
        with patch.object(draws, "draw", side_effect=draw) as ours:
            assert forward(sampler, sure.clone(), generators(seeded), None, None)[0].tolist() == [3, 5]
        ours.assert_called_once()
    top = torch.tensor([[3.0, 2.0, 1.0]])
    processed = SimpleNamespace(use_fp64_gumbel=False, logprobs_mode="processed_logprobs")
    kept, returned = forward(processed, top, generators(1), torch.tensor([1]), None)
    assert (kept.tolist(), returned.tolist()) == ([0], [[0.0, -torch.inf, -torch.inf]])
    apply = draws.LogitsProcessor._apply_head
    head = SimpleNamespace(weight=torch.ones(2, 2), quant_method=SimpleNamespace(apply=lambda *_, **__: "vLLM's own"))
    assert apply(SimpleNamespace(head_dtype=None), head, torch.ones(1, 2), None) == "vLLM's own"
