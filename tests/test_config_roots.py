"""A command needs only a root to be configured like `train`. These tests add one, for an evaluation command."""

# ruff: noqa: RUF009  (key and section return dataclass fields)
from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra.core.config_store import ConfigStore

from rlx.config import composition, roots
from rlx.config.checks import check
from rlx.config.docs import render
from rlx.config.errors import ConfigError
from rlx.config.keys import MISSING, key, section
from rlx.config.load import compose, load_run
from rlx.config.roots import ROOTS, SFT, TRAIN, Root, has_key
from rlx.config.rules import RULES, applies
from rlx.config.schema import EnvConfig, InferenceConfig, ModelConfig, RunConfig, SamplingConfig
from rlx.config.tree import types_of


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


def test_rules_between_keys_that_the_root_has_hold_and_others_are_skipped(conf: Path):
    environ = {"RLX_CONFIG_DIR": str(conf)}
    with pytest.raises(ConfigError) as caught:
        compose(["inference.base_url=[other:8000]", "inference.max_model_len=100000", "sampling.min_tokens=50"], environ, PROBE)
    assert len(caught.value.problems) == 3
    assert "the engine's context is longer than the model's: inference.max_model_len=100000" in str(caught.value)
    skipped = {function.__name__ for keys, function in RULES if not applies(keys, ProbeConfig)}
    assert {"whole_groups", "room_for_prompt", "reference", "slurm_cluster"} <= skipped


def test_a_file_of_the_roots_configuration_is_the_configuration_again(conf: Path, tmp_path: Path):
    composed = compose(["rollouts=3"], {"RLX_CONFIG_DIR": str(conf)}, PROBE)
    (tmp_path / "config.yaml").write_text(composed.yaml)
    assert load_run(tmp_path, PROBE) == composed.cfg
    assert set(yaml.safe_load(composed.yaml)) == {"defaults", *ProbeConfig.__dataclass_fields__}


def keys_of(schema: Any, prefix: str = "") -> Iterator[str]:
    """All keys of a schema, but for those of environments and open nodes."""
    for f in fields(schema):
        inner = types_of(schema)[f.name]
        yield from keys_of(inner, f"{prefix}{f.name}.") if is_dataclass(inner) else [f"{prefix}{f.name}"]


@pytest.mark.parametrize("root", ROOTS, ids=lambda root: root.command)
def test_the_page_of_the_keys_names_every_key_of_every_command(root: Root):
    page = render()
    assert [key for key in keys_of(root.schema) if f"`{key}`" not in page and not key.endswith("envs")] == []


class Watched:
    """A configuration that allows a rule only the keys that it names. Reading another key fails."""

    def __init__(self, cfg: Any, keys: tuple[str, ...], prefix: str = "") -> None:
        self._cfg, self._keys, self._prefix = cfg, keys, prefix

    def __getattr__(self, name: str) -> Any:
        kind = ("plays", "hosts", "trained_elsewhere", "measured")  # what kind of run it is; a rule need not name the keys
        if not self._prefix and name in kind:
            return getattr(self._cfg, name)
        if not self._prefix and isinstance(derived := getattr(type(self._cfg), name, None), property):
            return derived.fget(self)
        if not self._prefix and inspect.isfunction(derived):
            return functools.partial(derived, self)
        key, value = f"{self._prefix}{name}", getattr(self._cfg, name)
        if any(key == known or key.startswith(known + ".") for known in self._keys):
            return value
        assert any(known.startswith(key + ".") for known in self._keys), f"reads {key}, which it does not name"
        return Watched(value, self._keys, key + ".")


class Names:
    """`rules.Show` that shows a key as its name."""

    def __call__(self, key: str, /) -> str:
        return key

    def typed(self, key: str, /) -> bool:
        return not key.startswith("lora.")  # typed without a rank, these are refused


CONFIGURATIONS = (
    "",
    "loss=masked_is loss.dual_clip=3 env=[sums,reverse_text] model.logprob_backend=liger",
    "loss=opd ref.name=a/teacher loss.kl.beta=0.1 advantage=max_rl sampling.top_p=0.9 sampling.allow_biased_ratio=true",
    "model=qwen3_8b hardware=node8 loss=gspo",
    "launcher=slurm slurm=example hardware=node8x2 model=qwen3_8b logger=[wandb,tensorboard] resume=latest run.name=x",
    "model=qwen3_0_6b hardware=gpu1_shared inference.gpu_memory_utilization=0.5 orchestrator.trajectory_strategy=interleaved",
)


@pytest.mark.parametrize(
    ("line", "root"),
    [*((line, TRAIN) for line in CONFIGURATIONS), ("data=fake", SFT), ("data.name=a/b val.name=a/c hardware=node8 model=qwen3_8b", SFT)],
)
def test_a_rule_reads_no_key_that_it_does_not_name(line: str, root: Root):
    cfg = compose([*line.split(), "dry_run=true"], {}, root).cfg
    assert check(cfg) == []
    for keys, function in RULES:
        if applies(keys, type(cfg)):
            assert list(function(Watched(cfg, keys), Names())) == []
    known = [each.schema for each in ROOTS]
    assert all(any(has_key(cls, key) for cls in known) for keys, _ in RULES for key in keys), "such a key would switch its rule off"
