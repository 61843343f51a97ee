"""Operations of a step, against a count by hand and against torch's own count of an unpacked forward and backward."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from trainer_examples import make_model, make_samples, make_trainer, step_batch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    MistralConfig,
    MistralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from rlx.config.schema import LoraConfig
from rlx.data.packing import pack
from rlx.models.lora import add_adapters
from rlx.parallel.mesh import Mesh
from rlx.train.flops import Flops, Meter, peak_of

SHAPE = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
LENGTHS = (3, 7, 5)


@pytest.mark.parametrize("tied", [False, True])
def test_dense_model(tied: bool) -> None:
    model = Qwen3ForCausalLM(Qwen3Config(vocab_size=10, head_dim=8, tie_word_embeddings=tied, attn_implementation="eager", **SHAPE))
    queries = outputs = 16 * (4 * 8)
    keys = values = 16 * (2 * 8)
    weights = 2 * (queries + keys + values + outputs + 3 * 16 * 24) + 16 * 10
    by_hand = 6 * weights * sum(LENGTHS) + 12 * 2 * (4 * 8) * sum(n * n for n in LENGTHS)
    assert Flops.of(model).count(LENGTHS) == by_hand
    assert Flops.of(model).count(LENGTHS, causal=True) == by_hand - 6 * 2 * (4 * 8) * sum(n * n for n in LENGTHS)
    with FlopCounterMode(display=False) as counter:
        for n in LENGTHS:
            model(input_ids=torch.zeros(1, n, dtype=torch.long)).logits.sum().backward()
    assert counter.get_total_flops() == by_hand
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        for n in LENGTHS:
            model(input_ids=torch.zeros(1, n, dtype=torch.long))
    assert by_hand - Flops.of(model).count_backward(LENGTHS) == pytest.approx(counter.get_total_flops(), rel=1e-12)


def test_frozen_matrices_beside_adapters_have_no_gradients_of_their_own() -> None:
    model = Qwen3ForCausalLM(Qwen3Config(vocab_size=10, head_dim=8, tie_word_embeddings=False, attn_implementation="eager", **SHAPE))
    whole = Flops.of(model)
    add_adapters(model, LoraConfig(rank=4))
    sides = 2 * (16 + 32) + 2 * (16 + 16) + 3 * (16 + 24)  # q and o, k and v, gate, up and down
    assert Flops.of(model).matrices == whole.matrices * 4 / 6 + 6 * 2 * 4 * sides
    assert Flops.of(model).backward == whole.matrices * 2 / 6 + 4 * 2 * 4 * sides
    assert Flops.of(model).attention == whole.attention


def test_a_layer_with_a_window_counts_the_pairs_that_it_sees() -> None:
    config = Gemma2Config(vocab_size=10, head_dim=8, sliding_window=5, attn_implementation="eager", **SHAPE)
    assert config.layer_types == ["sliding_attention", "full_attention"]
    flops = Flops.of(Gemma2ForCausalLM(config))
    for n in (3, 5, 6, 40):
        seen = [min(i + 1, window) for window in (5, n) for i in range(n)]
        attended = flops.count([n], causal=True) - flops.matrices * n
        # Half of all pairs leaves out half of each token's pair with itself, or of the first tokens of a window.
        assert 0 < 12 * (4 * 8) * sum(seen) - attended <= 12 * (4 * 8) * n
    mistral = MistralConfig(sliding_window=4, **SHAPE)
    assert Flops.of(MistralForCausalLM(mistral)).windows == (4, 4)


def test_a_layer_with_blocks_counts_the_pairs_within_them() -> None:
    experts = {"num_local_experts": 2, "intermediate_size_mlp": 24, "interleave_moe_layer_step": 2, "attention_chunk_size": 5}
    config = Llama4TextConfig(vocab_size=10, head_dim=8, no_rope_layers=[1, 0], **SHAPE, **experts)
    assert config.layer_types == ["chunked_attention", "full_attention"]
    flops = Flops.of(Llama4ForCausalLM(config))
    for n, within in ((3, 9), (5, 25), (6, 25 + 1), (13, 2 * 25 + 9)):
        assert flops.count([n]) - flops.matrices * n == 12 * (4 * 8) * (within + n * n)


def test_rows_without_backward_count_their_forward_alone() -> None:
    samples = [
        sample if sample.group % 2 else dataclasses.replace(sample, advantages=np.zeros_like(sample.advantages))
        for sample in make_samples(groups=8)
    ]
    batch = step_batch(0, [samples])
    rows = pack(batch, rank=0, ranks=1, tokens=60)
    still = [n for row in rows.mini_batches[0].micro_batches if not row.advantages.any() for n in np.diff(row.cu_seqlens).tolist()]
    moving = [len(sample.token_ids) for sample in samples if sample.group % 2]
    trainer = make_trainer(make_model())
    meter = Meter(trainer.model, trainer.mesh)
    trainer.train_batch(rows, iterations=2)
    assert sorted(trainer.forward_only) == sorted(2 * still)
    flops = Flops.of(trainer.model.hf)
    wanted = 2 * (flops.count(moving) + (flops.count(still) - flops.count_backward(still)))
    assert meter.measure(batch, 4.0, 2, trainer.forward_only)["perf/tflops"] == pytest.approx(wanted / 4.0 / 1e12)
    trainer.train_batch(pack(step_batch(1, [[s for s in samples if s.group % 2]]), rank=0, ranks=1, tokens=60))
    assert trainer.forward_only == []


def test_the_peak_of_memory_is_that_of_the_rank_that_has_the_highest(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make_trainer(make_model())
    meter = Meter(trainer.model, trainer.mesh)
    alone = meter.measure(step_batch(0, [make_samples()]), 1.0, 1)
    assert alone["perf/peak_memory_rank"] == 0
    monkeypatch.setattr(Mesh, "all_gather_float", lambda self, own: [own, own + 2, own + 1])
    found = meter.measure(step_batch(0, [make_samples()]), 1.0, 1)
    assert found["perf/peak_memory_rank"] == 1
    assert found["perf/peak_memory_gb"] == pytest.approx(alone["perf/peak_memory_gb"] + 2, abs=0.1)


def test_of_experts_only_the_active_ones_count() -> None:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(vocab_size=10, head_dim=8, tie_word_embeddings=False, **SHAPE, **experts))
    attention = 2 * 16 * (4 * 8) + 2 * 16 * (2 * 8)
    router = 16 * 4
    active = 2 * (3 * 16 * 8)
    assert Flops.of(model).matrices == 6 * (2 * (attention + router + active) + 16 * 10)


@pytest.mark.parametrize(
    ("device", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 NVL", 835e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA H200 NVL", 835e12),
        ("NVIDIA B200", 2250e12),
        ("NVIDIA GB200", 2500e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA H20", None),
        ("", None),
    ],
)
def test_the_peak_is_that_of_the_device_whose_name_it_is(device: str, peak: float | None) -> None:
    assert peak_of(device) == peak
