"""What a run evaluates, from its configuration; and what is refused."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from test_rollout_runner import outcome

from rlx.config.checks.data import metrics_of
from rlx.config.errors import ConfigError
from rlx.config.eval_envs import environments, evaluated, is_due, section_of
from rlx.config.load import compose, load_run
from rlx.config.roots import EVAL, SYNTHESIZE, TRAIN
from rlx.config.schema import Config
from rlx.envs.base import sampling_of
from rlx.paths import COMPLETE, RunPaths
from rlx.plan.explain import explain
from rlx.rollout.evaluation import score_metrics
from rlx.runs.weights import initial_model, resolve


def cfg(*argv: str) -> Config:
    return compose(list(argv), {}).cfg


def test_without_a_key_there_is_no_evaluation() -> None:
    config = cfg()
    assert evaluated(config) == {}
    assert not any(is_due(config, version) for version in range(200))
    assert environments(config) == config.envs


def test_an_interval_evaluates_the_environments_of_the_mix_on_their_evaluation_data() -> None:
    config = cfg("env=[reverse_text,sums]", "eval.interval=30", "envs.sums.args.level=2", "envs.sums.sampling.temperature=0.7")
    found = evaluated(config)
    assert list(found) == ["reverse_text", "sums"]
    assert [(env.id, env.split, env.num_examples, env.rollouts_per_example) for env in found.values()] == [
        ("rlx-reverse-text", "eval", 128, 1),
        ("rlx-sums", "eval", 128, 1),
    ]
    assert found["sums"].args == config.envs["sums"].args
    assert found["sums"].sampling.temperature == 0.7
    assert [version for version in range(101) if is_due(config, version)] == [0, 30, 60, 90, 100]
    assert list(environments(config)) == ["reverse_text", "sums", "eval_reverse_text", "eval_sums"]
    assert section_of("eval_sums") == "eval.envs.sums"


def test_the_nearest_value_counts() -> None:
    config = cfg(
        "eval.interval=5",
        "eval.sampling.temperature=0",
        "eval.sampling.top_p=0.9",
        "eval.num_examples=null",
        "eval.rollouts_per_example=4",
        "eval.envs.reverse_text.sampling.top_p=0.8",
        "eval.envs.reverse_text.args.num_eval_examples=9",
        "eval.envs.more.id=rlx-sums",
        "eval.envs.more.num_examples=7",
        "eval.envs.more.rollouts_per_example=2",
        "envs.reverse_text.sampling.max_tokens=10",
    )
    found = evaluated(config)
    one, more = found["reverse_text"], found["more"]
    assert one.args == {"min_length": 3, "max_length": 6, "num_eval_examples": 9}
    assert (one.num_examples, one.rollouts_per_example, more.num_examples, more.rollouts_per_example) == (None, 4, 7, 2)
    asked = [sampling_of(config, env) for env in (one, more)]
    assert [(s["temperature"], s["top_p"], s["max_tokens"]) for s in asked] == [(0.0, 0.8, 10), (0.0, 0.9, 12)]
    assert sampling_of(config, config.envs["reverse_text"])["temperature"] == 1.0


MIX = {  # of an environment of the mix: keys that its evaluation takes, none at its default
    "agents": ["a"],
    "num_tasks": 5,
    "rollout_timeout": 7.0,
    "on_reward_error": "zero",
    "workers": 3,
    "python": sys.executable,
}
OTHER = {  # of its evaluation: their defaults where a value can say so
    "agents": [],
    "num_tasks": 1000000,
    "rollout_timeout": 600.0,
    "on_reward_error": "fail",
    "workers": 1,
    "python": "/bin/sh",
}


def given(section: str, values: dict[str, Any]) -> list[str]:
    return [f"{section}.{key}={str(value).replace(' ', '').replace(chr(39), '')}" for key, value in values.items()]


@pytest.mark.parametrize("key", MIX)
def test_a_key_of_an_evaluation_counts_even_if_it_is_the_default_that_the_mix_has_changed(key: str) -> None:
    """Otherwise `eval.envs.X.on_reward_error=fail` beside `envs.X.on_reward_error=zero` would count as not set."""
    mix, argv = given("envs.reverse_text", MIX), ["eval.interval=5", "launcher.check_envs=false"]
    own = given("eval.envs.reverse_text", {key: OTHER[key]})
    (found,) = evaluated(cfg(*argv, *mix, *own)).values()
    assert {name: getattr(found, name) for name in MIX} == {**MIX, key: OTHER[key]}


def test_the_program_and_the_boxes_of_an_environment_are_those_of_its_evaluation() -> None:
    program = ["env=program", "env.args.data=rows.jsonl", 'env.args.test="true"', "env.harness.command=[agent]", "env.box.cpus=2"]
    argv = [*program, "env.sandbox=none", "eval.interval=1", "dry_run=true"]
    cfg = compose(argv, {}, TRAIN).cfg
    (found,) = evaluated(cfg).values()
    assert (found.harness, found.box, found.sandbox) == (cfg.envs["program"].harness, cfg.envs["program"].box, "none")
    own = compose([*argv, "+eval.envs.program.box.memory_gb=1", "+eval.envs.program.sandbox=auto"], {}, TRAIN).cfg
    (found,) = evaluated(own).values()
    assert (found.harness.command, found.box.cpus, found.box.memory_gb, found.sandbox) == (["agent"], 2.0, 1.0, "auto")


def test_what_an_evaluation_sets_is_read_again_from_the_runs_directory(tmp_path: Path) -> None:
    mix, own = given("envs.reverse_text", MIX), given("eval.envs.reverse_text", OTHER)
    composed = compose(["eval.interval=5", "launcher.check_envs=false", *mix, *own], {})
    (tmp_path / "config.yaml").write_text(composed.yaml)
    assert evaluated(load_run(tmp_path)) == evaluated(composed.cfg)


def test_rlx_eval_of_a_run_takes_what_decides_how_its_environments_are_played(tmp_path: Path) -> None:
    (tmp_path / "weights" / "step_1").mkdir(parents=True)
    (tmp_path / "config.yaml").write_text(compose(["launcher.check_envs=false", *given("envs.reverse_text", MIX)], {}).yaml)

    def played(*argv: str) -> dict[str, Any]:
        env = compose([f"weights_dir={tmp_path}", "launcher.check_envs=false", *argv], {}, EVAL).cfg.envs["reverse_text"]
        return {name: getattr(env, name) for name in MIX}

    assert played() == MIX
    assert played(*given("envs.reverse_text", OTHER)) == OTHER


@pytest.mark.parametrize("root", [EVAL, SYNTHESIZE], ids=["eval", "synthesize"])
def test_one_run_of_an_episode_is_scored_also_where_all_of_them_train(root: Any, tmp_path: Path) -> None:
    """The reward of one run would stand beside the conversation of another."""
    trained = compose(["eval.interval=5", "launcher.check_envs=false", "envs.reverse_text.agents_per_group=all"], {})
    assert [env.agents_per_group for env in evaluated(trained.cfg).values()] == ["one"]
    (tmp_path / "weights" / "step_1").mkdir(parents=True)
    (tmp_path / "config.yaml").write_text(trained.yaml)
    argv = [f"weights_dir={tmp_path}", "launcher.check_envs=false"]
    assert compose(argv, {}, root).cfg.envs["reverse_text"].agents_per_group == "one"
    with pytest.raises(ConfigError, match=r"envs\.reverse_text\.agents_per_group.*one"):
        compose([*argv, "envs.reverse_text.agents_per_group=all"], {}, root)
    with pytest.raises(ConfigError, match=r"eval\.envs\.reverse_text\.agents_per_group.*one"):
        compose(["eval.interval=5", "eval.envs.reverse_text.agents_per_group=all"], {})


def test_an_option_of_env_can_be_evaluated_without_training_on_it() -> None:
    composed = compose(["eval.interval=5", "env@eval.envs.hard=sums", "eval.envs.hard.args.level=3"], {})
    assert composed.choices["env"] == "reverse_text"
    assert list(composed.cfg.envs) == ["reverse_text"]
    (found,) = evaluated(composed.cfg).values()
    assert (found.id, found.args["level"], found.split) == ("rlx-sums", 3, "eval")


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ("eval.interval=5 eval.envs.foo.num_examples=3", r"the run has no environment foo to evaluate"),
        ("eval.interval=5 eval.envs.foo.id=nowhere", r"is not installed: there is no module nowhere"),
        ("eval.interval=5 eval.sampling.max_tokens=99", r"99 new tokens leave no room for the prompts of eval.envs.reverse_text in 64"),
        ("ckpt.keep_best=eval/reverse_text/avg@1", r"every evaluated version must have a checkpoint"),
        ("eval.interval=5 ckpt.keep_best=eval/reverse_text/avg@1", r"every evaluated version must have a checkpoint"),
        *(
            (f"eval.interval=50 ckpt.keep_best=eval/{metric}", r"no metric of an evaluation of which more is better")
            for metric in ("other/avg@1", "reverse_text/avg@4", "reverse_text/reward/", "reverse_text/error_frac")
        ),
    ],
)
def test_what_cannot_be_evaluated_is_refused(argv: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        cfg(*argv.split())


@pytest.mark.parametrize("metric", ["avg@1_low", "pass@1", "completion_mean", "reward/exact_match", "metric/num_turns"])
def test_the_best_checkpoint_may_be_chosen_by_any_metric_of_an_evaluation(metric: str) -> None:
    assert cfg("eval.interval=50", f"ckpt.keep_best=eval/reverse_text/{metric}").ckpt.keep_best == f"eval/reverse_text/{metric}"


def test_the_metrics_that_can_be_named_are_those_of_the_records() -> None:
    one = outcome(0, 0)
    assert {f"eval/e/{metric}" for metric in (*metrics_of(5), "error_frac", "truncated_frac")} == set(
        score_metrics("e", [[one] * 5] * 2, 0.5)
    )


def test_a_dry_run_says_what_is_evaluated() -> None:
    composed = compose(["eval.interval=30", "eval.rollouts_per_example=4"], {})
    text = explain(composed.cfg, [], composed.choices, [], "outputs/x")
    assert "5 in the run, of reverse_text 128 × 4 (examples × rollouts), each at one policy version" in text


def test_adapters_need_a_run_with_adapters_and_the_model_that_they_belong_to(tmp_path: Path) -> None:
    trained = tmp_path / "trained"
    for step in (2, 4):
        (trained / "weights" / f"step_{step}").mkdir(parents=True)
        (trained / "weights" / f"step_{step}" / COMPLETE).touch()
    (trained / "config.yaml").write_text(compose([], {}).yaml)

    def mistake(*overrides: str) -> str:
        cfg = compose(["dry_run=true", f"weights_dir={trained}", "eval_base=false", *overrides], {}, EVAL).cfg
        with pytest.raises(ConfigError) as caught:
            resolve(cfg)
        return str(caught.value)

    assert "step_2 holds a whole model, but lora.rank=8 expects adapters" in mistake("lora.rank=8")
    for step in (2, 4):
        (trained / "weights" / f"step_{step}" / "adapter_config.json").write_text('{"r": 16}')
    assert "step_2 holds adapters, but lora.rank is not set.\n  fix: lora.rank=16" in mistake()
    config = trained / "config.yaml"
    config.write_text(config.read_text().replace("rank: null", "rank: 16"))
    assert "the initial model of" in mistake()
    (tmp_path / "model").mkdir()
    RunPaths(trained).initial_model.write_text(f"{tmp_path / 'model'}\n")
    cfg = resolve(compose(["dry_run=true", f"weights_dir={trained}"], {}, EVAL).cfg)
    assert (cfg.lora.rank, cfg.versions, initial_model(cfg)) == (16, [0, 2, 4], str(tmp_path / "model"))
