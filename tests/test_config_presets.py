"""Every shipped preset composes, passes the checks, builds and gets a plan."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

from rlx.cli import main
from rlx.config.gpus import LAYOUTS
from rlx.config.instantiate import must_be_built
from rlx.config.load import compose, instantiate
from rlx.config.loss_traits import ATTRIBUTE, Declared
from rlx.config.presets import shipped_groups
from rlx.config.roots import SFT, TRAIN
from rlx.config.schema import LossTerms, OptimTerms, split_terms
from rlx.config.signatures import declared_by, locate, signature_of
from rlx.plan.make import make_plan
from rlx.train.trial import check_built

pytestmark = pytest.mark.slow

GROUPS = (
    "model",
    "env",
    "loss",
    "advantage",
    "optim",
    "hardware",
    "launcher",
    "slurm",
    "logger",
    "data",
    "sweeps",
    "experiment",
)
PRESETS = [(group, file.stem) for group in GROUPS for file in sorted(shipped_groups()[group].glob("*.yaml"))]
SIZES = {"context_length": 4096, "num_parameters": 1e8, "hidden_size": 256, "num_layers": 2, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 4, "vocab_size": 1000}
NEEDED = {
    ("env", "custom"): ["env.id=rlx_sums"],
    ("env", "function"): ["env.args.data=rows.jsonl", "env.args.reward=rewards.exact"],
    ("env", "ifeval"): ["launcher.check_envs=false"],  # its Python is made by hand: it needs lm-eval
    ("env", "program"): ["env.args.data=rows.jsonl", "env.args.reward=rewards.exact"],
    ("loss", "opd"): ["ref.name=a/teacher"],
    ("loss", "sdft"): ["teacher.demonstration=answer", "inference.max_model_len=128"],
    ("model", "endpoint"): ["model.name=x"],
    ("model", "named"): ["model.name=x", *(f"model.{key}={value}" for key, value in SIZES.items())],
    ("model", "tiny_trained"): ["model.name=x"],
    ("data", "rows"): ["data.name=a/b"],
    ("launcher", "slurm"): ["hardware=cpu"],  # without the file of a cluster nothing is known of its nodes
}
NODES = [(group, option) for group, option in PRESETS if group in ("loss", "advantage", "optim")]


@pytest.mark.parametrize(("group", "option"), PRESETS, ids=[f"{group}={option}" for group, option in PRESETS])
def test_preset_composes_checks_builds_and_plans(group: str, option: str, tmp_path: Path):
    more = NEEDED.get((group, option), [])
    root, roles = (SFT, {"trainer"}) if group == "data" else (TRAIN, {"inference", "orchestrator", "trainer"})
    composed = compose([f"{group}={option}", "dry_run=true", *more], {}, root)
    plan = make_plan(composed.cfg, tmp_path)
    assert roles <= {spec.role for spec in plan}
    assert option in composed.choices[group].split("+")
    check_built(composed.cfg)


def test_the_tests_see_every_group():
    assert shipped_groups().keys() == set(GROUPS)


def test_every_preset_says_what_it_is():
    silent = [f"{g}/{o}" for g, o in PRESETS if not any(line.startswith("# ") and "@package" not in line for line in head(g, o))]
    assert silent == []


def head(group: str, option: str) -> list[str]:
    return (shipped_groups()[group] / f"{option}.yaml").read_text().splitlines()[:3]


def test_every_experiment_shows_its_command():
    for group, option in PRESETS:
        if group == "experiment":
            assert f"# python train.py experiment={option}" in head(group, option)


def test_auto_chooses_among_layouts_that_ship():
    shipped = {option for group, option in PRESETS if group == "hardware"}
    assert {name for _, name in LAYOUTS} | {"cpu"} <= shipped


@pytest.mark.parametrize(("group", "option"), NODES, ids=[f"{group}={option}" for group, option in NODES])
def test_target_can_be_built_and_its_signature_was_read_right(group: str, option: str):
    node = dict(getattr(compose([f"{group}={option}", *NEEDED.get((group, option), [])], {}).cfg, group))
    if group != "advantage":
        terms, node = split_terms(node, LossTerms if group == "loss" else OptimTerms)
        assert all(value != "???" for value in vars(terms).values())
    built = instantiate(node)
    assert callable(built)
    assert declared_by(node["_target_"]) == getattr(locate(node["_target_"]), ATTRIBUTE, Declared()), (
        "read from the source, and from the object"
    )
    real = inspect.signature(locate(node["_target_"]))
    read = signature_of(node["_target_"])
    assert [(p.name, p.kind, p.default) for p in read.parameters.values()] == [
        (p.name, p.kind, p.default) for p in real.parameters.values()
    ]


def test_a_value_that_a_constructor_refuses_is_found_before_anything_starts(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    argv = [f"--config-dir={tmp_path}", "optim=own", f"run.dir={tmp_path / 'run'}"]
    (tmp_path / "optim").mkdir()
    own = "_target_: torch.optim.SGD\nlr: 0.1\nnesterov: true\n"  # needs a momentum
    (tmp_path / "optim" / "own.yaml").write_text(own)
    assert main(["train", *argv]) == 2
    said = capsys.readouterr().err
    assert "torch.optim.SGD cannot build `optim`: ValueError: Nesterov momentum" in said
    assert not (tmp_path / "run").exists()
    assert main(["trainer", *argv]) == 2
    assert "torch.optim.SGD cannot build `optim`" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    assert main(["train", *argv[:2], "-m", "seed=1,2", f"run.dir={tmp_path / 'sweep'}"]) == 2
    assert not (tmp_path / "sweep").exists()


@pytest.mark.parametrize(
    ("argv", "needed"),
    [
        ("loss=gspo advantage=batch_norm model=qwen3_8b", False),
        ("optim.lr=1e-5 optim.betas=[0.8,0.9] loss.eps_low=0.1 loss.kl.beta=0.1 advantage.eps=0.1", False),
        ("optim.amsgrad=true", True),
        ("optim._target_=torch.optim.SGD ~optim.betas ~optim.eps", True),
    ],
)
def test_only_a_value_that_nothing_else_judges_makes_a_start_wait_for_torch(argv: str, needed: bool):
    composed = compose([*argv.split(), "dry_run=true"], {})
    assert must_be_built(composed.cfg, composed.origins) is needed


def test_the_default_run_is_the_tiny_one():
    cfg = compose([], {}).cfg
    assert (cfg.max_steps, cfg.max_async_level, cfg.seq_len, cfg.sampling.max_tokens, cfg.num_groups) == (100, 1, 64, 12, 16)
    assert (cfg.optim["lr"], cfg.optim["betas"], cfg.optim["weight_decay"], cfg.scheduler.warmup_steps) == (3e-4, [0.9, 0.95], 0.0, 5)
    assert cfg.model.warm_start is not None
    assert cfg.model.dtype == "float32"


def test_the_command_of_the_readme_composes(tmp_path: Path):
    composed = compose(["loss=gspo", "env=math", "model=qwen3_8b", "hardware=node8", "dry_run=true"], {})
    plan = make_plan(composed.cfg, tmp_path)
    assert sorted(gpu for spec in plan for gpu in spec.gpus) == list(range(8))
