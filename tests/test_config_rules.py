"""What a configuration must not hold or ask for (secrets, workers, limits), and what a command without servers is not refused for."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from rlx.config import cgroup_limits, pythons
from rlx.config.checks import check
from rlx.config.errors import ConfigError
from rlx.config.load import compose
from rlx.config.roots import EVAL, SFT, SYNTHESIZE, TRAIN, Root
from rlx.config.schema import CommandConfig, Config
from rlx.plan.explain import explain
from rlx.plan.make import make_plan
from rlx.policy.source import fake_rollouts
from rlx.preflight.needs import needed_memory

SECRET = "hidden-12345"
TOKEN = "hf_" + "abcdefgh" * 4 + "xy"


def said(cfg: Config) -> str:
    return "\n".join(problem.text for problem in check(cfg) if "would be written" in problem.text)


def with_arguments(**arguments: Any) -> Config:
    cfg = compose([], {}).cfg
    cfg.envs["reverse_text"].args.update(arguments)
    return cfg


@pytest.mark.parametrize(
    "arguments",
    [
        {"api_key": SECRET},
        {"judge": {"openai_api_key": SECRET}},
        {"aws_secret_access_key": SECRET},
        {"client_secret": SECRET},
        {"db_password": SECRET},
        {"headers": {"Authorization": SECRET}},
        {"token": TOKEN},
        {"anything": [f"Bearer {SECRET}"]},
        {"endpoint": f"http://me:{SECRET}@host"},
    ],
)
def test_a_secret_among_an_environments_arguments_is_refused_and_not_shown(arguments: dict[str, Any]):
    found = said(with_arguments(**arguments))
    assert f"envs.reverse_text.args.{next(iter(arguments))}" in found
    assert SECRET not in found
    assert TOKEN not in found


@pytest.mark.parametrize(
    "arguments",
    [
        {"answer_key": "answer"},
        {"pad_token": "</s>"},
        {"judge_api_key_var": "MY_KEY"},
        {"judge_api_key": "OPENAI_API_KEY"},
        {"api_key": "EMPTY"},
        {"api_key": "sk-no-key-required"},
        {"secret": "apple"},
        {"model": "hf_checkpoint_of_today"},
        {"model": "sk-learns-everything-well"},
        {"system_prompt": "KEY=5 opens http://a:b@c"},
        {"url": "http://host:8000/v1"},
    ],
)
def test_names_that_only_look_like_secrets_are_accepted(arguments: dict[str, Any]):
    assert not said(with_arguments(**arguments))


@pytest.mark.parametrize(
    ("line", "refused"),
    [
        (f"module load x; export HF_TOKEN={SECRET}", "HF_TOKEN in slurm.setup"),
        (f"export HTTPS_PROXY=http://me:{SECRET}@proxy", "slurm.setup"),
        ("export OPENAI_API_KEY=EMPTY", ""),
        ("export HF_TOKEN=$(cat ~/.hf_token)", ""),
        ("export HF_TOKEN_PATH=/home/me/token", ""),
        ("export VLLM_MULTI_STREAM_GEMM_TOKEN_THRESHOLD=1024", ""),
        ("export HF_HUB_DISABLE_IMPLICIT_TOKEN=1 KEY_CACHE_DTYPE=fp8", ""),
        ("export SSH_KEY=~/.ssh/id", ""),
        ("export TOKENIZERS_PARALLELISM=false", ""),
    ],
)
def test_a_secret_in_a_shell_line_is_refused(line: str, refused: str):
    cfg = compose([], {}).cfg
    cfg.slurm.setup = [line]
    assert refused in said(cfg)
    assert bool(said(cfg)) == bool(refused)
    assert SECRET not in said(cfg)


def test_secrets_in_the_options_of_a_job_in_vllms_arguments_and_in_addresses_are_refused():
    cfg = compose([], {}).cfg
    assert not said(cfg)
    cfg.slurm.options = {"export": f"ALL,HF_TOKEN={SECRET}"}
    cfg.inference.vllm = {"hf_token": SECRET}
    cfg.inference.base_url = [f"http://me:{SECRET}@{host}:8000" for host in ("one", "two")]
    found = said(cfg)
    for place in ("HF_TOKEN in slurm.options.export", "inference.vllm.hf_token", "the address of inference.base_url"):
        assert found.count(place) == 1
    assert SECRET not in found


def problems(*overrides: str) -> str:
    with pytest.raises(ConfigError) as raised:
        compose(["env=reverse_text", *overrides])
    return str(raised.value)


def test_another_python_needs_a_worker() -> None:
    said = problems(f"envs.reverse_text.python={sys.executable}", "envs.reverse_text.workers=0")
    assert "envs.reverse_text has no workers" in said
    said = problems(f"envs.reverse_text.python={sys.executable}", "eval.interval=5", "eval.envs.reverse_text.workers=0")
    assert "eval.envs.reverse_text has no workers" in said


def test_another_python_must_be_a_program() -> None:
    assert "is no Python that can be run here" in problems("envs.reverse_text.python=/nowhere/bin/python")


def test_an_environment_of_another_python_need_not_be_installed_here() -> None:
    cfg = compose(["env=reverse_text", f"envs.reverse_text.python={sys.executable}", "envs.reverse_text.id=not-installed-here"]).cfg
    assert cfg.envs["reverse_text"].python == sys.executable


def test_an_environment_plays_in_the_python_that_was_installed_for_it_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLX_PYTHONS", str(tmp_path))
    for number, name in enumerate(("theirs-1", "theirs-2", "unfinished")):
        (tmp_path / name / "bin").mkdir(parents=True)
        (tmp_path / name / "bin" / "python").symlink_to(sys.executable)
        if name != "unfinished":
            record = tmp_path / name / "rlx.json"
            record.write_text(json.dumps({"environments": [{"name": "their-env", "source": "/s", "version": "1"}]}))
            os.utime(record, (number, number))
    asked = ["env=custom", "envs.custom.id=owner/their_env@1", "model=smollm2_135m"]
    composed = compose(asked)
    newest = str(tmp_path / "theirs-2" / "bin" / "python")
    assert composed.cfg.envs["custom"].python == "theirs-2", "the name, which is the same on every machine"
    assert pythons.python_of("their-env", "theirs-2") == newest
    assert any("theirs-2" in note for note in composed.notes)
    assert compose([*asked, f"envs.custom.python={sys.executable}"]).cfg.envs["custom"].python == sys.executable
    assert compose(["env=reverse_text"]).cfg.envs["reverse_text"].python is None
    assert pythons.version_in(newest, "their-env") == "1"
    assert pythons.sources_of("their-env", newest) == Path("/s")


GIB = 2**30


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Makes the control groups of a process that may run on 64 processors."""
    monkeypatch.setattr(cgroup_limits, "GROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(cgroup_limits, "MOUNT", tmp_path / "fs")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))

    def make(lines: str, files: dict[str, str]) -> None:
        (tmp_path / "cgroup").write_text(lines)
        for name, text in files.items():
            (tmp_path / "fs" / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "fs" / name).write_text(text)

    return make


V1 = "12:memory:/{0}\n4:cpu,cpuacct:/{0}\n1:name=systemd:/{0}\n"


@pytest.mark.parametrize(
    ("lines", "files", "cores", "memory"),
    [
        ("0::/\n", {"cpu.max": "400000 100000\n", "memory.max": f"{8 * GIB}\n"}, 4, 8 * GIB),  # a container, version 2
        ("0::/\n", {"cpu.max": "max 100000\n", "memory.max": "max\n"}, 64, None),
        ("0::/\n", {"cpu.max": "250000 100000\n"}, 2, None),
        ("0::/\n", {"cpu.max": "50000 100000\n"}, 1, None),
        ("0::/system/job\n", {"system/job/cpu.max": "max 100000\n", "system/cpu.max": "800000 100000\n"}, 8, None),  # the parent's
        ("0::/host/path/of/pod\n", {"cpu.max": "400000 100000\n", "memory.max": f"{GIB}\n"}, 4, GIB),  # the host's path, seen from inside
        (
            V1.format("docker/abc"),  # version 1, outside of the container
            {
                "cpu,cpuacct/docker/abc/cpu.cfs_quota_us": "300000\n",
                "cpu,cpuacct/docker/abc/cpu.cfs_period_us": "100000\n",
                "memory/docker/abc/memory.limit_in_bytes": f"{2 * GIB}\n",
                "memory/memory.limit_in_bytes": "9223372036854771712\n",
            },
            3,
            2 * GIB,
        ),
        (
            V1.format("kubepods/pod1/c1"),  # version 1, inside
            {"cpu/cpu.cfs_quota_us": "150000\n", "cpu/cpu.cfs_period_us": "50000\n", "memory/memory.limit_in_bytes": f"{GIB}\n"},
            3,
            GIB,
        ),
        (V1.format(""), {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 64, None),
        ("", {}, 64, None),
    ],
)
def test_the_smallest_limit_on_the_way_up_counts(groups, lines: str, files: dict[str, str], cores: int, memory: int | None) -> None:
    groups(lines, files)
    assert (cgroup_limits.cores(), cgroup_limits.memory()) == (cores, memory)


def test_a_kernel_without_control_groups_limits_nothing(groups) -> None:
    assert (cgroup_limits.cores(), cgroup_limits.memory()) == (64, None)


def test_a_preset_for_all_processors_takes_those_that_the_container_has(groups) -> None:
    groups("0::/\n", {"cpu.max": "400000 100000\n"})
    assert compose(["experiment=sums_smollm2"], {}).cfg.hardware.cpu_threads == 4


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
    assert cfg.started_servers == 0
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
        (TRAIN, (SMALL, "trainer.shared_trainer_dir=/other", "lora.rank=8")),
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
