"""Input to SLURM and its output, tested without SLURM: the sbatch script, configuration checks, queued jobs, changed code."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import bring_up

from rlx.cli import main
from rlx.config.errors import ConfigError
from rlx.config.load import compose, load_run
from rlx.launch import slurm
from rlx.paths import RunPaths
from rlx.plan.make import make_plan
from rlx.plan.process_spec import read_plan
from rlx.runs.jobs import is_alive, job_of, note_job, queue, restarts_of
from rlx.runs.run_dir import create, resolve_run_dir
from rlx.runs.status import Status, read_status

pytestmark = pytest.mark.slow

RUNS = [Path(f"/shared/outputs/losses/seed={seed}") for seed in range(12)]
GOLDEN = Path(__file__).parent / "golden" / "sbatch.sh"
ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def controller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """`controller(command=output)` puts fake SLURM commands with this output into the PATH."""

    def answers(**commands: str) -> None:
        folder = tmp_path / "bin"
        folder.mkdir(exist_ok=True)
        for name, output in commands.items():
            (folder / name).write_text(f"#!/bin/sh\ncat <<'X'\n{output}\nX\n")
            (folder / name).chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")

    return answers


def test_the_sbatch_script_of_a_cluster_with_everything(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.chdir("/")
    cfg = compose(
        ["launcher=slurm", "slurm=example", "hardware=node8x2", "model=qwen3_8b", "launcher.array_parallelism=4", "dry_run=true"], {}
    ).cfg
    text = slurm.sbatch_script(cfg, "losses", Path("/shared/outputs/losses/.submitit"), RUNS).replace(sys.executable, "PYTHON")
    if os.environ.get("UPDATE_GOLDEN"):
        GOLDEN.write_text(text)
    assert GOLDEN.read_text() == text


def stand_in(path: Path, does: str) -> str:
    """An executable shell script; returns its path."""
    path.write_text(f"#!/bin/sh\n{does}\n")
    path.chmod(0o755)
    return str(path)


def test_the_script_needs_no_recent_coreutils_to_ignore_the_notice_until_python_handles_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Neither in setup, where bash would also report a failure, nor before Python has a handler."""
    stand_in(tmp_path / "env", 'echo "env: unrecognized option" >&2; exit 125')
    monkeypatch.setattr(sys, "executable", stand_in(tmp_path / "python", '[ "$1" = -c ] && exit; kill -USR2 $$; echo alive'))
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    cfg = compose(["launcher=slurm", "hardware=cpu", "dry_run=true"], {}).cfg
    Status().write(RunPaths(tmp_path))
    cfg = replace(cfg, slurm=replace(cfg.slurm, setup=["kill -USR2 $$", "echo set up"]))
    text = slurm.sbatch_script(cfg, "run", tmp_path / ".submitit", [tmp_path])
    done = subprocess.run(["bash"], input=text, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-2:] == ["set up", "alive"], done.stderr
    assert read_status(RunPaths(tmp_path)).state == "starting"


@pytest.mark.parametrize(
    ("setup", "after"),
    [
        ("export PYTHONPATH='/my modules'; unset PYTHONSAFEPATH", ["/my modules", "HERE"]),
        ("unset PYTHONPATH", ["HERE"]),
        ("export PYTHONPATH=$PYTHONPATH:/last", ["HERE", "/last"]),
    ],
)
def test_no_line_of_the_setup_takes_the_jobs_copy_of_the_code_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setup, after):
    monkeypatch.setattr(
        sys, "executable", stand_in(tmp_path / "python", '[ "$1" = -c ] && exit; echo "$PYTHONPATH"; echo "$PYTHONSAFEPATH"')
    )
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.chdir(tmp_path)
    code = tmp_path / "the run" / "code_1"
    (code / "environments" / "sums").mkdir(parents=True)
    cfg = compose(["launcher=slurm", "hardware=cpu", "dry_run=true"], {}).cfg
    Status().write(RunPaths(tmp_path))
    cfg = replace(cfg, slurm=replace(cfg.slurm, setup=[setup]))
    text = slurm.sbatch_script(cfg, "run", tmp_path / ".submitit", [tmp_path], code)
    done = subprocess.run(["bash"], input=text, capture_output=True, text=True, check=True)
    path = [str(code), str(code / "environments" / "sums"), *(str(tmp_path) if each == "HERE" else each for each in after)]
    assert done.stdout.splitlines() == [os.pathsep.join(path), "1"]


NEWER_THAN_BASH_4_2 = {
    r"\$\{\w+(\[[^]]*\])?@\w\}": "4.4: ${x@Q}",
    r"\bEPOCH(SECONDS|REALTIME)\b|\bBASH_ARGV0\b|\bSRANDOM\b": "5.0 and 5.1",
    r"\bwait\b[^\n;]* -[a-z]*[fnp]": "4.3 to 5.1",
    r"\b(declare|local|typeset)\b[^\n;]* -[a-zA-Z]*n": "4.3: names of names",
    r"\bprintf\b[^\n;]*%\(": "4.2 has it, but not without an argument",
    r"\bset -[a-z]*u|nounset": "up to 4.3 an empty array counts as not set",
    r"\[\[ -v |\[\w*-\d+\]|\$\{\w+\[-": "4.3: -v of elements, negative places",
    r"\b(mapfile|readarray)\b[^\n;]* -[a-z]*d": "4.4: -d",
    r"\binherit_errexit\b|\bpatsub_replacement\b|\blocalvar_inherit\b": "4.4 to 5.2",
    r"\$\{[ |]": "5.3: ${ command; }",
    r"\$\{\w+//?[^}]*\\": "up to 4.2 a backslash in a replacement means something else",
}


@pytest.mark.parametrize("script", sorted(GOLDEN.parent.glob("sbatch*.sh")), ids=lambda path: path.stem)
def test_the_scripts_use_nothing_that_bash_4_2_lacks(script: Path):
    found = [
        f"{line.strip()} ({why})"
        for line in script.read_text().splitlines()
        for each, why in NEWER_THAN_BASH_4_2.items()
        if re.search(each, line)
    ]
    assert found == []


def test_what_is_null_is_left_to_the_cluster():
    cfg = compose(["launcher=slurm", "hardware=cpu", "dry_run=true"], {}).cfg
    text = slurm.sbatch_script(cfg, "run", Path("/x/.submitit"), [Path("/x")])
    for option in ("partition", "account", "qos", "constraint", "cpus-per-task", "gres", "array", "wckey"):
        assert f"--{option}" not in text
    for line in ("--exclusive", "--mem=0", "--nodes=1", "--requeue", "--signal=B:USR2@120", "--time=1440"):
        assert f"#SBATCH {line}\n" in text


@pytest.mark.parametrize(
    ("argv", "there", "absent"),
    [
        (["slurm.options.mem=null"], [], ["mem"]),
        (["slurm.options={mem-per-cpu: 4G}"], ["mem-per-cpu=4G"], ["mem"]),
        (["slurm.options.mem_per_gpu=60G"], ["mem-per-gpu=60G"], ["mem"]),
        (["slurm.cpus_per_node=4"], ["cpus-per-task=4"], ["mem", "exclusive"]),
        (["slurm.cpus_per_node=4", "slurm.memory_gb=2"], ["mem=2048M"], ["exclusive"]),
        (["slurm.options.requeue=null", "slurm.options.exclusive=null"], ["mem=0"], ["requeue", "exclusive"]),
        (["slurm.options={nice: 100, begin: '16:00'}"], ["nice=100", "begin=16:00"], []),
        (["hardware=gpu2", "slurm.options={gres: null, gpus-per-node: 2}"], ["gpus-per-node=2"], ["gres"]),
        (["slurm.cpus_per_node=4", "slurm.options={cpus-per-task: 8}"], ["cpus-per-task=8"], ["cpus-per-task=4"]),
    ],
)
def test_lines_of_the_script_can_be_replaced_and_taken_out(argv: list[str], there: list[str], absent: list[str]):
    cfg = compose(["launcher=slurm", "hardware=cpu", "dry_run=true", *argv], {}).cfg
    lines = slurm.sbatch_script(cfg, "run", Path("/x/.submitit"), [Path("/x")]).splitlines()
    options = [line.removeprefix("#SBATCH --") for line in lines if line.startswith("#SBATCH")]
    assert set(there) <= set(options)
    assert not [option for option in options if option in absent or option.partition("=")[0] in absent]


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["slurm.options.array=0-3"], "sbatch's array would break the run: slurm.options.array=0-3 (command line)"),
        (["slurm.options={ntasks_per_node: 8}"], "sbatch's ntasks-per-node would break the run"),
        (["slurm.options={output: /tmp/x}"], "logs/attempt_N/job.log"),
        (["slurm.options={arr: 0-1}"], "sbatch's array would break the run: slurm.options.arr=0-1"),
        (["slurm.options={no-requeue: true}"], "launcher.max_requeues limits how often"),
        (["slurm.options={export: 'HOME,PATH'}"], "sbatch's export would break the run"),
        (["slurm.options={gpus: 16}"], "write gpus-per-node"),
        (["slurm.options={C: h100}"], "given by their long names, without dashes: slurm.options.C=h100 (command line)"),
        (["slurm.options={--hold: true}"], "given by their long names, without dashes: slurm.options.--hold=true (command line)"),
        (["slurm.gpus_per_node=4", "hardware=node8", "model=qwen3_8b"], "more GPUs per host than the cluster's nodes have"),
        (
            ["launcher.preempt_grace=116"],
            "SLURM would kill the job before it can stop by itself: launcher.preempt_grace=116.0 (command line)",
        ),
        (["slurm.time_minutes=2"], "signal before the time limit would come before the job starts"),
    ],
)
def test_what_cannot_work_on_the_cluster_is_said_before_anything_is_submitted(argv: list[str], said: str):
    with pytest.raises(ConfigError, match=re.escape(said)):
        compose(["launcher=slurm", "hardware=cpu", "dry_run=true", *argv], {})


def test_options_that_are_harmless_are_left_to_sbatch():
    more = "{export: 'ALL,A=1', requeue: true, gpus-per-node: 2, nodelist: node4, wait-all-nodes: 1, mem: null, no-kill: null}"
    with pytest.raises(ConfigError, match="no-kill"):
        compose(["launcher=slurm", "hardware=cpu", "dry_run=true", f"slurm.options={more}"], {})
    compose(["launcher=slurm", "hardware=cpu", "dry_run=true", f"slurm.options={more.replace(', no-kill: null', '')}"], {})


def test_variables_that_sbatch_would_read_as_such_options_are_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SBATCH_EXPORT", "ALL")
    compose(["launcher=slurm", "hardware=cpu", "dry_run=true"], {})
    monkeypatch.setenv("SBATCH_EXPORT", "NONE")
    monkeypatch.setenv("SBATCH_TIMELIMIT", "5")
    with pytest.raises(ConfigError) as error:
        compose(["launcher=slurm", "hardware=cpu", "dry_run=true"], {})
    assert "sbatch's export would break the run: the variable SBATCH_EXPORT=NONE" in str(error.value)
    assert "the variable SBATCH_TIMELIMIT=5.\n  fix: unset it: slurm.time_minutes sets it" in str(error.value)
    compose(["launcher=local", "hardware=cpu", "dry_run=true"], {})


def test_without_a_slurm_a_submission_is_refused_and_a_dry_run_is_not(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ConfigError, match=r"sbatch, srun, squeue, scontrol.* cannot be found"):
        compose(["launcher=slurm", "hardware=cpu"], {})
    compose(["launcher=slurm", "hardware=cpu", "dry_run=true"], {})


def test_the_states_of_jobs_are_read_from_squeue_and_the_restarts_from_scontrol(controller, tmp_path: Path):
    controller(
        squeue="12_0|RUNNING\n12_1|PENDING\n11|COMPLETED", scontrol="JobId=7 JobName=x JobState=COMPLETING Requeue=1 Restarts=3 BatchFlag=1"
    )
    assert queue() == {"12_0": "RUNNING", "12_1": "PENDING", "11": "COMPLETED"}
    assert [is_alive(job) for job in ("12_0", "12_1", "11", "10")] == [True, True, False, False]
    assert restarts_of("7") == 3
    assert job_of(RunPaths(tmp_path)) is None
    note_job(RunPaths(tmp_path), "12_1")
    assert job_of(RunPaths(tmp_path)) == "12_1"


@pytest.mark.usefixtures("known_environments")
@pytest.mark.parametrize("launcher", ["slurm", "local"])
def test_the_gpus_of_the_submitting_host_do_not_bound_a_plan_for_another(
    launcher: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    assert main(["train", f"launcher={launcher}", "hardware=node8", "model=qwen3_8b", "env=math", "dry_run=true", "run.dir=mine"]) == 0
    plan = read_plan(tmp_path / "mine" / "plan.yaml")
    assert [gpu for spec in plan if spec.role == "trainer" for gpu in spec.gpus] == [4, 5, 6, 7]
    assert capsys.readouterr().err == ""


def test_a_job_does_not_inherit_the_gpus_of_the_host_or_the_job_it_was_submitted_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    paths = made(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    monkeypatch.setenv("SLURM_GPUS_PER_NODE", "1")  # of an interactive job
    monkeypatch.setenv("SLURM_RESTART_COUNT", "2")
    monkeypatch.setenv("SLURM_CONF", "/etc/slurm/another.conf")
    seen = {}

    class Executor:
        def submit_array(self, runs):
            seen.update(os.environ)
            raise RuntimeError("not now")

    monkeypatch.setattr(slurm, "make_executor", lambda *_: Executor())
    monkeypatch.setattr(slurm, "sbatch_script", lambda *_: "")
    with pytest.raises(RuntimeError, match="not now"):
        slurm.submit([(paths, load_run(paths.root))], "mine", tmp_path)
    assert not {"CUDA_VISIBLE_DEVICES", "SLURM_GPUS_PER_NODE", "SLURM_RESTART_COUNT"} & set(seen)
    assert seen["SLURM_CONF"] == "/etc/slurm/another.conf"
    assert (os.environ["CUDA_VISIBLE_DEVICES"], os.environ["SLURM_GPUS_PER_NODE"]) == ("3", "1")


def test_a_directory_that_pythonpath_cannot_name_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.chdir(tmp_path)
    line = ["train", "launcher=slurm", "hardware=cpu", "run.name=10:30", "dry_run=true"]
    assert main(line) == 2
    assert "outputs/10:30, where the job's copy of the code would be: it has a :" in capsys.readouterr().err


@pytest.mark.usefixtures("known_environments")
def test_an_error_of_sbatch_is_said_once_for_all_runs_of_a_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    for name in ("sbatch", "srun", "squeue", "scontrol"):
        stand_in(tmp_path / name, 'echo "sbatch: error: Invalid account" >&2; exit 1')
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert main(["train", "-m", "seed=1,2,3", "launcher=slurm", "hardware=cpu", f"run.dir={tmp_path / 'sweep'}"]) == 1
    assert capsys.readouterr().err.count("Invalid account") == 1
    causes = [read_status(RunPaths(tmp_path / "sweep" / f"seed={seed}")).cause for seed in (1, 2, 3)]
    assert all("Invalid account" in cause.reason for cause in causes)


def made(tmp_path: Path, *argv: str) -> RunPaths:
    composed = compose([f"run.dir={tmp_path / 'run'}", "hardware=cpu", *argv], {})
    cfg = resolve_run_dir(composed.cfg, composed.label)
    paths, lock = create(cfg, composed.overrides, make_plan(cfg, tmp_path / "run"))
    lock.close()
    return paths


def test_a_directory_whose_job_waits_is_nobody_elses(controller, tmp_path: Path):
    paths = made(tmp_path)
    note_job(paths, "12")
    controller(squeue="12|PENDING")
    for more in ("clean=true", "resume=latest"):
        with pytest.raises(ConfigError, match="belongs to SLURM job 12, which waits or runs"):
            made(tmp_path, more)
    controller(squeue="12|FAILED")
    made(tmp_path, "clean=true")


@pytest.mark.parametrize(
    ("code", "required", "outcome", "said"),
    [
        (3, None, pytest.skip.Exception, "no SLURM here: no mirror"),
        (3, "1", pytest.fail.Exception, "no SLURM here: no mirror (RLX_REQUIRE_SLURM is set)"),
        (1, None, AssertionError, "no mirror"),
    ],
)
def test_a_cluster_that_cannot_be_leaves_its_tests_out_unless_it_is_required(tmp_path, monkeypatch, code, required, outcome, said):
    script = tmp_path / "cluster.sh"
    script.write_text(f"#!/bin/sh\necho 'no mirror' >&2\nexit {code}\n")
    script.chmod(0o755)
    monkeypatch.delenv("RLX_REQUIRE_SLURM", raising=False)
    if required:
        monkeypatch.setenv("RLX_REQUIRE_SLURM", required)
    with pytest.raises(outcome, match=re.escape(said)):
        bring_up(script)
