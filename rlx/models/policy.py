"""The policy as the trainer sees it: a packed micro-batch in, log-probability and entropy of its trainable tokens out.

It wraps any Hugging Face causal language model. The backbone computes hidden states, and the fused op takes its head, so logits are never
stored.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from rlx.kernels.logprob import logprob
from rlx.models.attention import NAME
from rlx.models.families import backbone, logit_scale, logit_softcap
from rlx.models.layout import AdapterRouting, Kind, Layout
from rlx.models.lora import adapted
from rlx.parallel.row import SequenceParallelGroup

ATTENTION_LAYERS = {"full_attention", "sliding_attention"}  # layer types that can respect segment boundaries


def head_widths(hf: Any) -> list[int]:
    """The widths of the heads of a model's layers, ascending."""
    found = {getattr(module, "qk_head_dim", None) or getattr(module, "head_dim", None) for module in hf.modules()}
    return sorted(width for width in found if isinstance(width, int))


def unusual_widths(hf: Any) -> str:
    """The heads of a model that variable-length attention refuses: wider than 256, no multiple of 8, or with values of another width."""
    for name, module in hf.named_modules():
        width = getattr(module, "qk_head_dim", None) or getattr(module, "head_dim", None)
        if isinstance(width, int):
            values = getattr(module, "v_head_dim", None) or width
            if width > 256 or width % 8 or values != width:
                return f"heads of {width} and values of {values} ({name})"
    return ""


class PolicyModel(nn.Module):
    """A causal language model without dropout that runs on packed rows."""

    def __init__(
        self,
        hf: Any,
        *,
        attention: str = "auto",
        logprob_backend: str = "auto",
        compute_dtype: torch.dtype | None = None,
        row: SequenceParallelGroup | None = None,
    ) -> None:
        """`hf` is a transformers `…ForCausalLM`; `attention` is `auto`, `sdpa`, `varlen` or `rows` (see `rlx.models.layout`).

        `logprob_backend` is one of `rlx.kernels.logprob.BACKENDS`. `compute_dtype` is what sharding casts parameters to; None: their own
        dtype. `row`: the ranks that compute each row together; None: this one alone. Raises ValueError if there are several
        and the model mixes tokens in other layers than attention, or if it has its layers where nobody knows them (`backbone`).
        """
        super().__init__()
        backbone(hf)  # refuses a class that it does not know
        self.hf = hf
        hf.eval()  # no dropout: the trainer must compute what the inference engine computes
        self.attention = attention
        self.logprob_backend = logprob_backend
        self.liger = "off"  # the description that `rlx.models.liger.apply_liger` returned
        self.long_apart = False  # whether long samples of a row are computed apart (`rlx.models.flash`)
        self.compute_dtype = compute_dtype or hf.dtype
        self.head = [hf.get_output_embeddings()]  # in a list, so that it is not registered twice
        self.sums_copies_late = False  # whether sums over the copies of its shards may wait for the last micro-batch of a step
        self.head_is_fsdp_unit = False  # whether the head is sharded by itself, so that only its own forward has its parameters
        self.base: dict[str, str] = {}  # of a model with adapters: `name`, `digest` and `dtype` of the frozen model
        self.context: int | None = None  # tokens of the longest sample, if it is known
        self.window: int | None = None  # the shortest that its layers have only in transformers' masks, so that packed samples ignore it
        self.slots: AdapterRouting | None = None  # where its layers find each token's adapter, if it has several (`rlx.models.slots`)
        config = hf.config
        self.logit_scale, self.softcap = logit_scale(config), logit_softcap(config)
        self.row = row
        self.widths = unusual_widths(hf)
        self.padded = attention == "rows" or not set(getattr(config, "layer_types", None) or ()) <= ATTENTION_LAYERS
        self._own_attention = hf.config._attn_implementation
        if self.padded:
            self.pad_rows()
        else:
            hf.set_attn_implementation(NAME)

    def pad_rows(self) -> None:
        """Compute samples beside each other, padded to the longest of a row, by the model's own attention."""
        config = self.hf.config
        if self.row is not None:
            others = ", ".join(sorted(set(getattr(config, "layer_types", None) or ()) - ATTENTION_LAYERS))
            whole = f"layers of {type(self.hf).__name__} need whole sequences ({others})" if others else "padded rows keep them whole"
            raise ValueError(f"{self.row.keys} cuts rows into pieces, but {whole}; leave it out")
        self.padded = True
        softcap = getattr(config, "attn_logit_softcapping", None) is not None  # transformers 5.19 leaves it out with sdpa, its default
        self.hf.set_attn_implementation("eager" if softcap else self._own_attention)

    def layout_kind(self, device: torch.device) -> Kind:
        """How to run micro-batches on this device. Raises ValueError for `varlen` without CUDA."""
        if self.attention == "varlen" and device.type != "cuda":
            raise ValueError(f"model.attention=varlen needs CUDA, but this is {device.type}; set model.attention=auto or sdpa")
        if self.padded:
            return "rows"
        if self.attention == "sdpa" or device.type != "cuda":
            return "shared"
        config = self.hf.config
        if self.attention == "varlen" and self.widths:
            raise ValueError(f"model.attention=varlen cannot compute {self.widths}; set model.attention=auto or sdpa")
        bounded = getattr(config, "attn_logit_softcapping", None) is not None or config.model_type == "gpt_oss"
        sixteen_bit = self.compute_dtype in (torch.bfloat16, torch.float16)
        if self.attention == "varlen" or (sixteen_bit and not bounded and not self.widths):
            return "mixed" if self.long_apart else "varlen"
        return "shared"

    def forward(self, layout: Layout, index: Tensor, labels: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor]:
        """Score the trainable tokens of one micro-batch.

        index [N] into the flattened computed tokens, labels [N], temperature [N] → (logp [N], entropy [N]), float32.
        """
        if self.slots is not None:
            self.slots.stretches = layout.stretches
        ids, positions, count = layout.token_ids, layout.position_ids, len(index)
        extra: dict[str, Any] = {} if layout.kind == "rows" else {"layout": layout}
        if self.row is not None:
            ids, positions, extra["row"] = self.row.piece(ids), self.row.span(positions), self.row
            own, index = self.row.own(index, layout.num_tokens)
            labels, temperature = labels[own], temperature[own]
        hidden = backbone(self.hf)(input_ids=ids, attention_mask=None, position_ids=positions, use_cache=False, **extra).last_hidden_state
        hidden = hidden.flatten(0, 1).index_select(0, index)

        def score(hidden: Tensor, head: Any) -> tuple[Tensor, Tensor]:
            return logprob(
                hidden,
                head.weight,
                labels,
                temperature,
                bias=getattr(head, "bias", None),
                scale=self.logit_scale,
                softcap=self.softcap,
                backend=self.logprob_backend,
            )

        head = self.head[0]
        scores = head(hidden, score) if self.head_is_fsdp_unit else score(hidden, head)
        if self.row is not None:
            logp, entropy = self.row.for_everyone(scores, own, count)
            return logp, entropy
        return scores

    @property
    def layers(self) -> nn.ModuleList:
        """The decoder layers: the module list with the most parameters."""
        lists = [module for module in self.hf.modules() if isinstance(module, nn.ModuleList) and len(module)]
        return max(lists, key=lambda layers: sum(p.numel() for p in layers.parameters()))

    @property
    def adapts(self) -> bool:
        """Whether adapters are trained instead of the model."""
        return any(True for _ in adapted(self.hf))

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """What training changes, by its names in `hf`: the adapters if there are any, otherwise parameters and persistent buffers.

        Tied ones come once, sharded ones as DTensors.
        """
        seen: set[int] = set()
        adapts = self.adapts
        for name, tensor in self.hf.state_dict(keep_vars=True).items():
            if id(tensor) not in seen and (tensor.requires_grad or not adapts):
                seen.add(id(tensor))
                yield name, tensor.detach()
