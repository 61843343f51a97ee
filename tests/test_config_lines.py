"""What a command line and variables may leave without quotes, and which groups take several options."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlx.config.errors import ConfigError
from rlx.config.load import compose
from rlx.config.overrides import COMBINED
from rlx.config.shipped import shipped_groups
from rlx.config.sweeps import expand


def test_the_combined_groups_exist():
    assert set(COMBINED) < set(shipped_groups())


def test_groups_that_combine_take_a_list():
    composed = compose(["env=[sums,reverse_text]", "experiment=[sums_tiny,reverse_text_lora]", "logger=[tensorboard]", "loss=[gspo]"], {})
    assert composed.choices["env"] == "sums+reverse_text"
    assert composed.choices["experiment"] == "sums_tiny+reverse_text_lora"
    assert composed.choices["loss"] == "gspo", "a list of one is one option"


def test_a_group_of_the_users_own_takes_a_list(tmp_path: Path):
    (tmp_path / "part").mkdir()
    for name, value in (("a", "seed: 5"), ("b", "max_steps: 7")):
        (tmp_path / "part" / f"{name}.yaml").write_text(f"# @package _global_\n{value}\n")
    cfg = compose(["--config-dir", str(tmp_path), "+part=[a,b]"], {}).cfg
    assert (cfg.seed, cfg.max_steps) == (5, 7)


@pytest.mark.parametrize("key", ["loss", "optim", "hardware", "model", "advantage", "launcher", "slurm"])
def test_other_groups_take_one_option(key: str):
    options = [path.stem for path in sorted(shipped_groups()[key].glob("*.yaml"))][:2]
    with pytest.raises(ConfigError) as caught:
        compose([f"{key}=[{','.join(options)}]"], {})
    (problem,) = caught.value.problems
    assert f"a configuration has one {key}, not {' and '.join(options)}. For one run per value: -m {key}=" in problem
    with pytest.raises(ConfigError, match=f"a configuration has one {key}"):
        compose([], {f"RLX_{key.upper()}": f"[{','.join(options)}]"})


def test_a_path_with_a_comma_or_letters_of_other_languages_needs_no_quotes_if_it_exists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    folder = "outputs/läufe/loss=grpo,seed=1"
    found = expand([f"resume='{folder}'", f"run.dir='{folder}'", "seed=1,2", "dry_run=true"], {})
    assert found.directory == folder
    assert [compose(element.argv, {}).cfg.resume for element in found.elements] == [folder] * 2
    with pytest.raises(ConfigError, match="cannot be parsed"):
        compose([f"resume={folder}", "dry_run=true"], {})
    Path(folder).mkdir(parents=True)
    shown = f"./{folder}"  # another text, as parsed lines are kept
    swept = expand([f"run.dir={shown}", "seed=1,2", "dry_run=true"], {})
    assert (swept.directory, len(swept.elements)) == (shown, 2)
    assert compose([f"run.dir=./{folder}", "dry_run=true"], {}).cfg.run.dir == f"./{folder}"


@pytest.mark.parametrize("text", ["2024_06_01", "1e3", "007", "0x10"])
def test_a_key_of_text_keeps_what_looks_like_a_number(text: str):
    composed = compose([f"run.name={text}", f"+slurm.partition={text}", "launcher=slurm", "hardware=cpu", "dry_run=true"], {})
    assert (composed.cfg.run.name, composed.cfg.slurm.partition) == (text, text)
    assert composed.overrides[0] == f"run.name={text}", "as it was written"
    assert compose(["optim.lr=1e-3", "max_steps=1_0"], {}).cfg.max_steps == 10


def test_the_advice_for_a_text_with_a_comma_works():
    lines = ['slurm.partition="gpu,preemptible"', "launcher=slurm", "hardware=cpu", "dry_run=true"]
    assert compose(lines, {}).cfg.slurm.partition == "gpu,preemptible"
