"""Which code the processes of a run import: that of the launcher, or of the checkout that is asked for; never what lies nearest."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import rlx
from rlx.cli import _let_children_find_the_same_code
from rlx.config.load import compose, to_yaml
from rlx.envs import boot
from rlx.launch.sbatch import sbatch_options
from rlx.runs.provenance import reproduce_script

ROOT = Path(__file__).resolve().parents[1]
SAYS = "import sys\n\nprint(__file__, *sys.argv[1:], sep='\\n')\n"
MINE = "import rlx\n\nprint(__file__, rlx.__file__, sep='\\n')\n"  # a module of the user's, in the working directory


def stub(folder: Path) -> Path:
    """A folder with a package `rlx` whose command line prints where it lies, and with a module of the user's."""
    (folder / "rlx" / "cli").mkdir(parents=True)
    for name, text in (("rlx/__init__.py", ""), ("rlx/cli/__init__.py", ""), ("rlx/cli/__main__.py", SAYS), ("mine.py", MINE)):
        (folder / name).write_text(text)
    return folder


def without_paths() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONSAFEPATH")}


def output(*command: str | Path, cwd: Path, **variables: str) -> list[str]:
    done = subprocess.run(command, cwd=cwd, env=without_paths() | variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_reproduce_runs_the_checkout_that_is_asked_for_though_the_run_was_started_in_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded, other, run = stub(tmp_path / "recorded"), stub(tmp_path / "other"), tmp_path / "a run"
    monkeypatch.chdir(recorded)
    run.mkdir()
    (run / "reproduce.sh").write_text(reproduce_script("train", None))
    # Paths are meant from where the user is, and CDPATH would have `cd` print where it went.
    given = {"RLX_SOURCE": "other", "RLX_NEW_DIR": "new", "PYTHON": os.path.relpath(sys.executable, tmp_path), "CDPATH": f".:{tmp_path}"}
    ran, *words = output("sh", "a run/reproduce.sh", "seed=5", cwd=tmp_path, **given)
    assert ran == str(other / "rlx" / "cli" / "__main__.py")
    assert words[:5] == ["train", "--config-dir", str(run), "--config-name", "config"]
    assert f"run.dir='{tmp_path / 'new'}'" in words
    assert words[-1] == "seed=5"


@pytest.mark.parametrize("given", [{}, {"PYTHONPATH": "OTHER"}, {"PYTHONPATH": f"OTHER:{ROOT}"}])
def test_processes_of_a_run_started_in_another_checkout_import_the_launchers_code(tmp_path: Path, given: dict[str, str]) -> None:
    other, launcher = stub(tmp_path / "other"), tmp_path / "launcher.py"
    launcher.write_text(
        f"import subprocess, sys\nsys.path.insert(0, {str(ROOT)!r})\n"
        "from rlx.cli import _let_children_find_the_same_code\n_let_children_find_the_same_code()\n"
        "subprocess.run([sys.executable, '-m', 'mine'], check=True)\n"
    )
    given = {name: value.replace("OTHER", str(other)) for name, value in given.items()}
    found = output(sys.executable, launcher, cwd=other, **given)
    assert found == [str(other / "mine.py"), str(ROOT / "rlx" / "__init__.py")], "a module that lies here is found, another rlx is not"


def test_an_installed_rlx_is_not_hidden_by_one_in_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rlx, "__file__", str(tmp_path / "site-packages" / "rlx" / "__init__.py"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    for folder, named in ((stub(tmp_path / "other"), ["/mine"]), (tmp_path, ["/mine", str(tmp_path)])):
        monkeypatch.setenv("PYTHONPATH", "/mine")
        monkeypatch.chdir(folder)
        _let_children_find_the_same_code()
        assert os.environ["PYTHONPATH"].split(":") == named
        assert sys.path[-1] == str(folder)


def test_who_reads_a_run_finds_modules_in_the_working_directory_although_no_variable_names_it(tmp_path: Path) -> None:
    other = stub(tmp_path / "other")
    (tmp_path / "config.yaml").write_text(to_yaml(compose([], {}).cfg))
    reads = f"from rlx.config.load import load_run\nload_run({str(tmp_path)!r})\nimport mine"
    found = output(sys.executable, "-c", reads, cwd=other, PYTHONPATH=str(ROOT), PYTHONSAFEPATH="1")
    assert found == [str(other / "mine.py"), str(ROOT / "rlx" / "__init__.py")]


def test_a_worker_keeps_the_folders_that_the_launcher_named(tmp_path: Path) -> None:
    package, here = stub(tmp_path / "code") / "rlx" / "envs", tmp_path / "here"
    package.mkdir()
    here.mkdir()
    shutil.copy(boot.__file__, package)
    (package / "__init__.py").write_text("")
    (package / "said.py").write_text("import sys\n\n\ndef main():\n    print(*sys.path, sep='\\n')\n")
    safe = output(sys.executable, package / "boot.py", "said", cwd=here, PYTHONPATH="/mine", PYTHONSAFEPATH="1")
    assert (safe[0], safe[-1]) == ("/mine", str(here))
    plain = output(sys.executable, package / "boot.py", "said", cwd=here, PYTHONPATH="/mine")
    assert plain[:2] == [str(here), "/mine"]


def test_a_job_without_a_copy_of_the_code_is_told_where_the_launchers_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/code:/here")
    monkeypatch.setenv("PYTHONSAFEPATH", "1")
    setup = sbatch_options(compose(["launcher=slurm", "slurm=dev", "dry_run=true"], {}).cfg, "name")["setup"]
    assert {"export PYTHONPATH=/code:/here", "export PYTHONSAFEPATH=1"} <= set(setup)
