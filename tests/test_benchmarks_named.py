"""The field's benchmarks by name: options of `env`, evaluated whole, from the hub's data set or from a file of its columns."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlx.config.errors import ConfigError
from rlx.config.load import compose
from rlx.config.roots import EVAL
from rlx.config.schema_eval import EvalRoot
from rlx.config.sweeps import expand
from rlx.preflight.probes import environments_of, lines_of

BENCHMARKS = ("gsm8k", "math500", "aime24", "aime25", "ifeval")


def evaluation(*argv: str) -> EvalRoot:
    return compose(["model=smollm2_135m", "dry_run=true", "launcher.check_envs=false", *argv], {}, EVAL).cfg


def test_benchmarks_are_evaluated_whole_unless_a_key_says_less() -> None:
    cfg = evaluation(f"bench=[{','.join(BENCHMARKS)}]")
    assert (tuple(cfg.envs), cfg.num_examples) == (BENCHMARKS, None)
    assert evaluation("bench=gsm8k", "num_examples=100").num_examples == 100
    assert compose(["bench=gsm8k", "dry_run=true"], {"RLX_NUM_EXAMPLES": "50"}, EVAL).cfg.num_examples == 50
    assert evaluation("env=gsm8k").num_examples == 128
    sweep = expand(["-m", "bench=gsm8k,math500", "model=smollm2_135m"], {}, EVAL)
    assert [(run.swept, "num_examples=null" in run.argv) for run in sweep.elements] == [(("env=gsm8k",), True), (("env=math500",), True)]
    beside = compose(["env@eval.envs.math500=math500", "eval.interval=5", "dry_run=true", "launcher.check_envs=false"], {}).cfg
    assert beside.eval.envs["math500"].args["eval_split"] == "test"


@pytest.mark.slow
def test_a_benchmark_is_read_from_a_file_and_never_trained_on(tmp_path: Path) -> None:
    file = tmp_path / "problems.jsonl"
    file.write_text("".join(json.dumps({"problem": f"${n}+1$?", "answer": str(n + 1)}) + "\n" for n in range(4)))
    asked = [f"envs.math500.args.dataset={file}", "model=smollm2_135m", "dry_run=true"]
    (found,) = environments_of([compose(["bench=math500", *asked], {}, EVAL).cfg])
    assert "4 examples" in lines_of(found)[0]
    with pytest.raises(ConfigError, match="no training data set, only one for evaluation"):
        environments_of([compose(["env=math500", *asked], {}).cfg])
