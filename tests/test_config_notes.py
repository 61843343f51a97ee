"""What a configuration may do, but is seldom meant to, is said before the start."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlx.cli import main
from rlx.config.errors import ConfigError
from rlx.config.load import compose
from rlx.config.roots import EVAL, SFT, TRAIN, Root


def of(*overrides: str, root=None) -> list[str]:
    composed = compose(list(overrides), {}) if root is None else compose(list(overrides), {}, root)
    return [note for note in composed.notes if "warm-up" in note]


def test_a_warm_up_that_the_run_does_not_finish_is_said():
    updates = ("max_steps=10", "trainer.num_minibatches=2", "trainer.num_iterations=2")
    assert of("scheduler.warmup_steps=40", *updates) == [], "the last optimizer step has the whole rate"
    (note,) = of("scheduler.warmup_steps=41", *updates)
    assert "longer than the run's 40 optimizer steps" in note
    assert note.endswith("scheduler.warmup_steps=41 (command line)")


def test_supervised_training_says_it_too_and_a_benchmark_does_not():
    assert len(of("data.name=x/y", "max_steps=10", "scheduler.warmup_steps=11", "dry_run=true", root=SFT)) == 1
    assert of("bench=true", "max_steps=10", "scheduler.warmup_steps=11") == []


def test_it_is_said_where_a_run_is_described(tmp_path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.chdir(tmp_path)
    assert main(["train", "dry_run=true", "max_steps=10", "scheduler.warmup_steps=11"]) == 0
    assert "note: the warm-up is longer than the run" in capsys.readouterr().out


@pytest.mark.parametrize("where", ["folder", "text_config", "cache"])
def test_the_plan_has_the_sizes_of_the_model_that_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str):
    """Llama 3.3 70B under `model=llama3_1_8b` would get the plan, the row length and the rules of 8B."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    name, folder = str(tmp_path / "model"), tmp_path / "model"
    if where == "cache":
        name, folder = "someone/Llama-70B", tmp_path / "hub" / "models--someone--Llama-70B" / "snapshots" / "abc"
        (folder.parent.parent / "refs").mkdir(parents=True)
        (folder.parent.parent / "refs" / "main").write_text("abc")
    folder.mkdir(parents=True)
    argv = ["model=llama3_1_8b", f"model.name={name}", "env=math", "hardware=node8", "dry_run=true"]
    made = {"hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 128256}
    made |= {"intermediate_size": 28672, "max_position_embeddings": 131072}
    (folder / "config.json").write_text(json.dumps({"text_config": made} if where == "text_config" else made))
    composed = compose(argv, {})
    assert (composed.cfg.model.hidden_size, composed.cfg.model.num_layers) == (8192, 80)
    assert composed.cfg.model.num_parameters == pytest.approx(70.55e9, rel=1e-3), "as many as Llama 3.3 70B has"
    assert [note for note in composed.notes if "its own sizes" in note and str(folder) in note]
    with pytest.raises(ConfigError, match=r"num_layers 80 in .*model\.num_layers=32 \(command line\)"):
        compose([*argv, "model.num_layers=32"], {})


@pytest.mark.parametrize(
    ("made", "experts", "parameters"),
    [
        (
            {"n_routed_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768},
            128,
            30e9,
        ),  # an option of a dense model says none
        ({"num_local_experts": 0, "intermediate_size": 9728}, None, 4e9),
    ],
    ids=["mixture", "dense"],
)
def test_a_mixture_of_experts_is_counted_as_one(tmp_path: Path, made: dict, experts: int | None, parameters: float):
    made |= {"hidden_size": 2048 if experts else 2560, "num_hidden_layers": 48 if experts else 36, "num_attention_heads": 32}
    made |= {"num_key_value_heads": 4 if experts else 8, "head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 40960}
    (tmp_path / "config.json").write_text(json.dumps(made))
    for option in ([], ["model=qwen3_8b"]):
        model = compose([*option, f"model.name={tmp_path}", "env=math", "hardware=node8", "dry_run=true"], {}).cfg.model
        assert (model.num_experts, model.num_parameters) == (experts, pytest.approx(parameters, rel=0.15))


def test_a_model_that_is_not_here_is_said_not_to_have_been_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    argv = ["model=llama3_1_8b", "env=math", "hardware=node8", "dry_run=true"]
    assert not [note for note in compose(argv, {}).notes if "were not compared" in note]
    (note,) = [note for note in compose([*argv, "model.name=meta-llama/Llama-3.3-70B-Instruct"], {}).notes if "were not compared" in note]
    assert "model.name=meta-llama/Llama-3.3-70B-Instruct (command line)" in note


MADE = {"hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128}
MADE |= {"vocab_size": 151936, "intermediate_size": 3072, "max_position_embeddings": 40960, "tie_word_embeddings": True}
GPT2 = {"n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257, "n_positions": 1024}


@pytest.mark.parametrize(
    ("made", "parameters", "width"), [(MADE, 596e6, 3072), (GPT2, 124e6, None)], ids=["of the names of today", "of GPT-2"]
)
@pytest.mark.parametrize("root", [TRAIN, SFT, EVAL], ids=lambda root: root.command)
def test_a_model_needs_no_option(tmp_path: Path, root: Root, made: dict[str, int], parameters: float, width: int | None):
    (tmp_path / "config.json").write_text(json.dumps(made))
    more = {"train": ["env=math"], "sft": [f"data.name={tmp_path}"], "eval": ["env=math"]}[root.command]
    line = [f"model.name={tmp_path}", "seq_len=512", "sampling.max_tokens=256", "dry_run=true", *more]
    composed = compose(line, {}, root)
    model = composed.cfg.model
    assert composed.choices["model"] == "named"
    assert (model.hidden_size, model.intermediate_size, model.warm_start) == (made.get("hidden_size", 768), width, None)
    assert model.num_parameters == pytest.approx(parameters, rel=0.01)
    assert str(tmp_path / "config.json") in composed.origins.show("model.hidden_size", 1)
    assert compose([*line, "model=named"], {}, root).cfg.model == model, "also by its name"


def test_a_name_that_the_hub_does_not_have_is_one_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(
        ConfigError, match=r"model\.name=no/such is no folder with a config\.json, and neither the hub nor its cache has one"
    ):
        compose(["model.name=no/such"], {})
