"""Several adapters beside one model: each run of a shared trainer has a *slot* (docs/many_runs.md).

    y[t] = W x[t] + s_k · B_k A_k x[t]      k: the slot of token t

A packed row holds the samples of all runs, ordered by slot, so every slot has one stretch of the computed tokens (`Stretch`). The model is
multiplied once for the whole row, each adapter for its stretch alone. `Slot` shows one adapter as a model with that adapter alone: its
weights have the same names, so versions, checkpoints and optimizer states are those of a run with a trainer of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rlx.config.schema import LoraConfig
from rlx.models.layout import Here
from rlx.models.lora import PARAMETERS, AdaptedLinear, adapted, add_adapter, draw, targets
from rlx.models.policy import PolicyModel


class Adapter(nn.Module):
    """One adapter of one layer."""

    lora_A: nn.Parameter  # [r, in]
    lora_B: nn.Parameter  # [out, r]

    def __init__(self, layer: nn.Linear, rank: int, dtype: torch.dtype) -> None:
        super().__init__()
        device = layer.weight.device
        self.lora_A = nn.Parameter(torch.empty(rank, layer.in_features, dtype=dtype, device=device))
        self.lora_B = nn.Parameter(torch.empty(layer.out_features, rank, dtype=dtype, device=device))
        self.scaling, self.dropout = 1.0, 0.0  # of the run in this slot


class SlotsLinear(AdaptedLinear):
    """A frozen linear layer with `count` adapters of one rank."""

    def __init__(self, base: nn.Linear, rank: int, count: int, here: Here, dtype: torch.dtype | None = None) -> None:
        """Takes over the parameters of `base`. The adapters are not initialised."""
        nn.Module.__init__(self)
        self.in_features, self.out_features = base.in_features, base.out_features
        self.weight, self.bias = base.weight, base.bias
        self.active, self.here = True, here
        self.slots = nn.ModuleList(Adapter(base, rank, dtype or base.weight.dtype) for _ in range(count))

    def forward(self, input: Tensor) -> Tensor:
        """[…, in] → […, out], with the tokens flattened in the order of the stretches. Raises ValueError for another number of tokens."""
        if not self.active or not self.here.stretches:
            return F.linear(input, self.weight, self.bias)
        flat, parts = input.flatten(0, -2), []
        if len(flat) != (end := self.here.stretches[-1].end):
            raise ValueError(
                f"a layer with several adapters got {len(flat)} of {end} tokens (experts?); leave it out of lora.target_modules"
            )
        outputs = F.linear(flat, self.weight, self.bias).split([stretch.end - stretch.start for stretch in self.here.stretches])
        for stretch, output in zip(self.here.stretches, outputs, strict=True):
            adapter: Any = self.slots[stretch.slot]
            own = flat[stretch.start : stretch.end]
            if adapter.dropout and torch.is_grad_enabled():
                own = F.dropout(own, adapter.dropout)
            parts.append(add_adapter(output, own, adapter.lora_A, adapter.lora_B, adapter.scaling))
        return torch.cat(parts).unflatten(0, input.shape[:-1])


def add_slots(hf: Any, lora: LoraConfig, count: int, dtype: torch.dtype | None = None) -> Here:
    """Freeze a model and put `count` adapters beside each of its target layers, in place. Raises ValueError as `add_adapters` does.

    Returns what its layers share (`PolicyModel.slots`). `draw_adapters` must follow, and `Slot.begin` for each run.
    """
    assert lora.rank, "the configuration has no adapters"
    wanted, here = targets(hf, lora.target_modules), Here()
    hf.requires_grad_(False)
    for name in wanted:
        parent, _, leaf = name.rpartition(".")
        setattr(hf.get_submodule(parent), leaf, SlotsLinear(hf.get_submodule(name), lora.rank, count, here, dtype))
    return here


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
            assert isinstance(layer, SlotsLinear)
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
