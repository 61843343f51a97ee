"""What the displays suggest after data was made, and after training."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlx.cli.console import Console
from rlx.cli.console_sft import SftConsole
from rlx.cli.synthesized import SynthesisDisplay
from rlx.config.load import compose
from rlx.config.roots import SFT, SYNTHESIZE


@pytest.mark.parametrize(("envs", "said"), [(["sums"], "env=sums"), (["my_own"], "env=…"), ([], "env=…")])
def test_the_environments_of_synthesized_data_are_suggested_for_training(tmp_path: Path, envs: list[str], said: str) -> None:
    if envs:
        (tmp_path / "metadata.json").write_text(json.dumps({"environments": {name: {} for name in envs}}))
    (tmp_path / "train.parquet").touch()
    cfg = compose([f"data.name={tmp_path / 'train.parquet'}", f"run.dir={tmp_path / 'run'}"], {}, SFT).cfg
    lines = SftConsole(tmp_path / "run", cfg)._next(0)
    assert f" {said} model=" in lines[0]


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([], "model=tiny_trained"),
        (["model=smollm2_135m"], "model=smollm2_135m"),
        (["experiment=sums_smollm2", "eval.interval=5"], "train experiment=sums_smollm2"),
        (
            ["--config-dir", "examples/word_guess", "experiment=word_guess"],
            "train --config-dir examples/word_guess experiment=word_guess model=tiny_trained",
        ),
        (["--config-dir=examples/smollm2", "experiment=smollm2"], "train --config-dir=examples/smollm2 experiment=smollm2"),
    ],
)
def test_training_goes_on_with_the_model_that_was_trained(tmp_path: Path, argv: list[str], said: str) -> None:
    cfg = compose(["data=fake", f"run.dir={tmp_path / 'run'}", *argv], {}, SFT).cfg
    lines = SftConsole(tmp_path / "run", cfg, argv=argv)._next(0)
    assert f" {said} model.name={tmp_path / 'run'}" in lines[0]


def test_the_model_that_wrote_the_data_is_suggested_for_training_on_it(tmp_path: Path) -> None:
    cfg = compose(["env=sums"], {}, SYNTHESIZE).cfg
    (tmp_path / "initial_model.txt").write_text("/cache/tiny\n")
    assert SynthesisDisplay(tmp_path, cfg, ["env=sums"])._model() == "model=tiny_trained model.name=/cache/tiny"
    other = compose(["env=math", "model=qwen3_0_6b"], {}, SYNTHESIZE).cfg
    assert SynthesisDisplay(tmp_path, other, ["env=math", "model=qwen3_0_6b"])._model() == "model=qwen3_0_6b"


def test_a_suggested_command_has_a_gap_for_a_secret(tmp_path: Path) -> None:
    secrets = ["teacher.base_url=[http://host:8000]", "teacher.api_key=hidden", "loss=opd"]
    cfg = compose(secrets, {}).cfg
    lines = Console(tmp_path, cfg, secrets)._next(0)
    assert "hidden" not in lines[0]
    assert "teacher.api_key=<secret>" in lines[0]
