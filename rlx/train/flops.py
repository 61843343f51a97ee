"""How many floating-point operations a training step needs, and what share of the device's peak that is (MFU).

Forward and backward of a token in a sequence of n tokens, without recomputation:

    6 · N            N: weights of the matrices that the token meets, head included, embedding not; of experts, the active ones;
                     4 instead of 6 for frozen ones (adapters)
    + 12 · L · H·d · n   attention: scores and weighted values of L layers with H heads of width d, as if not causal; d is the mean of the
                     widths of keys and values where they differ (multi-head latent attention)

Of a row without backward (`PolicyTrainer.forward_only`) the forward alone counts: 2 · N and a third of the attention.

Summed over the packed sequences the second part is 12 · L · H·d · Σn². A layer that sees the last w < n tokens has w · (2n − w) in place of
n². One that sees blocks of c tokens has the sum of their squares. Layers without attention (linear attention, Mamba, convolutions) have no
second part; what they compute per token besides their matrices is not counted. A causal model needs half of the second part.
The head counts for every token, as in other frameworks' numbers, although this trainer computes it only for trainable tokens; prompts that
samples share count each time.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from rlx.models.policy import PolicyModel
from rlx.parallel.mesh import Mesh
from rlx.process import peak_memory
from rlx.types import RankBatch, StepBatch

OTHER_SLOT = re.compile(r"\.slots\.[1-9]")  # names of the parameters of all adapters but one (`rlx.models.slots`)
PEAKS = {
    "A100": 312e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H200 NVL": 835e12,
    "H200": 989e12,
    "L40S": 362e12,
    "GB200": 2500e12,
    "B200": 2250e12,
}
"""Dense bfloat16 operations per second, by a part of the device's name; the first that fits (NVIDIA's data sheets)."""

WITHOUT_PAIRS = {"linear_attention", "mamba", "mamba2", "recurrent", "conv", "moe", "mlp"}
"""Kinds of layers in which no token attends to another (`layer_types` of a configuration)."""


@dataclass(frozen=True, slots=True)
class Flops:
    """What a model needs, for forward and backward."""

    matrices: float  # per token
    backward: float  # the part of `matrices` that a backward needs
    attention: float  # of one layer, per pair of tokens of one sequence, as if not causal
    windows: tuple[int | None, ...]  # of each layer without blocks: how many tokens it sees; None: all; 0: it has no attention
    blocks: tuple[int, ...] = ()  # of each layer with blocks: their length; a token sees its own block

    @classmethod
    def of(cls, hf: Any) -> Flops:
        """Of a `…ForCausalLM` of transformers, also if it is sharded."""
        config = hf.config.get_text_config()
        looked_up = {id(module.weight) for module in hf.modules() if isinstance(module, nn.Embedding)}
        # With the share of it that a token meets. It meets one of several adapters, which are of one size.
        met = [(p, 1.0) for name, p in hf.named_parameters() if p.dim() == 2 and id(p) not in looked_up and not OTHER_SLOT.search(name)]
        head = hf.get_output_embeddings().weight
        met += [(head, 1.0)] if id(head) in looked_up else []  # tied: one tensor, looked up and multiplied
        active = getattr(config, "num_experts_per_tok", 1) / max(_num_experts(config), 1)
        met += [(p, active) for name, p in hf.named_parameters() if ".experts." in name and p.dim() == 3]
        backward = sum(_of_backward(p) * share for p, share in met)
        forward = sum(2.0 * p.numel() * share for p, share in met)
        windows, blocks = _layers(config)
        attends = blocks or any(window != 0 for window in windows)  # a configuration without attention may have no heads
        attention = 12.0 * config.num_attention_heads * _head_width(config) if attends else 0.0
        return cls(matrices=forward + backward, backward=backward, attention=attention, windows=windows, blocks=blocks)

    def count(self, lengths: Iterable[int], *, causal: bool = False) -> float:
        """The operations for sequences of these lengths."""
        lengths = list(lengths)
        return self.matrices * sum(lengths) + self._pairs(lengths, causal)

    def work(self, lengths: Iterable[int]) -> float:
        """What a rank does for samples of these lengths, which balances the rows of ranks (`rlx.data.packing.Cost`)."""
        return self.count(lengths, causal=True)

    def count_backward(self, lengths: Iterable[int], *, causal: bool = False) -> float:
        """The part of `count` that a backward needs."""
        lengths = list(lengths)
        return self.backward * sum(lengths) + self._pairs(lengths, causal) * 2 / 3

    def _pairs(self, lengths: list[int], causal: bool) -> float:
        pairs = sum(
            layers * sum(n * n if window is None or n <= window else window * (2 * n - window) for n in lengths)
            for window, layers in Counter(self.windows).items()
        )
        pairs += sum(
            layers * sum(n // block * block**2 + (n % block) ** 2 for n in lengths) for block, layers in Counter(self.blocks).items()
        )
        return self.attention * float(pairs) * (0.5 if causal else 1.0)


def flops_of(source: str, *, trust_remote_code: bool = False) -> Flops:
    """Of the model in a folder or on the hub, of which only the configuration is read."""
    config = AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code)
    with torch.device("meta"):
        return Flops.of(AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code))


def _of_backward(parameter: torch.Tensor) -> float:
    """Operations of a backward for a token that meets a matrix. A frozen one needs no gradient of its own."""
    return (4.0 if parameter.requires_grad else 2.0) * parameter.numel()


def _head_width(config: Any) -> float:
    """The mean of the widths of an attention head's keys and values."""
    if getattr(config, "qk_head_dim", None) and getattr(config, "v_head_dim", None):
        return (config.qk_head_dim + config.v_head_dim) / 2
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _layers(config: Any) -> tuple[tuple[int | None, ...], tuple[int, ...]]:
    """The windows and the blocks of the layers, see `Flops`. A layer of an unknown kind sees all tokens."""
    window, block = getattr(config, "sliding_window", None), getattr(config, "attention_chunk_size", None)
    kinds = getattr(config, "layer_types", None) or ["sliding_attention" if window else "full_attention"] * config.num_hidden_layers
    seen = {"sliding_attention": window, "hybrid_sliding": window} | dict.fromkeys(WITHOUT_PAIRS, 0)
    in_blocks = [kind == "chunked_attention" and block is not None for kind in kinds]
    windows = tuple(seen.get(kind) for kind, blocked in zip(kinds, in_blocks, strict=True) if not blocked)
    return windows, (block,) * sum(in_blocks)


def _num_experts(config: Any) -> int:
    return next((n for key in ("num_experts", "num_local_experts", "n_routed_experts") if (n := getattr(config, key, None))), 1)


def peak_of(device: str) -> float | None:
    """Dense bfloat16 operations per second of a device, by its name; None if it is not known."""
    return next((peak for part, peak in PEAKS.items() if part in device), None)


class Meter:
    """Turns the seconds of a step into speed, share of the peak and memory."""

    def __init__(self, model: PolicyModel, mesh: Mesh) -> None:
        self.mesh, self.flops = mesh, Flops.of(model.hf)
        name = torch.cuda.get_device_name(mesh.device) if mesh.device.type == "cuda" else ""
        self.peak = peak_of(name)

    def measure(self, batch: StepBatch, seconds: float, iterations: int, forward_only: Sequence[int] = ()) -> dict[str, float]:
        """Metrics of a step that trained `iterations` times on the batch in `seconds`, on all ranks together. Every rank calls this.

        `forward_only`: the lengths of sequences that had no backward, each as often as that happened.
        """
        lengths = [len(sample.token_ids) for sample in chain.from_iterable(batch.mini_batches)]

        def rate(causal: bool) -> float:
            needed = iterations * self.flops.count(lengths, causal=causal) - self.flops.count_backward(forward_only, causal=causal)
            return needed / seconds / self.mesh.world_size

        flops, peaks = rate(causal=False), self.mesh.all_gather_float(self._memory())
        most = max(range(len(peaks)), key=lambda rank: peaks[rank])
        values = {
            "perf/tokens_per_second": iterations * sum(lengths) / seconds,
            "perf/tflops": flops / 1e12,
            "perf/peak_memory_gb": peaks[most],
            "perf/peak_memory_rank": float(most),
        }
        if self.peak is not None:
            values |= {"perf/mfu": flops / self.peak, "perf/mfu_causal": rate(causal=True) / self.peak}
        return values

    def measure_common(
        self, batches: Mapping[int, StepBatch], packed: Mapping[int, RankBatch], iterations: Mapping[int, int], seconds: float
    ) -> dict[str, float]:
        """Metrics of a common step of several runs, by slot, in common rows: those that were trained. All share its seconds."""
        minis = [mini for slot, batch in batches.items() for mini in batch.mini_batches * iterations[slot]]
        values = self.measure(StepBatch(step=0, mini_batches=tuple(minis)), seconds, 1)
        rows = next(iter(packed.values()))  # the balance of common rows is the same for all
        balance = {"perf/imbalance": rows.imbalance, "perf/imbalance_attention": rows.attention_imbalance}
        return values | balance | {"perf/runs": float(len(batches))}

    def _memory(self) -> float:
        """Of this rank, GiB."""
        if self.mesh.device.type == "cuda":
            return self.mesh.peak_memory()
        return peak_memory() / 2**30
