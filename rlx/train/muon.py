"""Muon (Jordan et al. 2024) for the matrices of the decoder layers, and AdamW for everything else, as one optimizer.

A step of Muon is the momentum's nearest orthogonal matrix, by torch's Newton-Schulz iteration in bfloat16. It needs the whole matrix, so
each sharded one is gathered for it and every rank computes the same step: a run on several ranks makes the steps of one process. Momentum
and parameters stay sharded. Steps are scaled to the size of AdamW's (arXiv 2502.16982), so both parts have the same learning rate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim._muon import DEFAULT_A, DEFAULT_B, DEFAULT_C, _zeropower_via_newtonschulz

from rlx.models.lora import PARAMETERS
from rlx.train.optim import by_mesh


class Muon(torch.optim.Optimizer):
    """`params` are groups; those with `matrices: True` are two-dimensional parameters that Muon trains, AdamW trains the others."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        weight_decay: float = 0.0,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        fused: bool | None = None,
    ) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "matrices": False})
        self.momentum, self.nesterov, self.ns_steps = momentum, nesterov, ns_steps
        self._others: torch.optim.Optimizer | None = None
        if others := [group for group in self.param_groups if not group["matrices"]]:
            self._others = torch.optim.AdamW(others, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, fused=fused)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"] if group["matrices"] else ():
                if parameter.grad is not None:
                    self._step(parameter, parameter.grad, float(group["lr"]), group["weight_decay"])
        if self._others is not None:  # the groups and the state are one; loading a state replaces them
            self._others.param_groups = [group for group in self.param_groups if not group["matrices"]]
            self._others.state = self.state
            self._others.step()
        return loss

    def _step(self, parameter: Tensor, gradient: Tensor, lr: float, weight_decay: float) -> None:
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        momentum = state["momentum_buffer"].lerp_(gradient, 1 - self.momentum)
        update = gradient.lerp(momentum, self.momentum) if self.nesterov else momentum.clone()  # torch divides a bfloat16 one in place
        whole = update.full_tensor() if isinstance(update, DTensor) else update
        step: Tensor = _zeropower_via_newtonschulz(whole, (DEFAULT_A, DEFAULT_B, DEFAULT_C), self.ns_steps, 1e-7)
        if isinstance(update, DTensor):
            step = distribute_tensor(step.contiguous(), update.device_mesh, update.placements, src_data_rank=None)
        parameter.mul_(1 - lr * weight_decay)
        parameter.add_(step.to(parameter.dtype), alpha=-lr * 0.2 * max(parameter.shape) ** 0.5)


def groups_of(layers: nn.Module, everything: nn.Module) -> list[dict[str, Any]]:
    """The trained parameters of a model: the matrices of its decoder layers (`matrices`), then all others, by the ranks that share them."""
    trained = [parameter for parameter in everything.parameters() if parameter.requires_grad]
    inside = {id(parameter) for parameter in _matrices(layers)}
    parts = {flag: by_mesh(parameter for parameter in trained if (id(parameter) in inside) == flag) for flag in (True, False)}
    return [{"params": part, "matrices": flag} for flag, several in parts.items() for part in several]


def _matrices(layers: nn.Module) -> Iterator[Tensor]:
    """The parameters that multiply vectors: two-dimensional ones named `weight`, also of routers, and adapters'.

    Others with two dimensions are stacks of vectors, whose rows have nothing to do with each other: biases of experts, norms of heads
    (Cohere), decays of state spaces. A matrix under another name is left to AdamW, and so is one with a single row or column.
    """
    for module in layers.modules():
        stacks = isinstance(module, nn.Embedding) or "norm" in type(module).__name__.lower()
        for name, parameter in module.named_parameters(recurse=False):
            if name in ("weight", *PARAMETERS) and not stacks and parameter.ndim == 2 and min(parameter.shape) > 1:
                yield parameter
