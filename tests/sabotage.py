"""rlx's worker extension with ways to damage what a server serves: `--worker-extension-cls sabotage.Sabotaged`.

After `sabotage("one expert is old")` loads go wrong in this way, and after `sabotage("")` they go right. Checks and compares are rlx's own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from rlx.inference import extension
from rlx.inference.extension import Policy
from rlx.weights.shapes import Entry, entries

Tensors = Iterator[tuple[str, torch.Tensor]]
KEYS, VALUES = ("model.layers.1.self_attn.k_proj.weight", "model.layers.1.self_attn.v_proj.weight")
SCALED = ("model.layers.2.mlp.down_proj.weight", "model.layers.2.mlp.experts.1.down_proj.weight")
DROPPED = ("layers.1.self_attn.o_proj", "layers.1.mlp.experts.3.up_proj")
EXPERT = ".layers.1.mlp.experts.3."


def swapped(tensors: Tensors) -> Tensors:
    found = dict(tensors)
    found[KEYS], found[VALUES] = found[VALUES], found[KEYS]
    yield from found.items()


def scaled(tensors: Tensors) -> Tensors:
    yield from ((name, tensor * 1.001 if name in SCALED else tensor) for name, tensor in tensors)


def dropped(tensors: Tensors) -> Tensors:
    yield from ((name, tensor) for name, tensor in tensors if not any(part in name for part in DROPPED))


def half(tensors: Tensors) -> Tensors:
    for number, pair in enumerate(tensors):
        if number == 20:
            raise OSError("the disk is gone")
        yield pair


WAYS = {"keys and values are swapped": swapped, "a tensor is scaled": scaled, "tensors are dropped": dropped, "the disk goes": half}


class Sabotaged(Policy):
    """The methods of rlx's extension, and `sabotage`."""

    how = ""

    def sabotage(self, how: str) -> dict[str, Any]:
        self.how = how
        return {"rank": self.rank}

    def rlx_load(self, folder: str, label: str) -> dict[str, Any]:
        if self.how == "a rank does not load" and self.rank == 1:
            return {"rank": self.rank, "seconds": 0.0}
        right, mended = extension.read_tensors, self._rlx_reload

        def wrong(found: dict[str, Entry], twice: Any) -> Tensors:
            if self.how != "one expert is old":
                return WAYS.get(self.how, iter)(right(found, twice))
            old = dict(right({name: entry for name, entry in entries(self.rlx_initial[0]).items() if EXPERT in name}, None))
            return ((name, old.get(name, tensor)) for name, tensor in right(found, twice))

        def alone(found: dict[str, Entry]) -> None:
            self.reload_weights(weights_iterator=right(found, None))

        extension.read_tensors = wrong
        self._rlx_reload = alone if self.how == "vLLM alone" else mended  # type: ignore[method-assign]
        try:
            return super().rlx_load(folder, label)
        finally:
            extension.read_tensors = right
            del self._rlx_reload
