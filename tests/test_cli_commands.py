"""The command line: help, invalid input, dry runs, and single roles until the command becomes the role's process."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rlx.cli import COMMANDS, main
from rlx.cli.help import FOR_ALL
from rlx.config.load import load_run
from rlx.config.presets import shipped_groups
from rlx.config.roots import ROOTS, Root, has_key, key_of

ROOT = Path(__file__).resolve().parents[1]
pytestmark = pytest.mark.usefixtures("known_environments")


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands run in an empty folder and change this process's environment only for the test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    monkeypatch.setattr(sys, "path", list(sys.path))


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(f"\n  {name} " in shown for name in COMMANDS)
    assert main([]) == 2


@pytest.mark.parametrize(
    ("given", "environ"),
    [
        (["dry_run=true", "inference.api_key=sesame"], {}),
        (["dry_run=true", "loss=opd", "teacher={base_url: ['http://t:1'], api_key: sesame}"], {}),
        (["inference={api_key: sesame"], {}),
        (["inference={'api_key':sesame"], {}),
        (["infrence.api_key='sesame"], {}),
        ([], {"RLX_INFERENCE": "{api_key: sesame"}),
    ],
)
def test_a_key_is_not_shown(
    given: list[str], environ: dict[str, str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert main(["train", *given]) == (0 if given[:1] == ["dry_run=true"] else 2)
    shown = "".join(capsys.readouterr())
    assert "api_key" in shown
    assert "<secret>" in shown
    assert "sesame" not in shown


def test_a_dry_run_refuses_values_that_only_the_optimizer_itself_can_check(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "optim.foreach=true", "optim.fused=true", "dry_run=true"]) == 2
    assert "cannot build `optim`: RuntimeError: `fused` and `foreach` cannot be `True` together" in capsys.readouterr().err


def test_a_reader_of_the_output_that_leaves_ends_a_command_quietly(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as output:
        monkeypatch.setattr(sys, "stdout", output)
        assert main(["env", "--help"]) == 141
        output.flush()  # as Python does at exit


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_explains_itself(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--help"]) == 0
    assert f"usage: rlx {command} " in capsys.readouterr().out


@pytest.mark.parametrize("root", ROOTS, ids=lambda root: root.command)
def test_the_help_of_a_command_lists_the_shipped_options(root: Root, capsys: pytest.CaptureFixture[str]) -> None:
    main([root.command, "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    for name, folder in shipped_groups().items():
        if name not in FOR_ALL and not has_key(root.schema, key_of(name)):
            continue  # a group of other commands
        assert name in shown
        assert all(option.stem in shown for option in folder.glob("*.yaml"))


def test_help_imports_nothing_heavy() -> None:
    script = (
        "import sys; from rlx.cli import main; main(['--help']); main(['train', '--help']); main(['trainer', '--help'])\n"
        "sys.exit(', '.join({'torch', 'hydra', 'omegaconf', 'submitit', 'numpy', 'rich'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert result.stderr == "\n"


@pytest.mark.parametrize(
    ("line", "hint"), [(["trian"], "fix: rlx train"), (["loss=gspo"], "fix: rlx train loss=gspo"), (["xyz"], "fix: one of train, sft")]
)
def test_an_unknown_command_gets_a_hint(line: list[str], hint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(line) == 2
    assert hint in capsys.readouterr().err


@pytest.mark.parametrize("command", ["train", "trainer"])
def test_a_wrong_configuration_is_a_short_report_and_exit_code_2(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "max_stepps=3", "seq_len=many"]) == 2
    shown = capsys.readouterr().err
    assert "2 problems" in shown
    assert "max_stepps" in shown
    assert "seq_len" in shown
    assert shown.rstrip().endswith("Nothing was started.")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("command", ["view", "show", "report"])
def test_a_command_that_only_reads_says_nothing_of_starting(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, str(tmp_path / "absent")]) == 2
    assert "Nothing was started" not in capsys.readouterr().err


def test_a_dry_run_shows_the_plan_and_writes_it_where_the_next_one_will(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "loss=gspo", "env=math", "model=qwen3_8b", "hardware=node8", "dry_run=true"]) == 0
    shown = capsys.readouterr().out
    for words in ("max_steps:", "gspo", "inference_3", "trainer_3", "staleness", "GiB", "nothing was started"):
        assert words in shown
    (folder,) = (tmp_path / "outputs").iterdir()
    assert f"written to {folder}" in shown
    assert {path.name for path in folder.iterdir()} == {"config.yaml", "overrides.yaml", "plan.yaml", "plan.txt"}
    assert (folder / "plan.txt").read_text() in shown
    assert main(["train", "loss=gspo", "env=math", "model=qwen3_8b", "hardware=node8", "seed=7", "dry_run=true"]) == 0
    assert load_run(folder).seed == 7


@pytest.mark.parametrize("key", ["resume", "replay"])
def test_a_dry_run_looks_at_the_run_that_it_would_start_from(key: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "dry_run=true", f"{key}=outputs/nowhere/else"]) == 2
    assert f"{key}=outputs/nowhere/else: " in capsys.readouterr().err


def test_a_dry_run_plans_several_hosts_without_a_cluster_as_the_refusal_of_the_start_says(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "hardware=cpu_3nodes"]) == 2
    assert "dry_run=true to plan" in capsys.readouterr().err
    assert main(["train", "hardware=cpu_3nodes", "dry_run=true"]) == 0
    assert "trainer" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (["slurm=dev"], "slurm=dev (command line) has no effect: launcher.name=local ("),
        (["slurm.partition=gpu", "slurm.time_minutes=60"], "slurm.partition=gpu, slurm.time_minutes=60 (command line) has no effect"),
        (["-m", "seed=1,2", "slurm.partition=gpu"], "fix: add launcher=slurm, or leave it out"),
    ],
    ids=["file", "keys", "sweep"],
)
def test_what_is_typed_about_a_cluster_needs_its_launcher(
    line: list[str], says: str, capsys: pytest.CaptureFixture[str], monkeypatch
) -> None:
    assert main(["train", "dry_run=true", *line]) == 2
    assert says in capsys.readouterr().err
    monkeypatch.setenv("RLX_SLURM", "dev")  # a site's default
    assert main(["train", "dry_run=true", "logger=null"]) == 0


def test_train_refuses_a_directory_that_holds_something_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "thesis.tex").write_text("precious")
    assert main(["train", f"run.dir={tmp_path}", "clean=true"]) == 2
    assert "thesis.tex" in capsys.readouterr().err
    assert (tmp_path / "thesis.tex").exists()


def test_a_role_makes_the_run_directory_and_becomes_its_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    became: list[Any] = []
    monkeypatch.setattr(os, "execve", lambda *call: became.append(call) or 0)
    assert main(["trainer", "run.dir=mine", "seed=3"]) == 0
    assert main(["inference", "run.dir=mine", "seed=3", "--replica", "1", "hardware.inference_replicas=1"]) == 2
    assert main(["inference", "run.dir=mine", "seed=3"]) == 0
    commands = [" ".join(argv[1:]) for _, argv, _ in became]
    root = tmp_path / "mine"
    assert commands == [f"-m rlx.roles.trainer --run-dir {root}", f"-m rlx.roles.inference --run-dir {root} --replica 0"]
    environment = became[0][2]
    assert (environment["OMP_NUM_THREADS"], environment["RLX_SUPERVISOR_PID"]) == ("1", str(os.getppid()))
    assert load_run(root).seed == 3


def test_a_role_needs_the_gpus_of_its_own_process_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    """The other processes may be on other hosts."""
    became: list[Any] = []
    monkeypatch.setattr(os, "execve", lambda *call: became.append(call) or 0)
    monkeypatch.setattr("rlx.config.gpus.installed_gpus", lambda: 0)
    keys = ["run.dir=mine", "model=qwen3_8b", "hardware=node8x2"]
    assert main(["trainer", *keys]) == 2
    assert re.search(r"trainer computes on GPU 0 of its host .* visible here is 0", capsys.readouterr().err)
    assert main(["orchestrator", *keys]) == 0
    assert len(became) == 1


def test_a_role_with_another_configuration_does_not_join(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr(os, "execve", lambda *call: 0)
    main(["trainer", "run.dir=mine", "seed=3"])
    assert main(["orchestrator", "run.dir=mine", "seed=4"]) == 2
    assert "seed: 3 ≠ 4" in capsys.readouterr().err


def test_there_is_nothing_to_prepare_for_a_model_of_the_hub(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prepare", "run.dir=mine", "model=qwen3_0_6b", "hardware=cpu"]) == 0
    assert "nothing to prepare" in capsys.readouterr().out
    assert (tmp_path / "mine" / "initial_model.txt").read_text() == "Qwen/Qwen3-0.6B\n"


def test_train_py_is_rlx_train_from_any_folder(tmp_path: Path) -> None:
    result = subprocess.run([sys.executable, str(ROOT / "train.py"), "seed=x"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (2, "")
    assert "seed" in result.stderr
    assert "Traceback" not in result.stderr


def test_runs_lists_what_has_become_of_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    from rlx.config.roots import EVAL
    from rlx.metrics import MetricsWriter
    from rlx.paths import RunPaths
    from rlx.runs.status import Status

    done, lost, alive = (RunPaths(tmp_path / name) for name in ("done", "sweep/seed=1", "sweep/seed=2"))
    for paths, state in ((done, "completed"), (lost, "running"), (alive, "running")):
        status = Status(state=state, step=3, max_steps=9)
        status.supervisor = {"host": socket.gethostname(), "pid": os.getpid() if paths is alive else 2**22 + 1}
        paths.root.mkdir(parents=True)
        status.write(paths)
    MetricsWriter(done.metrics, "orchestrator").write(2, {"reward/mean": 0.25})
    done.config.write_text("seed: 0\n")
    lost.config.write_text(f"defaults: [{EVAL.schema_name}]\n")
    assert main(["runs", str(tmp_path)]) == 0
    rows = {line.split()[0]: line.split()[1:5] for line in capsys.readouterr().out.splitlines()}
    assert rows[str(done.root)] == ["train", "completed", "3/9", "0.250"]
    assert rows[str(lost.root)] == ["eval", "lost", "3/9", "-"]
    assert rows[str(alive.root)] == ["-", "running", "3/9", "-"]
    assert main(["runs", str(tmp_path / "nowhere")]) == 2


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["trainer", "--replica", "5"], "no trainer 5; its processes are prepare, inference_0, orchestrator, trainer"),
        (["orchestrator", "--replica", "1"], "no orchestrator 1;"),
        (["inference", "replay=outputs/other"], "no inference 0; its processes are trainer."),
        (["inference", "bench=true"], "no inference 0;"),
        (["prepare", "replay=outputs/other"], "no prepare 0;"),
        (["inference", "inference.base_url=[http://host:8000]"], "no inference 0;"),
    ],
)
def test_a_process_that_the_run_does_not_have_is_refused_with_those_that_it_has(argv, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main([argv[0], "run.dir=mine", *argv[1:]]) == 2
    said = capsys.readouterr().err
    assert words in said
    assert not (tmp_path / "mine").exists()


def test_a_role_by_hand_is_not_of_a_group_that_the_users_environment_names(tmp_path, monkeypatch):
    seen = {}
    monkeypatch.setattr(os, "execve", lambda program, argv, environment: seen.update(environment) or 0)
    for name in ("WORLD_SIZE", "RANK", "MASTER_ADDR", "TORCHELASTIC_RUN_ID"):
        monkeypatch.setenv(name, "2")
    assert main(["trainer", f"run.dir={tmp_path / 'mine'}"]) == 0
    assert not {"WORLD_SIZE", "RANK", "MASTER_ADDR", "TORCHELASTIC_RUN_ID"} & set(seen)
    assert seen["PYTHONHASHSEED"] == "0"


@pytest.mark.parametrize("role", ["trainer", "orchestrator"])
def test_a_role_that_would_be_alone_is_refused(role: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([role]) == 2
    assert "fix: run.dir=PATH" in capsys.readouterr().err
