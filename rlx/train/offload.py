"""An optimizer whose state lies in host memory between steps (`trainer.optim_cpu_offload`).

    for each bucket of parameters:   state host ─► device   │   update, by the optimizer itself   │   state device ─► host

Parameters and gradients stay on the device, and the update is computed there by the same operations, so it has the same bits. Buckets bound
what the state takes of the device meanwhile. The state keeps its names, dtypes and placements, so checkpoints are those without offload.
Knows no particular optimizer. It must update each parameter from that parameter's own gradient and state, as all of `torch.optim` do except
LBFGS, which needs a closure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from rlx.config.memory import BUCKET
from rlx.parallel.mesh import Mesh

Group = dict[str, Any]


class CPUOffloadOptimizer(torch.optim.Optimizer):
    """Steps another optimizer, bucket by bucket. Both have the same groups and the same state."""

    def __init__(self, optimizer: torch.optim.Optimizer, mesh: Mesh, *, bucket: int = BUCKET) -> None:
        """`bucket`: bytes of parameters of this rank that are updated at a time; a larger parameter is a bucket of its own."""
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self.state = optimizer.state
        self._optimizer, self._mesh, self._bucket = optimizer, mesh, bucket

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient. Afterwards all their state is in host memory.

        Raises ValueError if the optimizer changes values of its groups, which it would do once for each bucket.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._optimizer.state = self.state  # loading a state replaces it
        for groups in self._buckets():
            hosts = {parameter: self._to_device(parameter) for group in groups for parameter in group["params"]}
            before = [dict(group) for group in groups]
            self._optimizer.param_groups = groups
            self._optimizer.step()
            for parameter, host in hosts.items():
                self._to_host(parameter, host)
            self._check(before, groups)
        self._mesh.synchronize()  # the copies do not wait, but the next reader, for example a checkpoint, must find them complete
        return loss

    def _buckets(self) -> Iterator[list[Group]]:
        """The parameters that have a gradient, in the order of the groups, as groups with a part of them each."""
        bucket: list[Group] = []
        size = 0
        for group in self.param_groups:
            part: list[Tensor] = []
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                own = _local(parameter).nbytes
                if size and size + own > self._bucket:
                    yield [*bucket, *([group | {"params": part}] if part else [])]
                    bucket, part, size = [], [], 0
                part.append(parameter)
                size += own
            if part:
                bucket.append(group | {"params": part})
        if bucket:
            yield bucket

    def _to_device(self, parameter: Tensor) -> dict[str, Tensor]:
        """Copy a parameter's state to the device. Returns the tensors in host memory, by name; none before its first update.

        What an optimizer makes on the device before that, as Adagrad does, is there already.
        """
        state = self.state.get(parameter, {})
        hosts = {name: value for name, value in state.items() if _moves(value) and _local(value).device.type == "cpu"}
        for name, host in hosts.items():
            state[name] = _copied(host, torch.empty_like(_local(host), device=self._mesh.device))
        return hosts

    def _to_host(self, parameter: Tensor, hosts: dict[str, Tensor]) -> None:
        """Copy a parameter's state back, into `hosts` where it was before the update."""
        state = self.state.get(parameter, {})
        for name, value in state.items():
            if not _moves(value):
                continue
            if name in hosts:
                _local(hosts[name]).copy_(_local(value), non_blocking=True)
                state[name] = hosts[name]
            else:
                state[name] = _copied(value, torch.empty_like(_local(value), device="cpu", pin_memory=self._mesh.device.type == "cuda"))

    def _check(self, before: list[Group], after: list[Group]) -> None:
        changed = {name for old, new in zip(before, after, strict=True) for name in new if new[name] is not old.get(name)}
        if changed:
            raise ValueError(
                f"trainer.optim_cpu_offload=true updates some parameters at a time, but {type(self._optimizer).__name__} changes "
                f"{', '.join(sorted(changed))} of all of them with each step. Set trainer.optim_cpu_offload=false, or use optim=adamw"
            )


def _moves(value: Any) -> bool:
    """Whether this part of a state is worth a place in host memory; counts of steps are not."""
    return isinstance(value, Tensor) and value.ndim > 0


def _local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _copied(tensor: Tensor, into: Tensor) -> Tensor:
    """Copy this rank's part of a tensor into `into`, in the order of the device's work. Returns that with the tensor's placement."""
    into.copy_(_local(tensor), non_blocking=True)
    # `from_local` would move it to the device of the mesh.
    return DTensor(into, tensor._spec, requires_grad=False) if isinstance(tensor, DTensor) else into
