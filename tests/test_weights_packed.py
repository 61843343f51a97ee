"""Packed copies that a CPU engine multiplies with: those with other values than their weights are named."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_weights_attest import Layer
from torch import nn

from rlx.inference.server.kept import check_packed, question


class Multiplies:
    """A layer's way to multiply: with a copy that is made at packing."""

    def pack(self, layer: Any) -> None:
        layer.copy = layer.weight.detach().clone()

    def apply(self, layer: Any, x: torch.Tensor) -> torch.Tensor:
        return x @ layer.copy.T


def test_a_layer_that_was_not_packed_again_is_named() -> None:
    model = nn.Module()
    model.first, model.second = Layer(weight=(6, 5)), Layer(weight=(3, 1))
    packed: dict[nn.Module, torch.Tensor] = {}
    for layer in (model.first, model.second):
        layer.quant_method = Multiplies()  # type: ignore[assignment]
        layer.quant_method.pack(layer)
        packed[layer] = layer.weight
    check_packed(model, packed)
    with torch.no_grad():
        model.first.weight += 1
        model.second.weight += 1
    model.second.quant_method.pack(model.second)
    with pytest.raises(ValueError, match=r"not those that were trained: 1 of 2 packed layers multiply with other values .*: first$"):
        check_packed(model, packed)


@pytest.mark.parametrize(("dtype", "slightly"), [(torch.float32, 1e-3), (torch.bfloat16, 0.5)])
def test_a_wrong_value_anywhere_in_a_packed_copy_is_found_at_every_turn(dtype: torch.dtype, slightly: float) -> None:
    torch.manual_seed(0)
    model = nn.Module()
    model.layer = Layer(weight=(6, 50))
    weight = model.layer.weight.data = torch.randn(6, 50).to(dtype)
    weight[3] *= 100  # a row's rounding is that of its own values
    model.layer.quant_method = Multiplies()  # type: ignore[assignment]
    model.layer.quant_method.pack(model.layer)
    packed = {model.layer: model.layer.weight}
    for turn in range(50):
        check_packed(model, packed, {model.layer: question(weight, turn)})
    model.layer.copy[2, 7] += slightly * weight[2].norm()
    for turn in range(50):
        with pytest.raises(ValueError, match="1 of 1 packed layers"):
            check_packed(model, packed, {model.layer: question(weight, turn)})


def test_a_change_that_is_smaller_than_rounding_is_found_where_the_whole_copy_is_old() -> None:
    torch.manual_seed(0)
    model = nn.Module()
    model.layer = Layer(weight=(6, 50))
    model.layer.weight.data = torch.randn(6, 50)
    model.layer.quant_method = Multiplies()  # type: ignore[assignment]
    model.layer.quant_method.pack(model.layer)
    model.layer.weight.data *= 1 + 1e-6
    with pytest.raises(ValueError, match="1 of 1 packed layers"):
        check_packed(model, {model.layer: model.layer.weight})


def test_a_weight_that_is_not_finite_is_not_called_wrong() -> None:
    model = nn.Module()
    model.layer = Layer(weight=(6, 50))
    model.layer.weight.data[2, 7] = torch.inf
    model.layer.quant_method = Multiplies()  # type: ignore[assignment]
    model.layer.quant_method.pack(model.layer)
    check_packed(model, {model.layer: model.layer.weight})
