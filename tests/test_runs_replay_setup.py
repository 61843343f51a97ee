"""Which objective a recorded step is compared with, and what the user is told of it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlx.config.errors import ConfigError
from rlx.config.load import compose, to_yaml
from rlx.config.objectives import loss_of
from rlx.runs.replay_setup import changes, label_of, other_objective

EQUAL = "this is the run's own objective, so both sides are equal"
MIX = ("inference.api_key=of-the-servers", "env=[sums,reverse_text]", "envs.sums.loss=dppo")


def run_of(root: Path, *overrides: str) -> Any:
    cfg = compose(list(overrides), {}).cfg
    (root / "config.yaml").write_text(to_yaml(cfg))
    return SimpleNamespace(root=root, config=cfg)


def test_the_objective_of_one_environment_can_be_another(tmp_path: Path) -> None:
    run = run_of(tmp_path, *MIX)
    recorded, other, notes = other_objective(
        run, ["envs.sums.loss=gspo", "envs.sums.loss.eps_high=0.01", "envs.sums.loss.proximal=inference"]
    )
    assert notes == []
    assert loss_of(other, "reverse_text") == loss_of(recorded, "reverse_text")
    assert changes(recorded, other)["envs.sums.loss._target_"] == ("rlx.losses.dppo.dppo", "rlx.losses.gspo.gspo")
    assert loss_of(other, "sums")["eps_high"] == 0.01
    _, other, notes = other_objective(run, ["loss=gspo", "envs.sums.loss=grpo"])
    assert [loss_of(other, name)["_target_"] for name in ("sums", "reverse_text")] == ["rlx.losses.grpo.grpo", "rlx.losses.gspo.gspo"]
    _, other, _ = other_objective(run, ["loss=gspo", "envs.reverse_text.loss.eps_high=0.3"])
    assert (loss_of(other, "reverse_text")["_target_"], loss_of(other, "reverse_text")["eps_high"]) == ("rlx.losses.gspo.gspo", 0.3)
    assert loss_of(other, "sums")["_target_"] == "rlx.losses.dppo.dppo"


def test_what_is_compared_with_is_the_runs_configuration_not_a_file_of_that_name(tmp_path: Path) -> None:
    run = run_of(tmp_path, "loss.eps_low=0.11")
    (tmp_path / "mine" / "loss").mkdir(parents=True)
    run_of(tmp_path / "mine", "loss.eps_low=0.44")
    _, other, _ = other_objective(run, ["--config-dir", str(tmp_path / "mine"), "loss.eps_high=0.3"])
    assert (other.loss["eps_low"], other.loss["eps_high"]) == (0.11, 0.3)


def test_equal_sides_are_noticed(tmp_path: Path) -> None:
    run = run_of(tmp_path, *MIX)
    assert EQUAL not in other_objective(run, ["loss=gspo"])[2]
    assert EQUAL in other_objective(run, ["loss=grpo"])[2]
    assert EQUAL in other_objective(run_of(tmp_path, *MIX, "envs.reverse_text.loss=grpo"), ["loss=gspo"])[2]


def test_an_objective_whose_ratios_are_all_1_at_the_recorded_weights_is_noticed(tmp_path: Path) -> None:
    run = run_of(tmp_path, *MIX)
    assert "loss.proximal=recompute: the ratios of the other" in other_objective(run, ["loss=gspo"])[2][-1]
    assert "envs.sums.loss.proximal=recompute: the ratios of the other" in other_objective(run, ["envs.sums.loss=gspo"])[2][-1]
    for other in (["loss=gspo", "loss.proximal=inference"], ["loss=aipo"]):
        assert not any("recompute" in note for note in other_objective(run, other)[2])


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["envs.sums.weight=2"], "envs.sums.weight=2: has no effect"),
        (["envs.sums.loss.mask_overlong=true"], "has no effect"),
    ],
)
def test_an_override_of_an_environment_that_says_nothing_is_refused(tmp_path: Path, overrides: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        other_objective(run_of(tmp_path, *MIX), overrides)


def test_objectives_of_one_name_from_two_folders_have_a_folder_of_results_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = ([f"--config-dir={tmp_path / name}", "loss=mine"] for name in ("one", "other"))
    assert label_of(one) != label_of(other)
    assert label_of(one).startswith("loss=mine-")
    assert label_of(["loss=mine"]) == "loss=mine"
    monkeypatch.chdir(tmp_path)
    assert label_of(["--config-dir", "one", "loss=mine"]) == label_of(one), "the same folder, written in another way"
