"""Compiled layers: also with recomputed activations, and whatever sizes torch treats as symbols."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch._dynamo.backends.debugging import aot_eager
from torch._dynamo.utils import counters
from trainer_examples import VOCABULARY, gradients, make_model, make_sample, make_samples, make_trainer, step_batch
from transformers.models.gemma2 import Gemma2Config

from rlx.config.schema import AcConfig, LoraConfig
from rlx.data.packing import pack
from rlx.models.attention import packed_attention
from rlx.models.compiled import about_eager_rows, eager_again, num_graphs
from rlx.models.layout import build_layout
from rlx.models.lora import add_adapters, draw_adapters
from rlx.models.shard import checkpoint_activations, compile_layers
from rlx.parallel.mesh import one_process
from rlx.paths import RunPaths
from rlx.train.flops import Meter
from rlx.train.summary import Summary
from rlx.types import MicroBatch

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
        compile_layers(trainer.model, backend=backend)
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
        torch.testing.assert_close(found[name], expected[name], rtol=1e-5, atol=1e-7)


def rows_of_many_structures() -> list[MicroBatch]:
    """Rows whose attention is divided into different numbers of buckets. The last but one is a single long sample, the last a short one."""
    rng = np.random.default_rng(0)
    samples = [make_samples(groups=number, members=1 + number % 5, seed=number, longest=[6, 90, 20][number % 3]) for number in range(1, 12)]
    for length in (1200, 7):
        ids = rng.integers(3, VOCABULARY, length).tolist()
        samples.append([make_sample(0, 0, ids, range(4, length), rng)])
    return [pack(step_batch(0, [each]), rank=0, ranks=1, tokens=4096).mini_batches[0].micro_batches[0] for each in samples]


@pytest.mark.slow
@pytest.mark.parametrize("keys", [{}, pytest.param(WINDOWS, marks=pytest.mark.nightly)])
def test_rows_of_any_number_of_blocks_need_few_graphs(keys: dict[str, Any]):
    """And give the results of layers that are not compiled."""
    plain, compiled = (make_trainer(make_model(max_position_embeddings=2048, **keys)) for _ in range(2))
    compile_layers(compiled.model, backend="eager")
    rows = rows_of_many_structures()
    layouts = [build_layout(row.token_ids, row.cu_seqlens, row.scored, "shared", "cpu") for row in rows]
    numbers = {tuple(bucket.mask is None for bucket in layout.buckets) for layout in layouts}
    assert len(numbers) > torch._dynamo.config.recompile_limit
    graphs = [0]
    for row in rows:
        for one, other in zip(compiled.score(row), plain.score(row), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
        graphs.append(num_graphs())
    num_layers = len(compiled.model.layers)
    made = [now - before for before, now in pairwise(graphs)]
    assert made[0] == num_layers
    assert sum(made[1:-2]) == 0, "also where sizes of the first row were equal by chance"
    assert made[-2:] == [num_layers, 0], "a long sample by itself, and a short one"
    assert not eager_again()


@pytest.mark.parametrize("keys", [{}, WINDOWS])
def test_a_fixed_number_of_blocks_changes_neither_results_nor_gradients(keys: dict[str, Any]):
    trainers = [make_trainer(make_model(max_position_embeddings=2048, **keys)) for _ in range(2)]
    trainers[1].model.compiled = True  # not really: its rows are those of compiled layers
    for row in rows_of_many_structures():
        found = []
        for trainer in trainers:
            logp, entropy = trainer._forward(row, trainer.model)[1:]
            (logp.sum() + entropy.sum()).backward()
            found.append([logp.detach(), entropy.detach(), *gradients(trainer).values()])
        for one, other in zip(*found, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4 * float(one.abs().max()))


@pytest.mark.slow
@pytest.mark.parametrize(("attention", "places"), [("sdpa", (0, 3, -2)), ("rows", (0, 3))])
def test_rows_of_more_structures_than_torch_compiles_for_are_named_once(attention: str, places: tuple[int, ...]):
    """With `sdpa`, a row of a single long sample is another structure than all the rest."""
    trainer = make_trainer(make_model(num_hidden_layers=1, max_position_embeddings=2048), attention=attention)
    compile_layers(trainer.model, backend="eager")
    rows = rows_of_many_structures()
    with torch._dynamo.config.patch(recompile_limit=1):
        for place in places:
            assert not eager_again()
            trainer.score(rows[place])
        assert num_graphs() == 1
        assert eager_again() == (attention == "sdpa")
        warning = about_eager_rows(trainer.model)
    assert "more than 1 structures came" in warning
    assert ("Set model.attention=rows" in warning) == (attention == "sdpa"), "padded rows have one structure"


@pytest.mark.slow
def test_the_number_of_graphs_is_a_metric_of_compiled_layers_alone():
    batch = step_batch(0, [make_samples()])
    for compiled in (False, True):
        trainer = make_trainer(make_model(num_hidden_layers=1))
        if compiled:
            compile_layers(trainer.model, backend="eager")
        meter = Meter(trainer.model, trainer.mesh)
        trainer.train_batch(pack(batch, rank=0, ranks=1, tokens=400))
        found = meter.measure(batch, 1.0, 1)
        assert ("perf/compiled_graphs" in found) == compiled
    assert found["perf/compiled_graphs"] == num_graphs() > 0


def test_the_summary_shows_each_warning_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """That of the objective does not hide that of compiled layers."""
    trainer = make_trainer(make_model(num_hidden_layers=1))
    summary = Summary(RunPaths(tmp_path), one_process("cpu"), trainer)
    trainer.warning = "bounds are tight"
    summary.after_step(0)
    trainer.model.compiled = True
    monkeypatch.setattr("rlx.train.summary.eager_again", lambda: True)
    for step in (1, 2):
        summary.after_step(step)
    warning = json.loads((tmp_path / "kernels.json").read_text())["warning"]
    assert warning.startswith("bounds are tight; trainer.compile=true: rows of more than")
    assert warning.count("bounds are tight") == warning.count("trainer.compile=true:") == 1


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
