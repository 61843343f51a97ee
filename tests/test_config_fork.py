"""A fork starts from the configuration of its source, and the command line changes only what it says."""

from __future__ import annotations

from pathlib import Path

import pytest
from given_away import give_away

from rlx.config.errors import ConfigError
from rlx.config.load import compose, to_yaml
from rlx.config.roots import SFT
from rlx.config.sweeps import expand

SOURCE = (
    "env=sums",
    "loss=gspo",
    "advantage=leave_one_out",
    "optim.lr=3e-4",
    "orchestrator.batch_size=64",
    "envs.sums.args.level=2",
    "max_steps=40",
)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    run = tmp_path / "mine"
    (run / "checkpoints" / "step_20").mkdir(parents=True)
    (run / "config.yaml").write_text(to_yaml(compose([*SOURCE, f"run.dir={run}", "run.name=mine", "hardware=cpu"], {}).cfg))
    return run


@pytest.mark.parametrize("place", ["", "checkpoints/step_20"])
def test_a_fork_changes_what_the_command_line_says_and_nothing_else(source: Path, place: str) -> None:
    before = compose([*SOURCE, "hardware=cpu"], {}).cfg
    cfg = compose([f"resume={source / place}", "run.name=branch", "optim.lr=1e-5"], {}).cfg
    assert (cfg.loss, cfg.advantage, cfg.envs, cfg.orchestrator) == (before.loss, before.advantage, before.envs, before.orchestrator)
    assert (cfg.optim["lr"], cfg.max_steps, cfg.run.name, cfg.run.dir) == (1e-5, 40, "branch", None)
    assert compose([f"resume={source / place}", "envs.sums.args.level=1"], {}).cfg.envs["sums"].args["level"] == 1


def test_another_option_of_a_group_replaces_its_section(source: Path) -> None:
    other = compose([f"resume={source}", "loss=dapo", "loss.eps_high=0.3", "env=reverse_text"], {}).cfg
    here = compose(["loss=dapo", "loss.eps_high=0.3", "env=reverse_text", "hardware=cpu"], {}).cfg
    assert (other.loss, other.advantage, other.envs) == (here.loss, here.advantage, here.envs)
    assert (other.optim["lr"], other.orchestrator.batch_size, other.max_steps) == (3e-4, 64, 40)


def test_a_fork_takes_what_an_experiment_or_a_sweep_says_and_the_last_of_two_sources(source: Path, tmp_path: Path) -> None:
    (tmp_path / "conf" / "experiment").mkdir(parents=True)
    (tmp_path / "conf" / "experiment" / "slow.yaml").write_text("# @package _global_\noptim: {lr: 1e-6}\n")
    cfg = compose([f"resume={source}", "--config-dir", str(tmp_path / "conf"), "experiment=slow"], {}).cfg
    assert (cfg.optim["lr"], cfg.loss["_target_"], cfg.max_steps) == (1e-6, "rlx.losses.gspo.gspo", 40)
    elements = expand([f"resume={source}", "sweeps=seeds"], {}).elements
    assert [compose(list(each.argv), {}).cfg.loss["_target_"] for each in elements][:2] == ["rlx.losses.gspo.gspo"] * 2
    assert compose(["resume=latest", f"resume={source}", "run.name=x"], {}).cfg.max_steps == 40
    assert compose([f"resume={source}", "resume=null"], {}).cfg.max_steps == 100


def test_what_a_fork_cannot_take_is_refused_or_left_alone(source: Path, tmp_path: Path) -> None:
    assert compose([f"resume={source}", "hardware=auto", "logger=null"], {}).cfg.hardware.name == "cpu"
    named = compose(["--config-dir", str(source), "--config-name", "config", f"resume={source}", "run.name=x"], {}).cfg
    assert named.loss["_target_"] == "rlx.losses.gspo.gspo"
    with pytest.raises(ConfigError, match=r"there is no .*/gone\.\n  fix: name a run directory"):
        compose([f"resume={tmp_path / 'gone'}"], {})
    assert compose([f"resume={source}", "data=fake"], {}, SFT).cfg.loss["_target_"] == "rlx.losses.sft.sft", "a run of another command"


@pytest.mark.parametrize("where", ["RLX_RESUME", "experiment"])
def test_a_fork_that_is_not_on_the_command_line_is_refused(source: Path, tmp_path: Path, where: str) -> None:
    """Only the command line is read before the files, so the rest would be rlx's defaults and not the source's configuration."""
    argv, environ = ["optim.lr=1e-5"], {"RLX_RESUME": str(source)} if where == "RLX_RESUME" else {}
    if not environ:
        (tmp_path / "conf" / "experiment").mkdir(parents=True)
        (tmp_path / "conf" / "experiment" / "branch.yaml").write_text(f"# @package _global_\nresume: {source}\n")
        argv += ["--config-dir", str(tmp_path / "conf"), "+experiment=branch"]
    with pytest.raises(ConfigError, match=rf"makes a fork.*\n  fix: add resume={source}"):
        compose(argv, environ)


def test_the_run_of_another_user_does_not_execute_code(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = source / "config.yaml"
    file.write_text(file.read_text().replace("rlx.losses.gspo.gspo", "evil.loss"))
    give_away(file, monkeypatch)
    with pytest.raises(ConfigError, match=r"loss\._target_=evil\.loss\.\n  fix: read that code"):
        compose([f"resume={source}"], {})
