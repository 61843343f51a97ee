"""The one adapter that an engine serves when adapters are trained: loads a version of it, and compares what is served with its files.

Every request names the same adapter (`POLICY`), and a version replaces its values, so requests in flight continue under the new version.
Cached keys and values are dropped as for whole models: vLLM tells them apart by the adapter's name, which stays the same.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from vllm.lora.layers import ColumnParallelLinearWithLoRA, RowParallelLinearWithLoRA
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
from vllm.lora.request import LoRARequest
from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method

from rlx.inference.server.served import Compared
from rlx.paths import COMPLETE
from rlx.weights.attest import checksum
from rlx.weights.files import ADAPTER

SHOWN = 5  # names listed in a message
POLICY = LoRARequest(lora_name="policy", lora_int_id=1, lora_path="policy")  # vLLM never reads this path: the adapter is always loaded


def replace(manager: Any, folder: Path | None) -> Compared:
    """Serve the adapter of a PEFT folder; None: one of zeros, with which the model computes as without it.

    `manager` is vLLM's `WorkerLoRAManager`. Returns what was compared. Raises ValueError if what is
    served then differs from what the folder's manifest says.
    """
    if folder is None:
        manager.remove_adapter(POLICY.lora_int_id)
        manager.add_dummy_lora(POLICY, rank=1)  # zeros for every layer
        manager._adapter_manager.activate_adapter(POLICY.lora_int_id)
        written: dict[str, Any] = {}
        tensors: dict[str, Tensor] = {}
        scaling = 1.0
    else:
        manager.add_adapter(LoRARequest(POLICY.lora_name, POLICY.lora_int_id, str(folder), load_inplace=True))
        written = json.loads((folder / COMPLETE).read_text())["tensors"]
        tensors = load_file(folder / ADAPTER)
        scaling = PEFTHelper.from_local_dir(str(folder), None).vllm_lora_scaling_factor
    damaged = [name for name, tensor in tensors.items() if checksum(tensor) != written[name]["sum"]]
    wrong: list[str] = []
    left_out: dict[str, tuple[str, float]] = {}
    total = sum(tensor.numel() for tensor in tensors.values())
    left = dict(tensors)
    for layer, half, slot, place in served(manager._adapter_manager):
        name = f"base_model.model.{layer}.lora_{half}.weight"
        expected = left.pop(name, None)
        if expected is None:
            if slot.count_nonzero():
                wrong.append(f"{name} should be 0")
            continue
        expected = expected.to(slot.device, slot.dtype)
        expected = expected * scaling if half == "B" and scaling != 1 else expected  # vLLM multiplies B once, when it loads it
        mine = slice_of(expected, half, slot, place)
        if mine is None:
            left_out[name] = ("divided in an unknown way over several workers", expected.numel() / total)
            continue
        expected = mine
        rows, columns = expected.shape
        if not torch.equal(slot[:rows, :columns], expected) or slot.count_nonzero() != expected.count_nonzero():
            wrong.append(name)
    if problems := damaged + wrong + list(left):
        names = ", ".join(problems[:SHOWN]) + (f" and {len(problems) - SHOWN} more" if len(problems) > SHOWN else "")
        raise ValueError(f"the served adapter is not the one that was trained: {len(problems)} tensors differ: {names}")
    return Compared(1.0 - sum(share for _, share in left_out.values()), left_out, {})


def slice_of(whole: Tensor, half: str, slot: Tensor, place: int | None) -> Tensor | None:
    """What this worker of a tensor-parallel engine has of a matrix: A is divided along its inputs, B along its outputs, or not at all.

    `place`: which slice. Returns None if it is not known where the slice lies.
    """
    dim, rank = (1, 0) if half == "A" else (0, 1)
    if whole.shape[rank] > slot.shape[rank]:
        return None
    size = slot.shape[dim]
    if whole.shape[dim] <= size:
        return whole
    if place is None or (place + 1) * size > whole.shape[dim]:
        return None
    return whole.narrow(dim, place * size, size)


def served(manager: Any) -> Iterator[tuple[str, str, Tensor, int | None]]:
    """(layer, `A` or `B`, matrix, slice) of all that the policy's place in the engine holds, by the layers' names in the model's files.

    `manager` is vLLM's `LoRAModelManager`. Matrices are padded with zeros to the engine's rank. `slice`: which one this worker has if the
    matrix is divided; None: unknown.
    """
    index = manager.lora_index_to_id.index(POLICY.lora_int_id)
    for name, module in manager.modules.items():
        for number, layer in enumerate(manager.packed_modules.get(name, [name])):
            place = None
            if hasattr(module, "output_ids"):  # of layers that hold several: workers may share key heads
                place = module.output_ids[number]
            elif isinstance(module, RowParallelLinearWithLoRA) or (
                type(module) is ColumnParallelLinearWithLoRA and not module.is_merged_col_linear
            ):
                place = module.tp_rank
            yield layer, "A", module.lora_a_stacked[number][index, 0], place
            yield layer, "B", module.lora_b_stacked[number][index, 0], place


def multiply_plainly() -> None:
    """Have the CPU engines that are made in this process, and in those forked from it, multiply by the one adapter as by any matrix.

    vLLM's own CPU operation allows for a different adapter of each token, so it copies the adapter for each token: with the tiny model that
    takes several times as long as the model itself.
    """
    PunicaWrapperCPU.add_lora_linear = _add_adapter


def compute_experts_plainly() -> None:
    """Have the CPU engines that are made in this process, and in those forked from it, compute experts as they do without adapters.

    An engine that serves adapters takes CUDA's operations for experts, in case these have adapters, too. On a CPU they have none
    (`arguments.adapter_arguments`).
    """
    select = unquantized_fused_moe_method.select_unquantized_moe_backend

    def on_cpu(moe_config: Any) -> Any:
        return select(dataclasses.replace(moe_config, is_lora_enabled=False))

    unquantized_fused_moe_method.select_unquantized_moe_backend = on_cpu


def _add_adapter(
    wrapper: Any,
    y: Tensor,
    x: Tensor,
    lora_a_stacked: Sequence[Tensor],
    lora_b_stacked: Sequence[Tensor],
    scale: float,
    output_slices: Sequence[int],
    **_: Any,
) -> None:
    """y [n, sum of slices] += x [n, in] Aᵀ Bᵀ for every slice, in place. All tokens belong to the adapter in the only place."""
    if wrapper.no_lora:
        return
    for part, a, b in zip(y.split(list(output_slices), dim=1), lora_a_stacked, lora_b_stacked, strict=True):
        part.add_((x @ a[0, 0].T) @ b[0, 0].T, alpha=scale)


def every_request_with_adapter(processor: Any) -> None:
    """Have the engine answer every request with the policy's adapter, also those of vLLM's own routes."""
    process = processor.process_inputs

    def with_adapter(*args: Any, **keys: Any) -> Any:
        return process(*args, **keys | {"lora_request": POLICY})

    processor.process_inputs = with_adapter
