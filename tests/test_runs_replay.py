"""Which keys a replay may change, what it is compared with, and what the user is told of it."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from test_runs_rewind import ended, make, settled

from rlx.config.errors import ConfigError
from rlx.config.load import compose, to_yaml
from rlx.config.objectives import loss_of
from rlx.config.schema import Config
from rlx.parallel.mesh import one_process
from rlx.paths import RunPaths
from rlx.policy.source import source_of
from rlx.runs.replay import without_effect
from rlx.runs.replay_setup import changes, label_of, other_objective


@functools.cache
def composed(*overrides: str) -> Config:
    return compose(list(overrides), environ={}).cfg


RECORDED = ("env=reverse_text", "hardware=cpu", "loss=grpo")


@pytest.mark.parametrize(
    "overrides",
    [
        ["loss=gspo", "loss.kl.beta=0.1", "optim.lr=1e-5"],
        ["trainer.micro_batch_tokens=4096", "trainer.num_minibatches=4", "trainer.num_iterations=2"],
        ["hardware.trainer_processes=2", "ckpt.interval=3", "max_steps=7", "scheduler.warmup_steps=1"],
        ["envs.reverse_text.loss=gspo", "envs.reverse_text.loss.eps_high=0.1"],
        ["logger=tensorboard", "run.name=x", "weight_broadcast.keep_last=5", "inference.api_key=k", "inference.gpu_memory_utilization=0.4"],
    ],
)
def test_what_the_trainer_does_may_differ(overrides: list[str]) -> None:
    assert list(without_effect(composed(*RECORDED, *overrides), composed(*RECORDED))) == []


@pytest.mark.parametrize(
    ("overrides", "alike"),
    [
        ([], True),
        (["hardware.trainer_processes=2", "max_steps=7", "logger=tensorboard"], True),
        (["loss=rloo"], False),
        (["optim.lr=1e-5"], False),
        (["envs.reverse_text.loss=gspo"], False),
    ],
)
def test_a_replay_with_the_runs_own_training_has_its_versions(tmp_path: Path, overrides: list[str], alike: bool) -> None:
    (tmp_path / "config.yaml").write_text(to_yaml(composed(*RECORDED)))
    cfg = replace(composed(*RECORDED, *overrides), replay=str(tmp_path))
    assert source_of(cfg, RunPaths(tmp_path / "again"), one_process("cpu"), "model").own is alike


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("seed=5", "seed is 5, and the run was recorded with 0"),
        ("sampling.temperature=0.7", "sampling.temperature is 0.7, and the run was recorded with 1.0"),
        ("orchestrator.rollouts_per_example=4", "orchestrator.rollouts_per_example is 4, and the run was recorded with 8"),
        ("reward.soft_overlong=true", "reward.soft_overlong is True, and the run was recorded with False"),
        ("loss.mask_overlong=true", "loss.mask_overlong is True, and the run was recorded with False"),
        ("envs.reverse_text.loss.mask_overlong=true", "envs.reverse_text.loss.mask_overlong is True, and the run was recorded with None"),
        ("inference.max_num_seqs=8", "inference.max_num_seqs is 8, and the run was recorded with 256"),
        ("weight_broadcast.verify_every=4", "weight_broadcast.verify_every is 4, and the run was recorded with 16"),
        ("eval.rollouts_per_example=3", "eval.rollouts_per_example is 3, and the run was recorded with 1"),
        ("model.reasoning_parser=qwen3", "model.reasoning_parser is qwen3, and the run was recorded with auto"),
        ("teacher.batch_size=8", "teacher.batch_size is 8, and the run was recorded with 16"),
        ("max_async_level=3", "max_async_level is 3, and the run was recorded with 1"),
        ("envs.reverse_text.weight=2", "envs.reverse_text.weight is 2.0, and the run was recorded with 1.0"),
        (
            "advantage=group_mean",
            "advantage._target_ is rlx.advantages.group.group_mean, and the run was recorded with rlx.advantages.group.group_norm",
        ),
    ],
)
def test_what_made_the_batches_may_not(override: str, problem: str) -> None:
    found = list(without_effect(composed(*RECORDED, override), composed(*RECORDED)))
    assert problem in found
    assert len(found) <= 4, found


def test_another_environment_is_refused_in_one_line() -> None:
    found = list(without_effect(composed(*RECORDED[1:], "env=[sums,reverse_text]"), composed(*RECORDED)))
    assert "the environments are reverse_text, sums, and the run was recorded with reverse_text" in found
    assert not any("envs.sums" in line for line in found), "its keys add nothing"


def test_a_replay_that_asks_for_something_without_effect_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    source = ended(tmp_path / "run")
    changes: dict[str, Any] = {"replay": str(source.root), "max_steps": 9}
    cfg = settled(tmp_path / "again", **changes)
    wrong = replace(cfg, sampling=replace(cfg.sampling, temperature=0.5), seed=7)
    with pytest.raises(ConfigError) as refused:
        make(wrong)
    said = str(refused.value)
    assert f"replay={source.root} trains on batches that already exist" in said
    assert "sampling.temperature is 0.5, and the run was recorded with 1.0" in said
    assert f"seed is 7, and the run was recorded with {cfg.seed}" in said
    assert f"--config-dir {source.root} --config-name config replay={source.root}" in said
    assert not (tmp_path / "again").exists()
    make(cfg)


def test_a_run_is_replayed_without_its_secrets_which_only_its_owner_may_read(tmp_path: Path) -> None:
    source = ended(tmp_path / "run", inference=replace(settled(tmp_path / "run").inference, api_key="a-key"))
    source.secrets.unlink()
    make(settled(tmp_path / "again", replay=str(source.root), max_steps=9))


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
