"""Paths of a run on Kubernetes: those on the volume are left to the pods, and those that exist only on this machine are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from test_kubernetes_chart import SMALL

from rlx.cli import main
from rlx.cli.pod import arguments
from rlx.cli.pods import objects_of, settled
from rlx.cli.sft import resolve as resolve_data
from rlx.config.errors import ConfigError
from rlx.config.inherited import Inherited, left_open
from rlx.config.load import compose, to_yaml
from rlx.config.roots import EVAL, SFT, SYNTHESIZE, TRAIN, Root
from rlx.preflight.chats import check_chats
from rlx.preflight.probes import environments_of
from rlx.runs.weights import resolve, resolve_step

pytestmark = pytest.mark.slow

DATA = ("data.name=/runs/mine/data/train.parquet",)


@pytest.mark.parametrize(
    ("root", "argv", "key"),
    [
        (SFT, ["data.name={here}/x.jsonl"], "data.name"),
        (SFT, ["data.name=x.jsonl"], "data.name"),
        (SFT, ["data.name=folder"], "data.name"),
        (SFT, ["data.name={here}/*.jsonl"], "data.name"),
        (SFT, ["data.sets.a.name={here}/x.jsonl"], "data.sets.a.name"),
        (SFT, [*DATA, "val.name={here}/x.jsonl"], "val.name"),
        (TRAIN, ["loss=opd", "model=qwen3_0_6b", "env=math", "ref.name={here}"], "ref.name"),
        (TRAIN, ["model=qwen3_0_6b", "env=math", "model.chat_template={here}/x.jinja"], "model.chat_template"),
        (TRAIN, ["envs.reverse_text.python={here}/python", "envs.reverse_text.workers=1"], "envs.reverse_text.python"),
        (
            TRAIN,
            ["eval.interval=10", "eval.envs.reverse_text.python={here}/python", "eval.envs.reverse_text.workers=1"],
            "eval.envs.reverse_text.python",
        ),
        (EVAL, ["weights_dir={here}"], "weights_dir"),
        (EVAL, ["weights_dir=folder"], "weights_dir"),
        (SYNTHESIZE, ["weights_dir={here}"], "weights_dir"),
    ],
)
def test_a_path_that_only_this_machine_has_is_refused(root: Root, argv: list[str], key: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("x.jsonl", "x.jinja", "python"):
        (tmp_path / name).touch(0o755)
    (tmp_path / "folder").mkdir()
    with pytest.raises(ConfigError) as refused:
        compose([*SMALL, *(each.format(here=tmp_path) for each in argv)], {}, root)
    assert [problem.split("=")[0] for problem in refused.value.problems] == [f"the pods cannot read or write this path: {key}"]
    assert "(command line) is not on their volume, kubernetes.mount=/runs (default).\nUse a path below /runs" in str(refused.value)


def test_in_a_pod_data_may_also_be_in_the_image(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "x.jsonl").touch()
    monkeypatch.setenv("JOB_COMPLETION_INDEX", "0")
    compose([*SMALL, f"data.name={tmp_path}/x.jsonl", f"kubernetes.mount={tmp_path}"], {}, SFT)


def test_data_on_the_volume_is_left_to_the_pods() -> None:
    argv = [*SMALL, *DATA, "val.name=/runs/*.jsonl", "data.sets.b.name=/runs/b", "model=qwen3_0_6b", "model.chat_template=/runs/x.jinja"]
    cfg = compose(argv, {}, SFT).cfg
    assert resolve_data(cfg) == cfg


@pytest.mark.usefixtures("known_environments")
def test_the_format_of_a_model_and_the_python_of_an_environment_are_left_to_the_pods() -> None:
    argv = ["model=qwen3_0_6b", "model.name=/runs/model", "model.chat_template_kwargs.enable_thinking=false", "env=[math,sums]"]
    pythons = [
        "envs.math.python=/runs/venv/bin/python",
        "envs.math.workers=1",
        "envs.sums.python=/opt/venv/bin/python",
        "envs.sums.workers=1",
    ]
    cfg = compose([*SMALL, *argv, *pythons], {}, TRAIN).cfg
    found = environments_of([cfg])
    assert found == [{}]
    check_chats([cfg], found)


@pytest.mark.parametrize(("root", "resolved"), [(EVAL, resolve), (SYNTHESIZE, resolve_step)])
def test_the_pods_take_from_a_run_on_the_volume_what_is_not_given(root: Root, resolved: Any, tmp_path: Path, monkeypatch) -> None:
    volume, config = tmp_path / "volume", tmp_path / "config"
    given = [f"kubernetes.mount={volume}", f"weights_dir={volume}/trained", "sampling.max_tokens=7", "envs.sums.num_tasks=4"]
    composed = compose([*SMALL, *given], {}, root)
    assert resolved(composed.cfg) == composed.cfg
    assert "is on the volume: the pods take from it what is not given here" in composed.notes[-1]
    cfg = settled(composed.cfg, "label")
    (file,) = [each["data"]["config.yaml"] for each in objects_of(cfg, composed.later) if each["kind"] == "ConfigMap"]

    config.mkdir()
    (config / "config.yaml").write_text(file)
    (volume / "trained" / "weights" / "step_3").mkdir(parents=True)
    trained = compose(["env=sums", "model=qwen3_0_6b", "seed=5", "hardware=cpu", "sampling.temperature=0.5"], {}).cfg
    (volume / "trained" / "config.yaml").write_text(to_yaml(trained))
    monkeypatch.setenv("JOB_COMPLETION_INDEX", "0")
    pod = argv_of_pod(config, volume, root)
    assert (pod.model, pod.seed, pod.seq_len, pod.lora) == (trained.model, 5, trained.seq_len, trained.lora)
    assert (pod.sampling.temperature, pod.sampling.max_tokens) == (0.5, 7)
    assert {name: (env.id, env.num_tasks) for name, env in pod.envs.items()} == {"sums": (trained.envs["sums"].id, 4)}
    assert (pod.run, pod.kubernetes, pod.num_examples) == (cfg.run, cfg.kubernetes, cfg.num_examples)


def test_names_with_dots_and_numbers_reach_the_pods() -> None:
    args = {"prices": {"gpt-4.1": 2, 5: "five"}}
    data: dict[str, Any] = {"seed": 1, "seq_len": 64, "model": {}, "lora": {}, "sampling": {}, "envs": {"math": {"args": args}}}
    data |= {"inference": {"max_model_len": None}, "orchestrator": {"trajectory_strategy": "extending"}, "chat": {"thinking": "keep"}}
    later, _ = left_open(Inherited("weights_dir=/runs/mine", values={"envs": {}}), {}, data)
    assert later.given["envs"] == {"math": {"args": args}}


def argv_of_pod(config: Path, volume: Path, root: Root) -> Any:
    from argparse import Namespace

    given = Namespace(volume=volume, job="mine", gpus=0)
    return compose(arguments(given, ["--config-dir", str(config), "--config-name", "config"], root), {}, root).cfg


def test_a_model_that_is_given_is_that_of_the_weights() -> None:
    composed = compose([*SMALL, "weights_dir=/runs/steps", "model=qwen3_0_6b", "env=math"], {}, EVAL)
    assert composed.later is None
    with pytest.raises(ConfigError, match="there is no environment"):
        compose([*SMALL, "weights_dir=/runs/steps", "model=qwen3_0_6b"], {}, EVAL)


@pytest.mark.usefixtures("known_environments")
@pytest.mark.parametrize("line", ["sft data.name=/runs/x.jsonl", "eval weights_dir=/runs/mine", "synthesize weights_dir=/runs/mine"])
def test_a_run_with_paths_on_the_volume_is_planned(line: str, capsys) -> None:
    assert main([*line.split(), *SMALL, "dry_run=true"]) == 0
    printed = capsys.readouterr().out.partition("\nmanifests\n")[2].partition("\ndry run:")[0]
    (file,) = [each["data"]["config.yaml"] for each in yaml.safe_load_all(printed) if each["kind"] == "ConfigMap"]
    if "weights_dir" in line:
        kept = yaml.safe_load(file)
        assert "rlx_inherited" in kept["defaults"]
        assert not {"model", "lora", "seed", "seq_len", "sampling"} & set(kept), "a default here would replace the run's"
