"""The prepare role: real processes, each with its own run directory, and one cache."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from rlx.config.load import compose, to_yaml
from rlx.config.roots import EVAL, SFT, TRAIN
from rlx.config.schema import Config, EnvConfig
from rlx.heartbeat import Heartbeat, read_heartbeats
from rlx.paths import COMPLETE, RunPaths, write_text
from rlx.polling import wait_for
from rlx.roles import prepare
from rlx.train import warm_start

pytestmark = pytest.mark.slow

STEPS = "6"
SMALL = {"steps": STEPS, "num_examples": "64", "hidden_size": "32", "intermediate_size": "64", "num_hidden_layers": "1"}


def config_of(*overrides: str, **warm_start: str) -> Config:
    settings = [f"model.warm_start.{name}={value}" for name, value in {**SMALL, **warm_start}.items()]
    return compose(["hardware=cpu", "envs.reverse_text.args.num_examples=100", *settings, *overrides], {}).cfg


def run_directory(root: Path, config: Config) -> RunPaths:
    paths = RunPaths(root)
    write_text(paths.config, to_yaml(config))
    return paths


def start(paths: RunPaths, cache: Path, **options: Any) -> subprocess.Popen:
    environ = {**os.environ, "RLX_CACHE": str(cache), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    argv = [sys.executable, "-m", "rlx.roles.prepare", "--run-dir", str(paths.root)]
    return subprocess.Popen(argv, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options)


def model_of(paths: RunPaths) -> Path:
    return Path(paths.initial_model.read_text().strip())


@pytest.mark.long
def test_two_runs_at_once_make_one_model_and_a_third_finds_it_without_torch(tmp_path: Path):
    config = config_of()
    runs = [run_directory(tmp_path / name, config) for name in ("a", "b")]
    cache = tmp_path / "cache"
    processes = [start(paths, cache) for paths in runs]
    with ThreadPoolExecutor() as pool:  # the maker of the model stops where nobody reads what it writes, and the other waits for the model
        outputs = list(pool.map(lambda process: process.communicate(timeout=600)[0], processes))
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert sum(f"warm start {STEPS}/{STEPS} loss" in output for output in outputs) == 1, outputs
    folder = model_of(runs[0])
    assert folder == model_of(runs[1])
    assert json.loads((folder / COMPLETE).read_text())["warm_start"]["steps"] == int(STEPS)
    assert AutoModelForCausalLM.from_pretrained(folder).config.hidden_size == 32
    assert [path.name for path in folder.parent.iterdir() if not path.name.endswith(".lock")] == [folder.name]
    made = [paths for paths in runs if f"{STEPS}/{STEPS}" in read_heartbeats(paths)["prepare"]["phase"]]
    assert len(made) == 1

    third = run_directory(tmp_path / "c", config)
    environ = {**os.environ, "RLX_CACHE": str(cache)}
    script = (
        "import sys; from rlx.roles.prepare import main; sys.argv[1:] = ['--run-dir', sys.argv[1]]; code = main()\n"
        "print([name for name in ('torch', 'verifiers', 'transformers') if name in sys.modules]); sys.exit(code)"
    )
    found = subprocess.run([sys.executable, "-c", script, str(third.root)], env=environ, capture_output=True, text=True, timeout=600)
    assert found.returncode == 0, found.stderr
    assert found.stdout == "[]\n"
    assert model_of(third) == folder
    assert "cached" in found.stderr


def test_a_changed_recipe_is_another_model_and_anything_else_is_the_same():
    def folder(config: Config) -> Path:
        return warm_start.model_folder(config.model.name, warm_start.recipe(config))

    same = config_of()
    others = [
        config_of(steps="7"),
        config_of(seed="1"),
        config_of("envs.reverse_text.args.max_length=5"),
        config_of("envs.reverse_text.weight=2"),
        config_of("env=[sums,reverse_text]"),
        config_of("model.context_length=128"),
        config_of("envs.reverse_text.num_tasks=5"),
        config_of("envs.reverse_text.split=eval"),
        config_of("model.renderer=qwen3"),
    ]
    assert len({folder(config) for config in (same, *others)}) == 10
    assert folder(config_of("seed=3", "loss=gspo", "max_steps=2", "seq_len=32")) == folder(same)


def test_an_evaluation_finds_the_model_that_training_makes():
    argv = ["model=tiny", "env=reverse_text", "hardware=cpu"]
    train, evaluate = (warm_start.recipe(compose(argv, {}, root).cfg) for root in (TRAIN, EVAL))
    assert train == evaluate


def test_a_changed_environment_is_another_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    package = tmp_path / "made_up_words"
    write_text(package / "__init__.py", "A = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    first = warm_start.environment_digest(EnvConfig(id="someone/made-up-words"))
    write_text(package / "words.py", "B = 1\n")
    second = warm_start.environment_digest(EnvConfig(id="someone/made-up-words"))
    assert first
    assert first != second
    assert warm_start.environment_digest(EnvConfig(id="not-installed")) == ""


def test_changed_data_of_an_environment_are_another_recipe_and_caches_are_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    package = tmp_path / "made_up_problems"
    monkeypatch.syspath_prepend(tmp_path)
    write_text(package / "__init__.py", "A = 1\n")

    def after(name: str, text: str) -> str:
        write_text(package / name, text)
        return warm_start.environment_digest(EnvConfig(id="made-up-problems"))

    one, two = after("data/problems.jsonl", "{}\n"), after("data/problems.jsonl", "[]\n")
    assert one != two
    assert after("__pycache__/problems.pyc", "A") == after(".cache/answers.json", "A") == two
    (package / "data/problems.jsonl").rename(package / "data/tasks.jsonl")
    assert warm_start.environment_digest(EnvConfig(id="made-up-problems")) not in (one, two), "a package may read its files by name"


def test_a_large_file_of_an_environment_counts_by_its_size_and_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(warm_start, "LARGE", 8)
    monkeypatch.syspath_prepend(tmp_path)
    write_text(tmp_path / "made_up_numbers/__init__.py", "")
    table = tmp_path / "made_up_numbers/table.bin"

    def after(text: str, seconds: int) -> str:
        write_text(table, text)
        os.utime(table, (seconds, seconds))
        return warm_start.environment_digest(EnvConfig(id="made-up-numbers"))

    first = after("123456789", 1)
    assert after("987654321", 1) == first, "it is not read"
    assert after("123456789", 2) != first
    assert after("1234567890", 1) != first


def test_a_change_of_code_that_computes_is_another_recipe_and_one_of_what_carries_results_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    package = warm_start.PACKAGE
    shutil.copytree(package, tmp_path / "rlx", ignore=shutil.ignore_patterns("__pycache__"))
    config = config_of()
    before = warm_start.recipe(config)
    monkeypatch.setattr(warm_start, "PACKAGE", tmp_path / "rlx")
    assert warm_start.recipe(config) == before
    for name, counts in {
        "train/optim.py": True,
        "roles/prepare.py": True,
        "roles/orchestrator.py": False,
        "models/attention.py": True,
        "kernels/rows_torch.py": True,
        "losses/sft.py": True,  # named by a `_target_` alone
        "data/masks.py": True,
        "models/tiny.py": True,
        "tracking.py": False,
        "rollout/collector.py": False,
    }.items():
        changed = tmp_path / "rlx" / name
        text = changed.read_text()
        changed.write_text(text + "\n# changed\n")
        assert (warm_start.recipe(config) != before) is counts, name
        changed.write_text(text)


@pytest.mark.long
def test_a_terminated_run_says_so_and_leaves_nothing_but_its_lock(tmp_path: Path):
    paths, cache = run_directory(tmp_path / "run", config_of(steps="100000")), tmp_path / "cache"
    process = start(paths, cache)
    try:
        wait_for(lambda: "warm start" in read_heartbeats(paths).get("prepare", {}).get("phase", ""), "the first step", 300)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=600)
    finally:
        process.kill()
    assert process.returncode == 128 + signal.SIGTERM
    assert not paths.initial_model.exists()
    assert all(path.name.endswith(".lock") for path in (cache / "models").iterdir())


def test_what_a_killed_run_left_behind_is_cleared(tmp_path: Path):
    folder = tmp_path / "models" / "tiny-0123"
    left_behind = folder.with_name(".tiny-0123.tmp-x")
    for half in (folder, left_behind):
        write_text(half / "model.safetensors", "half")
    heartbeat = Heartbeat(RunPaths(tmp_path), "prepare")
    settings = [f"model.warm_start.{name}={value}" for name, value in SMALL.items()]
    config = compose(["hardware=cpu", "data=fake", *settings], {}, SFT).cfg  # which begins with random weights
    with prepare.locked(folder, heartbeat) as alone:
        assert alone
        prepare.make(config, {}, folder, heartbeat, alone=False)
        assert left_behind.exists(), "without locks another host may be at work in it"
        made = (folder / COMPLETE).stat().st_ino
        prepare.make(config, {}, folder, heartbeat)
    assert (folder / COMPLETE).stat().st_ino == made, "the first one stays"
    assert not left_behind.exists()
    AutoModelForCausalLM.from_pretrained(folder)


def test_an_environment_whose_prompts_exceed_the_context_is_refused(tmp_path: Path):
    config = config_of("model.context_length=8", "seq_len=8", "sampling.max_tokens=4")
    heartbeat = Heartbeat(RunPaths(tmp_path), "prepare")
    with pytest.raises(ValueError, match=r"envs\.reverse_text: the shortest of 64 demonstrations has \d+ tokens, .*context_length=8"):
        prepare.make(config, {}, tmp_path / "model", heartbeat)
