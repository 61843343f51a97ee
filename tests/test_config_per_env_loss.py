"""Objectives and advantages of single environments: how they are given, and what the run then holds."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlx.config.errors import ConfigError
from rlx.config.load import compose
from rlx.config.objectives import scored_by, trained_by
from rlx.config.schema import Config

MIX = "env=[sums,reverse_text]"


def composed(*overrides: str) -> Config:
    return compose([MIX, *overrides], environ={}).cfg


def test_a_preset_is_the_whole_node_with_the_advantage_that_it_chooses():
    cfg, alone = composed("envs.sums.loss=dr_grpo", "loss=gspo"), composed("loss=dr_grpo")
    assert cfg.envs["sums"].loss == alone.loss
    assert cfg.envs["sums"].advantage == alone.advantage
    assert cfg.advantage != alone.advantage, "the other environments keep the run's"
    assert cfg.envs["reverse_text"].loss == {}
    assert [envs for _, envs in trained_by(cfg)] == [("sums",), ("reverse_text",)]


def test_keys_of_a_preset_and_of_the_runs_loss_can_differ():
    cfg = composed("envs.sums.loss=gspo", "envs.sums.loss.eps_high=0.1", "envs.reverse_text.loss.kl.beta=0.2")
    assert cfg.envs["sums"].loss["eps_high"] == 0.1
    assert cfg.envs["reverse_text"].loss == {**cfg.loss, "kl": {"beta": 0.2}}
    assert cfg.uses_reference
    assert composed("envs.sums.loss=gspo", "envs.sums.advantage=leave_one_out").envs["sums"].advantage["_target_"].endswith("leave_one_out")


def test_an_equal_objective_is_the_runs():
    cfg = composed("envs.sums.loss=grpo")
    assert len(trained_by(cfg)) == len(scored_by(cfg)) == 1


def test_a_file_may_hold_it_and_the_command_line_wins(tmp_path: Path):
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text(
        "# @package _global_\nenvs:\n  sums:\n    loss: {preset: gspo, eps_high: 0.1}\n  reverse_text:\n    loss: dr_grpo\n"
    )
    argv = ["--config-dir", str(tmp_path), MIX, "experiment=mine"]
    cfg = compose(argv, environ={}).cfg
    assert cfg.envs["sums"].loss["eps_high"] == 0.1
    assert cfg.envs["reverse_text"].loss["aggregate"] == "fixed_length"
    assert compose([*argv, "envs.reverse_text.loss.eps_low=0.1"], environ={}).cfg.envs["reverse_text"].loss["aggregate"] == "fixed_length"
    other = compose([*argv, "envs.sums.loss=cispo"], environ={}).cfg
    assert other.envs["sums"].loss == composed("loss=cispo").loss, "keys for another preset are not carried over"


def test_the_runs_own_file_is_the_same_configuration_again(tmp_path: Path):
    first = compose([MIX, "envs.sums.loss=gspo", "envs.sums.loss.eps_high=0.1"], environ={})
    (tmp_path / "config.yaml").write_text(first.yaml)
    argv = ["--config-dir", str(tmp_path), "--config-name", "config"]
    assert compose(argv, environ={}).cfg == first.cfg
    assert compose([*argv, "envs.sums.loss.eps_low=0.2"], environ={}).cfg.envs["sums"].loss["eps_low"] == 0.2


def test_a_users_own_preset_may_build_on_another(tmp_path: Path):
    (tmp_path / "loss").mkdir()
    (tmp_path / "loss" / "mine.yaml").write_text("defaults: [dr_grpo, _self_]\neps_high: ${seq_len}\n")
    argv = ["--config-dir", str(tmp_path), MIX]
    own = compose([*argv, "envs.sums.loss=mine"], environ={}).cfg.envs["sums"]
    assert own.loss == {**composed("loss=dr_grpo").loss, "eps_high": 64}
    assert own.advantage == composed("loss=dr_grpo").advantage
    with pytest.raises(ConfigError, match="sets more than an objective and its advantage, so it cannot serve one environment"):
        compose([*argv, "envs.sums.loss=dapo"], environ={})
