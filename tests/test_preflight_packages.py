"""Installing environments: what is asked of the installer, and what follows. `test_run_env_command.py` installs."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest

from rlx.cli import main
from rlx.cli.env import next_commands
from rlx.cli.env_check import overrides
from rlx.config.load import compose
from rlx.config.roots import EVAL
from rlx.preflight import packages


def test_what_is_to_be_installed_is_a_folder_a_package_one_of_the_hub_or_an_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pyproject.toml").write_text("")
    folder = packages.Wanted(f"-e {tmp_path}", tmp_path.name)
    assert packages.wanted(str(tmp_path)) == folder
    monkeypatch.chdir(tmp_path)
    assert packages.wanted(".") == folder
    assert packages.wanted("my-env[all]==1.2") == packages.Wanted("my-env[all]==1.2", "my-env")
    assert packages.wanted("git+https://host/owner/name.git@main") == packages.Wanted("git+https://host/owner/name.git@main", "name")
    index = "https://hub.primeintellect.ai/owner/simple/"
    assert packages.wanted("owner/my-env@0.1.2") == packages.Wanted("my-env==0.1.2", "my-env", index)
    assert packages.wanted("owner/my-env") == packages.wanted("owner/my-env@latest") == packages.Wanted("my-env", "my-env", index)


def test_a_check_is_an_evaluation_on_training_examples_without_retries() -> None:
    env, arguments = overrides("math", ["num_examples=4", "model=qwen3_0_6b"])
    cfg = compose(arguments, {}, EVAL).cfg
    assert env == "math"
    assert (cfg.num_examples, cfg.rollouts_per_example, cfg.orchestrator.max_retries, cfg.envs["math"].split) == (4, 8, 0, "train")
    assert cfg.orchestrator.max_error_rate == 1
    env, arguments = overrides("rlx-sums", ["env.split=eval"])
    assert (env, compose(arguments, {}, EVAL).cfg.envs["sums"].split) == ("sums", "eval")
    env, arguments = overrides("rlx_test_single", [])
    assert (env, {"env=custom", "envs.custom.id=rlx_test_single"} <= {*arguments}) == ("custom", True)


def test_the_commands_that_follow_name_the_shipped_option_and_a_model_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["rlx", "env"])  # an installed rlx: there is no train.py
    assert next_commands("rlx-math") == ["rlx env check math", "rlx train env=math"]
    assert next_commands("my-env")[1] == "rlx train env=custom envs.custom.id=my-env"
    assert next_commands("rlx-sums", 30) == ["rlx env check sums", "rlx train env=sums"]
    long = next_commands("rlx-tool-math", 64)
    assert long == ["rlx env check tool_math model=qwen3_0_6b", "rlx train env=tool_math model=qwen3_0_6b"]


def test_the_commands_that_follow_survive_a_shell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["rlx", "env"])
    monkeypatch.chdir(tmp_path)
    assert main(["env", "init", "my-env", "--folder", "my env"]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "rlx env install" in line]
    assert shlex.split(line) == ["rlx", "env", "install", "./my env"]


def test_what_is_not_installed_is_said_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env", "info", "nothere"]) == 2
    assert "nothere is not installed.\n  fix: `rlx env list` shows what is" in capsys.readouterr().err
