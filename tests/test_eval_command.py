"""`rlx eval`: what it evaluates, its records, its table and its errors; and the whole command at an endpoint and on real servers."""

from __future__ import annotations

import functools
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import yaml
from api_stand_in import KEY
from main_job import read_metrics

from rlx.cli import main
from rlx.config.errors import ConfigError
from rlx.config.eval_envs import evaluated, rollout_envs
from rlx.config.load import compose, load_command, load_run, to_yaml
from rlx.config.roots import EVAL
from rlx.config.schema import EvalSampling
from rlx.config.schema_eval import EvalRoot
from rlx.paths import COMPLETE
from rlx.plan.make import make_plan
from rlx.polling import wait_for
from rlx.rollout.eval_results import METADATA
from rlx.runs.weights import initial_model, resolve

pytestmark = pytest.mark.slow


@functools.cache
def config_of(*overrides: str) -> EvalRoot:
    return compose(["dry_run=true", *overrides], {}, EVAL).cfg


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    """The directory of a run with the weights of steps 2 and 4, and with half of step 6."""
    composed = compose(["env=sums", "envs.sums.args.level=2", "seq_len=48", "sampling.max_tokens=9", "model.dtype=bfloat16", "seed=5"], {})
    root = tmp_path / "trained"
    for step in (2, 4, 6):
        (root / "weights" / f"step_{step}").mkdir(parents=True)
    for step in (2, 4):
        (root / "weights" / f"step_{step}" / COMPLETE).touch()
    (root / "config.yaml").write_text(composed.yaml)
    return root


# what is evaluated


def test_model_lengths_sampling_and_environments_are_those_of_the_run_unless_they_are_given(trained: Path) -> None:
    composed = compose([f"weights_dir={trained}", "sampling.max_tokens=7"], {}, EVAL)
    cfg = composed.cfg
    assert (cfg.seed, cfg.seq_len, cfg.model.dtype, cfg.sampling.max_tokens) == (5, 48, "bfloat16", 7)
    assert (list(cfg.envs), cfg.envs["sums"].args["level"], cfg.envs["sums"].split) == (["sums"], 2, "eval")
    assert list(config_of(f"weights_dir={trained}", "env=reverse_text").envs) == ["reverse_text"]
    with pytest.raises(ConfigError, match=r"model=tiny has no effect: the weights are those of .*, and its model is tiny"):
        config_of(f"weights_dir={trained}", "model=tiny")


def test_the_complete_steps_are_found_and_the_servers_start_from_the_runs_model(trained: Path) -> None:
    whole = config_of(f"weights_dir={trained}")
    cfg = replace(whole, eval_base=False)
    assert (resolve(cfg).versions, resolve(cfg).weights_dir) == ([2, 4], str(trained / "weights"))
    assert resolve(replace(cfg, weights_dir=str(trained / "weights"), steps=[4])).versions == [4]
    with pytest.raises(ConfigError, match=r"no complete step_6; it has 2, 4"):
        resolve(replace(whole, steps=[2, 6]))
    with pytest.raises(ConfigError, match=r"initial model of .* is gone"):
        resolve(whole)
    assert initial_model(resolve(cfg)) == str(trained / "weights" / "step_2"), "the shape is what the servers need"
    (trained / "initial_model.txt").write_text("some/hub-name\n")
    assert resolve(whole).versions == [0, 2, 4]
    assert initial_model(resolve(cfg)) == "some/hub-name"
    with pytest.raises(ConfigError, match="needs the weights that it chooses from"):
        resolve(replace(whole, weights_dir=None, steps=[1]))


def test_the_plan_has_servers_only_for_models_that_need_some(trained: Path, tmp_path: Path) -> None:
    cfg = config_of("env=sums", "rollouts_per_example=4")

    def roles(changed: EvalRoot) -> list[str]:
        return [spec.name for spec in make_plan(changed, tmp_path)]

    loaded = replace(cfg, model=replace(cfg.model, warm_start=None))
    assert roles(cfg) == ["prepare", "inference_0", "evaluator"]
    assert roles(replace(loaded, hardware=replace(cfg.hardware, inference_replicas=2))) == ["inference_0", "inference_1", "evaluator"]
    assert roles(replace(cfg, weights_dir=str(trained))) == ["inference_0", "evaluator"]
    assert roles(replace(loaded, inference=replace(cfg.inference, base_url=["http://there:1"]))) == ["evaluator"]
    assert roles(replace(loaded, client=replace(cfg.client, base_url="http://there/v1"))) == ["evaluator"]


def test_a_named_endpoint_gives_its_address_its_key_and_its_model(tmp_path: Path) -> None:
    file = tmp_path / "endpoints.yaml"
    file.write_text(yaml.safe_dump({"mine": {"base_url": "http://there/v1", "api_key_var": "MINE", "model": "big"}, "bad": {"url": "x"}}))
    cfg = config_of("env=sums", f"client.endpoints={file}", "client.endpoint=mine")
    assert (cfg.client.base_url, cfg.client.api_key_var, cfg.model.name) == ("http://there/v1", "MINE", "big")
    assert cfg.sampling.max_tokens == 4096, "not the tiny model's"
    for chosen, says in (("other", "has no endpoint other"), ("bad", "no other keys than base_url")):
        with pytest.raises(ConfigError, match=says):
            config_of("env=sums", f"client.endpoints={file}", f"client.endpoint={chosen}")


def test_mistakes_are_explained_before_anything_starts(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    endpoint = ["env=sums", "client.base_url=http://there/v1"]
    for line, parts in (
        (
            [*endpoint, "model.name=m", f"weights_dir={trained / 'weights' / '..' / 'weights'}", "inference.base_url=[http://here:1]"],
            ("the model would be in two places", "client.api_key_var=OPENAI_API_KEY (default)"),
        ),
        ([*endpoint, "model=tiny", "resume=3", "run.name=x"], ("no endpoint serves a model that rlx makes itself", "fix: resume=latest")),
        (["model=tiny", "model.name=org/model"], ("would only be a label", "there is no environment")),
        (["env=sums", "num_exampels=3", "max_steps=3"], ("Did you mean `num_examples`", "It is a key of `rlx train`")),
    ):
        with pytest.raises(ConfigError) as caught:
            compose(line, {}, EVAL)
        assert [part for part in parts if part not in str(caught.value)] == [], str(caught.value)


def test_a_directory_says_which_command_made_it(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "eval").mkdir()
    cfg = config_of("env=sums", "rollouts_per_example=4")
    (tmp_path / "eval" / "config.yaml").write_text(to_yaml(cfg))
    assert load_command(tmp_path / "eval") == cfg == load_run(tmp_path / "eval", EVAL)
    assert load_command(trained) == load_run(trained)
    with pytest.raises(ConfigError, match="is a directory of `rlx eval`"):
        load_run(tmp_path / "eval")
    assert main(["train", "--config-dir", str(tmp_path / "eval"), "--config-name", "config"]) == 2
    assert "is the configuration of `rlx eval`" in capsys.readouterr().err
    assert main(["eval", "--config-dir", str(trained), "--config-name", "config"]) == 2
    assert "is the configuration of `rlx train`" in capsys.readouterr().err
    again = compose(["--config-dir", str(tmp_path / "eval"), "--config-name", "config"], {}, EVAL)
    assert again.cfg == cfg


def test_seeds_are_those_of_evaluations_beside_training() -> None:
    cfg = config_of("env=sums", "rollouts_per_example=4")
    greedy = EvalSampling(temperature=0)
    cfg = replace(cfg, envs={"sums": replace(cfg.envs["sums"], sampling=greedy)})
    assert list(rollout_envs(cfg)) == ["eval_sums"]
    spec = evaluated(cfg)["sums"]
    assert (spec.sampling.temperature, spec.sampling.max_tokens, spec.rollouts_per_example, spec.num_examples) == (0, 12, 4, 128)


# the whole command


class Command:
    """One `rlx eval`, or another command that only plays."""

    def __init__(self, root: Path, *overrides: str, key: str = KEY, command: str = "eval") -> None:
        self.root, self.output = root, root.with_suffix(f".{time.monotonic_ns()}.out")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "rlx.cli", command, f"run.dir={root}", *overrides],
            cwd=root.parent,
            env=os.environ | {"HF_HUB_OFFLINE": "1", "THE_KEY": key},
            stdout=self.output.open("w"),
            stderr=subprocess.STDOUT,
        )

    @property
    def text(self) -> str:
        return self.output.read_text()

    def kill(self) -> None:
        """SIGKILL to all of its processes at once."""
        whole = [psutil.Process(self.process.pid), *psutil.Process(self.process.pid).children(recursive=True)]
        for process in whole:
            process.suspend()
        for process in whole:
            process.send_signal(signal.SIGKILL)
        psutil.wait_procs(whole, timeout=300)


@pytest.fixture
def api(tmp_path: Path) -> Iterator[Callable[[str], list[str]]]:
    """`api(mode)` starts an endpoint and returns the keys that name it."""
    started = []

    def begin(mode: str) -> list[str]:
        file = tmp_path / f"{mode}.url"
        started.append(subprocess.Popen([sys.executable, str(Path(__file__).parent / "api_stand_in.py"), str(file), mode]))
        wait_for(file.exists, "the address of the endpoint", 300)
        return [f"client.base_url={file.read_text()}", "client.api_key_var=THE_KEY", "model.name=m"]

    yield begin
    for process in started:
        process.kill()
        process.wait()


KEYS = ["env=reverse_text", "launcher.check_envs=false", "num_examples=12", "rollouts_per_example=2", "orchestrator.env_workers=0"]


@pytest.mark.long
def test_an_endpoint_that_is_full_or_fails_is_asked_again_and_one_that_is_slow_shows_progress(api, tmp_path: Path) -> None:
    flaky = Command(tmp_path / "flaky", *KEYS, *api("flaky"))
    assert flaky.process.wait(600) == 0, flaky.text
    (row,) = json.loads((tmp_path / "flaky/summary.json").read_text())["rows"]
    assert (row["avg@2"], row["error_frac"], row["examples"]) == (1.0, 0.0, 12)
    metadata = json.loads(next((tmp_path / "flaky").glob(f"eval/*/*/{METADATA}")).read_text())
    assert (metadata["model"], metadata["served_model"]) == ("m", "m-2026"), "what was asked for, and what answered"
    assert "1.000 [" in flaky.text
    slow = Command(tmp_path / "slow", *KEYS, *api("slow"), "num_examples=60", "orchestrator.max_concurrent=4")
    assert slow.process.wait(600) == 0, slow.text
    assert re.search(r"model: rollouts \d+/120 .* 4 in flight   ETA \d+:\d\d", slow.text), slow.text
    holds = [file for file in tmp_path.rglob("*") if file.is_file() and KEY.encode() in file.read_bytes()]
    assert holds == [], "no file has the key"


@pytest.mark.nightly
def test_an_endpoint_synthesizes_data(api, tmp_path: Path) -> None:
    made = Command(tmp_path / "made", *KEYS, "duplicates=keep", *api("flaky"), command="synthesize")
    assert made.process.wait(600) == 0, made.text
    rows = [json.loads(line) for line in (made.root / "data" / "train.jsonl").read_text().splitlines()]
    assert len(rows) == 24, "two answers to each of 12 examples"
    for row in rows:
        asked, answered = row["prompt"][-1]["content"], row["completion"][-1]["content"]
        assert (answered, row["reward"]) == (asked[::-1], 1.0)
    assert [file for file in made.root.rglob("*") if file.is_file() and KEY.encode() in file.read_bytes()] == [], "no file has the key"


@pytest.mark.long
def test_a_wrong_key_stops_at_once_and_an_endpoint_that_breaks_down_can_be_continued(api, tmp_path: Path) -> None:
    wrong = Command(tmp_path / "wrong", *KEYS, *api("slow"), key="not-the-key")
    assert wrong.process.wait(600) == 1
    assert "Incorrect API key provided: <secret>; its key is $THE_KEY (client.api_key_var)" in wrong.text, wrong.text
    assert "Traceback" not in wrong.text
    keys = [*KEYS, "client.max_retries=0", "orchestrator.max_retries=0"]
    down = Command(tmp_path / "down", *keys, *api("down"))
    assert down.process.wait(600) == 1
    assert "environment reverse_text:" in down.text
    assert "rollouts failed (orchestrator.max_error_rate=0.5; resume=latest goes on)" in down.text
    assert "resume=latest" in down.text


@pytest.mark.nightly
def test_all_weights_of_a_run_on_one_server_give_the_scores_of_its_own_evaluations_also_after_a_kill(start, tmp_path: Path) -> None:
    training = start(
        "run", "max_steps=20", "weight_broadcast.keep_last=20", "eval.interval=10", "eval.num_examples=24", "ckpt.interval=null"
    )
    assert training.wait() == 0, training.text()
    beside = {one["step"]: one["eval/reverse_text/avg@1"] for one in training.metrics("eval")}
    keys = [f"weights_dir={training.run_dir}", "steps=[10,20]", "num_examples=24"]
    whole = Command(tmp_path / "whole", *keys)
    assert whole.process.wait(600) == 0, whole.text
    records = {one["step"]: one for one in read_metrics(tmp_path / "whole")}
    assert {step: one["eval/reverse_text/avg@1"] for step, one in records.items()} == beside
    assert [records[step]["eval/attested"] for step in (10, 20)] == [1.0, 1.0]
    said = [json.loads((tmp_path / "whole/eval/reverse_text--tiny" / f"step_{n}" / METADATA).read_text())["weights"] for n in (10, 20)]
    assert said == [str(training.run_dir / "weights" / f"step_{step}") for step in (10, 20)]
    assert beside[20] > beside[0]
    killed = Command(tmp_path / "killed", *keys, "orchestrator.max_concurrent=1")
    file = tmp_path / "killed" / "eval" / "finished.jsonl"
    while not (file.exists() and len(file.read_bytes().splitlines()) >= 2):
        assert killed.process.poll() is None, killed.text
        time.sleep(0.01)
    killed.kill()
    for _ in range(100):  # the directory's lock is held until the reaper has ended the last process
        again = Command(tmp_path / "killed", *keys, "orchestrator.max_concurrent=1", "resume=latest")
        if (code := again.process.wait(600)) != 2:
            break
        time.sleep(1.0)
    assert code == 0, again.text
    assert (tmp_path / "killed" / "summary.csv").read_text() == (tmp_path / "whole" / "summary.csv").read_text()
    assert "rollouts are done already" in (tmp_path / "killed" / "logs" / "latest" / "evaluator.log").read_text()
