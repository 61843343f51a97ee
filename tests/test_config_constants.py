"""The shipped objectives keep the constants of their papers. A number changed by accident would change what a preset's name means."""

from __future__ import annotations

import pytest

from rlx.config.load import compose
from rlx.config.schema import LossTerms, split_terms

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
