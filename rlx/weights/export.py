"""What a model's tensors are called and how they are shaped in published checkpoints, which is what servers load.

transformers fuses the experts of some models: the trainer then has one tensor of all experts of a layer (`mlp.experts.gate_up_proj`),
and a checkpoint has a matrix of each (`mlp.experts.3.gate_proj.weight`). Versions have the names of checkpoints, in files and from memory.
It knows nothing of files, ranks and transfers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rlx.weights.division import by_layer

if TYPE_CHECKING:
    import torch

    from rlx.models.policy import PolicyModel
    from rlx.models.slots import Slot
    from rlx.weights.files import Tensors


class Export:
    """The export of one model, whose tensors keep their names and shapes."""

    def __init__(self, model: PolicyModel | Slot, dtype: torch.dtype) -> None:
        """`dtype`: of the published parameters; buffers, and what the family keeps in float32, keep theirs."""
        self.model: Any = model
        self.dtype = dtype

    def published(self, name: str, tensor: torch.Tensor) -> torch.dtype:
        """The dtype in which a tensor is published. Buffers, and what a family keeps in float32, are never cast for computing, so servers
        must not get rounded ones."""
        return self.dtype if tensor.is_floating_point() and name not in self._exact else tensor.dtype

    def convert(self, tensors: Tensors) -> Tensors:
        """These tensors of the trainer, as a checkpoint has them. They may be views."""
        return self._conversion[0](tensors)

    @property
    def together(self) -> bool:
        """Whether a tensor of a checkpoint may need several of the trainer's."""
        return self._conversion[1]

    @functools.cached_property
    def converts(self) -> bool:
        """Whether published checkpoints have other tensors than the trainer."""
        own = {name: tensor.shape for name, tensor in self._meta.items()}
        return self.together or _shapes(self.described(list(own))) != own

    @functools.cached_property
    def by_layer(self) -> bool:
        """Whether layers that are converted one by one give the same tensors as all together."""
        names = list(self._meta)
        one_by_one = [self.described(unit) for unit in by_layer(names)]
        return _shapes({name: tensor for each in one_by_one for name, tensor in each.items()}) == _shapes(self.described(names))

    def described(self, names: Sequence[str]) -> Tensors:
        """What these tensors are in checkpoints: on the meta device, so names, dtypes and shapes alone."""
        return self.convert({name: self._meta[name] for name in names})

    @functools.cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every tensor in checkpoints, by name."""
        return {name: tuple(shape) for name, shape in _shapes(self.described(list(self._meta))).items()}

    def units(self) -> list[list[str]]:
        """The trainer's tensors, by name, that are converted together: layers, or single tensors if nothing is converted."""
        return by_layer(self._meta) if self.converts else [[name] for name in self._meta]

    @functools.cached_property
    def _exact(self) -> frozenset[str]:
        from rlx.models.exact import kept_exact

        hf = self.model.hf
        kept = kept_exact(hf, self.dtype) if hasattr(hf, "config") else ()  # adapters of a slot have no model
        return frozenset(name for name, _ in (*hf.named_buffers(), *kept))

    @functools.cached_property
    def _meta(self) -> Tensors:
        """The trainer's tensors with their whole shapes and published dtypes, in the model's order."""
        import torch

        weights = self.model.named_weights()
        return {name: torch.empty(tensor.shape, dtype=self.published(name, tensor), device="meta") for name, tensor in weights}

    @functools.cached_property
    def _conversion(self) -> tuple[Callable[[Tensors], Tensors], bool]:
        """The function of `convert`, and `together`."""
        if self.model.adapts:
            from rlx.models.lora import exported

            return exported, True
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import revert_weight_conversion

        hf: Any = self.model.hf
        return functools.partial(revert_weight_conversion, hf), bool(get_model_conversion_mapping(hf, add_legacy=False))


def _shapes(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in tensors.items()}
