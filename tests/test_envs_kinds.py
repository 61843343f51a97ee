"""Which kind of environment a name stands for, from the source of its package."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

from rlx.envs import kinds
from rlx.envs.kinds import Unclear, kind_of

TASKSET = "import verifiers.v1 as vf\nclass MyTaskset(vf.Taskset[vf.Task, vf.TasksetConfig]): pass\n"


@pytest.fixture
def package(tmp_path, monkeypatch):
    """`write(name, **files)`: a package of these files on the path."""
    monkeypatch.syspath_prepend(tmp_path)
    kinds._body.cache_clear()

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
    ],
)
def test_the_source_shows_the_kind(package, files, kind, request):
    name = package(f"rlx_kind_{request.node.callspec.indices['files']}", **files)
    assert kind_of(name, importing=False) == kind
    assert name not in sys.modules


def test_names_are_those_of_both_kinds_of_verifiers(package):
    name = package("my_env", __init__="def load_environment(): ...")
    assert name == "my_env"
    assert {kind_of(one) for one in ("my_env", "my-env", "owner/my-env", "owner/my-env@0.1.2")} == {"classic"}
    assert kind_of("textarena", importing=False) == "v1"  # one of verifiers' own


def test_a_package_that_is_none_says_what_it_lacks(package):
    package("rlx_none", __init__="x = 1\n__all__ = ['x']\nclass x: ...")
    with pytest.raises(ValueError, match=r"no function load_environment .classic., and its __all__ names no Taskset class .v1."):
        kind_of("rlx_none", importing=False)
    with pytest.raises(ValueError, match="'rlx-nowhere' is not installed: there is no module rlx_nowhere"):
        kind_of("rlx-nowhere")
    with pytest.raises(ValueError, match="is not the name of an environment"):
        kind_of("my env")


def test_what_the_source_does_not_show_is_imported(package):
    package("rlx_star", __init__="from .inner import *", inner="def load_environment(): ...")
    with pytest.raises(Unclear, match="importing it does"):
        kind_of("rlx_star", importing=False)
    assert kind_of("rlx_star") == "classic"


def test_looking_imports_neither_verifiers_nor_the_environment():
    code = (
        "import sys; from rlx.envs.kinds import kind_of; kind_of('rlx-math', importing=False); "
        "assert not {'verifiers', 'rlx_math', 'torch', 'omegaconf'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
