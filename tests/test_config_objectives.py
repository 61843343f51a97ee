"""The shipped objectives keep their papers' constants, and one environment may have an objective of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlx.config.errors import ConfigError
from rlx.config.load import compose
from rlx.config.objectives import scored_by, trained_by
from rlx.config.schema import Config, LossTerms, split_terms

# preset: objective, its own keys, aggregate, advantage
PRESETS = {
    "reinforce": ("reinforce", {}, "token_mean", "none"),
    "grpo": ("grpo", {"eps_low": 0.2, "eps_high": 0.2}, "seq_mean", "group_norm"),
    "dr_grpo": ("grpo", {"eps_low": 0.2, "eps_high": 0.2}, "fixed_length", "group_mean"),
    "dapo": ("grpo", {"eps_low": 0.2, "eps_high": 0.28}, "token_mean", "group_norm"),
    "gspo": ("gspo", {"eps_low": 3e-4, "eps_high": 4e-4}, "seq_mean", "group_norm"),
    "gspo_token": ("gspo_token", {"eps_low": 3e-4, "eps_high": 4e-4}, "seq_mean", "group_norm"),
    "rloo": ("rloo", {"cap": 10.0}, "seq_sum", "leave_one_out"),
    "opo": ("opo", {"cap": 10.0}, "token_mean", "opo"),
    "cispo": ("cispo", {"eps_low": 1.0, "eps_high": 4.0}, "token_mean", "group_norm"),
    "aipo": ("aipo", {"delta": 8.0}, "token_mean", "group_mean"),
    "masked_is": (
        "masked_is",
        {"token_low": 0.125, "token_high": 8.0, "mean_low": 0.1, "mean_high": 10.0, "token_max": 100.0, "kl_tau": 0.0},
        "token_mean",
        "group_mean",
    ),
    "dppo": ("dppo", {"d_low": 0.2, "d_high": 0.2, "kl_tau": 1e-3}, "token_mean", "group_mean"),
    "sapo": ("sapo", {"tau_pos": 1.0, "tau_neg": 1.05}, "seq_mean", "group_norm"),
    "sft": ("sft", {}, "token_mean", "none"),
    "opd": ("opd", {"delta": 8.0}, "token_mean", "none"),
    "sdft": ("sdft", {"delta": 8.0}, "token_mean", "none"),
}


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_has_its_papers_constants(name: str):
    teacher = ["teacher.demonstration=answer", "inference.max_model_len=128"] if name == "sdft" else ["ref.name=a/teacher"]
    cfg = compose([f"loss={name}", *teacher], {}).cfg
    terms, own = split_terms(cfg.loss, LossTerms)
    target = own.pop("_target_").rpartition(".")[2]
    assert (target, own, terms.aggregate, cfg.advantage["_target_"].rpartition(".")[2]) == PRESETS[name]
    assert (terms.kl.beta, terms.entropy_coef, terms.dual_clip, terms.correction) == (0, 0, None, "none")
    assert terms.proximal == ("recompute" if name in ("gspo", "gspo_token") else "inference")
    assert cfg.reward.soft_overlong is (name == "dapo")
    assert (cfg.orchestrator.difficulty_filter.min_reward_variance is not None) is (name == "dapo"), "dynamic sampling"


def test_the_constants_of_advantages():
    assert compose(["advantage=ema"], {}).cfg.advantage["decay"] == 0.95
    for name in ("group_norm", "batch_norm"):
        assert {k: v for k, v in compose([f"advantage={name}"], {}).cfg.advantage.items() if k in ("ddof", "eps")} == {
            "ddof": 1,
            "eps": 1e-6,
        }


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
