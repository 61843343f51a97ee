"""What a model's tensors are called and how they are shaped in published checkpoints, which is what servers load.

transformers fuses the experts of some models: the trainer then has one tensor of all experts of a layer (`mlp.experts.gate_up_proj`),
and a checkpoint has a matrix of each (`mlp.experts.3.gate_proj.weight`). Versions have the names of checkpoints, in files and from memory.
It knows nothing of versions, ranks and transfers.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from rlx.weights.shapes import check_layers, check_shapes, tensor_shapes

if TYPE_CHECKING:
    import torch

    from rlx.models.policy import PolicyModel
    from rlx.models.slots import Slot
    from rlx.weights.files import Tensors

LAYER = re.compile(r"^.*?\.\d+(?=\.)")  # of `model.layers.3.mlp.gate.weight`: `model.layers.3`


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
        if self.model.adapts:
            from rlx.models.lora import exported

            return exported(tensors)
        from transformers.core_model_loading import revert_weight_conversion

        return revert_weight_conversion(self.model.hf, tensors)

    def described(self, names: Sequence[str]) -> Tensors:
        """What these tensors are in checkpoints: on the meta device, so names, dtypes and shapes alone."""
        return self.convert({name: self._meta[name] for name in names})

    @functools.cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every tensor in checkpoints, by name."""
        return _shapes(self.described(list(self._meta)))

    def units(self) -> list[list[str]]:
        """The trainer's tensors, by name, that are converted together: layers.

        Raises ValueError if a tensor in checkpoints needs tensors of several layers.
        """
        units = by_layer(self._meta)
        if {name: shape for unit in units for name, shape in _shapes(self.described(unit)).items()} != self.shapes:
            raise ValueError(
                f"a tensor in the checkpoints of {type(self.model.hf).__name__} needs tensors of several layers: it cannot be published"
            )
        return units

    def unused_checkpoint_tensors(self, folder: Path) -> tuple[str, ...]:
        """The names of tensors in the initial model's folder that transformers leaves out on purpose: layers that predict further tokens,
        old tables of positions. vLLM leaves them out, too, so servers do without new ones."""
        try:
            more = tensor_shapes(folder).keys() - self.shapes.keys()
        except ValueError:  # no safetensors, so no server starts with this folder
            return ()
        report = SimpleNamespace(missing_keys=set(), unexpected_keys=set(more))  # of loading, as transformers would make it
        self.model.hf._adjust_missing_and_unexpected_keys(report)
        return tuple(sorted(more - report.unexpected_keys))

    def check_servers(self, source: str, folder: Path, rank: int | None = None) -> None:
        """Raise ValueError if servers that start with the folder of `source` would refuse the versions that are trained from it.

        They check names and shapes at their first update, which is a whole step later. `rank`: that of the adapters, if these are trained.
        """
        hf = self.model.hf
        tied = any(getattr(config, "tie_word_embeddings", False) for config in (hf.config, hf.config.get_text_config()))
        try:
            if rank:
                check_layers("a version", self.shapes, tensor_shapes(folder), rank)
            else:
                check_shapes("what is trained", self.shapes, tensor_shapes(folder), tied, self.unused_checkpoint_tensors(folder))
        except ValueError as error:
            raise ValueError(
                f"servers that start with {source} would refuse every version that is trained: {error}\n  fix: convert the model once, "
                f'`AutoModelForCausalLM.from_pretrained("{source}", dtype="auto").save_pretrained(FOLDER)`, save its tokenizer there too, '
                "and set model.name=FOLDER"
            ) from error

    @functools.cached_property
    def _exact(self) -> frozenset[str]:
        from rlx.models.families import fp32_parameters

        hf = self.model.hf
        kept = fp32_parameters(hf, self.dtype) if hasattr(hf, "config") else ()  # adapters of a slot have no model
        return frozenset(name for name, _ in (*hf.named_buffers(), *kept))

    @functools.cached_property
    def _meta(self) -> Tensors:
        """The trainer's tensors with their whole shapes and published dtypes, in the model's order."""
        import torch

        weights = self.model.named_weights()
        return {name: torch.empty(tensor.shape, dtype=self.published(name, tensor), device="meta") for name, tensor in weights}


def by_layer(names: Sequence[str] | Tensors) -> list[list[str]]:
    """Units of whole layers; a tensor outside the layers is a unit of its own."""
    units: dict[str, list[str]] = {}
    for name in names:
        found = LAYER.match(name)
        units.setdefault(found[0] if found else name, []).append(name)
    return list(units.values())


def _shapes(tensors: Tensors) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}
