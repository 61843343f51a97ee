"""`rlx env init`, `list` and `info`: what is written, what is found without importing it, and what is said of an environment."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from rlx.cli import main
from rlx.config.load import compose
from rlx.config.schema import EnvConfig
from rlx.envs import describe, kinds
from rlx.envs.kinds import kind_of
from rlx.envs.probe import probe
from rlx.envs.scaffold import FLAVOURS

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[1]
ARGUMENTS = {"single-turn": [], "multi-turn": ["--kind", "multi-turn"], "tools": ["--kind", "tools"], "v1": ["--v1"]}


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("PYTHONPATH", "")


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_a_new_package_is_clean_passes_its_own_test_and_trains_by_the_printed_command(
    flavour: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = f"written_{flavour.replace('-', '_')}"
    assert main(["env", "init", module, *ARGUMENTS[flavour]]) == 0
    printed = capsys.readouterr().out
    folder = tmp_path / module
    text = "".join(path.read_text() for path in folder.rglob("*") if path.is_file())
    assert "@" not in text.replace("@vf.", "")
    ruff = Path(sys.executable).with_name("ruff")
    for command in (["check"], ["format", "--check"]):
        subprocess.run([ruff, *command, "--config", ROOT / "pyproject.toml"], check=True, capture_output=True, cwd=folder)
    (train,) = [line.split()[2:] for line in printed.splitlines() if line.startswith("  rlx train")]
    assert " ".join(train) in text
    assert compose(train, {}).cfg.envs["custom"].id == module.replace("_", "-")
    monkeypatch.syspath_prepend(folder)
    assert kind_of(module) == ("v1" if flavour == "v1" else "classic")
    monkeypatch.syspath_prepend(folder / "tests")
    tests = importlib.import_module(f"test_{module}")
    for name in [name for name in vars(tests) if name.startswith("test_")]:
        getattr(tests, name)()


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (["init", "import"], "cannot be the name"),
        (["init", "json"], "cannot be the name"),
        (["init", "Nice Env"], "cannot be the name"),
        (["init", "yaml"], "there is a module yaml"),
        (["init", "there"], "exists already"),
        (["init", "fine", "--kind", "chess"], "one of single-turn, multi-turn, tools"),
        (["init", "fine", "--v1", "--kind", "tools"], "there is no --kind tools --v1"),
        (["init"], "rlx env --help"),
        (["instal", "x"], "invalid choice: 'instal'"),
        ([], "rlx env --help"),
        (["install", "./absent"], "neither a folder here nor the name of a package"),
        (["install", "owner/name/more"], "neither a folder here nor the name of a package"),
    ],
)
def test_what_cannot_be_meant_is_refused_before_anything_happens(
    line: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "file").write_text("mine")
    (tmp_path / "empty").mkdir()
    assert main(["env", *line]) == 2
    assert says in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "there"]


def package(folder: Path, name: str, source: str, *, record: bool = False) -> None:
    """A package as an installer leaves it: with `top_level.txt`, or only with its list of files."""
    module = name.replace("-", "_")
    (folder / f"{module}.py").write_text(source)
    info = folder / f"{module}-1.2.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.2\nSummary: of the package\n")
    if record:
        (info / "RECORD").write_text(f"{module}.py,sha256=x,1\n")
    else:
        (info / "top_level.txt").write_text(f"{module}\n")


def test_environments_are_found_in_packages_and_never_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package(tmp_path, "found-one", '"""What it is."""\nraise SystemExit\ndef load_environment(): ...\n')
    package(tmp_path, "found-two", "import verifiers.v1 as vf\n__all__ = ['T']\nclass T(vf.Taskset): ...\n", record=True)
    package(tmp_path, "no-environment", "def load_model(): ...\n")
    package(tmp_path, "talks-of-one", "'''See load_environment.'''\n")
    monkeypatch.syspath_prepend(tmp_path)
    found = {one.name: one for one in kinds.installed() if one.source.startswith(str(tmp_path))}
    assert {name: one.kind for name, one in found.items()} == {"found-one": "classic", "found-two": "v1"}
    assert (found["found-one"].summary, found["found-one"].version) == ("of the package", "1.2")


def test_the_shipped_environments_are_listed_with_their_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env", "list"]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("rlx-math ")]
    assert line.split()[:4] == ["rlx-math", "classic", importlib.metadata.version("rlx"), "env=math"]


def test_an_environment_is_described_by_its_arguments_data_rewards_and_tools() -> None:
    found = probe("custom", EnvConfig(id="rlx-tool-math", args={"num_examples": 7}))
    assert (found.kind, found.type, found.examples) == ("classic", "ToolMath", 7)
    assert {one.name: (one.type, one.default) for one in found.arguments}["level"] == ("int", "3")
    assert next(one for one in found.arguments if one.name == "seed").doc == "seed of the problems."
    assert {one.name: one.weight for one in found.rewards if one.name in ("correct", "called_before_answering")} == {
        "correct": 1.0,
        "called_before_answering": 0.0,
    }
    assert [one.name for one in found.tools] == ["calc"]
    assert found.problem is None


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("import nothing_like_this\ndef load_environment(): ...\n", "nothing_like_this"),
        ("import verifiers as vf\ndef load_environment(level: int = 1):\n    raise OSError('no such disk')\n", "OSError: no such disk"),
        (
            "import verifiers as vf\nfrom datasets import Dataset\ndef load_environment(level: int = 1):\n"
            "    empty = Dataset.from_dict({'question': [], 'answer': []})\n"
            "    return vf.SingleTurnEnv(dataset=empty, rubric=vf.Rubric(funcs=[lambda: 1.0]))\n",
            "no examples",
        ),
        ("x = 1\n", "no verifiers environment"),
    ],
)
def test_an_environment_that_cannot_be_loaded_is_described_as_far_as_it_can_be(
    source: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    name = f"broken_{request.node.callspec.indices['source']}"
    (tmp_path / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    found = probe("custom", EnvConfig(id=name))
    assert found.problem is not None
    assert says in found.problem
    assert [one.name for one in found.arguments] == (["level"] if "level" in source else [])


def test_arguments_are_read_from_the_docstring() -> None:
    said = describe.arguments_in(
        "Load.\n\nArgs:\n    one: the first,\n        on two lines\n    two (int): the second\n\nReturns:\n    three: no\n"
    )
    assert said == {"one": "the first, on two lines", "two": "the second"}
