"""The processes of a run: GPUs, ports, command lines."""

from __future__ import annotations

import shlex
from dataclasses import asdict
from pathlib import Path

import pytest
from launch_configs import config

from rlx.config.errors import ConfigError
from rlx.config.load import compose, load_run, to_yaml
from rlx.config.memory import size, trainer_memory
from rlx.config.roots import EVAL, SFT
from rlx.config.row_budget import why
from rlx.config.schema import Config
from rlx.config.validate import Builder
from rlx.plan.environment import environment_of
from rlx.plan.explain import explain
from rlx.plan.make import make_plan
from rlx.plan.place import place, require_one_host
from rlx.plan.process_spec import ProcessSpec, read_plan, write_plan

GIB = 2**30


def layout(hardware: str, /, **sections) -> list[str]:
    """One line for each process: name, host, GPUs, ports."""
    plan = make_plan(config(hardware, **sections), Path("/run"))
    return [f"{spec.name} @{spec.node} gpus={','.join(map(str, spec.gpus))} ports={spec.ports}" for spec in plan]


def process(**fields) -> ProcessSpec:
    return ProcessSpec(**{"role": "trainer", "replica": 0, "node": 0, "gpus": (), "argv": ("python",), **fields})


def command(plan: list[ProcessSpec], role: str) -> str:
    return " ".join(next(spec for spec in plan if spec.role == role).argv)


def server(replica: int, gpus: str, port: int = 0) -> str:
    return f"inference_{replica} @0 gpus={gpus} ports={{'http': {port}}}"


@pytest.mark.parametrize(
    ("preset", "sections", "lines"),
    [  # without the orchestrator's
        # inference has the first GPUs and the trainer those behind it
        ("cpu", {}, [server(0, ""), "trainer @0 gpus= ports={}"]),
        ("gpu1_shared", {}, [server(0, "0"), "trainer @0 gpus=0 ports={}"]),
        ("gpu2", {}, [server(0, "0"), "trainer @0 gpus=1 ports={}"]),
        (
            "node8",
            {},
            [
                *(server(number, str(number)) for number in range(4)),
                "trainer @0 gpus=4 ports={'rendezvous': 0}",
                *(f"trainer_{rank} @0 gpus={4 + rank} ports={{}}" for rank in (1, 2, 3)),
            ],
        ),
        # replicas of several GPUs get neighbouring ones, and a fixed port is counted up over the replicas
        (
            "node8",
            {"hardware": {"inference_replicas": 2, "tensor_parallel": 3, "trainer_processes": 1}, "inference": {"port": 8000}},
            [server(0, "0,1,2", 8000), server(1, "3,4,5", 8001), "trainer @0 gpus=6 ports={}"],
        ),
        # servers that already run are not started and leave their GPUs to the trainer
        (
            "gpu2",
            {"inference": {"base_url": ["http://host:8000"]}},
            ["trainer @0 gpus=0 ports={'rendezvous': 0}", "trainer_1 @0 gpus=1 ports={}"],
        ),
        # a model is prepared where it is warm-started
        ("cpu", {"model": {"warm_start": {}}}, ["prepare @0 gpus= ports={}", server(0, ""), "trainer @0 gpus= ports={}"]),
        ("gpu2", {"model": {"warm_start": {}}}, ["prepare @0 gpus=1 ports={}", server(0, "0"), "trainer @0 gpus=1 ports={}"]),
    ],
)
def test_each_process_has_its_gpus_and_ports(preset: str, sections: dict, lines: list[str]) -> None:
    assert [line for line in layout(preset, **sections) if not line.startswith("orchestrator @0 gpus= ports={}")] == lines


@pytest.mark.parametrize(
    ("visible", "gpus", "seen"),
    [(None, (1,), "1"), ("5,GPU-7f", (1,), "GPU-7f"), (" 4, 6 ,", (0, 1), "4,6"), ("4,6", (), ""), ("", (), "")],
)
def test_a_process_gets_its_gpus_by_the_names_of_its_host(visible: str | None, gpus: tuple[int, ...], seen: str) -> None:
    host = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert environment_of(process(gpus=gpus), host)["CUDA_VISIBLE_DEVICES"] == seen


def test_a_host_that_shows_fewer_gpus_than_the_plan_needs_is_named_with_both_numbers() -> None:
    with pytest.raises(ValueError, match=r"gives trainer GPU 1 .*CUDA_VISIBLE_DEVICES=5 names 1"):
        environment_of(process(gpus=(1,)), {"CUDA_VISIBLE_DEVICES": "5"})


def test_a_process_does_not_inherit_that_it_is_one_of_somebody_elses_group() -> None:
    group = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")
    environment = environment_of(process(env={"RANK": "1"}), {**dict.fromkeys(group, "7"), "HOME": "/home"})
    assert environment == {"RANK": "1", "HOME": "/home", "CUDA_VISIBLE_DEVICES": ""}


def test_commands_are_modules_and_each_trainer_rank_is_a_process() -> None:
    plan = make_plan(config("node8"), Path("/run"), python="python")
    assert command(plan, "inference") == "python -m rlx.roles.inference --run-dir /run --replica 0"
    assert command(plan, "orchestrator") == "python -m rlx.roles.orchestrator --run-dir /run"
    assert command(plan, "trainer") == "python -m rlx.roles.trainer --run-dir /run"
    ranks = [spec for spec in plan if spec.role == "trainer"]
    assert [(spec.name, spec.env["RANK"], spec.env["WORLD_SIZE"]) for spec in ranks] == [
        (name, str(rank), "4") for rank, name in enumerate(("trainer", "trainer_1", "trainer_2", "trainer_3"))
    ]
    one = make_plan(config("cpu"), Path("/run"), python="python")
    assert command(one, "trainer") == "python -m rlx.roles.trainer --run-dir /run"


def test_cpu_threads_reach_every_role() -> None:
    plan = make_plan(config("cpu", hardware={"cpu_threads": 3}), Path("/run"))
    assert {spec.env["OMP_NUM_THREADS"] for spec in plan} == {"3"}
    assert {spec.env["OMP_WAIT_POLICY"] for spec in plan} == {"PASSIVE"}, "a thread that spins takes a core from another role"


@pytest.mark.parametrize(
    ("preset", "hardware", "base_url", "ranks"),
    [
        ("cpu", {}, [], 1),
        ("cpu", {"inference_replicas": 3}, [], 1),
        ("cpu_3nodes", {}, [], 2),
        ("cpu_3nodes", {"inference_replicas": 2}, [], 1),
        ("gpu1_shared", {}, [], 1),
        ("gpu2", {}, [], 1),
        ("gpu4", {}, [], 2),
        ("node8", {}, [], 4),
        ("node8x2", {}, [], 8),
        ("node8x4", {}, [], 16),
        ("node8", {"inference_replicas": 6}, [], 2),
        ("node8", {"inference_replicas": 2, "tensor_parallel": 3}, [], 2),
        ("node8x2", {"inference_replicas": 4}, [], 8),  # one whole host is left for the trainer; half a host stays free
        ("node8x2", {"inference_replicas": 12}, [], 4),
        ("node8", {}, ["http://elsewhere:8000"], 8),
        ("node8", {"trainer_processes": 3}, [], 3),
    ],
)
def test_trainer_processes_are_what_inference_leaves(preset: str, hardware: dict, base_url: list[str], ranks: int) -> None:
    cfg = config(preset, hardware=hardware, inference={"base_url": base_url})
    assert cfg.trainer_ranks == ranks
    _, trainers = place(cfg)
    assert sum(len(gpus) for _, gpus in trainers) == (0 if cfg.hardware.device == "cpu" else ranks)


@pytest.mark.parametrize(
    "hardware",
    [
        {"inference_replicas": 5, "trainer_processes": 4},
        {"tensor_parallel": 16, "inference_replicas": 1},
        {"trainer_processes": 9, "colocate": True},
    ],
)
def test_a_layout_that_does_not_fit_is_refused_with_its_numbers(hardware: dict) -> None:
    with pytest.raises(ConfigError, match="do not fit on 1 × 8 GPUs"):
        layout("node8", hardware=hardware)


def test_a_layout_over_two_hosts_is_planned_but_not_for_the_local_launcher() -> None:
    plan = make_plan(config("node8", hardware={"nodes": 2, "inference_replicas": 8, "trainer_processes": 8}), Path("/run"))
    assert {(spec.role, spec.node) for spec in plan if spec.gpus} == {("inference", 0), ("trainer", 1)}
    with pytest.raises(ConfigError, match="2 hosts"):
        require_one_host(plan)


def test_cpu_hosts_are_inference_first_and_a_trainer_process_on_each_of_the_others() -> None:
    assert layout("cpu_3nodes") == [
        "inference_0 @0 gpus= ports={'http': 0}",
        "orchestrator @1 gpus= ports={}",
        "trainer @1 gpus= ports={'rendezvous': 0}",
        "trainer_1 @2 gpus= ports={}",
    ]
    with pytest.raises(ConfigError, match=r"trainer 2, over which hardware.trainer_processes=3 cannot be divided"):
        layout("cpu_3nodes", hardware={"trainer_processes": 3})


def test_a_trainer_over_several_hosts_is_a_process_for_each_gpu_with_its_rank() -> None:
    plan = make_plan(config("node8x4"), Path("/run"), python="python")
    assert {spec.node for spec in plan if spec.role == "inference"} == {0, 1}
    trainers = [spec for spec in plan if spec.role == "trainer"]
    assert [(spec.node, spec.gpus, spec.env["RANK"]) for spec in trainers] == [(2 + r // 8, (r % 8,), str(r)) for r in range(16)]
    assert {spec.env["WORLD_SIZE"] for spec in trainers} == {"16"}
    assert len({spec.name for spec in plan}) == len(plan)
    assert trainers[0].argv == ("python", "-m", "rlx.roles.trainer", "--run-dir", "/run")
    with pytest.raises(ConfigError, match="on one host or on whole ones"):
        layout("node8x4", hardware={"trainer_processes": 12})


def test_a_plan_survives_its_file(tmp_path: Path) -> None:
    plan = make_plan(config("node8", model={"warm_start": {}}), tmp_path)
    write_plan(tmp_path / "plan.yaml", plan)
    assert read_plan(tmp_path / "plan.yaml") == plan


def test_one_process_in_its_own_dtype_gathers_nothing() -> None:
    trainer = trainer_memory(config("cpu", model={"dtype": "float32"}))
    assert trainer.layers == trainer.table == trainer.table_gradients == trainer.context == 0
    assert trainer.device == trainer.states + trainer.activations + trainer.head


def test_offloaded_states_do_not_count_on_the_gpu_and_sgd_keeps_one_for_its_momentum() -> None:
    resident, offloaded = trainer_memory(config("node8")), trainer_memory(config("node8", trainer={"fsdp_cpu_offload": True}))
    assert offloaded.states == pytest.approx(resident.states - resident.parameters - resident.gradients - resident.optimizer)
    assert trainer_memory(config("node8", optim={"_target_": "torch.optim.SGD", "momentum": 0.9})).optimizer == resident.optimizer / 2
    assert trainer_memory(config("node8", optim={"_target_": "torch.optim.SGD"})).optimizer == 0.0


def test_only_a_bucket_of_an_offloaded_optimizers_state_counts_on_the_gpu() -> None:
    resident, cfg = trainer_memory(config("node8")), config("node8", trainer={"optim_cpu_offload": True})
    part = trainer_memory(cfg)
    assert part.states == pytest.approx(resident.states - resident.optimizer)
    assert part.host == pytest.approx(resident.host + resident.optimizer)
    embedding = 151936 * 4096 / 4 * 4  # bytes of a rank's part: larger than a bucket
    assert part.update == pytest.approx(3 * embedding), "two states and a temporary"
    text = explain(cfg, make_plan(cfg, Path("/run")), {}, [], "/run")
    assert f"each also: {size(part.optimizer)} of host memory for the optimizer's state" in text
    assert "optimizer's state, on the GPU for its update" in text


def rows(hardware: str = "cpu", /, **sections) -> tuple[int, str]:
    cfg = config(hardware, **sections)
    return cfg.micro_batch_tokens, why(cfg)


HEADS = {"num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64}
SMALL = {"hidden_size": 576, "intermediate_size": 1536, "num_layers": 30, "dtype": "float32", **HEADS}  # SmolLM2-135M
QWEN = {"hidden_size": 1024, "intermediate_size": 3072, "num_layers": 28, "num_attention_heads": 16}  # 0.6B


@pytest.mark.parametrize(
    ("hardware", "sections", "row", "reason"),
    [
        ("cpu", {"model": SMALL, "seq_len": 96}, 1792, "what 2 GiB of activations at 1.05 MiB a token allow"),
        ("cpu", {"model": SMALL, "seq_len": 96, "trainer": {"micro_batch_tokens": 512}}, 512, "trainer.micro_batch_tokens"),
        ("cpu", {"model": SMALL, "seq_len": 4096}, 4096, "seq_len"),
        ("cpu", {"model": SMALL, "seq_len": 24, "trainer": {"num_minibatches": 4}}, 1536, "all tokens of a rank in an optimizer step"),
        ("node8", {"model": QWEN, "seq_len": 4096}, 6656, "what 8 GiB of activations at 1.20 MiB a token allow"),
        ("gpu1_shared", {"model": QWEN, "seq_len": 512}, 3328, "what 4 GiB of activations"),
        ("node8", {}, 8192, "seq_len"),
    ],
)
def test_a_row_is_as_long_as_work_and_memory_allow(hardware: str, sections: dict, row: int, reason: str) -> None:
    found, said = rows(hardware, **sections)
    assert found == row
    assert said.startswith(reason)


def test_the_length_of_a_row_is_the_same_wherever_the_configuration_is_read(tmp_path: Path) -> None:
    cfg = config("cpu", model=SMALL, seq_len=96)
    (tmp_path / "config.yaml").write_text(to_yaml(cfg))
    assert load_run(tmp_path).micro_batch_tokens == cfg.micro_batch_tokens
    text = explain(cfg, make_plan(cfg, Path("/run")), {}, [], "/run")
    assert "rows of 1,792 tokens: what 2 GiB" in text


def test_the_largest_bound_of_new_tokens_counts() -> None:
    cfg = config("node8")
    envs = {"math": {"id": "rlx-math", "sampling": {"max_tokens": 100}}, "none": {"id": "rlx-math", "weight": 0.0}}
    cfg.envs = Builder(Config).build(Config, {**asdict(cfg), "envs": envs}).envs
    assert "at most 25,600 = 256 × max_tokens 100 (per turn)" in explain(cfg, make_plan(cfg, Path("/run")), {}, [], "/run")


def test_the_plan_in_words_names_processes_batch_arithmetic_staleness_and_memory() -> None:
    cfg = config("node8", trainer={"num_minibatches": 2})
    text = explain(cfg, make_plan(cfg, Path("/run")), {"loss": "gspo", "hardware": "node8"}, ["hardware=auto: chose node8"], "/run")
    for words in (
        "loss      gspo",
        "hardware=auto: chose node8",
        "inference_3",
        "trainer_3",
        "256 = 32 prompts × 8",
        "1,572,864 = 256 × max_tokens 6,144",
        "2 per step",
        "20 in the run of 10 steps",
        "at most 1 policy version old",
        "each GPU must have at least",
        "rank 0 also: 15.3 GiB of host memory for the copy of the weights",
    ):
        assert words in text, f"{words!r} is not in\n{text}"


def test_the_plan_in_words_tells_what_filters_passes_and_a_reference_add() -> None:
    filters = {"zero_advantage": True, "max_rounds": 3}
    cfg = config("node8", trainer={"num_iterations": 2}, orchestrator={"oversampling_factor": 1.25, "difficulty_filter": filters})
    cfg.loss = {"kl": {"beta": 0.1}}
    text = explain(cfg, make_plan(cfg, Path("/run")), {}, [], "/run")
    for words in (
        "40 are requested at a time",
        "filtered out by zero_advantage are replaced, at most 96",
        "2 per step, 2 times over",
        "reference ",
    ):
        assert words in text, f"{words!r} is not in\n{text}"


def servers_of(*argv: str) -> dict[str, list[str]]:
    """The words of each server's line in the explanation of a plan."""
    cfg = compose([*argv, "dry_run=true"], {}).cfg
    text = explain(cfg, make_plan(cfg, Path("/run"), "/bin/python"), {"loss": "grpo"}, [], "/run")
    lines = [line.strip().split(": ", 1) for line in text.splitlines() if " -m vllm." in line]
    return {name: shlex.split(words.replace("<secret>", "'<secret>'")) for name, words in lines}


def follows(words: list[str], flag: str) -> str:
    return words[words.index(flag) + 1]


def test_the_plan_shows_the_command_line_of_each_server_with_its_variables() -> None:
    servers = servers_of(
        "hardware.inference_replicas=2", "inference.port=8000", "inference.vllm={block_size:16,enable_prefix_caching:false}"
    )
    assert list(servers) == ["inference_0", "inference_1"]
    for replica, words in enumerate(servers.values()):
        before, after = words[: words.index("/bin/python")], words[words.index("/bin/python") :]
        assert {"VLLM_SERVER_DEV_MODE=1", "RLX_SECRET=<secret>", "VLLM_PLUGINS="} <= set(before)
        assert all("=" in word for word in before)
        assert after[1:3] == ["-m", "vllm.entrypoints.launchers.api_server.entry"]
        assert (follows(after, "--host"), follows(after, "--port")) == ("127.0.0.1", str(8000 + replica))
        assert (follows(after, "--model"), follows(after, "--block-size")) == ("<initial model>", "16")
        assert "--no-enable-prefix-caching" in after


def test_the_command_line_of_a_server_on_gpus_names_them_and_a_port_that_is_chosen_later() -> None:
    servers = servers_of("model=qwen3_0_6b", "hardware=node8", "hardware.inference_replicas=2", "hardware.tensor_parallel=2")
    assert [next(word for word in words if word.startswith("CUDA_VISIBLE_DEVICES=")) for words in servers.values()] == [
        "CUDA_VISIBLE_DEVICES=0,1",
        "CUDA_VISIBLE_DEVICES=2,3",
    ]
    words = servers["inference_1"]
    assert (follows(words, "--model"), follows(words, "--port")) == ("Qwen/Qwen3-0.6B", "<a free port>")
    assert follows(words, "--tensor-parallel-size") == "2"


def test_servers_on_other_hosts_listen_on_every_address() -> None:
    words = servers_of("hardware=cpu_3nodes")["inference_0"]
    assert follows(words, "--host") == "0.0.0.0"


def test_without_servers_of_its_own_a_run_shows_no_command_line() -> None:
    assert servers_of("inference.base_url=[http://other:8000]") == {}


def test_hosts_without_servers_are_all_the_trainers_or_free() -> None:
    cfg = compose(["data=fake", "hardware=cpu_3nodes", "hardware.trainer_processes=3", "dry_run=true"], {}, SFT).cfg
    assert [spec.node for spec in make_plan(cfg, Path("/run")) if spec.role == "trainer"] == [0, 1, 2]
    asks = ["env=reverse_text", "client.base_url=http://other/v1", "model.name=other"]
    cfg = compose([*asks, "hardware=cpu_3nodes", "dry_run=true"], {}, EVAL).cfg
    assert [(spec.role, spec.node) for spec in make_plan(cfg, Path("/run"))] == [("evaluator", 0)]


def test_a_shared_trainer_has_states_for_the_adapter_of_every_run() -> None:
    one = trainer_memory(config("node8", lora={"rank": 32}))
    four = trainer_memory(config("node8", lora={"rank": 32}, trainer={"max_concurrent_runs": 4}))
    hosted = trainer_memory(config("node8", lora={"rank": 32}, trainer={"max_concurrent_runs": 1}))
    ranks = 8 / 4  # it starts no servers, so it has all GPUs
    assert hosted.gradients * ranks == pytest.approx(one.gradients)
    for part in ("gradients", "optimizer", "update", "published"):
        assert getattr(four, part) == pytest.approx(4 * getattr(hosted, part)), part
    assert four.parameters == pytest.approx(hosted.parameters + 3 * hosted.gradients), "the model is there once"


def test_a_shared_trainer_is_explained_without_the_batches_and_steps_that_only_runs_have() -> None:
    cfg = config("gpu1_shared", lora={"rank": 16}, trainer={"max_concurrent_runs": 3, "idle_timeout": 60})
    text = explain(cfg, make_plan(cfg, Path("/run")), {}, [], "/run")
    for words in (
        "at most 3 at a time, each with an adapter of rank 16",
        "rows       ",
        "after 60 s without a run",
        "of adapters of rank 16, one for each of 3 runs",
        "copy of the weights of each run",
    ):
        assert words.strip() in text, f"{words!r} is not in\n{text}"
    for words in ("staleness  ", "prompts  ", "rollouts in the run", "optimizer steps  ", "inference"):
        assert words not in text, f"{words!r} is in\n{text}"


def test_a_run_of_a_shared_trainer_is_explained_without_a_trainer_of_its_own() -> None:
    cfg = config("cpu", lora={"rank": 16}, trainer={"shared_trainer_dir": "/outputs/host"})
    text = explain(cfg, make_plan(cfg, Path("/run")), {}, [], "/run")
    for words in (
        "256 = 32 prompts",
        "staleness",
        "rows of the shared trainer /outputs/host",
        "trainer: elsewhere (/outputs/host)",
    ):
        assert words in text, f"{words!r} is not in\n{text}"
    for words in ("trainer, each", "gradients"):
        assert words not in text, f"{words!r} is in\n{text}"
    on_gpu = config("gpu1_shared", lora={"rank": 16}, trainer={"shared_trainer_dir": "/outputs/host"})
    assert "the trainer has the rest" not in explain(on_gpu, make_plan(on_gpu, Path("/run")), {}, [], "/run")
