"""What the plan says of trainer ranks: those that compute a row together, and their threads."""

from __future__ import annotations

from pathlib import Path

import pytest
from launch_configs import config

from rlx.config.memory import trainer_memory
from rlx.config.rows import kept_numbers, tokens_in_budget
from rlx.plan.explain import explain
from rlx.plan.make import make_plan


def test_the_plan_counts_the_tiles_that_the_head_op_has() -> None:
    from rlx.config.memory import TILE
    from rlx.kernels.tiles import TILE_CPU, TILE_CUDA

    assert {kind: (elements // columns, columns) for kind, (columns, elements) in {"cpu": TILE_CPU, "cuda": TILE_CUDA}.items()} == TILE


def test_a_context_group_shares_each_row() -> None:
    whole = config("node8", trainer={"micro_batch_tokens": 8192})
    cut = config("node8", trainer={"micro_batch_tokens": 8192, "cp": 2})
    assert (cut.trainer_ranks, cut.data_ranks) == (4, 2)
    before, after = trainer_memory(whole), trainer_memory(cut)
    assert after.activations == before.activations / 2
    assert after.states == before.states, "the shards are over all ranks"
    assert before.head - after.head == 4 * 4096 * (2 * 8192 + 4096), "tiles and the hidden states' gradient, of half a row"
    text = explain(cut, make_plan(cut, Path("/run")), {}, [], "/run")
    assert "FSDP2 over 4 ranks; each row on 2 of them" in text
    rows = 256 * 8192 // (8192 * 2)
    assert f"at most {rows} per group of 2 ranks and optimizer step, each one row of 8,192 tokens, on 2 of them" in text
    assert tokens_in_budget(cut) == pytest.approx(2 * tokens_in_budget(whole), abs=256), "the budget is that of a rank"


def test_a_tensor_group_shares_rows_and_gathered_layers() -> None:
    whole, divided = (config("node8", trainer={"micro_batch_tokens": 8192, "tp": tp}) for tp in (1, 2))
    before, after = trainer_memory(whole), trainer_memory(divided)
    assert after.states == before.states
    assert (after.layers, after.layer_gradients) == (before.layers / 2, before.layer_gradients / 2)
    twice = 2 * 4096 / kept_numbers(whole.model)[0]  # of a gathered span, the other rank's tokens are kept twice a layer
    assert after.activations == pytest.approx(before.activations * (1 + twice) / 2)
    text = explain(divided, make_plan(divided, Path("/run")), {}, [], "/run")
    assert "FSDP2 over 4 ranks; each row on 2 of them, matrices divided over 2" in text


def test_groups_that_lie_on_several_hosts_are_named() -> None:
    for keys, warned in (({"tp": 8}, False), ({"tp": 16}, True), ({"ep": 16}, True)):
        cfg = config("node8x4", trainer={"micro_batch_tokens": 8192, **keys}, model={"num_experts": 128, "num_attention_heads": 32})
        text = explain(cfg, make_plan(cfg, Path("/run")), {}, [], "/run")
        ((key, size),) = keys.items()
        assert (f"warning: trainer.{key}={size} does not divide the 8 trainer ranks of a host, so some groups exchange" in text) == warned


def test_an_expert_group_shares_gathered_layers_of_experts() -> None:
    model = {"num_experts": 128}
    whole, divided = (config("node8", model=model, trainer={"micro_batch_tokens": 8192, "ep": ep}) for ep in (1, 4))
    before, after = trainer_memory(whole), trainer_memory(divided)
    assert (after.states, after.activations) == (before.states, before.activations)
    assert after.layers == before.layers / 4
    assert divided.data_ranks == 4, "each rank has samples of its own"
    assert "FSDP2 over 4 ranks; experts divided over 4" in explain(divided, make_plan(divided, Path("/run")), {}, [], "/run")


def test_a_single_process_with_adapters_gathers_nothing_and_holds_them_once_more_in_16_bits() -> None:
    whole = config("gpu1_shared", trainer={"micro_batch_tokens": 4096})
    adapters = config("gpu1_shared", trainer={"micro_batch_tokens": 4096}, lora={"rank": 16})
    before, after = trainer_memory(whole), trainer_memory(adapters)
    assert before.layers > 0, "float32 parameters, gathered in 16 bits"
    assert after.layers == after.table == after.table_gradients == 0
    assert after.activations - before.activations == pytest.approx(after.gradients / 2)
    again = config("gpu1_shared", trainer={"micro_batch_tokens": 4096, "fsdp_cpu_offload": True}, lora={"rank": 16})
    assert trainer_memory(again).layers == before.layers


def test_threads_of_a_process_that_computes_alone_may_spin() -> None:
    plan = make_plan(config("cpu", hardware={"cpu_threads": 2}, bench=True), Path("/run"))
    assert [spec.role for spec in plan if spec.role != "prepare"] == ["trainer"]
    assert not any("OMP_WAIT_POLICY" in spec.env for spec in plan)
    several = make_plan(config("cpu", hardware={"cpu_threads": 2, "trainer_processes": 2}, bench=True), Path("/run"))
    waits = [spec.env.get("OMP_WAIT_POLICY") for spec in several if spec.role == "trainer"]
    assert waits == ["PASSIVE", "PASSIVE"], "its ranks share the cores"


@pytest.mark.parametrize(
    ("layout", "hardware", "says"),
    [
        ("node8", {"nodes": 2, "trainer_processes": 2}, "no process is on host 1 (hardware.nodes=2) and 10 of 16 GPUs (hardware.gpus_per_"),
        ("node8", {"trainer_processes": 2}, "no process is on 2 of 8 GPUs (hardware.gpus_per_node=8)"),
        ("node8", {}, None),
        ("cpu_3nodes", {}, None),
        ("gpu1_shared", {}, None),
    ],
)
def test_the_plan_says_which_hosts_and_gpus_have_no_process(layout: str, hardware: dict[str, int], says: str | None) -> None:
    cfg = config(layout, hardware=hardware)
    text = explain(cfg, make_plan(cfg, Path("/run")), {}, [], "/run")
    assert says in text if says else "no process is on" not in text
