"""A command needs only a root to be configured like `train`. These tests add one, for an evaluation command."""

# ruff: noqa: RUF009  (key and section return dataclass fields)
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from hydra.core.config_store import ConfigStore

from rlx.config import composition, roots
from rlx.config.errors import ConfigError
from rlx.config.keys import MISSING, key, section
from rlx.config.load import compose, load_run
from rlx.config.roots import ROOTS, TRAIN, Root
from rlx.config.schema import EnvConfig, InferenceConfig, ModelConfig, RunConfig, SamplingConfig


@dataclass
class ProbeConfig:
    """Some sections of the schema and one key of its own, without trainer, loss and sample length."""

    rollouts: int = key(MISSING, "rollouts of each example", low=1)
    seed: int = key(0, "seed of sampling")
    dry_run: bool = key(False, "start nothing")
    run: RunConfig = section(RunConfig)
    model: ModelConfig = section(ModelConfig)
    envs: dict[str, EnvConfig] = key({}, "the environments by name")
    sampling: SamplingConfig = section(SamplingConfig)
    inference: InferenceConfig = section(InferenceConfig)


PROBE = Root("probe", ProbeConfig)
PRIMARY = """
defaults:
  - rlx_schema
  - _self_
  - env: [sums]
  - model: tiny
  - rlx_variables
  - optional experiment: null
rollouts: 4
"""


@pytest.fixture
def conf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory with the root's primary file; the root is registered as a command's root would be."""
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "probe.yaml").write_text(PRIMARY)
    assert composition.ROOTS is ROOTS  # imported before the replacement, or the whole session would keep it
    monkeypatch.setattr(roots, "ROOTS", (TRAIN, PROBE))
    yield tmp_path / "conf"
    ConfigStore.instance().repo.pop(f"{PROBE.schema_name}.yaml", None)  # a later test lists what can be chosen


def test_groups_variables_and_the_command_line_reach_another_root(conf: Path):
    environ = {"RLX_CONFIG_DIR": str(conf), "RLX_ENV": "reverse_text", "RLX_SAMPLING__MAX_TOKENS": "7"}
    composed = compose(["rollouts=2", "inference.max_num_seqs=9"], environ, PROBE)
    cfg = composed.cfg
    assert isinstance(cfg, ProbeConfig)
    assert (cfg.rollouts, list(cfg.envs), cfg.sampling.max_tokens, cfg.inference.max_num_seqs) == (2, ["reverse_text"], 7, 9)
    assert cfg.model.name == "tiny"
    assert composed.label == "reverse_text-tiny"


def test_what_files_and_variables_hold_for_another_command_is_passed_over(conf: Path):
    environ = {"RLX_CONFIG_DIR": str(conf), "RLX_MAX_STEPS": "3", "RLX_LOSS": "gspo", "RLX_TRAINER__COMPILE": "true"}
    assert compose([], environ, PROBE).cfg.rollouts == 4, "model=tiny sets optim.lr, the environment max_steps"
    with pytest.raises(ConfigError, match="RLX_MAX_STEP sets no configuration key"):
        compose([], environ | {"RLX_MAX_STEP": "3"}, PROBE)


def test_all_mistakes_of_a_command_line_are_found_by_the_roots_own_schema(conf: Path):
    with pytest.raises(ConfigError) as caught:
        compose(["rolouts=3", "optim.lr=1", "sampling.top_p=7", "seed=x", "model.nme=y"], {"RLX_CONFIG_DIR": str(conf)}, PROBE)
    text = str(caught.value)
    assert len(caught.value.problems) == 5
    for part in (
        "unknown key `rolouts` (command line). Did you mean `rollouts`?",
        "unknown key `optim.lr` (command line). It is a key of `rlx train`.",
        "`sampling.top_p` must be above 0 and at most 1: sampling.top_p=7.0 (command line).",
        "`seed` must be an integer: seed=x (command line).",
        "unknown key `model.nme` (command line). Did you mean `model.name`",
    ):
        assert part in text, text
    with pytest.raises(ConfigError, match=r"unknown key `loss` \(command line\). It is a key of `rlx train`"):
        compose(["loss=gspo"], {"RLX_CONFIG_DIR": str(conf)}, PROBE)


def test_a_file_of_the_roots_configuration_is_the_configuration_again(conf: Path, tmp_path: Path):
    composed = compose(["rollouts=3"], {"RLX_CONFIG_DIR": str(conf)}, PROBE)
    (tmp_path / "config.yaml").write_text(composed.yaml)
    assert load_run(tmp_path, PROBE) == composed.cfg
    assert set(yaml.safe_load(composed.yaml)) == {"defaults", *ProbeConfig.__dataclass_fields__}
