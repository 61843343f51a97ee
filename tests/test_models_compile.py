"""Compiled layers: also with recomputed activations, and whatever sizes torch treats as symbols."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch._dynamo.backends.debugging import aot_eager
from torch._dynamo.utils import counters
from trainer_examples import gradients, make_model, make_samples, make_trainer, step_batch
from transformers.models.gemma2 import Gemma2Config

from rlx.config.schema import AcConfig, LoraConfig
from rlx.data.packing import pack
from rlx.models.attention import packed_attention
from rlx.models.layout import build_layout
from rlx.models.lora import add_adapters, draw_adapters
from rlx.models.shard import checkpoint_activations, compile_layers

WINDOWS = {"config_class": Gemma2Config, "sliding_window": 5, "attn_logit_softcapping": 2.0}


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()
    counters.clear()


def graphs_and_gradients(freq: int, *, compiled: bool, adapters: bool = False) -> tuple[list[int], dict[str, torch.Tensor]]:
    """The number of graphs traced so far after each of three batches of different lengths, and the gradients."""
    hf = make_model()
    if adapters:
        add_adapters(hf, LoraConfig(rank=4))
        draw_adapters(hf, seed=0)
    trainer = make_trainer(hf)
    checkpoint_activations(trainer.model, AcConfig(freq=freq))
    traced: list[Any] = []

    def backend(graph, inputs):
        traced.append(graph)
        return aot_eager(graph, inputs)

    if compiled:
        compile_layers(trainer.model, trainer.device, backend=backend)
    counts = []
    for seed in (0, 1, 2):
        rank_batch = pack(step_batch(0, [make_samples(seed=seed)]), rank=0, ranks=1, tokens=80)
        trainer.accumulate_gradients(rank_batch.mini_batches[0])
        counts.append(len(traced))
    return counts, gradients(trainer)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("freq", "adapters"),
    [
        pytest.param(0, False, marks=pytest.mark.nightly),
        pytest.param(1, False, marks=pytest.mark.long),
        pytest.param(1, True, marks=pytest.mark.nightly),
    ],
)
def test_compiled_layers_are_traced_with_and_without_recomputed_activations(freq: int, adapters: bool):
    _, expected = graphs_and_gradients(freq, compiled=False, adapters=adapters)
    traced, found = graphs_and_gradients(freq, compiled=True, adapters=adapters)
    assert traced[0] >= 2, "layers must be compiled"
    assert traced[2] == traced[1], "other lengths need no other graph; the second batch has rows that are divided otherwise"
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-5, atol=5e-7)


@pytest.mark.slow
def test_attention_compiles_where_the_number_of_heads_is_a_symbol():
    module = torch.nn.Module()
    module.num_key_value_groups = 2
    layout = build_layout(np.arange(7), np.array([0, 3, 7]), np.ones(7, dtype=bool), "shared", "cpu")

    def attend(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return packed_attention(module, query, key, key, None, layout=layout)[0]

    query, key = torch.randn(1, 4, 7, 8), torch.randn(1, 2, 7, 8)
    compiled = torch.compile(attend, dynamic=True, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(query, key), attend(query, key))
