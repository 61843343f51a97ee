"""How processes of a plan become steps of a SLURM job, and how trainer ranks on several hosts find each other. Without SLURM."""

from __future__ import annotations

import os
import subprocess
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from rlx.launch.starters import SrunStarter
from rlx.paths import RunPaths
from rlx.plan.process_spec import ProcessSpec
from rlx.process import HOST, SUPERVISOR
from rlx.process_tree import start_time


def spec(gpus: tuple[int, ...] = (), node: int = 1) -> ProcessSpec:
    return ProcessSpec(role="trainer", replica=0, node=node, gpus=gpus, argv=("python", "-m", "rlx.roles.trainer"))


def test_a_step_runs_on_its_host_with_the_jobs_environment_but_not_its_shape() -> None:
    starter = SrunStarter("7", ["node1", "node2"])
    argv, env = starter.command(spec(), {"SLURM_NTASKS": "2", "SLURM_JOB_ID": "7", "A": "b", SUPERVISOR: "12"})
    assert argv[0] == "srun"
    assert {"--nodelist=node2", "--overlap", "--kill-on-bad-exit=1", "--job-name=trainer"} <= set(argv)
    assert argv[-3:] == ["python", "-m", "rlx.roles.trainer"]
    assert env == {"SLURM_JOB_ID": "7", "A": "b", HOST: "node2"}


def test_a_step_inherits_no_group_of_the_jobs_script_and_has_the_plans_own() -> None:
    script = {"SLURM_GPUS_PER_NODE": "1", "MASTER_ADDR": "node1", "WORLD_SIZE": "16", "RANK": "0", "TORCHELASTIC_RUN_ID": "x"}
    rank = replace(spec(), env={"RANK": "1", "LOCAL_RANK": "0", "WORLD_SIZE": "2"})
    _, env = SrunStarter("7", ["node1", "node2"]).command(rank, script)
    assert env == {"RANK": "1", "LOCAL_RANK": "0", "WORLD_SIZE": "2", HOST: "node2"}


@pytest.mark.parametrize(
    ("allocated", "gpus", "seen"), [("0,1,2,3", (1, 3), "1,3"), ("4,6,7", (0, 2), "4,7"), ("", (0,), "0"), ("0,1", (), "")]
)
def test_a_step_sees_those_of_the_jobs_gpus_that_the_plan_gives_it(allocated: str, gpus: tuple[int, ...], seen: str) -> None:
    argv, _ = SrunStarter("7", ["node1"], gpus_per_node=4).command(spec(gpus, node=0), {})
    start = next(i for i, part in enumerate(argv) if part in ("sh", "env"))
    command = [*argv[start:-3], "sh", "-c", "printf %s $CUDA_VISIBLE_DEVICES"]
    done = subprocess.run(
        command, env={"CUDA_VISIBLE_DEVICES": allocated, "PATH": "/usr/bin:/bin"}, capture_output=True, text=True, check=True
    )
    assert done.stdout == seen


def test_a_role_whose_gpu_the_step_does_not_have_gets_none() -> None:
    """Not the first one, which another role has."""
    argv, _ = SrunStarter("7", ["node1"], gpus_per_node=8).command(spec((4,), node=0), {})
    start = next(i for i, part in enumerate(argv) if part in ("sh", "env"))
    command = [*argv[start:-3], "sh", "-c", "printf %s $CUDA_VISIBLE_DEVICES"]
    done = subprocess.run(command, env={"CUDA_VISIBLE_DEVICES": "0", "PATH": "/usr/bin:/bin"}, capture_output=True, text=True, check=True)
    assert done.stdout == ""


def test_a_prefix_stands_before_the_command() -> None:
    argv, _ = SrunStarter("7", ["node1"], prefix=["numactl", "--localalloc"]).command(spec(node=0), {})
    assert argv[-5:-3] == ["numactl", "--localalloc"]


def test_sruns_exit_code_tells_the_signal() -> None:
    assert [SrunStarter("7", ["a"]).returncode(code) for code in (0, 1, 75, 137)] == [0, 1, 75, -9]


def test_steps_that_a_silent_host_does_not_start_are_given_up_and_taken_from_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One `srun` leaves when it is asked to, one must be killed; SLURM would start the steps of both when their host answers again."""
    commands = {
        "srun": f"case \"$*\" in *node2*) exit 0;; *node3*) trap 'echo left >> {tmp_path}/said; exit 1' TERM;; *) trap '' TERM;; esac\n"
        f"echo $$ >> {tmp_path}/pids; while :; do sleep 0.05; done",
        "squeue": "echo '7.1 trainer'; echo '7.4 probe'; echo '7.5 probe'",
        "scancel": f'echo "$*" >> {tmp_path}/said',
    }
    for name, does in commands.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{does}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr("rlx.launch.starters.PROBE", 1.0)
    monkeypatch.setattr("rlx.launch.starters.LEAVE", 1.0)
    assert SrunStarter("7", ["node2", "node3", "node4"]).lost_hosts() == ["node3", "node4"]
    assert (tmp_path / "said").read_text().splitlines() == ["left", "--signal=KILL 7.4 7.5"]
    assert not [pid for pid in (tmp_path / "pids").read_text().split() if start_time(int(pid)) is not None]


def test_ranks_meet_at_the_address_of_this_attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rlx.parallel.rendezvous import create_store

    monkeypatch.setenv("RLX_RUN_TOKEN", "now")
    monkeypatch.setenv(HOST, "localhost")
    paths = RunPaths(tmp_path)
    paths.endpoints.mkdir()
    (paths.endpoints / "trainer.json").write_text('{"host": "localhost", "port": 1, "token": "an earlier attempt"}')
    said: list[bytes] = []
    other = threading.Thread(target=lambda: said.append(create_store(paths, 1, 2, timeout=120).get("word")))
    other.start()
    store = create_store(paths, 0, 2, timeout=120)
    store.set("word", "here")
    other.join(300)
    assert said == [b"here"]
