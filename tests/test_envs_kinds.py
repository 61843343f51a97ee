"""Which kind of environment a name stands for, and loading one."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from types import SimpleNamespace

import pytest

from rlx.config.schema import EnvConfig
from rlx.envs.kinds import kind_of, load_one
from rlx.envs.wire import Settings
from rlx.runs.provenance import snapshot_environment

TASKSET = "import verifiers.v1 as vf\nclass MyTaskset(vf.Taskset[vf.Task, vf.TasksetConfig]): pass\n"


@pytest.fixture
def package(tmp_path, monkeypatch):
    """`write(name, **files)`: a package of these files on the path."""
    monkeypatch.syspath_prepend(tmp_path)

    def write(name: str, **files: str) -> str:
        (tmp_path / name).mkdir()
        for file, text in files.items():
            (tmp_path / name / f"{file}.py").write_text(textwrap.dedent(text))
        return name

    return write


@pytest.mark.parametrize(
    ("files", "kind"),
    [
        ({"__init__": "def load_environment(): ..."}, "classic"),
        ({"__init__": "from .env import load_environment", "env": "def load_environment(): ..."}, "classic"),
        ({"__init__": "from .env import make as load_environment", "env": "def make(): ..."}, "classic"),
        ({"__init__": "try:\n  import x\nexcept ImportError:\n  x = 1\nload_environment = lambda: x"}, "classic"),
        ({"__init__": TASKSET + "__all__ = ['MyTaskset']"}, "v1"),
        ({"__init__": "from rlx_kind_5.tasks import MyTaskset\n__all__ = ['MyTaskset']", "tasks": TASKSET}, "v1"),
        ({"__init__": "from .tasks import Other as Mine\n__all__ = ['Mine']", "tasks": TASKSET + "class Other(MyTaskset): pass"}, "v1"),
        ({"__init__": "from verifiers.v1.tasksets.textarena import TextArenaTaskset as T\nclass A(T): ...\n__all__ = ['A']"}, "v1"),
        ({"__init__": TASKSET + "__all__ = ['MyTaskset']\ndef load_environment(): ..."}, "classic"),
        ({"__init__": "from .inner import *", "inner": "def load_environment(): ..."}, "classic"),
    ],
)
def test_a_module_shows_its_kind(package, files, kind, request):
    name = package(f"rlx_kind_{request.node.callspec.indices['files']}", **files)
    assert kind_of(name) == kind


def test_names_are_those_of_both_kinds_of_verifiers(package):
    name = package("my_env", __init__="def load_environment(): ...")
    assert name == "my_env"
    assert {kind_of(one) for one in ("my_env", "my-env", "owner/my-env", "owner/my-env@0.1.2")} == {"classic"}
    assert kind_of("textarena") == "v1"  # one of verifiers' own


def test_a_package_that_is_none_says_what_it_lacks(package):
    package("rlx_none", __init__="x = 1\n__all__ = ['x']\nclass x: ...")
    with pytest.raises(ValueError, match=r"no function load_environment .classic., and its __all__ names no Taskset class .v1."):
        kind_of("rlx_none")
    with pytest.raises(ValueError, match="'rlx-nowhere' is not installed: there is no module rlx_nowhere"):
        kind_of("rlx-nowhere")


def test_a_script_that_an_environment_starts_in_a_job_imports_the_modules_beside_it(tmp_path, monkeypatch):
    (tmp_path / "solution.py").write_text("answer = 42\n")
    (tmp_path / "score.py").write_text("import solution; print(solution.answer)\n")

    def load_environment(*_: object) -> str:
        return subprocess.run([sys.executable, tmp_path / "score.py"], capture_output=True, text=True, check=False).stdout

    monkeypatch.setattr("rlx.envs.kinds.kind_of", lambda _: "v1")
    monkeypatch.setitem(sys.modules, "rlx.envs.verifiers_v1", SimpleNamespace(load_environment=load_environment))
    for name, value in snapshot_environment(tmp_path / "code").items():
        monkeypatch.setenv(name, value)
    assert load_one("e", EnvConfig(id="stand_in"), Settings({})) == "42\n"
