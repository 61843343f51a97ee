"""The end of a step of vLLM's CPU engine, where it does much more than is needed: the head in float32, and the draw of each token.

Nothing is kept from one step to the next, so a new version of the weights needs no word here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler, apply_top_k_top_p

PIECE = 2**22  # numbers of the head that are cast at once, or of probabilities that are cumulated: 16 or 32 MiB, and not a GiB


def shorten_steps() -> None:
    """Change vLLM's classes in this process, and so in those forked from it. Doing it again changes nothing."""
    if not hasattr(LogitsProcessor._apply_head, "__wrapped__"):
        LogitsProcessor._apply_head = _by_pieces(LogitsProcessor._apply_head)
        TopKTopPSampler.forward_cpu = _with_one_number(TopKTopPSampler.forward_cpu)


def _by_pieces(apply: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """vLLM casts the whole of a 16-bit head to float32 in every step: a third of a step of SmolLM2-135M."""

    @functools.wraps(apply)
    def apply_head(self: Any, lm_head: Any, hidden_states: Tensor, embedding_bias: Tensor | None) -> Tensor:
        plain = isinstance(lm_head.quant_method, UnquantizedEmbeddingMethod | UnquantizedLinearMethod)
        if self.head_dtype == torch.float32 and plain and lm_head.weight.dtype in (torch.float16, torch.bfloat16):
            return multiply(hidden_states, lm_head.weight, embedding_bias)
        return apply(self, lm_head, hidden_states, embedding_bias)

    return apply_head


def multiply(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """[..., d], [V, d], [V] → [..., V] in float32."""
    flat = hidden.reshape(-1, hidden.shape[-1]).float()
    rows = max(1, PIECE // weight.shape[1])
    buffer = torch.empty(min(rows, len(weight)), weight.shape[1], dtype=torch.float32)
    logits = torch.empty(len(flat), len(weight), dtype=torch.float32)
    for begin in range(0, len(weight), rows):
        piece = weight[begin : begin + rows]
        logits[:, begin : begin + rows] = flat @ buffer[: len(piece)].copy_(piece).t()
    if bias is not None:
        logits += bias.float()
    return logits.reshape(*hidden.shape[:-1], len(weight))


def _with_one_number(forward: Callable[..., Any]) -> Callable[..., Any]:
    """vLLM draws two numbers per token of the vocabulary for every request with a seed: a third of a step of SmolLM2-135M.

    All rows are drawn so, also beside rows without a seed or without randomness. A seed must give the same tokens in any company.
    """

    @functools.wraps(forward)
    def forward_cpu(self: Any, logits: Tensor, generators: dict[int, torch.Generator], k: Tensor | None, p: Tensor | None) -> Any:
        if self.use_fp64_gumbel:
            return forward(self, logits, generators, k, p)
        logits = apply_top_k_top_p(logits, k, p)
        returned = None
        if self.logprobs_mode == "processed_logits":
            returned = logits
        elif self.logprobs_mode == "processed_logprobs":
            returned = logits.log_softmax(dim=-1, dtype=torch.float32)
        return draw(logits.softmax(dim=-1, dtype=torch.float32), generators), returned

    return forward_cpu


def draw(probabilities: Tensor, generators: dict[int, torch.Generator]) -> Tensor:
    """[N, V] → [N] a token of each row, where the row's random number falls among the cumulated probabilities.

    A row takes one number of its generator; one that has none, of torch's own. A token of probability 0 is never drawn. A row that is not
    finite gives token 0, as vLLM's own draw does.
    """
    numbers = torch.rand(len(probabilities), dtype=torch.float64)
    for row, generator in generators.items():
        numbers[row].uniform_(generator=generator)
    rows = max(1, PIECE // probabilities.shape[1])
    return torch.cat([_places(*part) for part in zip(numbers.split(rows), probabilities.split(rows), strict=True)])


def _places(numbers: Tensor, probabilities: Tensor) -> Tensor:
    cumulated = probabilities.cumsum(-1, dtype=torch.float64)
    total = cumulated[:, -1]
    wanted = torch.minimum(numbers * total, torch.nextafter(total, torch.zeros_like(total)))  # below it also after rounding
    return torch.searchsorted(cumulated, wanted[:, None], right=True).squeeze(1).masked_fill_(total.isnan(), 0)
