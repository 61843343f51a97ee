"""Containers of SLURM jobs: the script and its steps for Pyxis and Apptainer, with stand-ins that check how they are called.

The stand-ins run the command on this machine, with the image's Python replaced by the tests' own and without SLURM's commands in the PATH.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlx.config.errors import ConfigError
from rlx.config.load import compose
from rlx.config.schema_launch import ContainerConfig
from rlx.launch import slurm
from rlx.launch.container import RoleContainer, mounts_of, named_folders
from rlx.launch.starters import SrunStarter
from rlx.paths import RunPaths
from rlx.plan.process_spec import ProcessSpec
from rlx.runs import provenance
from rlx.runs.run_dir import create, resolve_run_dir
from rlx.runs.status import Status, read_status

PYTHON = "/opt/rlx/bin/python"  # exists in the image only
SIF = "/lustre/team_rl/images/rlx.sif"
SRUN = """\
printf '%s\\n' "srun $*" >> ASKED
name=
while [ "${1#--}" != "$1" ]; do
  case $1 in
    --container-image=/images/rlx.sqsh | --no-container-mount-home | --no-container-entrypoint | --container-workdir=/*) ;;
    --container-mounts=*)
      for mount in $(echo "${1#--container-mounts=}" | tr , ' '); do
        [ -e "${mount%%:*}" ] || { echo "pyxis: couldn't mount $mount" >&2; exit 1; }
      done ;;
    --container-*) echo "srun: unrecognized option $1" >&2; exit 1 ;;
  esac
  shift
done
INSIDE
"""
APPTAINER = """\
printf '%s\\n' "apptainer $*" >> ASKED
[ "$1" = exec ] && shift || exit 1
while [ "${1#--}" != "$1" ]; do
  case $1 in
    --bind) [ -e "${2%%:*}" ] || { echo "FATAL: mount source ${2%%:*} doesn't exist" >&2; exit 255; }; shift ;;
    --pwd) [ -d "$2" ] || exit 255; shift ;;
    --no-home | --nv) ;;
    *) echo "unknown flag $1" >&2; exit 1 ;;
  esac
  shift
done
[ "$1" = /images/rlx.sif ] && shift || exit 255
INSIDE
"""
INSIDE = 'PATH=/usr/bin:/bin; for word; do shift; [ "$word" = PYTHON ] && word=REAL; set -- "$@" "$word"; done; exec "$@"'
READS = (
    "import os, sys; print('code', os.environ['PYTHONPATH'].split(':')[0], 'home', os.environ['HF_HOME'], "
    "'size', os.environ.get('SLURM_NTASKS'), 'user site', sys.flags.no_user_site)"
)
LEAVES = (
    "import pathlib, sys, time; run = pathlib.Path(sys.argv[1]); (run / 'waits').touch(); "
    "[time.sleep(0.05) for _ in iter((run / 'preempt').exists, True)]; sys.exit(75)"
)


def image(runtime: str) -> str:
    return "/images/rlx.sqsh" if runtime == "pyxis" else "/images/rlx.sif"


class Job:
    """A run in a container, submitted to stand-ins; `run()` does what SLURM would."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, runtime: str, code: str) -> None:
        self.folder, self.asked_file = folder, folder / "asked"
        (folder / "bin").mkdir()
        inside = INSIDE.replace("PYTHON", PYTHON).replace("REAL", sys.executable)
        self.command("srun", SRUN.replace("INSIDE", inside if runtime == "pyxis" else 'exec "$@"'))
        self.command("apptainer", APPTAINER.replace("INSIDE", inside))
        self.command("sbatch", "echo Submitted batch job 12")
        self.command("squeue", 'echo "squeue $*" >> ASKED; echo 12.0 supervisor; echo 12.1 toy')
        self.command("scancel", 'echo "scancel $*" >> ASKED')
        self.command("scontrol", 'echo "scontrol $*" >> ASKED; echo JobId=12 JobState=RUNNING Restarts=0')
        monkeypatch.setenv("PATH", f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}")
        monkeypatch.chdir(folder)
        monkeypatch.delenv("PYTHONPATH", raising=False)
        monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        (folder / "hub").mkdir()
        line = ["launcher=slurm", "hardware=cpu", f"run.dir={folder / 'run'}", "launcher.grace=1", f"slurm.hf_home={folder / 'hub'}"]
        line += [f"slurm.container={{runtime: {runtime}, image: {image(runtime)}, python: {PYTHON}}}"]
        composed = compose(line, {"RLX_CACHE": str(folder / "cache" / "rlx")})
        cfg = resolve_run_dir(composed.cfg, composed.label)
        argv = (PYTHON, "-c", code, str(folder / "run"))
        self.paths, lock = create(cfg, [], [ProcessSpec(role="toy", replica=0, node=0, gpus=(), argv=argv)])
        try:
            assert slurm.submit([(self.paths, cfg)], "run", self.paths.root / slurm.FOLDER) == ["12"]
        finally:
            lock.close()
        self.script = next((self.paths.root / slurm.FOLDER).glob("*.sh"))

    def command(self, name: str, does: str) -> None:
        path = self.folder / "bin" / name
        path.write_text("#!/bin/bash\n" + does.replace("ASKED", str(self.asked_file)) + "\n")
        path.chmod(0o755)

    def start(self) -> subprocess.Popen[bytes]:
        variables = {"SLURM_JOB_ID": "12", "SLURM_JOB_NODELIST": "node1", "SLURMD_NODENAME": "node1", "SLURM_NTASKS": "1"}
        variables |= {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "TMPDIR": str(self.folder)}
        with (self.paths.root / slurm.FOLDER / "12_0_log.out").open("w") as output:
            return subprocess.Popen(
                ["bash", str(self.script)], stdout=output, stderr=output, env=os.environ | variables, start_new_session=True
            )

    def asked(self, word: str) -> list[str]:
        return [line for line in self.asked_file.read_text().splitlines() if line.startswith(word)]

    def status(self) -> Status:
        return read_status(self.paths)

    def told(self) -> str:
        files = [self.paths.root / slurm.FOLDER / "12_0_log.out", *self.paths.root.glob("logs/attempt_*/*.log")]
        return "\n".join(f"--- {file}\n{file.read_text()}" for file in files if file.exists())


def left_behind(session: int, timeout: float = 5) -> list[str]:
    """The command lines of the processes of a script that still run after `timeout` seconds. They are killed."""
    deadline = time.monotonic() + timeout
    while (found := dict(_in_session(session))) and time.monotonic() < deadline:
        time.sleep(0.05)
    for pid in found:
        os.kill(pid, signal.SIGKILL)
    return list(found.values())


def _in_session(session: int) -> Iterator[tuple[int, str]]:
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and (entry / "stat").read_text().rpartition(")")[2].split()[3] == str(session):
                yield int(entry.name), (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()


@pytest.mark.slow
@pytest.mark.parametrize("runtime", ["pyxis", "apptainer"])
def test_all_processes_of_a_job_run_in_its_container_and_the_host_needs_no_python(tmp_path, monkeypatch, runtime: str) -> None:
    job = Job(tmp_path, monkeypatch, runtime, READS)
    script = job.script.read_text()
    assert sys.executable not in script
    assert str(provenance.SOURCE) not in script
    assert job.start().wait(120) == 0, job.told()
    assert job.status().state == "completed", job.told()
    snapshot = next((job.paths.root / slurm.FOLDER).glob("code_*"))
    said = job.paths.log(0, "toy").read_text()
    assert said == f"code {snapshot} home {tmp_path / 'hub'} size None user site 1\n"
    steps = job.asked("srun")
    assert ["--job-name=supervisor" in step for step in steps] == [True, False]
    assert all(image(runtime) in step and f"{tmp_path}:{tmp_path}" in step for step in steps)
    assert (job.paths.logs(0) / "job.log").is_file()
    assert not list(tmp_path.glob("rlx.*")), "the folder of the requests is deleted"


@pytest.mark.slow
@pytest.mark.parametrize("runtime", ["pyxis"])
def test_the_notice_reaches_the_supervisor_in_its_container_which_requeues_its_job(tmp_path, monkeypatch, runtime: str) -> None:
    job = Job(tmp_path, monkeypatch, runtime, LEAVES)
    process = job.start()
    deadline = time.monotonic() + 120
    while not (job.paths.root / "waits").exists():
        assert time.monotonic() < deadline, job.told()
        assert process.poll() is None, job.told()
        time.sleep(0.05)
    supervisor = int(next(tmp_path.glob("rlx.*/pid")).read_text())
    os.kill(supervisor, signal.SIGTERM)  # to all steps of the job: the roles handle it
    time.sleep(0.5)
    process.send_signal(signal.SIGUSR2)
    assert process.wait(120) == 75, job.told()
    assert job.status().state == "preempted", job.told()
    assert "scontrol requeue 12" in job.asked("scontrol"), "asked by the supervisor inside, run by the script outside"


@pytest.mark.slow
def test_a_cancelled_job_interrupts_the_run_in_its_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(tmp_path, monkeypatch, "apptainer", LEAVES)
    process = job.start()
    deadline = time.monotonic() + 120
    while not (job.paths.root / "waits").exists():
        assert time.monotonic() < deadline, job.told()
        time.sleep(0.05)
    process.terminate()  # as SLURM does to the script
    assert process.wait(120) == 130, job.told()
    assert left_behind(process.pid) == [], "not even an answer that nobody reads"
    assert job.status().state == "interrupted", job.told()
    assert "scancel --signal=INT 12.1" in job.asked("scancel"), "the role's step, and not the supervisor's"


@pytest.mark.slow
def test_a_command_that_still_runs_when_the_supervisor_has_ended_is_killed_with_its_answer(tmp_path, monkeypatch) -> None:
    asks = "subprocess.Popen([sys.executable, '-m', 'rlx.runs.host_commands', '', 'sleep', '3600'], stdout=-3, stderr=-3); time.sleep(2)"
    job = Job(tmp_path, monkeypatch, "apptainer", f"import subprocess, sys, time; {asks}")
    process = job.start()
    assert process.wait(120) == 0, job.told()
    assert left_behind(process.pid) == []


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["slurm.container.python=python3"], "slurm.container.python=python3 (command line)"),
        (["slurm.container.mounts=[data]"], "slurm.container.mounts=[data] (command line)"),
        (["slurm.container.mounts=['/data:/data:rx']"], "slurm.container.mounts=[/data:/data:rx] (command line)"),
        (["slurm.container.options=[--containall]"], "process ids of its own: slurm.container.options=[--containall]"),
        (["slurm.prefix=[/usr/bin/apptainer,exec,other.sif]"], "one container in another: slurm.prefix="),
        (["slurm.options={container-image: other}"], "the job's script would run in a container"),
        (["slurm.container.runtime=docker"], "`slurm.container.runtime` must be one of pyxis, apptainer, singularity"),
    ],
)
def test_what_contradicts_the_container_is_refused(tmp_path: Path, more: list[str], said: str) -> None:
    (tmp_path / "slurm").mkdir()
    text = "container: {runtime: pyxis, image: /images/rlx.sqsh, python: /opt/rlx/bin/python}\n"
    (tmp_path / "slurm" / "mine.yaml").write_text(text)
    with pytest.raises(ConfigError, match=re.escape(said)):
        compose(["--config-dir", str(tmp_path), "launcher=slurm", "slurm=mine", "hardware=cpu", "dry_run=true", *more], {})


def test_a_container_on_the_command_line_is_given_whole() -> None:
    line = ["launcher=slurm", "hardware=cpu", "dry_run=true"]
    with pytest.raises(ConfigError, match=r"`slurm\.container\.runtime` .* that section is null here.* set it whole: 'slurm\.container="):
        compose([*line, "slurm.container.runtime=pyxis"], {})
    whole = "slurm.container={runtime: pyxis, image: x, python: /opt/python}"
    container = compose([*line, whole, "slurm.container.home=true"], {}).cfg.slurm.container
    assert (container.image, container.home) == ("x", True)


def files_of_the_page() -> dict[str, str]:
    """The clusters of docs/cluster.md by name."""
    page = (Path(__file__).resolve().parent.parent / "docs" / "cluster.md").read_text()
    return dict(re.findall(r"^```yaml\n# slurm/(\w+)\.yaml\n(.*?)^```", page, re.MULTILINE | re.DOTALL))


@pytest.mark.parametrize(
    ("name", "golden", "argv"),
    [
        ("falcon", "gres", ["hardware=node8", "model=qwen3_8b"]),
        ("heron", "gpus_per_node", ["hardware=gpu4", "model=qwen3_1_7b"]),
        ("kestrel", "pyxis", ["hardware=node8x2", "model=qwen3_8b"]),
        ("kestrel", "apptainer", ["hardware=node8", "model=qwen3_8b", "slurm.container.runtime=apptainer", f"slurm.container.image={SIF}"]),
    ],
)
def test_the_clusters_of_the_page_compose_and_have_these_scripts(tmp_path, monkeypatch, name: str, golden: str, argv: list[str]) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/home/me/.cache")
    monkeypatch.setenv("RLX_CACHE", "/home/me/.cache/rlx")
    monkeypatch.chdir("/")
    (tmp_path / "slurm").mkdir()
    (tmp_path / "slurm" / f"{name}.yaml").write_text(files_of_the_page()[name])
    cfg = compose(["--config-dir", str(tmp_path), "launcher=slurm", f"slurm={name}", "dry_run=true", *argv], {}).cfg
    run = Path("/shared/outputs/mine")
    text = slurm.sbatch_script(cfg, "mine", run / slurm.FOLDER, [run], run / slurm.FOLDER / "code_1").replace(sys.executable, "PYTHON")
    file = Path(__file__).parent / "golden" / f"sbatch_{golden}.sh"
    if os.environ.get("UPDATE_GOLDEN"):
        file.write_text(text)
    assert file.read_text() == text
    assert subprocess.run(["bash", "-n", str(file)], check=False).returncode == 0


def test_the_steps_of_a_role_with_gpus_in_a_container() -> None:
    container = {"image": "/images/rlx.sif", "python": PYTHON, "options": ["--writable-tmpfs"]}
    role = ProcessSpec(role="trainer", replica=1, node=1, gpus=(2, 3), env={"OMP_NUM_THREADS": "4"}, argv=(PYTHON, "-m", "x"))
    words = {}
    for runtime in ("pyxis", "apptainer"):
        its = RoleContainer(ContainerConfig(runtime=runtime, **container), ("/runs:/runs", "/data:/in:ro"), "/work", True)
        argv, env = SrunStarter("7", ["node1", "node2"], 4, (), its).command(role, {"A": "b", "PYTHONPATH": "/code", "SLURM_NTASKS": "1"})
        assert env == {"A": "b", "PYTHONPATH": "/code", "OMP_NUM_THREADS": "4", "RLX_HOST": "node2"}
        words[runtime] = argv[argv.index("--export=ALL") + 1 :]
        assert {"--nodelist=node2", "--overlap"} <= set(argv)
    options, again = ["--writable-tmpfs"], ["env", "PYTHONPATH=/code", "OMP_NUM_THREADS=4", PYTHON, "-m", "x"]
    chooses = ["sh", "-c", 'CUDA_VISIBLE_DEVICES=$(echo "${CUDA_VISIBLE_DEVICES:-0,1,2,3}" | cut -s -d, -f3,4) exec "$@"', "trainer_1"]
    flags = ["--container-image=/images/rlx.sif", "--container-mounts=/runs:/runs,/data:/in:ro", "--container-workdir=/work"]
    assert words["pyxis"] == [*flags, "--no-container-mount-home", "--no-container-entrypoint", *options, *chooses, *again]
    binds = ["--bind", "/runs:/runs", "--bind", "/data:/in:ro", "--pwd", "/work"]
    assert words["apptainer"] == [*chooses, "apptainer", "exec", "--nv", "--no-home", *binds, *options, "/images/rlx.sif", *again]


def test_what_the_configuration_names_is_mounted_and_nothing_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("data", "model", "work", "cache", "runs/mine"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "data" / "rows.jsonl").touch()
    (tmp_path / "model" / "config.json").touch()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("RLX_CACHE", raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache" / "hub"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "fetched"))
    line = ["launcher=slurm", "hardware=cpu", "dry_run=true", "model=qwen3_0_6b", f"model.name={tmp_path / 'model'}", "env=math"]
    line += [f"envs.math.args.dataset={tmp_path / 'data' / 'rows.jsonl'}", "envs.math.python=/usr/bin/python3"]
    line += ["slurm.container={runtime: pyxis, image: x, python: /opt/python, mounts: [/scratch, '/old:/new:ro']}"]
    found = mounts_of(compose(line, {}).cfg, tmp_path / "runs" / "mine", tmp_path / "runs" / "mine" / ".submitit" / "code_1")
    own = [tmp_path / name for name in ("cache", "data", "fetched", "model", "work", "runs/mine")]
    assert sorted(found) == sorted(
        [*(f"{folder}:{folder}" for folder in [*own, Path.home() / ".cache" / "rlx"]), "/scratch:/scratch", "/old:/new:ro"]
    )


def test_a_folder_that_no_runtime_can_mount_is_refused(tmp_path: Path) -> None:
    container = "slurm.container={runtime: pyxis, image: /images/rlx.sqsh, python: /opt/rlx/bin/python}"
    cfg = compose(["launcher=slurm", "hardware=cpu", "dry_run=true", container], {}).cfg
    run = tmp_path / "a,b"
    with pytest.raises(ConfigError, match="cannot be mounted in a container: its name has ','"):
        slurm.sbatch_script(cfg, "run", run / slurm.FOLDER, [RunPaths(run).root])


def test_texts_that_are_no_paths_are_not_mounted_nor_the_hosts_system_over_the_images(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    texts = [
        "/" * 300 + "x" * 300,
        "/" + "y" * 300,
        "~x y",
        "~nobody-of-this-name/z",
        "/no_think",
        "/usr/bin/env",
        "/etc",
        "/bin/sh",
        "/lib64",
    ]
    assert list(named_folders({"a": [*texts, str(tmp_path / "data")], "b": {"python": str(tmp_path)}})) == [tmp_path / "data"]


def test_the_cache_in_the_home_directory_is_mounted_where_its_variable_points_and_made_first(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("XDG_CACHE_HOME", "RLX_CACHE"):
        monkeypatch.delenv(name, raising=False)
    container = "slurm.container={runtime: pyxis, image: /images/rlx.sqsh, python: /opt/rlx/bin/python}"
    cfg = compose(["launcher=slurm", "hardware=cpu", "dry_run=true", container, "slurm.hf_home='~/hub'"], {}).cfg
    run = tmp_path / "run"
    text = slurm.sbatch_script(cfg, "run", run / slurm.FOLDER, [run], run / slurm.FOLDER / "code_1")
    assert f"export HF_HOME={tmp_path}/hub\n" in text
    assert f"{tmp_path}/hub:{tmp_path}/hub" in text
    (made,) = [line for line in text.splitlines() if line.startswith("mkdir -p") and ".cache" in line]
    assert made.split()[2:] == [f"{tmp_path}/{name}" for name in (".cache", ".cache/rlx", "hub")]
    assert text.index(made) < text.index("rlx_supervise()")


def test_the_caches_are_made_on_each_host_of_the_job() -> None:
    container = "slurm.container={runtime: pyxis, image: /images/rlx.sqsh, python: /opt/rlx/bin/python}"
    cfg = compose(["launcher=slurm", "hardware=cpu_3nodes", "dry_run=true", container, "slurm.hf_home=/local/hub"], {}).cfg
    text = slurm.sbatch_script(cfg, "run", Path("/x/.submitit"), [Path("/x")], Path("/x/.submitit/code_1"))
    (made,) = [line for line in text.splitlines() if " mkdir -p " in line and "/local/hub" in line]
    assert {"srun", "--overlap", "--nodes=3", "--ntasks=3", "--ntasks-per-node=1"} <= set(made.split())
