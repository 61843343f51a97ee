"""What a command line and variables may leave without quotes, and which groups take several options."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlx.config.errors import ConfigError
from rlx.config.load import compose
from rlx.config.overrides import COMBINED, PATHS, line_of, parse, value_of
from rlx.config.roots import ROOTS, has_key
from rlx.config.shipped import shipped_groups
from rlx.config.sweeps import expand

FOLDER = "outputs/s/loss=grpo,seed=1"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / FOLDER).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_constants_name_groups_and_keys_that_exist():
    assert set(COMBINED) < set(shipped_groups())
    for key in PATHS:
        assert any(has_key(root.schema, key) for root in ROOTS), key


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
    assert f"a configuration has one {key}" in problem
    assert f"-m {key}={','.join(options)}" in problem
    with pytest.raises(ConfigError, match=f"a configuration has one {key}"):
        compose([], {f"RLX_{key.upper()}": f"[{','.join(options)}]"})


def test_several_options_without_a_sweep_are_one_problem():
    with pytest.raises(ConfigError) as caught:
        compose(["loss=grpo,gspo"], {})
    assert len(caught.value.problems) == 1, "not also: there is no loss=null"


def test_a_variable_needs_no_quotes_where_the_command_line_needs_none(tmp_path: Path):
    (tmp_path / "loss").mkdir()
    (tmp_path / "loss" / "größe.yaml").write_text((shipped_groups()["loss"] / "gspo.yaml").read_text())
    argv = ["--config-dir", str(tmp_path)]
    assert compose(argv, {"RLX_LOSS": "größe"}).choices["loss"] == "größe"
    assert compose([*argv, "loss=größe"], {}).choices["loss"] == "größe"


@pytest.mark.parametrize("key", ["resume", "weights_dir", "run.dir", "++run.dir"])
def test_a_path_that_exists_needs_no_quotes(here: Path, key: str):
    (parsed,) = parse([f"{key}={FOLDER}"])
    assert value_of(parsed) == FOLDER
    assert parse([line_of(parsed)])[0].value() == FOLDER, "its line can be parsed again"
    (absolute,) = parse([f"{key}={here / FOLDER}/"])
    assert value_of(absolute) == f"{here / FOLDER}/"


@pytest.mark.parametrize("name", ["a,b", "[a]", "it's", "007", "a b,c", "{x: 1}", "größe,1"])
def test_a_path_is_what_its_name_says(here: Path, name: str):
    with_folder = f"outputs/{name}"
    (here / with_folder).mkdir()
    (here / name).mkdir()
    for path in (with_folder, name):
        assert value_of(parse([f"resume={path}"])[0]) == path


def test_other_values_are_read_as_before(here: Path):
    for name in ("0,1", "null", "7"):
        (here / name).mkdir()
    assert parse(["seed=0,1"])[0].is_sweep_override(), "no path"
    assert value_of(parse(["resume=null"])[0]) is None
    assert value_of(parse(["resume='7'"])[0]) == "7"
    assert parse(["resume=outputs/a,outputs/b"])[0].is_sweep_override(), "no such path"
    with pytest.raises(ConfigError, match=r"cannot be parsed.* outputs/s/loss=gspo,seed=1 does not exist"):
        parse(["resume=outputs/s/loss=gspo,seed=1"])


def test_a_sweep_keeps_such_a_path_and_still_varies_several(here: Path):
    for name in ("a", "b"):
        (here / "outputs" / name).mkdir()
    found = expand([f"run.dir={FOLDER}", "seed=1,2", "dry_run=true"], {})
    assert found.directory == FOLDER
    assert [element.argv for element in found.elements] == [("dry_run=true", "seed=1"), ("dry_run=true", "seed=2")], "not each run's, too"
    found = expand([f"resume={FOLDER}", "seed=1,2", "dry_run=true"], {})
    assert [compose(element.argv, {}).cfg.resume for element in found.elements] == [FOLDER] * 2
    found = expand(["resume=outputs/a,outputs/b", "dry_run=true"], {})
    assert [element.swept for element in found.elements] == [("resume=outputs/a",), ("resume=outputs/b",)]


def test_the_directory_of_a_sweep_may_have_letters_of_any_language():
    found = expand(["run.dir=läufe", "seed=1,2", "dry_run=true"], {})
    assert (found.directory, found.elements[0].argv) == ("läufe", ("dry_run=true", "seed=1"))


@pytest.mark.parametrize("text", ["2024_06_01", "1e3", "007", "0x10"])
def test_a_key_of_text_keeps_what_looks_like_a_number(text: str):
    composed = compose([f"run.name={text}", f"+slurm.partition={text}", "launcher=slurm", "hardware=cpu", "dry_run=true"], {})
    assert (composed.cfg.run.name, composed.cfg.slurm.partition) == (text, text)
    assert composed.overrides[0] == f"run.name={text}", "as it was written"
    assert compose(["optim.lr=1e-3", "max_steps=1_0"], {}).cfg.max_steps == 10


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ("slurm.partition=gpu,preemptible", """For one text with a comma, quote it: 'slurm.partition="a,b"'. For one run per value"""),
        ("seed=1,2", "several values. For one run per value"),
        ("inference.base_url=a,b", "For a list, write inference.base_url=[a,b]. For"),
        ("optim.betas=0.9,0.99", "For a list, write optim.betas=[a,b]. For"),
    ],
)
def test_several_values_without_a_sweep_get_the_advice_that_their_key_takes(line: str, hint: str):
    with pytest.raises(ConfigError) as caught:
        compose([line], {})
    assert hint in str(caught.value)


def test_the_advice_for_a_text_with_a_comma_works():
    lines = ['slurm.partition="gpu,preemptible"', "launcher=slurm", "hardware=cpu", "dry_run=true"]
    assert compose(lines, {}).cfg.slurm.partition == "gpu,preemptible"
