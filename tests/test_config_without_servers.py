"""Commands that start no server, or no trainer, are not refused for what only a server or a trainer would need."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rlx.config.errors import ConfigError
from rlx.config.load import compose
from rlx.config.roots import EVAL, SFT, SYNTHESIZE, TRAIN, Root
from rlx.config.schema import CommandConfig, Config
from rlx.plan.explain import explain
from rlx.plan.make import make_plan
from rlx.policy.source import fake_rollouts
from rlx.preflight.needs import needed_memory

SMALL, LARGE = "model=qwen3_0_6b", "model=qwen3_8b"
API = ("model=endpoint", "model.name=x", "client.base_url=http://other/v1")
OTHERS = "inference.base_url=[http://other:8000]"
ON_THREE_HOSTS = ("hardware=cpu_3nodes", "hardware.inference_replicas=3", "launcher=slurm")
NEARLY_ALL = ("hardware=gpu1_shared", "inference.gpu_memory_utilization=0.9")


def planned(root: Root, *argv: str) -> tuple[CommandConfig, dict[str, list[int]]]:
    """The configuration, and the GPUs of each role's processes."""
    envs = [] if root is SFT else ["env=reverse_text"]
    cfg = compose([*envs, "dry_run=true", *argv], {}, root).cfg
    plan = make_plan(cfg, Path("/run"))
    assert explain(cfg, plan, {}, [], "/run")
    return cfg, {role: [gpu for spec in plan if spec.role == role for gpu in spec.gpus] for role in {spec.role for spec in plan}}


@pytest.mark.parametrize(
    ("root", "argv"),
    [
        (SFT, ("data=fake", SMALL, "hardware=node8x4", "launcher=slurm", "hardware.inference_replicas=16")),
        (EVAL, (*API, "hardware=node8", "hardware.inference_replicas=16")),
        (SYNTHESIZE, (*API, "hardware=node8", "hardware.tensor_parallel=2")),
        (TRAIN, (SMALL, OTHERS, "hardware=node8", "hardware.inference_replicas=9")),
        (EVAL, (SMALL, OTHERS, "hardware=gpu2", "hardware.tensor_parallel=4")),
        (TRAIN, (LARGE, "bench=true", "hardware=node8", "hardware.trainer_processes=8")),
        (TRAIN, (SMALL, "replay=/other", "hardware=gpu2", "hardware.trainer_processes=2")),
        (TRAIN, ("model=olmoe_1b_7b", "bench=true", *ON_THREE_HOSTS)),
        (TRAIN, ("model=olmoe_1b_7b", "replay=/other", *ON_THREE_HOSTS)),
    ],
)
def test_a_layout_with_servers_serves_a_command_that_starts_none(root: Root, argv: tuple[str, ...]) -> None:
    cfg, gpus = planned(root, *argv)
    assert cfg.num_servers == 0
    assert "inference" not in gpus


def test_a_trainer_alone_is_that_of_the_run_unless_its_processes_are_counted() -> None:
    run = planned(TRAIN, LARGE, "hardware=node8")[1]["trainer"]
    assert planned(TRAIN, LARGE, "hardware=node8", "bench=true")[1]["trainer"] == run == [4, 5, 6, 7]
    assert planned(TRAIN, LARGE, "hardware=node8", "replay=/other", "hardware.trainer_processes=8")[1]["trainer"] == [*range(8)]


@pytest.mark.parametrize(
    ("root", "argv"),
    [
        (EVAL, (SMALL,)),
        (SYNTHESIZE, (SMALL,)),
        (SFT, (SMALL, "data=fake")),
        (TRAIN, (SMALL, "replay=/other")),
        (TRAIN, (SMALL, "bench=true", "bench_role=inference")),
        (TRAIN, (SMALL, "trainer.max_concurrent_runs=2", "lora.rank=8")),
        (TRAIN, (SMALL, "trainer.shared=/other", "lora.rank=8")),
    ],
)
def test_a_gpu_that_only_one_of_them_uses_may_be_used_by_it(root: Root, argv: tuple[str, ...]) -> None:
    planned(root, *argv, *NEARLY_ALL)
    with pytest.raises(ConfigError, match="the engine leaves too little of their shared GPU"):
        planned(TRAIN, SMALL, *NEARLY_ALL)


@pytest.mark.parametrize("argv", [("replay=/other",), ("bench=true",), ("bench=true", "bench_role=inference")])
def test_a_way_to_send_weights_does_not_matter_where_none_are_sent(argv: tuple[str, ...]) -> None:
    for kind, hardware in (("nccl", "cpu"), ("ipc", "cpu"), ("ipc", "gpu2"), ("nccl", "gpu1_shared")):
        planned(TRAIN, SMALL, f"weight_broadcast.type={kind}", f"hardware={hardware}", *argv)
        with pytest.raises(ConfigError, match=re.escape(f"weight_broadcast.type={kind}")):
            planned(TRAIN, SMALL, f"weight_broadcast.type={kind}", f"hardware={hardware}")


def test_a_benchmark_of_servers_needs_nothing_of_the_trainers_ranks() -> None:
    alone = ("bench=true", "bench_role=inference", "hardware=node8", "hardware.inference_replicas=8")
    for key in ("trainer.tp=4", "trainer.dp_replicate=2"):
        planned(TRAIN, LARGE, *alone, key)
    planned(TRAIN, "model=qwen3_30b_a3b", *alone, "trainer.ep=8")


@pytest.mark.parametrize("role", ["trainer", "inference"])
def test_a_benchmark_on_random_tokens_has_as_many_rollouts_as_a_batch(role: str) -> None:
    sizes = ("orchestrator.batch_size=64", "orchestrator.rollouts_per_example=16", "envs.reverse_text.rollouts_per_example=4")
    cfg = planned(TRAIN, SMALL, *sizes, "bench=true", f"bench_role={role}")[0]
    assert isinstance(cfg, Config)
    assert sum(len(part) for part in fake_rollouts(cfg).receive(0).mini_batches) == 64


def test_the_memory_that_a_host_needs_is_that_of_the_processes_that_start() -> None:
    def need(*argv: str) -> float:
        return needed_memory(planned(TRAIN, "model=qwen3_4b", "hardware=cpu", *argv)[0]) / 2**30

    whole, trainer, servers = need(), need("bench=true"), need("bench=true", "bench_role=inference")
    assert servers < 20 < trainer < whole
    assert whole == pytest.approx(trainer + servers - 2.0), "orchestrator and supervisor count once"
