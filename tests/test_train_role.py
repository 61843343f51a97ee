"""The trainer role in its own process: batches in, metrics and versions out."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from in_ranks import in_ranks
from trainer_examples import make_model, make_samples, step_batch
from transformers import AutoModelForCausalLM

from rlx.config.load import compose, to_yaml
from rlx.data.scores import TokenScores, read_scores
from rlx.data.source import send
from rlx.heartbeat import read_heartbeats
from rlx.metrics import METRICS, read_metrics
from rlx.models.tiny import build_tokenizer
from rlx.paths import RunPaths
from rlx.weights.files import verify, versions

STEPS = 3
GROUPS = ("loss/", "policy/", "mismatch/", "optim/", "off_policy/")
TIMES = [
    "time/wait_batch",
    "time/forward_backward",
    "time/optimizer",
    "time/broadcast",
    "time/step",
    "perf/tokens_per_second",
    "perf/compute_frac",
]
SOMETIMES = ("loss/nll", "loss/perplexity", "loss/ce", "loss/<envs>/total")  # of supervised data, with `ce_coef`, with several objectives
ALWAYS = [name for name in METRICS if name.startswith(GROUPS) and name not in SOMETIMES] + TIMES


def make_run(root: Path, ranks: int = 1, **overrides: object) -> RunPaths:
    """A run directory with configuration, initial model and all batches, as launcher and orchestrator would leave it."""
    paths = RunPaths(root)
    keys = {
        "max_steps": STEPS,
        "hardware": "cpu",
        "loss": "gspo",
        "hardware.trainer_processes": ranks,
        "trainer.num_minibatches": 2,
        "seq_len": 60,  # also the length of a packed row
        "sampling.max_tokens": 32,
        "trainer.batch_timeout": 600,
        "ckpt.interval": "null",  # without an orchestrator no checkpoint would be completed
    }
    cfg = compose([f"{key}={value}" for key, value in (keys | overrides).items()], environ={}).cfg
    root.mkdir(parents=True)
    paths.config.write_text(to_yaml(cfg))
    model = root / "initial"
    make_model(tie_word_embeddings=True).save_pretrained(model)
    build_tokenizer(64).save_pretrained(model)
    paths.initial_model.write_text(f"{model}\n")
    for step in range(STEPS):
        samples = make_samples(seed=step)
        send(paths, step_batch(step, [samples[:8], samples[8:]]))
    return paths


def start(paths: RunPaths, ranks: int = 1) -> subprocess.Popen:
    role = ["-m", "rlx.roles.trainer", "--run-dir", str(paths.root)]
    many = in_ranks(ranks)
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    return subprocess.Popen(
        [sys.executable, *many, *role], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )


def finish(process: subprocess.Popen) -> str:
    try:
        output, _ = process.communicate(timeout=600)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    assert process.returncode == 0, output[-4000:]
    return output


def records(paths: RunPaths) -> list[dict]:
    return [record for record, _ in read_metrics(paths.metrics)]


def mean_over_updates(scores: TokenScores) -> float:
    """Mean entropy of the two mini-batches' tokens, each computed by the weights that it was trained from."""
    first = np.repeat(scores.samples < 8, scores.lengths)
    return float(np.mean([scores.entropy[part].mean(dtype=np.float64) for part in (first, ~first)]))


def reproducible(record: dict) -> dict:
    return {name: value for name, value in record.items() if not name.startswith(("time", "perf/"))}


@pytest.mark.slow
def test_a_run_of_the_role_writes_metrics_versions_and_is_reproducible(tmp_path):
    runs = [make_run(tmp_path / name) for name in ("one", "two")]
    for paths in runs:
        finish(start(paths))
    paths = runs[0]
    kernels = json.loads(paths.kernels.read_text())
    assert (kernels["logprob"], kernels["layers"]) == ("torch", "off: its kernels need CUDA, but this is cpu")
    assert "compute different policies" in kernels["warning"], (
        "the batches' log-probabilities are made up: nothing of this policy sampled them"
    )
    found = records(paths)
    assert [(record["step"], record["source"]) for record in found] == [(step, "trainer") for step in range(STEPS)]
    for record in found:
        assert not set(ALWAYS) - record.keys()
        assert not record.keys() - METRICS.keys() - {"step", "source", "time"}, "a metric is not documented"
        (scores,) = read_scores(paths, record["step"])
        assert len(scores.samples) == len(make_samples(seed=record["step"]))
        assert record["policy/entropy"] == pytest.approx(mean_over_updates(scores), rel=2e-3)
    assert not list(paths.batches.glob("*.batch")), "batches must be deleted once received"
    assert versions(paths.weights) == [1, 2, 3]
    assert verify(paths.weights_of(STEPS))["version"] == STEPS
    trained, initial = (AutoModelForCausalLM.from_pretrained(folder) for folder in (paths.weights_of(STEPS), tmp_path / "one" / "initial"))
    assert not torch.equal(trained.model.norm.weight, initial.model.norm.weight)
    assert read_heartbeats(paths)["trainer"]["phase"] == "done"
    assert list(map(reproducible, found)) == list(map(reproducible, records(runs[1])))
    manifests = [verify(run.weights_of(STEPS))["files"] for run in runs]
    assert manifests[0] == manifests[1], "bit for bit"


@pytest.mark.long
@pytest.mark.slow
def test_several_passes_with_recomputed_ratios_and_a_reference_that_follows(tmp_path):
    paths = make_run(
        tmp_path / "run",
        loss="grpo",
        **{
            "trainer.num_iterations": 2,
            "loss.proximal": "recompute",
            "loss.correction": "tis",
            "loss.kl.beta": 0.05,
            "loss.kl.target_kl": 0.01,
            "ref.sync_interval": 2,
            "ref.alpha": 1.0,
            "optim.lr": 1e-2,
            "scheduler.warmup_steps": 0,
        },
    )
    output = finish(start(paths))
    found = records(paths)
    assert "optimizer step 4 of 4" in read_heartbeats(paths)["trainer"]["phase"] or "done" in read_heartbeats(paths)["trainer"]["phase"]
    assert "step 1: the reference moved towards the policy with weight 1" in output
    for record in found:
        assert record["policy/ratio_max"] - record["policy/ratio_min"] > 1e-3, "ratios move away from 1 within the step"
        assert record["ref/kl"] > 0
        assert record["loss/kl"] > 0
    assert found[2]["ref/kl"] < found[1]["ref/kl"], "after two steps the reference equals the policy of that time"
    assert len({record["ref/beta"] for record in found}) == 3


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(
    "key", ["trainer.tp", *(pytest.param(key, marks=pytest.mark.nightly) for key in ("trainer.dp_replicate", "trainer.cp"))]
)
def test_two_ranks_train_like_one_however_they_divide_the_work(tmp_path, key):
    keys: dict = {"loss": "grpo", "loss.kl.beta": 0.05, "trainer.num_iterations": 2, "loss.proximal": "recompute"}
    one, two = make_run(tmp_path / "one", **keys), make_run(tmp_path / "two", ranks=2, **keys, **{key: 2})
    finish(start(one))
    finish(start(two, ranks=2))
    for a, b in zip(records(one), records(two), strict=True):
        for name, value in reproducible(a).items():
            if name != "source":
                assert b[name] == pytest.approx(value, rel=1e-3, abs=1e-5), name
        assert len(read_scores(two, a["step"])) == (2 if key == "trainer.dp_replicate" else 1), "one of each rank with samples of its own"
        (whole,) = read_scores(one, a["step"])
        if key != "trainer.dp_replicate":
            (scores,) = read_scores(two, a["step"])
            assert np.array_equal(scores.samples, whole.samples)
            np.testing.assert_allclose(scores.entropy.astype(float), whole.entropy.astype(float), atol=4e-3)  # of 16 bits


@pytest.mark.slow
def test_a_number_that_is_not_finite_stops_the_role_with_a_reason(tmp_path):
    paths = make_run(tmp_path / "run")
    samples = make_samples()
    samples[0].advantages[samples[0].loss_mask] = float("nan")
    send(paths, step_batch(1, [samples]))
    process = start(paths)
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 1
    assert "NotFiniteError: optimizer step 2: the loss is nan" in output
    assert versions(paths.weights) == [1]


@pytest.mark.slow
def test_sigterm_ends_the_waiting_role(tmp_path):
    paths = make_run(tmp_path / "run")
    paths.batches.joinpath("step_000001.batch").unlink()
    process = start(paths)
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline and "waiting for batch 1" not in json.dumps(read_heartbeats(paths)):
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 143, output[-2000:]
