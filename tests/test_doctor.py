"""`rlx doctor`: what each check finds, what it advises, and what the command prints."""

from __future__ import annotations

import importlib.metadata
import json
import os
import resource
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest
from rlx.preflight.doctor_node import _wait, job_options
from rlx.preflight.doctor_services import CHECKS, gpus_of, judge_gpus, minutes

from rlx.cli import main
from rlx.config.errors import ConfigError
from rlx.config.gpus import visible_gpus
from rlx.config.load import compose
from rlx.config.schema import Config
from rlx.preflight import doctor, doctor_services
from rlx.preflight.doctor import Examined, Finding

pytestmark = pytest.mark.slow


def config(*overrides: str) -> Config:
    return compose([*overrides, "dry_run=true"], environ={}).cfg


@pytest.fixture
def examined(tmp_path: Path) -> Examined:
    return Examined(cfg=config(), run_dir=tmp_path / "outputs" / "mine", offline=True)


def test_every_check_has_a_finding_here_and_nothing_stays_on_the_disk(examined: Examined, tmp_path: Path):
    found = list(doctor.examine(examined, CHECKS))
    assert [each.name for each in found] == [name for name, _ in CHECKS]
    assert [each for each in found if "could not be checked" in each.found] == []
    assert all(bool(each.remedy) == (each.state in ("failed", "warning")) for each in found), found
    assert all("\n" not in each.found + each.remedy for each in found)
    assert list(tmp_path.iterdir()) == []


def test_a_check_that_breaks_is_a_finding_and_the_others_go_on(examined: Examined):
    def broken(_: Examined) -> Finding:
        raise RuntimeError("no such thing")

    first, second = doctor.examine(examined, [("mine", broken), ("python", doctor.python)])
    assert (first.name, first.state, first.found) == ("mine", "warning", "could not be checked: RuntimeError: no such thing")
    assert second.state == "ok"


@pytest.mark.parametrize(
    ("limits", "state", "words"),
    [((65536, 65536), "ok", ""), ((256, 1048576), "warning", "ulimit -n 65536"), ((256, 300), "failed", "hard limit to 768")],
)
def test_open_files_are_compared_with_the_rollouts_in_flight(examined, monkeypatch, limits, state, words):
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits)
    found = doctor.open_files(examined)
    assert found.state == state
    assert words in found.remedy
    assert "768 are enough" in found.found


@pytest.mark.parametrize(
    ("free", "speed", "state", "words"),
    [
        (2**40, 2**30, "ok", ""),
        (2**30, 2**30, "failed", "run.dir=PATH"),
        (2**42, 50 * 2**20, "warning", "lora.rank=16"),
    ],
)
def test_a_disk_must_hold_the_runs_versions_and_write_them_in_time(tmp_path, monkeypatch, free, speed, state, words):
    large = Examined(cfg=config("model=qwen3_8b", "hardware=node8", "env=math"), run_dir=tmp_path)
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda _: SimpleNamespace(free=free, total=free))
    monkeypatch.setattr(doctor, "measure", lambda _: (speed, 0.001))
    found = doctor.run_disk(large)
    assert found.state == state, found
    assert words in found.remedy


def test_a_folder_that_may_not_be_written_fails(examined, monkeypatch):
    def measure(_: Path) -> tuple[float, float]:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(doctor, "measure", measure)
    found = doctor.run_disk(examined)
    assert (found.state, found.remedy) == ("failed", "choose another place: run.dir=PATH")
    assert "may not be written" in found.found


def test_memory_is_compared_with_the_layout_only_where_the_run_would_be(tmp_path, monkeypatch):
    cfg = config("model=qwen3_8b", "hardware=cpu", "env=math")
    monkeypatch.setattr(doctor, "host_memory", lambda: (16 * 2**30, "for this container or job"))
    assert doctor.memory(Examined(cfg=cfg, run_dir=tmp_path)).state == "failed"
    assert doctor.memory(Examined(cfg=cfg, run_dir=tmp_path, here=False)).state == "skipped"
    assert doctor.memory(Examined(cfg=config(), run_dir=tmp_path)).state == "ok"


def test_little_shared_memory_fails_only_with_several_gpus(tmp_path, monkeypatch):
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda _: SimpleNamespace(total=64 * 2**20, free=64 * 2**20))
    assert doctor.shared_memory(Examined(cfg=config(), run_dir=tmp_path)).state == "warning"
    found = doctor.shared_memory(Examined(cfg=config("hardware=node8"), run_dir=tmp_path))
    assert found.state == "failed"
    assert "--shm-size=8g" in found.remedy


def test_a_port_that_the_configuration_names_must_be_free(tmp_path):
    with doctor.socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        found = doctor.loopback(Examined(cfg=config(f"inference.port={port}"), run_dir=tmp_path))
    assert (found.state, found.remedy) == ("failed", "inference.port=0, which takes free ports")
    assert str(port) in found.found


def test_several_hosts_need_a_name_that_others_can_reach(tmp_path, monkeypatch):
    monkeypatch.setattr(doctor.socket, "gethostbyname", lambda _: "127.0.1.1")
    found = doctor.loopback(Examined(cfg=config("hardware=cpu_3nodes"), run_dir=tmp_path))
    assert found.state == "warning"
    assert "127.0.1.1" in found.found
    assert "GLOO_SOCKET_IFNAME" in found.remedy


def test_a_missing_compiler_fails_on_a_gpu_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(doctor, "missing_part", lambda: "it needs a C compiler, but there is none; install one")
    assert doctor.compiler(Examined(cfg=config(), run_dir=tmp_path)).state == "skipped"
    found = doctor.compiler(Examined(cfg=config("hardware=gpu2"), run_dir=tmp_path))
    assert (found.state, found.remedy) == ("failed", "install one")


def test_a_package_counts_with_the_version_that_python_imports(tmp_path, monkeypatch):
    (tmp_path / "packaging-0.1.dist-info").mkdir()
    (tmp_path / "packaging-0.1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: packaging\nVersion: 0.1\n")
    pin = f"packaging=={importlib.metadata.version('packaging')}\n"
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    assert list(doctor_services.different(pin)) == []
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    assert list(doctor_services.different(pin)) == [f"packaging 0.1 ({pin[11:].strip()})"]


def test_packages_of_other_versions_are_named(examined, monkeypatch):
    assert doctor_services.packages(examined).state == "ok", "the tests run with the tested packages"
    monkeypatch.setattr(doctor_services, "different", lambda _: iter(["numpy 1.0 (2.1)", "b 1 (2)", "c 1 (2)", "d 1 (2)", "e 1 (2)"]))
    found = doctor_services.packages(examined)
    assert found.state == "warning"
    assert found.found.endswith("numpy 1.0 (2.1), b 1 (2), c 1 (2), d 1 (2) and 1 more")
    real = doctor_services.importlib.metadata.version

    def version(name: str) -> str:
        if name == "submitit":
            raise doctor_services.importlib.metadata.PackageNotFoundError(name)
        return "2.12.1" if name == "torch" else real(name)

    monkeypatch.setattr(doctor_services.importlib.metadata, "version", version)
    found = doctor_services.packages(examined)
    assert found.state == "failed"
    assert "submitit is missing" in found.found
    assert "torch 2.12.1, needed: <2.15,>=2.13" in found.found


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
        ({"devices": [GPU | {"capability": [7, 5]}]}, (13, 0), 1, "warning", "model.dtype=float16"),
        ({"nccl": {"error": "unhandled system error"}}, (13, 0), 2, "failed", "NCCL_DEBUG=INFO"),
        ({"apart": [[0, 1]]}, (13, 0), 2, "warning", "no peer access: 0-1"),
    ],
)
def test_what_torch_finds_of_the_gpus_is_judged(changed, driver, need, state, words):
    found = judge_gpus(FINE | changed, 2, 2, need, "", driver)
    assert found.state == state, found
    assert words in f"{found.found} {found.remedy}"


def test_a_layout_of_gpus_fails_where_there_is_none(tmp_path, monkeypatch):
    monkeypatch.setattr(doctor_services, "installed_gpus", lambda: 0)
    assert doctor_services.gpus(Examined(cfg=config(), run_dir=tmp_path)).state == "skipped"
    found = doctor_services.gpus(Examined(cfg=config("hardware=node8"), run_dir=tmp_path))
    assert found.state == "failed"
    assert found.found == "no GPU; hardware=node8 needs 8 on a host"


SINFO = """#!/bin/sh
case "$*" in
  --version) echo "slurm 22.05.8" ;;
  *) printf 'gpu|up|1-00:00:00|4|gpu:h100:8(S:0-1)\\nold|down|infinite|2|(null)\\n' ;;
esac
"""


@pytest.mark.parametrize(
    ("overrides", "state", "words"),
    [
        (["slurm.partition=gpu", "slurm.gpus_per_node=8"], "ok", "slurm 22.05.8; partition gpu; no accounting"),
        (["slurm.partition=gpus", "slurm.gpus_per_node=8"], "failed", "there is no partition gpus; there are gpu, old"),
        (["slurm.partition=old", "slurm.gpus_per_node=0"], "failed", "partition old is down"),
        (["slurm.partition=gpu", "slurm.gpus_per_node=8", "slurm.time_minutes=2000"], "failed", "slurm.time_minutes=1440: jobs requeue"),
        (["slurm.partition=gpu", "slurm.gpus_per_node=16"], "failed", "nodes of gpu have 8 GPUs"),
    ],
)
def test_slurm_must_have_what_the_clusters_yaml_names(tmp_path, monkeypatch, overrides, state, words):
    (tmp_path / "sinfo").write_text(SINFO)
    (tmp_path / "sinfo").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    monkeypatch.setattr(doctor_services, "_accounts", lambda: False)
    cfg = config("launcher=slurm", "hardware=cpu", *overrides)
    found = doctor_services.slurm(Examined(cfg=cfg, run_dir=tmp_path, here=False))
    assert found.state == state, found
    assert words in f"{found.found}; {found.remedy}"


def test_without_slurm_only_a_run_on_slurm_fails(examined, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert doctor_services.slurm(examined).state == "skipped"
    wanted = Examined(cfg=config("launcher=slurm", "hardware=cpu"), run_dir=tmp_path)
    assert doctor_services.slurm(wanted).state == "failed"


def test_limits_and_resources_of_slurm_are_read():
    assert [minutes(limit) for limit in ("infinite", "UNLIMITED", "30:00", "12:00:00", "2-12:00:00", "45")] == [
        *(float("inf"), float("inf"), 30, 720, 3600, 45)
    ]
    assert [gpus_of(each) for each in ("gpu:8", "gpu:h100:8(S:0-1)", "gpu:a100:2,gpu:h100:4,nvme:1", "(null)")] == [8, 8, 6, 0]


@pytest.fixture
def endpoint() -> Iterator[str]:
    """A stand-in hub: `owner/there` exists, `owner/gated` needs access, others do not exist."""

    class Hub(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            codes = {"/api/models/owner/there": 200, "/api/models/owner/gated": 403}
            self.send_response(codes.get(self.path, 404))
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(
    ("model", "words"),
    [("owner/there", ""), ("owner/gated", "export HF_TOKEN"), ("owner/none", "correct model.name")],
)
def test_the_hub_is_asked_for_the_model(endpoint, model, words):
    problem, remedy = doctor_services.reach(endpoint, model, None)
    assert bool(problem) == bool(words)
    assert words in remedy


def test_a_hub_that_cannot_be_reached_fails_only_if_the_model_is_wanted_from_it(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    assert doctor_services.hub(Examined(cfg=config(), run_dir=tmp_path)).state == "skipped"
    large = Examined(cfg=config("model=qwen3_8b", "env=math", "model.name=owner/absent"), run_dir=tmp_path)
    found = doctor_services.hub(large)
    assert (found.state, "HF_ENDPOINT" in found.remedy) == ("failed", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    found = doctor_services.hub(large)
    assert found.state == "failed"
    assert "owner/absent is not in the cache" in found.found


def test_a_login_of_wandb_is_found_where_wandb_looks(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    logged = Examined(cfg=config("logger=wandb"), run_dir=tmp_path)
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    found = doctor_services.wandb(logged)
    assert (found.state, found.remedy) == ("failed", "wandb login, or export WANDB_API_KEY=…, or logger=wandb_offline")
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password secret\n")
    (tmp_path / "netrc").chmod(0o600)
    found = doctor_services.wandb(logged)
    assert found.state == "ok"
    assert "secret" not in found.found
    assert doctor_services.wandb(Examined(cfg=config("logger=wandb_offline"), run_dir=tmp_path)).state == "ok"


FOUND = [
    Finding(name="python", state="ok", found="3.11"),
    Finding(name="GPUs", state="failed", found="no GPU", remedy="hardware=cpu"),
    Finding(name="W&B", state="skipped", found="not used"),
]


def test_the_table_puts_each_remedy_below_its_finding_and_the_exit_code_says_that_something_fails(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(doctor, "examine", lambda *_: iter(FOUND))
    assert main(["doctor"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].split() == ["FAILED", "GPUs", "no", "GPU"]
    assert lines[3].strip() == "→ hardware=cpu"
    assert lines[-1] == "1 failed, 0 warnings, 1 fine, 1 not used"
    assert main(["doctor", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["findings"][1] == {
        "name": "GPUs",
        "state": "failed",
        "found": "no GPU",
        "remedy": "hardware=cpu",
    }
    monkeypatch.setattr(doctor, "examine", lambda *_: iter(FOUND[:1]))
    assert main(["doctor"]) == 0
    assert main(["doctor", "--nodes"]) == 2
    assert main(["doctor", "seed=x"]) == 2


def test_the_job_on_a_node_takes_what_a_run_takes_but_for_minutes(tmp_path):
    cfg = config("launcher=slurm", "hardware=node8x2", "slurm.gpus_per_node=8", "slurm.partition=gpu", "slurm.setup=[module load cuda]")
    options = job_options(cfg, tmp_path)
    assert (options["nodes"], options["time"], options["gres"], options["partition"]) == (1, 10, "gpu:8", "gpu")
    assert "module load cuda" in options["setup"]
    assert options["additional_parameters"] == {"no_requeue": True}


def test_a_job_that_ends_without_findings_shows_its_output(tmp_path, monkeypatch):
    (tmp_path / "out").write_text("module: command not found\n")
    monkeypatch.setattr("rlx.preflight.doctor_node.queue", lambda: {"7": "FAILED"})
    monkeypatch.setattr("rlx.preflight.doctor_node.ASK", 0.0)
    with pytest.raises(ConfigError, match=r"job 7 ended \(FAILED\) without findings; its output:\n  \| module: command not found"):
        _wait("7", tmp_path / "findings_7.json", tmp_path / "out")
    (tmp_path / "findings_7.json").write_text('{"host": "node1", "findings": []}')
    assert _wait("7", tmp_path / "findings_7.json", tmp_path / "out")["host"] == "node1"


@pytest.mark.long
def test_ranks_reduce_and_a_failure_of_one_is_the_answer():
    from rlx.parallel.probe import reduce_over

    assert reduce_over(2, "gloo")["bytes_per_second"] > 2**20
    if visible_gpus() < 2:
        assert "error" in reduce_over(2, "nccl")


SBATCH = """#!/bin/sh
for script; do :; done
if grep '^#SBATCH .*=False$' "$script" >&2; then echo "sbatch: option doesn't allow an argument" >&2; exit 1; fi
out=$(sed -n 's/^#SBATCH --output=//p' "$script" | sed 's/%j/7/; s/%t/0/')
export SLURM_JOB_ID=7 SLURM_NTASKS=1 SLURM_JOB_NUM_NODES=1 SLURM_NODEID=0 SLURM_PROCID=0 SLURM_LOCALID=0 SLURMD_NODENAME=node9
setsid bash "$script" >"$out" 2>&1 </dev/null &
echo "Submitted batch job 7"
"""
COMMANDS = {"sbatch": SBATCH, "srun": "#!/bin/sh\n", "scontrol": "#!/bin/sh\necho node9\n", "squeue": "#!/bin/sh\necho '7|RUNNING'\n"}


@pytest.mark.long
def test_a_node_is_examined_by_a_job(tmp_path, monkeypatch, capsys):
    """submitit and the job's script are real, sbatch is a stand-in that runs the script here."""
    for name, script in {**COMMANDS, "sinfo": SINFO}.items():
        (tmp_path / name).write_text(script)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).resolve().parents[1]))
    monkeypatch.chdir(tmp_path)
    setup = "slurm.setup=[shopt -s expand_aliases]"
    code = main(["doctor", "--node", "hardware=cpu", "slurm.partition=gpu", setup])
    shown, said = capsys.readouterr()
    assert shown.startswith("node9, for the configuration that was given\n"), said
    assert [name for name, _ in CHECKS if f" {name} " not in shown] == []
    assert code == (1 if "FAILED" in shown else 0)
    assert "run is elsewhere" not in shown, "on the node, memory and processors count"


def test_a_terminated_check_of_a_node_cancels_its_job(tmp_path):
    waiting = {
        **COMMANDS,
        "sbatch": "#!/bin/sh\necho 'Submitted batch job 7'\n",
        "scancel": f'#!/bin/sh\necho "$@" >{tmp_path}/cancelled\n',
    }
    for name, script in {**waiting, "sinfo": SINFO}.items():
        (tmp_path / name).write_text(script)
        (tmp_path / name).chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(Path(__file__).resolve().parents[1])}
    command = [sys.executable, "-m", "rlx.cli", "doctor", "--node", "hardware=cpu"]
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True) as check:
        assert check.stderr is not None
        assert check.stderr.readline() == "job 7: waiting for a node\n"
        check.terminate()
        assert check.wait(60) == 130
        assert "Traceback" not in check.stderr.read()
    assert (tmp_path / "cancelled").read_text() == "7\n"


@pytest.mark.parametrize(
    ("have", "arguments", "state", "words"),
    [
        (2, ["experiment=sums_smollm2", "hardware.cpu_threads=2"], "ok", ""),  # as the preset: each role has all of them
        (2, [], "ok", ""),
        (2, ["hardware.cpu_threads=4"], "warning", "hardware.cpu_threads=2: more threads than processors wait for each other"),
        (
            2,
            ["hardware.trainer_processes=4"],
            "warning",
            "more processors (slurm.cpus_per_node, the container's limit), or fewer processes",
        ),
    ],
)
def test_processors_are_too_few_for_more_threads_or_more_processes_than_there_are(have, arguments, state, words, tmp_path, monkeypatch):
    monkeypatch.setattr(doctor.limits, "cores", lambda: have)
    found = doctor.cores(Examined(cfg=config("hardware=cpu", *arguments), run_dir=tmp_path))
    assert (found.state, words in found.remedy) == (state, True), found
