"""The plan of servers with several engines."""

from __future__ import annotations

from pathlib import Path

import pytest
from launch_configs import config
from test_plan_rl import layout

from rlx.config.errors import ConfigError
from rlx.config.load import compose
from rlx.config.roots import EVAL, SFT
from rlx.plan.explain import explain
from rlx.plan.make import make_plan


def test_engines_that_divide_experts_are_beside_each_other_or_in_parts_on_further_hosts() -> None:
    experts = {"num_experts": 64}
    hardware = {"inference_replicas": 1, "data_parallel": 2, "tensor_parallel": 2}
    assert layout("node8", hardware=hardware, model=experts) == [
        "inference_0 @0 gpus=0,1,2,3 ports={'http': 0}",
        "orchestrator @0 gpus= ports={}",
        "trainer @0 gpus=4,5,6,7 ports={'rendezvous': 0}",
    ]
    hardware = {"nodes": 5, "inference_replicas": 2, "data_parallel": 16}
    cfg = config("node8", hardware=hardware, model=experts)
    plan = make_plan(cfg, Path("/run"))
    placed = [(spec.name, spec.node, len(spec.gpus), spec.service) for spec in plan]
    assert placed[:4] == [
        ("inference_0", 0, 8, True),
        ("headless_0", 1, 8, True),
        ("inference_1", 2, 8, True),
        ("headless_1", 3, 8, True),
    ]
    assert [(spec.node, len(spec.gpus)) for spec in plan if spec.role == "trainer"] == [(4, 8)]
    assert plan[3].argv[-5:] == ("rlx.roles.headless", "--run-dir", "/run", "--replica", "1")
    assert "of inference_1: vLLM, 8 of 16 data-parallel engines" in explain(cfg, plan, {"loss": "dr_grpo"}, [], "/run")
    assert cfg.num_gpus == 32 + 8


def test_on_cpu_hosts_the_keys_say_how_many_engines_each_has() -> None:
    hardware = {"data_parallel": 2, "data_parallel_local": 1}
    assert layout("cpu_3nodes", hardware=hardware, model={"num_experts": 4}) == [
        "inference_0 @0 gpus= ports={'http': 0, 'engines': 0}",
        "headless_0 @1 gpus= ports={}",
        "orchestrator @2 gpus= ports={}",
        "trainer @2 gpus= ports={}",
    ]


def test_parts_of_a_server_are_on_different_hosts_or_refused() -> None:
    hardware = {"data_parallel": 3, "data_parallel_local": 1}
    with pytest.raises(
        ConfigError, match=r"puts a server on 3 hosts, but of hardware\.nodes=3 inference has 2\.\n  fix: hardware\.nodes=4,"
    ):
        layout("cpu_3nodes", hardware=hardware, model={"num_experts": 4})
    placed = layout("cpu_3nodes", hardware={**hardware, "nodes": 4}, model={"num_experts": 4})
    assert [line.split(" gpus")[0] for line in placed][:3] == ["inference_0 @0", "headless_0 @1", "headless_1 @2"]


def test_hosts_without_servers_are_all_the_trainers_or_free() -> None:
    cfg = compose(["data=fake", "hardware=cpu_3nodes", "hardware.trainer_processes=3", "dry_run=true"], {}, SFT).cfg
    assert [spec.node for spec in make_plan(cfg, Path("/run")) if spec.role == "trainer"] == [0, 1, 2]
    asks = ["env=reverse_text", "client.base_url=http://other/v1", "model.name=other"]
    cfg = compose([*asks, "hardware=cpu_3nodes", "dry_run=true"], {}, EVAL).cfg
    assert [(spec.role, spec.node) for spec in make_plan(cfg, Path("/run"))] == [("evaluator", 0)]
