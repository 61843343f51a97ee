"""Attention with a softcap or sinks against the same written out for autograd, and the memory that it takes."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from trainer_examples import make_model
from transformers.models.gemma2 import Gemma2Config
from transformers.models.gpt_oss import GptOssConfig
from transformers.models.qwen3 import Qwen3Config

from rlx.config.schema import AcConfig
from rlx.models import attention as bounded
from rlx.models.attention import attend_bounded
from rlx.models.layout import build_layout
from rlx.models.policy import PolicyModel
from rlx.models.shard import checkpoint_activations

pytestmark = pytest.mark.slow


def written_out(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: Any, softcap: Any, sinks: Tensor | None) -> Tensor:
    """The twin: one product for all, whose scores autograd keeps."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = (q @ k.transpose(-1, -2)) * (q.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    visible = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril() if mask is None else mask
    scores = torch.where(visible, scores, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks[None, :, None, None].expand(*scores.shape[:3], 1)], -1)
    return scores.softmax(-1)[..., : k.shape[2]] @ v


def drawn(blocks: int, queries: int, keys: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """q, k, v, sinks and the gradient of the result, of six heads in three groups."""
    generator = torch.Generator().manual_seed(0)
    shapes = (blocks, 6, queries, 8), (blocks, 3, keys, 8), (blocks, 3, keys, 4), (6,), (blocks, 6, queries, 4)
    return tuple(torch.randn(shape, generator=generator).to(dtype) for shape in shapes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("softcap", "with_sinks"), [(2.0, False), (None, True), (2.0, True)])
@pytest.mark.parametrize(("blocks", "queries", "keys"), [(1, 9, 9), (4, 5, 12), (3, 1, 7)])
@pytest.mark.parametrize("part", [2**21, 300, 60, 1])
def test_values_and_gradients_are_those_of_attention_written_out(
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    softcap: float | None,
    with_sinks: bool,
    blocks: int,
    queries: int,
    keys: int,
    part: int,
) -> None:
    monkeypatch.setattr(bounded, "PART", {"cpu": part})
    *given, slope = drawn(blocks, queries, keys, dtype)
    given = given if with_sinks else given[:3]
    ends = torch.arange(keys - queries, keys)[:, None]
    several = (torch.arange(keys) <= ends) & (torch.arange(keys) > ends - 4)
    masks: list[Tensor | None] = [several[None, None], several.expand(blocks, 1, -1, -1).clone()]
    masks[1][-1, 0, :, 0] = True  # type: ignore[index]
    for mask, scaling in itertools.product(masks + ([None] if queries == keys else []), (None, 0.7)):
        found, wanted = [], []
        for results, of, kind in ((found, attend_bounded, dtype), (wanted, written_out, torch.float64)):
            inputs = [x.to(kind, copy=True).requires_grad_() for x in given]
            out = of(*inputs[:3], mask, scaling, softcap, inputs[3] if with_sinks else None)
            assert out.dtype == kind
            results += [out, *torch.autograd.grad(out, inputs, slope.to(kind))]
        tolerance = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 0.05, "atol": 0.08}
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one.double(), other.double(), **tolerance)


FAMILIES: dict[str, tuple[type, dict[str, Any]]] = {
    "gemma2": (Gemma2Config, {}),
    "gpt_oss": (GptOssConfig, {"num_local_experts": 4, "num_experts_per_tok": 1}),
}
SIZES = {"hidden_size": 64, "intermediate_size": 64, "head_dim": 16, "max_position_embeddings": 2048, "sliding_window": 4096}


def scored(model: PolicyModel, length: int) -> Tensor:
    """The summed log-probability of one sample."""
    ids = torch.arange(length) % 37 + 3
    read = np.arange(length) < length - 1
    layout = build_layout(ids.int().numpy(), np.array([0, length]), read, "shared", "cpu")
    logp: Tensor = model(layout, torch.arange(length - 1), ids[1:], torch.ones(length - 1))[0]
    return logp.sum()


def kept(name: str, length: int, *, layers: int, ac: AcConfig | None = None) -> int:
    """Bytes that autograd and checkpointing keep for the backward of one sample, without parameters."""
    config, keys = FAMILIES.get(name, (Qwen3Config, {}))
    model = PolicyModel(make_model(config, num_hidden_layers=layers, **SIZES | keys))
    if ac is not None:
        checkpoint_activations(model, ac)
    tensors: dict[int, tuple[int, Any]] = {}
    own = {parameter.untyped_storage()._cdata for parameter in model.parameters()}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            tensors[storage._cdata] = (storage.nbytes(), storage)  # with the storage, so that no other gets its place
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        scored(model, length)
    return sum(size for size, _ in tensors.values())


@pytest.mark.parametrize("name", FAMILIES)
def test_what_a_layer_keeps_grows_with_the_tokens_as_the_estimate_does(name: str) -> None:
    """Scores of 1,024 tokens, four heads and a softcap were 32 MiB a layer; what else it keeps is 6 MiB."""

    def of_a_layer(name: str, length: int) -> float:
        return (kept(name, length, layers=3) - kept(name, length, layers=1)) / 2

    short, long = of_a_layer(name, 256), of_a_layer(name, 1024)
    assert long == pytest.approx(4 * short, rel=0.02)
    if name == "gemma2":  # the layers of experts have other widths
        assert long == pytest.approx(of_a_layer("qwen3", 1024), rel=0.05), "as of a model without a softcap"


class Largest(TorchDispatchMode):
    """The most numbers that a floating-point tensor has which is made in it."""

    found = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        sizes = [tensor.numel() for tensor in tree_leaves(out) if isinstance(tensor, Tensor) and tensor.is_floating_point()]
        self.found = max([self.found, *sizes])
        return out


@pytest.mark.parametrize(
    ("name", "ac"),
    [
        *itertools.product(FAMILIES, [None, AcConfig(freq=1)]),
        ("gemma2", AcConfig(freq=1, mode="selective")),  # GPT-OSS is refused: its experts write into results that would be kept
    ],
)
def test_no_tensor_ever_has_all_scores(monkeypatch: pytest.MonkeyPatch, name: str, ac: AcConfig | None) -> None:
    monkeypatch.setattr(bounded, "PART", {"cpu": 2**14})
    config, keys = FAMILIES[name]
    model = PolicyModel(make_model(config, num_hidden_layers=2, **SIZES | keys))
    if ac is not None:
        checkpoint_activations(model, ac)
    with Largest() as largest:
        scored(model, 1024).backward()
    assert largest.found <= 1024 * 64 * 4, "all scores are 4 heads · 1,024 · 1,024"
