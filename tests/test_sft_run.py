"""`rlx sft` as a user runs it: a run, killed and resumed bit for bit, on two ranks, and what it refuses before anything starts."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rlx.cli import main
from rlx.config.load import compose, load_run
from rlx.config.roots import SFT
from rlx.config.schema import WarmStartConfig
from rlx.heartbeat import Heartbeat
from rlx.lock import FileLock
from rlx.metrics import read_metrics
from rlx.models import tiny
from rlx.paths import RunPaths
from rlx.roles.prepare import make
from rlx.train.warm_start import recipe

pytestmark = pytest.mark.slow

SHORT = ("seq_len=96", "data.batch_size=8", "scheduler.warmup_steps=2", "model=tiny_trained", "trainer.micro_batch_tokens=256")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Training and validation rows, and a small untrained model."""
    state = random.Random(0)
    words = ["".join(state.choices("abcdef", k=state.randint(3, 8))) for _ in range(60)]
    rows = [{"messages": [{"role": "user", "content": word}, {"role": "assistant", "content": word[::-1]}]} for word in words]
    rows += [{"prompt": word, "completion": word * 30} for word in words[:4]]  # longer than seq_len: left out
    for name, part in (("train", rows[:50] + rows[60:]), ("val", rows[50:60])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    tiny.save(tiny.build_model(WarmStartConfig(hidden_size=32, num_hidden_layers=2), 128), tiny.build_tokenizer(128), tmp_path / "model")
    return tmp_path


def command(data: Path, run: str, *more: str) -> list[str]:
    names = (f"data.name={data}/train.jsonl", f"val.name={data}/val.jsonl", "val.interval=2", f"model.name={data}/model")
    return [sys.executable, "-m", "rlx.cli", "sft", *names, *SHORT, f"run.dir={data}/{run}", *more]


def sft(data: Path, run: str, *more: str) -> subprocess.CompletedProcess:
    return subprocess.run(command(data, run, *more), capture_output=True, text=True, timeout=600, check=False)


def records(run: Path) -> list[dict[str, Any]]:
    """The reproducible part of the metrics."""
    found = [record for record, _ in read_metrics(run / "metrics.jsonl")]
    return [{k: v for k, v in record.items() if k != "time" and not k.startswith(("time/", "perf/"))} for record in found]


def scalars(run: Path, name: str) -> list[Any]:
    """One metric in the run's TensorBoard files."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    return events.Scalars(name)


def check_a_killed_run_goes_on_as(whole: Path, *steps: str) -> None:
    """Kill the same run behind its checkpoint of step 4, and resume it: metrics and weights are those of `whole`."""
    data = whole.parent
    killed = subprocess.Popen(command(data, "killed", *steps), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    deadline = time.monotonic() + 300
    while not list((data / "killed").glob("checkpoints/step_4/COMPLETE")):
        assert time.monotonic() < deadline
        assert killed.poll() is None
        time.sleep(0.005)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.wait()
    lock = FileLock(RunPaths(data / "killed").lock)
    assert lock.take(60), "the reaper ends what is left of the run"
    lock.close()
    shutil.rmtree(data / "killed" / "checkpoints" / "step_8", ignore_errors=True)  # if the run was faster than the signal
    again = sft(data, "killed", *steps, "resume=latest")
    assert again.returncode == 0, again.stdout + again.stderr
    assert json.loads((data / "killed" / "start.json").read_text())["step"] == 4, "the second attempt began at the checkpoint"
    assert json.loads((data / "killed" / "status.json").read_text())["attempt"] == 1
    assert records(data / "killed") == records(whole)
    one, other = ((data / run / "weights" / "step_8" / "COMPLETE").read_text() for run in ("whole", "killed"))
    assert one == other, "the same weights, by their checksums"


@pytest.mark.long
def test_a_killed_run_resumes_bit_for_bit_and_two_ranks_train_as_one(data: Path) -> None:
    steps = ("max_steps=8", "ckpt.interval=4")
    whole = sft(data, "whole", *steps, "logger=tensorboard")
    assert whole.returncode == 0, whole.stdout + whole.stderr
    assert "loss " in whole.stdout
    assert "samples longer than seq_len" in whole.stdout
    lines = records(data / "whole")
    assert [line["step"] for line in lines if line["source"] == "trainer"] == list(range(8))
    assert [line["step"] for line in lines if line["source"] == "val"] == [0, 2, 4, 6, 8]
    assert [event.step for event in scalars(data / "whole", "loss/total")] == list(range(8))
    assert [event.step for event in scalars(data / "whole", "val/loss")] == [0, 2, 4, 6, 8]
    assert sum(line.get("data/overlong", 0) for line in lines) > 0
    assert not any(name.startswith(("mismatch/", "off_policy/", "policy/ratio")) for line in lines for name in line)
    check_a_killed_run_goes_on_as(data / "whole", *steps)

    both = sft(data, "both", *steps, "hardware.trainer_processes=2", "ckpt.interval=null")
    assert both.returncode == 0, both.stdout + both.stderr
    for line, same in zip(records(data / "both"), lines, strict=True):
        assert line.pop("source") == same.pop("source")
        assert line == pytest.approx(same, rel=1e-4, abs=1e-6)
    model = AutoModelForCausalLM.from_pretrained(data / "both" / "weights" / "step_8")
    assert sum(p.numel() for p in model.parameters()) > 0
    assert load_run(data / "both", SFT).data.name == f"{data}/train.jsonl"


@pytest.mark.nightly
def test_versions_are_evaluated_beside_training_and_a_lost_evaluation_is_made_again(data: Path) -> None:
    keys = ("max_steps=6", "ckpt.interval=3", "val.name=null", "env=reverse_text", "eval.interval=3", "eval.num_examples=8")
    first = sft(data, "evaluated", *keys)
    assert first.returncode == 0, first.stdout + first.stderr
    assert "eval      reverse_text avg@1: " in first.stdout
    run = data / "evaluated"
    evaluated = [line for line in records(run) if line["source"] == "eval"]
    assert [line["step"] for line in evaluated] == [0, 3, 6]
    assert all(line["eval/reverse_text/examples"] == 8 for line in evaluated)
    assert sorted(folder.name for folder in (run / "weights").glob("step_*")) == ["step_3", "step_6"]

    metrics = run / "metrics.jsonl"  # as if the run had been killed before its last evaluations
    kept = [line for line in metrics.read_text().splitlines(keepends=True) if '"source": "eval"' not in line or '"step": 0,' in line]
    metrics.write_text("".join(kept))
    again = sft(data, "evaluated", *keys, "resume=latest")
    assert again.returncode == 0, again.stdout + again.stderr
    assert [line for line in records(run) if line["source"] == "eval"] == evaluated


@pytest.mark.long
def test_a_benchmark_measures_the_trainer_and_writes_no_weights(data: Path) -> None:
    keys = ("data=fake", "data.name=null", "val.name=null", "data.length=variable", "max_steps=5", "bench=true", "logger=tensorboard")
    done = sft(data, "bench", *keys)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "forward and backward" in done.stdout
    found = json.loads((data / "bench" / "bench.json").read_text())
    assert found["steps"] == 2
    assert found["tokens_per_second"] > 0
    assert found["tflops"] > 0
    assert [event.step for event in scalars(data / "bench", "loss/total")] == list(range(5))
    assert not list((data / "bench").glob("weights/step_*"))
    assert not list((data / "bench").glob("checkpoints/step_*"))


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (("data.name=none.jsonl",), "the data set does not exist: data.name=none.jsonl"),
        (("data.name=null",), "there is nothing to train on"),
        (("data=fake",), "random tokens come from no data set"),
        (("data.loss_mask.assistant=false",), "no message would be trained"),
        (("loss=grpo",), "no policy sampled these rows"),
        (("trainer.num_minibatches=2",), "a batch of rows is one optimizer step"),
        (("data.nam=x",), "Did you mean `data.name`"),
        (("reward.soft_overlong=true",), "It is a key of `rlx train`"),
        (("eval.interval=2",), "there is no environment to evaluate on: eval.interval=2"),
        (("env=sums",), "supervised training plays no environment, and there is no evaluation"),
        (
            ("data=fake", "data.name=null", "val.name=null", "data.epochs=2"),
            "data.epochs=2 counts passes over data sets",
        ),
        (("bench=true",), "and validates nothing: bench=true (command line), data.type=sft"),
        (
            ("data=fake", "data.name=null", "bench=true"),
            "and validates nothing: bench=true (command line), data.type=fake",
        ),
        (
            ("data=fake", "data.name=null", "val.name=null", "bench=true", "env=sums", "eval.interval=2"),
            "a benchmark evaluates nothing: bench=true (command line), eval.interval=2",
        ),
        (("env=sums", "eval.interval=2", "hardware=gpu2", "hardware.trainer_processes=2", "dry_run=true"), "the layout needs 3 GPUs"),
        (("val.name={data}/odd.jsonl",), r"val.name: row 0 of {data}/odd.jsonl (line 1) cannot be trained on: it needs `messages`"),
        (
            ("data.name={data}/seen.jsonl",),
            "row 1 of {data}/seen.jsonl (line 2) cannot be trained on: its column `images`",
        ),
    ],
)
def test_what_is_wrong_is_said_before_anything_starts(data: Path, keys: tuple[str, ...], said: str, capsys: pytest.CaptureFixture) -> None:
    (data / "odd.jsonl").write_text('{"text": "no conversation"}\n')
    (data / "seen.jsonl").write_text(
        "".join(json.dumps({"prompt": "a", "completion": "b", "images": seen}) + "\n" for seen in ([], ["x.png"]))
    )
    keys = tuple(key.format(data=data) for key in keys)
    assert main([*command(data, "run", *keys)[3:]]) == 2
    assert said.format(data=data) in " ".join(capsys.readouterr().err.split())
    assert not (data / "run").exists()


def test_a_dry_run_explains_the_step(data: Path, capsys: pytest.CaptureFixture) -> None:
    assert main([*command(data, "run", "dry_run=true", "max_steps=27")[3:]]) == 0
    said = capsys.readouterr().out
    assert "data.name: 54 rows" in said
    assert f"data (weight 1): {data}/train.jsonl, train" in said
    assert "at most 768 = 8 × seq_len 96" in said


def test_passes_over_the_data_make_the_steps(data: Path, capsys: pytest.CaptureFixture) -> None:
    assert main([*command(data, "run", "dry_run=true", "data.epochs=2", "data.batch_size=10")[3:]]) == 0
    assert "max_steps: 11\n" in capsys.readouterr().out, "54 rows twice, 10 a step"


def test_validation_on_rows_that_are_trained_on_is_said(data: Path, capsys: pytest.CaptureFixture) -> None:
    for val, seen in (("{data}/train.jsonl", True), ("{data}/tr*.jsonl", True), ("{data}/val.jsonl", False)):
        (data / "val.jsonl").write_text((data / "train.jsonl").read_text())
        assert main([*command(data, "run", "dry_run=true", f"val.name={val.format(data=data)}")[3:]]) == 0
        assert ("warning: data.name has the rows of val.name, too" in capsys.readouterr().out) == seen
    parts = ["data.split='train[10:]'", f"val.name={data}/train.jsonl", "val.split='train[:10]'"]
    assert main([*command(data, "run", "dry_run=true", *parts)[3:]]) == 0
    assert "warning: data.name" not in capsys.readouterr().out


def test_a_cluster_trains_on_all_its_gpus(data: Path, capsys: pytest.CaptureFixture) -> None:
    keys = (
        "launcher=slurm",
        "slurm=example",
        "hardware=node8x2",
        "model=qwen3_8b",
        "model.name=Qwen/Qwen3-8B",
        "seq_len=2048",
        "trainer.micro_batch_tokens=null",
        "val.name=null",
    )
    assert main([*command(data, "run", *keys, "dry_run=true")[3:]]) == 0
    said = capsys.readouterr().out
    assert said.count("FSDP2 over 16 ranks") == 16, "no evaluation, so no servers"
    assert "#SBATCH --nodes=2" in said


@pytest.mark.long
def test_a_sweep_trains_adapters_of_several_ranks(data: Path) -> None:
    done = sft(data, "sweep", "-m", "lora.rank=2,4", "max_steps=3", "val.name=null", "ckpt.interval=null")
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in (2, 4):
        (adapter,) = data.glob(f"sweep/*{rank}*/weights/step_3/adapter_config.json")
        assert json.loads(adapter.read_text())["r"] == rank


@pytest.mark.long
def test_the_warm_start_of_a_run_is_what_rlx_sft_makes_of_its_demonstrations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = [f"model.warm_start.{key}" for key in ("steps=6", "num_examples=200", "hidden_size=32", "intermediate_size=48", "head_dim=32")]
    cfg, prepared = compose(["env=reverse_text", *model]).cfg, tmp_path / "prepared"
    make(cfg, recipe(cfg), prepared, Heartbeat(RunPaths(tmp_path), "prepare"))

    root = Path(__file__).resolve().parent.parent
    monkeypatch.chdir(root)
    rows = tmp_path / "rows.jsonl"
    said = subprocess.run([sys.executable, "examples/demonstrations.py", str(rows), "env=reverse_text", *model], check=False, text=True)
    assert said.returncode == 0
    same = (
        "optim.lr=3e-3",
        "scheduler.warmup_steps=6",
        "max_steps=6",
        "data.batch_size=64",
        "seq_len=256",
        "trainer.micro_batch_tokens=4096",
    )
    run = [sys.executable, "-m", "rlx.cli", "sft", f"data.name={rows}", "model=tiny", *model, *same, f"run.dir={tmp_path}/run"]
    done = subprocess.run(run, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    one, other = (load_file(folder / "model.safetensors") for folder in (prepared, tmp_path / "run" / "weights" / "step_6"))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
