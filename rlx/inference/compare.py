"""Compares what a model serves with what a load would write into it."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

LISTED = 5  # parameters that a report names


class Compare(TorchDispatchMode):
    """While it is active, a write into a parameter of the model compares what would be written with what is there, and writes nothing."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self._names = {each.untyped_storage().data_ptr(): name for name, each in model.named_parameters() if each.numel()}
        self._served = {name: each.numel() for name, each in model.named_parameters()}
        self._equal = dict.fromkeys(self._served, 0)  # a load may write a part of a parameter, or all of it twice
        self.different: dict[str, int] = {}  # numbers that differ, by parameter

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default and (name := self._names.get(args[0].untyped_storage().data_ptr())):
            self._add(name, args[0], args[1])
            return args[0]
        return func(*args, **(kwargs or {}))

    def add(self, name: str, served: torch.Tensor, trained: torch.Tensor) -> None:
        """Compare what the model serves besides its parameters."""
        self._served[name], self._equal[name] = served.numel(), 0
        self._add(name, served, trained)

    def _add(self, name: str, served: torch.Tensor, trained: torch.Tensor) -> None:
        wrong = served.numel() if served.shape != trained.shape else int((served != trained.to(served)).sum())
        self._equal[name] = min(self._equal[name] + served.numel() - wrong, self._served[name])
        if wrong:
            self.different[name] = self.different.get(name, 0) + wrong

    def report(self) -> dict[str, Any]:
        """How many numbers are served, and how many of them are equal and different; and the first parameters that differ."""
        different = sum(self.different.values())
        equal, served = sum(self._equal.values()), sum(self._served.values())
        return {"equal": equal, "different": different, "served": served, "names": list(self.different)[:LISTED]}
