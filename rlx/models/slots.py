"""Several adapters beside one model: each run of a shared trainer has a *slot* (docs/lora.md).

    y[t] = W x[t] + s_k · B_k A_k x[t]      k: the slot of token t

A packed row holds the samples of all runs, ordered by slot, so every slot has one stretch of the computed tokens (`AdapterSpan`). The
model is multiplied once for the whole row, each adapter for its stretch alone. `Slot` shows one adapter as a model with that adapter
alone: its weights have the same names, so versions, checkpoints and optimizer states are those of a run with a trainer of its own.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from rlx.config.schema import LoraConfig
from rlx.models.lora import PARAMETERS, Adapter, adapted, draw
from rlx.models.policy import PolicyModel


class Slot(nn.Module):
    """One adapter of a model with several, as a model with this adapter alone. It shares the parameters, and has no forward of its own."""

    adapts = True

    def __init__(self, model: PolicyModel, number: int) -> None:
        super().__init__()
        self._whole = [model]  # in a list, so that its parameters are not those of this module
        self.number, self.base = number, model.base
        self.logprob_backend, self.liger = model.logprob_backend, model.liger
        self.hf = nn.Module()
        self._adapters: list[Adapter] = []
        for name, layer in adapted(model.hf).items():
            adapter = layer.slots[number]
            assert isinstance(adapter, Adapter)
            self._adapters.append(adapter)
            place = self.hf
            for part in name.split("."):
                if part not in dict(place.named_children()):
                    place.add_module(part, nn.Module())
                place = place.get_submodule(part)
            for parameter in PARAMETERS:
                place.register_parameter(parameter, getattr(adapter, parameter))

    @property
    def whole(self) -> PolicyModel:
        """The model that computes."""
        return self._whole[0]

    @property
    def layers(self) -> nn.ModuleList:
        """The decoder layers of the whole model."""
        return self._whole[0].layers

    def begin(self, lora: LoraConfig, seed: int) -> None:
        """A run with these adapters begins in this slot: they are drawn as for a run with a trainer of its own."""
        generator = torch.Generator().manual_seed(seed)
        for adapter in self._adapters:
            adapter.scaling, adapter.dropout = lora.scaling, lora.dropout
            draw(adapter.lora_A, adapter.lora_B, generator)

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """The adapter, by the names of a model with it alone. Sharded tensors come as DTensors."""
        for name, tensor in self.hf.named_parameters():
            yield name, tensor.detach()
