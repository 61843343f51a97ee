"""The plan of each hardware layout, and the plan in words."""

from __future__ import annotations

from pathlib import Path

import pytest
from launch_configs import config

from rlx.config.errors import ConfigError
from rlx.plan.explain import explain
from rlx.plan.memory import engine_memory, trainer_memory
from rlx.plan.place import require_one_host
from rlx.plan.record import read_plan, write_plan
from rlx.plan.rl import make_plan
from rlx.types import ProcessSpec

GIB = 2**30


def layout(hardware: str, visible: list[str] | None = None, /, **sections) -> list[str]:
    """One line for each process: name, host, GPUs, ports."""
    plan = make_plan(config(hardware, **sections), Path("/run"), visible)
    return [f"{spec.name} @{spec.node} gpus={spec.env['CUDA_VISIBLE_DEVICES']} ports={spec.ports}" for spec in plan]


def command(plan: list[ProcessSpec], role: str) -> str:
    return " ".join(next(spec for spec in plan if spec.role == role).argv)


def test_plan_of_cpu() -> None:
    assert layout("cpu") == ["inference_0 @0 gpus= ports={'http': 0}", "orchestrator @0 gpus= ports={}", "trainer @0 gpus= ports={}"]


def test_plan_of_a_shared_gpu_gives_it_to_both() -> None:
    assert layout("gpu1_shared") == [
        "inference_0 @0 gpus=0 ports={'http': 0}",
        "orchestrator @0 gpus= ports={}",
        "trainer @0 gpus=0 ports={}",
    ]


def test_plan_of_two_gpus_splits_them() -> None:
    assert layout("gpu2") == [
        "inference_0 @0 gpus=0 ports={'http': 0}",
        "orchestrator @0 gpus= ports={}",
        "trainer @0 gpus=1 ports={}",
    ]


def test_plan_of_eight_gpus_has_inference_first_and_the_trainer_behind_it() -> None:
    assert layout("node8") == [
        "inference_0 @0 gpus=0 ports={'http': 0}",
        "inference_1 @0 gpus=1 ports={'http': 0}",
        "inference_2 @0 gpus=2 ports={'http': 0}",
        "inference_3 @0 gpus=3 ports={'http': 0}",
        "orchestrator @0 gpus= ports={}",
        "trainer @0 gpus=4,5,6,7 ports={'rendezvous': 0}",
    ]


def test_tensor_parallel_replicas_get_neighbouring_gpus() -> None:
    hardware = {"inference_replicas": 2, "tensor_parallel": 3, "trainer_ranks": 2}
    assert layout("node8", hardware=hardware)[:2] == [
        "inference_0 @0 gpus=0,1,2 ports={'http': 0}",
        "inference_1 @0 gpus=3,4,5 ports={'http': 0}",
    ]


def test_gpus_are_those_that_the_user_made_visible() -> None:
    assert layout("gpu2", ["5", "GPU-7f"]) == [
        "inference_0 @0 gpus=5 ports={'http': 0}",
        "orchestrator @0 gpus= ports={}",
        "trainer @0 gpus=GPU-7f ports={}",
    ]
    with pytest.raises(ConfigError, match="CUDA_VISIBLE_DEVICES=5 names 1"):
        layout("gpu2", ["5"])


def test_the_model_is_prepared_only_where_it_is_warm_started() -> None:
    assert layout("cpu", model={"warm_start": {}})[0] == "prepare @0 gpus= ports={}"
    assert layout("gpu2", model={"warm_start": {}})[0] == "prepare @0 gpus=1 ports={}"


def test_servers_that_already_run_are_not_started_and_leave_their_gpus_to_the_trainer() -> None:
    assert layout("gpu2", inference={"base_url": ["http://host:8000"]}) == [
        "orchestrator @0 gpus= ports={}",
        "trainer @0 gpus=0 ports={}",
    ]


def test_a_fixed_port_is_counted_up_over_the_replicas() -> None:
    lines = layout("node8", inference={"port": 8000})
    assert [line.split("ports=")[1] for line in lines[:4]] == ["{'http': 8000}", "{'http': 8001}", "{'http': 8002}", "{'http': 8003}"]


def test_commands_are_modules_and_several_trainer_ranks_run_under_torchrun() -> None:
    plan = make_plan(config("node8"), Path("/run"), python="python")
    assert command(plan, "inference") == "python -m rlx.roles.inference --run-dir /run --replica 0"
    assert command(plan, "orchestrator") == "python -m rlx.roles.orchestrator --run-dir /run"
    assert command(plan, "trainer") == (
        "python -m torch.distributed.run --nnodes=1 --nproc-per-node=4 --rdzv-backend=c10d --rdzv-endpoint=127.0.0.1:0 "
        "--local-addr=127.0.0.1 --max-restarts=0 -m rlx.roles.trainer --run-dir /run"
    )
    one = make_plan(config("cpu"), Path("/run"), python="python")
    assert command(one, "trainer") == "python -m rlx.roles.trainer --run-dir /run"


def test_cpu_threads_reach_every_role() -> None:
    plan = make_plan(config("cpu", hardware={"cpu_threads": 3}), Path("/run"))
    assert {spec.env["OMP_NUM_THREADS"] for spec in plan} == {"3"}


@pytest.mark.parametrize(
    "hardware",
    [{"inference_replicas": 5}, {"tensor_parallel": 16, "inference_replicas": 1}, {"trainer_ranks": 9, "shared": True}],
)
def test_a_layout_that_does_not_fit_is_refused_with_its_numbers(hardware: dict) -> None:
    with pytest.raises(ConfigError, match="do not fit on 1 × 8 GPUs"):
        layout("node8", hardware=hardware)


def test_a_layout_over_two_hosts_is_planned_but_not_for_the_local_launcher() -> None:
    plan = make_plan(config("node8", hardware={"nodes": 2, "inference_replicas": 8, "trainer_ranks": 8}), Path("/run"))
    assert {spec.name: spec.node for spec in plan if spec.gpus} == {**{f"inference_{i}": 0 for i in range(8)}, "trainer": 1}
    with pytest.raises(ConfigError, match="2 hosts"):
        require_one_host(plan)


def test_cpu_hosts_are_inference_first_and_a_trainer_process_on_each_of_the_others() -> None:
    assert layout("cpu_3nodes") == [
        "inference_0 @0 gpus= ports={'http': 0}",
        "orchestrator @1 gpus= ports={}",
        "trainer @1 gpus= ports={'rendezvous': 0}",
        "trainer_1 @2 gpus= ports={}",
    ]
    with pytest.raises(ConfigError, match=r"trainer 2, over which hardware.trainer_ranks=3 cannot be divided"):
        layout("cpu_3nodes", hardware={"trainer_ranks": 3})


def test_a_trainer_over_several_hosts_is_a_process_for_each_gpu_with_its_rank() -> None:
    plan = make_plan(config("node8x4"), Path("/run"), python="python")
    assert {spec.node for spec in plan if spec.role == "inference"} == {0, 1}
    trainers = [spec for spec in plan if spec.role == "trainer"]
    assert [(spec.node, spec.gpus, spec.env["RANK"]) for spec in trainers] == [(2 + r // 8, (r % 8,), str(r)) for r in range(16)]
    assert {spec.env["WORLD_SIZE"] for spec in trainers} == {"16"}
    assert len({spec.name for spec in plan}) == len(plan)
    assert trainers[0].argv == ("python", "-m", "rlx.roles.trainer", "--run-dir", "/run")
    with pytest.raises(ConfigError, match="on one host or on whole ones"):
        layout("node8x4", hardware={"trainer_ranks": 12})


def test_a_plan_survives_its_file(tmp_path: Path) -> None:
    plan = make_plan(config("node8", model={"warm_start": {}}), tmp_path)
    write_plan(tmp_path / "plan.yaml", plan)
    assert read_plan(tmp_path / "plan.yaml") == plan


def test_memory_of_an_8b_model_is_what_its_states_take() -> None:
    trainer = trainer_memory(config("node8", trainer={"ac": {"freq": 1}}))
    states = trainer.parameters + trainer.gradients + trainer.optimizer
    assert states / GIB == pytest.approx(8.19e9 * 16 / 4 / GIB)  # four float32 numbers a parameter on four ranks
    assert states < trainer.device < states + 8 * GIB
    engine = engine_memory(config("node8"))
    assert engine.weights == pytest.approx(8.19e9 * 2)
    assert engine.kv_token == 2 * 36 * 8 * 128 * 2


def test_offloaded_states_do_not_count_on_the_gpu_and_sgd_keeps_one() -> None:
    resident, offloaded = trainer_memory(config("node8")), trainer_memory(config("node8", trainer={"fsdp_cpu_offload": True}))
    assert offloaded.device == pytest.approx(resident.device - resident.parameters - resident.gradients - resident.optimizer)
    assert trainer_memory(config("node8", optim={"_target_": "torch.optim.SGD"})).optimizer == resident.optimizer / 2


def test_the_plan_in_words_names_processes_batch_arithmetic_staleness_and_memory() -> None:
    cfg = config("node8", trainer={"num_minibatches": 2})
    text = explain(cfg, make_plan(cfg, Path("/run")), {"loss": "gspo", "hardware": "node8"}, ["hardware=auto: chose node8"], "/run")
    for words in (
        "loss      gspo",
        "hardware=auto: chose node8",
        "inference_3",
        "4,5,6,7",
        "256 = 32 prompts × 8 rollouts of each",
        "1,572,864 = 256 × sampling.max_tokens 6,144",
        "2 minibatches of 128 rollouts",
        "20 in the run of 10 steps",
        "at most 1 policy version old",
        "the card must have at least",
    ):
        assert words in text, f"{words!r} is not in\n{text}"


def test_the_plan_in_words_tells_what_filters_passes_and_a_reference_add() -> None:
    filters = {"zero_advantage": True, "max_rounds": 3}
    cfg = config("node8", trainer={"num_iterations": 2}, orchestrator={"oversampling_factor": 1.25, "difficulty_filter": filters})
    cfg.loss = {"kl": {"beta": 0.1}}
    text = explain(cfg, make_plan(cfg, Path("/run")), {}, [], "/run")
    for words in (
        "40 are requested at a time",
        "left out by zero_advantage are replaced, at most 96",
        "2 a step, 2 times over",
        "reference ",
    ):
        assert words in text, f"{words!r} is not in\n{text}"
