"""The field's benchmarks by name: options of `env`, evaluated whole, from the hub's data set or from a file of its columns."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlx.config.errors import ConfigError
from rlx.config.load import compose
from rlx.config.roots import EVAL
from rlx.config.schema_eval import EvalRoot
from rlx.preflight.probes import environments_of, lines_of

BENCHMARKS = {"gsm8k": 1319, "math500": 500, "aime24": 30, "aime25": 30, "ifeval": 541}


def evaluation(*argv: str) -> EvalRoot:
    return compose(["model=smollm2_135m", "dry_run=true", "launcher.check_envs=false", *argv], {}, EVAL).cfg


def test_benchmarks_are_evaluated_whole_unless_a_key_says_less() -> None:
    cfg = evaluation(f"bench=[{','.join(BENCHMARKS)}]")
    assert {name: env.num_examples for name, env in cfg.envs.items()} == BENCHMARKS
    assert evaluation("env=gsm8k", "envs.gsm8k.num_examples=100").envs["gsm8k"].num_examples == 100
    beside = compose(["env@eval.envs.math500=math500", "eval.interval=5", "dry_run=true", "launcher.check_envs=false"], {}).cfg
    assert beside.eval.envs["math500"].num_examples == 500


@pytest.mark.slow
def test_a_benchmark_is_read_from_a_file_and_never_trained_on(tmp_path: Path) -> None:
    file = tmp_path / "problems.jsonl"
    file.write_text("".join(json.dumps({"problem": f"${n}+1$?", "answer": str(n + 1)}) + "\n" for n in range(4)))
    asked = [f"envs.math500.args.dataset={file}", "model=smollm2_135m", "dry_run=true"]
    (found,) = environments_of([compose(["bench=math500", *asked], {}, EVAL).cfg])
    assert "4 examples" in lines_of(found)[0]
    with pytest.raises(ConfigError, match="no training data set, only one for evaluation"):
        environments_of([compose(["env=math500", *asked], {}).cfg])
