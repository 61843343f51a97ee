"""Low-rank adapters (LoRA, arXiv 2106.09685) beside a model's linear layers: y = x Wᵀ + b + s · (dropout(x) Aᵀ) Bᵀ.

W [out, in] and b [out] are frozen; A [r, in] and B [out, r] are trained. s is alpha / r, or alpha / √r (rsLoRA, arXiv 2312.03732).
B starts at 0, so a new adapter changes nothing. A layer keeps the name and the names of its own parameters, so loading, sharding,
checkpointing and compiling a model with adapters need nothing new.

The modules are our own, because the `peft` package would wrap and rename every layer. The names and the configuration under which adapters
are published are PEFT's, and the tests compare with PEFT.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from rlx.config.schema import LoraConfig
from rlx.models.layout import AdapterRouting
from rlx.parallel.mesh import Mesh

ALL = "all-linear"
PARAMETERS = ("lora_A", "lora_B")
WORDS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes
PREFIX = "base_model.model."  # of PEFT's names


class Adapter(nn.Module):
    """One adapter of one layer. It is not initialised."""

    lora_A: nn.Parameter  # [r, in]
    lora_B: nn.Parameter  # [out, r]
    scaling: float
    dropout: float

    def __init__(self, layer: nn.Linear, rank: int, dtype: torch.dtype, scaling: float = 1.0, dropout: float = 0.0) -> None:
        super().__init__()
        self.adapt(layer, rank, dtype, scaling, dropout)

    def adapt(self, layer: nn.Linear, rank: int, dtype: torch.dtype, scaling: float, dropout: float) -> None:
        """Make the parameters for `layer`."""
        device = layer.weight.device
        self.lora_A = nn.Parameter(torch.empty(rank, layer.in_features, dtype=dtype, device=device))
        self.lora_B = nn.Parameter(torch.empty(layer.out_features, rank, dtype=dtype, device=device))
        self.scaling, self.dropout = scaling, dropout

    def added(self, output: Tensor, rows: Tensor) -> Tensor:
        """output [n, out] + scaling · (rows [n, in] Aᵀ) Bᵀ, in the dtype of `rows`: without FSDP the adapter still has the optimizer's.

        Dropout only where gradients are recorded: scores must be those of the model that is served.
        """
        if self.dropout and torch.is_grad_enabled():
            rows = F.dropout(rows, self.dropout)
        small = F.linear(rows, self.lora_A.to(rows.dtype))
        # This product scales and adds. Not in place: selective checkpointing keeps the first product.
        return torch.addmm(output, small, self.lora_B.to(rows.dtype).T, alpha=self.scaling)


class AdaptedLinear(nn.Linear, Adapter):
    """A frozen linear layer that is its own adapter, or has several in `slots` (`rlx.models.slots`)."""

    def __init__(
        self, base: nn.Linear, lora: LoraConfig, dtype: torch.dtype, count: int | None = None, here: AdapterRouting | None = None
    ) -> None:
        """Takes over the parameters of `base`. `count` adapters in slots, of which `here` says which stretch has which; None: its own."""
        nn.Module.__init__(self)  # nn.Linear's own constructor would allocate another weight
        assert lora.rank, "the configuration has no adapters"
        self.in_features, self.out_features = base.in_features, base.out_features
        self.weight, self.bias = base.weight, base.bias
        self.active, self.here = True, here  # not active: it computes as without adapters
        if count is None:
            self.adapt(base, lora.rank, dtype, lora.scaling, lora.dropout)
        else:
            self.slots = nn.ModuleList(Adapter(base, lora.rank, dtype) for _ in range(count))

    def forward(self, input: Tensor) -> Tensor:
        """[…, in] → […, out]; with slots, the tokens are flattened in the order of the stretches. Raises ValueError for another number."""
        if not self.active or (self.here is not None and not self.here.stretches):
            return F.linear(input, self.weight, self.bias)
        rows = input.flatten(0, -2)
        output = F.linear(rows, self.weight, self.bias)
        if self.here is None:
            return self.added(output, rows).unflatten(0, input.shape[:-1])
        stretches = self.here.stretches
        if len(rows) != (end := stretches[-1].end):
            raise ValueError(
                f"a layer with several adapters got {len(rows)} of {end} tokens (experts?); leave it out of lora.target_modules"
            )
        outputs, adapters = output.split([each.end - each.start for each in stretches]), cast("list[Adapter]", self.slots)
        parts = [adapters[each.slot].added(own, rows[each.start : each.end]) for each, own in zip(stretches, outputs, strict=True)]
        return torch.cat(parts).unflatten(0, input.shape[:-1])


@torch.no_grad()
def draw(lora_a: Tensor, lora_b: Tensor, generator: torch.Generator) -> None:
    """Initialise A [r, in] and B [out, r], or this rank's shards. A is drawn as PEFT draws it: uniform with the variance 1 / (3 in)."""
    bound = 1 / math.sqrt(lora_a.shape[1])
    a: Tensor = torch.empty(lora_a.shape).uniform_(-bound, bound, generator=generator)
    if isinstance(lora_a, DTensor):
        a = distribute_tensor(a.to(lora_a.device), lora_a.device_mesh, lora_a.placements, src_data_rank=None)
    lora_a.copy_(a)
    lora_b.zero_()


def add_adapters(hf: Any, lora: LoraConfig, dtype: torch.dtype | None = None, slots: int | None = None) -> AdapterRouting | None:
    """Freeze a model and put adapters of `dtype` (None: the model's) beside its target layers, in place. `draw_adapters` must follow.

    `slots`: so many for each layer, and `rlx.models.slots.Slot.begin` for each run must follow, too. Returns what the layers share then.
    Raises ValueError for a target that names no linear layer, or one that cannot have an adapter.
    """
    here = None if slots is None else AdapterRouting()
    wanted = targets(hf, lora.target_modules)
    hf.requires_grad_(False)
    for name in wanted:
        parent, _, leaf = name.rpartition(".")
        base = hf.get_submodule(name)
        setattr(hf.get_submodule(parent), leaf, AdaptedLinear(base, lora, dtype or base.weight.dtype, slots, here))
    return here


def draw_adapters(hf: Any, seed: int) -> None:
    """Initialise a model's adapters, whole or sharded. A `seed` gives the same ones on any number of ranks."""
    generator = torch.Generator().manual_seed(seed)
    for module in hf.modules():
        if PARAMETERS[0] in module._parameters:
            draw(module.lora_A, module.lora_B, generator)


def targets(hf: Any, wanted: list[str]) -> list[str]:
    """The full names of the linear layers that `lora.target_modules` names, in the model's order. Raises ValueError."""
    linear = [name for name, module in hf.named_modules() if type(module) is nn.Linear and module is not hf.get_output_embeddings()]
    there = ", ".join(sorted({name.rpartition(".")[2] for name in linear})) or "none"
    if not linear:
        raise ValueError(f"lora.target_modules: {type(hf).__name__} has no linear layer (torch.nn.Linear) that could have an adapter")
    if wanted == [ALL]:
        return linear
    chosen: set[str] = set()
    for each in wanted:
        found = {name for name in linear if _names(each, name)}
        if not found:
            others = sorted({type(module).__name__ for name, module in hf.named_modules() if name and _names(each, name)})
            why = f"names a {' or '.join(others)}, which cannot have an adapter" if others else "matches nothing"
            raise ValueError(f"lora.target_modules: `{each}` {why} in {type(hf).__name__}. Its linear layers are: {there}; or {ALL}")
        chosen |= found
    return [name for name in linear if name in chosen]


def _names(target: str, name: str) -> bool:
    """PEFT's rule: a target is a module's name or the last parts of it."""
    return name == target or name.endswith(f".{target}")


def adapted(model: nn.Module) -> dict[str, AdaptedLinear]:
    """The layers with adapters, by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, AdaptedLinear)}


@contextlib.contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """The model computes as if it had no adapters. Without adapters nothing changes."""
    layers = adapted(model).values()
    for layer in layers:
        layer.active = False
    try:
        yield
    finally:
        for layer in layers:
            layer.active = True


def digest(hf: nn.Module, mesh: Mesh) -> str:
    """16 hexadecimal digits of a model's parameters, adapters aside: they tell whether adapters belong to it. Every rank calls this."""
    named = [(name, parameter.detach()) for name, parameter in hf.named_parameters() if not name.endswith(PARAMETERS)]
    shares = [parameter.to_local() if isinstance(parameter, DTensor) else parameter for _, parameter in named]
    # integers: any order, same sum
    sums = torch.stack([share.contiguous().view(WORDS[share.dtype.itemsize]).sum(dtype=torch.int64) for share in shares])
    mesh.sum_of_shards(sums)
    found = hashlib.blake2b(digest_size=8)
    for (name, parameter), total in zip(named, sums.tolist(), strict=True):
        found.update(f"{name} {list(parameter.shape)} {total}".encode())
    return found.hexdigest()


def exported(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Adapters under the names of PEFT's files: `model.layers.0.mlp.up_proj.lora_A` → `base_model.model.….lora_A.weight`."""
    return {f"{PREFIX}{name}.weight": tensor for name, tensor in tensors.items()}


def peft_config(hf: Any, lora: LoraConfig, source: str) -> dict[str, Any]:
    """The `adapter_config.json` of a model with adapters, whose base model is `source` (a folder or a hub name)."""
    layers = list(adapted(hf))
    everything = [name for name, _ in hf.named_modules()]
    short = sorted({name.rpartition(".")[2] for name in layers})
    # PEFT would also adapt other modules whose names end like these.
    exact = all(name in layers for name in everything if any(_names(each, name) for each in short))
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": source,
        "r": lora.rank,
        "lora_alpha": int(lora.alpha) if lora.alpha == int(lora.alpha) else lora.alpha,
        "lora_dropout": lora.dropout,
        "use_rslora": lora.rslora,
        "target_modules": short if exact else layers,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "modules_to_save": None,
        "inference_mode": True,
    }
