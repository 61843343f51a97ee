"""Mixed precision of one process without FSDP: copies of all parameters in the dtype that the model computes in.

Optimizer, checkpoints and published versions know the parameters themselves; the copies are in the modules only while the model computes.
FSDP would cast each layer anew for every row, and copy its gradients twice: of SmolLM2's step on a CPU that was half.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


class Copies:
    """Copies of a model's parameters in another dtype. Tied parameters have one. Gradients of copies are added to the parameters'."""

    def __init__(self, model: nn.Module, dtype: torch.dtype, float32: Collection[str] = ()) -> None:
        """`float32`: the names of parameters that keep their own dtype. Copies take memory at once, values when the model computes."""
        self.active = False  # whether the copies are in the modules
        self._copies: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}  # parameter and its copy by the parameter's id
        self._places: list[tuple[dict[str, Any], str, nn.Parameter, nn.Parameter]] = []
        kept = {id(parameter) for name, parameter in model.named_parameters(remove_duplicate=False) if name in float32}
        for module in model.modules():
            for name, parameter in module._parameters.items():
                if parameter is None or id(parameter) in kept or parameter.dtype == dtype or not parameter.is_floating_point():
                    continue
                if id(parameter) not in self._copies:
                    copy = nn.Parameter(torch.empty_like(parameter, dtype=dtype), requires_grad=parameter.requires_grad)
                    if parameter.requires_grad:
                        copy.register_post_accumulate_grad_hook(functools.partial(_collect, parameter))
                    self._copies[id(parameter)] = parameter, copy
                self._places.append((module._parameters, name, *self._copies[id(parameter)]))
        self._owners = {id(copy): parameter for parameter, copy in self._copies.values()}

    def owner(self, tensor: Tensor) -> Tensor:
        """The parameter of a copy; any other tensor itself."""
        return self._owners.get(id(tensor), tensor)

    @contextmanager
    def placed(self) -> Iterator[None]:
        """Put the copies into the modules, with the parameters' values at this time. Entering it again inside changes nothing."""
        if self.active:
            yield
            return
        with torch.no_grad():  # every time: nothing else could tell whether a value was changed past autograd
            for parameter, copy in self._copies.values():
                copy.copy_(parameter)
        for where, name, _, copy in self._places:
            where[name] = copy
        self.active = True
        try:
            yield
        finally:
            self.active = False
            for where, name, parameter, _ in self._places:
                where[name] = parameter


def _collect(parameter: nn.Parameter, copy: nn.Parameter) -> None:
    """Add a copy's gradient to the parameter's, in the parameter's dtype."""
    if (gradient := copy.grad) is None:
        return
    copy.grad = None
    if parameter.grad is None:
        parameter.grad = gradient.to(parameter.dtype)
    else:
        parameter.grad.add_(gradient)
