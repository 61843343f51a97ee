"""Packed copies that a CPU engine multiplies with: those with other values than their weights are named."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_weights_attest import Layer
from torch import nn

from rlx.inference.server.kept import check_packed


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


def test_a_wrong_value_in_one_column_of_a_packed_copy_is_found_in_some_turn() -> None:
    model = nn.Module()
    model.layer = Layer(weight=(6, 50))
    model.layer.quant_method = Multiplies()  # type: ignore[assignment]
    model.layer.quant_method.pack(model.layer)
    packed = {model.layer: model.layer.weight}
    model.layer.copy[2, 7] += 1
    found = []
    for turn in range(50):
        try:
            check_packed(model, packed, turn)
        except ValueError:
            found.append(turn)
    assert len(found) == 4, "each of the four columns comes by"
